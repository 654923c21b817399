"""A compiled model behind Ray Serve under load: latency, errors and memory, with new artifacts meanwhile.

    python benchmarks/serving.py [--clients 8] [--seconds 300] [--update-every 20]

Clients on loopback send one row after the other, each as soon as the last was answered, and compare every answer with
the model's. Now and then the artifact is replaced. Needs `pip install '.[serve]'`.
"""

from __future__ import annotations

import argparse
import http.client
import io
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import numpy as np
import psutil

os.environ.setdefault(
    "RAY_raylet_start_wait_time_s", "300"
)  # read when Ray is imported: a busy machine starts slowly
import ray
import torch
from ray_serve import start

import tilewright

_SIZES = (1, 2, 4, 8)


def saved(folder: Path, model: torch.nn.Module, features: int) -> Path:
    """An artifact with a variant for each batch size."""
    fast = tilewright.compile(model, (torch.zeros(_SIZES[0], features),), dynamic=True)
    for size in _SIZES:
        fast(torch.zeros(size, features))
    fast.save(folder / "model.tw")
    return folder / "model.tw"


class Client(threading.Thread):
    def __init__(self, port: int, rows: np.ndarray, expected: np.ndarray, until: float) -> None:
        super().__init__(daemon=True)
        self._port, self._rows, self._expected, self._until = port, rows, expected, until
        self.times: list[float] = []
        self.errors: list[str] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        bodies = []
        for row in self._rows:
            file = io.BytesIO()
            np.save(file, row)
            bodies.append(file.getvalue())
        number = 0
        while time.monotonic() < self._until:
            which = number % len(bodies)
            begin = time.perf_counter()
            try:
                connection.request("POST", "/", bodies[which])
                answer = connection.getresponse()
                body = answer.read()
                self.times.append(time.perf_counter() - begin)
                if answer.status != 200:
                    self.errors.append(f"{answer.status}: {body[:80]!r}")
                elif not np.allclose(np.load(io.BytesIO(body)), self._expected[which], atol=1e-4):
                    self.errors.append("a wrong answer")
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()
            number += 1


def replicas_memory() -> float:
    """MB of this machine's replicas."""
    found = [
        process.memory_info().rss
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica" in " ".join(process.cmdline())
    ]
    return sum(found) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--update-every", type=float, default=20.0)
    parser.add_argument("--features", type=int, default=512)
    given = parser.parse_args()
    torch.manual_seed(0)
    width = given.features
    layers = (torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, 16))
    model = torch.nn.Sequential(*layers).eval()
    rows = torch.randn(32, width)
    expected = model(rows).detach().numpy()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder), model, width)
        folders = (*sys.path[:2], os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # for replicas
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        start(str(path), port)
        warm = Client(port, rows.numpy(), expected, time.monotonic() + 3)
        warm.run()
        before = replicas_memory()
        begin = time.monotonic()
        clients = [Client(port, rows.numpy(), expected, begin + given.seconds) for _ in range(given.clients)]
        for client in clients:
            client.start()
        updates = 0
        while time.monotonic() + given.update_every < begin + given.seconds:
            time.sleep(given.update_every)
            os.utime(path)  # as if it had been replaced: the replica takes it up by itself
            updates += 1
        for client in clients:
            client.join()
        after = replicas_memory()
    times = sorted(each for client in clients for each in client.times)
    errors = [*warm.errors, *(each for client in clients for each in client.errors)]
    p50, p99 = statistics.median(times) * 1e3, times[int(0.99 * len(times))] * 1e3
    print("| clients | s | requests | a second | errors | updates | p50 ms | p99 ms | p99/p50 | memory MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {given.clients} | {given.seconds:.0f} | {len(times)} | {len(times) / given.seconds:.0f} | {len(errors)} |"
        f" {updates} | {p50:.1f} | {p99:.1f} | {p99 / p50:.2f} | {before:.0f} -> {after:.0f} |"
    )
    for each in errors[:5]:
        print(each)
    ray.shutdown()


if __name__ == "__main__":
    main()
