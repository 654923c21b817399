"""Object code into memory: refused by name where it wants too much, loaded and unloaded where it does not."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref

import numpy as np
import pytest

from tests.runtime import toys
from tilewright.errors import ArtifactMachineError, CodegenError
from tilewright.runtime import host, loader

MATH = """
declare float @{callee}(float)
define void @kernel(ptr %arguments, i64 %begin, i64 %end) {{
  %out = load ptr, ptr %arguments
  %x = load float, ptr %out
  %y = call float @{callee}(float %x)
  store float %y, ptr %out
  ret void
}}
"""


def calling(callee: str) -> bytes:
    return toys.compile_ir(MATH.format(callee=callee))


def test_undefined_symbols() -> None:
    assert loader.undefined_symbols(calling("expf")) == {"expf"}
    _, text = toys.kernel_ir("add", "f32", 2, 8)
    assert loader.undefined_symbols(toys.compile_ir(text)) == frozenset()


def test_allowed_symbols_are_called() -> None:
    code = calling("expf")
    library = loader.load_objects({"d": code}, {"kernel": "d"})
    value = np.array([1.0], np.float32)
    arguments = (ctypes.c_void_p * 1)(value.ctypes.data)
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(library["kernel"])
    kernel(ctypes.addressof(arguments), 0, 1)
    assert value[0] == pytest.approx(np.e)


def test_memory_functions_are_there() -> None:
    for name in ("memcpy", "memmove", "memset"):
        assert loader._external(name)


def test_foreign_symbols_are_refused_by_name() -> None:
    code = calling("system")
    with pytest.raises(CodegenError, match="may not use: system"):
        loader.load_objects({"d": code}, {"kernel": "d"})


def test_missing_object_and_missing_kernel() -> None:
    code = calling("expf")
    with pytest.raises(CodegenError, match="was not given"):
        loader.load_objects({}, {"kernel": "d"})
    with pytest.raises(CodegenError, match="nothere"):
        loader.load_objects({"d": code}, {"nothere": "d"})


def test_what_is_not_an_object() -> None:
    with pytest.raises(CodegenError, match="not an object file"):
        loader.load_objects({"d": b"garbage"}, {"kernel": "d"})
    code = calling("expf")
    for length in (4, 20, 63, len(code) // 2):
        with pytest.raises(CodegenError, match="damaged"):
            loader.undefined_symbols(code[:length])
    wide = bytearray(code)
    struct.pack_into("<Q", wide, 0x28, 1 << 60)
    with pytest.raises(CodegenError, match="damaged"):
        loader.undefined_symbols(bytes(wide))


def test_code_is_unloaded_with_its_library() -> None:
    _, text = toys.kernel_ir("add", "f32", 2, 8)
    code = toys.compile_ir(text)
    for _ in range(20):  # the same symbol again and again: libraries do not see each other
        library = loader.load_objects({"d": code}, {"toy_add_f32_8": "d"})
        assert library["toy_add_f32_8"]
    gone = weakref.ref(library._tracker)
    del library
    gc.collect()
    assert gone() is None


def test_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_CPU_FEATURES", raising=False)
    everything = host.features()
    assert everything
    some = sorted(everything)[0]
    monkeypatch.setenv("TILEWRIGHT_CPU_FEATURES", f"-{some},-nonsense")
    assert host.features() == everything - {some}
    target = {"triple": host.triple(), "features": [some]}
    with pytest.raises(ArtifactMachineError, match="TILEWRIGHT_CPU_FEATURES"):
        host.check(target)
    monkeypatch.delenv("TILEWRIGHT_CPU_FEATURES")
    host.check(target)
    host.check({"triple": host.triple(), "features": [f"+{some}", "-avx1024"]})


def test_levels_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    every = frozenset({"sse2", "avx", "avx2", "fma", "avx512f", "avx512vl", "amx-tile", "sse4.2", "64bit"})
    monkeypatch.setattr(host, "_detected", lambda: every)
    monkeypatch.setenv("TILEWRIGHT_CPU_FEATURES", "avx512")
    assert host.features() == every - {"amx-tile"}
    monkeypatch.setenv("TILEWRIGHT_CPU_FEATURES", "avx2")
    assert host.features() == {"sse2", "avx", "avx2", "fma", "sse4.2", "64bit"}
    monkeypatch.setenv("TILEWRIGHT_CPU_FEATURES", "avx2,-fma")
    assert "fma" not in host.features()
    monkeypatch.setenv("TILEWRIGHT_CPU_FEATURES", "baseline")
    assert host.features() == {"sse2", "64bit"}


def test_missing_features_are_named() -> None:
    with pytest.raises(ArtifactMachineError, match="avx1024, tensorcore"):
        host.check({"triple": host.triple(), "features": ["tensorcore", "avx1024"]})


def test_other_platforms_are_named() -> None:
    with pytest.raises(ArtifactMachineError, match="riscv64 linux"):
        host.check({"triple": "riscv64-unknown-linux-gnu", "features": []})
    with pytest.raises(ArtifactMachineError, match="darwin"):
        host.check({"triple": "x86_64-apple-macosx14", "features": []})
