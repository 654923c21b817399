"""Chromium, driven over a pipe by its DevTools protocol: pages with a size and a colour scheme, keys, and what it says.

Nothing but the browser itself is needed. `BROWSER` is None where there is none.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
_PATIENCE = 120.0  # seconds for an answer: machines that run tests are busy


class Page:
    """One page of a running browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._number = 0
        self._rest = b""
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._reading, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "code": key.strip() or "Space", "windowsVirtualKeyCode": codes[key]}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.send("Input.dispatchKeyEvent", **common, **down)
        self.send("Input.dispatchKeyEvent", **common, type="keyUp")

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page, what its policy has refused among them."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(event["params"]["args"]))
            elif event["method"] == "Log.entryAdded":
                found.append(str(event["params"]["entry"]["text"]))
        return found

    @property
    def requested(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    assert BROWSER is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    moved = {theirs_in: 3, theirs_out: 4}
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip
    # The browser reads descriptor 3 and writes descriptor 4; a shell puts them there.
    redirect = " ".join(f"{number}{'<' if number == 3 else '>'}&{fd}" for fd, number in moved.items())
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {redirect}', "bash", *command],
        pass_fds=tuple(moved),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in moved:
        os.close(fd)
    try:
        yield Page(ours_in, ours_out)
    finally:
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
