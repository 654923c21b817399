"""The list of templates: one for each name that configs record, in an order that decides between equals."""

from __future__ import annotations

from tilewright.space.templates.cpu import TEMPLATES
from tilewright.space.templates.cpu.fast_algebra.attention import PairedAttention


def test_names_are_those_that_records_have() -> None:
    assert [template.name for template in TEMPLATES] == [
        "attention",
        "contraction",
        "contraction_int8",
        "contraction_transposed",
        "depthwise",
        "depthwise_channels_first",
        "paired",
        "row_block_chain",
        "separable",
        "strassen",
        "strassen_packed",
        "strassen_transposed",
        "winograd",
    ]


def test_of_two_with_one_name_the_one_that_does_more_is_listed() -> None:
    assert isinstance(TEMPLATES[0], PairedAttention)
