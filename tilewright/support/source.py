"""A location in the user's own Python source, and how an error shows it: the line, and a caret under the relevant
part."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        caller = self.caller
        while caller is not None:
            lines.append(f'  called from "{caller.file}", line {caller.line}: {caller.text.strip()}')
            caller = caller.caller
        return "\n".join(lines)
