"""The attention model: a network and trees, trained on many tasks and machines, predict errors of the analytical model.

Before anything is measured, it adds what the network has learned from other tasks and machines. With each round of
trials it adapts: the network's weights stay as they are, and what the boosted model learns with corrects it for
this task and machine, from the knobs, the terms and what each member said. So nothing that was learned is forgotten,
and a round takes a fraction of a second.

If the weights are missing, damaged or of another version, there is one warning, and the analytical prediction and the
adaptation go on without the network.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tilewright.cost import weights
from tilewright.cost.analytical import SPREAD, Analytical
from tilewright.cost.boosted import Experience, Learned, Samples, Validity
from tilewright.cost.model import Prediction
from tilewright.cost.network import MEMBERS, AttentionNetwork
from tilewright.cost.tokens import Tokeniser, Tokens
from tilewright.cost.vocabulary import BUCKETS
from tilewright.errors import CostModelWarning, WeightsError
from tilewright.space.candidates import Configs
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config

_MIN = 3  # measured configs for more than a mean correction
_OFFSET = 1.0  # weight of the network's own scale, in trials
_FOREIGN, _MAX_FOREIGN = 0.25, 300  # weight of a trial of another task, and how many are learned from
_FLOOR = 0.05  # deviation of the log time of a config that members agree on


@lru_cache(maxsize=4)
def network(path: Path = weights.SHIPPED) -> AttentionNetwork:
    """The network with the weights of a file, which is read once. Raises WeightsError."""
    return AttentionNetwork(weights.load(path).tensors)


@dataclass(frozen=True)
class Adaptation:
    """The errors of predictions, estimated from a few trials: by similarity at first, and by trees once there are more,
    as in the boosted model."""

    learned: Learned | None

    @classmethod
    def of(
        cls, rows: np.ndarray, errors: np.ndarray, counts: np.ndarray, own: np.ndarray, seed: int = 0
    ) -> Adaptation:
        """An adaptation to trials. `errors`: measured minus predicted log seconds; `counts`: the weight of each; `own`:
        whether it is of this task, and so informs the scale."""
        mine = errors[own] * counts[own]
        offset = float(np.sum(mine) / (np.sum(counts[own]) + _OFFSET)) if own.any() else 0.0
        targets = np.where(own, errors - offset, errors)
        missing = np.isnan(rows)
        filled = np.where(missing, 0.0, rows)
        informative = (filled != filled[:1]).any(axis=0) | (missing != missing[:1]).any(axis=0)
        samples = Samples(np.where(informative, rows, 0.0), np.zeros(len(errors)), targets, counts)
        return cls(Learned.of(samples, samples.base, offset, "squared", seed))

    def correction(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the correction of log seconds, its deviation)."""
        if self.learned is None:
            return np.zeros(len(rows)), np.full(len(rows), SPREAD)
        return self.learned.predict(rows, np.zeros(len(rows)))


NOTHING = Adaptation(None)


@dataclass(frozen=True)
class ExplainedPrediction:
    """What the model believes about one config. Seconds: `analytical`, `network` with what the network has learned from
    other tasks, `predicted` with this task's trials. `spread`: the deviation of the logarithm of `predicted`. `valid`:
    the probability to build, run and be correct. `attention`: how much the other tokens attend to each in the last
    layer, by its name; together 1."""

    analytical: float
    network: float
    predicted: float
    spread: float
    valid: float
    attention: tuple[tuple[str, float], ...]


def similarity_rows(tokens: Tokens, members: np.ndarray) -> np.ndarray:
    """The features that make candidates similar: their knobs (NaN for those they lack), their terms, and each member's
    prediction."""
    slots = np.full((len(tokens), BUCKETS, 2), np.nan, np.float32)
    at, number = np.nonzero(tokens.knob_mask)
    slots[at, tokens.buckets[at, number]] = tokens.knobs[at, number][:, [0, 2]]
    return np.concatenate([slots.reshape(len(tokens), -1), tokens.terms, members.T], axis=1)


