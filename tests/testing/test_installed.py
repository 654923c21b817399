"""What an installed package adds by its entry points: found by the metadata of its distribution, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hw.declared import FMA
from tilewright.hw import host

ROOT = Path(__file__).resolve().parents[2]

ENTRY_POINTS = """
[tilewright.templates]
mine = my_extension:templates
absent = my_extension:nothing_of_this_name

[tilewright.rules]
mine = my_extension:rules

[tilewright.intrinsics]
mine = my_extension:intrinsics

[tilewright.searches]
mine = my_extension:FirstOnes

[tilewright.cost_models]
mine = my_extension:optimist

[tilewright.targets]
mine = my_extension:target
"""

MODULE = """
from tests.hw.declared import FMA
from tests.testing.extensions import FirstOnes, Plain, Tiles2D, optimist
from tilewright.extend import register_intrinsic, register_rule, register_template
from tilewright.hw import host
from tilewright.targets.cpu import CpuTarget


def templates():
    register_template(Plain())


def rules():
    register_rule(Tiles2D())


def intrinsics():
    register_intrinsic(FMA)


def target(number):
    return CpuTarget(host())
"""

PROGRAM = """
import json, sys, warnings
from pathlib import Path
import torch
import tilewright
from tilewright.db.database import Database
from tilewright.hw import host
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work
from tilewright.testing import gemm
from tests.testing.extensions import outer_product

def names(task):
    return [applied.space.template for applied in Candidates.of(Work(task, host())).applied]

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = {"outer": names(outer_product(30, 50)), "gemm": names(gemm(64, 64, 64))}

class Outer(torch.nn.Module):
    def forward(self, x, y):
        return x * y

x, y, path = torch.randn(30, 1), torch.randn(50), Path(sys.argv[1])
options = {"target": "mine", "effort": "quick", "budget": 20, "search": "mine", "cost_model": "mine", "db": path}
fast = tilewright.compile(Outer().eval(), (x, y), **options)
assert torch.equal(fast(x, y), x * y)
with Database.open(path) as database:
    trials = [(record.config.template, record.failure) for record in database.records()]
print(json.dumps({**found, "told": [str(each.message) for each in told], "trials": trials}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "my_extension.py").write_text(MODULE)
    about = folder / "my_extension-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-extension\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "tuning.sqlite")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_templates_and_rules_are_candidates(found: Any) -> None:
    assert {"plain", "sketch:tiles2d"} <= set(found["outer"])


@pytest.mark.skipif(bool(FMA.missing(host())), reason="needs AVX2 and FMA")
def test_intrinsics_are_candidates(found: Any) -> None:
    assert any(FMA.name in name for name in found["gemm"])


def test_one_that_cannot_be_loaded_is_left_out_with_a_warning(found: Any) -> None:
    (told,) = found["told"]
    assert "the entry point 'absent' of tilewright.templates (my_extension:nothing_of_this_name)" in told
    assert "is left out: AttributeError" in told


def test_searches_cost_models_and_targets_are_found_and_candidates_are_built(found: Any) -> None:
    """In processes of their own, which find the entry points too."""
    tried = dict(found["trials"])
    assert tried["plain"] == "" and tried["sketch:tiles2d"] == ""
