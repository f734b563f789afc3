"""Plugins: the example under ``docs`` as an installed package, and what happens if one fails."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from processors.reward.agent import RewardProcessor, RewardTopics
from processors.reward.app import build_spec
from processors.reward.formulas import COMPONENTS, score_segment
from processors.reward.judge.verdicts import prompt, questions, read_rubric
from processors.reward.plugins import OWN_PARTS, Plugged, Plugins, load, load_judge
from processors.runtime.records import Record
from streams import metrics as names
from streams.contracts import ScoredSegment, Step, StepReward
from streams.errors import PluginError, SettingsError
from streams.metrics import ProcessorMetrics
from streams.serde import build_codec
from streams.settings import JudgeSettings, RewardSettings, Settings
from streams.topics import SEGMENTS
from tests.unit.processors.reward.builders import conversation, said, segment

DOCS = Path(__file__).parents[4] / "docs"
EXAMPLE = DOCS / "examples" / "plugins"
ASKED = said("u", "Please tell me, thank you")
USED = RewardSettings(plugin_signals={"escalation": -0.6}, plugin_components={"brevity": 0.1})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip installed the example, as a user would beside clawstream."""
    folder = tmp_path_factory.mktemp("example")
    copy, site = folder / "plugins", folder / "site"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--target", str(site), str(copy)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def installed(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installed example where Python finds it; gives what pip noted about it."""
    site = tmp_path / "site"
    shutil.copytree(built, site)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield site / "reward_examples-1.0.0.dist-info"
    sys.modules.pop("reward_examples", None)


def rewards(plugins: Plugins, *texts: str) -> tuple[ScoredSegment, StepReward]:
    scored = score_segment(conversation(*texts), USED, plugins=plugins)
    return scored, scored.rewards[0]


def test_the_worked_example_scores(installed: Path) -> None:
    scored, reward = rewards(load(USED), "Where is my parcel?", "Let me talk to a real person")
    parts = {part.name: part for part in reward.components}
    assert (parts["brevity"].value, parts["brevity"].evidence) == (1.0, ("10 characters",))
    assert parts["implicit"].value == -0.6
    assert reward.reward == pytest.approx(0.1 - 0.3 * 0.6)
    assert 'escalation in turn u1 ("real person"): -0.6' in parts["implicit"].evidence
    assert scored.attributes == {
        "plugins": "escalation (reward-examples 1.0.0), brevity (reward-examples 1.0.0)"
    }


