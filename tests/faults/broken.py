"""Workers that are broken on purpose: the suite must catch each of them.

``python -m tests.faults.broken <how> <prefix> <config>`` runs an aligner whose producer does
something wrong. Nothing else of it is changed.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaProducer

from processors.runtime import state
from tests.integration import align_worker

HALFWAY_S = 0.3
"""How long a step stays half done."""


class _Split(AIOKafkaProducer):  # type: ignore[misc]
    """Writes a step in two transactions: a kill between them leaves half of it."""

    first_suffixes: tuple[str, ...]

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._later: list[Callable[[], Awaitable[Any]]] = []

    async def send(self, topic: str, *args: Any, **kwargs: Any) -> Any:
        return await self._now_or_later(
            topic, lambda: super(_Split, self).send(topic, *args, **kwargs)
        )

    async def send_batch(self, batch: Any, topic: str, **kwargs: Any) -> Any:
        return await self._now_or_later(
            topic, lambda: super(_Split, self).send_batch(batch, topic, **kwargs)
        )

    async def _now_or_later(self, topic: str, send: Callable[[], Awaitable[Any]]) -> Any:
        if topic.endswith(self.first_suffixes):
            return await send()
        self._later.append(send)
        pretended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pretended.set_result(None)
        return pretended

    async def commit_transaction(self) -> None:
        await super().commit_transaction()
        await self.begin_transaction()
        later, self._later = self._later, []
        for send in later:
            await (await send())
        # Long enough for a kill to come in between.
        await asyncio.sleep(HALFWAY_S)
        await super().commit_transaction()


class AcksFirst(_Split):
    """Notes what it has applied, then writes what came of it."""

    first_suffixes = (".state",)


class WritesFirst(_Split):
    """Writes what came of its input, then notes what it has applied."""

    first_suffixes = (".segments", ".dead", ".turns", ".feedback")


class Unfenced(AIOKafkaProducer):  # type: ignore[misc]
    """Writes under a name of its own, so that no successor can shut it out."""

    def __init__(self, *, transactional_id: str, **config: Any) -> None:
        super().__init__(transactional_id=f"{transactional_id}-{uuid.uuid4().hex}", **config)


BROKEN = {"acks-first": AcksFirst, "writes-first": WritesFirst, "unfenced": Unfenced}


def main(how: str, prefix: str, config: str) -> int:
    """Run the worker that is broken in the way named."""
    state.AIOKafkaProducer = BROKEN[how]  # type: ignore[attr-defined]
    return align_worker.main(prefix, config)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:4]))
