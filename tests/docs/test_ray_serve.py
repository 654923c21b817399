"""A replica of examples/ray_serve.py, without Ray Serve around it: batches, new files, health, bad requests."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright

torch = pytest.importorskip("torch")
pytest.importorskip("ray.serve")
pytest.importorskip("starlette")
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import ray_serve  # noqa: E402

Model = ray_serve.Model.func_or_class
ROWS = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)


def save(path: Path, seed: int, features: int = 8) -> np.ndarray:
    """An artifact for 1, 2 and 4 rows, put in its place as a whole; the results for ROWS."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(features, 3).eval().requires_grad_(False)
    fast = tilewright.compile(model, (torch.zeros(1, features),), dynamic=True)
    for size in (1, 2, 4):
        fast(torch.zeros(size, features))
    fast.save(path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    return model(torch.from_numpy(ROWS)).numpy() if features == 8 else np.zeros(0)


class Ratio(torch.nn.Module):
    """NaN for zeros, which are the example that health is checked with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 2


class Total(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


class Scalar(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def saved(path: Path, model: torch.nn.Module, x: torch.Tensor) -> str:
    tilewright.compile(model.eval(), (x,)).save(path)
    return str(path)


def test_a_model_that_gives_nan_for_zeros_is_healthy(tmp_path: Path) -> None:
    loaded = ray_serve.Loaded(saved(tmp_path / "model.tw", Ratio(), torch.zeros(2, 8)), 1, None)
    assert np.isnan(loaded.expected).all()
    assert loaded.is_healthy()


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Twice(), torch.zeros(2, 8), "gives several arrays"),
        (Total(), torch.zeros(2, 8), "does not give a row for each row"),
        (Scalar(), torch.tensor(0.0), "takes no rows"),
    ],
    ids=["two outputs", "no rows out", "no rows in"],
)
def test_models_that_are_not_served(
    tmp_path: Path, model: torch.nn.Module, x: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ray_serve.Loaded(saved(tmp_path / "model.tw", model, x), 1, None)


def as_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


async def asked(replica: Any, body: bytes, method: str = "POST") -> Response:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await replica(Request({"type": "http", "method": method, "headers": []}, receive))


@pytest.fixture(autouse=True)
def without_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve joins requests only inside a deployment."""

    async def run(self: Any, row: np.ndarray) -> np.ndarray:
        (result,) = await asyncio.get_running_loop().run_in_executor(None, self._loaded, [row])
        return result

    monkeypatch.setattr(Model, "run", run)


def test_rows_are_joined_to_the_sizes_of_the_file(tmp_path: Path) -> None:
    expected = save(tmp_path / "model.tw", 0)
    loaded = ray_serve.Loaded(str(tmp_path / "model.tw"), 1, None)
    assert loaded.sizes == [1, 2, 4]
    for count in (1, 2, 3, 4, 5, 12):
        np.testing.assert_allclose(np.stack(loaded(list(ROWS[:count]))), expected[:count], atol=1e-5)


async def results(replica: Any) -> np.ndarray:
    """For all rows, at once."""
    answers = await asyncio.gather(*(asked(replica, as_file(row)) for row in ROWS))
    assert {answer.status_code for answer in answers} == {200}
    return np.stack([np.load(io.BytesIO(answer.body)) for answer in answers])


def test_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "LOOK_SECONDS", 0.02)
    path = tmp_path / "model.tw"
    before = save(path, 0)

    async def serve() -> None:
        replica = Model(1)
        with pytest.raises(OSError):
            await replica.reconfigure({"artifact": str(tmp_path / "none.tw")})
        await replica.reconfigure({"artifact": str(path)})
        np.testing.assert_allclose(await results(replica), before, atol=1e-5)
        for body in (as_file(ROWS[0, :5]), as_file(ROWS[0].astype(np.float64)), b"no array"):
            assert (await asked(replica, body)).status_code == 400

        first = replica._loaded
        after = save(path, 1)  # a new file is taken up by itself
        await until(lambda: replica._loaded is not first)
        np.testing.assert_allclose(await results(replica), after, atol=1e-5)

        path.with_suffix(".new").write_bytes(b"no artifact")
        path.with_suffix(".new").rename(path)  # this one is refused, and the last one goes on
        await until(lambda: bool(replica._refused))
        assert str(path) in (await asked(replica, b"", "GET")).body.decode().splitlines()[1]
        np.testing.assert_allclose(await results(replica), after, atol=1e-5)

        save(path, 2, features=9)  # rows of another shape
        await until(lambda: "its rows are (9,)" in replica._refused)
        np.testing.assert_allclose(await results(replica), after, atol=1e-5)

        path.unlink()  # it is followed although it is gone for a while
        await asyncio.sleep(0.2)

        def surprised(*arguments: Any) -> Any:
            raise IndexError("what nobody thought of")

        with monkeypatch.context() as patch:
            patch.setattr(ray_serve, "Loaded", surprised)
            save(path, 3)
            await until(lambda: "what nobody thought of" in replica._refused)
        first, after = replica._loaded, save(path, 4)  # it still follows the file
        await until(lambda: replica._loaded is not first)
        np.testing.assert_allclose(await results(replica), after, atol=1e-5)

        replica.check_health()
        replica._loaded.expected = replica._loaded.expected + 1
        with pytest.raises(RuntimeError, match="no longer computes"):
            replica.check_health()
        replica._watch.cancel()

    asyncio.run(serve())


