"""librdkafka's words for our settings, and Java's partitioner."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from streams.errors import BrokerError
from streams.kafka.clients import (
    common_config,
    consumer_config,
    make_consumer,
    murmur2,
    partition_for,
    producer_config,
    raise_error,
    resolve_bootstrap,
)
from streams.settings import KafkaSettings, Settings

ADDRESS = "broker:9092"
SECURE = KafkaSettings(
    security_protocol="SASL_SSL",
    sasl_mechanism="SCRAM-SHA-512",
    sasl_username="ann",
    sasl_password=SecretStr("secret"),
    ssl_ca_location=Path("ca.pem"),
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_gives_javas_numbers(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected


def test_a_negative_hash_is_masked_not_negated() -> None:
    assert murmur2(b"21") < 0
    assert partition_for(b"21", 7) == (-973932308 + 2**31) % 7
    assert partition_for(b"21", 7) != 973932308 % 7


@given(st.binary(max_size=64), st.integers(min_value=1, max_value=512))
def test_a_partition_is_one_of_the_topics(key: bytes, partitions: int) -> None:
    assert 0 <= partition_for(key, partitions) < partitions
    assert -(2**31) <= murmur2(key) < 2**31


def test_security_is_passed_on_and_absent_where_unset() -> None:
    config = common_config(SECURE, ADDRESS, raise_error)
    assert config["bootstrap.servers"] == ADDRESS
    assert config["security.protocol"] == "SASL_SSL"
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    assert config["sasl.username"] == "ann"
    assert config["sasl.password"] == "secret"
    assert config["ssl.ca.location"] == "ca.pem"
    plain = common_config(KafkaSettings(), ADDRESS, raise_error)
    assert not [key for key in plain if key.startswith(("sasl.", "ssl."))]


def test_a_producer_loses_and_doubles_nothing() -> None:
    config = producer_config(KafkaSettings(max_message_bytes=123_456), ADDRESS, raise_error)
    assert config["acks"] == "all"
    assert config["enable.idempotence"] is True
    assert config["partitioner"] == "murmur2_random"
    assert config["message.max.bytes"] == 123_456


def test_a_consumer_commits_only_when_told_and_sees_what_is_committed() -> None:
    config = consumer_config(KafkaSettings(), ADDRESS, raise_error, group="g")
    assert config["group.id"] == "g"
    assert config["enable.auto.commit"] is False
    assert config["isolation.level"] == "read_committed"
    assert config["auto.offset.reset"] == "earliest"
    other = consumer_config(
        KafkaSettings(),
        ADDRESS,
        raise_error,
        group="g",
        auto_offset_reset="latest",
        isolation="read_uncommitted",
    )
    assert other["auto.offset.reset"] == "latest"
    assert other["isolation.level"] == "read_uncommitted"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KafkaError(KafkaError._AUTHENTICATION, "bad password"), "check kafka.sasl_mechanism"),
        (KafkaError(KafkaError._SSL, "certificate verify failed"), "check kafka.ssl_ca_location"),
        (KafkaError(KafkaError._FENCED, "fenced", True), "fenced"),
    ],
)
def test_what_no_retry_mends_is_raised(error: KafkaError, message: str) -> None:
    callback = common_config(KafkaSettings(), ADDRESS, raise_error)["error_cb"]
    with pytest.raises(BrokerError, match=f"broker:9092.*{message}"):
        callback(error)


def test_what_retries_mend_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = common_config(KafkaSettings(), ADDRESS, raise_error)["error_cb"]
    for _ in range(3):
        callback(KafkaError(KafkaError._TRANSPORT, "refused"))
    callback(KafkaError(KafkaError._SSL, "handshake interrupted"))
    assert [record.getMessage() for record in caplog.records] == [
        "Kafka at broker:9092: refused",
        "Kafka at broker:9092: handshake interrupted",
    ]


def test_an_unusable_setting_is_an_error_of_ours() -> None:
    with pytest.raises(BrokerError, match="cannot make a client for broker:9092"):
        make_consumer(KafkaSettings(), ADDRESS, group="g", overrides={"no.such": "setting"})


def test_the_configured_address_comes_first(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, kafka=KafkaSettings(bootstrap_servers=ADDRESS))
    assert resolve_bootstrap(settings) == ADDRESS


def test_without_any_kafka_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match=r"kafka up.*KAFKA_BOOTSTRAP_SERVERS"):
        resolve_bootstrap(Settings(data_dir=tmp_path))
