"""Serve a compiled model with Ray Serve: replicas, batches, a health check, and new artifacts without a pause.

    pip install '.[serve]'    # from a checkout
    python examples/ray_serve.py model.tw --port 8000 --replicas 2
    curl --data-binary @rows.npy http://localhost:8000/ -o results.npy

A request is one row: an array without the batch axis, as a .npy file. The artifact has a variant for each batch size
that it was saved with; concurrent requests are joined into the next larger of them. docs/serving.md explains it.

Without `--ray` it starts Ray on loopback with a token of its own; docs/serving.md says what listens elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default since Ray 2.59, which is read at the import
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

import tilewright
from tilewright.dtypes import DType

LOOPBACK = "127.0.0.1"
MAX_BYTES = 64 << 20  # of one request
MAX_BATCH = 64
WAIT_SECONDS = 0.002  # for further requests, once there is one
LOOK_SECONDS = 1.0  # how often a replica looks whether its file has changed


class Loaded:
    """An artifact, with the batch sizes that it has variants for."""

    def __init__(self, path: str, threads: int, trusted: str | None) -> None:
        self.path = path
        self.model = tilewright.load(
            path, threads=threads, trusted=None if trusted is None else Path(trusted)
        )
        variants = self.model.variants if hasattr(self.model, "variants") else (self.model,)
        inputs = [variant.plan.inputs for variant in variants]
        if any(len(each) != 1 for each in inputs):
            raise ValueError(f"{path} takes several arrays, and this server takes one")
        shapes = [tuple(each[0].shape) for each in inputs]
        if not all(shapes):
            raise ValueError(f"{path} takes no rows: its input has no axis")
        self.sizes = sorted({shape[0] for shape in shapes})
        (self.row,) = {shape[1:] for shape in shapes}
        self.dtype = DType.parse(inputs[0][0].dtype).numpy
        self.example = np.zeros((self.sizes[0], *self.row), self.dtype)
        self.expected = self.model(self.example)  # a model is a pure function: this never changes
        if not isinstance(self.expected, np.ndarray):
            raise ValueError(f"{path} gives several arrays, and this server gives one")
        if self.expected.shape[:1] != self.example.shape[:1]:
            raise ValueError(f"{path} does not give a row for each row that it takes")

    def __call__(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """The rows in batches of the sizes that there are; the last one is filled up with zeros."""
        results: list[np.ndarray] = []
        while rows:
            size = next((size for size in self.sizes if size >= len(rows)), self.sizes[-1])
            some, rows = rows[:size], rows[size:]
            batch = np.zeros((size, *self.row), self.dtype)
            batch[: len(some)] = some
            results.extend(self.model(batch)[: len(some)])
        return results

    def is_healthy(self) -> bool:
        return np.array_equal(self.model(self.example), self.expected, equal_nan=True)


@serve.deployment(health_check_period_s=5, health_check_timeout_s=5, graceful_shutdown_timeout_s=5)
class Model:
    """One replica. It takes up another artifact while requests go on with the one before: a new file of the same name
    by itself, one of another name when the deployment gets another `user_config`."""

    def __init__(self, threads: int = 1, trusted: str | None = None) -> None:
        self._threads, self._trusted = threads, trusted
        self._loaded: Loaded | None = None
        self._path, self._seen = (
            "",
            0,
        )  # the file that is followed, and when the last one of its name was changed
        self._updating = asyncio.Lock()  # one file after the other
        self._refused = ""  # why the newest artifact was not taken
        self._watch: asyncio.Task[None] | None = None

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Called at the start and whenever the deployment gets another `user_config`."""
        async with self._updating:
            self._path, self._seen = config["artifact"], 0
            await self._take_up()
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._follow())

    async def _take_up(self) -> None:
        """Requests go on: loading is in a thread of its own, and the event loop never waits for it."""
        path = self._path
        try:
            self._seen = Path(path).stat().st_mtime_ns
            loaded = await asyncio.to_thread(Loaded, path, self._threads, self._trusted)
            if self._loaded is not None and loaded.row != self._loaded.row:
                raise ValueError(f"its rows are {loaded.row}, and clients send {self._loaded.row}")
        except Exception as error:  # whatever is wrong with this file, the one before goes on
            if self._loaded is None:
                raise
            self._refused = f"{path}: {type(error).__name__}: {error}".splitlines()[0]
            return
        self._loaded, self._refused = loaded, ""

    async def _follow(self) -> None:
        """Take up the file again whenever it has changed, also one that was refused."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            async with self._updating:
                try:
                    changed = Path(self._path).stat().st_mtime_ns != self._seen
                except OSError:  # it is being replaced, or gone: the one before goes on
                    continue
                if changed:
                    await self._take_up()

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if self._loaded is None or not self._loaded.is_healthy():
            raise RuntimeError("the model no longer computes what it did when it was loaded")

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_SECONDS)
    async def run(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        assert self._loaded is not None
        return await asyncio.get_running_loop().run_in_executor(None, self._loaded, rows)  # releases the GIL

    async def __call__(self, request: Request) -> Response:
        assert self._loaded is not None
        if request.method == "GET":
            return Response(f"{self._loaded.path}\n{self._refused}\n", media_type="text/plain")
        body = await request.body()
        if len(body) > MAX_BYTES:
            return Response("the request is too large\n", 413)
        try:
            row = np.load(io.BytesIO(body), allow_pickle=False)
        except (ValueError, EOFError) as error:
            return Response(f"{error}\n", 400)
        if row.shape != self._loaded.row or row.dtype != self._loaded.dtype:
            wanted = f"{self._loaded.dtype} of shape {self._loaded.row}"
            return Response(f"expected a row of {wanted}, got {row.dtype} of shape {row.shape}\n", 400)
        file = io.BytesIO()
        np.save(file, await self.run(row))
        return Response(file.getvalue(), media_type="application/octet-stream")


def connect(address: str = "local", **options: Any) -> None:
    """Connect to a Ray cluster; "local": to one of its own. Ray would listen at this machine's address in the network,
    also for a cluster of one machine."""
    if address == "local":
        from ray._private import services

        services.get_node_ip_address = lambda address=None: LOOPBACK
        os.environ.setdefault(
            "RAY_AUTH_TOKEN", secrets.token_hex(32)
        )  # Ray's own file can be read by all users
        options = {"include_dashboard": False, "_node_ip_address": LOOPBACK, **options}
    ray.init(address, log_to_driver=False, **options)


def start(path: str, port: int, *, replicas: int = 1, threads: int = 1, trusted: str | None = None) -> None:
    """Serve an artifact on loopback. Called again with another one, it is taken up in every replica; a file that was
    replaced is taken up by itself."""
    serve.start(http_options={"host": LOOPBACK, "port": port})
    config = {"artifact": str(path)}
    options = {"num_replicas": replicas, "user_config": config, "max_ongoing_requests": 256}
    deployment = Model.options(**options)  # type: ignore[attr-defined]
    serve.run(deployment.bind(threads, trusted), name="model")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a compiled model with Ray Serve.")
    parser.add_argument("model", help="a .tw file")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of one call")
    parser.add_argument(
        "--ray", default="local", help="the address of a Ray cluster; default: one of its own"
    )
    parser.add_argument("--trusted", help="a file with the key that artifacts are signed with")
    options = parser.parse_args()
    connect(options.ray)
    start(
        options.model,
        options.port,
        replicas=options.replicas,
        threads=options.threads,
        trusted=options.trusted,
    )
    print(
        f"serving {options.model} at http://127.0.0.1:{options.port}; a new {options.model} is taken up by itself",
        flush=True,
    )
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
