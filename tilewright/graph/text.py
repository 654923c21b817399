r"""The text form of a graph, used for display, golden files and task keys.

    %x = input {index=0} : f32[1,3,224,224]
    %w = constant @conv1.weight : f32[64,3,7,7]
    %2 = constant [0.5] : f32[]
    %3 = conv(%x, %w) {dilation=(1, 1), groups=1, ...} : f32[1,64,109,109]  # conv1
    %4 = mul(%3, %2) : f32[1,64,109,109]
    return %4

Grammar, one statement per line; empty lines and lines that begin with `#` are ignored:

    graph      ::= statement* "return" [value ("," value)*]
    statement  ::= value "=" body ":" type ["#" source]
    body       ::= "constant" (literals | "@" name)  |  op ["(" value ("," value)* ")"] [attributes]
    value      ::= "%" (digits | name)                 name: [A-Za-z_][A-Za-z0-9_.]*
    type       ::= dtype "[" [digits ("," digits)*] "]"
    literals   ::= "[" [number ("," number)*] "]"      the elements in row-major order
    attributes ::= "{" name "=" attr ("," name "=" attr)* "}"
    attr       ::= number | string | dtype | "(" [attr ("," attr)* [","]] ")" | "true" | "false" | "none"
    number     ::= integer | float | "inf" | "-inf" | "nan" | "nan:" hexdigits (the bits of an unusual NaN)
    string     ::= as in JSON

A float always has a point, an exponent or a name, to distinguish `1` from `1.0`. Numbers have enough digits to
restore the same bits. A value has the node's name if that is unique, otherwise its position; `source` is the rest of
the line. A constant of more than 16 elements is written as a reference, and its array comes from `constants_of`.
Types are inferred again on parsing and must equal those written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.dtypes import DType
from tilewright.errors import TextFormError, TilewrightError
from tilewright.graph import op as op_table
from tilewright.graph.ir import Graph, Node, TensorType, input_node
from tilewright.graph.provenance import Provenance

INLINE_LIMIT = 16

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}


# -- printing -----------------------------------------------------------------------------------------------------


def print_graph(graph: Graph, *, names: bool = True) -> str:
    """The text form. Without `names`, values are named by position and sources are omitted, so that graphs with the
    same structure have the same text."""
    nodes = graph.nodes()
    values = _value_names(nodes, names)
    references = _references(nodes)
    lines = []
    for node in nodes:
        line = f"{values[node]} = {_body(node, values, references)} : {node.type!r}"
        if names and node.source:
            line += f"  # {' '.join(str(node.source).split())}"
        lines.append(line)
    lines.append(f"return {', '.join(values[node] for node in graph.outputs)}".rstrip())
    return "\n".join(lines) + "\n"


def constants_of(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays that the text form refers to, by name."""
    return {name: node.data for node, name in _references(graph.nodes()).items() if node.data is not None}


def _value_names(nodes: list[Node], names: bool) -> dict[Node, str]:
    if not names:
        return {node: f"%{position}" for position, node in enumerate(nodes)}
    taken = _unique_names(nodes)
    return {node: f"%{taken.get(node, position)}" for position, node in enumerate(nodes)}


def _unique_names(nodes: list[Node]) -> dict[Node, str]:
    count: dict[str, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    return {node: node.name for node in nodes if count[node.name] == 1 and _NAME.fullmatch(node.name)}


def _references(nodes: list[Node]) -> dict[Node, str]:
    """Names for the constants that are not inline. A repeated or invalid name gets a number."""
    result: dict[Node, str] = {}
    taken: set[str] = set()
    for node in nodes:
        if not node.is_constant or node.type.size <= INLINE_LIMIT:
            continue
        base = re.sub(r"[^A-Za-z0-9_.]", "_", node.name) or "constant"
        if not _NAME.match(base):
            base = f"_{base}"
        name, number = base, 1
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        taken.add(name)
        result[node] = name
    return result


def _body(node: Node, values: Mapping[Node, str], references: Mapping[Node, str]) -> str:
    if node.is_constant:
        assert node.data is not None
        return f"constant {f'@{references[node]}' if node in references else _literals(node.data)}"
    text = node.op
    if node.inputs:
        text += f"({', '.join(values[operand] for operand in node.inputs)})"
    if node.attrs:
        text += f" {{{', '.join(f'{key}={print_attr(node.attrs[key])}' for key in sorted(node.attrs))}}}"
    return text


def print_attr(value: Any) -> str:
    if isinstance(value, DType):
        return value.short
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(print_attr, value))}{',' if len(value) == 1 else ''})"
    raise TypeError(f"an attribute cannot be a {type(value).__name__}: {value!r}")


