"""Serve a compiled model over HTTP, without PyTorch.

    python examples/serve.py model.tw --port 8000
    curl --data-binary @input.npy http://localhost:8000 -o output.npy

docs/serving.md explains it. It needs NumPy and Tilewright, and no framework or compiler.
"""

from __future__ import annotations

import argparse
import io
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import tilewright

MAX_BYTES = 64 << 20  # of one request


def server_of(path: str, port: int, threads: int = 1) -> ThreadingHTTPServer:
    """A server with one thread per request. A compiled model may be called from all of them at once."""
    model = tilewright.load(path, threads=threads)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if length > MAX_BYTES:
                return self.answer(413, b"the request is too large\n")
            try:
                array = np.load(io.BytesIO(self.rfile.read(length)), allow_pickle=False)
                result = model(array)
            except (ValueError, EOFError, tilewright.InputError) as error:
                return self.answer(400, f"{error}\n".encode())
            file = io.BytesIO()
            np.save(file, result)
            return self.answer(200, file.getvalue())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Standard output is for the address alone."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a compiled model over HTTP.")
    parser.add_argument("model", help="a .tw file")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--threads", type=int, default=1, help="threads of one call")
    options = parser.parse_args()
    with server_of(options.model, options.port, options.threads) as server:
        print(f"serving {options.model} at http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
