"""The compose file and the images say what the code does. No engine is here to run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.cli.root import COMMANDS
from streams.kafka.jars import KAFKA_VERSION
from streams.settings import load_settings
from tests.apicurio import VERSION as REGISTRY_VERSION

FOLDER = Path(__file__).parents[2] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: one for name, one in SERVICES.items() if one["image"].startswith("clawstream:")}
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
PASSWORD = "${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD}"
JUDGE = "${JUDGE_URL:-}"


def test_every_process_and_service_is_there() -> None:
    processes = {name for name, entry in COMMANDS.items() if entry.process}
    assert processes | {"lag", "archive"} <= OURS.keys()
    assert SERVICES.keys() >= {"kafka", "schema-registry", "postgres", "prometheus"}


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned_and_services_are_watched(name: str) -> None:
    service = SERVICES[name]
    if name not in OURS:
        assert re.search(r":v?\d+\.\d+", service["image"])
    # One ends, the others have no port; all end by themselves when something is wrong.
    if name not in ("setup", "learn", "archive"):
        assert service["healthcheck"]["test"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    for needed, how in service.get("depends_on", {}).items():
        assert needed in SERVICES
        watched = "healthcheck" in SERVICES[needed]
        assert how["condition"] == (
            "service_healthy" if watched else "service_completed_successfully"
        )
    for volume in service.get("volumes", ()):
        source = volume.partition(":")[0]
        assert source in COMPOSE["volumes"] or (FOLDER / source).exists()


@pytest.mark.parametrize("name", sorted(OURS.keys() - {"setup"}))
def test_our_services_run_commands_with_settings_that_there_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = OURS[name]
    assert service["command"][0] in COMMANDS
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    for key, value in service["environment"].items():
        monkeypatch.setenv(key, value.replace(PASSWORD, "x").replace(JUDGE, "http://judge:1/v1"))
    settings = load_settings()
    assert settings.kafka.bootstrap_servers == "kafka:9092"
    host = {"gateway": settings.gateway.host, "serve": settings.serve.host}.get(name, "0.0.0.0")
    assert host == "0.0.0.0"


def test_what_is_run_is_what_the_tests_run() -> None:
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{KAFKA_VERSION}"
    assert SERVICES["schema-registry"]["image"] == f"apicurio/apicurio-registry:{REGISTRY_VERSION}"


def test_no_password_is_written_down() -> None:
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"PASSWORD: (.*)", text)) == {PASSWORD}
    assert f"clawstream:{PASSWORD}@" in text


def test_images_run_as_somebody_and_build_what_compose_asks_for() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    names = {name for _, name in stages}
    assert {one["build"]["target"] for one in OURS.values()} <= names
    for source, _ in stages:
        assert source in names or re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", source)
    assert "USER 10001" in DOCKERFILE.partition("AS base")[2]
    assert "USER root" not in DOCKERFILE
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    for source in " ".join(copied).split():
        assert (FOLDER.parent / source).exists()
