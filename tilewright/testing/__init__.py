"""Conformance suites for templates, rules, intrinsics, searches, cost models and targets: tests to inherit.

    from tilewright.testing import SearchSuite

    class TestMySearch(SearchSuite):
        def make(self, candidates, model, seed):
            return MySearch(candidates, model, seed)

pytest collects the methods of the class, which use plain assertions. Tilewright's own parts pass the same suites.
"""

from tilewright.testing.cost_models import CostModelSuite
from tilewright.testing.intrinsics import IntrinsicSuite
from tilewright.testing.problems import Inputs, gemm, softmax_rows
from tilewright.testing.searches import SearchSuite
from tilewright.testing.targets import TargetSuite
from tilewright.testing.templates import RuleSuite, TemplateSuite

__all__ = [
    "CostModelSuite",
    "Inputs",
    "IntrinsicSuite",
    "RuleSuite",
    "SearchSuite",
    "TargetSuite",
    "TemplateSuite",
    "gemm",
    "softmax_rows",
]
