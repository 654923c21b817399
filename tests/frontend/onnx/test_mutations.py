"""Two hundred mutated files: each is refused with a TilewrightError, or gives the right result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

from tests.frontend.onnx.mutations import MUTATIONS

COUNT = 200


def test_mutated_models_are_refused_or_right() -> None:
    """In a child with a limit on its memory and its time: a crash or a hang there ends this test, not the others."""
    command = [sys.executable, "-m", "tests.frontend.onnx.mutations", str(COUNT), "0"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    outcomes = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0 and len(outcomes) == COUNT, child.stderr[-2000:]
    assert [outcome for outcome in outcomes if outcome["status"] == "bad"] == []
    assert {outcome["kind"] for outcome in outcomes} == set(MUTATIONS)
    counts = Counter(outcome["status"] for outcome in outcomes)
    assert counts["error"] > COUNT // 2 and counts["right"] > 0
