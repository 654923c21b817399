"""Tiles of vectors turned by shuffles.

A matrix of `rows` rows lies in vectors, row after row. Where both sides are powers of two, its transpose takes a few
rounds over all vectors: to interleave the first half of the elements with the second moves the bits of every element's
place round by one, and the transpose moves them round by log2(rows). Otherwise each vector of the result is put
together from those that it has elements of.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

Vectors = list[ir.Value]


def transposed(builder: ir.IRBuilder, vectors: Sequence[ir.Value], rows: int) -> Vectors:
    """The transpose of the matrix in `vectors`, row after row."""
    kind = vectors[0].type
    if isinstance(kind.element, ir.HalfType):  # which few processors shuffle as such
        bits = ir.VectorType(ir.IntType(16), kind.count)
        turned = transposed(builder, [builder.bitcast(vector, bits) for vector in vectors], rows)
        return [builder.bitcast(vector, kind) for vector in turned]
    result = list(vectors)
    columns = len(result) * _lanes(result) // rows
    if _is_power_of_two(rows) and _is_power_of_two(columns) and len(result) > 1:
        forward, backward = rows.bit_length() - 1, columns.bit_length() - 1
        for _ in range(min(forward, backward)):
            result = _interleaved(builder, result) if forward <= backward else _parted(builder, result)
        return result
    return [_collected(builder, result, rows, columns, number) for number in range(len(result))]


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
            places = [begin + lane // 2 + lanes * (lane % 2) for lane in range(lanes)]
            result.append(_shuffled(builder, one, other, places))
    return result


def _parted(builder: ir.IRBuilder, vectors: Vectors) -> Vectors:
    """All elements at even places, then all at odd ones."""
    lanes = _lanes(vectors)
    return [
        _shuffled(builder, one, other, [2 * lane + odd for lane in range(lanes)])
        for odd in (0, 1)
        for one, other in zip(vectors[::2], vectors[1::2], strict=True)
    ]


def _collected(builder: ir.IRBuilder, vectors: Vectors, rows: int, columns: int, number: int) -> ir.Value:
    """Vector `number` of the transpose, from one vector after another."""
    lanes = _lanes(vectors)
    places = [number * lanes + lane for lane in range(lanes)]
    origins = [place % rows * columns + place // rows for place in places]
    sources = list(dict.fromkeys(origin // lanes for origin in origins))
    result, place_in = vectors[sources[0]], [origin % lanes for origin in origins]
    for source in sources[1:] or sources:
        picks = [
            lanes + origin % lanes if origin // lanes == source else place
            for origin, place in zip(origins, place_in, strict=True)
        ]
        result, place_in = _shuffled(builder, result, vectors[source], picks), list(range(lanes))
    return result


def _shuffled(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, places: Sequence[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), list(places))
    return builder.shuffle_vector(one, other, mask)
