"""A headless Chromium driven over its debugging pipe: just enough to open a page, run script in it and look at it.

The DevTools protocol over file descriptors 3 and 4, messages ended by a zero byte; needs nothing but the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str | None:
    """A Chromium on this machine, or `None`."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of one browser; both end with the context."""

    def __init__(self, profile: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        program = executable()
        assert program is not None
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        # The browser expects its ends of the pipes as descriptors 3 and 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        become = f"import os, sys; os.dup2({ends[0]}, 3); os.dup2({ends[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        self._browser = subprocess.Popen(
            [sys.executable, "-c", become, program, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (read, write, *ends):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.terminate()
        try:
            self._browser.wait(10)
        except subprocess.TimeoutExpired:
            self._browser.kill()
            self._browser.wait()
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, timeout_s: float = 60, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol; events on the way are noted where they complain."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for answer in self._received(deadline):
                self._note(answer)
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
        raise TimeoutError(method)

    def _received(self, deadline: float) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return []
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        return [json.loads(message) for message in messages]

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params)))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Goes there, and waits until the page has loaded."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 90) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.1)

    def wait_for_complaints(self, count: int, timeout_s: float = 90) -> None:
        """Until the page has complained so often: complaints come after what they are about."""
        deadline = time.monotonic() + timeout_s
        while len(self.complaints) < count:
            assert time.monotonic() < deadline, f"only {self.complaints}"
            self.run("0")
            time.sleep(0.1)

    def type(self, selector: str, text: str) -> None:
        """Puts text into a field as a person would."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key, down and up."""
        codes = {"Enter": 13, "Escape": 27}
        extra = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **extra)

    def view(self, width: int, height: int, scheme: str = "light") -> None:
        """Size of the window, and light or dark."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """What is seen now, as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
