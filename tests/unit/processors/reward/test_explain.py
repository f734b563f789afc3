"""What is printed about a scored segment, and scoring it with other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from processors.reward.explain import (
    BEYOND_A_SEGMENT,
    as_data,
    as_lines,
    is_of_other_settings,
    newest,
    not_considered,
    read_weights,
)
from processors.reward.formulas import Credibility, score_again, score_segment
from processors.reward.plugins import Plugged, Plugins
from streams.contracts import BranchReply, FeedbackKind, ScoredSegment
from streams.errors import RewardError, SettingsError
from streams.settings import RewardSettings
from tests.unit.processors.reward.builders import (
    conversation,
    feedback,
    reply,
    said,
    segment,
    thumb,
)

SETTINGS = RewardSettings()


def scored() -> ScoredSegment:
    steps = [
        reply(
            "a1",
            thumb("f1", -1),
            feedback("f2", FeedbackKind.RATING, 7.0),
            feedback("f3", FeedbackKind.COPY),
            context=(said("u1", "How do I reset my password?"),),
            next_user_turn=said("u2", "Please answer in French"),
        )
    ]
    held = Credibility(weight=0.5, filter="departure", reason="credibility: 2 of the last 5")
    return score_segment(segment(steps), SETTINGS, {"f1": held}, {"a1": 12})


def written(folder: Path, text: str) -> Path:
    file = folder / "weights.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_everything_that_made_a_reward_is_printed() -> None:
    lines = list(as_lines(scored(), None))
    text = "\n".join(lines)
    for part in (
        "segment s1, revision 0",
        "policy default, user u1, session session-1",
        "formula composite-",
        "can be trained on",
        "user: How do I reset my password?",
        "step 1, reply a1: An answer.",
        "then the user: Please answer in French",
        "reward -0.160, credibility of its feedback 0.50",
        "explicit    0.40 x   -0.500 = -0.200",
        "thumb f1 by user u1: -1, counts 0.5",
        "implicit    0.30 x   +0.800 = +0.240",
        "business    0.30 x  nothing = +0.000",
        "diversity   0.20 x   -1.000 = -0.200",
        "weighed f1 x 0.5 (departure): credibility: 2 of the last 5",
        "ignored rating f2: its value 7 is outside [-1, 1]",
        "directive: Please answer in French",
    ):
        assert part in text, part


def test_what_is_no_number_is_json_all_the_same() -> None:
    odd = feedback("f1", FeedbackKind.RATING, float("nan"))
    made = score_segment(segment([reply("a1", odd)]), SETTINGS)
    data = as_data(made, score_again(made, SETTINGS))
    shown = json.loads(json.dumps(data, allow_nan=False))
    assert shown["scored"]["segment"]["steps"][0]["feedback"][0]["value"] is None
    (line,) = [x for x in shown["scored"]["rewards"][0]["reasons"] if x.startswith("ignored")]
    assert line == "ignored rating f1: its value is not a finite number"


def test_a_segment_that_is_not_trained_on_says_why() -> None:
    lines = list(as_lines(score_segment(segment(), SETTINGS), None))
    assert "  not trained on: the segment has no reply" in lines


def test_what_if_scores_again_with_what_is_on_the_record(tmp_path: Path) -> None:
    other = read_weights(written(tmp_path, "weight_explicit: 0.7\nweight_implicit: 0.0"), SETTINGS)
    again = score_again(scored(), other)
    assert again.rewards[0].reward == pytest.approx(-0.7 * 0.5 - 0.2)
    assert score_again(scored(), SETTINGS) == scored()
    text = "\n".join(as_lines(scored(), again))
    assert "what if: -0.550 (-0.390)" in text
    assert "what if:  explicit    0.70 x   -0.500 = -0.350" in text
    data = as_data(scored(), again)
    assert data["what_if"]["rewards"][0]["reward"] == again.rewards[0].reward
    assert "what_if" not in as_data(scored(), None)


def test_a_whole_settings_file_will_do(tmp_path: Path) -> None:
    assert read_weights(written(tmp_path, "reward: {decay: 0.5}"), SETTINGS).decay == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weight_explicit: 0.9", "reward: weight_explicit + weight_implicit"),
        ("{reward: {decay: 0.5}, weight_explicit: 1}", "weight_explicit: unknown beside reward"),
        ("decay: 0.5\ndecay: 0.6", "decay: stands twice, in lines 1 and 2"),
        ("decai: 0.5", "reward.decai: unknown key (did you mean decay?)"),
        ("decay: 7", "reward.decay:"),
        ("- 1", "must hold a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_weights_that_cannot_be_used_name_the_key(tmp_path: Path, text: str, says: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        read_weights(file, SETTINGS)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    with pytest.raises(SettingsError, match="cannot read"):
        read_weights(tmp_path / "none.yaml", SETTINGS)


def test_the_highest_revision_is_explained() -> None:
    def of(name: str, revision: int) -> ScoredSegment:
        made = segment(segment_id=name, revision=revision)
        return score_segment(made, SETTINGS)

    records = [of("abc", 0), of("abc", 2), of("abc", 1), of("xyz", 0)]
    assert newest(records, "ab").segment.revision == 2
    with pytest.raises(RewardError, match="no scored segment q"):
        newest(records, "q")
    with pytest.raises(RewardError, match="name a segment"):
        newest([of("abc", 0)], "")
    both = r"a could be 2 segments: abc \(session-1\), axy \(session-1\)"
    with pytest.raises(RewardError, match=both):
        newest([*records, of("axy", 0)], "a")


def test_a_segment_is_found_by_its_session_and_its_replies() -> None:
    steps = [reply("turn-1", alternatives=(BranchReply(turn_id="turn-2", reply="", event_time=0),))]
    left = BranchReply(turn_id="turn-3", reply="", event_time=0)
    one = score_segment(segment(steps, segment_id="abc", off_branch=(left,)), SETTINGS)
    other = score_segment(segment(segment_id="xyz", session_id="session-2"), SETTINGS)
    for name in ("session-1", "turn-1", "turn-2", "turn-3"):
        assert newest([other, one], name) is one
    # What a segment's id begins with stands above what is in another.
    same = score_segment(segment(segment_id="session-1"), SETTINGS)
    assert newest([one, same], "session-1") is same


def test_feedback_that_earns_nothing_is_named_with_the_reason() -> None:
    again = BranchReply(turn_id="a0", reply="Once more.", event_time=0, feedback=(thumb("f1", -1),))
    left = BranchReply(
        turn_id="a9",
        reply="Left behind.",
        event_time=0,
        feedback=(feedback("f2", FeedbackKind.COPY),),
    )
    made = segment([reply("a1", alternatives=(again,))], off_branch=(left,))
    lines = list(as_lines(score_segment(made, SETTINGS), None))
    why = "the user had this reply regenerated"
    assert f"  no reward for reply a0: {why}: Once more." in lines
    assert f"    ignored thumb f1 -1: {why}; it is in its rater's history" in lines
    assert "    ignored copy f2: nobody continued this reply" in lines


def test_plugins_are_shown_and_what_if_says_which_fails() -> None:
    def boom(*_: object) -> None:
        raise ValueError("no luck")

    signal = Plugged("boom", boom, 0.1, "boom 1.0")
    again = score_segment(conversation("Hi", "Thanks"), SETTINGS, plugins=Plugins((signal,)))
    plain = score_segment(conversation("Hi", "Thanks"), SETTINGS)
    lines = list(as_lines(plain, again))
    assert "  what if: plugins: boom (boom 1.0)" in lines
    assert "  what if: plugins that failed: boom" in lines
    assert "  what if: plugin failed, boom: ValueError: no luck" in lines
    assert "  plugins that failed: boom" in list(as_lines(again, None))
    assert as_data(plain, again)["what_if"]["attributes"]["plugin_errors"] == "boom"


def test_what_if_says_which_settings_it_cannot_consider() -> None:
    other = SETTINGS.model_copy(update={"filter_row": False, "decay": 0.1, "rate_window": 7})
    unseen = not_considered(scored(), SETTINGS, other)
    assert unseen == ("rate_window", "filter_row")
    assert not_considered(scored(), SETTINGS, SETTINGS.model_copy(update={"decay": 0.1})) == ()
    again = score_again(scored(), other)
    (line,) = [line for line in as_lines(scored(), again, unseen) if "not considered" in line]
    assert line.startswith("  what if: not considered: rate_window, filter_row (how far")
    assert as_data(scored(), again, unseen)["what_if"]["not_considered"] == list(unseen)
    # The rest has an effect on a segment by itself.
    for name in RewardSettings.model_fields:
        of_one = name.startswith(("weight_", "implicit_", "process_", "plugin_", "diversity_f"))
        if of_one:
            assert not name.startswith(BEYOND_A_SEGMENT), name


def test_what_if_says_that_nobody_looked_for_templates() -> None:
    without = SETTINGS.model_copy(update={"weight_diversity": 0.0})
    made = score_segment(segment([reply("a1", thumb("f1", 1))]), without)
    assert not_considered(made, without, SETTINGS) == ("weight_diversity",)
    assert not_considered(made, without, without) == ()
    heavier = SETTINGS.model_copy(update={"weight_diversity": 0.9})
    assert not_considered(scored(), SETTINGS, heavier) == ()


def test_what_if_says_when_the_record_is_of_other_settings_than_those_here() -> None:
    other = SETTINGS.model_copy(update={"decay": 0.5})
    assert not is_of_other_settings(scored(), SETTINGS)
    assert is_of_other_settings(scored(), other)
    assert is_of_other_settings(replace(scored(), formula_id="composite-1"), SETTINGS)
    again = score_again(scored(), other)
    says = "the record was scored with other settings, or by another version"
    assert any(says in line for line in as_lines(scored(), again, elsewhere=True))
    assert not any(says in line for line in as_lines(scored(), again))
    assert as_data(scored(), again, elsewhere=True)["what_if"]["scored_with_other_settings"]


def test_a_whole_id_is_no_beginning_of_another() -> None:
    short, long = (score_segment(segment(segment_id=name), SETTINGS) for name in ("s1", "s10"))
    assert newest([short, long], "s1") is short


def test_a_weight_of_0_leaves_no_negative_zero() -> None:
    judged = feedback("j1", FeedbackKind.JUDGEMENT, -1.0, text="2 of 3")
    made = score_segment(segment([reply("a1", judged)]), SETTINGS)
    assert any(
        line.endswith("judge       0.00 x   -1.000 = +0.000") for line in as_lines(made, None)
    )


def test_long_texts_are_cut() -> None:
    made = score_segment(conversation("word " * 100, "more " * 100), SETTINGS)
    assert max(map(len, as_lines(made, None))) < 220
    outcome = feedback("f1", FeedbackKind.OUTCOME, 1.0, attributes={"outcome": "x" * 9_000})
    long = score_segment(segment([reply("a1", outcome)]), SETTINGS)
    assert max(map(len, as_lines(long, None))) < 420
