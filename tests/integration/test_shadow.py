"""``clawstream reward shadow`` and ``compare`` on a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from processors.reward.formulas import score_segment
from processors.reward.shadow import Shadow
from streams.contracts import ScoredSegment
from streams.errors import TopicError
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_producer
from streams.kafka.reading import read_records
from streams.serde import build_codec
from streams.settings import KafkaSettings, RewardSettings, Settings
from streams.topics import SCORED, SEGMENTS, load_inventory
from tests.integration.gateway_bench import DEADLINE_S, ROOT, wait_until
from tests.unit.processors.reward.builders import reply, segment, thumb

pytestmark = pytest.mark.broker

CODEC = build_codec()


def test_a_shadow_scores_the_same_segments_and_is_compared(
    tmp_path: Path, kafka_bootstrap: str
) -> None:
    kafka = KafkaSettings(bootstrap_servers=kafka_bootstrap)
    apply_inventory(kafka, kafka_bootstrap, load_inventory())
    name, segment_id = f"t{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    made = segment([reply("a1", thumb("f1", 1))], segment_id=segment_id, user_id=segment_id)
    producer = make_producer(kafka, kafka_bootstrap)
    producer.produce(SEGMENTS, key=segment_id, value=CODEC.encode(made))
    real = score_segment(made, RewardSettings())
    producer.produce(SCORED, key=segment_id, value=CODEC.encode(real))
    assert producer.flush(DEADLINE_S) == 0

    config, weights = tmp_path / "settings.yaml", tmp_path / "weights.yaml"
    values = {
        "data_dir": str(tmp_path / "data"),
        "kafka": {"bootstrap_servers": kafka_bootstrap, "session_timeout_ms": 6_000},
    }
    config.write_text(yaml.safe_dump(values))
    weights.write_text("renormalise: true")
    command = [sys.executable, "-m", "streams.cli", "--config", str(config), "reward"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    settings = Settings(kafka=kafka)

    def shadowed() -> bool:
        topic = Shadow(name).topics.scored
        try:
            found = list(read_records(settings, topic, ScoredSegment, CODEC))
        except TopicError:
            return False
        return any(scored.segment.segment_id == segment_id for scored in found)

    def run(code: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=ROOT,
            env=environ,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def remove(code: int) -> subprocess.CompletedProcess[str]:
        return run(code, "shadow", name, "--remove")

    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [*command, "shadow", name, "--weights", str(weights)],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environ,
        )
        try:
            wait_until(lambda: worker.poll() is not None or shadowed(), "scored by the shadow")
            assert worker.poll() is None, (tmp_path / "log").read_text()
            assert "still has members" in remove(1).stderr
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(DEADLINE_S) == 0
        finally:
            worker.kill()
            worker.wait()
    result = json.loads(run(0, "compare", name, "--json").stdout)
    differences = {item["segment_id"]: item for item in result["largest"]}
    assert result["segments"] >= 1
    assert result["shadow"] != result["real"]
    assert (differences[segment_id]["real"], differences[segment_id]["shadow"]) == (0.4, 1.0)
    assert f"trajectory.scored-shadow-{name}" in remove(0).stdout
    assert not shadowed()
    assert "there is nothing" in remove(0).stdout
    assert f"start it with `clawstream reward shadow {name}" in run(1, "compare", name).stderr
