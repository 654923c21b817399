"""Graphs that are split around what stays with PyTorch: their regions are compiled like whole models."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tilewright
from benchmarks.torch_compile_overhead import cnn, mlp, transformer
from tilewright.integrations import torch_compile
from tilewright.integrations.torch_compile import RegionOutcome, register
from tilewright.runtime.plan import Plan


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    register()
    torch._dynamo.reset()
    torch_compile._warned.clear()
    torch_compile._told.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*stay in PyTorch|.*runs? in PyTorch")
        yield
    torch._dynamo.reset()


class Through:
    """A model through torch.compile, with the outcome of each compilation."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.outcomes: list[RegionOutcome] = []
        self._model = model
        options = {"observe": self.outcomes.append, **options}
        self._fast = torch.compile(model, backend="tilewright", options=options)

    def check(self, *arguments: Any, **keywords: Any) -> RegionOutcome:
        """Compare a call with PyTorch's; return the newest outcome."""
        with torch.no_grad():
            got, expected = self._fast(*arguments, **keywords), self._model(*arguments, **keywords)
        for ours, theirs in zip(_tensors(got), _tensors(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, check_stride=True)
        return self.outcomes[-1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def kernels(*plans: Plan) -> Counter[str]:
    """How often each task is called."""
    return Counter(step.task for plan in plans for step in plan.steps)


def constants(*plans: Plan) -> int:
    return sum(len(plan.constants) for plan in plans)


def layers(seed: int, width: int = 24, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts).eval()


def images() -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def rows(count: int = 24, width: int = 24) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


class Then(nn.Module):
    """Several stages with something after each of them."""

    def __init__(self, stages: Sequence[nn.Module], between: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        for stage in self.stages:
            x = self.between(stage(x))
        return x


def unsupported(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_exp(x)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_view_among_the_results_changes_no_kernel() -> None:
    net = layers(0)
    outcome = Through(Then([net], lambda y: (y, y.t()))).check(rows())
    whole = tilewright.compile(net, (rows(),)).plan
    assert outcome.kind == "split" and outcome.regions == 1
    (plan,) = outcome.plans
    assert kernels(plan) == kernels(whole) and len(plan.inputs) == 1
    assert constants(plan) == constants(whole) > 0


def test_weights_are_constants_on_both_sides_of_an_unsupported_operator() -> None:
    first, second = layers(0), layers(1)
    outcome = Through(Then([first, second], unsupported)).check(rows())
    wholes = [tilewright.compile(net, (rows(),)).plan for net in (first, second)]
    assert outcome.kind == "split" and outcome.regions >= 2
    assert all(len(plan.inputs) == 1 for plan in outcome.plans)
    assert constants(*outcome.plans) >= constants(*wholes)
    assert kernels(*wholes) <= kernels(*outcome.plans)


def test_convolutions_keep_their_weights_layout() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)).eval()
    outcome = Through(Then([net], lambda y: (y, y.flatten(1)))).check(images())
    whole = tilewright.compile(net, (images(),)).plan
    assert outcome.kind == "split"
    assert kernels(*outcome.plans) == kernels(whole) and constants(*outcome.plans) == constants(whole)


def test_what_weights_alone_decide_is_a_constant_of_each_region() -> None:
    """A weight that is transposed once and used twice is no input of the second region."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(24, 24) / 50)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = self.weight.t() * 2 + torch.arange(24.0) / 1000
            return unsupported(x @ scaled) @ scaled[:, ::2]

    outcome = Through(Tied()).check(rows())
    assert outcome.kind == "split" and outcome.regions == 2
    assert [len(plan.inputs) for plan in outcome.plans] == [1, 1]


def test_constants_of_the_graph_are_constants_of_its_regions() -> None:
    table = torch.linspace(-1, 1, 24)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * torch.tensor([2.0, 3.0]).repeat(12)
        return y, y.t()

    outcome = Through(function).check(rows() * table)
    assert outcome.kind == "split" and [len(plan.inputs) for plan in outcome.plans] == [1]


def test_a_region_of_constants_only() -> None:
    net = layers(0, depth=1)

    def function(x: torch.Tensor) -> torch.Tensor:
        weight = net[0].weight
        return x + unsupported(torch.relu(weight @ weight.t()))

    assert Through(function).check(rows()).kind == "split"


def test_a_view_that_a_kernel_reads_too_is_no_boundary() -> None:
    net = layers(0)

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.net(x)
            first, second = y.t().chunk(2)
            return y, first, second, torch.tanh(first) @ torch.exp(second).t()

    outcome = Through(Read()).check(rows())
    assert outcome.kind == "split" and outcome.regions == 1 and len(outcome.plans[0].inputs) == 1


# -- weights that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [lambda y: (y, y.t()), unsupported], ids=["a view", "unsupported"])
def test_a_training_step_and_new_weights_are_seen(between: Callable[[torch.Tensor], Any]) -> None:
    model = Then([layers(0)], between)
    through = Through(model)
    frozen = through.check(rows())
    assert constants(*frozen.plans) and through.check(rows()) is frozen
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        _tensors(model(rows()))[0].square().mean().backward()
        optimiser.step()
        through.check(rows())
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    after = through.check(rows())
    assert [outcome.kind for outcome in through.outcomes] == ["split", "split"]  # then with inputs for good
    assert constants(*after.plans) < constants(*frozen.plans)


def test_after_a_change_the_kernels_are_those_of_a_whole_graph_with_weights_as_inputs() -> None:
    net = layers(0)
    changed = Through(Then([net], lambda y: (y, y.t())))
    changed.check(rows())
    with torch.no_grad():
        net[0].weight.mul_(2)
    after = changed.check(rows())
    torch._dynamo.reset()
    whole = Through(net, freeze=False).check(rows())
    assert (after.kind, whole.kind) == ("split", "compiled")
    assert kernels(*after.plans) == kernels(*whole.plans)
    assert constants(*after.plans) == constants(*whole.plans)


def test_without_freezing_uncounted_writes_are_seen() -> None:
    net = layers(0)
    through = Through(Then([net], lambda y: (y, y.t())), freeze=False)
    through.check(rows())
    net[0].weight.data.mul_(3)
    through.check(rows())
    assert len(through.outcomes) == 1


def test_a_buffer_that_the_graph_writes_is_no_constant() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)
            self.register_buffer("count", torch.zeros(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x.sum(0))
            return unsupported(self.linear(x)) * self.count

    torch.manual_seed(0)
    ours, theirs = Counter(), Counter()
    theirs.load_state_dict(ours.state_dict())
    fast = Through(ours)._fast
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(rows()), theirs(rows()))
            torch.testing.assert_close(ours.count, theirs.count)


def test_modules_that_share_a_split_graph() -> None:
    for net in [layers(seed) for seed in range(6)]:
        through = Through(Then([net], lambda y: (y, y.t())))
        through.check(rows())
        through.check(rows())


# -- the same kernels as tilewright.compile ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_kernels_are_those_of_compile(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    torch.manual_seed(0)
    model, x = make()
    model.eval()
    outcome = Through(model).check(x)
    whole = tilewright.compile(model, (x,)).plan
    assert outcome.kind == "compiled" and outcome.regions == 1
    assert kernels(*outcome.plans) == kernels(whole)
    assert constants(*outcome.plans) == constants(whole)


def test_kernels_of_clip_are_those_of_compile() -> None:
    from benchmarks.hf_models import MODELS

    model, call = MODELS["clip"].build(True)
    outcome = Through(model).check(**call)
    whole = tilewright.compile(model, call).plan
    (plan,) = outcome.plans
    assert set(outcome.left.values()) == {"a view of memory that the caller sees"}
    assert kernels(plan) <= kernels(whole) and constants(plan) == constants(whole)
    copies = kernels(whole) - kernels(plan)  # of the result that torch.compile returns as a view
    assert sum(copies.values()) <= 1 and not any(whole.tasks[key].flops for key in copies)
