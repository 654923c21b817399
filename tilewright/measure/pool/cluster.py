"""A pool's nodes: starting the first, joining, connecting to it, listing, draining, stopping.

A node is one process of `ray start --block` with its children, and detached actors that are pinned to it. What this
user started on this machine is in small files under the cache folder: the address and the token (readable by the user
alone), and the process of each node.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import json
import logging
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright import knobs
from tilewright.errors import MissingDependencyError, OptionError, PoolError
from tilewright.hw import host
from tilewright.measure.pool.workers import NAMESPACE, Workers, answers
from tilewright.support.process import import_folders

PORT = 6379
LOOPBACK = "127.0.0.1"
_START_SECONDS = (
    300.0  # for a node, or for one of its workers, to start while its process lives: machines are busy
)
_LOOK_SECONDS = 30.0  # for the first node to list the others
_STOP_SECONDS = 5.0  # for a node to say goodbye; then what still runs is killed
_STORE_BYTES = 256 << 20
_TOKEN_BYTES = 32
# Ray's defaults are fixed ports, which nodes of one machine would share, and which `--port` could not be among.
_ANY_PORTS = ("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0")


@dataclass(frozen=True)
class Device:
    """A device of a node. `ordinal`: the number of a GPU, None for the processor. `timing`, `machine`: for a
    pseudo-device, which represents a machine that does not exist. `actor`: the "module:class" that times on it."""

    label: str
    ordinal: int | None = None
    timing: str = ""
    machine: str = ""
    actor: str = "tilewright.measure.pool.actors:Timer"

    @property
    def resource(self) -> str:
        kind, _, name = self.label.partition(":")
        return f"tw_cpu:{name}" if kind == "cpu" else f"tw_device:{name}"


def device_here(name: str) -> Device:
    """The device of this machine with the name "cpu", "cuda" or "cuda:1"."""
    kind, _, number = name.partition(":")
    if kind == "cpu" and not number:
        return Device(f"cpu:{host().cpu}")
    if kind == "cuda" and (not number or number.isdigit()):
        from tilewright.hw.gpu import detect

        words = re.findall(r"[a-z0-9]+", detect(int(number or 0)).name.lower())
        return Device("cuda:" + "-".join(words[1:] or words), int(number or 0))
    raise OptionError(f"device must be cpu, cuda or cuda:N, got {name!r}")


# -- files of this user ------------------------------------------------------------------------------------------------


def _folder() -> Path:
    folder = knobs.get("cache_dir") / "pool"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_secret(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def token_file(address: str) -> Path:
    return _folder() / f"{address.replace(':', '_')}.token"


def current_address() -> str:
    """The address of the pool that this user started last on this machine."""
    try:
        return (_folder() / "address").read_text().strip()
    except OSError:
        raise PoolError(
            "no pool is running on this machine", remedy="give its ADDRESS, or start one: tilewright pool up"
        ) from None


def read_token(address: str, given: Path | None = None) -> str:
    """Read the pool's token. Raises PoolError if there is none, or it cannot be read."""
    if given is None and os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = given or token_file(address)
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise PoolError(
            f"no token for the pool {address}: {error.strerror or error}",
            remedy="copy the token file of the machine where the pool was started, and name it: --token-file FILE",
        ) from None
    if len(token) < _TOKEN_BYTES:
        raise PoolError(f"{path} holds no token of a pool", remedy="copy the file that `pool up` names")
    return token