async def test_the_worked_examples_judge_answers(installed: Path) -> None:
    judge = load_judge("polite")
    for reply, verdict in (("Glad to help.", "VERDICT: 1"), ("No.", "VERDICT: 0")):
        made = segment([Step(turn_id="a", reply=reply, event_time=0, context=(ASKED,))])
        (question,) = questions(made, read_rubric(None), JudgeSettings(plugin="polite"))
        assert await judge(prompt(read_rubric(None), question), 1.0) == verdict


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (DOCS / "plugins.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code in (EXAMPLE / "reward_examples.py").read_text(encoding="utf-8")
    (points,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert points in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("reward", "path"),
    [
        ({"plugin_signals": {"nobody": 0.1}}, "reward.plugin_signals.nobody"),
        ({"plugin_components": {"nobody": 0.1}}, "reward.plugin_components.nobody"),
    ],
)
def test_a_plugin_that_is_not_installed_is_refused_at_start(
    installed: Path, reward: dict[str, Any], path: str
) -> None:
    settings = Settings(reward=RewardSettings(**reward))
    with pytest.raises(SettingsError, match=f"{path}: no plugin nobody is installed"):
        build_spec(settings, ProcessorMetrics("reward"))
    with pytest.raises(SettingsError, match=r"judge\.plugin: no plugin"):
        load_judge("nobody")


def test_a_name_that_two_packages_offer_is_refused_at_start(installed: Path) -> None:
    again = installed.parent / "other-2.0.dist-info"
    again.mkdir()
    (again / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    shutil.copy(installed / "entry_points.txt", again)
    both = "other 2.0 and reward-examples 1.0.0 both offer a plugin brevity"
    with pytest.raises(SettingsError, match=rf"reward\.plugin_components\.brevity: {both}"):
        load(RewardSettings(plugin_components={"brevity": 0.1}))
    with pytest.raises(SettingsError, match=r"judge\.plugin: .* both offer a plugin polite"):
        load_judge("polite")


@pytest.mark.parametrize("words", ["", " \n"])
def test_a_signal_without_words_is_none(words: str) -> None:
    silent = Plugins((Plugged("silent", lambda _text: words, -1.0, "silent 1.0"),))
    scored = score_segment(conversation("Hi", "And then?"), USED, plugins=silent)
    assert scored.rewards[0].reward == 0.0
    assert "plugin_errors" not in scored.attributes


@pytest.mark.parametrize("value", ["no_such_module:x", "reward_examples:no_such", "re:I.value"])
def test_a_plugin_that_cannot_be_imported_is_refused_at_start(installed: Path, value: str) -> None:
    (installed / "entry_points.txt").write_text(f"[clawstream.components]\nbrevity = {value}\n")
    with pytest.raises(PluginError, match=r"plugin brevity of clawstream\.components"):
        load(RewardSettings(plugin_components={"brevity": 0.1}))


def raises(*_: object) -> Any:
    raise RuntimeError("out of\norder")


def exits(*_: object) -> Any:
    sys.exit("enough")


class SilentError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError


class OddError(BaseException):
    """An error that is no ``Exception``."""


def raises_oddly(*_: object) -> Any:
    raise OddError("odd")


def raises_silently(*_: object) -> Any:
    raise SilentError


@pytest.mark.parametrize("name", ["explicit", "diversity", "a,b", "a:b"])
def test_a_name_that_would_be_mistaken_for_another_is_refused_at_start(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"reward\.plugin_components\.{name}: "):
        load(RewardSettings(plugin_components={name: 0.1}))


def test_the_parts_of_every_reward_are_those_of_the_formula() -> None:
    assert COMPONENTS.keys() == OWN_PARTS


@pytest.mark.parametrize(
    ("component", "says"),
    [
        (raises, "RuntimeError: out of order"),
        (lambda *_: (2.0, ()), "ValueError: a component's value is in [-1, 1], not 2"),
        (lambda *_: (float("nan"), ()), "ValueError"),
        (lambda *_: 0.5, "TypeError: a component returns its value and its evidence, not float"),
        (lambda *_: None, "TypeError: a component returns its value and its evidence, not NoneTyp"),
        (lambda *_: (0.5, (), ()), "TypeError: a component returns its value and its evidence"),
        (lambda *_: ("0.5", ()), "TypeError: a component's value is a number or None, not str"),
        (lambda *_: (0.5, {"a", "b"}), "TypeError: a component's evidence has an order, a set"),
        (lambda *_: (object(), ()), "TypeError"),
        (exits, "SystemExit: enough"),
        (raises_silently, "SilentError"),
        (raises_oddly, "OddError: odd"),
    ],
)
def test_a_component_that_fails_costs_its_own_part_only(
    component: Callable[..., Any], says: str
) -> None:
    plugins = Plugins(components=(Plugged("broken", component, 0.5, "here 1"),))
    scored, reward = rewards(plugins, "Where is Rome?", "Thanks, that works")
    assert reward.reward == pytest.approx(0.15)
    assert any(line.startswith(f"plugin failed, broken: {says}") for line in reward.reasons)
    assert scored.attributes["plugin_errors"] == "broken"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("lone \ud800 half", "lone ? half"),
        ("two\nlines", "two lines"),
        ("long " * 1_000_000, ("long " * 40)[:199] + "…"),
    ],
)
def test_whatever_a_plugin_says_fits_on_the_record(words: str, shown: str) -> None:
    component = Plugged("talks", lambda *_: (0.5, (words for _ in range(10**9))), 0.1, "here 1")
    signal = Plugged("hears", lambda _: words, 0.1, "here 1")
    scored, reward = rewards(Plugins((signal,), (component,)), "Where is Rome?", "Go on")
    assert build_codec().decode(build_codec().encode(scored), ScoredSegment) == scored
    parts = {part.name: part for part in reward.components}
    assert parts["talks"].evidence == (shown,) * 20
    assert parts["implicit"].evidence == (f'hears in turn u1 ("{shown}"): +0.1',)


def test_evidence_that_is_one_text_is_one_line() -> None:
    plugins = Plugins(components=(Plugged("talks", lambda *_: (0.5, "because"), 0.1, "here 1"),))
    _, reward = rewards(plugins, "Where is Rome?", "Go on")
    assert reward.components[-1].evidence == ("because",)


@pytest.mark.parametrize("signal", [raises, exits, raises_silently, raises_oddly, lambda _: 5])
def test_a_signal_that_fails_costs_its_own_part_only(signal: Callable[..., Any]) -> None:
    plugins = Plugins(signals=(Plugged("broken", signal, 0.5, "here 1"),))
    scored, reward = rewards(plugins, "Where is Rome?", "Thanks, that works")
    assert reward.reward == pytest.approx(0.15)
    assert scored.attributes["plugin_errors"] == "broken"


def test_failures_are_counted_once_a_segment_and_the_first_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = ProcessorMetrics("reward")
    plugins = Plugins(components=(Plugged("broken", raises, 0.5, "here 1"),))
    codec = build_codec()
    processor = RewardProcessor(
        RewardSettings(), codec, metrics, 1_000_000, RewardTopics(), plugins
    )
    processor.restore((), None)
    talk = conversation("a", "b", "c")
    for offset in range(2):
        value = codec.encode(replace(talk, revision=offset))
        record = Record(
            topic=SEGMENTS, partition=0, offset=offset, timestamp=1, key=b"u1", value=value
        )
        processor.feed(SEGMENTS, [record])
    outputs = processor.drain(10).outputs
    for output in outputs:
        assert codec.decode(output.value, ScoredSegment).attributes["plugin_errors"] == "broken"
    assert metrics.value(names.PLUGIN_ERRORS, plugin="broken") == len(outputs) == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"plugin broken failed at segment {talk.segment_id}" in said


def test_without_plugins_nothing_is_noted() -> None:
    assert score_segment(segment(), RewardSettings()).attributes == {}
