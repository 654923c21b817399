"""Commands in processes that are forked from one which has imported already what takes long."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# Nothing of Tilewright: that is imported anew by each command, in its own environment.
_CONTEXT.set_forkserver_preload(["llvmlite.binding", "msgspec", "onnx", "rich", "torch._dynamo", "typer"])


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What `python -m tilewright.cli` does with such arguments."""
    with tempfile.TemporaryDirectory() as kept:
        said = [os.path.join(kept, name) for name in ("stdout", "stderr")]
        process = _CONTEXT.Process(target=_command, args=(arguments, folder, environment, said))
        process.start()
        process.join(timeout=300)
        if process.exitcode is None:
            process.kill()
        out, err = (Path(path).read_text() for path in said)
    return subprocess.CompletedProcess(
        arguments, -1 if process.exitcode is None else process.exitcode, out, err
    )


def _command(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], said: Sequence[str]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["tilewright", *arguments]
    sys.path.insert(0, "")
    from tilewright.cli import main

    main()
