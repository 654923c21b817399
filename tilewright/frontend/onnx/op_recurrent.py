"""RNN, GRU and LSTM, unrolled over time.

The products of the inputs with their weights, which do not depend on earlier steps, are one matmul over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.dtypes import DType
from tilewright.frontend.builder import Unsupported
from tilewright.frontend.onnx.context import Context
from tilewright.frontend.onnx.op_movement import chunks
from tilewright.frontend.onnx.registry import converter
from tilewright.graph.ir import Node

Activation = Callable[[Node], Node]
State = list[Node]


def activation(ctx: Context, name: str, alpha: float | None, beta: float | None) -> Activation:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    plain = {"sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu"}
    key = name.lower()
    if key in plain:
        return lambda x: ctx.emit(plain[key], x)
    if key == "leakyrelu":
        return lambda x: ctx.emit("leaky_relu", x, slope=given(alpha, 0.01))
    if key == "elu":
        return lambda x: ctx.emit("elu", x, alpha=given(alpha, 1.0))
    if key == "hardsigmoid":
        return lambda x: ctx.emit(
            "clamp", ctx.add(ctx.mul(x, given(alpha, 0.2)), given(beta, 0.5)), min=0.0, max=1.0
        )
    if key == "affine":
        return lambda x: ctx.add(ctx.mul(x, given(alpha, 1.0)), given(beta, 0.0))
    if key == "scaledtanh":
        return lambda x: ctx.mul(ctx.emit("tanh", ctx.mul(x, given(beta, 1.0))), given(alpha, 1.0))
    if key == "softsign":
        return lambda x: ctx.div(x, ctx.add(ctx.emit("abs", x), 1))
    raise Unsupported(f"the activation {name}")


@dataclass(frozen=True)
class Cell:
    """One direction of a recurrent layer: its computation at a step."""

    feed: Callable[[Node], Node]  # the inputs [time, batch, inputs] times their weights
    step: Callable[
        [Node, State], State
    ]  # (input times weight, state) -> state, whose first part is the output


def run(
    ctx: Context, x: Node, cell: Cell, state: State, lengths: Node | None, *, backward: bool
) -> tuple[Node, State]:
    """(outputs [time, batch, hidden], last state) over x [time, batch, inputs]."""
    steps = x.shape[0]
    ctx.budget.count(steps, f"{ctx.source}: {steps} steps")
    fed = cell.feed(x)
    outputs: list[Node] = [x] * steps
    for time in reversed(range(steps)) if backward else range(steps):
        new = cell.step(ctx.index_axis(fed, 0, time), state)
        output = new[0]
        if lengths is not None:
            # After the end of a sequence the state is kept, and the output is 0.
            active = ctx.reshape(ctx.compare("gt", lengths, time), (x.shape[1], 1))
            new = [ctx.select(active, value, old) for value, old in zip(new, state, strict=True)]
            output = ctx.select(active, output, 0)
        outputs[time], state = output, new
    return ctx.stack(outputs, 0), state


def recurrent(
    ctx: Context,
    x: Node,
    cells: Sequence[Cell],
    states: Sequence[State],
    lengths: Node | None,
    direction: str,
    layout: int,
) -> tuple[Node, ...]:
    """(Y, and every last state) in the standard's layout. `x` is already [time, batch, inputs]."""
    if lengths is not None:
        lengths = ctx.cast(lengths, DType.I64)
        if ctx.statics.is_static(lengths) and bool(np.all(ctx.static(lengths) >= x.shape[0])):
            lengths = None
    results = [
        run(ctx, x, cell, state, lengths, backward=direction == "reverse" or number == 1)
        for number, (cell, state) in enumerate(zip(cells, states, strict=True))
    ]
    whole = ctx.stack([outputs for outputs, _ in results], 1)
    last = [ctx.stack(list(parts), 0) for parts in zip(*(state for _, state in results), strict=True)]
    if layout:
        return (ctx.permute(whole, (2, 0, 1, 3)), *(ctx.permute(state, (1, 0, 2)) for state in last))
    return (whole, *last)


@dataclass(frozen=True)
class RecurrentLayer:
    """The operands of a layer, split by direction."""

    directions: int
    hidden: int
    batch: int
    x: Node

    def part(self, ctx: Context, parameter: Node | None, direction: int) -> Node | None:
        return None if parameter is None else ctx.index_axis(parameter, 0, direction)

    def state(self, ctx: Context, initial: Node | None, direction: int, layout: int) -> Node:
        if initial is None:
            return ctx.full(0, self.x.dtype, (self.batch, self.hidden))
        return ctx.index_axis(initial, 1 if layout else 0, direction)


