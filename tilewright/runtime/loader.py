"""Load object code into memory as callable kernels.

This uses LLVM's ORC linker. It gets exactly the external symbols of `ALLOWED`, never the whole process; an object
that needs another symbol is refused, by name, before LLVM sees it.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import struct
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from tilewright.errors import CodegenError
from tilewright.runtime.contract import code_of

_MATH = """
    exp exp2 expm1 log log2 log10 log1p pow sqrt cbrt hypot sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh
    atanh erf erfc tgamma lgamma fmod floor ceil trunc round rint nearbyint roundeven fma fmin fmax
""".split()  # noqa: SIM905

# External symbols that object code may use: calls from LLVM's own lowering, and the C library's math.
ALLOWED = frozenset(("memcpy", "memmove", "memset", *_MATH, *(name + "f" for name in _MATH)))

# Undefined in the object, but defined by the linker for position-independent code.
_LINKER_DEFINED = frozenset(("_GLOBAL_OFFSET_TABLE_",))

_names = itertools.count()
_lock = threading.Lock()


def object_digest(data: bytes) -> str:
    """The digest that identifies object code in a plan and an artifact."""
    return hashlib.sha256(data).hexdigest()


class Library:
    """Loaded object code: symbol -> address. The addresses are valid as long as this object lives."""

    def __init__(self, tracker: Any, symbols: Iterable[str]) -> None:
        self._tracker = tracker  # unloads the code when collected
        self._addresses: dict[str, int] = {symbol: int(tracker[symbol]) for symbol in symbols}

    def __getitem__(self, symbol: str) -> int:
        return self._addresses[symbol]


def load_objects(objects: Mapping[str, bytes], kernels: Mapping[str, str]) -> Library:
    """Load the object code that holds `kernels` (symbol -> digest of its object)."""
    import llvmlite.binding as llvm

    builder = llvm.JITLibraryBuilder()
    undefined: set[str] = set()
    for digest in sorted(set(kernels.values())):
        if digest not in objects:
            raise CodegenError(f"the plan needs object code {digest[:16]} and it was not given")
        data = code_of(bytes(objects[digest]))
        undefined |= check_symbols(data, digest[:16])
        builder.add_object_img(data)
    for symbol in sorted(undefined):
        builder.import_symbol(symbol, _external(symbol))
    for symbol in kernels:
        builder.export_symbol(symbol)
    return Library(_link(builder, "object code"), kernels)


def load_ir(text: str, symbols: Iterable[str]) -> Library:
    """Compile LLVM IR that needs no external symbol; for the launcher."""
    import llvmlite.binding as llvm

    symbols = tuple(symbols)
    builder = llvm.JITLibraryBuilder().add_ir(text)
    for symbol in symbols:
        builder.export_symbol(symbol)
    return Library(_link(builder, "the launcher"), symbols)


def _link(builder: Any, what: str) -> Any:
    # A library's name cannot be reused, even after unloading.
    try:
        return builder.link(_jit(), f"tilewright.{next(_names)}")
    except RuntimeError as error:
        raise CodegenError(f"LLVM could not link {what}: {error}") from None


@cache
def _make_jit() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Only the launcher is compiled here. Without optimisation that takes 10 ms instead of 35, for 1 ns more per step.
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(opt=0)
    # JITLink places an object's sections together; the older linker may put them too far apart for relative
    # addresses.
    return llvm.create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)


def _jit() -> Any:
    """One linker per process. It is never disposed, because threads of the pool may still run its code at
    shutdown."""
    with _lock:
        return _make_jit()


@cache
def _external(symbol: str) -> int:
    for name in (None, "libm.so.6"):  # the process has the C library, and nearly always its math
        try:
            function = getattr(ctypes.CDLL(name), symbol)
        except (OSError, AttributeError):
            continue
        address = ctypes.cast(function, ctypes.c_void_p).value
        if address:
            return address
    raise CodegenError(f"object code calls {symbol}, which the C library of this machine does not have")


# -- the symbol table of an object -----------------------------------------------------------------------------------


def check_symbols(data: bytes, name: str = "object code") -> frozenset[str]:
    """The external symbols of an object; raises CodegenError unless all of them are allowed."""
    undefined = undefined_symbols(data, name)
    foreign = sorted(undefined - ALLOWED)
    if foreign:
        raise CodegenError(f"{name} uses symbols that object code may not use: {', '.join(foreign)}")
    return undefined


def undefined_symbols(data: bytes, name: str = "object code") -> frozenset[str]:
    """The undefined symbols of a 64-bit little-endian ELF object.

    Other formats (Mach-O) are not read: everything allowed is offered to them, and ORC raises for the rest, so this
    reader is for a better message and not the only guard.
    """
    if data[:4] != b"\x7fELF":
        if data[:4] == b"\xcf\xfa\xed\xfe":
            return frozenset(symbol for symbol in ALLOWED if _is_available(symbol))
        raise CodegenError(f"{name} is not an object file")
    try:
        return frozenset(_elf_undefined(data)) - _LINKER_DEFINED
    except (struct.error, IndexError, ValueError) as error:
        raise CodegenError(f"{name} is a damaged object file: {error}") from None


def _is_available(symbol: str) -> bool:
    try:
        return bool(_external(symbol))
    except CodegenError:
        return False


_SHT_SYMTAB = 2
_SHN_UNDEF = 0


def _elf_undefined(data: bytes) -> Iterable[str]:
    if data[4:6] != b"\x02\x01":
        raise ValueError("not 64-bit little-endian")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count = struct.unpack_from("<HH", data, 0x3A)
    if count == 0:  # with more than 65279 sections, the count is in the first section header
        (count,) = struct.unpack_from("<Q", data, table + 0x20)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * entry) for index in range(count)]
    for section in sections:
        _, kind, _, _, offset, size, link, _, _, stride = section
        if kind != _SHT_SYMTAB:
            continue
        if offset + size > len(data) or stride < 24:
            raise ValueError("a symbol table outside of the file")
        strings = sections[link][4]
        for position in range(offset + stride, offset + size, stride):  # the first entry is always empty
            name, _, _, where = struct.unpack_from("<IBBH", data, position)
            if where == _SHN_UNDEF and name:
                begin = strings + name
                yield data[begin : data.index(b"\0", begin)].decode("ascii", "replace")
