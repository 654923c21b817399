"""`torch.compile(model, backend="tilewright")`.

    fast = torch.compile(model, backend="tilewright", options={"numerics": "strict", "threads": 4})
    with torch.no_grad():
        fast(x)

Dynamo cuts Python into graphs; each graph is compiled here when it is first called, for the sizes of that call.

What runs where
    A graph that can be imported whole is one compiled model. Operators that cannot be imported stay with PyTorch, and
    the rest of the graph is compiled around them; one warning per graph names them, with their share of the predicted
    time (`left_in_torch`). An internal failure is a warning, once per graph, and that graph runs in PyTorch. What
    is the same for many models is said of the first eight.

    Tensors on an NVIDIA GPU are computed there, with one CUDA graph per compiled region.

    Earlier tuning results, of `tilewright tune` or `options={"effort": "quick"}`, are used; see `options.py` for all
    options.

    `torch.autocast` is respected, inside the model and around it. The `mode` of torch.compile has no effect.

Gradients
    Compiled models compute no gradients. If gradients are enabled and an argument (such as a parameter) requires
    them, the graph runs in PyTorch with autograd, with one warning. Call the model under `torch.no_grad()` or
    `torch.inference_mode()`.

Writes and shared memory
    A graph that writes to its arguments (a cache of keys and values) is compiled as a function, and the new values
    are copied back. A graph that also returns a part of what it wrote, or whose written argument shares memory with
    another, runs in PyTorch. Results that are views of arguments or of each other are made by PyTorch from
    Tilewright's results.

Weights
    Parameters and buffers are constants of the compiled model, which keeps its own copy of them in its kernels'
    layout. A write to one of them is detected by its version counter; from then on the graph is compiled with its
    weights as inputs. A write that PyTorch does not count (through `.data`, or NumPy) is not detected; use
    `options={"freeze": False}` for models that are changed this way. The first few modules that share a graph are
    frozen separately; later ones share one model with weights as inputs.

Shapes that change
    Symbolic sizes are accepted, and so are numbers that Dynamo passes as tensors. Every size is compiled separately,
    into a bounded table; `runtime.dispatch` has the policy, and `variants` is the limit. Calls without a variant run
    in PyTorch, with one warning per graph. A graph without symbolic sizes is called only with inputs that pass
    Dynamo's guards, so they are not checked again.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from tilewright import driver
from tilewright.errors import (
    MutationError,
    TilewrightError,
    TilewrightWarning,
    UnsupportedOpsError,
)
from tilewright.frontend.torch import captured, regions
from tilewright.frontend.torch.left import left_of
from tilewright.frontend.torch.plain_modules import teach_dynamo
from tilewright.frontend.torch.types import to_torch
from tilewright.integrations.left_in_torch import left_message, share_left
from tilewright.integrations.options import BackendOptionError, Options
from tilewright.runtime.dispatch import Policy, VariantTable
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.plan import Plan

teach_dynamo()

NAME = "tilewright"
_WEIGHT_SETS = 4  # modules sharing one graph whose weights become constants


@dataclass(frozen=True)
class RegionOutcome:
    """The outcome of compiling a graph at one set of sizes."""

    kind: str  # "compiled", "split", "torch" (nothing in it to compile), "failed"
    regions: int = 0
    left: Mapping[str, str] = field(default_factory=dict)  # nodes that run in PyTorch -> reason
    error: str = ""
    share: float = 0.0  # share of the graph's estimated time that runs in PyTorch
    plans: tuple[Plan, ...] = field(default=(), repr=False)  # of the regions


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **unused: Any,
) -> Callable[..., Any]:
    """The entry point `torch_dynamo_backends`: a graph of Dynamo as a callable."""
    return CompiledGraph(module, Options.of(options))


def register() -> None:
    """Make the name "tilewright" known to torch.compile if the package is not installed, as in a checkout."""
    from torch._dynamo.backends import registry

    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(compiler_fn=backend, name=NAME)


Runner = Callable[[Sequence[Any]], Any]
# Runs a call; the outcome of the graph; and the warning for the user as (key, text), or None.
Made = tuple[Runner, RegionOutcome, tuple[str, str] | None]


class CompiledGraph:
    """A graph of Dynamo, called with its flat arguments. Variants for sizes are compiled when they first occur."""

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        self._module = module
        self._options = options
        self._eager: Callable[..., Any] = module.forward
        self._policy = Policy(limit=options.variants)
        self._static = _weight_positions(module)
        self._weights = self._static if options.freeze else ()
        # The arguments whose sizes select a variant; None: all of them.
        count = sum(node.op == "placeholder" for node in module.graph.nodes)
        self._changing = [i for i in range(count) if i not in set(self._weights)] if self._weights else None
        # Tensors that the graph holds itself, as when tracing without inlined modules.
        self._own = [t for t in (*module.parameters(), *module.buffers()) if not t.is_inference()]
        self._scalars = captured.scalar_positions(module)
        # Dynamo calls a graph without symbolic sizes only with the sizes that it was captured for.
        self._one_size = not self._own and not self._scalars and _sizes_are_known(module)
        self._last: Runner | None = None  # the runner of the last call, if the next one must be like it
        self._tables: dict[Any, VariantTable[Runner]] = {}
        self._sets: dict[Any, tuple[list[torch.Tensor], list[int]]] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()  # what the user was told of this graph

    @property
    def variants(self) -> int:
        """The number of variants."""
        return sum(map(len, self._tables.values()))

    def __call__(self, *arguments: Any) -> Any:
        if (last := self._last) is not None:  # Dynamo also guards the gradient mode
            if (result := last(arguments)) is not None:
                return result
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in arguments
        ):
            _warn_once(
                "gradients",
                "a graph runs in PyTorch because gradients are enabled and its arguments ask for them; call the model"
                " under torch.no_grad() or torch.inference_mode() to have it compiled",
            )
            return self._eager(*arguments)
        weights = self._weight_set(arguments)
        table = self._tables.get(weights)
        if table is None:
            table = self._tables.setdefault(weights, VariantTable(self._policy))
        key = self._key(arguments)
        runner = table.get(key, lambda: self._make(arguments, weights is not None))
        if runner is None:
            return self._without_variant(table, key, arguments)
        if self._one_size and (weights is not None or not self._weights):
            self._last = _while_the_same(runner, arguments, self._weights)
        return runner(arguments)

    def _without_variant(self, table: VariantTable[Runner], key: Any, arguments: Sequence[Any]) -> Any:
        """A call with sizes that are not compiled, or not yet."""
        began = time.perf_counter()
        result = self._eager(*arguments)
        if not table.is_full:
            table.waited(key, time.perf_counter() - began)
        if "sizes" not in self._said:  # the message is a walk over the graph
            self._tell("sizes", _too_many_sizes(self._module, self._policy), arguments)
        return result

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        changing = self._changing
        key = [
            (a.shape, None if a.is_contiguous() else a.stride()) if isinstance(a, torch.Tensor) else a
            for a in (arguments if changing is None else [arguments[i] for i in changing])
        ]
        return (*key, *(arguments[i].item() for i in self._scalars), *(t._version for t in self._own))

    def _weight_set(self, arguments: Sequence[Any]) -> tuple[int, ...] | None:
        """The identity of these weights, if they are constants of a variant; None if weights are inputs."""
        if not self._weights:
            return None
        tensors = [arguments[i] for i in self._weights]
        if any(t.is_inference() for t in tensors):
            return None  # they have no version counters
        key = tuple(t.data_ptr() for t in tensors)
        known = self._sets.get(key)
        if known is not None:
            if [t._version for t in tensors] == known[1]:
                return key
            with self._lock:  # the model is being trained: constants would have to be recompiled repeatedly
                self._weights, self._sets, self._changing, self._last = (), {}, None, None
                self._tables.clear()
            return None
        with self._lock:
            if len(self._sets) >= _WEIGHT_SETS:
                return None
            # Kept alive, so that no other tensor can get their addresses.
            self._sets[key] = (tensors, [t._version for t in tensors])
        return key

    # -- variants --------------------------------------------------------------------------------------------------

    def _make(self, arguments: Sequence[Any], frozen: bool) -> Runner:
        try:
            runner, outcome, news = self._compile(arguments, frozen)
        except BackendOptionError:  # the caller must correct it
            raise
        except (
            Exception
        ) as error:  # whatever goes wrong in Tilewright or in the exporter, the user's model runs
            if not self._options.fallback:
                raise
            what = f"{type(error).__name__}: {error}"
            runner, outcome = self._in_torch, RegionOutcome("failed", error=what, share=1.0)
            news = (f"failed {what}", _failure(self._module, error))
        if news is not None:
            self._tell(*news, arguments)
        if self._options.observe is not None:
            self._options.observe(outcome)
        return runner

    def _tell(self, key: str, message: str, arguments: Sequence[Any]) -> None:
        """Warn of this graph, once whatever its sizes. Dynamo captures a model anew for other sizes, so what tells
        models apart is their weights."""
        if key in self._said:
            return
        self._said.add(key)
        told = _told.setdefault(key, set())
        model = hash(frozenset(id(arguments[i]) for i in self._static))
        if model not in told and len(told) < _MODELS_TOLD:
            told.add(model)
            _warn(message)

    def _in_torch(self, arguments: Sequence[Any]) -> Any:
        return self._eager(*arguments)

    def _compile(self, arguments: Sequence[Any], frozen: bool) -> Made:
        tensors = [(i, a) for i, a in enumerate(arguments) if isinstance(a, torch.Tensor)]
        slots = tuple(i for i, _ in tensors)
        odd = {
            f"argument {i}": "is not a dense tensor of the CPU or of an NVIDIA GPU"
            for i, a in tensors
            if not _is_plain(a)
        }
        devices = {str(a.device) for _, a in tensors}
        if not odd and len(devices) > 1:
            odd = {"graph": f"has arguments on {' and '.join(sorted(devices))}"}
        if odd:
            return self._left(odd)
        target = next(iter(devices), "cpu")
        try:
            numbers = {i: arguments[i].item() for i in self._scalars}
            program = captured.capture(captured.with_numbers(self._module, numbers), arguments)
        except MutationError as error:
            return self._left({"graph": str(error.message)})
        guard = _Distinct([slots[i] for i in program.writes], slots) if program.writes else None
        fixed = {number: a for number, (i, a) in enumerate(tensors) if frozen and i in self._weights}
        if not program.torch_side and not program.returns_itself:
            try:
                region = captured.import_region(program.program, program.writes, fixed)
                if not any(result is None for result in region.results) and not region.writes:
                    return (
                        self._in_torch,
                        RegionOutcome("torch", left={"graph": "has no tensor to compute"}),
                        None,
                    )
                run = RegionCall(self._build(region, target), region)
                runner = _returning(_Whole(run, slots, guard, self._eager), program, slots)
                return runner, RegionOutcome("compiled", regions=1, plans=(run.model.plan,)), None
            except UnsupportedOpsError:
                pass
        runner, outcome, news = self._split(program, fixed, slots, guard, target)
        return _returning(runner, program, slots), outcome, news

    def _split(
        self,
        program: captured.Captured,
        fixed: Mapping[int, torch.Tensor],
        slots: Sequence[int],
        guard: _Distinct | None,
        target: str,
    ) -> Made:
        operators = _operators(program.program)  # before the split, which changes the graph
        chunks = regions.cut(program, fixed)
        left, work = dict(chunks.left), list(chunks.work)
        if left and not self._options.fallback and set(left) - set(program.torch_side):
            raise UnsupportedOpsError([(why, name) for name, why in left.items()])
        plans: list[Plan] = []
        for name in chunks.regions:
            inner = chunks.module.get_submodule(name)
            assert isinstance(inner, fx.GraphModule)
            try:
                region = captured.import_region(
                    captured.export_region(inner), frozen=chunks.constants_of(name)
                )
                model = self._build(region, target)
                own = replace(region, inputs=tuple(range(len(region.inputs))))
                chunks.replace(name, _RegionModule(RegionCall(model, own)), region.inputs)
                plans.append(model.plan)
            except UnsupportedOpsError as error:
                left[name] = str(error.message)
                work += left_of(inner.graph.nodes, {n.name: error.message for n in inner.graph.nodes})
        share = share_left(work, plans, target) if work else 0.0
        key = str(sorted({(each.operator, each.location) for each in work}))
        news = (key, left_message(work, operators, share)) if work else None
        if not plans:
            return self._in_torch, RegionOutcome("torch", left=left, share=share), news
        runner = _split_runner(chunks, program, slots, guard, self._eager)
        outcome = RegionOutcome("split", regions=len(plans), left=left, share=share, plans=tuple(plans))
        return runner, outcome, news

    def _left(self, reasons: Mapping[str, str]) -> Made:
        """The whole graph, for a reason that is not one of its operators."""
        if not self._options.fallback:
            raise UnsupportedOpsError([(why, name) for name, why in reasons.items()])
        what = "; ".join(f"{name} {why}" for name, why in reasons.items())
        text = f"a graph of {_operators(self._module)} operators runs in PyTorch: {what}"
        return self._in_torch, RegionOutcome("torch", left=dict(reasons), share=1.0), (text, text)

    def _build(self, region: captured.Region, target: str) -> CompiledModel:
        return self._options.compiled(region.model, target)


def _while_the_same(runner: Runner, arguments: Sequence[Any], weights: Sequence[int]) -> Runner:
    """`runner` for calls with the same weights as these arguments; it returns None for others.

    Every step here matters: a small model takes a few microseconds, and may have a hundred weights.
    """
    run = runner.trusted(arguments) if isinstance(runner, _Whole) else runner
    if not weights:
        return run
    known = _getter(weights)(arguments)
    addresses = [*map(_address, known)]
    versions = sum(map(_version, known))  # each only grows
    others = [position for position in reversed(range(len(arguments))) if position not in weights]

    def checked(arguments: Sequence[Any]) -> Any:
        tensors = [*arguments]
        for position in others:  # few: faster than to choose the weights
            del tensors[position]
        if [*map(_address, tensors)] == addresses and sum(map(_version, tensors)) == versions:
            return run(arguments)
        return None

    return checked


_address, _version = torch.Tensor.data_ptr, operator.attrgetter("_version")


def _holds(tensor: torch.Tensor, size: int) -> bool:
    """Whether its storage has this many bytes from its first element on."""
    return bool(tensor.untyped_storage().nbytes() >= size + tensor.storage_offset() * tensor.itemsize)


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The arguments at these positions, as a tuple."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if not positions:
        return lambda arguments: ()
    (only,) = positions
    return lambda arguments: (arguments[only],)  # a generator would take longer than all else that is checked


class RegionCall:
    """A compiled region, called with the tensors of its program."""

    def __init__(self, model: CompiledModel, region: captured.Region) -> None:
        self.model = model
        self.inputs = region.inputs
        self._writes = region.writes
        self._results = region.results
        self._orders = region.orders
        # The usual region, whose results are those of the model.
        self.is_plain = (
            not self._writes and not any(self._orders) and not any(self._results) and bool(self.inputs)
        )

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        return self.finish(self.model.flat([tensors[i] for i in self.inputs]), tensors)

    def finish(self, outputs: list[Any], tensors: Sequence[Any]) -> list[Any]:
        """Make the region's results from its model's results. `tensors` includes those it writes to."""
        if self.is_plain:
            return outputs
        count = len(self._writes)
        for position, value in zip(self._writes, outputs, strict=False):
            tensors[position].copy_(to_torch(value))
        waiting = zip(outputs[count:], self._orders, strict=True)
        return [_placed(*next(waiting)) if r is None else r.value for r in self._results]


class _RegionModule(nn.Module):
    """A compiled region in place of the submodule that it replaces."""

    def __init__(self, call: RegionCall) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> Any:
        results = self.call(tensors)
        return results[0] if len(results) == 1 else tuple(results)


def _placed(value: Any, order: tuple[int, ...] | None) -> torch.Tensor:
    """A result with PyTorch's stride order. A model with only constant inputs returns arrays."""
    tensor: torch.Tensor = to_torch(value)
    return tensor if order is None else tensor.permute(order)


