"""The attention model: as PyTorch computes it, adapting without forgetting, and going on if its weights are bad."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.cost.tables import tables
from tilewright.cost import models, weights
from tilewright.cost.analytical import Analytical
from tilewright.cost.attention import Adaptation, Attention, network, portfolio
from tilewright.cost.boosted import Experience
from tilewright.cost.model import CostModel
from tilewright.cost.models import cost_model_named
from tilewright.cost.network import LEVELS, MEMBERS, STATEMENT, AttentionNetwork, parameters, shapes
from tilewright.cost.tokens import Tokeniser, joined
from tilewright.dataset.tasks import F32, gemm
from tilewright.dataset.train import forward, initial, normalisation
from tilewright.errors import CostModelWarning, WeightsError
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.template import Work
from tilewright.testing import CostModelSuite


class TestConformance(CostModelSuite):
    def make(
        self, candidates: Candidates, threads: int, seed: int, experience: Sequence[Experience]
    ) -> CostModel:
        return Attention(candidates, threads, seed=seed, warm=experience)


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    return Candidates.of(Work(gemm(96, 128, 64, "relu", F32), host()), sketches=False)


def some_tensors(seed: int = 0, levels: Sequence[str] = LEVELS) -> dict[str, np.ndarray]:
    made = Candidates.of(Work(gemm(64, 64, 64, "none", F32), host()), sketches=False)
    tokens = Tokeniser(Analytical(made, 1)).tokens(made.sample(Random(0), 20))
    tensors = normalisation([tokens], levels) | initial(seed, levels)
    rng = np.random.default_rng(seed)
    return {
        name: value + (rng.normal(0, 0.02, value.shape).astype(np.float32) if "norm" not in name else 0)
        for name, value in tensors.items()
    }


def saved(folder: Path, **about: str) -> Path:
    path = folder / "weights.safetensors"
    weights.save(path, some_tensors(), about)
    return path


# -- the network ------------------------------------------------------------------------------------------------------


def test_it_has_between_100_and_200_thousand_parameters() -> None:
    assert 100_000 <= parameters() <= 200_000


@pytest.mark.parametrize("levels", [LEVELS, ("terms", "knob"), (*LEVELS, STATEMENT)])
def test_numpy_computes_what_pytorch_does(candidates: Candidates, levels: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    tokens = Tokeniser(Analytical(candidates, 1)).tokens(candidates.sample(Random(1), 30))
    other = tables()[0]
    model = Analytical(other.candidates, other.threads)
    mixed = joined([tokens, Tokeniser(model, statements=True).tokens(other.configs[:10])])
    tensors = some_tensors(levels=levels)
    out = AttentionNetwork(tensors, levels)(mixed)
    batch = {
        name: torch.tensor(np.ascontiguousarray(getattr(mixed, name))) for name in mixed.__dataclass_fields__
    }
    members, valid = forward(
        torch, {n: torch.tensor(t, dtype=torch.float32) for n, t in tensors.items()}, batch, levels
    )
    np.testing.assert_allclose(out.members, members.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(out.valid, torch.sigmoid(valid).numpy(), rtol=1e-3, atol=1e-4)


def test_the_order_of_candidates_and_their_company_do_not_matter(candidates: Candidates) -> None:
    configs = candidates.sample(Random(2), 200)
    net, tokeniser = AttentionNetwork(some_tensors()), Tokeniser(Analytical(candidates, 1))
    alone = np.concatenate([net(tokeniser.tokens([config])).members for config in configs[:5]], axis=1)
    together = net(tokeniser.tokens(configs)).members
    np.testing.assert_allclose(alone, together[:, :5], rtol=1e-4, atol=1e-5)
    backwards = net(tokeniser.tokens(configs[::-1])).members[:, ::-1]
    np.testing.assert_allclose(backwards, together, rtol=1e-4, atol=1e-5)


def test_attention_over_tokens_is_a_distribution(candidates: Candidates) -> None:
    tokens = Tokeniser(Analytical(candidates, 1)).tokens(candidates.sample(Random(2), 5))
    found = AttentionNetwork(some_tensors()).attention(tokens)
    np.testing.assert_allclose(found.sum(axis=1), 1.0, rtol=1e-4)


# -- adapting ---------------------------------------------------------------------------------------------------------


def test_it_learns_what_is_wrong_and_keeps_what_is_right(candidates: Candidates) -> None:
    configs = [config for config in candidates.sample(Random(3), 150) if config.template == "contraction"]
    model = Attention(candidates, 1)
    before = model.predict(configs).seconds
    values = np.array([int(config.values[0][1]) for config in configs])
    slow = values > np.median(values)
    truth = before * np.where(slow, 1.8, 1.0)
    model.update([Outcome(config, float(t)) for config, t in zip(configs[:40], truth[:40], strict=True)])
    after = model.predict(configs).seconds
    error_before = np.std(np.log(before / truth)[40:])
    assert np.std(np.log(after / truth)[40:]) < 0.7 * error_before


def test_the_seed_of_the_registered_model_counts(candidates: Candidates) -> None:
    configs = candidates.sample(Random(3), 60)
    rng = np.random.default_rng(0)
    outcomes = [Outcome(config, 1e-4 * float(rng.uniform(1, 3))) for config in configs[:50]]

    def predicted(seed: int) -> np.ndarray:
        model = cost_model_named("attention")(candidates, 1, seed, ())
        model.update(outcomes)
        return model.predict(configs).seconds

    np.testing.assert_array_equal(predicted(1), predicted(1))
    assert (predicted(1) != predicted(2)).any()


def test_times_that_are_no_numbers_are_left_out(candidates: Candidates) -> None:
    configs = candidates.sample(Random(4), 12)
    model, other = Attention(candidates, 1), Attention(candidates, 1)
    model.update(
        [
            Outcome(config, value)
            for config, value in zip(configs, [math.nan, math.inf, -1.0, 0.0] * 3, strict=True)
        ]
    )
    np.testing.assert_allclose(model.predict(configs).seconds, other.predict(configs).seconds)


def test_a_round_of_adapting_takes_seconds_at_most(candidates: Candidates) -> None:
    configs = candidates.sample(Random(5), 300)
    seconds = []
    for _ in range(3):  # the least: other processes slow the rest
        model = Attention(candidates, 1)
        model.predict(configs)
        model.update([Outcome(config, 1e-4 * (1 + at % 7)) for at, config in enumerate(configs[:256])])
        begin = time.process_time()
        model.predict(configs)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 3.0  # the goal is 0.5, which a loaded machine does not reach


def test_similar_errors_are_corrected_and_none_are_invented() -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(40, 6))
    errors = 0.5 * (embedding[:, 0] > 0) - 0.25
    found = Adaptation.of(embedding, errors, np.ones(40), np.ones(40, bool))
    fresh = rng.normal(size=(200, 6))
    said, deviation = found.correction(fresh)
    assert np.corrcoef(said, fresh[:, 0] > 0)[0, 1] > 0.6 and (deviation > 0).all()
    right = Adaptation.of(embedding, np.zeros(40), np.ones(40), np.ones(40, bool))
    np.testing.assert_allclose(right.correction(fresh)[0], 0.0, atol=1e-9)


def test_a_portfolio_has_something_for_every_scenario() -> None:
    scenarios = np.array([[0.0, 0.9, 0.5, 2.0], [2.0, 0.9, 0.5, 0.0]])
    assert portfolio(scenarios, [1.0, 1.0], 1) == [2]  # alone, what is good in both
    assert set(portfolio(scenarios, [1.0, 1.0], 3)) == {0, 2, 3}
    assert portfolio(scenarios, [3.0, 1.0], 1) == [0]
    assert sorted(portfolio(scenarios, [1.0, 1.0], 9)) == [0, 1, 2, 3]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_come_back_as_they_were_saved(tmp_path: Path) -> None:
    found = weights.load(saved(tmp_path, tasks="12"))
    assert found.metadata["tasks"] == "12" and found.tensors.keys() == shapes().keys()
    for name, tensor in some_tensors().items():
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_shipped_weights_fit_this_version_and_are_small() -> None:
    assert weights.SHIPPED.stat().st_size < 10 << 20
    found = weights.load(weights.SHIPPED)
    about = found.metadata
    assert int(about["tasks"]) > 0 and about["measured"] == "2026-11-18 to 2026-11-20"
    for machine in ("NVIDIA H200 (sm_90a)", "znver4, 512-bit vectors", "znver5, 512-bit vectors"):
        assert machine in about["machines"]
    files = dict(entry.split(" sha256:") for entry in about["data"].split(", "))
    data = Path(__file__).resolve().parents[2] / "benchmarks" / "data"
    assert files == {path.name: sha256(path.read_bytes()).hexdigest() for path in data.glob("*.xz")}
    assert AttentionNetwork(found.tensors).forest is not None


def changed(path: Path, **metadata: str) -> Path:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return path


def flipped(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(bytes(data))
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:100])
    return path


def without_a_tensor(path: Path) -> Path:
    weights.save(path, {name: t for name, t in some_tensors().items() if name != "layer0.out"}, {})
    return path


def pipe(path: Path) -> Path:
    path.unlink()
    os.mkfifo(path)
    return path


def large(path: Path) -> Path:
    os.truncate(path, (64 << 20) + 1)
    return path


BAD = {
    "format": lambda path: changed(path, format="tilewright-attention-9"),
    "version 999 of the features": lambda path: changed(path, features="999"),
    "checksum": flipped,
    "cannot read weights": cut,
    "do not fit": without_a_tensor,
    "cannot read": lambda path: path.with_name("missing.safetensors"),
    "it is a device": lambda path: Path("/dev/zero"),
    "it is a pipe": pipe,
    "larger than 64 MiB": large,
}


@pytest.mark.parametrize("message", BAD)
def test_bad_weights_are_named_and_the_analytical_model_goes_on(
    tmp_path: Path, candidates: Candidates, message: str
) -> None:
    path = BAD[message](saved(tmp_path))
    with pytest.raises(WeightsError, match=message):
        network(path)
    configs = candidates.sample(Random(6), 20)
    with pytest.warns(CostModelWarning, match="the analytical model goes on"):
        model = Attention(candidates, 1, path=path)
    np.testing.assert_allclose(
        model.predict(configs).seconds, Analytical(candidates, 1).predict(configs).seconds
    )
    model.update([Outcome(config, 1e-4) for config in configs[:8]])  # and it still adapts
    assert np.isfinite(model.predict(configs).seconds).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Attention(candidates, 1, path=path)  # said once


def test_a_machine_without_calibration_is_noted_once_with_the_remedy(
    candidates: Candidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_noted", set())
    make = cost_model_named("attention")
    with monkeypatch.context() as patch:
        patch.setitem(models._CALIBRATIONS, "cpu", lambda machine: "measured")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(candidates, 1, 0, ())
    with pytest.warns(CostModelWarning, match="is not calibrated; to measure them, run `tilewright doctor`"):
        make(candidates, 1, 0, ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(candidates, 1, 0, ())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = some_tensors() | {"valid.b": np.array([np.nan], np.float32)}
    path = tmp_path / "weights.safetensors"
    weights.save(path, tensors, {})
    with pytest.raises(WeightsError, match="not finite"):
        weights.load(path)


def test_a_machine_without_calibration_is_predicted_for() -> None:
    table = tables()[0]  # a machine that is described, and not here
    found = Attention(table.candidates, table.threads).predict(table.configs)
    assert np.isfinite(found.seconds).all() and found.spread.shape == (len(table.configs),) and MEMBERS > 1
