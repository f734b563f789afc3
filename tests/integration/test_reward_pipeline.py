"""What people and other systems say, over HTTP, until it stands in a reward."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.cli import main
from streams.contracts import ScoredSegment
from streams.kafka.admin import apply_inventory
from streams.kafka.embedded import start_kafka, stop_kafka
from streams.kafka.reading import read_records
from streams.ports import free_ports
from streams.serde import build_codec
from streams.settings import Settings, load_settings
from streams.supervisor import Supervisor
from streams.topics import SCORED, load_inventory
from tests.integration.gateway_bench import DEADLINE_S, wait_until

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

CODEC = build_codec()


class Pipeline:
    """Gateway, aligner and reward worker as processes, on a broker of their own."""

    def __init__(self, config: Path, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        self._url = f"http://127.0.0.1:{settings.gateway.port}/v1"

    def post(self, door: str, body: Any) -> None:
        request = urllib.request.Request(
            f"{self._url}/{door}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            assert answer.status == 202

    def reviews(self, *arguments: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--config", str(self._config), "reviews", *arguments])
        assert ended.value.code == 0

    def converse(self, user_id: str) -> dict[str, str]:
        """One question and its reply; gives the ids that name the reply."""
        session_id, turn_id = f"session-{uuid.uuid4().hex}", f"turn-{uuid.uuid4().hex}"
        common = {"session_id": session_id, "user_id": user_id}
        asked = {"turn_id": f"{turn_id}-asked", "role": "user", "content": f"About {turn_id}?"}
        said = {"turn_id": turn_id, "role": "assistant", "content": f"{turn_id} it is."}
        self.post("turns", [common | asked, common | said | {"session_done": True}])
        return {"session_id": session_id, "turn_id": turn_id}

    def newest(self, reply: dict[str, str]) -> ScoredSegment | None:
        """The newest revision of the reply's segment, as it was scored."""
        found = [
            scored
            for scored in read_records(self._settings, SCORED, ScoredSegment, CODEC)
            if scored.segment.session_id == reply["session_id"]
        ]
        return max(found, key=lambda scored: scored.segment.revision, default=None)

    def wait(
        self, reply: dict[str, str], what: str, holds: Callable[[ScoredSegment], bool]
    ) -> ScoredSegment:
        def reached() -> bool:
            newest = self.newest(reply)
            return newest is not None and holds(newest)

        wait_until(reached, what)
        newest = self.newest(reply)
        assert newest is not None
        return newest


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("pipeline")
    (port,) = free_ports(1)
    try:
        bootstrap = start_kafka(folder / "kafka").bootstrap_servers
        config = folder / "clawstream.yaml"
        values: dict[str, Any] = {
            "data_dir": str(folder),
            "kafka": {"bootstrap_servers": bootstrap, "session_timeout_ms": 6_000},
            "align": {
                "settle_ms": 1_000, "gap_ms": 4_000, "max_open_ms": 20_000, "max_skew_ms": 5_000,
                "attribution_window_ms": 30_000, "orphan_wait_ms": 5_000, "horizon_ms": 600_000,
            },
            "worker": {"processor_processes": 0},
            "gateway": {"port": port},
        }  # fmt: skip
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        settings = load_settings(config, environ={})
        apply_inventory(settings.kafka, bootstrap, load_inventory())
        supervisor = Supervisor(folder, config)
        try:
            for name in ("gateway", "align", "reward"):
                supervisor.start(name)
            supervisor.wait_ready("gateway", DEADLINE_S)
            yield Pipeline(config, settings)
        finally:
            supervisor.stop()
    finally:
        stop_kafka(folder / "kafka")


def value_of(scored: ScoredSegment, component: str) -> float | None:
    (reward,) = scored.rewards
    (part,) = [part for part in reward.components if part.name == component]
    return part.value


def test_an_outcome_becomes_a_revision_with_its_reward(pipeline: Pipeline) -> None:
    reply = pipeline.converse("ann")
    first = pipeline.wait(reply, "a first score", lambda _: True)
    assert (first.segment.revision, first.trainable) == (0, False)
    assert value_of(first, "business") is None

    outcome = reply | {"outcome": "bought", "outcome_id": "order-1"}
    pipeline.post("outcomes", outcome)
    revised = pipeline.wait(reply, "a revision", lambda scored: scored.segment.revision == 1)
    assert value_of(revised, "business") == 1.0
    assert revised.rewards[0].reward == pytest.approx(0.3)
    assert any("(bought): +1" in line for line in revised.rewards[0].reasons)
    assert revised.trainable


def test_a_decision_about_held_ratings_becomes_a_revision(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = []
    for number in range(3):
        reply = pipeline.converse("bob")
        thumb = {"kind": "thumb", "value": -1, "event_id": f"bob-{number}"}
        pipeline.post("feedback", reply | thumb)
        pipeline.wait(reply, "a score", lambda scored: bool(scored.segment.steps[0].feedback))
        replies.append(reply)
    last = replies[-1]
    held = pipeline.wait(last, "held", lambda scored: scored.rewards[0].credibility == 0.0)
    assert held.rewards[0].reward == 0.0
    assert [(w.event_id, w.weight, w.filter) for w in held.rewards[0].weighed] == [
        ("bob-2", 0.0, "row")
    ]

    pipeline.reviews("list", "--rater", "user bob", "--json")
    (case,) = json.loads(capsys.readouterr().out)
    assert case["feedback"] == ["bob-0", "bob-1", "bob-2"]
    pipeline.reviews("decide", "--uphold", "--rater", "user bob", "--actor", "mia")

    for reply in replies:
        decided = pipeline.wait(
            reply,
            "believed again",
            lambda scored: any(w.filter == "review" for w in scored.rewards[0].weighed),
        )
        assert decided.rewards[0].credibility == 1.0
        assert decided.rewards[0].reward == pytest.approx(-0.4)
