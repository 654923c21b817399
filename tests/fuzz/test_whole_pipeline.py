"""A few random graphs down the whole road, and the fuzzer itself: it must see a wrong kernel."""

from __future__ import annotations

import pytest

from tests.fuzz import whole_pipeline


def test_random_graphs() -> None:
    whole_pipeline.run(count=40, start=0)


def test_a_wrong_result_is_found_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = whole_pipeline.compile_imported

    def broken(*arguments, **options):
        compiled = honest(*arguments, **options)
        return lambda *arrays: tuple(
            output * 1.01 if output.dtype.kind == "f" else output for output in compiled(*arrays)
        )

    monkeypatch.setattr(whole_pipeline, "compile_imported", broken)
    with pytest.raises(AssertionError, match="is off by"):
        whole_pipeline.run(count=20, start=1)
