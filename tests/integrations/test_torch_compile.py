"""The torch.compile backend: what is compiled, what stays with PyTorch, and that results do not tell the difference."""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilewright import driver
from tilewright.errors import InputError
from tilewright.frontend.torch.left import Left
from tilewright.hw import host
from tilewright.integrations import torch_compile
from tilewright.integrations.left_in_torch import share_left
from tilewright.integrations.torch_compile import RegionOutcome, TilewrightWarning, _getter, register
from tilewright.targets.cpu import CpuTarget
from tilewright.targets.options import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    register()
    torch._dynamo.reset()
    torch_compile._warned.clear()
    torch_compile._told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TilewrightWarning)
        yield
    torch._dynamo.reset()


class Compiled:
    """A function or module through the backend, with what became of its graphs."""

    def __init__(self, function: Any, *, dynamic: bool | None = None, **options: Any) -> None:
        self.outcomes: list[RegionOutcome] = []
        self.function = function
        given = {"observe": self.outcomes.append, **options}
        self.fast = torch.compile(function, backend="tilewright", dynamic=dynamic, options=given)

    def check(self, *arguments: Any) -> Any:
        """The result, after comparing it with PyTorch's: values, types, strides, and what the arguments became."""
        theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        with torch.no_grad():
            got, expected = self.fast(*arguments), self.function(*theirs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, check_stride=True)
        torch.testing.assert_close(list(arguments), theirs, rtol=1e-4, atol=1e-5)
        return got

    @property
    def kinds(self) -> list[str]:
        return [outcome.kind for outcome in self.outcomes]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(0))


# -- the way in -----------------------------------------------------------------------------------------------------


def test_the_entry_point() -> None:
    line = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "torch_compile:backend" in line
    )
    module, _, name = line.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is torch_compile.backend


def test_a_model_is_one_compiled_graph() -> None:
    compiled = Compiled(Net())
    compiled.check(images())
    compiled.check(images())
    assert compiled.kinds == ["compiled"]


@pytest.mark.parametrize("positions", [[], [1], [2, 0]])
def test_arguments_at_positions_are_a_tuple(positions: list[int]) -> None:
    assert _getter(positions)("abc") == tuple("abc"[i] for i in positions)


