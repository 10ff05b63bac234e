"""A headless Chromium driven over a pipe with the DevTools protocol, its network blocked."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


class Browser:
    """One Chromium process; every page is a fresh tab with its own viewport, colour scheme and scripts."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        down_read, self._write = os.pipe()
        self._read, up_write = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4; copies above 10 cannot collide.
        high_read = fcntl.fcntl(down_read, fcntl.F_DUPFD, 10)
        high_write = fcntl.fcntl(up_write, fcntl.F_DUPFD, 10)

        def place_descriptors() -> None:
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place_descriptors,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (down_read, up_write, high_read, high_write):
            os.close(descriptor)
        self._buffer, self._next_id = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that arrive meanwhile are kept in `events`."""
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next_id:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser closed its pipe"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(line)

    def close(self) -> None:
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(timeout=10)
        os.close(self._write)
        os.close(self._read)


class Page:
    """A tab showing one file at a viewport; `scripts=False` opens it as a reader without scripts would.

    Opening waits until every chart is drawn, unless scripts are off or `drawn=False`.
    """

    def __init__(
        self,
        browser: Browser,
        path: Path,
        width: int,
        dark: bool = False,
        scripts: bool = True,
        drawn: bool = True,
    ):
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.events.clear()
        self.call("Network.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        if not scripts:
            self.call("Emulation.setScriptExecutionDisabled", value=True)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        if scripts and drawn:
            self.wait("document.documentElement.dataset.report === 'drawn'")

    def resize(self, width: int) -> None:
        metrics = {"height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, **metrics)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; the debugger may run it even where page scripts may not."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_seconds: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self.evaluate(condition):
            errors = self.evaluate("document.documentElement.dataset.errors ?? ''")
            assert time.monotonic() < deadline, f"still waiting for {condition}; page errors: {errors}"
            time.sleep(0.05)

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def requested_urls(self) -> list[str]:
        """Every address the tab asked for since it was opened, the file itself included."""
        sent = [e for e in self._browser.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def complaints(self) -> list[str]:
        """Uncaught exceptions, console errors and refused loads."""
        found = []
        for event in self._browser.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
