"""Drives conversations through the gateway with the plain ``openai`` client."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

from streams.clock import Clock
from streams.demo.users import Reaction, Taste, prompts_for, react

logger = logging.getLogger(__name__)

SOURCE = "demo-chat"


@dataclass(slots=True)
class Outcome:
    """What the clients saw.

    Attributes:
        replies: Replies whose end was received.
        refused: Requests that were answered with an error or not at all.
        hung_up: Replies the client left in the middle.
        accepted_turns: turn_id of each reply whose end was received.
        accepted_feedback: event_id of each feedback event that was acknowledged.
    """

    replies: int = 0
    refused: int = 0
    hung_up: int = 0
    accepted_turns: list[str] = field(default_factory=list)
    accepted_feedback: list[str] = field(default_factory=list)

    @property
    def accepted(self) -> set[str]:
        """Ids of all events that must not be lost."""
        return {*self.accepted_turns, *self.accepted_feedback}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """How much traffic there is.

    Attributes:
        concurrent_sessions: Conversations at a time.
        turns_per_session: Questions a user asks.
        longest_delay_ms: How late feedback may come.
        max_tokens: Length of a reply.
        temperature: Of sampling.
        seed: Makes the users' choices repeatable.
    """

    concurrent_sessions: int
    turns_per_session: int
    longest_delay_ms: int
    max_tokens: int
    temperature: float
    seed: int


class Traffic:
    """Simulated users at work.

    Args:
        gateway_url: The gateway, without ``/v1``.
        taste: What they like.
        plan: How much.
        clock: Tells event times.
    """

    def __init__(self, gateway_url: str, taste: Taste, plan: TrafficPlan, clock: Clock) -> None:
        self._taste = taste
        self._plan = plan
        self._clock = clock
        self._http = httpx.AsyncClient(base_url=gateway_url, timeout=60)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{gateway_url}/v1", api_key="unused", timeout=180, max_retries=0
        )
        self._stopping = asyncio.Event()
        self._reactions: set[asyncio.Task[None]] = set()
        self._started = 0
        self.outcome = Outcome()

    def stop(self) -> None:
        """Begin no further conversation; those that run go on to their end."""
        self._stopping.set()

    async def run(self) -> None:
        """Converse until stopped, then wait for the feedback that is still to come."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrent_sessions):
                group.create_task(self._sessions())
        await asyncio.gather(*self._reactions)
        await self._http.aclose()
        await self._openai.close()

    async def send_feedback(self, event: dict[str, Any]) -> None:
        """Post one feedback event."""
        try:
            answer = await self._http.post("/v1/feedback", json=event)
        except httpx.HTTPError as error:
            logger.warning("feedback was not taken: %r", error)
            self.outcome.refused += 1
            return
        if answer.status_code == httpx.codes.ACCEPTED:
            self.outcome.accepted_feedback.append(event["event_id"])
        else:
            logger.warning("feedback was refused: %s", answer.text)
            self.outcome.refused += 1

    async def _sessions(self) -> None:
        while not self._stopping.is_set():
            self._started += 1
            await self._session(random.Random(f"{self._plan.seed}-{self._started}"))

    async def _session(self, rng: random.Random) -> None:
        session = _Session(f"demo-{uuid.uuid4().hex[:12]}", f"user-{uuid.uuid4().hex[:8]}")
        prompts = prompts_for(rng, self._plan.turns_per_session)
        for number, prompt in enumerate(prompts):
            last = number == len(prompts) - 1
            session.messages.append({"role": "user", "content": prompt})
            reply = await self._ask(rng, session, done=last and rng.random() < 0.6)
            if reply is None:
                return
            if rng.random() < 1 / 12 and not last:
                # The user asks for another answer to the same question and goes on from it.
                reply = await self._ask(rng, session, done=False) or reply
            session.messages.append({"role": "assistant", "content": reply})
            await asyncio.sleep(rng.uniform(0.3, 1.2))

    async def _ask(self, rng: random.Random, session: _Session, *, done: bool) -> str | None:
        """One reply, or None if there was none or the user hung up."""
        hang_up_after = rng.randint(2, 6) if rng.random() < 1 / 40 else None
        try:
            stream = await self._openai.chat.completions.create(
                model="default",
                messages=cast(list[ChatCompletionMessageParam], session.messages),
                stream=True,
                max_tokens=self._plan.max_tokens,
                temperature=self._plan.temperature,
                extra_headers=session.headers(done=done),
            )
            text, turn_id, chunks = "", "", 0
            async with stream:
                async for chunk in stream:
                    chunks += 1
                    turn_id = (chunk.model_extra or {})["clawstream"]["turn_id"]
                    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                    if chunks == hang_up_after:
                        self.outcome.hung_up += 1
                        return None
        except (openai.APIError, httpx.HTTPError) as error:
            logger.warning("a request was refused: %r", error)
            self.outcome.refused += 1
            return None
        self.outcome.replies += 1
        self.outcome.accepted_turns.append(turn_id)
        self._react_later(rng, session, turn_id, text)
        return text

    def _react_later(self, rng: random.Random, session: _Session, turn_id: str, text: str) -> None:
        reaction = react(rng, self._taste, text, longest_delay_ms=self._plan.longest_delay_ms)
        self._in_background(self._react(session, turn_id, reaction, self._clock.now_ms()))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._reactions.add(task)
        task.add_done_callback(self._reactions.discard)

    async def _react(
        self, session: _Session, turn_id: str, reaction: Reaction, replied_ms: int
    ) -> None:
        event = {
            "event_id": f"feedback-{uuid.uuid4().hex[:12]}",
            "session_id": session.session_id,
            "user_id": session.user_id,
            "turn_id": turn_id if reaction.names_turn else None,
            "kind": reaction.kind,
            "value": reaction.value,
            "event_time": replied_ms + reaction.after_ms,
            "source": SOURCE,
        }
        await self._until(replied_ms + reaction.sent_after_ms)
        await self.send_feedback(event)
        if reaction.twice:
            await self.send_feedback(event)
        if reaction.edited_after_ms is not None:
            await self._until(replied_ms + reaction.edited_after_ms)
            await self.send_feedback(
                {
                    **event,
                    "event_id": f"{event['event_id']}-edited",
                    "supersedes": event["event_id"],
                    "kind": "rating",
                    "value": reaction.value * 0.5,
                    "event_time": self._clock.now_ms(),
                }
            )

    async def _until(self, time_ms: int) -> None:
        await asyncio.sleep(max(0, time_ms - self._clock.now_ms()) / 1000)


@dataclass(slots=True)
class _Session:
    session_id: str
    user_id: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def headers(self, *, done: bool) -> dict[str, str]:
        headers = {
            "X-Session-Id": self.session_id,
            "X-User-Id": self.user_id,
            "X-Source": SOURCE,
        }
        return headers | ({"X-Session-Done": "true"} if done else {})


async def send_faults(traffic: Traffic, clock: Clock) -> None:
    """What goes wrong in every real system: feedback about nothing, and two truths under one id."""
    about_nothing = {
        "event_id": "fault-about-nothing",
        "session_id": f"demo-{uuid.uuid4().hex[:12]}",
        "turn_id": "no-such-turn",
        "kind": "thumb",
        "value": 1.0,
        "event_time": clock.now_ms(),
        "source": SOURCE,
    }
    await traffic.send_feedback(about_nothing)
    await traffic.send_feedback({**about_nothing, "value": -1.0})


__all__ = ["Outcome", "Traffic", "TrafficPlan", "send_faults"]
