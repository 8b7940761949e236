"""A headless Chromium, driven through a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

#: Debian's package, Ubuntu's package, and Google's package.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHIN_S = 60.0
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe",
    # A request to any host would reach no host.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


class Browser:
    """One tab of a Chromium with a new profile; `problems` and `requests` are of the page since `open`."""

    def __init__(self) -> None:
        self.problems: list[str] = []  # errors and warnings of the console, and exceptions of scripts
        self.requests: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="effllm-browser-")
        self._number, self._text = 0, b""
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        # The protocol uses the descriptors 3 and 4, which a shell makes from the ends of the pipes.
        command = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(CHROMIUM), *_OPTIONS, f"--user-data-dir={self._profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_read, to_write),
        )
        os.close(to_read)
        os.close(to_write)
        target = self._call("Target.createTarget", {"url": "about:blank"}, "")["targetId"]
        found = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, "")
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> Any:
        """Return the result of a method of the protocol in the tab."""
        return self._call(method, arguments, self._session)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scripts: bool = True) -> None:
        """Open a file, and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.problems, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + WITHIN_S
        while not self._loaded:
            self._receive(deadline)

    def media(self, *, scheme: str = "light", kind: str = "screen") -> None:
        """Set the colour scheme and the medium."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def pdf(self) -> bytes:
        """Return the printed page."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        """End the browser and remove its profile."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method: str, arguments: dict[str, Any], session: str) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        message |= {"sessionId": session} if session else {}
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._to, text) :]
        deadline = time.monotonic() + WITHIN_S
        while (answer := self._receive(deadline)).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._text:
            readable, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0.0))
            assert readable, "the browser does not answer"
            part = os.read(self._from, 2**20)
            assert part, "the browser ended"
            self._text += part
        text, _, self._text = self._text.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("warning", "error"):
            self.problems.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("warning", "error", "assert"):
            self.problems.append(str(about["args"]))