def test_inference_mode() -> None:
    net = Net()
    compiled = Compiled(net)
    with torch.inference_mode():
        x = images()
        torch.testing.assert_close(compiled.fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert compiled.kinds == ["compiled"]


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    run = driver.run_pipeline
    monkeypatch.setattr(
        driver, "run_pipeline", lambda model, settings: seen.append(settings) or run(model, settings)
    )
    Compiled(Net(), numerics="strict", threads=1, partition="greedy").check(images())
    (settings,) = seen
    assert settings == Settings(CpuTarget(host()), "strict", 1, partition="greedy", trace=settings.trace)


def _rounding_errors(net: nn.Sequential, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """How far results may be apart where one side rounds each number before the norm to bfloat16 and the other does
    not: by the products' sizes, the norm's derivatives in double precision, and the rounding of the result."""
    roundoff = 2.0**-8
    linear, relu, norm = (copy.deepcopy(layer).double() for layer in net)
    hidden = relu(linear(x.double())).detach()
    products = x.double().abs() @ linear.weight.abs().T
    moved = roundoff * (2 * products + linear.bias.abs() + 2 * hidden.abs())
    derivatives = torch.autograd.functional.jacobian(norm, hidden).abs()
    second_order = 1.5
    return (
        second_order * torch.einsum("abcd,cd->ab", derivatives, moved) + 2 * roundoff * result.double().abs()
    )


def test_autocast_around_and_inside() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)).eval(), torch.randn(2, 4)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x) + 1

    around, within = Compiled(net), Compiled(inside)
    with torch.no_grad():
        for fast, plain in ((around, net), (within, inside)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got, expected = fast.fast(x), plain(x)
            assert got.dtype is expected.dtype
            off = (got.double() - expected.double()).abs()
            assert (off <= _rounding_errors(net, x, expected)).all(), (got, expected)
        assert around.check(x).dtype is torch.float32
    assert set(around.kinds + within.kinds) == {"compiled"}


def test_results_that_are_arguments_or_each_other() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x + 1
            return x, y, y

    graph = torch_compile.backend(torch.fx.symbolic_trace(Same()), [])
    x = torch.randn(3)
    first, second, third = graph(x)
    assert first is x and second is third and torch.equal(second, x + 1)


# -- what stays with PyTorch ----------------------------------------------------------------------------------------


def test_a_graph_is_cut_around_what_is_not_supported() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.inv(x @ x.mT + 5 * torch.eye(4))
        return torch.softmax(y * 2, -1) + torch.linalg.det(x)[:, None, None]

    compiled = Compiled(function)
    with pytest.warns(TilewrightWarning, match="linalg_det") as caught:
        compiled.check(torch.randn(2, 4, 4))
    (outcome,) = compiled.outcomes
    assert outcome.kind == "split" and outcome.regions >= 2 and 0 < outcome.share < 1
    (text,) = [str(warning.message) for warning in caught]
    assert "2 of the " in text and f"estimated {outcome.share:.0%} of its time" in text
    assert re.search(r"aten.linalg_inv.default \(no converter\) at test_torch_compile.py:\d+", text)
    assert {why.split(":")[0] for why in outcome.left.values()} == {
        "aten.linalg_inv.default",
        "aten.linalg_det.default",
    }


def test_a_graph_of_nothing_supported() -> None:
    compiled = Compiled(lambda x: torch.linalg.inv(x))
    with pytest.warns(TilewrightWarning, match="1 of the 1 operators .* estimated 100%"):
        compiled.check(torch.randn(3, 3))
    assert [(outcome.kind, outcome.share) for outcome in compiled.outcomes] == [("torch", 1.0)]


def test_complex_numbers_between_two_regions() -> None:
    compiled = Compiled(lambda x: torch.relu(torch.fft.rfft(torch.tanh(x)).abs() - 1))
    with pytest.warns(TilewrightWarning, match="fft"):
        compiled.check(torch.randn(3, 8))
    assert compiled.kinds == ["split"]


def test_what_stays_in_torch_is_told_once_whatever_the_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(torch.relu(x)) + 1

    compiled = Compiled(function)
    with pytest.warns(TilewrightWarning, match="linalg_inv") as caught:
        for size in (3, 4, 3):
            compiled.check(torch.randn(size, size) + 5 * torch.eye(size))
    assert len(caught) == 1 and len(compiled.outcomes) >= 2


def test_what_stays_in_torch_is_told_of_each_model_of_the_same_code_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(torch.relu(x)) * self.scale

    monkeypatch.setattr(torch_compile, "_MODELS_TOLD", 2)
    x, models = torch.eye(3), [Inverse().eval() for _ in range(3)]
    with pytest.warns(TilewrightWarning, match="linalg_inv") as caught, torch.no_grad():
        for number, model in enumerate(models):
            torch._dynamo.reset()
            torch.compile(model, backend="tilewright")(x)
            assert len(caught) == min(number + 1, 2)


def test_the_share_of_what_stays_grows_with_its_work() -> None:
    plan = driver.compile(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), (torch.randn(8, 64),)).plan
    amounts = [(0, 0), (1e6, 1e3), (1e9, 1e3), (1e9, 1e9)]
    shares = [share_left([Left("aten.inv", "", "", *each)], [plan], "cpu") for each in amounts]
    assert shares == sorted(shares) and 0 < shares[0] < 0.9 < shares[-1] < 1
    assert share_left([Left("aten.inv", "", "", 1, 1)], [], "cpu") == 1


def test_views_that_stay_in_torch_cost_nothing_and_are_not_told() -> None:
    compiled = Compiled(lambda x: (x.t(), torch.exp(x)))
    compiled.check(torch.randn(2, 3))
    assert [(outcome.kind, outcome.share) for outcome in compiled.outcomes] == [("split", 0.0)]


def test_graph_breaks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 3
        torch._dynamo.graph_break()
        return y.sum(0).exp()

    compiled = Compiled(function)
    compiled.check(torch.randn(3, 4))
    assert compiled.kinds == ["compiled", "compiled"]


def test_random_numbers_stay_the_frameworks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * 2, 0.5, training=True) + 1

    x, compiled = torch.ones(100), Compiled(function)
    with torch.no_grad(), pytest.warns(TilewrightWarning, match="dropout|bernoulli|rand"):
        torch.manual_seed(1)
        got = compiled.fast(x)
        torch.manual_seed(1)
        assert torch.equal(got, function(x))
    assert compiled.kinds == ["split"]


def test_a_failure_of_ours_warns_once_and_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("kernel 7 has no bits")

    monkeypatch.setattr(driver, "run_pipeline", broken)
    net, x = Net(), images()
    compiled = Compiled(net)
    with (
        torch.no_grad(),
        pytest.warns(TilewrightWarning, match=r"(?s)kernel 7 has no bits.*graph_code.*fallback") as caught,
    ):
        for _ in range(3):
            assert torch.equal(compiled.fast(x), net(x))
        assert len(caught) == 1
        Compiled(lambda x: x + 1).fast(x)
    assert len(caught) == 2  # of another graph
    assert compiled.kinds == ["failed"]