# -- nodes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a machine contributes to a pool. `builders`: the number of candidates that it builds at once, None for one
    per core. `devices`: those that it times on. `listen`: its own address in the network, None for the one that reaches
    the pool. `token`: a file with the pool's token, None for this user's own."""

    builders: int | None = None
    devices: tuple[Device, ...] = ()
    listen: str | None = None
    token: Path | None = None


def up(share: Share, port: int = PORT) -> str:
    """Start a pool with this machine as its first node, and return its address. Beyond loopback a token is required."""
    need_ray()
    listen = share.listen or LOOPBACK
    address = f"{listen}:{port}"
    _check_port(listen, port)
    token = secrets.token_hex(_TOKEN_BYTES) if share.token is None else read_token(address, share.token)
    _write_secret(_folder() / "address", address)
    _start(["--head", f"--port={port}", "--include-dashboard=false"], share, listen, address, token)
    return address


def join(share: Share, address: str) -> str:
    """Add this machine to a pool as a node, and return its address."""
    need_ray()
    token = read_token(address, share.token)
    loopback = _is_loopback(address.rpartition(":")[0])
    listen = share.listen or (LOOPBACK if loopback else _address_towards(address))
    _start([f"--address={address}"], share, listen, address, token)
    return address


def _start(arguments: list[str], share: Share, listen: str, address: str, token: str) -> None:
    _write_secret(token_file(address), token)
    count = knobs.usable_cores() if share.builders is None else share.builders
    resources = Counter(device.resource for device in share.devices)
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    command = [
        *arguments,
        "--block",
        *_ANY_PORTS,
        f"--node-ip-address={listen}",
        f"--node-name={name}",
        f"--num-cpus={max(1, count)}",
        f"--resources={json.dumps(resources)}",
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
    ]
    log = _folder() / f"{name}.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewright.measure.pool.launch", *command]
            if sys.version_info >= (3, 11)
            else [sys.executable, "-m", "tilewright.measure.pool.launch", *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=_environment(token),
            start_new_session=True,
        )
    (_folder() / f"{name}.node").write_text(json.dumps({"pid": process.pid, "address": address}))
    try:
        with connected(address, token, process, log):
            _create_workers(name, count, share.devices)
        process.returncode = 0  # the node outlives this process, so suppress Popen's warning
    except BaseException:
        _stop([process.pid])
        (_folder() / f"{name}.node").unlink(missing_ok=True)
        raise


def _environment(token: str) -> dict[str, str]:
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # A worker is a process that imports much. On a busy machine that takes longer than Ray's default limit, after
        # which Ray kills it and starts another. Nor is any process started that no actor needs.
        "RAY_worker_register_timeout_seconds": f"{_START_SECONDS:.0f}",
        "RAY_raylet_start_wait_time_s": f"{_START_SECONDS:.0f}",
        "RAY_agent_register_timeout_ms": f"{1000 * _START_SECONDS:.0f}",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_niceness": "0",  # a timing gives way to other processes no more than a local one does
        "RAY_prestart_worker_first_driver": "0",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(import_folders()),
    }


@contextlib.contextmanager
def connected(
    address: str,
    token: str,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> Iterator[None]:
    """Connect this process to the pool as a driver. `process`: a node that is just starting, with its log."""
    import ray

    if ray.is_initialized():
        raise PoolError(
            "this process is connected to Ray already",
            remedy="call ray.shutdown() first, or use another process",
        )
    from ray._raylet import AuthenticationTokenLoader, Config

    with _variables(_environment(token)), _restored():
        # Ray reads the environment when it is imported: once more, with this pool's token.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
        deadline = time.monotonic() + (_START_SECONDS if process is not None else 0.0)
        while True:
            if process is not None and process.poll() is not None:
                said = log.read_text()[-400:].strip().splitlines() if log is not None else []
                raise PoolError(f"the node did not start: {' '.join(said[-3:])}")
            if _listens(address):
                try:
                    _init(address)
                    break
                except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                    ray.shutdown()
                    if time.monotonic() > deadline:
                        raise (_late(error) if process is not None else _refused(address, error)) from None
            elif time.monotonic() > deadline:
                if process is not None:
                    raise _late("it does not listen")
                raise PoolError(f"no pool answers at {address}", remedy="start the pool: tilewright pool up")
            time.sleep(0.3)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Ray handles SIGTERM, which then ends the process, and raises the limit of open files: only for this long."""
    is_main = threading.current_thread() is threading.main_thread()
    handler, limit = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _init(address: str) -> None:
    import ray

    ip, _, _ = address.rpartition(":")
    if _is_loopback(ip):
        from ray._private import services

        services.get_node_ip_address = lambda address=None: LOOPBACK
    if not _has_node_here(address):
        raise _NoNodeHere(address)
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )


class _NoNodeHere(ConnectionError):
    """No node of this pool runs on this machine. Ray connects a driver only through one, and waits a minute for it."""


def _has_node_here(address: str) -> bool:
    from ray._private import services
    from ray._raylet import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = GcsClient(address=address).get_all_node_info(
        timeout=_LOOK_SECONDS, state_filter=GcsNodeInfo.GcsNodeState.ALIVE
    )
    return not services.find_node_ids().isdisjoint(each.hex() for each in nodes)


def _late(why: object) -> PoolError:
    return PoolError(
        f"the node was not ready within {_START_SECONDS:.0f} s: {why}",
        remedy="this machine may be too busy: try again when it has less to do",
    )


def _refused(address: str, error: Exception) -> PoolError:
    if isinstance(error, _NoNodeHere):
        return PoolError(
            f"no node of the pool {address} runs on this machine, and Ray connects only through one",
            remedy=f"let this machine join, without work for it: tilewright pool join {address}"
            " --device none --builders 0",
        )
    said = str(error).splitlines()[0].partition(". ")[0] if str(error) else type(error).__name__
    if "version" in str(error).lower():
        return PoolError(
            f"the pool {address} runs another version: {said}",
            remedy="install the same versions of Ray and Python",
        )
    return PoolError(
        f"the pool {address} refuses this process: {said}",
        remedy="give the token of that pool: --token-file FILE; let Ray's versions agree; and set RAY_USE_TLS and its"
        " certificates here if the nodes have them",
    )


