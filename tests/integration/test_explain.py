"""``clawstream reward explain`` from the command line to the topic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

from processors.reward.formulas import score_segment
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_producer
from streams.serde import build_codec
from streams.settings import KafkaSettings, RewardSettings
from streams.topics import SCORED, load_inventory
from tests.integration.gateway_bench import DEADLINE_S, ROOT
from tests.unit.processors.reward.builders import reply, segment, thumb

pytestmark = pytest.mark.broker


def test_the_newest_revision_is_found_and_scored_again(
    tmp_path: Path, kafka_bootstrap: str
) -> None:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    name = uuid.uuid4().hex
    producer = make_producer(KafkaSettings(), kafka_bootstrap)
    for revision, value in ((0, -1.0), (1, 1.0)):
        made = segment([reply("a1", thumb("f1", value))], segment_id=name, revision=revision)
        scored = score_segment(made, RewardSettings())
        producer.produce(SCORED, key="u1", value=build_codec().encode(scored))
    assert producer.flush(DEADLINE_S) == 0
    config, weights = tmp_path / "settings.yaml", tmp_path / "weights.yaml"
    config.write_text(yaml.safe_dump({"kafka": {"bootstrap_servers": kafka_bootstrap}}))
    weights.write_text("renormalise: true")
    command = [sys.executable, "-m", "streams.cli", "--config", str(config), "reward", "explain"]
    done = subprocess.run(
        [*command, name, "--what-if", str(weights), "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["scored"]["segment"]["revision"] == 1
    assert found["scored"]["rewards"][0]["reward"] == pytest.approx(0.4)
    assert found["what_if"]["rewards"][0]["reward"] == pytest.approx(1.0)
