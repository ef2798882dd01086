"""A headless Chromium for tests of pages: open, read, press keys, and know what went wrong or over the wire.

    with browser.page() as page:                    # skips the test where no Chromium is installed
        page.open(path_or_url)
        page.press("j"); page.press("Enter"); page.type("red circle")
        assert page.js("document.title") == "…"     # a promise is awaited; the value comes back as JSON
        assert page.errors == [] and page.requests == []

It speaks the DevTools protocol (chromedevtools.github.io/devtools-protocol) over one websocket, in one thread: events
are read while an answer is waited for, so ask for something (`page.js`, `page.wait`) before looking at `errors`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
           "--disable-dev-shm-usage", "--remote-debugging-port=0", "--window-size=1280,900")  # fmt: skip
# Keys whose `key`, `code` and virtual key code are not those of a letter.
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Backspace": 8, "Home": 36, "End": 35, "PageUp": 33, "PageDown": 34,
        "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}  # fmt: skip
TEXT = {"Enter": "\r"}  # what else a key types; without it a button does not take Enter for a click


class Page:
    """One tab. errors: exceptions, console errors and warnings. requests: URLs asked for besides pages opened."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, timeout: float = 60.0, **params: Any) -> dict[str, Any]:
        """Send one command, wait for its answer. Raises: AssertionError: the browser refused it."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=timeout))
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        name, of = message.get("method"), message.get("params", {})
        if name == "Page.loadEventFired":
            self.loaded = True
        elif name == "Runtime.exceptionThrown":
            detail = of["exceptionDetails"]
            self.errors.append(detail.get("exception", {}).get("description") or detail["text"])
        elif name == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in of["args"]))
        elif name == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{of['entry']['text']} {of['entry'].get('url', '')}".strip())
        elif name == "Network.requestWillBeSent":
            url, navigation = of["request"]["url"], of.get("type") == "Document" and of["requestId"] == of["loaderId"]
            if not navigation and not url.startswith(("data:", "blob:")):
                self.requests.append(url)
        elif name == "Network.webSocketCreated":
            self.requests.append(of["url"])

    def open(self, where: Path | str, timeout: float = 60.0) -> None:
        """Go to a file or URL and wait until it has loaded."""
        self.loaded = False
        answer = self.call("Page.navigate", url=where.resolve().as_uri() if isinstance(where, Path) else where)
        assert not answer.get("errorText"), f"{where}: {answer['errorText']}"
        self._until(lambda: self.loaded, timeout, f"{where} has not loaded")

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression (awaited), as JSON carries it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 20.0) -> Any:
        """The first truthy value of the expression."""
        return self._until(lambda: self.js(expression), timeout, f"never true: {expression}")

    def _until(self, what: Any, timeout: float, otherwise: str) -> Any:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if value := what():
                return value
            self.call("Runtime.evaluate", expression="0")  # hears what happened meanwhile
            time.sleep(0.02)
        raise AssertionError(f"{otherwise} within {timeout:g} s; errors: {self.errors}")

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, down and up, to whatever has the focus: `j`, `/`, `Enter`, `ArrowDown`, ` `."""
        text = TEXT.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key) or (ord(key.upper()) if key.isalnum() or key == " " else 0)
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        common["code"] = key if key in KEYS else {" ": "Space"}.get(key, f"Key{key.upper()}" if key.isalpha() else "")
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common,
                  **({"text": text} if text else {}))  # fmt: skip
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Text into whatever has the focus, key by key."""
        for one in text:
            self.press(one)

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which is scrolled to first."""
        where = self.js(f"(() => {{const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
                        "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
                        "return [r.x + r.width / 2, r.y + r.height / 2]})()")  # fmt: skip
        assert where, f"nothing matches {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def colours(self, scheme: str) -> None:
        """`light` or `dark`, as the reader's system would ask for."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in view, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A fresh browser with one empty tab; it is gone afterwards. Skips the test where there is no Chromium."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is installed")
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_tab(Path(profile), process), max_size=None, open_timeout=60) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _tab(profile: Path, process: subprocess.Popen) -> str:
    """The websocket address of the first tab, once the browser has started."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            port = int((profile / "DevToolsActivePort").read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                for tab in json.load(answer):
                    if tab["type"] == "page":
                        return tab["webSocketDebuggerUrl"]
        except (OSError, ValueError, IndexError):
            pass  # not written yet, or not listening yet
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start (exit status {process.poll()})")
