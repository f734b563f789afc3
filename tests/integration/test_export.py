"""``clawstream export`` from Kafka."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from streams.cli import main
from streams.kafka.admin import apply_inventory
from streams.kafka.clients import make_producer
from streams.settings import KafkaSettings
from streams.topics import SCORED, load_inventory
from tests.archives import CODEC, scored
from tests.integration.harness import DEADLINE_S

pytestmark = pytest.mark.broker


def test_demonstrations_come_from_the_newest_revisions(
    kafka_bootstrap: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    policy = uuid.uuid4().hex
    producer = make_producer(KafkaSettings(), kafka_bootstrap)
    for number in range(6):
        base = scored(number)
        segment = replace(base.segment, policy=policy, segment_id=f"{policy}-{number % 5}")
        again = replace(segment, revision=number // 5)
        value = CODEC.encode(replace(base, segment=again))
        producer.produce(SCORED, key=f"u{number % 5}", value=value)
    assert producer.flush(DEADLINE_S) == 0

    config = tmp_path / "settings.yaml"
    values = {"data_dir": str(tmp_path), "kafka": {"bootstrap_servers": kafka_bootstrap}}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    out = tmp_path / "replies.jsonl"
    command = ["--config", str(config), "export", "sft", "--policy", policy]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(out), "--json"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["segments"] == 5
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    # Segment 0 was revised by 5; the replies of 0 and 3 were badly received.
    replies = sorted(line["completion"][0]["content"] for line in lines)
    assert replies == ["answer 1", "answer 2", "answer 4", "answer 5"]
    assert {line["source"]["policy"] for line in lines} == {policy}
