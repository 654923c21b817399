"""Documents as programs: their Python blocks, run in order, and the output that the documents show.

    ```python           run; the blocks of one document share a namespace
    ```python no-run    not run
    ```python slow      run with `--slow` alone; what follows does not need it
    ```python module=x  written to x.py in the current folder, where later blocks import it; not run
    ```text             right after a Python block: what it prints; `...` stands for anything, as in doctest
    ```text llvm-22     the same, compared only where LLVM's major version is 22

A block that prints is followed by its output. Every other fence is left alone.

    python -m tests.docs.blocks [--slow] docs/02-how-it-compiles.md
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"```(?P<language>\w+)?(?P<options>[^`]*)$")
_ELLIPSIS = doctest.ELLIPSIS | doctest.REPORT_NDIFF


@dataclass(frozen=True)
class Fence:
    language: str
    options: tuple[str, ...]
    line: int  # of the first line inside, counted from 1
    end: int  # of the closing fence
    text: str


@dataclass(frozen=True)
class Block:
    """Code, and what it prints; None where the document shows no output."""

    code: Fence
    output: Fence | None


def fences(text: str) -> list[Fence]:
    found: list[Fence] = []
    opened: tuple[str, tuple[str, ...], int] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if match is None:
            continue
        if opened is None:
            opened = (match["language"] or "", tuple(match["options"].split()), number + 1)
        else:
            language, options, first = opened
            body = "".join(f"{inside}\n" for inside in lines[first - 1 : number - 1])
            found.append(Fence(language, options, first, number, body))
            opened = None
    if opened is not None:
        raise ValueError(f"the fence before line {opened[2]} is not closed")
    return found


def blocks(text: str, slow: bool = False) -> list[Block]:
    """The Python blocks that are to be run, with the slow ones or without."""
    found = fences(text)
    lines = text.splitlines()
    result = []
    for position, fence in enumerate(found):
        if fence.language != "python" or "no-run" in fence.options or ("slow" in fence.options and not slow):
            continue
        after = found[position + 1] if position + 1 < len(found) else None
        if after is not None and after.language == "text" and not any(lines[fence.end : after.line - 2]):
            result.append(Block(fence, after))
        else:
            result.append(Block(fence, None))
    return result


def run(path: Path, slow: bool = False) -> list[str]:
    """Runs a document; what is not as it says. It ends with the first block that raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    problems = []
    for block in blocks(path.read_text(encoding="utf-8"), slow):
        where = f"{path}:{block.code.line}"
        if (module := module_of(block.code)) is not None:
            Path(f"{module}.py").write_text(block.code.text)
            importlib.invalidate_caches()
            continue
        # Empty lines in front: tracebacks, and errors that quote the user's code, then name lines of the document.
        source = "\n" * (block.code.line - 1) + block.code.text
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, str(path), "exec"), namespace)
        except Exception:
            return [*problems, f"{where}: the block raises\n{traceback.format_exc()}"]
        problem = difference(block, printed.getvalue())
        if problem:
            problems.append(f"{where}: {problem}")
    return problems


def module_of(code: Fence) -> str | None:
    """The name of the module that a block is to be, if it is one."""
    return next((o.partition("=")[2] for o in code.options if o.startswith("module=")), None)


def difference(block: Block, printed: str) -> str:
    """What is wrong with the output that the document shows; empty where nothing is."""
    got = without_trailing_spaces(printed)
    if block.output is None:
        return f"the block prints, and the document does not show it:\n{got}" if got else ""
    if not all(applies(option) for option in block.output.options):
        return ""
    want = without_trailing_spaces(block.output.text)
    checker = doctest.OutputChecker()
    if checker.check_output(want, got, _ELLIPSIS):
        return ""
    return checker.output_difference(doctest.Example("", want), got, _ELLIPSIS)


def applies(option: str) -> bool:
    name, _, version = option.partition("-")
    if name != "llvm":
        raise ValueError(f"no such option of a text block: {option}")
    import llvmlite.binding as llvm

    return llvm.llvm_version_info[0] == int(version)


def without_trailing_spaces(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    slow, paths = "--slow" in sys.argv, [each for each in sys.argv[1:] if each != "--slow"]
    problems = [problem for path in paths for problem in run(Path(path).resolve(), slow)]
    print("\n\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
