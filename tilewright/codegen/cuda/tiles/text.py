"""Fragments of CUDA text: types, literals, and functions of a number's bits."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.cuda.scalars import c_type
from tilewright.dtypes import DType
from tilewright.tile.ir import Pointer

THREAD = "t"  # the thread's number in its block


def element_type(element: DType | Pointer) -> str:
    if isinstance(element, Pointer):
        return f"{element.element_ty.short}*"
    return c_type(element)


def element_bytes(element: DType | Pointer) -> int:
    return 8 if isinstance(element, Pointer) else element.bytes


def of_bits(variable: str, masks: Sequence[int]) -> str:
    """The sum of the masks of a number's set bits. The masks share no bits, or the sum is an exclusive or. Bits with
    consecutive masks are handled together."""
    terms, n = [], 0
    while n < len(masks):
        if not masks[n]:
            n += 1
            continue
        count = 1
        while (
            n + count < len(masks)
            and masks[n + count] == masks[n] << count
            and _separate(masks[n], count + 1)
        ):
            count += 1
        shifted = f"{variable} >> {n}" if n else variable
        some = f"({shifted} & {(1 << count) - 1})"
        terms.append(some if masks[n] == 1 else f"{some} * {masks[n]}")
        n += count
    if not terms:
        return "0"
    return terms[0] if len(terms) == 1 else f"({' ^ '.join(terms)})"


def _separate(mask: int, count: int) -> bool:
    """Whether a product with a number of so many bits has no carry."""
    return sum((mask << n).bit_count() for n in range(count)) == (mask * ((1 << count) - 1)).bit_count()


def picked(variable: str, positions: Sequence[int]) -> str:
    """The number formed by these bits of another number, lowest first."""
    masks = [0] * (max(positions, default=-1) + 1)
    for n, position in enumerate(positions):
        masks[position] = 1 << n
    return of_bits(variable, masks)


def loop(variable: str, count: int, body: str, step: int = 1) -> list[str]:
    """An unrolled loop around one statement."""
    advance = f"++{variable}" if step == 1 else f"{variable} += {step}"
    return ["#pragma unroll", f"for (int {variable} = 0; {variable} < {count}; {advance}) {body}"]
