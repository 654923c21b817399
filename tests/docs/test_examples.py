"""The scripts under examples/ run and do what their heads say; pages that copy code or results are up to date."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright
from tests.docs.blocks import blocks, module_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = (str(ROOT), os.environ.get("PYTHONPATH", ""))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested_here() -> None:
    named = {"classify_image.py", "ray_serve.py", "serve.py", "tune_and_lock.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == named


def test_an_image_is_classified_as_by_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    printed = run(str(EXAMPLES / "classify_image.py"), "--small", cwd=tmp_path)
    (top,) = [line for line in printed.splitlines() if line.startswith("top 5: ")]
    ours, theirs = top.removeprefix("top 5: ").split(", PyTorch ")
    assert ours == theirs
    assert "loaded again, the same bits: True" in printed
    assert "Tilewright" in printed


def test_a_tuned_model_is_built_again_without_measuring(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    printed = run(str(EXAMPLES / "tune_and_lock.py"), "--budget", "4s", cwd=tmp_path)
    lines = printed.splitlines()
    assert lines[0].startswith("tuned: ")
    assert sum(line.startswith("  matmul+add") for line in lines) >= 1  # one where both are a chain
    assert "from the database: 0 measurements, the same kernels: True" in lines
    assert "from the lock file: 0 measurements, the same kernels: True" in lines
    assert lines[-1] == "right: True"


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The address of a server, an input and the model's result."""
    torch = pytest.importorskip("torch")
    import tilewright

    folder = tmp_path_factory.mktemp("served")
    x = torch.randn(4, 8)
    fast = tilewright.compile(torch.nn.Linear(8, 3).eval().requires_grad_(False), (x,))
    fast.save(folder / "model.tw")
    # In the server's process torch cannot be imported.
    code = (
        "import runpy, sys; sys.modules['torch'] = None;"
        f"sys.argv = ['serve.py', {str(folder / 'model.tw')!r}, '--port', '0'];"
        f"runpy.run_path({str(EXAMPLES / 'serve.py')!r}, run_name='__main__')"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " at http://127.0.0.1:" in line
        yield line.split(" at ")[1].strip(), x.numpy(), fast(x).numpy()
    finally:
        server.terminate()
        server.wait(timeout=30)
        if server.stdout is not None:
            server.stdout.close()


def post(address: str, body: bytes) -> bytes:
    with urllib.request.urlopen(address, data=body, timeout=60) as response:
        return bytes(response.read())


def as_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_concurrent_requests_get_the_models_bits(served: tuple[str, np.ndarray, np.ndarray]) -> None:
    address, x, expected = served
    with ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(lambda _: post(address, as_file(x)), range(64)))
    assert all(np.array_equal(np.load(io.BytesIO(reply)), expected) for reply in replies)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (as_file(np.zeros((4, 9), np.float32)), "expected the shape (4, 8), got (4, 9)"),
        (as_file(np.zeros((4, 8), np.float64)), "expected f32[4,8]"),
        (b"no array", ""),
        (as_file(np.array([print], dtype=object)), ""),  # a pickle is not read
    ],
)
def test_a_bad_request_is_refused_and_the_server_goes_on(
    served: tuple[str, np.ndarray, np.ndarray], body: bytes, says: str
) -> None:
    address, x, expected = served
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(address, body)
    with raised.value as error:
        assert error.code == 400
        assert says in error.read().decode()
    assert np.array_equal(np.load(io.BytesIO(post(address, as_file(x)))), expected)


def test_the_page_shows_the_server_of_the_example() -> None:
    page = blocks((ROOT / "docs" / "serving.md").read_text(encoding="utf-8"))
    (shown,) = [block.code.text for block in page if module_of(block.code) == "server"]
    function = shown[shown.index("def server_of") :]
    assert function in (EXAMPLES / "serve.py").read_text(encoding="utf-8")


# -- the API reference ------------------------------------------------------------------------------------------------


def test_the_api_reference_is_up_to_date(tmp_path: Path) -> None:
    """If this fails: python docs/generate_api.py"""
    run(str(ROOT / "docs" / "generate_api.py"), "--check", cwd=tmp_path)


# -- the results ------------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[list[str]]:
    """The cells of every row of the tables of a document, their heads included."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


@pytest.mark.parametrize("name", ["cpu_models", "hf_models", "gpu_models"])
def test_the_page_of_results_shows_the_committed_results(name: str) -> None:
    """By the first eight cells of a row: a benchmark that is run again also changes docs/results.md."""
    shown = {tuple(row[:8]) for row in rows_of(ROOT / "docs" / "results.md")}
    rows = rows_of(ROOT / "benchmarks" / "results" / f"{name}.md")
    measured = [row for row in rows if any(re.fullmatch(r"\d+\.\d+", cell) for cell in row[1:4])]
    assert len(measured) > 5
    assert [row for row in measured if tuple(row[:8]) not in shown] == []


@pytest.mark.slow  # Ray takes half a minute
def test_ray_serve_joins_requests_and_takes_new_artifacts(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    torch = pytest.importorskip("torch")
    port = _free_port()

    def save(model: Any) -> None:
        fast = tilewright.compile(model, (torch.zeros(1, 8),), dynamic=True)
        for size in (1, 2, 4):
            fast(torch.zeros(size, 8))
        fast.save(tmp_path / "new.tw")
        os.replace(tmp_path / "new.tw", tmp_path / "model.tw")

    def post(row: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        np.save(file, row)
        with urllib.request.urlopen(address, data=file.getvalue(), timeout=30) as response:
            return np.load(io.BytesIO(response.read()))

    def state() -> list[str]:
        with urllib.request.urlopen(address, timeout=30) as response:
            return response.read().decode().splitlines()

    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    first, second = (torch.nn.Linear(8, 3).eval() for _ in range(2))
    save(first)
    rows = torch.randn(24, 8)
    address = f"http://127.0.0.1:{port}/"
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), "model.tw", "--port", str(port)]
    server = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and "serving model.tw" in server.stdout.readline()
        with ThreadPoolExecutor(8) as clients:
            results = list(clients.map(post, rows.numpy()))
        np.testing.assert_allclose(results, first(rows).detach().numpy(), atol=1e-5)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(np.zeros(9, np.float32))
        save(second)
        expected = second(rows[0]).detach().numpy()
        wait_for(lambda: np.allclose(post(rows[0].numpy()), expected, atol=1e-5))
        (tmp_path / "model.tw").write_bytes(b"not an artifact")
        wait_for(lambda: len(state()) > 1 and "model.tw" in state()[1])
        assert np.allclose(post(rows[0].numpy()), expected, atol=1e-5)  # the one before goes on
    finally:
        server.terminate()
        server.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
