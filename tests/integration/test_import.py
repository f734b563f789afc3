"""``clawstream import`` from the command line to the topics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.contracts import Role
from streams.kafka.admin import apply_inventory
from streams.settings import KafkaSettings
from streams.topics import load_inventory
from tests.integration.gateway_bench import DEADLINE_S, ROOT, Log

pytestmark = pytest.mark.broker

T0 = 1_760_000_000
LARGE = "x" * (4 * 1024 * 1024)


@pytest.fixture(scope="module")
def bootstrap(kafka_bootstrap: str) -> str:
    apply_inventory(KafkaSettings(), kafka_bootstrap, load_inventory())
    return kafka_bootstrap


@pytest.fixture
def chat_id() -> str:
    return f"chat-{uuid.uuid4().hex}"


def export_of(chat_id: str, **messages: dict[str, Any]) -> list[dict[str, Any]]:
    """One rated chat, as Open WebUI exports it."""
    history = {
        "u1": {"parentId": None, "role": "user", "content": "你好 😀", "timestamp": T0},
        "a1": {"parentId": "u1", "role": "assistant", "content": "hi", "timestamp": T0 + 2},
        **messages,
    }
    return [
        {
            "id": f"rating-{chat_id}",
            "user_id": "u",
            "data": {"rating": -1, "comment": "wrong", "tags": ["math"]},
            "meta": {"chat_id": chat_id, "message_id": "a1"},
            "snapshot": {"chat": {"chat": {"history": {"messages": history}}}},
            "created_at": T0 + 9,
            "updated_at": T0 + 9,
        },
        {
            "id": f"unrated-{chat_id}",
            "data": {"rating": None},
            "meta": {"chat_id": chat_id, "message_id": "a1"},
            "created_at": T0 + 9,
        },
    ]


def run(folder: Path, bootstrap: str, data: str, *options: str) -> subprocess.CompletedProcess[str]:
    """``clawstream import open-webui``, as a person would start it."""
    config, file = folder / "settings.yaml", folder / "export.json"
    values = {"data_dir": str(folder / "data"), "kafka": {"bootstrap_servers": bootstrap}}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    file.write_text(data, encoding="utf-8")
    command = [sys.executable, "-m", "streams.cli", "--config", str(config)]
    return subprocess.run(
        [*command, "import", "open-webui", str(file), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        check=False,
    )


def test_a_dry_run_counts_and_a_real_one_publishes(
    tmp_path: Path, bootstrap: str, chat_id: str
) -> None:
    large = {"parentId": "a1", "role": "user", "content": LARGE, "timestamp": T0 + 5}
    data = json.dumps(export_of(chat_id, u2=large))
    log = Log(bootstrap)
    dry = run(tmp_path, bootstrap, data, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    counts = json.loads(dry.stdout)
    assert (counts["turns"], counts["feedback"], counts["published"]) == (2, 1, False)
    assert [skipped.split()[0] for skipped in counts["skipped"]] == [
        "[1]:",
        "[1]:",
        "open-webui-u2:",
    ]
    assert log.turns(chat_id) == []

    real = run(tmp_path, bootstrap, data, "--json", "--policy", "p")
    assert real.returncode == 0, real.stderr
    assert json.loads(real.stdout) == counts | {"published": True}
    prompt, reply = log.turns(chat_id)
    assert (prompt.role, prompt.content, prompt.event_time) == (Role.USER, "你好 😀", T0 * 1000)
    assert (reply.turn_id, reply.parent_turn_id, reply.policy) == ("a1", "u1", "p")
    (thumb,) = log.feedback(chat_id)
    assert (thumb.turn_id, thumb.value, thumb.text) == ("a1", -1.0, "wrong")
    log.close()


def test_importing_twice_writes_equal_bytes(tmp_path: Path, bootstrap: str, chat_id: str) -> None:
    log = Log(bootstrap)
    for _ in range(2):
        done = run(tmp_path, bootstrap, json.dumps(export_of(chat_id)))
        assert done.returncode == 0, done.stderr
        assert done.stdout == "imported 2 turns and 1 feedback events\n"
        assert "skipped [1]" in done.stderr
    values = log.values(chat_id)
    assert len(values) == 6
    assert len(set(values)) == 3
    log.close()


@pytest.mark.parametrize(
    ("cut", "says"),
    [(-9, "cut short"), (0, "cut short"), (None, "meta.chat_id")],
    ids=["cut", "empty", "no ratings"],
)
def test_a_broken_file_is_refused_and_nothing_published(
    tmp_path: Path, bootstrap: str, chat_id: str, cut: int | None, says: str
) -> None:
    whole = export_of(chat_id)
    data = json.dumps(whole)[:cut] if cut is not None else json.dumps([*whole, {"created_at": 1}])
    refused = run(tmp_path, bootstrap, data)
    assert refused.returncode != 0
    assert says in refused.stderr
    assert str(tmp_path / "export.json") in refused.stderr
    assert "Traceback" not in refused.stderr
    log = Log(bootstrap)
    assert log.turns(chat_id) == []
    log.close()


def test_outcomes_are_imported_from_csv(tmp_path: Path, bootstrap: str, chat_id: str) -> None:
    config, file = tmp_path / "settings.yaml", tmp_path / "outcomes.csv"
    config.write_text(yaml.safe_dump({"kafka": {"bootstrap_servers": bootstrap}}))
    file.write_text(
        "session_id,turn_id,outcome,event_time,outcome_id\n"
        f"{chat_id},a1,bought,{T0 * 1000},order-1\n{chat_id},a1,stolen,,\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "streams.cli", "--config", str(config), "import", "outcomes"]
    done = subprocess.run(
        [*command, str(file), "--source", "shop", "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["feedback"], len(counts["skipped"])) == (1, 1)
    assert counts["skipped"][0].startswith("line 3: outcome: 'stolen'")
    log = Log(bootstrap)
    (event,) = log.feedback(chat_id)
    assert (event.turn_id, event.value, event.source) == ("a1", 1.0, "shop")
    log.close()
