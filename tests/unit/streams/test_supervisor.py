from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streams import supervisor as supervisor_module
from streams.settings import JudgeSettings, Settings
from streams.supervisor import (
    PROCESSES,
    ProcessError,
    Supervisor,
    processes_of,
    sole_user,
    uninterrupted,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def wait_until_stopped(supervisor: Supervisor, name: str) -> None:
    deadline = time.monotonic() + 60
    while supervisor.children[name].alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_stops_is_started_again_up_to_a_limit(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, None)
    supervisor.start("kafka", "status", "--data-dir", str(tmp_path / "none"))
    wait_until_stopped(supervisor, "kafka")
    assert supervisor.restart_stopped(limit=1) == ["kafka"]
    assert supervisor.children["kafka"].arguments[0] == "status"
    wait_until_stopped(supervisor, "kafka")
    with pytest.raises(ProcessError, match=r"stopped 2 times, last with status 3(.|\n)*no Kafka"):
        supervisor.restart_stopped(limit=1)
    supervisor.stop()
    assert supervisor.children == {}


def test_a_process_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("reward: {plugin_signals: {nobody: 0.1}}", encoding="utf-8")
    supervisor = Supervisor(tmp_path, config)
    supervisor.start("reward")
    wait_until_stopped(supervisor, "reward")
    with pytest.raises(ProcessError, match=r"reward cannot start:\n.*plugin_signals\.nobody"):
        supervisor.restart_stopped(limit=5)
    assert supervisor.children["reward"].restarts == 0
    supervisor.stop()


def test_the_status_of_wrong_settings_says_nothing_once_a_process_was_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'import sys; print(\'{"event": "ready"}\'); sys.exit(2)'
    command = [sys.executable, "-c", code]
    spawn = Supervisor._spawn
    monkeypatch.setattr(Supervisor, "_spawn", lambda self, _, log: spawn(self, command, log))
    supervisor = Supervisor(tmp_path, None)
    supervisor.start("reward")
    wait_until_stopped(supervisor, "reward")
    assert supervisor.restart_stopped(limit=1) == ["reward"]
    supervisor.stop()


def test_a_restart_long_ago_is_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_FORGIVEN_AFTER_S", 0.0)
    supervisor = Supervisor(tmp_path, None)
    supervisor.start("kafka", "status", "--data-dir", str(tmp_path / "none"))
    for _ in range(2):
        wait_until_stopped(supervisor, "kafka")
        assert supervisor.restart_stopped(limit=1) == ["kafka"]
    supervisor.stop()


def test_a_judge_runs_beside_the_others_where_one_is_named() -> None:
    assert processes_of(Settings()) == tuple(PROCESSES)
    for judge in (JudgeSettings(url="http://judge/v1"), JudgeSettings(plugin="mine")):
        named = processes_of(Settings(judge=judge))
        assert [name for name in named if name != "judge"] == list(PROCESSES)
        # It reads what the aligner writes: it is started before it and stopped after it.
        assert named.index("judge") < named.index("align")


def test_a_judge_that_does_not_stay_up_is_given_up_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(tmp_path, None, {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    supervisor.start("judge")  # No judge is named: it stops at once.
    wait_until_stopped(supervisor, "judge")
    assert supervisor.restart_stopped(limit=1) == ["judge"]
    wait_until_stopped(supervisor, "judge")
    assert supervisor.restart_stopped(limit=1) == []
    assert supervisor.children == {}
    assert "judge stopped 2 times, last with status 2" in caplog.text
    assert "judge.url: name an OpenAI-compatible endpoint" in caplog.text
    assert supervisor.restart_stopped(limit=1) == []


def hold(run_dir: Path) -> None:
    with sole_user(run_dir):
        pass


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    with (
        sole_user(tmp_path / "run"),
        pytest.raises(ProcessError, match=r"another clawstream runs in .*run"),
    ):
        hold(tmp_path / "run")
    hold(tmp_path / "run")


def test_waiting_for_a_process_that_stopped_shows_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, None)
    supervisor.start("kafka", "status", "--data-dir", str(tmp_path / "none"))
    with pytest.raises(ProcessError, match=r"status 3(.|\n)*no Kafka runs(.|\n)*kafka\.log"):
        supervisor.wait_ready("kafka", timeout_s=60)


def test_what_a_killed_supervisor_left_is_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    created = psutil.Process(sleeper.pid).create_time()
    (tmp_path / "processes.json").write_text(json.dumps({sleeper.pid: created}), encoding="utf-8")
    Supervisor(tmp_path, None)
    assert not psutil.pid_exists(sleeper.pid)
    assert not (tmp_path / "processes.json").exists()


def test_a_recycled_process_id_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    created = psutil.Process(sleeper.pid).create_time() - 5
    (tmp_path / "processes.json").write_text(json.dumps({sleeper.pid: created}), encoding="utf-8")
    Supervisor(tmp_path, None)
    assert sleeper.poll() is None


def test_a_second_ctrl_c_does_not_cut_off_stopping() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
