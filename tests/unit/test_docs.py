"""The pages under ``docs`` say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from learner.ppo.diagnostics import METRICS, TRL
from processors.feedback_align.machine import TRANSITIONS
from streams import metrics as names
from streams.metrics import ALL, Metric

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    code = generator().main(["--check"])
    assert (code, capsys.readouterr().err) == (0, "")


def test_a_stale_page_is_found_and_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = generator()
    monkeypatch.setattr(made, "FOLDER", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: lives -->\nold\n<!-- end -->\nafter\n")
    assert made.main(["--check"]) == 1
    found = capsys.readouterr().err
    assert "docs/page.md is stale" in found
    assert "docs/implicit.svg is stale" in found
    assert "\nold\n" in page.read_text()
    assert made.main([]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- generated: lives -->\n```mermaid\nstateDiagram-v2\n")
    assert text.endswith("```\n<!-- end -->\nafter\n")
    assert made.main(["--check"]) == 0


def test_the_diagram_has_every_transition() -> None:
    page = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^ +(\w+) --> (\w+): (\w+)$", page, re.MULTILINE)
    table = [(str(a), str(b), str(trigger)) for (a, trigger), b in TRANSITIONS.items()]
    assert sorted(drawn) == sorted(table)


def test_every_metric_of_the_learner_is_explained_on_the_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w/]+)` \| [^|]*\| (.*) \|$", page, re.MULTILINE))
    assert {name: rows.get(name) for name in METRICS} == dict(METRICS)
    assert [name for name in TRL if f"`{name}`" not in page] == []


def test_every_metric_is_set_somewhere_and_listed() -> None:
    constants = {value.name: key for key, value in vars(names).items() if isinstance(value, Metric)}
    sources = "".join(path.read_text() for path in (ROOT / "processors").rglob("*.py"))
    written = re.sub(r"shown\(\s*names\.\w+", "", sources)
    used = set(re.findall(r"\bnames\.(\w+)", written))
    assert [m.name for m in ALL if constants[m.name] not in used] == []
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [m.name for m in ALL if f"| `{m.name}" not in page] == []
