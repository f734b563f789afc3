"""Whoever sees the first sign of a process may stop it: then it ends in order."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI

from learner.serving.__main__ import _listen
from learner.serving.__main__ import _run as run_policy_server
from processors.reward.judge.__main__ import main as judge
from streams.cli import main as clawstream
from streams.gateway.__main__ import _run as run_gateway
from streams.settings import ServeSettings, Settings

NO_BROKER = {"bootstrap_servers": "127.0.0.1:1"}


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """What the processes set is taken back; a signal that nobody hears fails the test."""

    def unheard(number: int, _frame: object) -> None:
        raise AssertionError(f"signal {number} would have ended the process at once")

    before = {n: signal.signal(n, unheard) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class StopsAtFirstLine(io.StringIO):
    """Standard output read by something that stops the process as soon as it is ready."""

    def write(self, text: str) -> int:
        if '"event": "ready"' in text:
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def test_a_policy_server_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def lifespan(_app: FastAPI) -> Any:
        yield
        closed.append(True)

    monkeypatch.setattr(sys, "stdout", StopsAtFirstLine())
    with closing(_listen("127.0.0.1", 0)) as listener:
        run_policy_server(
            FastAPI(lifespan=lifespan), listener, ServeSettings(), '{"event": "ready"}'
        )
    assert closed


def test_a_gateway_that_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, "kafka": NO_BROKER})
    monkeypatch.setattr(sys, "stdout", StopsAtFirstLine())
    assert run_gateway(settings, "127.0.0.1", 0) == 0


def test_a_judge_that_shows_its_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seen(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("processors.reward.judge.__main__.show_metrics", seen)
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "data_dir": str(tmp_path),
                "kafka": NO_BROKER,
                "judge": {"url": "http://127.0.0.1:1/v1"},
            }
        )
    )
    assert judge(["--config", str(config)]) == 0


def test_an_archiver_that_made_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    heard = []

    def made(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    def archiver(*_: object, **__: object) -> Any:
        return SimpleNamespace(run=lambda *, once, is_stopping: heard.append(is_stopping()))

    monkeypatch.setattr("streams.archive.store.open_store", made)
    monkeypatch.setattr("streams.archive.writing.Archiver", archiver)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data_dir": str(tmp_path), "kafka": NO_BROKER}))
    with pytest.raises(SystemExit) as end:
        clawstream(["--config", str(config), "archive", "run"])
    assert end.value.code == 0
    assert heard == [True]