def test_without_fallback_errors_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad(), pytest.raises(Exception, match="linalg_inv"):
        Compiled(lambda x: torch.linalg.inv(x) + 1, fallback=False).fast(torch.eye(3))
    monkeypatch.setattr(driver, "run_pipeline", lambda *a, **k: 1 / 0)
    with torch.no_grad(), pytest.raises(ZeroDivisionError):
        Compiled(lambda x: x + 1, fallback=False).fast(torch.eye(3))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_tensors_of_other_kinds() -> None:
    compiled = Compiled(lambda x: x * 2)
    assert torch.equal(compiled.fast(torch.eye(3).to_sparse()).to_dense(), 2 * torch.eye(3))
    assert compiled.kinds == []  # Dynamo itself leaves it
    graph = torch_compile.backend(torch.fx.symbolic_trace(Doubled()), [])
    with pytest.warns(TilewrightWarning, match="argument 0 is not a dense tensor"):
        got = graph(torch.eye(3).to_sparse())
    assert torch.equal(got.to_dense(), 2 * torch.eye(3))


# -- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_are_autograds_own() -> None:
    net, x = Net(), images()
    compiled = Compiled(net)
    with pytest.warns(TilewrightWarning, match="no_grad"):
        compiled.fast(x).square().sum().backward()
    got = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).square().sum().backward()
    for a, b in zip(got, [p.grad for p in net.parameters()], strict=True):
        torch.testing.assert_close(a, b)
    assert compiled.kinds == []
    compiled.check(x)
    compiled.check(x)
    assert compiled.kinds == ["compiled"]
    assert compiled.fast(x).requires_grad  # and back again


# -- memory ---------------------------------------------------------------------------------------------------------


def test_writes_to_arguments() -> None:
    def function(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[:, 2] = x
        cache.mul_(2)
        return cache.sum() + x

    compiled = Compiled(function)
    for _ in range(2):
        compiled.check(torch.ones(3, 4), torch.randn(3))
    assert compiled.kinds == ["compiled"]


def test_writes_to_buffers() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x.sum(0))
            return x * self.count

    ours, theirs = Counter(), Counter()
    fast = Compiled(ours)
    for _ in range(4):
        x = torch.randn(2, 3)
        with torch.no_grad():
            torch.testing.assert_close(fast.fast(x), theirs(x))
        torch.testing.assert_close(ours.count, theirs.count)
    assert "failed" not in fast.kinds


def test_arguments_that_overlap() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    ours, theirs = torch.arange(6.0), torch.arange(6.0)
    with torch.no_grad():
        got = Compiled(function).fast(ours[:4], ours[2:])
        expected = function(theirs[:4], theirs[2:])
    assert torch.equal(got, expected) and torch.equal(ours, theirs)


def test_a_storage_that_was_made_smaller_is_refused() -> None:
    compiled = Compiled(lambda x: x * 2 + 1, dynamic=False)
    x = torch.ones(1000)
    compiled.check(x)
    compiled.check(torch.ones(2000)[1000:])
    for bytes in (400, 0):
        x.untyped_storage().resize_(bytes)
        with torch.no_grad(), pytest.raises(InputError):
            compiled.fast(x)


def test_a_view_of_an_argument_is_a_view_of_it() -> None:
    compiled = Compiled(lambda x: (x.t(), torch.exp(x)))
    x = torch.randn(2, 3)
    view, _ = compiled.check(x)
    x[0, 1] = 9
    assert view[1, 0] == 9


def test_results_that_share_memory() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(x).chunk(2, -1)

    a, b = Compiled(function).check(torch.randn(3, 4))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_a_view_of_what_was_written() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.view(-1)[1:]

    compiled = Compiled(function)
    x = torch.zeros(2, 3)
    with pytest.warns(TilewrightWarning, match="returns a view of it"):
        view = compiled.check(x)
    view[0] = 5
    assert x[0, 1] == 5 and compiled.kinds == ["torch"]


