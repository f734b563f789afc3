"""Another formula beside the real one: its names, its settings, and the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from processors.reward import shadow as shadow_module
from processors.reward.compare import as_data, as_lines, compare
from processors.reward.formulas import score_segment
from processors.reward.shadow import Shadow, make_topics, with_weights
from streams.contracts import ScoredSegment
from streams.errors import RewardError, SettingsError
from streams.settings import KafkaSettings, RewardSettings, Settings, WorkerSettings
from streams.topics import SCORED, SEGMENTS, Inventory, TopicDescription, load_inventory
from tests.unit.processors.reward.builders import conversation, reply, segment, thumb

REAL = RewardSettings()
OTHER = RewardSettings(text_signals=False, weight_explicit=0.7, weight_implicit=0.0)


def scored(name: str, settings: RewardSettings, revision: int = 0) -> ScoredSegment:
    made = segment([reply("a1", thumb("f1", 1))], segment_id=name, revision=revision)
    return score_segment(made, settings)


def test_a_shadow_touches_no_topic_group_or_state_of_the_real_worker() -> None:
    shadow, whole = Shadow("trial-2"), load_inventory()
    assert shadow.topics.segments == "trajectory.segments"
    assert shadow.topics.scored == "trajectory.scored-shadow-trial-2"
    assert shadow.changelog == "reward-state-shadow-trial-2"
    assert shadow.group == "reward-shadow-trial-2"
    made = shadow.inventory(whole, partitions=7)
    assert {topic.partitions for topic in made} == {7}
    assert not {topic.name for topic in made} & {topic.name for topic in whole}


@pytest.mark.parametrize("name", ["", "Trial", "a b", "-x", "x" * 42, "../x"])
def test_a_name_that_no_topic_can_have_is_refused(name: str) -> None:
    with pytest.raises(RewardError, match="a shadow's name"):
        Shadow(name)


def test_a_shadow_has_the_users_settings_but_for_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights.yaml"
    weights.write_text("decay: 0.5", encoding="utf-8")
    settings = Settings(worker=WorkerSettings(reward_web_port=9_000))
    found = with_weights(settings, weights)
    assert (found.reward.decay, found.worker.reward_web_port) == (0.5, 0)
    assert with_weights(settings, None).reward == settings.reward
    weights.write_text("decai: 0.5", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"reward\.decai"):
        with_weights(settings, weights)


def test_both_are_compared_step_by_step() -> None:
    said = conversation("Where is Rome?", "Thanks, that works", "No, that's wrong")
    real = [scored("g1", REAL), score_segment(said, REAL), scored("g9", REAL)]
    shadow = [scored("g1", OTHER), score_segment(said, OTHER)]
    result = compare(real, shadow)
    assert (result.segments, result.only_real, result.only_shadow) == (2, 1, 0)
    assert result.steps == 3
    # 0.4 -> 0.7, and the two signals' 0.15 and -0.3 are gone.
    assert result.mean_difference == pytest.approx((0.3 - 0.15 + 0.3) / 3)
    assert result.mean_distance == pytest.approx((0.3 + 0.15 + 0.3) / 3)
    assert (result.newly_trained, result.no_longer_trained, result.turned) == (0, 1, 0)
    assert [d.turn_id for d in result.largest][-1] == "a0"
    assert len(result.real) == len(result.shadow) == 1
    assert result.real != result.shadow
    assert "no_longer_trained" in as_data(result)
    assert any("0.250 apart" in line for line in as_lines(result))


def test_the_newest_revision_that_both_have_counts() -> None:
    real = [scored("g1", REAL, 0), scored("g1", REAL, 1)]
    assert compare(real, [scored("g1", REAL, 1)]).largest == ()
    behind = compare(real, [scored("g1", REAL, 0)])
    assert (behind.segments, behind.only_real, behind.only_shadow) == (0, 1, 1)


def test_rewards_that_turned_are_counted() -> None:
    def of(value: float) -> ScoredSegment:
        return score_segment(segment([reply("a1", thumb("f1", value))]), REAL)

    assert compare([of(1)], [of(-1)]).turned == 1
    assert as_lines(compare([], []))[-1].startswith("0 segments scored by both")


def test_a_side_that_was_scored_in_two_ways_is_pointed_out() -> None:
    real = [scored("g1", REAL), scored("g2", REAL)]
    changed = OTHER.model_copy(update={"decay": 0.5})
    mixed = as_lines(compare(real, [scored("g1", OTHER), scored("g2", changed)]))
    (line,) = [line for line in mixed if line.startswith("caution")]
    assert "the shadow rewards are of 2 formulas or settings" in line
    assert "a shadow of another name" in line
    both = as_lines(compare([scored("g1", REAL), scored("g2", changed)], [scored("g1", OTHER)]))
    assert any("the real rewards are of 2" in line for line in both)
    assert not any("caution" in line for line in as_lines(compare(real, [scored("g1", OTHER)])))


def test_its_state_is_as_wide_as_the_segments_whatever_became_of_the_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = {
        name: TopicDescription(partitions=partitions, replication=1, config={})
        for name, partitions in ((SEGMENTS, 4), (SCORED, 9))
    }
    made: list[Inventory] = []

    class Cluster:
        def __init__(self, *_: object) -> None:
            pass

        def require(self, names: tuple[str, ...]) -> None:
            assert set(names) == set(widths)

        def describe(self, names: tuple[str, ...]) -> dict[str, TopicDescription]:
            return {name: widths[name] for name in names}

    monkeypatch.setattr(shadow_module, "Admin", Cluster)
    monkeypatch.setattr(shadow_module, "apply_inventory", lambda *given: made.append(given[-1]))
    settings = Settings(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    make_topics(Shadow("trial"), settings)
    assert {topic.partitions for topic in made[0]} == {4}
