"""NVRTC as a function from source to machine code: its words reach the user, and nothing else is touched."""

from __future__ import annotations

import pytest

from tests.nvrtc import needs_nvrtc
from tilewright.codegen.cuda.toolchain import _nvrtc, compile_source, written
from tilewright.errors import CodegenError

needs_nvrtc()


def test_bytes_of_the_interpreter_stay_what_they_are() -> None:
    """A log of one byte, as NVRTC has where it has nothing to say, was written into the interpreter's only b" "."""
    nvrtc = _nvrtc()
    _, program = nvrtc.nvrtcCreateProgram(b"", b"empty.cu", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"])
    assert written(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program) == b"\0"
    assert [bytes([code])[0] for code in range(256)] == list(range(256))


def test_what_nvrtc_says_is_passed_on() -> None:
    with pytest.raises(CodegenError, match='identifier "nothing" is undefined'):
        compile_source('extern "C" __global__ void kernel(int* a) { *a = nothing; }', "sm_90a")
