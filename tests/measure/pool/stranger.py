"""What somebody without the token gets from the ports of a pool: requests of Ray's own services, and plain HTTP.

`/ray.rpc.syncer.RaySyncer/StartSync` is not tried: without its metadata it ends a raylet of Ray 2.60, whoever asks.
"""

from __future__ import annotations

import http.client

import grpc

_SECONDS = 60.0  # for one request, on a busy machine
_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeInfoGcsService/DrainNode",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.InternalKVGcsService/InternalKVPut",
    "/ray.rpc.ActorInfoGcsService/KillActorViaGcs",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.NodeManagerService/ShutdownRaylet",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.CoreWorkerService/KillActor",
    "/ray.rpc.ReporterService/GetTraceback",
)
_PAGES = (
    ("GET", "/"),
    ("GET", "/api/jobs/"),
    ("POST", "/api/job_agent/jobs/"),
    ("POST", "/get_or_create_runtime_env"),
    ("GET", "/logs"),
)


def grpc_codes(port: int) -> dict[str, str]:
    """The status of each call; empty if the port does not speak gRPC."""
    found = {}
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call in _CALLS:
            try:
                channel.unary_unary(call)(b"", timeout=_SECONDS)
                found[call] = "OK"
            except grpc.RpcError as error:
                found[call] = error.code().name
                if found[call] == "UNAVAILABLE":  # no gRPC here
                    return {}
    return found


def http_codes(port: int) -> dict[str, str]:
    """The status of each request, "metrics" for counts in the format of Prometheus; empty if the port does not speak
    HTTP/1."""
    found = {}
    for method, page in _PAGES:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
        try:
            connection.request(method, page, body=b"" if method == "POST" else None)
            answer = connection.getresponse()
            is_metrics = answer.status == 200 and answer.read().startswith(b"# HELP ")
            found[page] = "metrics" if is_metrics else str(answer.status)
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return found
