"""Serves the page on the loopback interface; its address contains a token.

Another site's page in the same browser can send requests to that interface, but does not have the token; requests with
another `Host` (DNS rebinding) are refused. A run's files are served only as data, in JSON answers and images, and the
content security policy below lets the browser run only the package's script.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl

from lightrl.commands.inspect.answers import Answers

_MAX_THREADS = 200
PAGE = Path(__file__).parent / "page"
_FILES = {
    "": ("inspect.html", "text/html; charset=utf-8"),
    "metrics.js": ("metrics.js", "text/javascript; charset=utf-8"),
    "inspect.js": ("inspect.js", "text/javascript; charset=utf-8"),
    "inspect.css": ("inspect.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer:
    """Serves the page and `answers` (already started) on 127.0.0.1 until closed; port 0 picks a free port."""

    def __init__(self, answers: Answers, *, port: int = 0) -> None:
        self.answers = answers
        self.token = secrets.token_urlsafe(18)
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.page = self
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="lightrl-inspect", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.answers.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: PageServer

    def verify_request(self, request: object, client_address: object) -> bool:
        return threading.active_count() < _MAX_THREADS  # each connection has a thread, even if it is idle


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds until an idle connection is closed

    def do_GET(self) -> None:
        page = self.server.page
        if self.headers.get("Host") not in (f"127.0.0.1:{page.port}", f"localhost:{page.port}"):
            return self._send_json(HTTPStatus.FORBIDDEN, "Open the page at the address that lightrl inspect printed.")
        path, _, query = self.path.partition("?")
        token, _, rest = path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode(), page.token.encode()):
            return self._send_json(HTTPStatus.NOT_FOUND, "The address needs the token that lightrl inspect printed.")
        if rest in _FILES:
            name, kind = _FILES[rest]
            return self._send(HTTPStatus.OK, kind, (PAGE / name).read_bytes())
        try:
            self._answer(rest, dict(parse_qsl(query)))
        except (LookupError, ValueError) as error:
            self._send_json(HTTPStatus.NOT_FOUND, str(error))
        return None

    def _answer(self, question: str, values: dict[str, str]) -> None:
        answers = self.server.page.answers
        if question == "image":
            self._send(HTTPStatus.OK, *answers.image(values))
        else:
            self._send_json(HTTPStatus.OK, answers.answer(question, values))

    def _send_json(self, status: HTTPStatus, value: object) -> None:
        content = json.dumps(value if status == HTTPStatus.OK else {"error": value}).encode()
        self._send(status, "application/json", content)

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the addresses contain the token."""
