"""A compiled model behind Ray Serve under load: latency, errors and memory, with new artifacts meanwhile.

    python benchmarks/serving.py [--clients 8] [--replicas 2] [--seconds 300] [--update-every 20]

Clients on loopback send one row after the other, each as soon as the last was answered, and compare every answer with
the two models'. Now and then the artifact is replaced by the other model's; an update counts once both replicas have
answered with the new one. The slope of the replicas' memory is fitted to samples of the second half of the run, once
every thread and buffer is in use. Needs `pip install '.[serve]'`.
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
import torch
from ray_serve import connect, ray, start

import tilewright

_SIZES = (1, 2, 4, 8)
_SAMPLE_SECONDS = 2.0
_SETTLED_SECONDS = 1.0  # without an answer of the model before: every replica has the new one


def saved(path: Path, model: torch.nn.Module, features: int) -> bytes:
    """An artifact with a variant for each batch size, as bytes."""
    fast = tilewright.compile(model, (torch.zeros(_SIZES[0], features),), dynamic=True)
    for size in _SIZES:
        fast(torch.zeros(size, features))
    fast.save(path)
    return path.read_bytes()


def overwrite(path: Path, artifact: bytes) -> None:
    """Put another artifact in the file's place, as a whole."""
    path.with_suffix(".new").write_bytes(artifact)
    path.with_suffix(".new").rename(path)


class Client(threading.Thread):
    """`expected`: the results of each model. `last`: when each model answered last."""

    def __init__(self, port: int, rows: np.ndarray, expected: list[np.ndarray], until: float) -> None:
        super().__init__(daemon=True)
        self.last = [0.0] * len(expected)
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
            which, number = number % len(bodies), number + 1
            begin = time.perf_counter()
            try:
                connection.request("POST", "/", bodies[which])
                answer = connection.getresponse()
                body = answer.read()
                self.times.append(time.perf_counter() - begin)
                if answer.status != 200:
                    self.errors.append(f"{answer.status}: {body[:80]!r}")
                    continue
                result = np.load(io.BytesIO(body))
                of = [
                    n for n, each in enumerate(self._expected) if np.allclose(result, each[which], atol=1e-4)
                ]
                if len(of) == 1:
                    self.last[of[0]] = begin
                else:
                    self.errors.append("a wrong answer")
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                connection.close()


class Memory(threading.Thread):
    """Samples of the replicas' memory: (seconds, MB)."""

    def __init__(self, until: float) -> None:
        super().__init__(daemon=True)
        self._until, self.samples = until, [(time.monotonic(), replicas_memory())]

    def run(self) -> None:
        while time.monotonic() < self._until:
            time.sleep(_SAMPLE_SECONDS)
            self.samples.append((time.monotonic(), replicas_memory()))

    @property
    def slope(self) -> float:
        """MB a minute in the second half."""
        half = np.array(self.samples[len(self.samples) // 2 :])
        return float(np.polyfit(half[:, 0] / 60, half[:, 1], 1)[0])


def taken_up(clients: list[Client], model: int, patience: float) -> bool:
    """Whether all answers are the new model's before time runs out: of requests sent in the last seconds, every one."""
    deadline = time.monotonic() + patience
    begin = time.perf_counter()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        newest = max(client.last[model] for client in clients)
        oldest = max(client.last[1 - model] for client in clients)
        if newest > begin and newest - oldest > _SETTLED_SECONDS:
            return True
    return False


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
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--update-every", type=float, default=20.0)
    parser.add_argument("--features", type=int, default=512)
    given = parser.parse_args()
    torch.manual_seed(0)
    width = given.features
    models = [
        torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.ReLU(), torch.nn.Linear(2 * width, 16)
        ).eval()
        for _ in range(2)
    ]
    rows = torch.randn(32, width)
    expected = [model(rows).detach().numpy() for model in models]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tw"
        artifacts = [saved(path, model, width) for model in models]
        overwrite(path, artifacts[0])
        folders = (*sys.path[:2], os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # for replicas
        connect(num_cpus=4, logging_level="ERROR")
        start(str(path), port, replicas=given.replicas)
        warm = Client(port, rows.numpy(), expected, time.monotonic() + 3)
        warm.run()
        begin = time.monotonic()
        memory = Memory(begin + given.seconds)
        clients = [Client(port, rows.numpy(), expected, begin + given.seconds) for _ in range(given.clients)]
        for thread in (memory, *clients):
            thread.start()
        replaced = updates = 0
        while time.monotonic() + given.update_every < begin + given.seconds:
            time.sleep(given.update_every / 2)
            replaced += 1
            overwrite(path, artifacts[replaced % 2])
            updates += taken_up(clients, replaced % 2, given.update_every / 2)
        for thread in (memory, *clients):
            thread.join()
    times = sorted(each for client in clients for each in client.times)
    errors = [*warm.errors, *(each for client in clients for each in client.errors)]
    p50, p99 = statistics.median(times) * 1e3, times[int(0.99 * len(times))] * 1e3
    print(
        "| clients | replicas | s | requests | a second | errors | updates | p50 ms | p99 ms | p99/p50 | memory MB"
        " | MB a minute |"
    )
    print("|" + " --- |" * 12)
    print(
        f"| {given.clients} | {given.replicas} | {given.seconds:.0f} | {len(times)} |"
        f" {len(times) / given.seconds:.0f} | {len(errors)} | {updates} of {replaced} | {p50:.1f} | {p99:.1f} |"
        f" {p99 / p50:.2f} | {memory.samples[0][1]:.0f} -> {memory.samples[-1][1]:.0f} | {memory.slope:.2f} |"
    )
    for each in errors[:5]:
        print(each)
    ray.shutdown()


if __name__ == "__main__":
    main()