def layer_of(
    ctx: Context,
    x: Node,
    w: Node,
    r: Node,
    direction: str,
    layout: int,
    hidden: int | None,
    gates: int,
    bias: Node | None,
    lengths: Node | None,
    states: Sequence[Node | None],
) -> RecurrentLayer:
    """The layer; its operands must have the shapes that its number of gates and its weights imply."""
    expected = 2 if direction == "bidirectional" else 1
    if x.type.rank != 3:
        raise Unsupported(f"{x.type!r}: must be time, batch and inputs")
    if w.type.rank != 3 or r.type.rank != 3 or w.shape[0] != expected or r.shape[0] != expected:
        raise Unsupported(f"weights {w.type!r} and {r.type!r} for the direction {direction}")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise Unsupported(f"the direction {direction}")
    if hidden is not None and hidden != r.shape[2]:
        raise Unsupported(f"hidden_size {hidden} with recurrent weights {r.type!r}")
    timed = ctx.permute(x, (1, 0, 2)) if layout else x
    layer = RecurrentLayer(expected, r.shape[2], timed.shape[1], timed)
    rows = gates * layer.hidden
    state = (layer.batch, expected, layer.hidden) if layout else (expected, layer.batch, layer.hidden)
    for name, operand, wanted in (
        ("W", w, (expected, rows, timed.shape[2])),
        ("R", r, (expected, rows, layer.hidden)),
        ("B", bias, (expected, 2 * rows)),
        ("sequence_lens", lengths, (layer.batch,)),
        *(("an initial state", value, state) for value in states),
    ):
        if operand is not None and operand.shape != wanted:
            raise Unsupported(f"{name} is {operand.type!r}: must be {list(wanted)}")
    if lengths is not None:
        ctx.check_values(lengths, 0, timed.shape[0], "sequence_lens")
    return layer


def functions(
    ctx: Context,
    names: Sequence[str] | None,
    defaults: Sequence[str],
    directions: int,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
) -> list[list[Activation]]:
    """The activations of every direction."""
    chosen = list(names) if names is not None else list(defaults) * directions
    if len(chosen) != len(defaults) * directions:
        raise Unsupported(f"{len(chosen)} activations for {directions} direction(s)")
    made = []
    for position, name in enumerate(chosen):
        alpha = alphas[position] if alphas is not None and position < len(alphas) else None
        beta = betas[position] if betas is not None and position < len(betas) else None
        made.append(activation(ctx, name, alpha, beta))
    return [made[n : n + len(defaults)] for n in range(0, len(made), len(defaults))]


def by(ctx: Context, weight: Node) -> Callable[[Node], Node]:
    """The product with a weight [results, inputs]."""
    return lambda x: ctx.emit("linear", x, weight)


def clipped(ctx: Context, clip: float | None) -> Activation:
    return (
        (lambda x: x) if clip is None else lambda x: ctx.emit("clamp", x, min=-float(clip), max=float(clip))
    )


@converter("RNN")
def rnn(
    ctx: Context,
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    initial_h: Node | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Node, ...]:
    layer = layer_of(ctx, x, w, r, direction, layout, hidden_size, 1, b, lengths, (initial_h,))
    chosen = functions(ctx, activations, ("Tanh",), layer.directions, activation_alpha, activation_beta)
    limit = clipped(ctx, clip)
    cells, states = [], []
    for number in range(layer.directions):
        weight, recurrence = ctx.index_axis(w, 0, number), ctx.index_axis(r, 0, number)
        bias = _summed_bias(ctx, layer.part(ctx, b, number))
        (f,) = chosen[number]

        def step(
            fed: Node, state: State, r: Node = recurrence, b: Node | None = bias, f: Activation = f
        ) -> State:
            total = ctx.add(fed, ctx.emit("linear", state[0], r))
            return [f(limit(total if b is None else ctx.add(total, b)))]

        cells.append(Cell(by(ctx, weight), step))
        states.append([layer.state(ctx, initial_h, number, layout)])
    return recurrent(ctx, layer.x, cells, states, lengths, direction, layout)


def _summed_bias(ctx: Context, bias: Node | None) -> Node | None:
    """The biases of the input and of the recurrence, which are added in any case."""
    if bias is None:
        return None
    half = bias.shape[0] // 2
    return ctx.add(ctx.slice_axis(bias, 0, 0, half), ctx.slice_axis(bias, 0, half, 2 * half))


