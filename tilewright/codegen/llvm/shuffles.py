"""Transposes of register tiles by vector shuffles.

A matrix of `rows` rows lies in vectors, row after row. Where both sides are powers of two, its transpose takes a few
rounds over all vectors: to interleave the first half of the elements with the second moves the bits of every element's
place round by one, and the transpose moves them round by log2(rows). Otherwise each vector of the result is put
together from those that it has elements of.

A square of whole vectors is turned in blocks of 16 bytes, within which processors interleave at no other cost than the
instruction: first each block, with as many rows as it has elements, then the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from tilewright.codegen.llvm.types import numbers

Vectors = list[ir.Value]

_BLOCK_BITS = 128


def transposed(builder: ir.IRBuilder, vectors: Sequence[ir.Value], rows: int) -> Vectors:
    """The transpose of the matrix in `vectors`, row after row."""
    if rows == 1:
        return list(vectors)
    kind = vectors[0].type
    if isinstance(kind.element, ir.HalfType):  # which few processors shuffle as such
        bits = ir.VectorType(ir.IntType(16), kind.count)
        as_bits = transposed(builder, [builder.bitcast(vector, bits) for vector in vectors], rows)
        return [builder.bitcast(vector, kind) for vector in as_bits]
    result = list(vectors)
    columns = len(result) * _lanes(result) // rows
    inside = _BLOCK_BITS // _bits(kind.element)
    if rows == columns == _lanes(result) > inside > 1:
        return _square(builder, result, inside)
    if _is_power_of_two(rows) and _is_power_of_two(columns) and len(result) > 1:
        forward, backward = rows.bit_length() - 1, columns.bit_length() - 1
        for _ in range(min(forward, backward)):
            result = _interleaved(builder, result) if forward <= backward else _parted(builder, result)
        return result
    return [_collected(builder, result, rows, columns, number) for number in range(len(result))]


def _square(builder: ir.IRBuilder, vectors: Vectors, inside: int) -> Vectors:
    """Transpose a square: as many vectors as each has lanes, in blocks of `inside` elements."""
    result, lanes = list(vectors), _lanes(vectors)
    for first in range(0, lanes, inside):  # one after another: few vectors wait for others at a time
        distance = inside // 2
        while distance:
            for number in range(first, first + inside):
                if number & distance == 0:
                    pair = result[number], result[number + distance]
                    result[number], result[number + distance] = (
                        shuffled(builder, *pair, _within_blocks(lanes, inside, half)) for half in (0, 1)
                    )
            distance //= 2
    count = lanes // inside
    for number in range(inside):
        blocks = result[number::inside]
        for _ in range(count.bit_length() - 1):
            blocks = _parted(builder, blocks, inside)
        result[number::inside] = blocks
    return result


def _within_blocks(lanes: int, inside: int, half: int) -> list[int]:
    """The elements of one half of each block of two vectors, in turn."""
    begin = half * inside // 2
    positions = [begin + position // 2 + lanes * (position % 2) for position in range(inside)]
    return [block + position for block in range(0, lanes, inside) for position in positions]


def _bits(element: ir.Type) -> int:
    sizes = {"float": 32, "double": 64, "half": 16}
    return int(element.width) if isinstance(element, ir.IntType) else sizes[str(element)]


def _lanes(vectors: Sequence[ir.Value]) -> int:
    return int(vectors[0].type.count)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _interleaved(builder: ir.IRBuilder, vectors: Vectors) -> Vectors:
    """The elements of the first half of the vectors and those of the second half in turn."""
    half, lanes = len(vectors) // 2, _lanes(vectors)
    result = []
    for one, other in zip(vectors[:half], vectors[half:], strict=True):
        for begin in (0, lanes // 2):
            positions = [begin + lane // 2 + lanes * (lane % 2) for lane in range(lanes)]
            result.append(shuffled(builder, one, other, positions))
    return result


def _parted(builder: ir.IRBuilder, vectors: Vectors, size: int = 1) -> Vectors:
    """Elements, or blocks of `size`, at even positions first, then those at odd ones."""
    lanes = _lanes(vectors)
    return [
        shuffled(
            builder, one, other, [(lane // size * 2 + odd) * size + lane % size for lane in range(lanes)]
        )
        for odd in (0, 1)
        for one, other in zip(vectors[::2], vectors[1::2], strict=True)
    ]


def _collected(builder: ir.IRBuilder, vectors: Vectors, rows: int, columns: int, number: int) -> ir.Value:
    """Vector `number` of the transpose, from one vector after another."""
    lanes = _lanes(vectors)
    positions = [number * lanes + lane for lane in range(lanes)]
    origins = [position % rows * columns + position // rows for position in positions]
    return picked(builder, vectors, [o // lanes for o in origins], [o % lanes for o in origins])


def picked(
    builder: ir.IRBuilder, vectors: Vectors, sources: Sequence[int], positions: Sequence[int]
) -> ir.Value:
    """The vector of which each lane is an element of one of `vectors`, at a place of it."""
    kind, lanes = vectors[0].type, _lanes(vectors)
    if isinstance(kind.element, ir.HalfType):
        bits = [builder.bitcast(vector, ir.VectorType(ir.IntType(16), lanes)) for vector in vectors]
        return builder.bitcast(picked(builder, bits, sources, positions), kind)
    order = list(dict.fromkeys(sources))
    result, position_in = vectors[order[0]], list(positions)
    for source in order[1:] or order:
        picks = [
            lanes + position if origin == source else so_far
            for origin, position, so_far in zip(sources, positions, position_in, strict=True)
        ]
        result, position_in = shuffled(builder, result, vectors[source], picks), list(range(lanes))
    return result


def shuffled(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, positions: Sequence[int]) -> ir.Value:
    """Elements of two vectors, those of the second one counted on."""
    mask = numbers(ir.IntType(32), tuple(positions))
    return builder.shuffle_vector(one, other, mask)
