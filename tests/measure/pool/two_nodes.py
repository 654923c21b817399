"""A pool of two nodes from start to end, in a process of its own: what happened is printed as JSON.

    python -m tests.measure.pool.two_nodes FOLDER        # FOLDER: for the pool's files

Ray leaves threads and signal handlers in a process, so tests start this one. Both nodes have a builder and a
pseudo-device; everything else is real.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from random import Random
from typing import Any

import psutil

from tests.faults.candidates import product
from tilewright.errors import PoolError
from tilewright.hw import host
from tilewright.measure.pool import cluster
from tilewright.measure.pool.cluster import Device, Share
from tilewright.measure.pool.driver import PoolRunner
from tilewright.measure.pool.workers import Worker, Workers
from tilewright.measure.trial import TaskJob
from tilewright.space.candidates import Candidates
from tilewright.space.template import Work

PSEUDO = Device("cpu:pseudo", timing="tilewright.testing.pool:serve")
_CONFIGS = 6
_OPEN_FILES = 1024  # the limit of an ordinary machine, which Ray raises
_AGAIN_SECONDS = 2.0  # after which gRPC connects again


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def small_model() -> tuple[Any, tuple[Any, ...]]:
    """For the command line."""
    import torch

    return torch.nn.Linear(24, 16).eval(), (torch.randn(8, 24),)


def listening(parents: Iterable[psutil.Process]) -> list[tuple[str, int]]:
    """The addresses and ports at which these processes and their children listen."""
    found = set()
    for process in [each for parent in parents for each in (parent, *parent.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return sorted(found)


def nodes() -> list[psutil.Process]:
    """The processes of this user's nodes."""
    return [psutil.Process(node["pid"]) for node in cluster.nodes_here().values()]


def strangers(ports: list[int]) -> dict[int, dict[str, dict[str, str]]]:
    """The answers of ports to requests without the token. A port that says nothing is asked again, and left out if
    nothing listens there any more."""
    from tests.measure.pool import stranger

    def asked(port: int) -> dict[str, dict[str, str]]:
        return {"grpc": stranger.grpc_codes(port), "http": stranger.http_codes(port)}

    found = {port: asked(port) for port in ports}
    for port in [port for port, answers in found.items() if not any(answers.values())]:
        time.sleep(_AGAIN_SECONDS)
        found[port] = asked(port)
    still = {port for _, port in listening(nodes())}
    return {port: answers for port, answers in found.items() if any(answers.values()) or port in still}


def without_a_node_here(address: str) -> str:
    """The error of a driver on a machine that has no node of the pool."""
    from ray._private import services

    found, services.find_node_ids = services.find_node_ids, set
    try:
        with cluster.connected(address, cluster.read_token(address)):
            return ""
    except PoolError as error:
        return str(error)
    finally:
        services.find_node_ids = found


def kill_at_work(runner: PoolRunner, worker: Worker) -> threading.Thread:
    """Kill a timer as soon as it has a trial, which it cannot answer because it was stopped before."""
    os.kill(worker.hello.pid, signal.SIGSTOP)

    def kill() -> None:
        while not any(attempt.worker.name == worker.name for attempt in list(runner._running.values())):
            time.sleep(0.01)
        os.kill(worker.hello.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def main() -> None:
    os.environ["TILEWRIGHT_CACHE_DIR"] = sys.argv[1]
    job = TaskJob.of(Work(product(32, 48, 40), host()), 1)
    configs = Candidates.of(job.work(), sketches=False).sample(Random(0), _CONFIGS)
    share = Share(1, (PSEUDO,))
    try:
        address = cluster.up(share, free_port())
        cluster.join(share, address)
        ports = listening(nodes())
        refused = strangers([port for _, port in ports]) if importlib.util.find_spec("grpc") else {}
        elsewhere = without_a_node_here(address)
        limit = (_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        with cluster.connected(address, cluster.read_token(address)):
            workers = Workers()
            workers.refresh()
            timers, builders = workers.timers(), workers.builders()
            with PoolRunner(workers, 1, user="tester", seed=7) as runner:
                first = runner.measure(job, configs)
                runner.acknowledge(job, first)
                used = {device.rpartition(" on ")[2] for device in runner.use}
                killer = kill_at_work(runner, timers[0])
                second = runner.measure(job, configs)
                killer.join()
                again = runner.given_again
        print(
            json.dumps(
                {
                    "nodes": len({timer.hello.node for timer in timers}),
                    "timers": len(timers),
                    "builders": len(builders),
                    "network": any(timer.hello.network for timer in timers),
                    "listening": sorted({ip for ip, _ in ports}),
                    "strangers": refused,
                    "elsewhere": elsewhere,
                    "measured": [each.seconds for each in first],
                    "on": len(used),
                    "after a timer was killed": [each.seconds for each in second],
                    "given again": again,
                    "limit restored": resource.getrlimit(resource.RLIMIT_NOFILE) == limit,
                }
            )
        )
    finally:
        cluster.down()


if __name__ == "__main__":
    main()
