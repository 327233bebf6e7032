"""A Chromium without windows, driven by the Chrome DevTools Protocol."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from select import select
from typing import Any

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
FLAGS += ["--host-resolver-rules=MAP * ~NOTFOUND"]


class Browser:
    """One page, which shows files. Other hosts are out of reach."""

    def __init__(self, executable: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads commands from descriptor 3, and writes answers to 4.
        start = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, executable, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=[commands, answers],
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._received, self._count, self._session = b"", 0, {}
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)

    def open(self, page: Path, width: int) -> None:
        """Load a page in a window of `width` pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Page.navigate", url=page.as_uri())
        self.run("document.readyState == 'complete'")

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, once it is neither false nor empty."""
        source = f"""new Promise((resolve, reject) => {{
            const deadline = Date.now() + 20000
            const look = () => {{
                const value = {expression}
                if (value && value.length !== 0) resolve(value)
                else if (Date.now() > deadline) reject(new Error("no value in 20 s"))
                else setTimeout(look, 20)
            }}
            look()
        }})"""
        answer = self._send(
            "Runtime.evaluate", expression=source, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def close(self) -> None:
        self._session = {}
        self._send("Browser.close")
        self._process.wait(20)
        os.close(self._commands)
        os.close(self._answers)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result; events of the page are dropped."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._received:
                assert select([self._answers], [], [], 60)[0], f"no answer to {method}"
                received = os.read(self._answers, 1 << 16)
                assert received, f"the browser has ended at {method}"
                self._received += received
            answer, _, self._received = self._received.partition(b"\0")
            if (found := json.loads(answer)).get("id") == self._count:
                assert "error" not in found, found["error"]
                return found["result"]
