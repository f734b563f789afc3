from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from streams.errors import SchemaError, SettingsError, SpoolError
from streams.gateway.__main__ import _ask_registry, _run
from streams.serde import Codec, SchemaVersion, load_schemas
from streams.settings import Settings


def settings(folder: Path, **gateway: Any) -> Settings:
    return Settings.model_validate(
        {
            "data_dir": folder / "data",
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},
            "gateway": gateway,
        }
    )


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            _run(settings(tmp_path), None, port)


def test_a_spool_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"gateway\.spool_dir"):
        _run(settings(tmp_path, spool_dir=tmp_path / "file"), None, 0)


class Registry:
    """Knows the schemas of all subjects but ``missing``."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.asked: list[str] = []

    def schema_for(self, schema_id: int) -> Any:
        raise AssertionError(f"{schema_id} is not needed to write")

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        if subject == self.missing:
            raise SchemaError(f"{schema.record} is not registered")
        self.asked.append(subject)
        return 1


def test_the_registry_is_asked_for_what_the_gateway_writes() -> None:
    registry = Registry()
    _ask_registry(Codec(load_schemas(), registry))
    assert registry.asked == ["dialogue.turns-value", "dialogue.feedback-value"]


@pytest.mark.parametrize("missing", ["dialogue.turns-value", "dialogue.feedback-value"])
def test_without_its_schemas_the_gateway_does_not_start(missing: str) -> None:
    with pytest.raises(SchemaError, match="is not registered"):
        _ask_registry(Codec(load_schemas(), Registry(missing)))
