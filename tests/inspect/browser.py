"""A headless Chromium through chromedriver's protocol: only what the tests of the page need."""

import json
import shutil
import socket
import subprocess
import urllib.request
from typing import Any

from waits import comes_true

MISSING = "Chromium and its driver are not installed here: apt-get install chromium chromium-driver."
_KEYS = {"ArrowLeft": "\ue012", "ArrowRight": "\ue014", "Escape": "\ue00c"}
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def is_missing() -> bool:
    return not (shutil.which("chromedriver") and shutil.which("chromium"))


class Browser:
    def __init__(self, *, width: int = 1280, height: int = 860) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self._process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        self._url = f"http://127.0.0.1:{port}"
        assert comes_true(self._ready), "chromedriver did not start"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"]
        options = {"args": [*arguments, "--force-device-scale-factor=1"], "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{session['sessionId']}"

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[_ELEMENT]}/value", {"text": text})

    def press(self, key: str) -> None:
        """Press and release a key where the focus is."""
        strokes = [{"type": kind, "value": _KEYS[key]} for kind in ("keyDown", "keyUp")]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def wait(self, condition: str, *args: Any) -> None:
        """Waits until a JavaScript expression is true."""
        assert comes_true(lambda: self.run(f"return !!({condition})", *args)), condition

    def problems(self) -> list[str]:
        """Lines of the browser's console since the last call, scripts that it refused to run included."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(10)

    def _ready(self) -> bool:
        try:
            return bool(self._send("GET", "/status")["ready"])
        except OSError:
            return False

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        content = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, content, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]
