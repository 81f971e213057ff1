"""A server of a few lines, in place of SGLang: `python small_server.py --port PORT [word ...]`; it starts at once.

Words: `never_ready`, `dies` (at once, after a last line), `stubborn` (ignores SIGTERM), `child` (starts a process that
ignores SIGTERM, in a session of its own; its id is at /child), `dies_after_1` (a second after it is ready), `late`
(listens a second after its start).
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

words = sys.argv[1:]
token = os.environ.get("LIGHTRL_SERVER_TOKEN", "")
child = None
if "dies" in words:
    sys.exit(f"no room for 7 GiB of weights, token {token}")
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in words:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = {"child": child.pid if child else None, "pid": os.getpid(), "environment": dict(os.environ)}
        is_open = self.path == "/ready" or self.headers.get("Authorization") == f"Bearer {token}"
        status = 401 if not is_open else 503 if "never_ready" in words else 200
        body = json.dumps(answer if is_open else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if "dies_after_1" in words:
            threading.Timer(1, os._exit, [3]).start()

    def log_message(self, *_: object) -> None:
        pass


if "late" in words:
    time.sleep(1)
sys.stderr.write("listening\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
