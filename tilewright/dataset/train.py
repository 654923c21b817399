"""Train the network of `cost/network.py` on tables, with PyTorch.

A step takes a few tables and a part of the configs of each. The loss has three parts: LambdaRank, which is about the
order of the configs of one task, above all of the fast ones; a Huber loss of the residual, up to a constant for each
task, and a little of the constant itself; and the cross entropy of failures. Each member weighs the tables differently,
so that members differ where few tables say the same.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.cost.forest import PREFIX
from tilewright.cost.network import (
    HEADS,
    LAYERS,
    LEVELS,
    MEMBERS,
    SINGLE,
    STATEMENT,
    WIDTH,
    AttentionNetwork,
    shapes,
)
from tilewright.cost.tokens import Tokens, joined
from tilewright.dataset.forest import TREES, grow
from tilewright.dataset.tables import Table
from tilewright.errors import DatasetError, MissingDependencyError

_SHARP = 4.0  # factor from log seconds to scores of a ranking
_HUBER = 0.25
_SHRUNK = ("member.w2", "member.b2")  # the last layer of each member


@dataclass(frozen=True)
class TrainingSettings:
    steps: int = 300
    tables: int = 8  # of a step
    configs: int = 24  # of a table in a step
    rate: float = 1.5e-3
    decay: float = 0.2
    dropout: float = 0.25  # of tokens of knobs
    ranking: float = 1.0
    absolute: float = 0.05
    averaged: float = 0.99  # of the running average of the weights, which is what is kept
    shrunk: float = 0.6  # share of the residual that is believed on tasks that were not learned from
    seed: int = 0
    levels: tuple[str, ...] = LEVELS
    residual: bool = True  # over the analytical prediction; otherwise the log time itself
    trees: int = TREES  # that the network is averaged with; 0: none


def train(
    tables: Sequence[Table],
    settings: TrainingSettings = TrainingSettings(),
    *,
    start: Mapping[str, np.ndarray] | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, np.ndarray]:
    """The trained tensors of a network and its trees. `start`: those of a network to continue from, with new trees."""
    torch = _torch()
    if not tables:
        raise DatasetError("there is nothing to learn from: no task has four measured configs")
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    made = (
        normalisation([table.tokens for table in tables], settings.levels)
        if start is None
        else {name: tensor for name, tensor in start.items() if not name.startswith(PREFIX)}
    )
    if start is None:
        made |= initial(settings.seed, settings.levels)
    elif settings.residual:
        made |= {name: made[name] / np.float32(settings.shrunk) for name in _SHRUNK}
    fixed = {name: _tensor(torch, made[name], device) for name in made if name.startswith("norm.")}
    learned = {
        name: _tensor(torch, made[name], device).requires_grad_()
        for name in made
        if not name.startswith("norm.")
    }
    data = _Data(torch, tables, settings, device)
    # Small tables count less than large ones, and families with few tables more than others.
    weights = _draws(tables)
    beliefs = rng.exponential(1.0, (MEMBERS, len(tables))).clip(0.2, 3.0)
    loop = _Loop(torch, data, {**fixed, **learned}, list(learned.values()), settings, device)
    begin = time.monotonic()
    for step in range(settings.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        chosen = rng.choice(len(tables), min(settings.tables, len(tables)), replace=False, p=weights)
        rows, there = data.drawn(rng, chosen.tolist())
        loss = loop.step(settings.rate * cosine * min(1.0, (step + 1) / 30), rows, there, beliefs[:, chosen])
        if step % 250 == 249:
            say(f"step {step + 1}: loss {float(loss.detach()):.4f}, {time.monotonic() - begin:.0f} s")
    kept = dict(zip(learned, loop.averages, strict=True))
    found = {name: tensor.detach().cpu().numpy() for name, tensor in {**fixed, **kept}.items()}
    if settings.residual:
        for name in _SHRUNK:
            found[name] = found[name] * np.float32(settings.shrunk)
    return found | grow(tables, settings.seed, settings.trees).tensors() if settings.trees else found


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(
            "training a cost model needs PyTorch, which is in the extra torch",
            remedy="pip install 'tilewright[torch]'",
        ) from None
    return torch


def _tensor(torch: Any, values: np.ndarray, device: str) -> Any:
    return torch.tensor(np.asarray(values, np.float32), device=device)


def _draws(tables: Sequence[Table]) -> np.ndarray:
    counts: dict[tuple[str, str], int] = {}
    for table in tables:
        counts[table.family, table.machine] = counts.get((table.family, table.machine), 0) + 1
    found = np.array([math.sqrt(min(len(t.configs), 100) / counts[t.family, t.machine]) for t in tables])
    return np.asarray(found / found.sum())


# -- the network ------------------------------------------------------------------------------------------------------


def normalisation(parts: Sequence[Tokens], levels: Sequence[str] = LEVELS) -> dict[str, np.ndarray]:
    """The means and inverse standard deviations of the features of each level."""
    found = {}
    for level in (*LEVELS, STATEMENT) if STATEMENT in levels else LEVELS:
        name = {"knob": "knobs", STATEMENT: "statements"}.get(level, level)
        rows = np.concatenate([_valid(part, level, getattr(part, name)) for part in parts])
        width = rows.shape[-1]
        mean = rows.mean(axis=0) if len(rows) else np.zeros(width)
        deviation = rows.std(axis=0) if len(rows) else np.zeros(width)
        found[f"norm.{level}.mean"] = np.asarray(mean, np.float32)
        found[f"norm.{level}.scale"] = np.where(
            deviation > 1e-3, 1 / np.maximum(deviation, 0.05), 0.0
        ).astype(np.float32)
    return found


def _valid(part: Tokens, level: str, values: np.ndarray) -> np.ndarray:
    if level == "knob":
        return values[part.knob_mask]
    return values[part.statement_mask] if level == STATEMENT else values


def initial(seed: int, levels: Sequence[str] = LEVELS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(levels).items():
        if name.startswith("norm."):
            continue
        last = name.rpartition(".")[2]
        if last.startswith("gain"):
            found[name] = np.ones(shape, np.float32)
        elif (
            last in ("b1", "b2", "b", "qkv_b", "out_b", "f1_b", "f2_b", "shift", "shift1", "shift2")
            or name == "valid.w"
        ):
            found[name] = np.zeros(shape, np.float32)
        else:
            inputs = shape[-2] if len(shape) > 1 else shape[0]
            scale = {"knob.table": 0.3, "knob.linear": 0.3, "member.w2": 0.05}.get(
                name, math.sqrt(2.0 / inputs)
            )
            found[name] = rng.normal(0.0, scale, shape).astype(np.float32)
    found["valid.b"] = np.full(1, 3.0, np.float32)
    return found


def forward(
    torch: Any, w: Mapping[str, Any], batch: Mapping[str, Any], levels: Sequence[str]
) -> tuple[Any, Any]:
    """(each member's prediction, score of validity) for a batch: the network of `cost/network.py`, without the tokens
    that it masks."""
    count = len(batch["terms"])
    parts, masks = [], []
    attended = [
        level for level in SINGLE if level in levels or level == "terms"
    ]  # its vector is used in any case
    for level in attended:
        parts.append(_two_layers(torch, w, level, batch[level])[:, None])
        masks.append(torch.full((count, 1), level in levels, device=batch["terms"].device))
    if "knob" in levels:
        knobs = (batch["knobs"] - w["norm.knob.mean"]) * w["norm.knob.scale"]
        # One look-up of both: the gradient of indexing takes several times longer.
        rows = torch.cat([w["knob.table"][:, None], w["knob.linear"]], 1)
        chosen = torch.nn.functional.embedding(batch["buckets"], rows.flatten(1)).unflatten(2, rows.shape[1:])
        given = torch.nn.functional.pad(knobs, (1, 0), value=1.0)
        parts.append((given[:, :, None] @ chosen)[:, :, 0])
        masks.append(batch["knob_mask"])
    if batch["statements"].shape[1] and STATEMENT in levels:
        parts.append(_two_layers(torch, w, STATEMENT, batch["statements"]))
        masks.append(batch["statement_mask"])
    vectors, mask = torch.cat(parts, 1), torch.cat(masks, 1)
    for number in range(LAYERS):
        layer = f"layer{number}"
        normal = torch.nn.functional.layer_norm(vectors, (WIDTH,), w[f"{layer}.gain1"], w[f"{layer}.shift1"])
        length = vectors.shape[1]
        qkv = (normal @ w[f"{layer}.qkv"] + w[f"{layer}.qkv_b"]).view(count, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        mixed = torch.softmax(scores, -1) @ value
        mixed = mixed.permute(0, 2, 1, 3).reshape(count, length, WIDTH)
        vectors = vectors + mixed @ w[f"{layer}.out"] + w[f"{layer}.out_b"]
        normal = torch.nn.functional.layer_norm(vectors, (WIDTH,), w[f"{layer}.gain2"], w[f"{layer}.shift2"])
        hidden = torch.relu(normal @ w[f"{layer}.f1"] + w[f"{layer}.f1_b"])
        vectors = vectors + hidden @ w[f"{layer}.f2"] + w[f"{layer}.f2_b"]
    vectors = torch.nn.functional.layer_norm(vectors, (WIDTH,), w["final.gain"], w["final.shift"])
    weights = mask.float()
    mean = (vectors * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    embedding = torch.cat([mean, vectors[:, attended.index("terms")]], 1)
    hidden = torch.relu(torch.einsum("nd,mdh->mnh", embedding, w["member.w1"]) + w["member.b1"][:, None])
    members = torch.einsum("mnh,mh->mn", hidden, w["member.w2"]) + w["member.b2"][:, None]
    return members, embedding @ w["valid.w"] + w["valid.b"]


def _two_layers(torch: Any, w: Mapping[str, Any], level: str, values: Any) -> Any:
    normal = ((values - w[f"norm.{level}.mean"]) * w[f"norm.{level}.scale"]).clamp(-5.0, 5.0)
    hidden = torch.relu(normal @ w[f"{level}.w1"] + w[f"{level}.b1"])
    return hidden @ w[f"{level}.w2"] + w[f"{level}.b2"]


# -- steps ------------------------------------------------------------------------------------------------------------


class _Loop:
    """The training steps. On a GPU, the first few steps run normally and later ones as one CUDA graph: launching
    hundreds of small kernels one by one would take ten times as long."""

    _EAGER = 4  # steps before the graph

    def __init__(
        self,
        torch: Any,
        data: _Data,
        w: Mapping[str, Any],
        learned: list[Any],
        settings: TrainingSettings,
        device: str,
    ) -> None:
        self._torch, self._data, self._w, self._learned, self._settings = torch, data, w, learned, settings
        self._on_gpu = device.startswith("cuda")
        count = min(settings.tables, data.tables)
        shape = count, settings.configs
        self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self._there = torch.zeros(shape, dtype=torch.bool, device=device)
        self._beliefs = torch.zeros((MEMBERS, count), dtype=torch.float32, device=device)
        rate = torch.tensor(settings.rate, device=device) if self._on_gpu else settings.rate
        self._optimiser = torch.optim.AdamW(
            learned,
            lr=rate,
            weight_decay=settings.decay,
            capturable=self._on_gpu,
            fused=True if not self._on_gpu else None,
        )
        self.averages = [each.detach().clone() for each in learned]
        self._graph: Any = None
        self._loss: Any = None
        self._done = 0

    def step(self, rate: float, rows: np.ndarray, there: np.ndarray, beliefs: np.ndarray) -> Any:
        torch = self._torch
        self._rows.copy_(torch.from_numpy(rows))
        self._there.copy_(torch.from_numpy(there))
        self._beliefs.copy_(torch.from_numpy(beliefs))
        for group in self._optimiser.param_groups:
            if self._on_gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._done += 1
        if self._graph is not None:
            self._graph.replay()
        elif self._on_gpu and self._done <= self._EAGER:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run()
            torch.cuda.current_stream().wait_stream(side)
        elif self._on_gpu:
            self._optimiser.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
            self._graph = graph
            graph.replay()
        else:
            self._run()
        return self._loss

    def _run(self) -> None:
        torch = self._torch
        batch = self._data.batch(self._rows, self._there)
        self._loss = _loss(torch, self._w, batch, self._beliefs, self._settings)
        self._optimiser.zero_grad(set_to_none=True)
        self._loss.backward()
        torch.nn.utils.clip_grad_norm_(self._learned, 1.0)
        self._optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self._learned, 1 - self._settings.averaged)


# -- data -------------------------------------------------------------------------------------------------------------


class _Data:
    """All tables on the device, and batches of (tables, configs) from them."""

    @property
    def tables(self) -> int:
        return len(self._spans)

    def __init__(self, torch: Any, tables: Sequence[Table], settings: TrainingSettings, device: str) -> None:
        self._torch, self._settings, self._device = torch, settings, device
        whole = joined([table.tokens for table in tables])
        self._arrays = {
            name: torch.tensor(np.ascontiguousarray(getattr(whole, name)), device=device)
            for name in ("task", "machine", "terms", "instruction", "knobs", "buckets", "knob_mask")
        }
        for name in ("statements", "statement_mask"):
            self._arrays[name] = torch.tensor(np.ascontiguousarray(getattr(whole, name)), device=device)
        base = np.concatenate([t.base for t in tables])
        logs = np.log(np.concatenate([np.nan_to_num(t.seconds, nan=1.0) for t in tables]))
        known = np.concatenate([t.known for t in tables])
        if not settings.residual:  # the same scale for all tasks: relative to the mean of each
            base = np.concatenate([np.full(len(t.base), np.nanmean(np.log(t.seconds))) for t in tables])
        self._base = torch.tensor(base, dtype=torch.float32, device=device)
        self._logs = torch.tensor(logs, dtype=torch.float32, device=device)
        self._known = torch.tensor(known, device=device)
        ends = np.cumsum([len(t.configs) for t in tables])
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))

    def drawn(self, rng: np.random.Generator, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(rows, mask): the configs of these tables that a step uses."""
        each = self._settings.configs
        rows = np.zeros((len(chosen), each), np.int64)
        there = np.zeros((len(chosen), each), bool)
        for at, number in enumerate(chosen):
            begin, end = self._spans[number]
            drawn = rng.permutation(np.arange(begin, end))[:each]
            rows[at, : len(drawn)], there[at, : len(drawn)] = drawn, True
        return rows, there

    def batch(self, rows: Any, there: Any) -> dict[str, Any]:
        torch, flat = self._torch, rows.view(-1)
        found = {name: array[flat] for name, array in self._arrays.items()}
        if self._device == "cpu":  # a CUDA graph needs the same shapes in all steps
            longest = int(found["knob_mask"].sum(1).max())
            found |= {name: found[name][:, :longest] for name in ("knobs", "buckets", "knob_mask")}
        kept = torch.rand(found["knob_mask"].shape, device=self._device) >= self._settings.dropout
        found["knob_mask"] = found["knob_mask"] & kept
        found["base"] = self._base[flat].view(rows.shape)
        found["logs"] = self._logs[flat].view(rows.shape)
        found["there"] = there
        found["known"] = self._known[flat].view(rows.shape) & there
        return found


# -- losses -----------------------------------------------------------------------------------------------------------


def _loss(
    torch: Any, w: Mapping[str, Any], batch: Mapping[str, Any], beliefs: Any, settings: TrainingSettings
) -> Any:
    members, valid = forward(torch, w, batch, settings.levels)
    shape = batch["logs"].shape
    members = members.view(MEMBERS, *shape)
    known = batch["known"].float()
    residuals = batch["logs"] - batch["base"]
    best = torch.where(batch["known"], batch["logs"], torch.inf).min(1, keepdim=True).values
    gain = torch.exp(best - batch["logs"]) * known  # share of the best speed
    predicted = batch["base"] + members if settings.residual else members
    ranking = _lambda_rank(torch, predicted, batch["logs"], gain, batch["known"])
    count = known.sum(1).clamp(min=1.0)
    weight = known * (0.25 + gain)
    error = (members - residuals) * known
    shift = (error * weight).sum(2, keepdim=True) / weight.sum(1)[None, :, None].clamp(min=1e-6)
    relative = (_huber(torch, error - shift) * weight).sum(2) / count
    absolute = _huber(torch, shift[..., 0])
    total = settings.ranking * ranking + relative + settings.absolute * absolute
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(
        valid.view(shape), batch["known"].float(), reduction="none"
    )
    failures = (entropy * batch["there"]).sum() / batch["there"].sum()
    return (total * beliefs).mean() + 0.1 * failures


def _huber(torch: Any, error: Any) -> Any:
    size = error.abs()
    return torch.where(size < _HUBER, 0.5 * error**2 / _HUBER, size - 0.5 * _HUBER)


def _lambda_rank(torch: Any, predicted: Any, logs: Any, gain: Any, known: Any) -> Any:
    """The ranking loss (members, tables): pairs of configs in the wrong order, weighted by the change of the discounted
    gain if they were exchanged."""
    with torch.no_grad():
        order = torch.where(known, predicted, torch.inf).argsort(2).argsort(2).float()
        discount = 1 / torch.log2(2 + order)
        change = (gain[:, :, None] - gain[:, None, :]).abs()[None] * (
            discount[:, :, :, None] - discount[:, :, None, :]
        ).abs()
        faster = ((logs[:, :, None] < logs[:, None, :]) & known[:, :, None] & known[:, None, :])[None]
        pairs = change * faster
    difference = predicted[:, :, :, None] - predicted[:, :, None, :]  # negative if the order is right
    lost = torch.nn.functional.softplus(_SHARP * difference) * pairs
    return lost.sum((2, 3)) / (pairs.sum((2, 3)) + 1e-3)


def predicted(tensors: Mapping[str, np.ndarray], table: Table, settings: TrainingSettings) -> np.ndarray:
    """The logarithm of a table's predicted seconds over the probability to work; up to a constant if `residual` is
    off."""
    out = AttentionNetwork(tensors, settings.levels)(table.tokens)
    members = out.members.mean(axis=0) - np.log(np.clip(out.valid / out.valid.max(), 1e-3, 1.0))
    return np.asarray(table.base + members if settings.residual else members)


def tasks_of(tables: Sequence[Table]) -> int:
    """The number of distinct tasks: a task has a table for each machine and number of threads."""
    return len({(table.job.text, table.job.constants, table.job.numerics) for table in tables})


def about(tables: Sequence[Table], files: Sequence[Path], steps: int, seed: int) -> dict[str, str]:
    """A description of the data that weights were trained on, for their card. `files`: what the tables are from."""
    from tilewright.support.version import VERSION

    machines = sorted({f"{table.job.machine.describe()} [{table.machine}]" for table in tables})
    days = [day for table in tables for day in table.days if day] or ["unknown"]
    return {
        "tilewright": VERSION,
        "tasks": str(tasks_of(tables)),
        "tables": str(len(tables)),
        "configs": str(sum(len(table.configs) for table in tables)),
        "machines": "; ".join(machines),
        "measured": f"{min(days)} to {max(days)}",
        "data": ", ".join(
            f"{file.name} sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files
        ),
        "families": ", ".join(sorted({table.family for table in tables})),
        "steps": str(steps),
        "seed": str(seed),
    }
