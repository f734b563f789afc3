"""``clawstream reviews`` shows what people are called as it is, and ids whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streams.cli import main, reviews
from streams.contracts import ReviewRequest
from streams.errors import RewardError
from streams.reviews import UNTIL_DECIDED, Case
from tests.unit.streams.test_reviews import asked

CASE = Case(
    request=ReviewRequest(
        event_id="0123456789abcdef",
        session_id="s",
        segment_id="g",
        turn_id="t",
        feedback_event_ids=("f",),
        reason="3 negative ratings in a row by user [/bold] [red]x",
        event_time=1,
        policy="[/x]",
        attributes={"filter": "burst", "rater": "user u"},
    )
)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_everything_is_shown_whole_and_as_it_is_at_any_width(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    reviews._print([CASE])
    head, row, reason = capsys.readouterr().out.splitlines()
    assert head.startswith("request       asked (UTC)          policy")
    assert row == "0123456789ab  1970-01-01 00:00:00  [/x]    burst   1         t      open"
    assert reason == "    3 negative ratings in a row by user [/bold] [red]x"


def test_a_request_names_the_reply_to_look_at_and_leaves_out_what_all_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, request = asked()
    assert UNTIL_DECIDED in request.reason
    reviews._print([Case(request=request)])
    _, row, reason = capsys.readouterr().out.splitlines()
    assert request.turn_id in row.split()
    assert reason == "    3 negative ratings in a row by user u1"


@pytest.mark.parametrize("prefix", ["", "1", "0123456789abcdef0"])
def test_a_request_is_named_by_what_its_id_begins_with(prefix: str) -> None:
    assert reviews._only([CASE], "0123") is CASE
    with pytest.raises(RewardError, match=f"no review request '{prefix}'"):
        reviews._only([CASE], prefix)


def test_a_request_that_is_named_twice_is_decided_once() -> None:
    assert reviews._chosen([CASE], ["0123", "0123456789abcdef", "0123"]) == [CASE]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (reviews.Selection(), True),
        (reviews.Selection(filter_name="burst"), True),
        (reviews.Selection("[/x]", "burst", "user u"), True),
        (reviews.Selection(policy="default"), False),
        (reviews.Selection(filter_name="row"), False),
        (reviews.Selection("[/x]", "burst", "user v"), False),
    ],
)
def test_many_are_named_by_what_they_have_in_common(wanted: reviews.Selection, found: bool) -> None:
    decided = replace(CASE, state="upheld")
    assert wanted.of([CASE, decided]) == ([CASE] if found else [])
    assert wanted.of([decided], every=True) == ([decided] if found else [])


@pytest.mark.parametrize("said", [["--reject"], ["0123", "--reject", "--filter", "burst"]])
def test_either_ids_or_what_they_have_in_common_must_be_said(
    said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reviews", "decide", *said]) == 1
    assert "name the requests, or say which with --filter" in capsys.readouterr().err
