from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from streams.clock import ManualClock
from streams.contracts import DialogueTurn, TurnType
from streams.errors import OversizedError, RequestRefusedError, SpoolError
from streams.gateway.reply import ReplyBuilder
from streams.gateway.service import Caller, Ending, Exchange, GatewayService
from streams.gateway.spool import Envelope
from streams.serde import build_codec
from streams.topics import TURNS

CODEC = build_codec()
HI = {"role": "user", "content": "hi"}


class Shelf:
    """Keeps what is published; may refuse."""

    def __init__(self) -> None:
        self.refuses = False
        self.kept: list[Envelope] = []

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        if self.refuses:
            raise SpoolError("full")
        self.kept.extend(envelopes)

    @property
    def turns(self) -> list[DialogueTurn]:
        return [CODEC.decode(envelope.value, DialogueTurn) for envelope in self.kept]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def service(shelf: Shelf) -> GatewayService:
    return GatewayService(CODEC, shelf, ManualClock(1_000), "default", {TURNS: 2_000})


def opened(
    service: GatewayService, headers: Mapping[str, str] | None = None, **body: Any
) -> Exchange:
    return service.open({"messages": [HI], **body}, headers or {}, Caller("web", "here"))


def said(text: str) -> ReplyBuilder:
    reply = ReplyBuilder()
    reply.feed({"choices": [{"delta": {"content": text}}]})
    return reply


async def test_a_prompt_that_could_not_be_kept_is_published_by_the_retry(
    service: GatewayService, shelf: Shelf
) -> None:
    shelf.refuses = True
    first = opened(service, session_id="s")
    with pytest.raises(SpoolError):
        await service.publish_prompt(first, service.encode_prompt(first))
    shelf.refuses = False
    second = opened(service, session_id="s")
    await service.publish_prompt(second, service.encode_prompt(second))
    assert [turn.content for turn in shelf.turns] == ["hi"]


@pytest.mark.parametrize(
    ("end", "mark"),
    [(Ending.HUNG_UP, "client_disconnected"), (Ending.BROKEN, "broken_off"), (Ending.DONE, None)],
)
async def test_a_reply_that_did_not_end_well_is_marked(
    service: GatewayService, shelf: Shelf, end: Ending, mark: str | None
) -> None:
    await service.publish_reply(opened(service, session_done=True), said("x"), end)
    (turn,) = shelf.turns
    assert turn.finish_reason == mark
    assert turn.attributes == ({mark: "true"} if mark else {})
    assert turn.session_done is (mark is None)


async def test_the_event_of_a_reply_shares_no_id_with_what_the_front_end_names(
    service: GatewayService, shelf: Shelf
) -> None:
    exchange = opened(service, {"x-feedback-message-id": "m"}, session_id="s")
    await service.publish_reply(exchange, said("x"))
    (turn,) = shelf.turns
    assert turn.turn_id == "m" != turn.event_id


def test_a_reply_id_is_free_again_when_no_reply_came(service: GatewayService) -> None:
    headers = {"x-feedback-message-id": "m"}
    first = opened(service, headers, session_id="s")
    assert opened(service, headers, session_id="s").turn_id != "m"
    assert opened(service, headers, session_id="other").turn_id == "m"
    service.abandon_reply(first)
    assert opened(service, headers, session_id="s").turn_id == "m"


def test_a_prompt_too_large_is_refused_and_not_remembered(service: GatewayService) -> None:
    large = {"role": "user", "content": "x" * 2_000}
    for _ in range(2):
        exchange = opened(service, messages=[large], session_id="s")
        with pytest.raises(OversizedError, match="at most 2000"):
            service.encode_prompt(exchange)


def test_a_key_counts_too(service: GatewayService) -> None:
    nearly = {"role": "user", "content": "x" * 1_600}
    service.encode_prompt(opened(service, messages=[nearly], session_id="s"))
    with pytest.raises(OversizedError):
        service.encode_prompt(opened(service, messages=[nearly], session_id="s" * 400))


class TestWithoutASessionId:
    def test_a_retry_finds_its_session(self, service: GatewayService) -> None:
        retry = {"idempotency-key": "k"}
        assert opened(service, retry).session_id == opened(service, retry).session_id

    def test_nothing_else_does(self, service: GatewayService) -> None:
        other = {"messages": [{"role": "user", "content": "other"}]}
        retry = {"idempotency-key": "k"}
        sessions = {
            opened(service, retry).session_id,
            opened(service, {"idempotency-key": "l"}).session_id,
            opened(service, retry, user="u").session_id,
            opened(service, retry, **other).session_id,
            opened(service).session_id,
            opened(service).session_id,
        }
        assert len(sessions) == 6

    async def test_who_names_no_user_is_told_apart_by_origin(self, service: GatewayService) -> None:
        first = opened(service)
        await service.publish_reply(first, said("hello"))
        more = {"messages": [HI, {"role": "assistant", "content": "hello"}, HI]}
        here, there = (service.open(more, {}, Caller("web", at)) for at in ("here", "there"))
        assert here.session_id == first.session_id != there.session_id


@pytest.mark.parametrize(
    ("headers", "turn_type"),
    [
        ({}, TurnType.MAIN),
        ({"x-turn-type": ""}, TurnType.MAIN),
        ({"x-turn-type": "other"}, TurnType.MAIN),
        ({"x-turn-type": " Side "}, TurnType.SIDE),
        ({"x-feedback-message-id": ""}, TurnType.SIDE),
        ({"x-feedback-message-id": "", "x-turn-type": "main"}, TurnType.MAIN),
    ],
    ids=str,
)
def test_a_turn_is_main_unless_it_says_otherwise(
    service: GatewayService, headers: dict[str, str], turn_type: TurnType
) -> None:
    assert opened(service, headers).turn_type is turn_type


@pytest.mark.parametrize("n", [0, 2, "1"])
def test_more_than_one_reply_is_refused(service: GatewayService, n: Any) -> None:
    with pytest.raises(RequestRefusedError, match="n must be 1"):
        opened(service, n=n)