class Attention:
    """The cost model of one `Configs`. `path`: a file of weights; the shipped ones by default."""

    def __init__(
        self,
        candidates: Configs,
        threads: int,
        *,
        seed: int = 0,
        warm: Sequence[Experience] = (),
        path: Path = weights.SHIPPED,
    ) -> None:
        self._analytical = Analytical(candidates, threads)
        self._tokeniser = Tokeniser(self._analytical)
        self._network, self._seed = _network_or_none(path), seed
        self._times: dict[Config, list[float]] = {}
        self._validity = Validity()
        self._adaptation = NOTHING
        self._seen: dict[Config, tuple[float, float, float, np.ndarray]] = {}
        self._foreign = self._learned_elsewhere(warm)
        self._stale = bool(self._foreign[1].size)

    # -- the interface ------------------------------------------------------------------------------------------------

    def update(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._validity.add(outcome)
            if outcome.time is not None and math.isfinite(self._analytical.seconds(outcome.config)):
                self._times.setdefault(outcome.config, []).append(outcome.time)
                self._stale = True

    def predict(self, configs: Sequence[Config]) -> Prediction:
        analytical = self._analytical.predict(configs)
        finite = np.isfinite(analytical.seconds)
        valid = np.where(finite, self._validity.of(configs), 0.0)
        if not finite.any():
            return Prediction(analytical.seconds, analytical.spread, valid)
        known = [config for config, is_finite in zip(configs, finite, strict=True) if is_finite]
        logs, spread, works, rows = self._network_says(known)
        if self._stale:
            self._adaptation, self._stale = self._adapted(), False
        correction, deviation = self._adaptation.correction(rows)
        seconds, spreads = analytical.seconds.copy(), analytical.spread.copy()
        seconds[finite] = np.exp(logs + correction)
        known_errors = self._adaptation.learned is not None and self._adaptation.learned.smooth is not None
        spreads[finite] = np.hypot(_FLOOR if known_errors else spread, deviation)
        valid[finite] *= works
        return Prediction(seconds, spreads, valid)

    def explain(self, config: Config) -> ExplainedPrediction | None:
        """None without weights, or if the config has no program."""
        analytical = self._analytical.seconds(config)
        if self._network is None or not math.isfinite(analytical):
            return None
        found = self.predict([config])
        (log,), _, _, _ = self._network_says([config])
        (shares,) = self._network.attention(self._tokeniser.tokens([config]))
        return ExplainedPrediction(
            analytical,
            math.exp(log),
            float(found.seconds[0]),
            float(found.spread[0]),
            float(found.valid[0]),
            tuple(zip(self._tokeniser.names(config), shares.tolist(), strict=True)),
        )

    # -- the network --------------------------------------------------------------------------------------------------

    def _network_says(
        self, configs: Sequence[Config]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The network's predictions: (log seconds, their deviations over the members, probabilities to work, similarity
        rows)."""
        missing = [config for config in dict.fromkeys(configs) if config not in self._seen]
        self._seen |= zip(missing, _said(self._network, self._tokeniser, missing), strict=True)
        logs, spread, works, rows = zip(*(self._seen[config] for config in configs), strict=True)
        return np.array(logs), np.array(spread), np.array(works), np.array(rows)

    def _adapted(self) -> Adaptation:
        rows, errors, counts = self._foreign
        own = np.zeros(len(errors), bool)
        if self._times:
            configs = sorted(self._times, key=str)
            logs, _, _, mine = self._network_says(configs)
            measured = np.array([np.mean(np.log(self._times[config])) for config in configs])
            rows = np.concatenate([mine, rows]) if len(errors) else mine
            own = np.concatenate([np.ones(len(configs), bool), own])
            errors = np.concatenate([measured - logs, errors])
            counts = np.concatenate([[float(len(self._times[config])) for config in configs], counts])
        return Adaptation.of(rows, errors, counts, own, self._seed)

    def _learned_elsewhere(self, warm: Sequence[Experience]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Similarity rows, errors and weights of trials of other tasks: only differences within one task are used."""
        rows, errors, left = [], [], _MAX_FOREIGN
        for one in warm:
            model = Analytical(one.candidates, one.threads)
            usable = [
                (outcome.config, outcome.time)
                for outcome in one.outcomes[:left]
                if outcome.time is not None and math.isfinite(model.seconds(outcome.config))
            ]
            if len(usable) < _MIN:
                continue
            said = _said(self._network, Tokeniser(model), [config for config, _ in usable])
            found = np.array([math.log(time) - each[0] for (_, time), each in zip(usable, said, strict=True)])
            errors.append(found - found.mean())
            rows.append(np.array([each[3] for each in said]))
            left -= len(usable)
            if left <= 0:
                break
        if not errors:
            return np.zeros((0, 0)), np.zeros(0), np.zeros(0)
        joined = np.concatenate(errors)
        return np.concatenate(rows), joined, np.full(len(joined), _FOREIGN)


def _said(
    known: AttentionNetwork | None, tokeniser: Tokeniser, configs: Sequence[Config]
) -> list[tuple[float, float, float, np.ndarray]]:
    """(log seconds, deviation, probability to work, similarity row) of each config."""
    if not configs:
        return []
    logs = np.log([tokeniser.model.seconds(config) for config in configs])
    tokens = tokeniser.tokens(configs)
    if known is None:
        rows = similarity_rows(tokens, np.zeros((MEMBERS, len(configs))))
        return [(float(log), SPREAD, 1.0, row) for log, row in zip(logs, rows, strict=True)]
    out = known(tokens)
    mean, spread = out.members.mean(axis=0), np.hypot(_FLOOR, out.members.std(axis=0))
    return list(
        zip(
            (logs + mean).tolist(),
            spread.tolist(),
            out.valid.tolist(),
            similarity_rows(tokens, out.members),
            strict=True,
        )
    )


_warned: set[str] = set()


def _network_or_none(path: Path) -> AttentionNetwork | None:
    try:
        return network(path)
    except WeightsError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            warnings.warn(
                f"{error.message}; the analytical model goes on without them", CostModelWarning, stacklevel=4
            )
        return None


def portfolio(scenarios: np.ndarray, weights_of: Sequence[float], count: int) -> list[int]:
    """Choose `count` candidates such that the best of them is fast in every scenario.

    `scenarios`: (scenarios, candidates), predicted log seconds if the machine were like this one. Greedy: the gain of
    another candidate shrinks with those that are chosen, so that this is within 1 - 1/e of the best choice."""
    speed = np.exp(scenarios.min(axis=1, keepdims=True) - scenarios) * np.asarray(weights_of)[:, None]
    best = np.zeros(len(speed))
    chosen: list[int] = []
    fallback = speed.sum(axis=0)
    for _ in range(min(count, speed.shape[1])):
        gain = np.maximum(speed - best[:, None], 0.0).sum(axis=0) + 1e-6 * fallback
        gain[chosen] = -np.inf
        at = int(np.argmax(gain))
        chosen.append(at)
        best = np.maximum(best, speed[:, at])
    return chosen
