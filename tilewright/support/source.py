"""A location in the user's own Python source, and how an error shows it: the line, and a caret under the relevant
part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

_SHOWN_CALLS = 8


@dataclass(frozen=True)
class SourceLocation:
    file: str
    line: int  # starting at 1
    column: int  # starting at 0, as in the ast module
    width: int  # of the marked part, on its first line
    text: str  # the whole line
    function: str
    caller: SourceLocation | None = field(default=None)  # the call site, if the function was inlined

    @property
    def short(self) -> str:
        return f"{self.file}:{self.line}"

    def excerpt(self) -> str:
        """The header and the line with a caret, and the calls that led there."""
        text = self.text.lstrip()
        indent = len(self.text) - len(text)
        start = max(self.column - indent, 0)
        width = max(min(self.width, len(text.rstrip()) - start), 1)
        lines = [
            f'File "{self.file}", line {self.line}, column {self.column + 1}, in {self.function}',
            f"    {text.rstrip()}",
            f"    {' ' * start}{'^' * width}",
        ]
        calls = []
        caller = self.caller
        while caller is not None:
            calls.append(f'  called from "{caller.file}", line {caller.line}: {caller.text.strip()}')
            caller = caller.caller
        if len(calls) > _SHOWN_CALLS:  # a recursion
            calls[1:-1] = [f"  ... {len(calls) - 2} more calls"]
        return "\n".join(lines + calls)


def location_of(function: Callable[..., Any]) -> SourceLocation | None:
    """Where a function is defined; None if it has no source."""
    try:
        lines, first = inspect.getsourcelines(function)
        code = inspect.unwrap(function).__code__
        file = inspect.getsourcefile(function) or "<unknown>"
    except (OSError, TypeError, AttributeError):
        return None
    if code.co_name == "<lambda>":
        return _lambda_of(code, lines, first, file)
    number = next((n for n, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def "))), 0)
    text = lines[number].rstrip()
    column = len(text) - len(text.lstrip())
    return SourceLocation(file, first + number, column, len(text) - column, text, code.co_name)


def _lambda_of(code: CodeType, lines: list[str], first: int, file: str) -> SourceLocation:
    """Several lambdas may be in one line. Its column is known from Python 3.11 on; before, the whole line is marked."""
    number = max(0, code.co_firstlineno - first)
    text = lines[number].rstrip()
    column = len(text) - len(text.lstrip())
    end = len(text)
    positions = code.co_positions() if hasattr(code, "co_positions") else ()
    inside = [each for each in positions if each[0] == each[1] == code.co_firstlineno]
    starts, ends = [each[2] for each in inside if each[2]], [each[3] for each in inside if each[3]]
    if starts and ends:
        column, end = max(text.rfind("lambda", 0, min(starts)), column), max(ends)
    return SourceLocation(file, first + number, column, end - column, text, "<lambda>")