@dataclass(frozen=True)
class _Distinct:
    """Whether no other argument shares memory with a written one."""

    written: Sequence[int]
    slots: Sequence[int]

    def __call__(self, arguments: Sequence[Any]) -> bool:
        owners = [arguments[i].untyped_storage().data_ptr() for i in self.slots]
        return all(owners.count(arguments[i].untyped_storage().data_ptr()) == 1 for i in self.written)


class _Whole:
    """Runs a graph that is one compiled region."""

    def __init__(
        self, run: RegionCall, slots: Sequence[int], guard: _Distinct | None, eager: Callable[..., Any]
    ) -> None:
        self._region = run
        self._slots = slots
        self._guard = guard
        self._eager = eager
        self._positions = [slots[i] for i in run.inputs]
        self._inputs = _getter(self._positions)
        self._flat = run.model.flat

    def __call__(self, arguments: Sequence[Any]) -> Any:
        if self._guard is not None and not self._guard(arguments):
            return self._eager(*arguments)
        outputs = self._flat(self._inputs(arguments))
        return self._region.finish(outputs, [arguments[i] for i in self._slots])

    def trusted(self, arguments: Sequence[Any]) -> Runner:
        """The same without checks, for calls with tensors of these types, sizes and strides, which Dynamo's guards
        ensure."""
        model, inputs = self._region.model, self._inputs
        dense = all(tensor.is_contiguous() and not tensor.is_neg() for tensor in inputs(arguments))
        if not (self._region.is_plain and dense and type(model) is CompiledModel):
            return self
        wanted = [*zip(self._positions, (spec.bytes for spec in model.plan.inputs), strict=True)]

        def run(arguments: Sequence[Any]) -> Any:
            addresses = []
            for position, size in wanted:
                tensor = arguments[position]
                address = tensor.data_ptr()
                # No guard knows whether a storage was shrunk or freed; an ordinary call then reports the error.
                if not address or not (tensor.untyped_storage().nbytes() == size or _holds(tensor, size)):
                    return model.flat(inputs(arguments))
                addresses.append(address)
            return model.at(addresses)

        return run


