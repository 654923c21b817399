"""What `cost_models.py` compares with: models that see the tokens as one flat vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewright.cost.forest import flat_rows
from tilewright.dataset.tables import Table


def _targets(table: Table) -> np.ndarray:
    found = table.residuals
    return found - np.nanmean(found)


def trees(kind: str, training: Sequence[Table], tests: Sequence[Table], seed: int) -> list[np.ndarray]:
    import lightgbm

    rows = [flat_rows(table.tokens)[table.known] for table in training]
    common: dict[str, Any] = {
        "verbose": -1,
        "num_threads": 1,
        "max_bin": 63,
        "seed": seed,
        "learning_rate": 0.05,
        "num_leaves": 31,
    }
    if kind == "LambdaRank":
        labels = [
            np.floor(31 * np.exp(np.nanmin(np.log(t.seconds)) - np.log(t.seconds[t.known]))) for t in training
        ]
        options = {**common, "objective": "lambdarank", "label_gain": list(range(32))}
        given = [
            np.hstack([r, t.base[t.known][:, None] - t.base.mean()])
            for r, t in zip(rows, training, strict=True)
        ]
        data = lightgbm.Dataset(
            np.concatenate(given),
            np.concatenate(labels), group=[len(each) for each in labels],
        )  # fmt: skip
        grown = lightgbm.train(options, data, 300)
        return [
            -np.asarray(grown.predict(np.hstack([flat_rows(t.tokens), t.base[:, None] - t.base.mean()])))
            for t in tests
        ]
    data = lightgbm.Dataset(np.concatenate(rows), np.concatenate([_targets(t)[t.known] for t in training]))
    grown = lightgbm.train({**common, "objective": "huber", "alpha": 0.25, "min_data_in_leaf": 20}, data, 300)
    return [t.base + grown.predict(flat_rows(t.tokens)) for t in tests]


def perceptron(
    training: Sequence[Table], tests: Sequence[Table], seed: int, device: str, steps: int
) -> list[np.ndarray]:
    import torch

    torch.manual_seed(seed)
    rows = np.concatenate([flat_rows(table.tokens)[table.known] for table in training])
    targets = np.concatenate([_targets(t)[t.known] for t in training])
    mean, scale = rows.mean(axis=0), 1 / np.maximum(rows.std(axis=0), 0.05)
    x = torch.tensor((rows - mean) * scale, dtype=torch.float32, device=device).clamp(-5, 5)
    y = torch.tensor(targets, dtype=torch.float32, device=device)
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    ).to(device)  # fmt: skip
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
        at = torch.randint(len(x), (512,), device=device)
        loss = torch.nn.functional.huber_loss(net(x[at])[:, 0], y[at], delta=0.25)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = []
    with torch.no_grad():
        for table in tests:
            given = torch.tensor(
                (flat_rows(table.tokens) - mean) * scale, dtype=torch.float32, device=device
            ).clamp(-5, 5)
            found.append(table.base + net(given)[:, 0].cpu().numpy())
    return found