def test_requests_go_on_while_a_file_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.tw"
    expected = save(path, 0)
    slow = Slow()

    async def serve() -> None:
        replica = Model(1)
        await replica.reconfigure({"artifact": str(path)})
        monkeypatch.setattr(ray_serve, "Loaded", slow)
        update = asyncio.create_task(replica.reconfigure({"artifact": str(path)}))
        await until(lambda: bool(slow.paths))
        np.testing.assert_allclose(await results(replica), expected, atol=1e-5)
        assert not update.done()
        slow.let_go.set()
        await update
        replica._watch.cancel()

    asyncio.run(serve())


def test_another_file_is_followed_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is loaded, and if it is refused: the one before is not taken up again."""
    monkeypatch.setattr(ray_serve, "LOOK_SECONDS", 0.02)
    first, second, broken = (tmp_path / f"{name}.tw" for name in ("first", "second", "broken"))
    save(first, 0)
    expected = save(second, 1)
    broken.write_bytes(b"no artifact")
    slow = Slow()

    async def serve() -> None:
        replica = Model(1)
        await replica.reconfigure({"artifact": str(first)})
        monkeypatch.setattr(ray_serve, "Loaded", slow)
        update = asyncio.create_task(replica.reconfigure({"artifact": str(second)}))
        await asyncio.sleep(0.2)
        slow.let_go.set()
        await update
        await replica.reconfigure({"artifact": str(broken)})
        await asyncio.sleep(0.2)
        np.testing.assert_allclose(await results(replica), expected, atol=1e-5)
        said = (await asked(replica, b"", "GET")).body.decode().splitlines()
        assert said[0] == str(second) and said[1].startswith(f"{broken}: ")
        assert slow.paths == [str(second), str(broken)]

        save(broken, 2)
        await until(lambda: replica._loaded.path == str(broken))
        assert not replica._refused
        replica._watch.cancel()

    asyncio.run(serve())


class Slow:
    """Loads artifacts once it may. `paths`: of those that it was to load."""

    def __init__(self) -> None:
        self._loading, self.let_go = ray_serve.Loaded, threading.Event()
        self.paths: list[str] = []

    def __call__(self, path: str, *arguments: Any) -> Any:
        self.paths.append(path)
        assert self.let_go.wait(60)
        return self._loading(path, *arguments)


async def until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
