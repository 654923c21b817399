"""The modes of `compile(numerics=...)`, and what each allows a kernel to do.

| mode      | promise for float32 matmuls and convolutions                                                        |
| --------- | --------------------------------------------------------------------------------------------------- |
| `strict`  | no fast-math flags, no other algorithms, every rounding of the model's own types                    |
| `fast`    | the default: per element, |error| <= c K u sum_k |a_k b_k| (docs/numerics.md says which c)          |
| `relaxed` | as `fast`, and algorithms without such a bound: Strassen, paired products without a certificate;    |
|           | on a GPU also TF32                                                                                  |
| `tf32`    | as `fast`, and on a GPU float32 operands of matmuls may be rounded to 10 bits of fraction           |
"""

from __future__ import annotations

NUMERICS = ("fast", "strict", "relaxed", "tf32")
# Records made under another promise are not reused: the first `fast` had no bound for each element.
_RECORDED = {"fast": "fast/2", "tf32": "tf32/2"}


def recorded(numerics: str) -> str:
    """The mode as part of the key of measured records."""
    return _RECORDED.get(numerics, numerics)


def mode_of(recorded_name: str) -> str:
    return recorded_name.partition("/")[0]


def is_strict(numerics: str) -> bool:
    return numerics == "strict"


def may_lose_digits(numerics: str) -> bool:
    """Whether algorithms without an error bound for each element are allowed."""
    return numerics == "relaxed"


def may_round_to_tf32(numerics: str) -> bool:
    return numerics in ("tf32", "relaxed")
