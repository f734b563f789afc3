"""The registry client against a server that answers as Confluent-compatible registries do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest

from streams.contracts import DialogueTurn, Role
from streams.errors import SchemaError, UnknownSchemaError
from streams.serde import build_codec, load_schemas
from streams.serde.confluent import ConfluentRegistry

SCHEMA = load_schemas().current("DialogueTurn")
SUBJECT = "dialogue.turns-value"
SCHEMA_ID = 7
TURN = DialogueTurn(
    event_id="e",
    session_id="s",
    turn_id="t",
    role=Role.USER,
    content="hi",
    event_time=5,
    source="test",
)


@dataclass
class Registered:
    """What the server holds, and what it was asked."""

    subjects: dict[str, int] = field(default_factory=dict)
    compatible: bool = True
    asked: list[str] = field(default_factory=list)
    schemas: dict[int, dict[str, Any]] = field(
        default_factory=lambda: {SCHEMA_ID: {"schema": SCHEMA.text}}
    )
    versions: dict[int, str] = field(default_factory=dict)
    answer: tuple[int, bytes] | None = None


def handler(held: Registered) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            held.asked.append(f"GET {self.path}")
            *_, number = urlsplit(self.path).path.split("/")
            if self.path.startswith("/schemas/ids/") and int(number) in held.schemas:
                self._answer(200, held.schemas[int(number)])
            elif number == "versions" and held.versions:
                self._answer(200, list(held.versions))
            elif number.isdecimal() and int(number) in held.versions:
                found = {"subject": SUBJECT, "version": int(number), "id": 10 + int(number)}
                self._answer(200, found | {"schema": held.versions[int(number)]})
            else:
                self._answer(404, {"error_code": 40403, "message": "Schema not found"})

        def do_PUT(self) -> None:
            body = self._body()
            held.asked.append(f"PUT {self.path} {body['compatibility']}")
            self._answer(200, body)

        def do_POST(self) -> None:
            body = self._body()
            held.asked.append(f"POST {self.path}")
            subject = urlsplit(self.path).path.split("/")[2]
            if not held.compatible:
                self._answer(409, {"error_code": 409, "message": "incompatible: content"})
            elif "/versions" in self.path:
                held.subjects[subject] = SCHEMA_ID
                self._answer(200, {"id": SCHEMA_ID})
            elif subject in held.subjects:
                found = {
                    "subject": subject,
                    "id": SCHEMA_ID,
                    "version": 1,
                    "schema": body["schema"],
                }
                self._answer(200, found)
            else:
                self._answer(404, {"error_code": 40401, "message": "Subject not found"})

        def _body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, status: int, body: Any) -> None:
            status, data = held.answer or (status, json.dumps(body).encode())
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler


@pytest.fixture
def held() -> Registered:
    return Registered()


@pytest.fixture
def url(held: Registered) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(held))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_registered_schema_carries_records(url: str, held: Registered) -> None:
    assert ConfluentRegistry(url).register(SUBJECT, SCHEMA) == SCHEMA_ID
    assert f"PUT /config/{SUBJECT} FULL_TRANSITIVE" in held.asked
    encoded = build_codec(url).encode(TURN, "dialogue.turns")
    assert encoded[:5] == b"\x00\x00\x00\x00\x07"
    assert build_codec(url).decode(encoded, DialogueTurn) == TURN


def test_each_schema_is_asked_for_once(url: str, held: Registered) -> None:
    held.subjects[SUBJECT] = SCHEMA_ID
    codec = build_codec(url)
    for _ in range(3):
        codec.decode(codec.encode(TURN, "dialogue.turns"), DialogueTurn)
    assert len(held.asked) == 2


def test_fields_are_picked_from_the_confluent_form(url: str, held: Registered) -> None:
    held.subjects[SUBJECT] = SCHEMA_ID
    codec = build_codec(url)
    encoded = codec.encode(TURN, "dialogue.turns")
    for _ in range(2):
        assert codec.pick(encoded, DialogueTurn, ("turn_id",)) == (TURN.turn_id,)
        codec.decode(encoded, DialogueTurn)
    # By now the schema is known to be the current one: the rest is not read.
    assert codec.pick(encoded[:-2], DialogueTurn, ("turn_id",)) == (TURN.turn_id,)


def test_an_unregistered_schema_says_what_to_run(url: str) -> None:
    with pytest.raises(SchemaError, match=r"not registered.*clawstream schemas register"):
        build_codec(url).encode(TURN, "dialogue.turns")


def test_an_unknown_id_is_the_records_fault(url: str) -> None:
    with pytest.raises(UnknownSchemaError, match="schema id 8"):
        build_codec(url).decode(b"\x00\x00\x00\x00\x08body", DialogueTurn)


def test_an_incompatible_schema_is_refused_by_name(url: str, held: Registered) -> None:
    held.compatible = False
    with pytest.raises(SchemaError, match=r"DialogueTurn v1 is not compatible \(FULL_TRANSITIVE\)"):
        ConfluentRegistry(url).register(SUBJECT, SCHEMA)


def test_a_registry_that_is_away_is_nobodys_dead_letter() -> None:
    with pytest.raises(SchemaError, match=r"does not answer.*SCHEMA_REGISTRY_URL"):
        build_codec("http://127.0.0.1:1").decode(b"\x00\x00\x00\x00\x07body", DialogueTurn)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"schema": "{}", "schemaType": "JSON"}, r"is JSON, not Avro"),
        ({"schema": "syntax = 3;", "schemaType": "PROTOBUF"}, r"is PROTOBUF, not Avro"),
        ({"schema": '{"type": "record"}'}, r"cannot be used: not an Avro schema"),
        ({"schema": '{"type": "array", "items": "Elsewhere"}'}, r"cannot be used"),
    ],
)
def test_a_registered_schema_of_another_kind_is_its_records_fault(
    schema: dict[str, Any], why: str, url: str, held: Registered
) -> None:
    """It must not end a worker each time it comes to that record."""
    held.schemas[9] = schema
    with pytest.raises(UnknownSchemaError, match=f"schema id 9 in the registry at {url} {why}"):
        build_codec(url).decode(b"\x00\x00\x00\x00\x09body", DialogueTurn)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((501, b"<html>" + b"x" * 9_000), "answers with HTTP status 501"),
        ((200, b"<html>sign in</html>"), "is no schema registry"),
        ((200, b'{"a": []}'), "is no schema registry"),
        ((200, b"[]"), "is no schema registry"),
    ],
)
def test_an_answer_that_is_none_names_the_registry(
    answer: tuple[int, bytes], says: str, url: str, held: Registered
) -> None:
    held.answer = answer
    for ask in (
        lambda: build_codec(url).decode(b"\x00\x00\x00\x00\x07body", DialogueTurn),
        lambda: build_codec(url).encode(TURN, "dialogue.turns"),
        lambda: ConfluentRegistry(url).register(SUBJECT, SCHEMA),
    ):
        with pytest.raises(SchemaError, match=f"{url}.*SCHEMA_REGISTRY_URL") as caught:
            ask()
        assert says in str(caught.value)
        assert len(str(caught.value)) < 500


def test_a_registry_that_fails_is_asked_again(url: str, held: Registered) -> None:
    held.answer = 500, b"<html>boom</html>"
    with pytest.raises(SchemaError, match=f"{url} answers with HTTP status 500: .*boom"):
        build_codec(url).decode(b"\x00\x00\x00\x00\x07body", DialogueTurn)
    assert len(held.asked) > 1


def test_a_registry_that_never_answers_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streams.serde.confluent._TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SchemaError, match=f"{url} does not answer"):
            build_codec(url).decode(b"\x00\x00\x00\x00\x07body", DialogueTurn)


def test_what_a_subject_holds(url: str, held: Registered) -> None:
    client = ConfluentRegistry(url)
    assert client.versions(SUBJECT, "DialogueTurn") == []
    grown = json.loads(SCHEMA.text)
    grown["fields"].append({"name": "mood", "type": ["null", "string"], "default": None})
    held.versions = {1: SCHEMA.text, 2: json.dumps(grown)}
    found = client.versions(SUBJECT, "DialogueTurn")
    assert [(item.schema.version, item.schema_id) for item in found] == [(1, 11), (2, 12)]
    assert found[0].schema.fingerprint == SCHEMA.fingerprint
    assert found[1].schema.fingerprint != SCHEMA.fingerprint
    held.versions[3] = "no schema"
    with pytest.raises(SchemaError, match=f"{SUBJECT} version 3 at {url}: not an Avro schema"):
        client.versions(SUBJECT, "DialogueTurn")
