"""Gradient descent over the mappings of all layers and the hardware together, many starts at once.

Coordinates are the logarithms of factors: of the tiles in each memory, and of the rows and columns of the array. The
DRAM factor is the loop's extent divided by its other factors. The hardware is inferred: an array as large as the
largest that a mapping uses, memories as large as the largest tiles. So the derivative of the network's EDP by the size
of a memory belongs to the layer that needs it to be that large, and one descent moves programs and hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright.codesign.mapping import DRAM, DRAM_ORDERS, INNER_ORDER, LEVELS, Hardware, Mappings
from tilewright.codesign.model import ACCUMULATOR_WORDS, COLUMNS, DIM, ROWS, SCRATCHPAD_WORDS, Model
from tilewright.codesign.network import Design, Evaluator, Limits
from tilewright.codesign.problem import LOOPS, C, K, N, Nests, P, Q, R, S
from tilewright.codesign.quantity import Quantity
from tilewright.errors import HardwareRangeError
from tilewright.hw.gemmini import KIB

_LOOPS, _FACTORS = len(LOOPS), len(LEVELS) * len(LOOPS)
# Free coordinates and their loops. Weights stay in registers through the loops of L0 and P, Q, N of L1 alike, so one of
# the two is enough.
_FREE = (
    *((loop, loop) for loop in (P, Q, N)),
    *((_LOOPS + loop, loop) for loop in (R, S, C, K)),
    *((2 * _LOOPS + loop, loop) for loop in range(_LOOPS)),
    (ROWS, C),
    (COLUMNS, K),
)
_INDEX = np.array([index for index, _ in _FREE])
_LOOP_OF = np.array([loop for _, loop in _FREE])
_OF_LOOP = (np.arange(_LOOPS)[:, None] == _LOOP_OF).astype(float)  # [loop, free]
_SPATIAL = slice(len(_FREE) - 2, len(_FREE))

_ORDERS = np.array(list(DRAM_ORDERS.values()), np.int8)
# One order for each tensor that can stay, as DOSA has them.
STATIONARY = (0, 2, 5)

_RATE, _MOMENT, _SECOND = 0.08, 0.9, 0.99
_SLOWING = 30.0  # steps
_PENALTY = 4.0  # of the logarithm of the area above its limit
_COVERED = 0.97  # share of the gradient in the layers that are moved at each step
_ALL_EVERY = 8  # steps after which all layers are moved
_REORDER = 25  # steps after which orders are chosen again


@dataclass
class Descent:
    """A batch of starts. `importance`: most steps evaluate and move only the layers with most of the gradient, and keep
    the others, so that as many evaluations are more steps."""

    evaluator: Evaluator
    limits: Limits
    starts: int
    rng: np.random.Generator
    importance: bool = True
    orders: tuple[int, ...] = tuple(range(len(DRAM_ORDERS)))
    point: np.ndarray = field(init=False)  # [starts, layers, free]
    order: np.ndarray = field(init=False)  # [starts, layers]: of DRAM's loops
    moves: np.ndarray = field(init=False)  # [starts, layers]: steps that moved the layer
    steps: int = 0

    def __post_init__(self) -> None:
        network = self.evaluator.network
        shape = (self.starts, len(network), len(_FREE))
        dims = np.exp(self.rng.uniform(np.log(4.0), np.log(max(4.0, self.limits.dim)), (self.starts, 1, 1)))
        share = self.rng.uniform(0.0, 0.6, (self.starts, 1, 1))  # of the logarithm of a loop, in tiles
        logs = np.log(network.nests.extents)[None][..., _LOOP_OF]
        self.point = logs * share * self.rng.uniform(0.0, 1.0, shape)
        self.point[..., _SPATIAL] = np.minimum(np.log(dims), logs[..., _SPATIAL])
        self.order = self.rng.choice(self.orders, (self.starts, len(network)))
        self._project()
        self._first = np.zeros(shape)
        self._second = np.zeros(shape)
        self.moves = np.zeros(shape[:2], int)
        self._counts = network.counts
        self._model = Model.of(self.evaluator.base, smoothing=0.05, rounded=False)
        # Of each layer when it was evaluated last: cycles and energy; their slopes by the hardware's logarithms; what
        # it needs of the hardware; the slopes of that; and its share in the gradient.
        self._known = np.ones((*shape[:2], 2))
        self._hardware_slopes = np.zeros((*shape[:2], 3, 2))
        self._needs = np.zeros((*shape[:2], 3))
        self._slopes = np.zeros((3, *shape))
        self._weight = np.ones(shape[:2])
        self._first_needs()

    # -- one step -------------------------------------------------------------------------------------------------

    def step(self) -> np.ndarray:
        """The loss before the step: [starts]. It is the logarithm of the EDP, plus the excess of the area over its
        limit."""
        if self.steps % _REORDER == 0:
            self._choose_orders()
        active = self._active()
        own, dram = self._evaluate(active)
        totals = np.einsum("l,slk->sk", self._counts, self._known)
        shares = self._counts[None, :, None] / totals[:, None]  # [starts, layers, 2]
        own, dram = (np.einsum("slk,slfk->slf", shares, part) for part in (own, dram))
        # By the hardware: all layers together, to those that decide it.
        pull = np.einsum("slk,slhk->sh", shares, self._hardware_slopes)
        loss = np.log(totals).sum(axis=1)
        excess, area_pull = self._area_slope()
        loss += _PENALTY * excess
        pull += _PENALTY * area_pull
        for part, widest in enumerate(self.widest().T):
            row = np.arange(self.starts), widest
            own[row] += (pull[:, part] * active[row])[:, None] * self._slopes[part][row]
        gradient = self._bounded(own, dram)
        self._weight = np.where(active, np.abs(gradient).sum(axis=2) + 1e-12, self._weight)
        self._move(gradient, active)
        self.steps += 1
        return loss

    def _active(self) -> np.ndarray:
        """The layers to move now, of each start: as few as have most of the gradient, and those that decide the
        hardware, since what the hardware costs the other layers is weighed against their own gain."""
        if not self.importance or self.steps % _ALL_EVERY == 0:
            return np.ones(self._weight.shape, bool)
        ranked = np.argsort(-self._weight, axis=1, kind="stable")
        sorted_weight = np.take_along_axis(self._weight, ranked, axis=1)
        before = np.cumsum(sorted_weight, axis=1) - sorted_weight
        active = np.zeros(self._weight.shape, bool)
        np.put_along_axis(active, ranked, before < _COVERED * self._weight.sum(axis=1, keepdims=True), axis=1)
        np.put_along_axis(active, self.widest(), True, axis=1)
        return active

    def _bounded(self, own: np.ndarray, dram: np.ndarray) -> np.ndarray:
        """The derivative by free coordinates. DRAM's factor falls while another factor of its loop grows, until it is
        1; after that, a larger factor pads the loop."""
        falling = own - dram
        left = np.log(self.evaluator.network.nests.extents) - np.einsum("kf,slf->slk", _OF_LOOP, self.point)
        full = (left < 1e-9)[..., _LOOP_OF]
        return np.where(full & (falling < 0.0), np.maximum(own, 0.0), falling)

    def _evaluate(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Evaluate the active layers. The slopes of their costs by free coordinates, and by DRAM's factor of the same
        loop: [starts, layers, free, 2]; 0 for the other layers."""
        nests, mappings = self._nests(active), self.mappings(active)
        found = self._model.estimate(nests, mappings, self._hardware(active), gradients=True)
        self.evaluator.mappings += len(mappings)
        costs = found.cycles, found.microjoules

        def columns(index: np.ndarray) -> np.ndarray:
            return np.stack([_gradient(cost)[:, index] for cost in costs], axis=2)

        self._known[active] = np.stack([cost.value for cost in costs], axis=1)
        self._hardware_slopes[active] = columns(np.array([DIM, SCRATCHPAD_WORDS, ACCUMULATOR_WORDS]))
        for part, name in ((1, "scratchpad"), (2, "accumulator")):
            tile = found.tiles[name]
            self._needs[active, part] = tile.value
            self._slopes[part][active] = _gradient(tile)[:, _INDEX] / tile.value[:, None]
        spatial = self.point[..., _SPATIAL]
        self._needs[..., 0] = np.exp(spatial.max(axis=2))
        self._slopes[0][..., _SPATIAL] = np.arange(2) == spatial.argmax(axis=2)[..., None]
        own, dram = np.zeros((2, *self.point.shape, 2))
        own[active], dram[active] = columns(_INDEX), columns(DRAM * _LOOPS + _LOOP_OF)
        return own, dram

    def _hardware(self, active: np.ndarray) -> Hardware:
        """The hardware that all layers of a row's start need together."""
        return Hardware(*self._needs.max(axis=1)[np.nonzero(active)[0]].T)

    def _first_needs(self) -> None:
        everything = np.ones(self.order.shape, bool)
        ones = np.ones(everything.size)
        tiles = self._model.estimate(
            self._nests(everything), self.mappings(everything), Hardware(ones, ones, ones)
        ).tiles
        for part, name in ((1, "scratchpad"), (2, "accumulator")):
            self._needs[..., part] = tiles[name].value.reshape(self.starts, -1)
        self._needs[..., 0] = np.exp(self.point[..., _SPATIAL].max(axis=2))

    def _nests(self, active: np.ndarray) -> Nests:
        return self.evaluator.network.nests.take(np.nonzero(active)[1])

    def _area_slope(self) -> tuple[np.ndarray, np.ndarray]:
        """The excess of the area's logarithm over its limit: [starts]; and its slope: [starts, 3]."""
        dim, scratchpad, accumulator = self._needs.max(axis=1).T
        model = self.evaluator.base.area_model
        if self.limits.area is None:
            return np.zeros(self.starts), np.zeros((self.starts, 3))
        memory = model.scratchpad_kib * scratchpad / KIB, model.accumulator_kib * accumulator * 4 / KIB
        array = model.constant + model.pe * dim**2 + model.row * dim
        area = array + sum(memory)
        excess = np.log(area / self.limits.area)
        slope = np.stack([2 * model.pe * dim**2 + model.row * dim, *memory], axis=1) / area[:, None]
        return np.maximum(excess, 0.0), slope * (excess > 0.0)[:, None]

    def _move(self, gradient: np.ndarray, active: np.ndarray) -> None:
        """One step of Adam for the active layers; then factors below 1 are set to 1."""
        moved = gradient != 0.0
        self.moves += active
        self._first = np.where(moved, _MOMENT * self._first + (1 - _MOMENT) * gradient, self._first)
        self._second = np.where(moved, _SECOND * self._second + (1 - _SECOND) * gradient**2, self._second)
        moves = np.maximum(self.moves, 1)[..., None]
        first, second = self._first / (1 - _MOMENT**moves), self._second / (1 - _SECOND**moves)
        rate = _RATE / np.sqrt(1.0 + self.steps / _SLOWING)
        self.point = self.point - np.where(moved, rate * first / (np.sqrt(second) + 1e-12), 0.0)
        self._project()

    def _project(self) -> None:
        self.point = np.maximum(self.point, 0.0)
        self.point[..., _SPATIAL] = np.minimum(self.point[..., _SPATIAL], np.log(self.limits.dim))
        logs = np.log(self.evaluator.network.nests.extents)
        sums = np.einsum("kf,slf->slk", _OF_LOOP, self.point)
        scale = np.where(sums > logs, logs / np.maximum(sums, 1e-12), 1.0)
        self.point *= scale[..., _LOOP_OF]

    # -- orders, and what it stands for ---------------------------------------------------------------------------

    def _choose_orders(self) -> None:
        """Choose, for each layer, the order of DRAM's loops with the least EDP."""
        everything = np.ones(self.order.shape, bool)
        tried = []
        for order in self.orders:
            self.order[:] = order
            found = self._model.estimate(
                self._nests(everything), self.mappings(everything), self._hardware(everything)
            )
            tried.append(np.stack([found.cycles.value, found.microjoules.value], axis=1))
        self.evaluator.mappings += len(self.orders) * everything.size
        costs = np.stack(tried).reshape(len(self.orders), self.starts, -1, 2)
        totals = np.einsum("l,oslk->osk", self._counts, costs).min(axis=0)
        value = (costs / totals[None, :, None]).sum(axis=3)
        self.order = np.array(self.orders)[value.argmin(axis=0)]

    def mappings(self, active: np.ndarray) -> Mappings:
        """The mappings of the active layers in all starts, with factors that need not be integers."""
        point = self.point[active]
        logs = np.zeros((len(point), ROWS + 2))
        logs[:, _INDEX] = point
        extents = self.evaluator.network.nests.extents[np.nonzero(active)[1]]
        left = np.log(extents) - np.einsum("kf,rf->rk", _OF_LOOP, point)
        logs[:, DRAM * _LOOPS : _FACTORS] = np.maximum(left, 0.0)
        values = np.exp(logs)
        order = np.empty((len(values), len(LEVELS), _LOOPS), np.int8)
        order[:, :DRAM] = INNER_ORDER
        order[:, DRAM] = _ORDERS[self.order[active]]
        factors = values[:, :_FACTORS].reshape(-1, len(LEVELS), _LOOPS)
        return Mappings(factors, values[:, ROWS], values[:, COLUMNS], order)

    def widest(self) -> np.ndarray:
        """The layers that decide the array, the scratchpad and the accumulator: [starts, 3]."""
        return np.asarray(self._needs.argmax(axis=1))

    def hardware(self) -> np.ndarray:
        """The hardware that the current mappings need: [starts, 3], with rows of PEs, words of scratchpad and words of
        accumulator."""
        return np.asarray(self._needs.max(axis=1))

    def rounded(self, start: int) -> Design | None:
        """The mappings of a start with integer factors, on the smallest hardware that runs them: each factor becomes
        the nearest divisor of the loop's remaining extent, from the innermost level to the outermost. None if a memory
        would exceed the largest size."""
        network = self.evaluator.network
        count = len(network)
        active = np.zeros(self.order.shape, bool)
        active[start] = True
        mappings = self.mappings(active)
        factors = np.ones_like(mappings.factors)
        spatial = np.ones((count, 2))
        for row, layer in enumerate(network.layers):
            for loop, left in enumerate(layer.extents):
                if loop in (C, K):
                    wanted = (mappings.rows, mappings.columns)[loop - C][row]
                    spatial[row, loop - C] = _nearest_divisor(left, wanted, self.limits.dim)
                    left //= int(spatial[row, loop - C])
                for level in range(DRAM):
                    factors[row, level, loop] = _nearest_divisor(left, mappings.factors[row, level, loop])
                    left //= int(factors[row, level, loop])
                factors[row, DRAM, loop] = left
        try:
            return self.evaluator.smallest(Mappings(factors, spatial[:, 0], spatial[:, 1], mappings.order))
        except HardwareRangeError:
            return None


def _gradient(quantity: Quantity) -> np.ndarray:
    assert quantity.gradient is not None
    return quantity.gradient


def _nearest_divisor(number: int, wanted: float, most: int | None = None) -> int:
    divisors = [
        each for each in range(1, number + 1) if number % each == 0 and (most is None or each <= most)
    ]
    return min(divisors, key=lambda each: abs(each - wanted))
