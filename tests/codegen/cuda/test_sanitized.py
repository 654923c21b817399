"""A sample of kernels under compute-sanitizer, where it is installed. All its tools take it in
`python -m tests.codegen.cuda.sanitized`."""

from __future__ import annotations

import pytest

from tests.codegen.cuda import sanitized
from tilewright.hw.gpu import H200


@pytest.mark.slow
def test_the_sample_has_every_template() -> None:
    names = [name for name, _, _ in sanitized.samples(H200)]
    for template in (*sanitized.TEMPLATES, *sanitized.SKETCHES):
        assert any(name.endswith(f"by {template.name}") for name in names)


def test_without_the_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "_POSITIONS", ("no such tool",))
    assert sanitized.main([]) == sanitized.MISSING
    assert "comes with the CUDA toolkit" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(sanitized.tool() is None, reason="compute-sanitizer is not installed")
def test_nothing_is_accessed_out_of_bounds() -> None:
    answer = sanitized.main(["memcheck"])
    if answer == sanitized.MISSING:
        pytest.skip("the system does not let compute-sanitizer look into a process")
    assert answer == 0
