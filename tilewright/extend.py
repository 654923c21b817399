"""Register extensions of the compiler without editing it: one function for each kind.

    register_template(template, target)     one kind of implementation for a class of tasks (space/template.py)
    register_sketch(sketch, target)         the same without a class of tasks: compared when a task is tuned
    register_rule(rule)                     a rule that derives program structures (space/sketches/)
    register_intrinsic(intrinsic)           an instruction, and the expression that it computes (hw/intrinsics.py)
    register_search(name, factory)          a search, which proposes candidates (search/searcher.py)
    register_cost_model(name, factory)      a cost model, which ranks them (cost/model.py)
    register_target(name, factory)          a kind of machine (targets/target.py)

An installed package can do the same through entry points; each module names its group. `tilewright.testing` has a
conformance suite for each kind. docs/07-extending.md has an example of each, or says which page has it.
"""

from __future__ import annotations

from tilewright.cost.models import register as register_cost_model
from tilewright.cost.models import unregister as unregister_cost_model
from tilewright.hw.intrinsics import register_intrinsic, unregister_intrinsic
from tilewright.search.searches import register as register_search
from tilewright.search.searches import unregister as unregister_search
from tilewright.space.catalog import register as register_template
from tilewright.space.catalog import register_sketch, unregister_sketch
from tilewright.space.catalog import unregister as unregister_template
from tilewright.space.sketches import register as register_rule
from tilewright.space.sketches import unregister as unregister_rule
from tilewright.targets.resolve import register as register_target
from tilewright.targets.resolve import unregister as unregister_target

__all__ = [
    "register_cost_model",
    "register_intrinsic",
    "register_rule",
    "register_search",
    "register_sketch",
    "register_target",
    "register_template",
    "unregister_cost_model",
    "unregister_intrinsic",
    "unregister_rule",
    "unregister_search",
    "unregister_sketch",
    "unregister_target",
    "unregister_template",
]
