"""Check that an object file is well-formed before LLVM's loader sees it.

Only what Tilewright's code generator emits is accepted: one symbol table, code and read-only data, relocations within
these. LLVM's loader trusts headers that it should not, and crashes on many modified files.
"""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from typing import NamedTuple, NoReturn

from tilewright.errors import CodegenError

_MACHO = b"\xcf\xfa\xed\xfe"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_RELOCATABLE = 1  # the file type
_NULL, _PROGBITS, _SYMTAB, _STRTAB, _RELA = 0, 1, 2, 3, 4
_ADDRSIG = 0x6FFF4C03  # LLVM's address-significance table, for linkers
_WRITE, _ALLOC, _EXEC, _MERGE, _STRINGS, _INFO_LINK, _EXCLUDE = 1, 2, 4, 0x10, 0x20, 0x40, 0x80000000
_NOTYPE, _OBJECT, _FUNC, _SECTION_SYMBOL, _FILE = range(5)
_LOCAL, _GLOBAL = 0, 1
_UNDEFINED, _ABSOLUTE = 0, 0xFFF1
_MAX_SECTIONS, _MAX_ALIGNMENT = 4096, 4096
_SLACK = 64  # bytes by which a relocation may point past its symbol: PC-relative ones count from their end

# By machine: relocation types that generated code has, and the bytes that each changes.
_RELOCATIONS = {
    62: {1: 8, 2: 4, 4: 4, 9: 4, 24: 8, 41: 4, 42: 4},
    183: {
        257: 8, 261: 4, 275: 4, 277: 4, 278: 4, 282: 4, 283: 4, 284: 4, 285: 4, 286: 4, 299: 4, 311: 4, 312: 4,
    },
}  # fmt: skip
# LLVM's loader treats sections of certain names specially (.eh_frame, .tdata, .debug_...), but not these.
_NAMES = re.compile(
    rb"\.text(\..*)?|\.rodata(\..*)?|\.data\.rel\.ro(\..*)?|\.note\.GNU-stack|\.comment", re.S
)


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class _Symbol(NamedTuple):
    name: bytes
    binding: int
    kind: int
    section: int
    value: int
    size: int


def check(data: bytes, kernel: str) -> None:
    """Raise CodegenError unless `data` is a loadable object file that defines the function `kernel`."""
    if data[:4] == _MACHO:
        return  # macOS files, which only LLVM's loader reads
    try:
        _Object(data).check(kernel.encode())
    except (struct.error, IndexError, UnicodeError) as error:
        _fail(str(error))


