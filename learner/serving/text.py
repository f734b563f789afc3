"""From token ids to text, piece by piece, with stop strings.

A piece is released only when it cannot change any more: not while it ends in half a
character, and not while it could be the beginning of a stop string. The pieces of a reply,
put together, are its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""


class ReplyText:
    """The growing text of one reply.

    Args:
        decode: The tokenizer's decoder.
        stop: Strings that end the reply; they are not part of its text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        # Everything before _settled was released; _context..._settled is decoded again with
        # what follows, because a token's text may depend on its neighbour.
        self._context = 0
        self._settled = 0
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain.

        Sets ``stopped`` when a stop string was completed; what follows it is discarded.
        """
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._release(self._decoded(final=False), final=False)

    def finish(self) -> str:
        """Return what was still held back; the reply ends here."""
        if self.stopped:
            return ""
        return self._release(self._decoded(final=True), final=True)

    def _decoded(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        if len(text) <= len(known) or (text.endswith(UNFINISHED) and not final):
            return ""
        self._context, self._settled = self._settled, len(self._ids)
        return text[len(known) :]

    def _release(self, text: str, *, final: bool) -> str:
        self._held += text
        cut = _first_stop(self._held, self._stop)
        if cut is not None:
            self.stopped = True
            ready, self._held = self._held[:cut], ""
            return ready
        keep = 0 if final else _possible_stop(self._held, self._stop)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return ready


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    found = [index for item in stop if (index := text.find(item)) >= 0]
    return min(found) if found else None


def _possible_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that some stop string begins with."""
    return max(
        (
            length
            for item in stop
            for length in range(1, min(len(item), len(text) + 1))
            if text.endswith(item[:length])
        ),
        default=0,
    )
