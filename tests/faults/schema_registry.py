"""A Confluent-compatible schema registry that can be down, on a port that stays."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from streams.ports import LOOPBACK, free_ports


@dataclass
class _Held:
    schemas: dict[int, str] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)


class SchemaRegistry:
    """Takes every schema that is registered, compatible or not."""

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self._held = _Held()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{LOOPBACK}:{self._port}"

    def start(self) -> None:
        """Answer."""
        self._server = ThreadingHTTPServer((LOOPBACK, self._port), _handler(self._held))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections; what it holds is kept."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(10)
            self._server.server_close()
            self._server = None

    def add(self, subject: str, schema: Mapping[str, Any]) -> int:
        """Hold one more schema under a subject; its id."""
        return _add(self._held, subject, json.dumps(schema))


def _add(held: _Held, subject: str, text: str) -> int:
    parsed = json.loads(text)
    known = [number for number, schema in held.schemas.items() if json.loads(schema) == parsed]
    number = known[0] if known else len(held.schemas) + 1
    held.schemas[number] = text
    numbers = held.subjects.setdefault(subject, [])
    if number not in numbers:
        numbers.append(number)
    return number


def _handler(held: _Held) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # One connection a request: none is left over to answer while the registry is down.
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            number = int(urlsplit(self.path).path.rpartition("/")[2])
            if number in held.schemas:
                self._answer(200, {"schema": held.schemas[number]})
            else:
                self._answer(404, {"error_code": 40403, "message": "Schema not found"})

        def do_PUT(self) -> None:
            self._answer(200, self._body())

        def do_POST(self) -> None:
            path = urlsplit(self.path).path
            subject, text = path.split("/")[2], self._body()["schema"]
            if path.endswith("/versions"):
                self._answer(200, {"id": _add(held, subject, text)})
                return
            for version, number in enumerate(held.subjects.get(subject, ()), 1):
                if json.loads(held.schemas[number]) == json.loads(text):
                    found = {"subject": subject, "id": number, "version": version, "schema": text}
                    self._answer(200, found)
                    return
            self._answer(404, {"error_code": 40403, "message": "Schema not found"})

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, status: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