@converter("GRU")
def gru(
    ctx: Context,
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    initial_h: Node | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Node, ...]:
    layer = layer_of(ctx, x, w, r, direction, layout, hidden_size, 3, b, lengths, (initial_h,))
    chosen = functions(
        ctx, activations, ("Sigmoid", "Tanh"), layer.directions, activation_alpha, activation_beta
    )
    limit = clipped(ctx, clip)
    hidden = layer.hidden
    cells, states = [], []
    for number in range(layer.directions):
        weight, recurrence = ctx.index_axis(w, 0, number), ctx.index_axis(r, 0, number)
        bias = layer.part(ctx, b, number)
        if bias is None:
            bias = ctx.full(0, x.dtype, (6 * hidden,))
        f, g = chosen[number]

        def step(
            fed: Node,
            state: State,
            r: Node = recurrence,
            b: Node = bias,
            f: Activation = f,
            g: Activation = g,
        ) -> State:
            (h,) = state
            w_z, w_r, w_h, r_z, r_r, r_h = chunks(ctx, b, 0, (hidden,) * 6)
            x_z, x_r, x_h = chunks(ctx, fed, 1, (hidden,) * 3)
            m_z, m_r, m_h = chunks(ctx, r, 0, (hidden,) * 3)
            z = f(limit(ctx.add(ctx.add(x_z, ctx.emit("linear", h, m_z)), ctx.add(w_z, r_z))))
            reset = f(limit(ctx.add(ctx.add(x_r, ctx.emit("linear", h, m_r)), ctx.add(w_r, r_r))))
            if linear_before_reset:
                recalled = ctx.mul(reset, ctx.add(ctx.emit("linear", h, m_h), r_h))
            else:
                recalled = ctx.add(ctx.emit("linear", ctx.mul(reset, h), m_h), r_h)
            new = g(limit(ctx.add(ctx.add(x_h, recalled), w_h)))
            return [ctx.add(ctx.mul(ctx.sub(1, z), new), ctx.mul(z, h))]

        cells.append(Cell(by(ctx, weight), step))
        states.append([layer.state(ctx, initial_h, number, layout)])
    return recurrent(ctx, layer.x, cells, states, lengths, direction, layout)


@converter("LSTM")
def lstm(
    ctx: Context,
    x: Node,
    w: Node,
    r: Node,
    b: Node | None = None,
    lengths: Node | None = None,
    initial_h: Node | None = None,
    initial_c: Node | None = None,
    p: Node | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Node, ...]:
    layer = layer_of(ctx, x, w, r, direction, layout, hidden_size, 4, b, lengths, (initial_h, initial_c))
    products = [
        (by(ctx, ctx.index_axis(w, 0, number)), by(ctx, ctx.index_axis(r, 0, number)))
        for number in range(layer.directions)
    ]
    chosen = functions(
        ctx, activations, ("Sigmoid", "Tanh", "Tanh"), layer.directions, activation_alpha, activation_beta
    )
    parameters = LstmParameters(b, p, initial_h, initial_c, clip, bool(input_forget))
    cells, states = lstm_cells(ctx, layer, products, chosen, parameters, layout)
    return recurrent(ctx, layer.x, cells, states, lengths, direction, layout)


@dataclass(frozen=True)
class LstmParameters:
    """Parameters of an LSTM besides its weights and activations."""

    bias: Node | None
    peepholes: Node | None
    initial_h: Node | None
    initial_c: Node | None
    clip: float | None = None
    input_forget: bool = False


def lstm_cells(
    ctx: Context,
    layer: RecurrentLayer,
    products: Sequence[tuple[Callable[[Node], Node], Callable[[Node], Node]]],
    chosen: Sequence[list[Activation]],
    parameters: LstmParameters,
    layout: int,
) -> tuple[list[Cell], list[State]]:
    """The cells and first states of every direction. `products`: of the inputs and of the state with their weights."""
    limit = clipped(ctx, parameters.clip)
    cells: list[Cell] = []
    states: list[State] = []
    for number, (feed, recall) in enumerate(products):
        bias = _summed_bias(ctx, layer.part(ctx, parameters.bias, number))
        peephole = layer.part(ctx, parameters.peepholes, number)
        if peephole is not None and peephole.shape != (3 * layer.hidden,):
            raise Unsupported(f"peepholes {peephole.type!r} for {layer.hidden} units")

        def step(
            fed: Node,
            state: State,
            recall: Callable[[Node], Node] = recall,
            b: Node | None = bias,
            p: Node | None = peephole,
            acts: list[Activation] = chosen[number],
        ) -> State:
            h, c = state
            f, g, out = acts
            gates = ctx.add(fed, recall(h))
            gates = gates if b is None else ctx.add(gates, b)
            i, o, forget, cell = chunks(ctx, gates, 1, (layer.hidden,) * 4)
            p_i, p_o, p_f = (None,) * 3 if p is None else chunks(ctx, p, 0, (layer.hidden,) * 3)
            i = f(limit(i if p_i is None else ctx.add(i, ctx.mul(p_i, c))))
            if parameters.input_forget:
                forget = ctx.sub(1, i)
            else:
                forget = f(limit(forget if p_f is None else ctx.add(forget, ctx.mul(p_f, c))))
            new = ctx.add(ctx.mul(forget, c), ctx.mul(i, g(limit(cell))))
            o = f(limit(o if p_o is None else ctx.add(o, ctx.mul(p_o, new))))
            return [ctx.mul(o, out(new)), new]

        cells.append(Cell(feed, step))
        states.append(
            [
                layer.state(ctx, parameters.initial_h, number, layout),
                layer.state(ctx, parameters.initial_c, number, layout),
            ]
        )
    return cells, states
