"""Tests that compile CUDA text."""

from __future__ import annotations

import pytest

from tilewright.codegen.cuda import toolchain
from tilewright.errors import MissingDependencyError


def needs_nvrtc() -> None:
    """Skip the test, or the module, where NVRTC is not installed, or its bindings are there and the library is not."""
    try:
        toolchain.version()
    except MissingDependencyError as error:
        pytest.skip(str(error), allow_module_level=True)
