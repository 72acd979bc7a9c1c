"""A headless Chromium for tests, spoken to through its debugging pipe; where none is installed, tests skip.

Tests take the fixture `browser`, one for the whole run:

    def test_page_is_as_wide_as_the_window(browser):
        browser.open(page, width=390)
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert browser.complaints() == []
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe "
    "--allow-file-access-from-files"  # a file may look into a frame that shows another
).split()


class Browser:
    """One page of a running Chromium.

    `told` collects what it said on its own: console messages, errors, requests.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._rest = 0, b""
        self._session: dict[str, str] = {}
        self.told: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.told.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 120)
            assert ready, "Chromium does not answer"
            block = os.read(self._from, 1 << 16)
            assert block, "Chromium has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path | str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Shows a file, or an address, on a screen of that many CSS pixels, and waits until it is loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=scheme)
        self.resize(width, height)
        self.told.clear()
        answer = self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        assert "errorText" not in answer, answer
        while not any(message.get("method") == "Page.loadEventFired" for message in self.told):
            self.told.append(self._next())

    def resize(self, width: int, height: int = 800) -> None:
        """Gives the page a screen of that many CSS pixels; a narrow one is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, also what lies below the window, as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self, path: Path) -> None:
        """The page as it would be printed."""
        answer = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def complaints(self) -> list[str]:
        """What went wrong since the page was opened: console messages, exceptions, refused or foreign requests."""
        found = []
        for message in self.told:
            method, params = message.get("method"), message.get("params", {})
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(params))
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                found.append(params["request"]["url"])
        return found


@contextmanager
def start_chromium() -> Iterator[Browser]:
    """A running Chromium with an empty profile; skips the test where none is installed."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs Chromium (looked for {', '.join(NAMES)}): `apt-get install chromium`")
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads descriptor 3 and writes 4; bash moves ours there, since a fork with a hook warns beside threads.
        command = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "chromium", path, *FLAGS]
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        process = subprocess.Popen([*command, f"--user-data-dir={profile}"], pass_fds=(to_read, from_write), **silent)
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(to_write, from_read)
        finally:
            process.terminate()
            process.wait()
            os.close(to_write)
            os.close(from_read)
