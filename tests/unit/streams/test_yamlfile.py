"""Reading YAML that people write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.errors import SettingsError
from streams.yamlfile import read_yaml


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("2026-01-31", "2026-01-31"),
        ("60_000", 60_000),
        ("-3", -3),
        ("1.5e-3", 0.0015),
        ("-.inf", float("-inf")),
        ("~", None),
        ("", None),
    ],
)
def test_a_word_means_what_it_says(tmp_path: Path, text: str, value: Any) -> None:
    read_value = read(tmp_path, f"key: {text}\n")["key"]
    assert (read_value, type(read_value)) == (value, type(value))


@pytest.mark.parametrize("text", ["1e5", "yes", "1:30", "010", "true", "1.5", "~", "0o7", "+1", ""])
def test_text_that_the_library_writes_is_read_as_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, yaml.safe_dump({"key": text})) == {"key": text}


def test_a_key_that_stands_twice_is_named_with_both_lines(tmp_path: Path) -> None:
    text = "a:\n  b:\n    - c: 1\n      d: 2\n      c: 3\n"
    with pytest.raises(SettingsError, match=r"a\.b\.0\.c: stands twice, in lines 3 and 5"):
        read(tmp_path, text)


def test_the_same_key_in_two_places_and_merged_mappings_are_fine(tmp_path: Path) -> None:
    text = "a: &x {k: 1, l: 2}\nb: {<<: *x, k: 3}\n"
    assert read(tmp_path, text) == {"a": {"k": 1, "l": 2}, "b": {"k": 3, "l": 2}}


@pytest.mark.parametrize(
    "text", ["a: [", "a: 1\n---\nb: 2\n", "[a]: 1", "{a: 1}: 2", "!!python/name:os.system x"]
)
def test_what_is_no_yaml_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"file\.yaml is not valid YAML"):
        read(tmp_path, text)


def test_a_mapping_that_holds_itself_ends(tmp_path: Path) -> None:
    found = read(tmp_path, "a: &a {b: *a}\n")
    assert found["a"]["b"] is found["a"]