def test_an_argument_that_is_written_to_and_returned() -> None:
    """As the counter of a static cache is: the result is the argument, not a copy of it."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        same = x.to("cpu")
        same.add_(y)
        return y * 2, same

    compiled = Compiled(function)
    x = torch.zeros(3)
    for _ in range(2):
        _, same = compiled.check(x, torch.ones(3))
        assert same.data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.full((3,), 2.0)) and compiled.kinds == ["compiled"]


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: torch.relu(x).mT,
    "permuted": lambda x: x.permute(2, 0, 1) + 1,
    "expanded": lambda x: x.sum(0, keepdim=True).expand(5, -1, -1),
    "sliced": lambda x: torch.exp(x)[:, ::2],
    "of one row": lambda x: x[:1].mT * 2,
    "channels last": lambda x: nn.functional.max_pool2d(x[None].to(memory_format=torch.channels_last), 2),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_are_the_frameworks(name: str) -> None:
    compiled = Compiled(STRIDED[name])
    compiled.check(torch.randn(3, 4, 6))
    assert "failed" not in compiled.kinds


# -- weights --------------------------------------------------------------------------------------------------------


def test_a_change_of_weights_is_seen() -> None:
    net = Net()
    compiled = Compiled(net)
    compiled.check(images())
    for _ in range(3):
        with torch.no_grad():
            net.conv.weight.add_(1)
            net.norm.running_mean.mul_(2)
        compiled.check(images())
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    compiled.check(images())
    assert compiled.kinds == ["compiled", "compiled"]  # with constants, then with inputs for good


def test_modules_that_share_a_graph() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    stack = Stack()
    outcomes: list[RegionOutcome] = []
    x = torch.randn(2, 4)
    with torch.no_grad():
        for layer in stack.layers:
            fast = torch.compile(layer, backend="tilewright", options={"observe": outcomes.append})
            torch.testing.assert_close(fast(x), layer(x))
            torch.testing.assert_close(fast(x), layer(x))
    assert {outcome.kind for outcome in outcomes} == {"compiled"}


def test_weights_that_are_exchanged_are_seen() -> None:
    """PyTorch counts no write where `.data` becomes another tensor, and it is another address."""
    net = Net()
    compiled = Compiled(net)
    compiled.check(images())
    compiled.check(images())
    net.head.weight.data = torch.randn_like(net.head.weight)
    compiled.check(images())
    assert compiled.kinds == ["compiled", "compiled"]


def test_without_freezing_uncounted_writes_are_seen() -> None:
    net = Net()
    compiled = Compiled(net, freeze=False)
    compiled.check(images())
    net.head.weight.data.mul_(3)
    compiled.check(images())
    assert compiled.kinds == ["compiled"]


def test_weights_that_the_graph_holds_itself() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    graph = torch_compile.backend(torch.fx.symbolic_trace(net), [])
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graph(x)[0], net(x))
            net[0].weight.mul_(2)


# -- shapes that change ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A causal transformer layer: what generation runs, over a sequence that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, 16))


def test_a_growing_sequence_compiles_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, message = [], torch_compile._too_many_sizes

    def written(*arguments: Any) -> str:
        messages.append(message(*arguments))
        return messages[-1]

    monkeypatch.setattr(torch_compile, "_too_many_sizes", written)
    compiled = Compiled(Attention())
    with pytest.warns(TilewrightWarning, match=r'many sizes.*cache_implementation="static"') as caught:
        for length in range(1, 65):
            compiled.check(torch.randn(1, length, 16))
    assert len(caught) == 1  # the lengths after the first ones run in PyTorch, and the user knows
    # Dynamo makes a graph each for the first sizes (1 is always one of its own), then one for all others.
    assert len(compiled.outcomes) <= 2 + 4
    assert set(compiled.kinds) == {"compiled"}
    made, told = len(compiled.outcomes), len(messages)
    assert 1 <= told <= 2 + 4  # not at each call
    for length in range(1, 65):
        compiled.check(torch.randn(1, length, 16))
    assert len(compiled.outcomes) == made and len(messages) == told


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_sizes(dynamic: bool | None) -> None:
    compiled = Compiled(Net(), dynamic=dynamic, variants=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*many sizes", category=TilewrightWarning)
        for batch in (2, 3, 2, 4, 5, 3):
            compiled.check(images(batch))
    assert set(compiled.kinds) == {"compiled"}
    if dynamic:
        assert len(compiled.outcomes) == 3


def test_sizes_as_results_and_numbers() -> None:
    def function(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, int]:
        return torch.relu(x) * factor + x.shape[0], x.shape[0] * 2

    compiled = Compiled(function, dynamic=True)
    for size, factor in ((3, 0.5), (4, 0.25), (5, 1.5)):
        compiled.check(torch.randn(size, 2), factor)
    assert set(compiled.kinds) == {"compiled"}
