"""``accelerate launch`` with two processes makes the update that one makes alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from msgspec.structs import replace

import learner
from learner.kafka import Outgoing, connect_writer
from streams.ports import free_ports
from streams.registry import Registry
from streams.settings import KafkaSettings
from tests.conftest import CreateTopics
from tests.integration.team_worker import CASES, results
from tests.unit.learner.builders import message, scored, step
from tests.unit.learner.fakes import encoded

FOLDER = Path(learner.__file__).parent / "launch"
ROOT = FOLDER.parent.parent
TOLERANCE = 1e-5
DEADLINE_S = 240.0


def launch(config: str, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Two processes of a module, as the shipped configuration starts them."""
    (port,) = free_ports(1)
    # What `accelerate launch` is, without the other commands, which take seconds to import.
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(FOLDER / config), "--main_process_port", str(port)]
    return subprocess.Popen(
        [*command, "-m", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Numbers and tensors of a nested state, by path."""
    if isinstance(state, dict):
        return {k: v for key, sub in state.items() for k, v in flat(sub, f"{name}/{key}").items()}
    if isinstance(state, list | tuple):
        return {k: v for n, sub in enumerate(state) for k, v in flat(sub, f"{name}/{n}").items()}
    return {name: state}


def assert_alike(found: Any, expected: Any) -> None:
    """Equal within the tolerance, down to the last moment of the optimizer."""
    ours, theirs = flat(found), flat(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[name], value, atol=TOLERANCE, rtol=TOLERANCE)
        elif isinstance(value, float):
            assert ours[name] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
        else:
            assert ours[name] == value, name


@pytest.mark.timeout(300)
def test_two_processes_make_the_update_of_one(tmp_path: Path) -> None:
    out = tmp_path / "two.pt"
    process = launch("fsdp.yaml", "tests.integration.team_worker", str(out))
    # The one process works while the two start.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = results()
    torch.set_num_threads(threads)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    first = torch.load(out, weights_only=False)
    other = torch.load(f"{out}.other", weights_only=False)
    assert first["size"] == other["size"] == 2
    assert first["stopped"]
    assert other["stopped"]
    for name in CASES:
        state, metrics = first["results"][name]
        assert_alike((state, metrics), alone[name])
        # Nothing has come apart between the two, not by one bit.
        for path, value in flat(other["results"][name]).items():
            mine = flat(first["results"][name])[path]
            same = torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert same, path


def rated(number: int) -> bytes:
    """A segment of one reply, as it is in Kafka."""
    one = scored(
        step("Yes." * (number % 5 + 1), message("Is it so?")),
        rewards={"r-" + ("Yes." * (number % 5 + 1))[:12]: (-1.0) ** number},
    )
    segment = replace(one.segment, segment_id=f"s{number}", session_id=f"session-{number}")
    return encoded(replace(one, segment=segment))


@pytest.mark.broker
@pytest.mark.timeout(480)
def test_the_learner_itself_runs_as_two_processes(
    tmp_path: Path,
    kafka_bootstrap: str,
    unique_name: Callable[[str], str],
    create_topics: CreateTopics,
) -> None:
    """From Kafka to published versions: one process reads and publishes, two train."""
    names = [unique_name(kind) for kind in ("scored", "versions", "dead")]
    create_topics({name: (1, {}) for name in names})
    writer = connect_writer(KafkaSettings(), kafka_bootstrap)

    def send(*numbers: int) -> None:
        writer.write([Outgoing(topic=names[0], key=None, value=rated(n)) for n in numbers])

    config = tmp_path / "clawstream.yaml"
    learner_settings = {
        "min_sample_size": 6,
        "update_segments": 6,
        "update_interval_ms": 0,
        "update_max_interval_ms": 1,
        "batch_segments": 7,
        "micro_batch_segments": 1,
        "max_updates": 2,
    }
    values = {
        "data_dir": str(tmp_path / "data"),
        "kafka": {"bootstrap_servers": kafka_bootstrap},
        "model": {"base": "tiny-random", "device": "cpu", "num_threads": 1},
        "learner": learner_settings,
    }
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "data").mkdir()
    send(*range(6))
    process = launch("ddp.yaml", "tests.integration.learner_team_worker", str(config), *names)
    try:
        with Registry.open(f"sqlite:///{tmp_path}/data/registry.db") as registry:
            deadline = time.monotonic() + DEADLINE_S
            while registry.live("default") != 1 and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            send(6)
            said, _ = process.communicate(timeout=DEADLINE_S)
            versions = registry.versions("default")
            assert registry.unpublished() == ()
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert [(v.version, v.segment_count) for v in versions] == [(1, 6), (2, 7)]
    assert versions[0].metrics["losses/initial_ratio_error"] == 0.0
    assert said.count("update version=1 status=live") == 1
    assert "process 0 of 2" in said
    assert "process 1 of 2" in said
