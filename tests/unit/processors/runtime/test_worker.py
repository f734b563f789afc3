from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from processors.feedback_align.__main__ import main as align_main
from processors.feedback_align.app import build_spec
from processors.reward.__main__ import main as reward_main
from processors.runtime import topics
from processors.runtime import worker as runtime_worker
from processors.runtime.connection import aiokafka_config, faust_brokers, faust_credentials
from processors.runtime.topics import Cluster
from processors.runtime.worker import BatchWorker, _within_grace
from streams import metrics as names
from streams.errors import SettingsError
from streams.metrics import ProcessorMetrics
from streams.settings import KafkaSettings, Settings


@pytest.mark.parametrize("main", [align_main, reward_main])
def test_an_unreachable_broker_is_said_and_ends_the_worker(
    main: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "TIMEOUT_S", 1.0)
    config = tmp_path / "c.yaml"
    config.write_text(f"data_dir: {tmp_path}\nkafka: {{bootstrap_servers: '127.0.0.1:9'}}\n")
    assert callable(main)
    assert main(["--config", str(config)]) == 1
    said = capsys.readouterr().err
    assert "error: Kafka at" in said
    assert "127.0.0.1:9" in said


def test_wrong_settings_and_arguments_have_a_code_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("align: {settle: 3}\n")
    assert align_main(["--config", str(config)]) == 2
    assert "align.settle" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        align_main(["--nonsense"])


def test_settings_in_the_words_of_each_client() -> None:
    kafka = KafkaSettings(
        bootstrap_servers="h1:9092, h2:9093",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="me",
        sasl_password="secret",  # type: ignore[arg-type]
    )
    assert faust_brokers(kafka) == "kafka://h1:9092;kafka://h2:9093"
    config = aiokafka_config(kafka)
    assert config["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl_plain_username"], config["sasl_plain_password"]) == ("me", "secret")
    assert faust_credentials(kafka).username == "me"
    assert faust_credentials(KafkaSettings(bootstrap_servers="h:1")) is None
    tls = KafkaSettings(bootstrap_servers="h:1", security_protocol="SSL")
    assert faust_credentials(tls).context is not None
    assert aiokafka_config(tls)["ssl_context"] is not None


def test_no_address_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="KAFKA_BOOTSTRAP_SERVERS"):
        faust_brokers(KafkaSettings())


class Broken:
    """A producer that a broker turned down."""

    stopped = 0

    def create_batch(self) -> Any:
        raise KafkaTimeoutError

    async def stop(self) -> None:
        self.stopped += 1


async def test_a_tick_producer_that_failed_is_replaced(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, kafka=KafkaSettings(bootstrap_servers="h:1"))
    metrics = ProcessorMetrics("feedback_align")
    worker = BatchWorker(build_spec(settings, metrics), settings, Cluster(1, {}), metrics)
    worker._runners[0] = SimpleNamespace(tick_due=lambda _: True, partition=0)  # type: ignore[assignment]
    broken = Broken()
    worker._tick_producer = broken
    await worker.tick()
    assert broken.stopped == 1
    assert worker._tick_producer is not broken
    assert metrics.value(names.TICKS) == 0


async def test_what_swallows_its_cancellation_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime_worker, "STOP_GRACE_S", 0.01)
    answered = asyncio.Event()

    async def stubborn() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await answered.wait()

    async with asyncio.timeout(60):
        await _within_grace(stubborn(), "the last commit")
    assert "the last commit took more than" in caplog.text
    answered.set()


async def test_what_kafka_refuses_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def refused() -> None:
        raise KafkaTimeoutError

    await _within_grace(refused(), "the last commit")
    assert "the last commit failed: KafkaTimeoutError" in caplog.text
