"""A headless Chromium, driven over its DevTools pipe (null-terminated JSON on two file descriptors; no library)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The browser expects its pipe at these descriptors, which may hold the other end's by now.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""

PATIENCE = 90.0  # seconds for one answer, on a busy machine


def find_chromium() -> str | None:
    """Path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One page. ``problems``: console errors, exceptions and failed requests since ``open``."""

    def __init__(self, profile: Path) -> None:
        chromium = find_chromium()
        assert chromium is not None
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_3_AND_4, str(their_in), str(their_out), chromium, *flags],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._seen: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._session = None
                self.call("Browser.close")
        finally:
            os.close(self._out)
            os.close(self._in)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def open(self, path: Path, width: int, height: int) -> None:
        """Show a file; returns when it has loaded."""
        target = self.call("Target.createTarget", url="about:blank", width=width, height=height)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.as_uri())
        while not any(message.get("method") == "Page.loadEventFired" for message in self._seen):
            self._seen.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    @property
    def problems(self) -> list[str]:
        found = []
        for message in self._seen:
            method, values = message.get("method"), message.get("params", {})
            bad = (
                method in ("Runtime.exceptionThrown", "Network.loadingFailed")
                or (method == "Runtime.consoleAPICalled" and values.get("type") in ("error", "warning", "assert"))
                or (method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"))
            )
            found += [json.dumps(values)] if bad else []
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself included; data that it carries is not asked for."""
        return [
            message["params"]["request"]["url"]
            for message in self._seen
            if message.get("method") == "Network.requestWillBeSent"
            and not message["params"]["request"]["url"].startswith("data:")
        ]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        while (answer := self._receive()).get("id") != self._number:
            self._seen.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message
