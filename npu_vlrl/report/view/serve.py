"""Serves the viewer of a run on this machine; each request reads its data from the run folder."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from npu_vlrl.report.view.page import frame, head
from npu_vlrl.report.view.records import RunRecords

HOST = "127.0.0.1"


class ViewServer(ThreadingHTTPServer):
    """Server on the loopback interface; requests without the `token` of `url` are refused."""

    daemon_threads = True

    def __init__(self, records: RunRecords, port: int = 0) -> None:
        """Starts to listen. Port 0 takes a free one. Raises OSError when the port is taken."""
        super().__init__((HOST, port), _Handler)
        self.records = records
        self.lock = threading.Lock()
        self.token = secrets.token_urlsafe(24)
        self.page = frame(records.folder.resolve().name, None).encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that left in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def authorities(self) -> set[str]:
        """Authorities by which a browser on this machine may address this server; others come from DNS rebinding."""
        return {f"{host}:{self.server_port}" for host in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers `/`, `/index?from=N&generation=N`, `/page?number=N` or `/picture?hash=H`, each with the token."""
        target = urlsplit(self.path)
        words = {name: values[-1] for name, values in parse_qs(target.query).items()}
        given = words.get("token", "").encode("utf-8", "replace")
        known = hmac.compare_digest(given, self.server.token.encode())
        if not known or self.headers.get("Host") not in self.server.authorities:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that `npu-vlrl view` has printed.\n")
            return
        try:
            kind, data = self._found(target.path, words)
        except (KeyError, ValueError, IndexError, OSError):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such thing here.\n")
            return
        self._answer(HTTPStatus.OK, kind, data)

    def _found(self, path: str, words: dict[str, str]) -> tuple[str, bytes]:
        """Content type and content. Raises KeyError, ValueError, IndexError or OSError where there is none."""
        records = self.server.records
        match path:
            case "/":
                return "text/html; charset=utf-8", self.server.page
            case "/index":
                with self.server.lock:
                    records.refresh()
                    same = int(words["generation"]) == records.generation
                    return _json(head(records, max(0, int(words["from"])) if same else 0))
            case "/page":
                with self.server.lock:
                    return _json(records.page(int(words["number"])))
            case "/picture":
                file = records.images.file(words["hash"])
                if file is not None:
                    return "image/png", file.read_bytes()
        raise KeyError(path)

    def _answer(self, status: HTTPStatus, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: every line would hold the token."""


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value).encode()
