"""What the attention model believes about a task, from its records: for the report of a run that used it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.cost.attention import Attention, ExplainedPrediction
from tilewright.cost.models import cost_model_named
from tilewright.db.record import Record
from tilewright.report.data import ConfigBelief, TaskBeliefs
from tilewright.space.candidates import Candidates
from tilewright.space.outcome import Outcome
from tilewright.space.space import Config
from tilewright.space.template import Work

_FAVOURITES = 3  # the trials that it believes fastest


def uses_attention(events: Sequence[dict[str, Any]]) -> bool:
    """Whether the last tuning run of a trace asked the attention model."""
    begun = [event for event in events if event["name"] == "tune.begin"]
    return bool(begun) and begun[-1].get("args", {}).get("cost_model") == "attention"


def beliefs_of(
    work: Work, threads: int, records: Sequence[Record], winner: Config, default: str
) -> TaskBeliefs | None:
    """About the winner, the unmeasured choice, and the trials that it believes fastest. None without weights."""
    candidates = Candidates.of(work)
    model = cost_model_named("attention")(candidates, threads, 0, ())
    assert isinstance(model, Attention)
    outcomes: dict[Config, Outcome] = {}
    for record in records:
        config = candidates.recalled(record.config)
        if config is not None:
            outcomes[config] = Outcome(config, record.seconds, record.failure)
    model.update(list(outcomes.values()))
    chosen = candidates.recalled(winner)
    found = {
        config: model.explain(config) for config in dict.fromkeys([*outcomes, *([chosen] if chosen else [])])
    }
    known = {config: belief for config, belief in found.items() if belief is not None}
    if chosen not in known:
        return None
    favourites = sorted(known, key=lambda config: known[config].predicted)[:_FAVOURITES]
    untuned = [config for config in known if str(config) == default]
    rows = [
        _row(config, known[config], outcomes.get(config), config == chosen, config in untuned)
        for config in dict.fromkeys([chosen, *untuned, *favourites])
    ]
    return TaskBeliefs(len(outcomes), tuple(rows), known[chosen].attention)


def _row(
    config: Config, belief: ExplainedPrediction, outcome: Outcome | None, is_winner: bool, is_default: bool
) -> ConfigBelief:
    roles = [role for role, holds in (("chosen", is_winner), ("untuned", is_default)) if holds]
    return ConfigBelief(
        str(config),
        " and ".join(roles),
        belief.analytical,
        belief.network,
        belief.predicted,
        belief.spread,
        belief.valid,
        None if outcome is None else outcome.seconds,
    )
