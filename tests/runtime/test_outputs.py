"""Memory of results used again: never while anything still shows a result, and not more of it kept than is said."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime import toys
from tilewright.runtime.model import CompiledModel
from tilewright.runtime.outputs import LARGE, OutputMemory

SHAPE = (4, LARGE // 16 + 16)  # of float32: a little more than what is kept


def filled(value: float) -> np.ndarray:
    return np.full(SHAPE, value, np.float32)


def memory_of(model: CompiledModel) -> OutputMemory:
    memory = model._out_ports[0]._memory
    assert memory is not None
    return memory


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def torch_result(model: CompiledModel, value: float) -> Any:
    torch = pytest.importorskip("torch")
    return model(torch.from_numpy(filled(value)))


# Ways to hold on to a result, and what an element of it is then.
HOLDS: dict[str, tuple[Callable[[CompiledModel, float], Any], Callable[[Any], float]]] = {
    "array": (lambda model, value: model(filled(value)), lambda held: held[3, -1]),
    "slice": (lambda model, value: model(filled(value))[3:, ::7], lambda held: held[0, 0]),
    "reshaped": (lambda model, value: model(filled(value)).T.reshape(-1, order="F"), lambda held: held[-1]),
    "element view": (lambda model, value: model(filled(value)).view(np.int32)[1:2], lambda held: held.view("f4")[0, 5]),
    "buffer": (lambda model, value: memoryview(model(filled(value))), lambda held: held[2, 3]),
    "iterator": (lambda model, value: iter(model(filled(value))), lambda held: next(held)[0]),
    "generator": (lambda model, value: rows_of(model(filled(value))), lambda held: next(held)),
    "tensor": (torch_result, lambda held: float(held[3, -1])),
    "tensor view": (lambda model, value: torch_result(model, value)[2][5:9], lambda held: float(held[1])),
    "tensor's storage": (lambda model, value: torch_result(model, value).untyped_storage(), lambda held: stored(held)),
    "array of a tensor": (lambda model, value: torch_result(model, value).numpy()[1], lambda held: held[6]),
    "tensor of an array": (lambda model, value: tensor_of(model(filled(value))), lambda held: float(held[1, 1])),
    "DLPack of an array": (lambda model, value: from_dlpack(model(filled(value))), lambda held: float(held[1, 1])),
    "DLPack of a tensor": (lambda model, value: np.from_dlpack(torch_result(model, value)), lambda held: held[1, 1]),
    "cycle": (lambda model, value: in_a_cycle(model(filled(value))), lambda held: held[0][0, 0]),
}  # fmt: skip


def rows_of(array: np.ndarray) -> Iterator[float]:
    while True:
        yield float(array[0, 0])


def stored(storage: Any) -> float:
    return float(np.array([storage[n] for n in range(4)], np.uint8).view(np.float32)[0])


def tensor_of(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


def from_dlpack(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_dlpack(array)


def in_a_cycle(array: np.ndarray) -> list[Any]:
    held: list[Any] = [array]
    held.append(held)
    return held


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return toys.identity(SHAPE, threads=1)


@pytest.mark.parametrize("way", HOLDS)
def test_what_is_held_stays_as_it_was(way: str, model: CompiledModel) -> None:
    hold, element = HOLDS[way]
    held = hold(model, 1.0)
    for value in (2.0, 3.0, 4.0):
        model(filled(value))
    assert element(held) == 1.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(HOLDS)), st.integers(0, 3)), max_size=12))
def test_results_come_and_go_in_any_order(model: CompiledModel, calls: list[tuple[str, int]]) -> None:
    """Each call's result replaces what is held in one of four hands; the others still show theirs."""
    hands: dict[int, tuple[str, Any, float]] = {}
    for number, (way, hand) in enumerate(calls, start=1):
        hands[hand] = (way, HOLDS[way][0](model, float(number)), float(number))
        for kind, held, value in hands.values():
            if kind != "iterator":  # shows each row once
                assert HOLDS[kind][1](held) == value
        assert memory_of(model).kept_bytes <= 2 * 4 * np.prod(SHAPE)


