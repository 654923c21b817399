"""examples/ray_serve.py in Ray Serve with two replicas, in a process of its own: what happened is printed as JSON.

    python -m tests.docs.ray_serve_cluster FOLDER        # FOLDER: for artifacts

Clients go on while the file is replaced by another model's, and while a replica is told to be unhealthy.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "examples")])  # for replicas
os.environ.update({"RAY_raylet_start_wait_time_s": "300"})  # on a busy machine
import ray_serve  # noqa: E402
from ray import serve  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402

from tests.docs.test_ray_serve import ROWS, as_file, save  # noqa: E402
from tests.measure.pool.two_nodes import free_port, listening  # noqa: E402

_SECONDS = 200.0  # that a change may take on a busy machine


class Breakable(ray_serve.Model.func_or_class):  # type: ignore[name-defined, misc]
    """DELETE: this replica is unhealthy from now on."""

    async def __call__(self, request: Request) -> Response:
        if request.method == "DELETE":
            self._loaded.is_healthy = lambda: False
        answer = await super().__call__(request)
        answer.headers["replica"] = serve.get_replica_context().replica_tag
        return answer


class Client(threading.Thread):
    """It sends one row again and again; `seen`: how many answers were those of each model, by replica."""

    def __init__(self, port: int, models: list[np.ndarray]) -> None:
        super().__init__(daemon=True)
        self._port, self._models = port, models
        self.over, self.errors = threading.Event(), []
        self.seen: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                replica, answer = request(self._port, "POST", as_file(ROWS[0]))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.errors.append(repr(error))
                continue
            result = np.frombuffer(answer[-12:], np.float32)  # of three columns
            which = [n for n, each in enumerate(self._models) if np.allclose(result, each[0], atol=1e-5)]
            if len(which) == 1:
                self.seen[replica, which[0]] += 1
            else:
                self.errors.append(f"an answer of no model: {result}")


def request(port: int, method: str, body: bytes = b"") -> tuple[str, bytes]:
    """(the replica that answered, its answer)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request(method, "/", body=body)
        answer = connection.getresponse()
        found = answer.read()
        if answer.status != 200 and method == "POST":
            raise ValueError(f"{answer.status}: {found[:80]!r}")
        return answer.headers["replica"], found
    finally:
        connection.close()


def until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def stranger(port: int) -> str:
    """What a replica says to one of Ray Serve's own calls without the token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def main() -> None:
    path, port = Path(sys.argv[1]) / "model.tw", free_port()
    models = [save(path, 1), save(path, 0)]
    models.reverse()  # the file is model 0 now
    ray_serve.connect(num_cpus=4)
    ray_serve.Model = ray_serve.Model.options(func_or_class=Breakable)
    ray_serve.start(str(path), port, replicas=2)
    client = Client(port, models)
    client.start()
    ports = listening([psutil.Process()])
    found: dict[str, Any] = {
        "loopback": sum(ip == ray_serve.LOOPBACK for ip, _ in ports),
        "elsewhere": [stranger(port) for ip, port in ports if ip not in (ray_serve.LOOPBACK, "::1")],
    }

    def replicas_with(model: int) -> set[str]:
        return {replica for (replica, which), count in list(client.seen.items()) if which == model and count}

    found["both replicas answer"] = until(lambda: len(replicas_with(0)) == 2)
    save(path, 1)
    found["both replicas take up the new file"] = until(lambda: len(replicas_with(1)) == 2)
    broken, _ = request(port, "DELETE")
    found["a replica is replaced"] = until(lambda: len(replicas_with(1)) == 3)
    client.seen.clear()
    found["the new one answers instead"] = until(
        lambda: len(replicas_with(1)) == 2 and broken not in replicas_with(1)
    )
    client.over.set()
    client.join()
    found["errors"] = client.errors
    print(json.dumps(found), flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