def _create_workers(name: str, builders: int, devices: tuple[Device, ...]) -> None:
    """Create the actors on the node of this name, which is just starting."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tilewright.measure.pool import actors

    deadline = time.monotonic() + _START_SECONDS
    node = None
    while node is None:
        found = [each for each in ray.nodes() if each["Alive"] and each.get("NodeName") == name]
        node = found[0]["NodeID"] if found else None
        if node is None and time.monotonic() > deadline:
            raise PoolError(f"the node {name} does not appear in the pool")
        time.sleep(0.0 if node else 0.2)
    here: dict[str, Any] = {
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "lifetime": "detached",
        "namespace": NAMESPACE,
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": 64,  # requests wait in the worker, where users take turns
    }
    builder = ray.remote(actors.Builder)
    wanted: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = [
        (builder, {"name": f"builder/{name}/{n}"}, (name,)) for n in range(builders)
    ]
    for number, each in enumerate(devices):
        module, _, kind = each.actor.partition(":")
        timer = ray.remote(getattr(importlib.import_module(module), kind))
        options = {"name": f"timer/{name}/{each.label}/{number}", "resources": {each.resource: 1}}
        wanted.append((timer, options, (name, each.label, each.ordinal, each.timing, each.machine)))
    cores = knobs.usable_cores()
    for start in range(0, len(wanted), cores):  # no more at once than can start without delaying each other
        made = [
            kind.options(**here, **options).remote(*arguments)
            for kind, options, arguments in wanted[start : start + cores]
        ]
        try:
            ray.get([each.hello.remote() for each in made], timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            raise PoolError(f"the workers of {name} do not start: {str(error).splitlines()[-1]}") from None


@dataclass(frozen=True)
class PoolEntry:
    """A worker as `pool ls` shows it."""

    name: str
    node: str
    host: str
    device: str
    variant: str
    network: bool | None  # whether what it runs can reach a network; None: not known
    state: str


def rows(address: str, token: Path | None = None) -> list[PoolEntry]:
    with connected(address, read_token(address, token)):
        workers = Workers()
        workers.refresh()
        found = [
            PoolEntry(
                w.name,
                w.hello.node,
                w.host,
                w.hello.label,
                w.variant if w.is_timer else "",
                w.hello.network,
                "ready",
            )
            for w in (*workers.timers(), *workers.builders())
        ]
        return found + [
            PoolEntry(name, name.split("/")[1], "", "", "", None, reason)
            for name, reason in workers.aside.items()
        ]


def drain(node: str, address: str, token: Path | None = None) -> int:
    """Let a node's workers finish their requests and accept no others. Returns the number of workers."""
    import ray

    with connected(address, read_token(address, token)):
        workers = Workers()
        workers.refresh()
        of_node = [w for w in (*workers.timers(), *workers.builders()) if w.hello.node == node]
        if not of_node:
            there = sorted({w.hello.node for w in (*workers.timers(), *workers.builders())})
            raise PoolError(f"the pool has no node {node!r}; it has {', '.join(there) or 'none'}")
        ray.get([w.ask("drain") for w in of_node], timeout=30)
        return len(of_node)


def nodes_here() -> Mapping[str, dict[str, Any]]:
    """Nodes that this user started on this machine, by name."""
    found = {}
    for path in sorted(_folder().glob("*.node")):
        with contextlib.suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text())
    return found


def down(names: tuple[str, ...] = ()) -> list[str]:
    """Stop nodes on this machine: those with these names, or all that this user started."""
    known = nodes_here()
    for name in names:
        if name not in known:
            raise PoolError(
                f"no node {name!r} was started here", remedy=f"name one of {', '.join(known) or 'none'}"
            )
    stopped = list(names or known)
    _stop([known[name]["pid"] for name in stopped])
    for name in stopped:
        (_folder() / f"{name}.node").unlink(missing_ok=True)
    if not nodes_here():
        (_folder() / "address").unlink(missing_ok=True)
    return stopped


def _stop(pids: Sequence[int]) -> None:
    """Stop the processes of nodes and their children, unless another process has the same number by now."""
    import psutil

    nodes, children = [], []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if "tilewright.measure.pool.launch" in process.cmdline():
                children += process.children(recursive=True)
                process.send_signal(signal.SIGTERM)
                nodes.append(process)
    psutil.wait_procs(nodes, timeout=_STOP_SECONDS)
    for each in (*nodes, *children):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


# -- addresses ---------------------------------------------------------------------------------------------------------


def _is_loopback(ip: str) -> bool:
    if ip == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(ip).is_loopback
    return False


def _listens(address: str) -> bool:
    ip, _, port = address.rpartition(":")
    if not ip or not port.isdigit():
        raise PoolError(
            f"{address!r} is not the address of a pool", remedy="use HOST:PORT, as `pool up` printed it"
        )
    return answers(address, 0.0)


def _check_port(ip: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
        except OSError as error:
            raise PoolError(
                f"a pool cannot listen on {ip}:{port}: {error.strerror}", remedy="choose another: --port"
            ) from None


def _address_towards(address: str) -> str:
    """The address of this machine from which it reaches another."""
    ip, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, int(port)))
        except OSError as error:
            raise PoolError(f"cannot reach {address}: {error}") from None
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            "a pool needs Ray, which is not installed", remedy='pip install "tilewright[ray]"'
        ) from None
