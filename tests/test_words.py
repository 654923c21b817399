"""The field's words are used: none of `words.py` is in a name, a message, a comment or a document."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.words import ALL, WORDS, Word

ROOT = Path(__file__).parents[1]
# They hold the words themselves, and the names of templates and knobs of earlier versions.
_EXCEPT = (
    "tests/words.py",
    "tests/test_words.py",
    "tilewright/space/former_names.py",
    "tests/space/test_former_names.py",
)
_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*)"
    r"|(?P<string>\b[rRbBuUfF]{0,2}(?=[\"'])(?:'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?:'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"))"
    r"|(?P<name>[A-Za-z_]\w*)",
    re.S,
)
# Comments of CUDA, JavaScript and CSS; text and comments of a template, without its tags and expressions.
_C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_MARKUP = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|<(?:style|script)\b.*?</(?:style|script)>|<[^>]*>", re.S)
_PROSE_OF = ("tilewright/", "benchmarks/", "examples/", "tests/")
_COMPONENT = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


def files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return [
        path for path in listed.stdout.split("\n") if path and path not in _EXCEPT and (ROOT / path).is_file()
    ]


def components(name: str) -> list[str]:
    return [part.lower() for part in _COMPONENT.findall(name)]


@lru_cache(maxsize=1)
def found() -> dict[str, dict[str, dict[str, str]]]:
    """By where, then by word or text: path -> the name, or "" of a text."""
    result: dict[str, dict[str, dict[str, str]]] = {where: {} for where in (*ALL, "constants")}
    for path in files():
        if path.endswith((".py", ".cuh", ".md", ".txt", ".ll")):
            for part in components(path.removesuffix(".py")):
                result["files"].setdefault(part, {})[path] = path
        if path.endswith(".md"):
            result["documents"][(ROOT / path).read_text()] = {path: ""}
        for text in comments(path):
            result["prose"].setdefault(text, {})[path] = ""
        if not path.endswith(".py"):
            continue
        for kind, text in tokens((ROOT / path).read_text()):
            if kind == "name":
                if text.startswith("test_"):  # a sentence
                    continue
                parts = components(text)
                for part in (*parts, "_".join(parts)):
                    result["identifiers"].setdefault(part, {})[path] = text
                    if text.isupper():
                        result["constants"].setdefault(part, {})[path] = text
            elif path.startswith(_PROSE_OF):
                is_prose = kind == "comment" or text.startswith(('"""', 'r"""'))
                if is_prose or path.startswith("tilewright/"):
                    result["prose" if is_prose else "messages"].setdefault(text, {})[path] = ""
    return result


def comments(path: str) -> list[str]:
    """The prose in files of other languages than Python."""
    if path.endswith((".cuh", ".js", ".css")):
        return _C_COMMENT.findall((ROOT / path).read_text())
    if path.endswith(".j2"):
        return [_MARKUP.sub(" ", (ROOT / path).read_text())]
    if path == "pyproject.toml":
        return re.findall(r"#[^\n]*", (ROOT / path).read_text())
    return []


def tokens(text: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(text):
        assert match.lastgroup is not None
        yield match.lastgroup, match.group()


def uses(word: Word, where: str) -> list[str]:
    here = found()[where]
    if where in ("identifiers", "files", "constants"):
        hits = here.get(word.word, {}).items()
    else:
        phrase = re.compile(rf"(?<![\w`/-]){re.escape(word.word)}(?![\w`/-])".replace(r"\ ", r"\s+"), re.I)
        hits = [item for text, paths in here.items() if phrase.search(text) for item in paths.items()]
    return [
        f"{path}: {name or word.word}"
        for path, name in hits
        if any(fnmatch.fnmatch(path, pattern) for pattern in word.inside)
        and not any(fnmatch.fnmatch(path, pattern) for pattern in word.allowed)
    ]


@pytest.mark.parametrize("word", WORDS, ids=[word.word for word in WORDS])
def test_it_is_not_used(word: Word) -> None:
    wrong = [f"{where}: {use}" for where in word.where for use in uses(word, where)]
    assert not wrong, f"say {word.say!r} instead of {word.word!r}: {wrong[:20]}"


def test_the_words_are_found_where_they_are() -> None:
    assert "tilewright/driver.py" in found()["files"]["driver"]
    assert "tilewright/driver.py" in found()["identifiers"]["compile"]
    assert uses(Word("the pipeline as code", ""), "prose")
    assert uses(Word("must be one of", ""), "messages")
    assert uses(Word("pip install", ""), "documents")
    assert not uses(Word("pip install", "", allowed=("*",)), "documents")
    assert uses(Word("pip install", "", inside=("README.md",)), "documents")
    assert not uses(Word("the pipeline as code", "", inside=("tests/*",)), "prose")
    assert uses(Word("max_nodes", ""), "identifiers")
    for path in ("*.cuh", "*.js", "*.j2", "pyproject.toml", "benchmarks/*.py", "examples/*.py"):
        assert any(fnmatch.fnmatch(each, path) for paths in found()["prose"].values() for each in paths), path