def _split_runner(
    chunks: regions.Cut,
    program: captured.Captured,
    slots: Sequence[int],
    guard: _Distinct | None,
    eager: Callable[..., Any],
) -> Runner:
    module, taken = chunks.finished()
    forward = module.forward
    own = list(captured.lifted_tensors(program.program).values())
    lifted = [own[i] for i in taken if i < len(own)]
    chosen = _getter([slots[i - len(own)] for i in taken if i >= len(own)])
    written = [slots[i] for i in program.writes]

    def runner(arguments: Sequence[Any]) -> Any:
        if guard is not None and not guard(arguments):
            return eager(*arguments)
        outputs = forward(*lifted, *chosen(arguments))
        for position, value in zip(written, outputs, strict=False):
            arguments[position].copy_(value)
        return list(outputs[len(written) :])

    return runner


def _returning(runner: Runner, program: captured.Captured, slots: Sequence[int]) -> Runner:
    """`runner`, where arguments that the graph writes to and returns are returned themselves, not copies."""
    if not program.returned:
        return runner

    def run(arguments: Sequence[Any]) -> Any:
        results = list(runner(arguments))
        for number, position in program.returned.items():
            results[number] = arguments[slots[position]]
        return results

    return run


def _weight_positions(module: fx.GraphModule) -> tuple[int, ...]:
    """The arguments that are parameters and buffers of the model."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(
        i
        for i, node in enumerate(placeholders)
        if "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
    )


def _sizes_are_known(module: fx.GraphModule) -> bool:
    """Whether the graph was captured for fixed sizes, with only tensor arguments."""
    values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
    return all(
        isinstance(value, torch.Tensor)
        and all(type(extent) is int for extent in value.shape)
        and (value.layout is not torch.strided or all(type(step) is int for step in value.stride()))
        for value in values
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout is torch.strided
    )


# -- warnings ---------------------------------------------------------------------------------------------------

_MODELS_TOLD = 8  # models of which the same is said: there may be one for each layer
_told: dict[str, set[int]] = {}  # of which models a message was said
_warned: set[str] = set()


def _warn_once(key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        _warn(message)


def _warn(message: str) -> None:
    warnings.warn(f"tilewright: {message}", TilewrightWarning, stacklevel=_user_level())


def _user_level() -> int:
    """The `stacklevel` of the caller's own line, outside the frames of Tilewright, PyTorch and generated code."""
    inside = (os.path.dirname(driver.__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep, "<")
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


def _too_many_sizes(module: fx.GraphModule, policy: Policy) -> str:
    return (
        f"a graph of {_operators(module)} operators is called with many sizes. The first"
        f" {min(policy.eager, policy.limit)} are compiled when they come, later ones (up to {policy.limit} in all) when"
        " they have run in PyTorch for as long as compiling takes; until then they run in PyTorch. Keep sizes the same"
        " where you can: pad inputs to a few lengths, and call generate() of a Hugging Face model with"
        ' cache_implementation="static". options={"variants": n} changes the limit'
    )


def _operators(of: fx.GraphModule | ExportedProgram) -> int:
    return sum(n.op.startswith("call") and n.target is not operator.getitem for n in of.graph.nodes)


def _failure(module: fx.GraphModule, error: Exception) -> str:
    what = error.message if isinstance(error, TilewrightError) else str(error)
    first = "\n".join(what.splitlines()[:6])
    return (
        f"a graph of {_operators(module)} operators runs in PyTorch because compiling it failed with"
        f" {type(error).__name__}: {first}\n"
        "To see the graph, run with TORCH_LOGS=graph_code; to get the error with its traceback, pass"
        ' options={"fallback": False}.'
    )
