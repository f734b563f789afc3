"""``clawstream reviews`` from the command line to the topics and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.contracts import FeedbackEvent, FeedbackKind, ReviewRequest
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_producer
from streams.serde import build_codec
from streams.settings import KafkaSettings
from streams.topics import REVIEWS, load_inventory
from tests.integration.gateway_bench import DEADLINE_S, ROOT, Log

pytestmark = pytest.mark.broker


class Cli:
    """The command line against one broker."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self._config = folder / "settings.yaml"
        values = {"data_dir": str(folder / "data"), "kafka": {"bootstrap_servers": bootstrap}}
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streams.cli", "--config", str(self._config), "reviews"]
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
            check=False,
        )

    def listed(self, session_id: str, *arguments: str) -> list[dict[str, Any]]:
        done = self.run("list", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return [case for case in json.loads(done.stdout) if case["session"] == session_id]


@pytest.fixture
def session_id() -> str:
    return f"session-{uuid.uuid4().hex}"


@pytest.fixture
def request_id(kafka_bootstrap: str, session_id: str) -> str:
    """A request that waits, about two replies."""
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    asked = ReviewRequest(
        event_id=uuid.uuid4().hex,
        session_id=session_id,
        segment_id="g2",
        turn_id="a2",
        feedback_event_ids=("f1", "f2"),
        reason="3 negative ratings in a row by user u",
        event_time=time.time_ns() // 1_000_000,
        attributes={
            "filter": "row",
            "rater": "user u",
            "replies": json.dumps([[session_id, "g1", "a1"], [session_id, "g2", "a2"]]),
        },
    )
    producer = make_producer(KafkaSettings(), kafka_bootstrap)
    producer.produce(REVIEWS, key=session_id, value=build_codec().encode(asked))
    assert producer.flush(DEADLINE_S) == 0
    return asked.event_id


@pytest.fixture
def log(kafka_bootstrap: str, request_id: str) -> Iterator[Log]:
    found = Log(kafka_bootstrap)
    yield found
    found.close()


def test_a_request_is_listed_decided_and_gone(
    tmp_path: Path, kafka_bootstrap: str, session_id: str, request_id: str, log: Log
) -> None:
    cli = Cli(tmp_path, kafka_bootstrap)
    (case,) = cli.listed(session_id)
    assert (case["request"], case["state"], case["filter"]) == (request_id, "open", "row")

    decided = cli.run("decide", request_id[:16], "--reject", "--actor", "ann", "--json")
    assert decided.returncode == 0, decided.stderr
    assert json.loads(decided.stdout) == {
        "decided": [request_id],
        "upheld": False,
        "events": 2,
        "skipped": [],
        "late": [],
    }
    events: list[FeedbackEvent] = log.feedback(session_id)
    assert sorted(str(event.turn_id) for event in events) == ["a1", "a2"]
    assert {event.kind for event in events} == {FeedbackKind.REVIEW}
    assert {event.value for event in events} == {-1.0}

    assert cli.listed(session_id) == []
    (case,) = cli.listed(session_id, "--all")
    assert (case["state"], case["actor"]) == ("rejected", "ann")


def test_what_is_not_there_cannot_be_decided(
    tmp_path: Path, kafka_bootstrap: str, request_id: str, log: Log
) -> None:
    done = Cli(tmp_path, kafka_bootstrap).run("decide", f"no{request_id}", "--uphold")
    assert done.returncode == 1
    assert "there is no review request" in done.stderr