class _Object:
    def __init__(self, data: bytes) -> None:
        self.data = data
        header = _HEADER.unpack_from(data)
        identity, kind, self.machine, version, _, program_headers, table, _, size, _, programs, entry = (
            header[:12]
        )
        count, names = header[12:]
        if identity[:8] != b"\x7fELF\x02\x01\x01\x00" or any(identity[8:]) or version != 1:
            _fail("it is not a 64-bit little-endian ELF file")
        if kind != _RELOCATABLE or self.machine not in _RELOCATIONS:
            _fail("it is not a relocatable file for a known processor")
        if size != _HEADER.size or entry != _SECTION.size or programs or program_headers:
            _fail("its header is not sound")
        if not 1 <= count <= _MAX_SECTIONS or table % 8 or table + count * entry > len(data):
            _fail("its section headers are not within it")
        self.sections = [_Section(*_SECTION.unpack_from(data, table + n * entry)) for n in range(count)]
        for number, section in enumerate(self.sections):
            _check_section(number, section, len(data))
        if not 0 < names < count or self.sections[names].kind != _STRTAB:
            _fail("its sections have no names")
        self.names = self._strings(names)
        for section in self.sections[1:]:
            name = _string(self.names, section.name)
            if section.kind == _PROGBITS and _NAMES.fullmatch(name) is None:
                _fail(f"a section {name[:40]!r}")

    def check(self, kernel: bytes) -> None:
        tables = [number for number, section in enumerate(self.sections) if section.kind == _SYMTAB]
        if len(tables) != 1:
            _fail(f"{len(tables)} symbol tables")
        (table,) = tables
        self.symbols = self._symbols(table)
        for section in self.sections:
            if section.kind == _RELA:
                self._check_relocations(section, table)
            elif section.kind == _ADDRSIG and section.link != table:
                _fail("a table of addresses without symbols")
        defined = [symbol for symbol in self.symbols if symbol.binding == _GLOBAL and symbol.section]
        if len({symbol.name for symbol in defined}) != len(defined):
            _fail("two symbols of one name")
        entries = [symbol for symbol in defined if symbol.name == kernel]
        if not entries or entries[0].kind != _FUNC or not self.sections[entries[0].section].flags & _EXEC:
            _fail(f"it defines no function {kernel.decode()[:80]!r}")

    def _strings(self, number: int) -> bytes:
        section = self.sections[number]
        strings = self.data[section.offset : section.offset + section.size]
        if section.kind != _STRTAB or not strings or strings[0] or strings[-1]:
            _fail("a table of names that is not one")
        return strings

    def _symbols(self, number: int) -> list[_Symbol]:
        table = self.sections[number]
        if table.entry != _SYMBOL.size or not table.size or table.size % table.entry or table.alignment != 8:
            _fail("a symbol table with entries of another size")
        if not 0 < table.link < len(self.sections):
            _fail("a symbol table without names")
        strings = self._strings(table.link)
        count = table.size // table.entry
        if not 0 < table.info <= count:
            _fail("a symbol table that does not say which symbols are local")
        symbols = []
        for index in range(count):
            name, info, other, section, value, size = _SYMBOL.unpack_from(
                self.data, table.offset + index * table.entry
            )
            symbol = _Symbol(_string(strings, name), info >> 4, info & 15, section, value, size)
            if other or symbol.binding != (_LOCAL if index < table.info else _GLOBAL):
                _fail("a symbol that is neither local nor global")
            self._check_symbol(index, symbol)
            symbols.append(symbol)
        return symbols

    def _check_symbol(self, index: int, symbol: _Symbol) -> None:
        what = f"the symbol {symbol.name[:80].decode(errors='replace')!r}"
        if not symbol.name.isascii():
            _fail(f"{what}: a name that is not ASCII")
        if index == 0:
            if symbol != _Symbol(b"", 0, 0, 0, 0, 0):
                _fail("its first symbol is not empty")
        elif symbol.kind == _FILE:
            if symbol.section != _ABSOLUTE or symbol.binding != _LOCAL or symbol.value or symbol.size:
                _fail(f"{what}: no name of a file")
        elif symbol.section == _UNDEFINED:
            if (
                symbol.binding != _GLOBAL
                or symbol.kind != _NOTYPE
                or symbol.value
                or symbol.size
                or not symbol.name
            ):
                _fail(f"{what}: undefined, and not global")
        elif symbol.section >= len(self.sections):
            _fail(f"{what}: in no section")
        else:
            section = self.sections[symbol.section]
            if symbol.kind not in (_NOTYPE, _OBJECT, _FUNC, _SECTION_SYMBOL) or section.kind != _PROGBITS:
                _fail(f"{what}: of the kind {symbol.kind}")
            if symbol.value + symbol.size > section.size or not section.flags & _ALLOC:
                _fail(f"{what}: not within its section")
            if symbol.kind == _FUNC and not (section.flags & _EXEC and symbol.size):
                _fail(f"{what}: a function that is not code")
            if symbol.kind == _SECTION_SYMBOL and (symbol.value or symbol.size or symbol.binding != _LOCAL):
                _fail(f"{what}: not the beginning of a section")

    def _check_relocations(self, table: _Section, symbols: int) -> None:
        if table.link != symbols or not 0 < table.info < len(self.sections) or table.alignment != 8:
            _fail("relocations without a section")
        if table.entry != _RELOCATION.size or table.size % table.entry:
            _fail("relocations whose entries have another size")
        target = self.sections[table.info]
        if target.kind != _PROGBITS or not target.flags & _ALLOC:
            _fail("unsupported relocation: its section is not loaded")
        widths = _RELOCATIONS[self.machine]
        taken: list[tuple[int, int]] = []
        for index in range(table.size // table.entry):
            place, info, addend = _RELOCATION.unpack_from(self.data, table.offset + index * table.entry)
            width, number = widths.get(info & 0xFFFFFFFF), info >> 32
            if width is None or place + width > target.size or not 0 < number < len(self.symbols):
                _fail("unsupported relocation")
            symbol = self.symbols[number]
            if symbol.kind == _FILE:
                _fail("a relocation to the name of a file")
            room = self.sections[symbol.section].size if symbol.section else 0
            if not -_SLACK <= symbol.value + addend <= room + _SLACK:
                _fail("a relocation to a place outside of its section")
            taken.append((place, place + width))
        taken.sort()
        if any(begin < end for (_, end), (begin, _) in pairwise(taken)):
            _fail("relocations on top of each other")


def _check_section(number: int, section: _Section, size: int) -> None:
    if number == 0:
        if any(section):
            _fail("its first section is not empty")
        return
    if section.kind not in (_PROGBITS, _SYMTAB, _STRTAB, _RELA, _ADDRSIG) or section.address:
        _fail(f"a section of the kind {section.kind}")
    if section.offset + section.size > size or section.offset < _HEADER.size:
        _fail("a section that is not within the file")
    alignment = section.alignment
    if (
        alignment < 1
        or alignment > _MAX_ALIGNMENT
        or alignment & (alignment - 1)
        or section.offset % alignment
    ):
        _fail(f"a section aligned to {alignment}")
    allowed = {_PROGBITS: _ALLOC | _EXEC | _MERGE | _STRINGS, _RELA: _INFO_LINK, _ADDRSIG: _EXCLUDE}
    writable = (
        _WRITE if section.kind == _PROGBITS else 0
    )  # .data.rel.ro, because the loader writes its relocations
    if section.flags & ~(allowed.get(section.kind, 0) | writable) or section.flags & (_WRITE | _EXEC) == (
        _WRITE | _EXEC
    ):
        _fail(f"a section with the flags {section.flags:#x}")
    if section.kind == _PROGBITS and (section.link or section.info):
        _fail("a section that refers to others")
    if section.flags & _MERGE and (
        section.entry not in (1, 2, 4, 8, 16, 32, 64) or section.size % section.entry
    ):
        _fail("a section of constants of no size")


def _string(strings: bytes, offset: int) -> bytes:
    if offset >= len(strings):
        _fail("a name that is not within its table")
    return strings[offset : strings.index(b"\0", offset)]


def _fail(problem: str) -> NoReturn:
    raise CodegenError(f"object code that is not well-formed: {problem}")
