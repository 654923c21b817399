"""A pool whose connections are encrypted by Ray's TLS, with certificates made here."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measure.pool.two_nodes import free_port
from tilewright.measure.pool import cluster

pytest.importorskip("ray")

_SECONDS = 600.0  # for a command, on a busy machine


def made(folder: Path) -> dict[str, str]:
    """An authority, and a certificate for nodes on loopback: Ray's variables for them."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes")
    openssl(
        "req", "-x509", *key, "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority"
    )
    openssl("req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "node.csr", *signed, "-days", "2", "-out", "node.pem")
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "node.pem"),
        "RAY_TLS_SERVER_KEY": str(folder / "node.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.pem"),
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_pool_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = made(tmp_path)
    port = free_port()

    def pool(*words: str, encrypted: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tilewright.cli", "pool", *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env={**plain, **variables} if encrypted else plain,
        )

    try:
        up = pool("up", "--port", str(port), "--device", "none", "--builders", "1")
        assert up.returncode == 0, up.stderr
        listed = pool("ls", "--json")
        assert listed.returncode == 0, listed.stderr
        assert [each["state"] for each in json.loads(listed.stdout)] == ["ready"]

        trusting = ssl.create_default_context(cafile=variables["RAY_TLS_CA_CERT"])
        trusting.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            with trusting.wrap_socket(connection, server_hostname="127.0.0.1") as secured:
                assert secured.version() in ("TLSv1.2", "TLSv1.3")

        refused = pool("ls", encrypted=False)  # it has the token
        assert refused.returncode != 0
        assert "refuses this process" in refused.stderr and "RAY_USE_TLS" in " ".join(refused.stderr.split())
    finally:
        cluster.down()