def test_memory_that_nobody_refers_to_is_used_again(model: CompiledModel) -> None:
    result = model(filled(1.0))
    place = address(result)
    del result
    again = model(filled(2.0))
    assert address(again) == place
    assert address(model(filled(3.0))) != place
    assert again[0, 0] == 2.0


def test_tensors_and_arrays_take_turns_in_the_same_memory(model: CompiledModel) -> None:
    place = address(model(filled(1.0)))
    assert torch_result(model, 2.0).data_ptr() == place
    assert address(model(filled(3.0))) == place


def test_large_results_begin_at_a_cache_line(model: CompiledModel) -> None:
    assert address(model(filled(1.0))) % 64 == 0


def test_at_most_two_pieces_are_kept() -> None:
    model = toys.identity(SHAPE, threads=1)
    results = [model(filled(n)) for n in range(5)]
    assert memory_of(model).kept_bytes == 0
    results.clear()
    assert memory_of(model).kept_bytes == 2 * 4 * np.prod(SHAPE)


def test_small_results_are_the_allocators() -> None:
    model = toys.identity((4, 16), threads=1)
    result = model(np.ones((4, 16), np.float32))
    assert model._out_ports[0]._memory is None and result.flags.owndata


def test_results_outlive_the_model_and_free_memory_does_not() -> None:
    model = toys.identity(SHAPE, threads=1)
    result = model(filled(1.0))
    model(filled(2.0))  # its memory is free now
    free = weakref.ref(memory_of(model)._free[0])
    del model
    gc.collect()
    assert free() is None
    assert (result == 1.0).all()
    del result  # no other result gets its memory


def test_a_result_as_the_next_input(model: CompiledModel) -> None:
    result = model(filled(7.0))
    for _ in range(6):
        result = model(result)
    assert (result == 7.0).all()


def test_each_output_of_a_model_has_its_own_memory() -> None:
    toy = toys.Toy()
    x = toy.input("x", SHAPE)
    both = toy.model([toy.apply("neg", x), toy.apply("add", x, x)], threads=1)
    for value in (1.0, 2.0, 3.0):
        negative, double = both(filled(value))
        assert (negative == -value).all() and (double == 2 * value).all()


def test_many_threads_at_once(model: CompiledModel) -> None:
    """Threads that keep some results and drop others; each looks at what it kept at the end."""
    wrong: list[str] = []

    def work(number: int) -> None:
        kept: list[tuple[np.ndarray, float]] = []
        for turn in range(12):
            value = float(100 * number + turn)
            result = model(filled(value))
            if not (result == value).all():
                wrong.append(f"thread {number}, call {turn}")
            if turn % 3 == 0:
                kept.append((result[1:, 5:], value))
        wrong.extend(f"thread {number}, kept {value}" for view, value in kept if not (view == value).all())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16), ("bool", np.bool_)]
)
def test_other_types(dtype: str, numpy: Any) -> None:
    torch = pytest.importorskip("torch")
    shape = (2, LARGE)
    model = toys.identity(shape, dtype, threads=1)
    x = np.ones(shape, numpy)
    assert (model(x) == x).all() and model(x).dtype == x.dtype
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "bool": torch.bool}[dtype]
    tensor = model(torch.ones(shape, dtype=kind))
    assert tensor.dtype is kind and tensor.shape == shape and bool((tensor == 1).all())


def test_tensors_are_ordinary_ones(model: CompiledModel) -> None:
    """Leaves, no views, contiguous; written in place, differentiated through, moved to shared memory."""
    torch = pytest.importorskip("torch")
    tensor = torch_result(model, 1.0)
    assert tensor.is_leaf and not tensor._is_view() and tensor.is_contiguous() and not tensor.is_inference()
    tensor.add_(1)
    tensor.requires_grad_()
    (tensor * 3).sum().backward()
    assert bool((tensor.grad == 3).all())
    shared = torch_result(model, 5.0).share_memory_()
    model(filled(6.0))
    assert shared.is_shared() and bool((shared == 5).all())
    with torch.inference_mode():
        assert bool((torch_result(model, 8.0) == 8).all())
    with torch.device("meta"):
        x = torch.full(SHAPE, 9.0, device="cpu")
        assert bool((model(x) == 9).all())
