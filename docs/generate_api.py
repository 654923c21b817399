"""Writes docs/api.md, the API reference, from the docstrings of what is public.

    python docs/generate_api.py            write the page
    python docs/generate_api.py --check    exit with 1 if the committed page is out of date; tests/docs/ does the same

A docstring's indented part becomes a block of code, the rest is Markdown as it stands. `SECTIONS` says what is public,
and in which order it is shown.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewright.dtypes import DType

INTERNAL = {"at", "flat", "saved"}  # of models: for the library's own callers
LOWERED = {
    "dot4",
    "exp2_nonpositive",
    "exp2_rough",
    "floor_pow2",
}  # scalar functions that rewrites and lowerings insert
PAGE = Path(__file__).with_name("api.md")
HEAD = """# API reference

Generated from docstrings by `python docs/generate_api.py`; edit those. Functions, models and errors are attributes of
`tilewright`.
"""


@dataclass(frozen=True)
class Section:
    """Some names of a module, under one heading. `members`: the methods of classes are shown, too."""

    title: str
    module: str
    names: tuple[str, ...]
    members: bool = True
    intro: str = ""


def sections() -> list[Section]:
    import tilewright
    from tilewright import errors, extend, testing
    from tilewright import tile as tl

    own = [name for name in tilewright.__all__ if not name.startswith("__") and not hasattr(errors, name)]
    functions = [name for name in own if inspect.isfunction(getattr(tilewright, name))]
    classes = [name for name in own if inspect.isclass(getattr(tilewright, name))]
    return [
        Section("Functions", "tilewright", tuple(functions)),
        Section("Models", "tilewright", tuple(classes)),
        Section(
            "What models return", "tilewright.runtime.explain", ("BenchResult", "Explanation", "StepRow")
        ),
        Section(
            "The tile language",
            "tilewright.tile",
            tuple(
                name for name in tl.__all__ if name != "kernel" and not isinstance(getattr(tl, name), DType)
            ),
            members=False,
            intro=f"""Write `import tilewright.tile as tl`; the functions are called inside a function decorated with
`@tilewright.kernel`, which is described above. [A first tile kernel](tile/01-first-kernel.md) introduces them.

Element types: {listed(name for name in tl.__all__ if isinstance(getattr(tl, name), DType))}.

Elementwise functions: {listed(sorted(set(tl.language.SCALAR_FUNCTIONS) - LOWERED))}.""",
        ),
        Section(
            "Co-design",
            "tilewright.codesign.search",
            ("explore", "Budget", "ExplorationProgress", "Exploration"),
            intro="[Co-design](codesign.md) explains the search.",
        ),
        Section("Co-design: mappings", "tilewright.codesign.exact", ("best_mapping", "Best", "Objective")),
        Section("Errors and warnings", "tilewright.errors", tuple(errors_in_order(errors)), members=False),
        Section("Progress", "tilewright.support.trace", ("Trace",)),
        Section(
            "Extending", "tilewright.extend", tuple(n for n in extend.__all__ if n.startswith("register"))
        ),
        Section("Conformance suites", "tilewright.testing", tuple(testing.__all__), members=False),
    ]


def listed(names: Iterable[str]) -> str:
    text = ", ".join(f"`{name}`" for name in names)
    return textwrap.fill(text, 100, break_on_hyphens=False)


def errors_in_order(module: Any) -> list[str]:
    """As they stand in the file, which groups them."""
    found = [
        (inspect.getsourcelines(value)[1], name)
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, (Exception, Warning))
        and value.__module__ == module.__name__
    ]
    return [name for _, name in sorted(found)]


def page() -> str:
    text = "\n\n".join([HEAD.strip(), *(section for found in sections() for section in rendered(found))])
    return f"{text}\n"


def rendered(section: Section) -> Iterator[str]:
    yield f"## {section.title}"
    module = import_module(section.module)
    yield f"From `{section.module}`. {section.intro}".rstrip()
    if section.title.startswith("Errors"):
        yield error_table(module, section.names)
        return
    for name in section.names:
        value = getattr(module, name)
        yield f"### {name}"
        if not inspect.isclass(value) or is_dataclass(value):  # other classes are made by the library
            yield signature(name, value)
        yield markdown(own_doc(value))
        if inspect.isclass(value) and section.members:
            yield from members(value)


def error_table(module: Any, names: tuple[str, ...]) -> str:
    rows = ["| class | is a | when | what to try |", "| --- | --- | --- | --- |"]
    for name in names:
        value = getattr(module, name)
        remedy = getattr(value, "remedy", "")
        cells = [f"`{name}`", f"`{value.__base__.__name__}`", first_paragraph(value), remedy]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def own_doc(value: Any) -> str:
    """Its docstring; not that of a base class, nor the one that a dataclass is given."""
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    return "" if doc is None or doc.startswith(f"{value.__name__}(") else inspect.cleandoc(doc)


def first_paragraph(value: Any) -> str:
    return " ".join((own_doc(value)).split("\n\n")[0].split())


def members(value: type) -> Iterator[str]:
    """Its public methods and properties that have a docstring, and the fields of a struct."""
    for name, member in sorted(vars(value).items()):
        found = member.fget if isinstance(member, property) else member
        shown = name == "__call__" or not (name.startswith("_") or name in INTERNAL)
        if not shown or not inspect.isfunction(found) or not own_doc(found):
            continue
        if isinstance(member, property):
            yield f"**`{value.__name__}.{name}`** (property)"
        else:
            yield signature(f"{value.__name__}.{name}", found)
        yield markdown(own_doc(found))
    fields = getattr(value, "__struct_fields__", ())
    if fields:
        yield "Fields: " + ", ".join(f"`{name}`" for name in fields) + "."


def signature(name: str, value: Any) -> str:
    """A block with the call; one parameter per line if it is too long."""
    called = inspect.signature(value)
    parameters = list(parameter_texts(called))
    returned = called.return_annotation
    result = "" if returned in (inspect.Signature.empty, "None", None) else f" -> {returned}"
    text = f"{name}({', '.join(parameters)}){result}"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"
    return f"```python no-run\n{text}\n```"


def parameter_texts(called: inspect.Signature) -> Iterator[str]:
    """Annotations are text in this project (`from __future__ import annotations`), and shown without quotes."""
    star: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    starred = False
    for parameter in called.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or parameter.kind in (
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_POSITIONAL,
        )
        text = star.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not inspect.Parameter.empty:
            is_lambda = inspect.isfunction(parameter.default)
            text += " = ..." if is_lambda else f" = {parameter.default!r}"
        yield text


def markdown(doc: str) -> str:
    """Indented paragraphs, which begin after an empty line, as blocks of code. Nothing in them is run."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\n+", doc):
        if paragraph.startswith("    "):
            code = textwrap.dedent(paragraph)
            if parts and parts[-1].startswith("```"):
                parts[-1] = parts[-1].removesuffix("\n```") + f"\n\n{code}\n```"
            else:
                parts.append(f"```text\n{code}\n```")
        else:
            parts.append(paragraph)
    return "\n\n".join(parts)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