def _literals(array: np.ndarray) -> str:
    return f"[{', '.join(_literal(element) for element in array.reshape(-1))}]"


def _literal(element: Any) -> str:
    dtype = DType.of(element)
    if dtype is DType.BOOL:
        return str(bool(element)).lower()
    if dtype.is_integer:
        return str(int(element))
    number = float(element)
    if math.isnan(number):
        usual = np.array(math.nan).astype(dtype.numpy)
        return "nan" if element.tobytes() == usual.tobytes() else f"nan:{element.tobytes()[::-1].hex()}"
    # The shortest digits of the narrow type are used if they restore the same value; they read better than the
    # double's.
    short = repr(float(str(element))) if dtype.bytes < 8 else repr(number)
    return (
        short if np.array(float(short)).astype(dtype.numpy).tobytes() == element.tobytes() else repr(number)
    )


# -- parsing ------------------------------------------------------------------------------------------------------


def parse_graph(text: str, constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Parse a graph, or raise TextFormError with the line. `constants` has the arrays that the text refers to with
    `@`."""
    values: dict[str, Node] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            if re.match(r"return\b", stripped):
                graph = _parse_return(stripped, values)
                _expect_nothing_after(text, number)
                return graph
            _parse_statement(stripped, values, constants or {})
        except _Refused as error:
            raise TextFormError(f"line {number}: {error}: {stripped}") from None
        except TilewrightError as error:
            raise TextFormError(f"line {number}: {error.message}: {stripped}") from None
    raise TextFormError(f"line {len(text.splitlines()) + 1}: the text ends without a return")


class _Refused(Exception):
    """The error in a line; the caller adds its number."""


def _expect_nothing_after(text: str, number: int) -> None:
    rest = (line.strip() for line in text.splitlines()[number:])
    if any(line and not line.startswith("#") for line in rest):
        raise _Refused("there are statements after the return")


def _parse_return(line: str, values: Mapping[str, Node]) -> Graph:
    tokens = _Tokens(line)
    tokens.take("return")
    outputs = []
    if not tokens.at_end():
        outputs.append(_value(tokens, values))
        while tokens.skip(","):
            outputs.append(_value(tokens, values))
    tokens.finish()
    inputs = sorted(
        (node for node in values.values() if node.is_input), key=lambda node: int(node.attrs["index"])
    )
    if [node.attrs["index"] for node in inputs] != list(range(len(inputs))):
        raise _Refused(f"inputs have the positions {[node.attrs['index'] for node in inputs]}")
    return Graph(tuple(inputs), tuple(outputs))


def _parse_statement(line: str, values: dict[str, Node], constants: Mapping[str, np.ndarray]) -> None:
    tokens = _Tokens(line)
    key = _value_name(tokens)
    if key in values:
        raise _Refused(f"{key} has been defined before")
    tokens.take("=")
    name = key[1:] if not key[1:].isdigit() else ""
    op = tokens.take_kind("word", "an operator")
    if op == "constant":
        node = _constant(tokens, constants)
    else:
        operands = _operands(tokens, values) if tokens.skip("(") else ()
        attrs = _attributes(tokens) if tokens.skip("{") else {}
        tokens.take(":")
        node = _apply(op, operands, attrs, _type(tokens))
    values[key] = replace(node, name=name, source=Provenance.parse(tokens.finish()))


def _apply(op: str, operands: tuple[Node, ...], attrs: dict[str, Any], written: TensorType) -> Node:
    if op == "input":
        index = attrs.get("index")
        if list(attrs) != ["index"] or operands or not isinstance(index, int) or isinstance(index, bool):
            raise _Refused("an input has the one attribute index and no operands")
        return input_node(index, written)
    if op not in op_table.table():
        raise _Refused(f"the operator {op} is not known")
    if set(attrs) != set(op_table.op_of(op).attrs):
        raise _Refused(f"{op} takes the attributes {', '.join(op_table.op_of(op).attrs) or 'none'}")
    node = op_table.apply(op, *operands, **attrs)
    if node.type != written:
        raise _Refused(f"the type is {node.type!r}, not {written!r}")
    return node


def _constant(tokens: _Tokens, constants: Mapping[str, np.ndarray]) -> Node:
    if tokens.skip("@"):
        name = tokens.take_kind("word", "the name of a constant")
        tokens.take(":")
        type = _type(tokens)
        if name not in constants:
            raise _Refused(f"no constant @{name} was given")
        data = constants[name]
        if data.shape != type.shape or data.dtype != type.dtype.numpy:
            raise _Refused(f"constant @{name} is {data.dtype}{list(data.shape)}")
        return Node("constant", (), type, data=np.asarray(data, order="C"))
    tokens.take("[")
    elements = []
    while not tokens.skip("]"):
        elements.append(tokens.take_literal())
        if not tokens.skip(","):
            tokens.take("]")
            break
    tokens.take(":")
    type = _type(tokens)
    if len(elements) != type.size:
        raise _Refused(f"{len(elements)} elements for {type!r}")
    flat = np.empty(len(elements), type.dtype.numpy)
    for position, element in enumerate(elements):
        _store(flat, position, element, type.dtype)
    return Node("constant", (), type, data=flat.reshape(type.shape))


def _store(flat: np.ndarray, position: int, element: Any, dtype: DType) -> None:
    if isinstance(element, str):  # the bits of a NaN
        bits = bytes.fromhex(element)[::-1]
        if not dtype.is_float or len(bits) != dtype.bytes:
            raise _Refused(f"nan:{element} does not have the bits of a NaN of type {dtype.short}")
        flat[position] = np.frombuffer(bits, dtype.numpy)[0]
        return
    legal = (
        isinstance(element, bool)
        if dtype is DType.BOOL
        else isinstance(element, (int, float) if dtype.is_float else int) and not isinstance(element, bool)
    )
    if not legal:
        raise _Refused(f"an element must be of type {dtype.short}, got {element!r}")
    try:
        flat[position] = element
    except OverflowError:
        raise _Refused(f"{element!r} does not fit {dtype.short}") from None


def _operands(tokens: _Tokens, values: Mapping[str, Node]) -> tuple[Node, ...]:
    result = [_value(tokens, values)]
    while tokens.skip(","):
        result.append(_value(tokens, values))
    tokens.take(")")
    return tuple(result)


def _attributes(tokens: _Tokens) -> dict[str, Any]:
    result: dict[str, Any] = {}
    while True:
        key = tokens.take_kind("word", "the name of an attribute")
        tokens.take("=")
        if key in result:
            raise _Refused(f"attribute {key} is given twice")
        result[key] = _attr(tokens)
        if tokens.skip("}"):
            return result
        tokens.take(",")


def _attr(tokens: _Tokens) -> Any:
    if tokens.skip("("):
        items = []
        while not tokens.skip(")"):
            items.append(_attr(tokens))
            if not tokens.skip(","):
                tokens.take(")")
                break
        return tuple(items)
    return tokens.take_attr()


def _value_name(tokens: _Tokens) -> str:
    tokens.take("%")
    kind, text = tokens.next("a value")
    if kind != "word" and not (kind == "number" and text.isdigit()):
        raise _Refused(f"a value was expected, not %{text}")
    return f"%{text}"


def _value(tokens: _Tokens, values: Mapping[str, Node]) -> Node:
    key = _value_name(tokens)
    if key not in values:
        raise _Refused(f"{key} has not been defined")
    return values[key]


def _type(tokens: _Tokens) -> TensorType:
    dtype = tokens.take_dtype()
    tokens.take("[")
    shape = []
    while not tokens.skip("]"):
        kind, text = tokens.next("an extent")
        if kind != "number" or not text.isdigit():
            raise _Refused(f"an extent was expected, not {text}")
        shape.append(int(text))
        if not tokens.skip(","):
            tokens.take("]")
            break
    return TensorType(tuple(shape), dtype)


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<nan>nan:[0-9a-f]+)
    | (?P<number>-?\d+(?:\.\d*)?(?:e[+-]?\d+)?|-inf\b)
    | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<comment>\#.*)
    | (?P<sign>[%=():,{}@\[\]])
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str


class _Tokens:
    """The tokens of one line."""

    def __init__(self, line: str) -> None:
        self._tokens = list(self._scan(line.rstrip()))
        self._position = 0

    @staticmethod
    def _scan(line: str) -> Iterator[_Token]:
        position = 0
        while position < len(line):
            match = _TOKEN.match(line, position)
            if match is None:
                raise _Refused(f"unexpected {line[position:].lstrip()[0]!r} in column {position + 1}")
            position = match.end()
            kind = str(match.lastgroup)
            yield _Token(kind, match.group(kind))

    def at_end(self) -> bool:
        return self._position == len(self._tokens)

    def next(self, wanted: str) -> tuple[str, str]:
        if self.at_end():
            raise _Refused(f"the line ends where {wanted} was expected")
        token = self._tokens[self._position]
        self._position += 1
        return token.kind, token.text

    def skip(self, text: str) -> bool:
        """Skip the next token if it is `text`, and say whether it was."""
        found = not self.at_end() and self._tokens[self._position].text == text
        self._position += found
        return found

    def take(self, text: str) -> None:
        found = self.next(repr(text))[1]
        if found != text:
            raise _Refused(f"{text!r} was expected, not {found!r}")

    def take_kind(self, kind: str, wanted: str) -> str:
        found, text = self.next(wanted)
        if found != kind:
            raise _Refused(f"{wanted} was expected, not {text!r}")
        return text

    def take_dtype(self) -> DType:
        text = self.take_kind("word", "an element type")
        try:
            return DType.parse(text)
        except KeyError:
            raise _Refused(f"{text} is not an element type") from None

    def take_attr(self) -> Any:
        kind, text = self.next("an attribute")
        if kind == "string":
            try:
                return json.loads(text)
            except ValueError:
                raise _Refused(f"{text} is not a string") from None
        if kind == "number":
            return _number(text)
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        if kind == "word":
            try:
                return DType.parse(text)
            except KeyError:
                pass
        raise _Refused(f"{text} is not an attribute")

    def take_literal(self) -> Any:
        """A number, a bool, or the bits of a NaN as a string of hexadecimal digits."""
        kind, text = self.next("an element")
        if kind == "nan":
            return text.removeprefix("nan:")
        if kind == "number":
            return _number(text)
        if kind == "word" and _WORDS.get(text) is not None:
            return _WORDS[text]
        raise _Refused(f"{text} is not an element")

    def finish(self) -> str:
        """The comment at the end of the line; nothing else may follow."""
        if self.at_end():
            return ""
        kind, text = self.next("the end")
        if kind != "comment":
            raise _Refused(f"unexpected {text!r} at the end")
        return text[1:].strip()


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


# -- comparing ----------------------------------------------------------------------------------------------------


def structurally_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs apply the same operators to the same values in the same structure, ignoring names and
    sources; constants are compared bit by bit."""
    if [node.type for node in a.inputs] != [node.type for node in b.inputs]:
        return False
    # The order of `nodes` depends only on the structure: equal graphs list equal nodes at equal positions.
    left, right = a.nodes(), b.nodes()
    if len(left) != len(right):
        return False
    position_a = {node: position for position, node in enumerate(left)}
    position_b = {node: position for position, node in enumerate(right)}

    def refers(nodes: tuple[Node, ...], position: Mapping[Node, int]) -> list[int]:
        return [position[node] for node in nodes]

    return refers(a.outputs, position_a) == refers(b.outputs, position_b) and all(
        x.op == y.op
        and x.type == y.type
        and refers(x.inputs, position_a) == refers(y.inputs, position_b)
        and same_attrs(x.attrs, y.attrs)
        and _same_data(x.data, y.data)
        for x, y in zip(left, right, strict=True)
    )


def same_attrs(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Equality that distinguishes 1, 1.0 and True, and 0.0 from -0.0, and in which NaN equals itself."""
    return a.keys() == b.keys() and all(print_attr(a[key]) == print_attr(b[key]) for key in a)


def _same_data(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
