"""What all raters of a policy do together, and who stands out from them.

Theory of operation. A partition of ``trajectory.segments`` holds a fixed share of the users; of
each policy in it we count who sent how much feedback: ratings, and each sort of claims
(``formulas.CLAIMS``), by themselves. Time is cut into windows of ``crowd_window_ms``
by the segments' ``closed_at``; what is counted is the current window and the one before. Each
new piece is looked at once, when it first shows, and what is found stays with it. First wins:

1. *Flood of a rater*: they gave more than ``flood_factor`` times what the other raters gave on
   average, from ``flood_ratings_min`` on. Claims come more easily, and from some people much more
   than from others: of these it is ``flood_claims_factor``.
2. *Burst*: identical pieces of feedback (kind, value, text, tags, source) within
   ``burst_window_ms`` of event time: ``burst_texts`` by whomever if they have a text of
   ``MIN_TEXT_BYTES``, else ``burst_ratings`` by one rater, since many people say "thanks". Not of
   outcomes: their time is often a date.
3. *Flood of a source* (front end, importer): it has sent more than ``flood_factor`` times its usual
   in a window, from as many on, once there were ``flood_source_windows_min``. What a rater floods
   with does not count: a flood must not have everybody held who uses the same front end. Of
   outcomes no source is looked at: they come from other systems, a month of them at once if they
   like.
4. *Contradiction*, of ratings: at least ``contradiction_share`` of the rater's ratings of replies
   about which at least three quarters of ``contradiction_others_min`` or more others agree say
   the opposite. Ratings of the same words count as ratings of one reply, from ``MIN_WORDS_CHARS``.

Who a rater is, the feedback says, and who sends it may say anything. So whom it names in somebody
else's conversation is a *guest*, unless its source is among ``verified_sources``: guests are
counted each by themselves, in that conversation's name, and say nothing about others. They are in
no average, no majority and no cohort.

And for the per-user filters (``processors.reward.credibility``) it counts the *cohort*: raters
whose ratings such a filter has just found to turn negative. From ``cohort_raters_min`` of them
on, and ``cohort_share`` of the raters active, it is news about the policy and no noise: the
per-user filters are suspended.

What is found depends on the order of the partition's log, and on nothing else. Pure: no clock, no
randomness, no I/O.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from streams.contracts import FeedbackKind, StepFeedback
from streams.settings import RewardSettings

MIN_WORDS_CHARS = 20
"""Shorter replies ("Yes.") mean different things in different places: known by their turn."""

MIN_TEXT_BYTES = 24
"""In UTF-8: eight Chinese characters, or some five English words. Many write shorter ones."""

MAX_OTHERS = 32
"""How many raters' opinions of the same words are remembered."""

DECISIVE_SHARE = 0.75
SOURCE_MEMORY = 6
"""Windows in which a source's usual follows what it sends, where that is more."""

SOURCE_PATIENCE = 168
"""And where it is less: a front end is as usual after a quiet night, or weekend."""

HALVE_AT = 128
"""Comparisons after which a rater's older ones count half."""

KEPT_WINDOWS = 2


class CrowdKey(Struct, frozen=True, order=True, gc=False):
    """An entry of the crowd's state: of which policy, of what kind, and its name."""

    policy: str
    kind: str
    name: str


class RaterCount(Struct, frozen=True, kw_only=True, gc=False):
    """One rater: ratings, or claims of a sort, in the newest window with any and the one before it.

    Args:
        window: That newest window's number.
        ratings: How many in it.
        before: How many in the window before it.
        agreed: Comparisons with others in which they agreed.
        contradicted: Comparisons in which they did not.
        turned: The newest window in which a per-user filter found them turn negative; -1: none.
    """

    window: int = -1
    ratings: int = 0
    before: int = 0
    agreed: int = 0
    contradicted: int = 0
    turned: int = -1


class SourceCount(Struct, frozen=True, kw_only=True, gc=False):
    """One source: ratings or claims in its newest window, and what is usual.

    Args:
        window: The newest window's number.
        ratings: How many in it.
        windows: In how many windows before it there were any.
        average: What is usual in one, nearer to the busy ones.
    """

    window: int = -1
    ratings: int = 0
    windows: int = 0
    average: float = 0.0


class PolicyCount(Struct, frozen=True, kw_only=True, gc=False):
    """All raters of one policy. Each rater counts in the newest window they rated in alone.

    Args:
        window: The newest window's number.
        ratings: Ratings, or claims of a sort, in it and in the window before.
        raters: Raters whose newest window it is, and those whose newest is the one before.
        turned: The same of raters who turned negative.
        suspended: Whether the per-user filters were suspended last.
    """

    window: int = -1
    ratings: tuple[int, int] = (0, 0)
    raters: tuple[int, int] = (0, 0)
    turned: tuple[int, int] = (0, 0)
    suspended: bool = False


class Echo(Struct, frozen=True, kw_only=True, gc=False):
    """Identical feedback: the latest event times, ms, and the newest window."""

    window: int = -1
    times: tuple[int, ...] = ()


class Words(Struct, frozen=True, kw_only=True, gc=False):
    """Who rated the same words how: digests of raters and the sign of their latest rating."""

    window: int = -1
    signs: tuple[tuple[str, int], ...] = ()


Reply = tuple[str, str, tuple[str, ...]]
"""Digests of a reply's turn, of its session and of its words."""


class Templates(Struct, frozen=True, kw_only=True, gc=False):
    """Some of the latest replies of a policy: digests of turn, of session, and of the words.

    The words' digests: of all of them, of the first and of the last ``TEMPLATE_TOKENS``. A policy
    has several of these, so that a new reply does not have all of them written again.

    Args:
        window: The window of the newest of them.
        replies: Up to ``TEMPLATES_TOGETHER``, the oldest first.
        first: The number of the oldest among all that there ever were.
    """

    window: int = -1
    replies: tuple[Reply, ...] = ()
    first: int = 0

    @property
    def end(self) -> int:
        """The number of the reply after these."""
        return self.first + len(self.replies)


Entry = RaterCount | SourceCount | PolicyCount | Echo | Words | Templates


class TemplateIndex:
    """Looks replies up by their words; made of ``Templates``, kept up with them, never written.

    Args:
        parts: Where the ``Templates`` of a policy are, the oldest first.
        replies: What they hold.
    """

    def __init__(self, parts: list[CrowdKey], replies: Sequence[Reply]) -> None:
        self.parts = parts
        self.replies: deque[Reply] = deque()
        self.turns: set[str] = set()
        # Of the words at each place, by their digest, how many replies each session has.
        self._sessions: list[dict[str, dict[str, int]]] = [{} for _ in range(PLACES)]
        self.add(replies, len(replies))

    def add(self, replies: Sequence[Reply], at_most: int) -> None:
        """Take these replies in, and let go of the oldest beyond ``at_most``."""
        self.replies.extend(replies)
        for turn, session, prints in replies:
            self.turns.add(turn)
            for known, print_ in zip(self._sessions, prints, strict=False):
                sessions = known.get(print_)
                if sessions is None:
                    known[print_] = {session: 1}
                else:
                    sessions[session] = sessions.get(session, 0) + 1
        while len(self.replies) > at_most:
            turn, session, prints = self.replies.popleft()
            self.turns.discard(turn)
            for known, print_ in zip(self._sessions, prints, strict=False):
                _forget(known, print_, session)

    def others(self, prints: Sequence[str], session: str) -> int:
        """In how many sessions other than this one any of these words stand at their place."""
        most = 0
        for known, print_ in zip(self._sessions, prints, strict=False):
            sessions = known.get(print_)
            if sessions is not None:
                most = max(most, len(sessions) - (session in sessions))
        return most


def _forget(known: dict[str, dict[str, int]], print_: str, session: str) -> None:
    sessions = known[print_]
    sessions[session] -= 1
    if not sessions[session]:
        del sessions[session]
        if not sessions:
            del known[print_]


@dataclass(slots=True)
class Crowd:
    """The crowd's state in one partition. Only this module changes it.

    Args:
        entries: By key.
    """

    entries: dict[CrowdKey, Entry] = field(default_factory=dict)
    changed: set[CrowdKey] = field(default_factory=set, repr=False)
    forgotten: set[CrowdKey] = field(default_factory=set, repr=False)
    _indexes: dict[str, TemplateIndex] = field(default_factory=dict, repr=False, compare=False)

    def index(self, policy: str, at_most: int) -> TemplateIndex:
        """Looks up the policy's latest replies."""
        index = self._indexes.get(policy)
        if index is None:
            kept = [(key, e) for key, e in self._templates() if key.policy == policy]
            replies = [reply for _, entry in kept for reply in entry.replies]
            index = TemplateIndex([key for key, _ in kept], replies[-at_most:])
            self._indexes[policy] = index
        return index

    def _templates(self) -> list[tuple[CrowdKey, Templates]]:
        found = [(key, e) for key, e in self.entries.items() if isinstance(e, Templates)]
        return sorted(found, key=lambda pair: (pair[0].policy, pair[1].first))

    def add_templates(
        self, policy: str, window: int, replies: Sequence[Reply], at_most: int
    ) -> None:
        """Remember replies, and forget the oldest beyond ``at_most``."""
        index = self.index(policy, at_most)
        index.add(replies, at_most)
        end, left = 0, list(replies)
        while left:
            last = self.entries[index.parts[-1]] if index.parts else Templates()
            assert isinstance(last, Templates)
            if not index.parts or len(last.replies) >= TEMPLATES_TOGETHER:
                index.parts.append(CrowdKey(policy, "templates", str(last.end)))
                last = Templates(first=last.end)
            room = TEMPLATES_TOGETHER - len(last.replies)
            fitting, left = left[:room], left[room:]
            entry = Templates(window=window, replies=(*last.replies, *fitting), first=last.first)
            self._write(index.parts[-1], entry)
            end = entry.end
        while isinstance(oldest := self.entries[index.parts[0]], Templates):
            if oldest.end > end - at_most:
                break
            self.drop([index.parts.pop(0)])

    def old_templates(self, before: int) -> list[CrowdKey]:
        """The templates of policies whose newest is of a window before this one."""
        windows = {key.policy: entry.window for key, entry in self._templates()}
        gone = {policy for policy, window in windows.items() if window < before}
        for policy in gone:
            self._indexes.pop(policy, None)
        return [key for key, _ in self._templates() if key.policy in gone]

    def put(self, key: CrowdKey, entry: Entry) -> None:
        """Remember ``entry``."""
        if self.entries.get(key) != entry:
            self._write(key, entry)

    def _write(self, key: CrowdKey, entry: Entry) -> None:
        self.entries[key] = entry
        self.changed.add(key)
        self.forgotten.discard(key)

    def drop(self, keys: Iterable[CrowdKey]) -> None:
        """Forget these entries."""
        for key in keys:
            del self.entries[key]
            self.changed.discard(key)
            self.forgotten.add(key)

    def rater(self, key: CrowdKey) -> RaterCount:
        entry = self.entries.get(key)
        return entry if isinstance(entry, RaterCount) else RaterCount()

    def source(self, key: CrowdKey) -> SourceCount:
        entry = self.entries.get(key)
        return entry if isinstance(entry, SourceCount) else SourceCount()

    def policy(self, key: CrowdKey) -> PolicyCount:
        entry = self.entries.get(key)
        return entry if isinstance(entry, PolicyCount) else PolicyCount()

    def echo(self, policy: str, name: str) -> Echo:
        entry = self.entries.get(CrowdKey(policy, "echo", name))
        return entry if isinstance(entry, Echo) else Echo()

    def words(self, policy: str, name: str) -> Words:
        entry = self.entries.get(CrowdKey(policy, "words", name))
        return entry if isinstance(entry, Words) else Words()


RATING = "rating"
"""The sort of thumbs and ratings, beside those of ``formulas.CLAIMS``."""


class NewFeedback(Struct, frozen=True, kw_only=True, gc=False):
    """A rating or claim that shows for the first time.

    Args:
        feedback: The feedback.
        value: What it says, in [-1, 1].
        rater: Who it is counted for.
        turn_id: The reply.
        reply: The reply's text.
        sort: What it is counted with.
        guest: Whether nobody vouches for its rater.
    """

    feedback: StepFeedback
    value: float
    rater: str
    turn_id: str
    reply: str
    sort: str
    guest: bool = False

    def key(self, policy: str, kind: str) -> CrowdKey:
        """Where what is counted of its sort stands: by its ``rater``, its ``source`` or ``policy``.

        That of ratings stands where it stood before anything else was counted.
        """
        names = {"rater": self.rater, "source": self.feedback.source, "policy": ""}
        of = kind if self.sort == RATING else f"{self.sort} {kind}"
        return CrowdKey(policy, of, names[kind])


class Anomaly(Struct, frozen=True, kw_only=True, gc=False):
    """Why feedback is held, whoever gave it: which filter, and on what numbers."""

    filter: str
    reason: str


# --- Counting and judging feedback ------------------------------------------------------------


def observe(
    crowd: Crowd,
    policy: str,
    closed_at: int,
    given: Iterable[NewFeedback],
    settings: RewardSettings,
) -> dict[str, Anomaly]:
    """Count new feedback, and say what of it stands out.

    Args:
        crowd: Changed in place.
        policy: Whose replies it is about.
        closed_at: ``closed_at`` of the segment that shows it, ms.
        given: In the order in which the segment shows it.
        settings: The filters.

    Returns:
        By feedback event id, those that are held.
    """
    window = closed_at // settings.crowd_window_ms
    held: dict[str, Anomaly] = {}
    echoed: set[str] = set()
    for item in given:
        is_outcome = item.feedback.kind is FeedbackKind.OUTCOME
        if is_outcome and item.feedback.source in settings.verified_sources:
            continue
        whole, rater = _count(crowd, policy, window, item)
        anomaly = _flood_of_rater(whole, rater, item, settings)
        if not is_outcome:
            echoes = _echo(crowd, policy, window, item, settings, echoed)
            anomaly = anomaly or _burst(item, echoes, settings)
            if anomaly is None:
                anomaly = _flood_of_source(crowd, policy, window, item, settings)
        if item.sort == RATING and not item.guest:
            compared = _compare(crowd, policy, window, item, settings)
            anomaly = anomaly or _contradiction(item, compared, settings)
        if anomaly is not None:
            held[item.feedback.event_id] = anomaly
    return held


def _count(
    crowd: Crowd, policy: str, window: int, item: NewFeedback
) -> tuple[PolicyCount, RaterCount]:
    of_policy, of_rater = item.key(policy, "policy"), item.key(policy, "rater")
    whole, rater = _rolled(crowd.policy(of_policy), window), crowd.rater(of_rater)
    if not item.guest:
        raters = _moved(whole.raters, rater.window, whole.window)
        whole = replace(whole, ratings=(whole.ratings[0] + 1, whole.ratings[1]), raters=raters)
        crowd.put(of_policy, whole)
    rater = _rated(rater, whole.window)
    crowd.put(of_rater, rater)
    return whole, rater


def _rolled(whole: PolicyCount, window: int) -> PolicyCount:
    """``whole`` with ``window`` as its newest; a late window counts in the newest there is."""
    ahead = window - whole.window
    if ahead <= 0:
        return whole
    if ahead == 1:
        return replace(
            whole,
            window=window,
            ratings=(0, whole.ratings[0]),
            raters=(0, whole.raters[0]),
            turned=(0, whole.turned[0]),
        )
    return PolicyCount(window=window, suspended=whole.suspended)


def _moved(counts: tuple[int, int], seen: int, newest: int) -> tuple[int, int]:
    """``counts`` (newest window, the one before) once somebody last in ``seen`` is in newest."""
    now, before = counts
    if seen == newest:
        return counts
    return (now + 1, before - 1) if seen == newest - 1 else (now + 1, before)


def _rated(rater: RaterCount, window: int) -> RaterCount:
    """``rater`` with one more; after a window without any, older comparisons count half."""
    if rater.window == window:
        return replace(rater, ratings=rater.ratings + 1)
    if rater.window == window - 1:
        return replace(rater, window=window, ratings=1, before=rater.ratings)
    agreed, contradicted = rater.agreed // 2, rater.contradicted // 2
    return replace(
        rater, window=window, ratings=1, before=0, agreed=agreed, contradicted=contradicted
    )


def _source_rolled(source: SourceCount, window: int, settings: RewardSettings) -> SourceCount:
    """``source`` in ``window``: what it sent in its last one becomes part of what is usual.

    A flood does only up to what is none, so that it does not become usual at once; growth does.
    Windows without any say nothing: there are nights, and imports once a month.
    """
    if source.window < 0 or window <= source.window:
        return replace(source, window=max(source.window, window))
    windows = min(source.windows + 1, SOURCE_PATIENCE)
    sent = float(source.ratings)
    if windows > settings.flood_source_windows_min:
        sent = min(sent, max(settings.flood_ratings_min, settings.flood_factor * source.average))
    memory = SOURCE_MEMORY if sent > source.average else SOURCE_PATIENCE
    average = source.average + (sent - source.average) / min(windows, memory)
    return SourceCount(window=window, windows=windows, average=average)


def _flood_of_rater(
    whole: PolicyCount, rater: RaterCount, item: NewFeedback, settings: RewardSettings
) -> Anomaly | None:
    if not settings.filter_flood:
        return None
    mine, others, theirs = rater.ratings + rater.before, sum(whole.raters), sum(whole.ratings)
    if not item.guest:
        others, theirs = others - 1, theirs - mine
    average = theirs / others if others else 0.0
    factor = settings.flood_factor if item.sort == RATING else settings.flood_claims_factor
    if (
        others >= settings.flood_raters_min
        and mine >= settings.flood_ratings_min
        and mine > factor * average
    ):
        return Anomaly(
            filter="flood",
            reason=f"{mine} {item.sort}s by {item.rater}, {average:.1f} by each of {others} others",
        )
    return None


def _flood_of_source(
    crowd: Crowd, policy: str, window: int, item: NewFeedback, settings: RewardSettings
) -> Anomaly | None:
    """Count ``item`` for its source, and say whether that floods."""
    key = item.key(policy, "source")
    source = _source_rolled(crowd.source(key), window, settings)
    source = replace(source, ratings=source.ratings + 1)
    crowd.put(key, source)
    if (
        settings.filter_flood
        and source.windows >= settings.flood_source_windows_min
        and source.ratings >= settings.flood_ratings_min
        and source.ratings > settings.flood_factor * source.average
    ):
        return Anomaly(
            filter="flood",
            reason=f"{source.ratings} {item.sort}s from source {item.feedback.source} in a window, "
            f"where {source.average:.1f} are usual",
        )
    return None


def _echo(
    crowd: Crowd,
    policy: str,
    window: int,
    item: NewFeedback,
    settings: RewardSettings,
    echoed: set[str],
) -> int:
    """How many identical ones there are near ``item``, itself included.

    Claims of one segment are one: who reads a finished conversation sends its signals together.
    ``echoed`` has those of this segment.
    """
    given, text = item.feedback, _text_of(item)
    who = "" if _is_telling(text) else item.rater
    # Of a copied reply the value says nothing; as what was read of it, it cannot tell two apart.
    value = given.value if item.sort == RATING else item.value
    name = _digest(given.kind.value, value, text, sorted(given.tags), given.source, who)
    if item.sort != RATING:
        if name in echoed:
            return 0
        echoed.add(name)
    times = (*crowd.echo(policy, name).times, given.event_time)[-_echoes_min(text, settings) :]
    crowd.put(CrowdKey(policy, "echo", name), Echo(window=window, times=times))
    return sum(abs(time - given.event_time) <= settings.burst_window_ms for time in times)


def _burst(item: NewFeedback, echoes: int, settings: RewardSettings) -> Anomaly | None:
    text = _text_of(item)
    if not settings.filter_burst or echoes < _echoes_min(text, settings):
        return None
    said = f'"{text[:40]}"' if text else "without a text"
    by = "" if _is_telling(text) else f" by {item.rater}"
    return Anomaly(
        filter="burst",
        reason=f"{echoes} or more identical ones {said}{by} from source {item.feedback.source} "
        f"within {settings.burst_window_ms} ms",
    )


def _text_of(item: NewFeedback) -> str:
    return (item.feedback.text or "").strip()


def _is_telling(text: str) -> bool:
    """Whether several people hardly write this by chance."""
    return len(text) >= MIN_TEXT_BYTES or len(text.encode("utf-8", "replace")) >= MIN_TEXT_BYTES


def _echoes_min(text: str, settings: RewardSettings) -> int:
    return settings.burst_texts if _is_telling(text) else settings.burst_ratings


def _compare(
    crowd: Crowd, policy: str, window: int, rating: NewFeedback, settings: RewardSettings
) -> RaterCount:
    """Compare ``rating`` with what others said before of the same words."""
    plain = " ".join(rating.reply.split()).casefold()
    name = _digest(plain if len(plain) >= MIN_WORDS_CHARS else f"turn {rating.turn_id}")
    who, sign = _digest(rating.rater)[:12], _sign(rating.value)
    signs = crowd.words(policy, name).signs
    others = [s for digest, s in signs if digest != who]
    kept = (*((d, s) for d, s in signs if d != who), (who, sign))[-MAX_OTHERS:]
    crowd.put(CrowdKey(policy, "words", name), Words(window=window, signs=kept))
    of_rater = rating.key(policy, "rater")
    rater = crowd.rater(of_rater)
    majority = _majority(others, settings)
    if not majority or not sign:
        return rater
    agreed, contradicted = rater.agreed, rater.contradicted
    if agreed + contradicted >= HALVE_AT:
        agreed, contradicted = agreed // 2, contradicted // 2
    same = sign == majority
    rater = replace(rater, agreed=agreed + same, contradicted=contradicted + (not same))
    crowd.put(of_rater, rater)
    return rater


def _majority(others: list[int], settings: RewardSettings) -> int:
    """The sign that at least three quarters of enough others gave; 0 if there is none."""
    if len(others) < settings.contradiction_others_min:
        return 0
    for sign in (1, -1):
        if others.count(sign) >= DECISIVE_SHARE * len(others):
            return sign
    return 0


def _contradiction(
    rating: NewFeedback, rater: RaterCount, settings: RewardSettings
) -> Anomaly | None:
    compared = rater.agreed + rater.contradicted
    if (
        not settings.filter_contradiction
        or compared < settings.contradiction_ratings_min
        or rater.contradicted < settings.contradiction_share * compared
    ):
        return None
    return Anomaly(
        filter="contradiction",
        reason=f"{rating.rater} said the opposite of nearly everybody in {rater.contradicted} of "
        f"{compared} ratings of replies that others rated",
    )


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


# --- The cohort -------------------------------------------------------------------------------


class Cohort(Struct, frozen=True, kw_only=True, gc=False):
    """Whether the per-user filters of a policy are suspended, and why.

    Args:
        suspended: Whether they are.
        raised: Whether they were not before.
        reason: The numbers.
    """

    suspended: bool
    raised: bool
    reason: str


def turn(
    crowd: Crowd, policy: str, closed_at: int, raters: Iterable[str], settings: RewardSettings
) -> Cohort:
    """Count raters who have just turned negative, and look at all of them together.

    Args:
        crowd: Changed in place.
        policy: Whose raters they are.
        closed_at: ``closed_at`` of the segment in which they did, ms.
        raters: Those with a rating that a per-user filter found to turn negative.
        settings: The filters.
    """
    of_policy = CrowdKey(policy, "policy", "")
    whole = _rolled(crowd.policy(of_policy), closed_at // settings.crowd_window_ms)
    for name in raters:
        of_rater = CrowdKey(policy, "rater", name)
        rater = crowd.rater(of_rater)
        whole = replace(whole, turned=_moved(whole.turned, rater.turned, whole.window))
        crowd.put(of_rater, replace(rater, turned=whole.window))
    turned, active = sum(whole.turned), max(1, sum(whole.raters))
    suspended = (
        settings.cohort_suspension
        and turned >= settings.cohort_raters_min
        and turned >= settings.cohort_share * active
    )
    crowd.put(of_policy, replace(whole, suspended=suspended))
    return Cohort(
        suspended=suspended,
        raised=suspended and not whole.suspended,
        reason=f"{turned} of {active} raters turned negative together",
    )


# --- Templates --------------------------------------------------------------------------------

PLACES = 3
"""Where words are looked at: all, the first and the last ones."""

TEMPLATES_TOGETHER = 32
"""How many replies are written together."""

TEMPLATE_TOKENS = 12
TEMPLATE_TOKENS_MIN = 6
"""Replies of fewer words say the same by nature."""


def repeated(
    crowd: Crowd,
    policy: str,
    session_id: str,
    closed_at: int,
    replies: Mapping[str, tuple[str, ...]],
    settings: RewardSettings,
) -> dict[str, int]:
    """In how many other sessions each reply's words, opening or end were used lately.

    Args:
        crowd: Changed in place: the replies are remembered, the latest ``diversity_replies``.
        policy: Who replied.
        session_id: Where.
        closed_at: ``closed_at`` of the segment, ms.
        replies: The tokens of each reply by turn id.
        settings: How many are remembered.

    Returns:
        By turn id; 0 for replies of fewer than ``TEMPLATE_TOKENS_MIN`` tokens.
    """
    session = _digest_of((session_id,))
    index = crowd.index(policy, settings.diversity_replies)
    counts: dict[str, int] = {}
    added: list[Reply] = []
    for turn_id, tokens in replies.items():
        prints = _prints(tokens)
        counts[turn_id] = index.others(prints, session)
        turn = _digest_of((session_id, turn_id))
        if prints and turn not in index.turns:
            added.append((turn, session, prints))
    if added:
        window = closed_at // settings.crowd_window_ms
        crowd.add_templates(policy, window, added, settings.diversity_replies)
    return counts


def _prints(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Digests of all tokens and, if there are more, of the first and of the last ones."""
    if len(tokens) < TEMPLATE_TOKENS_MIN:
        return ()
    if len(tokens) <= TEMPLATE_TOKENS:
        return (_digest_of(tokens),)
    opening, end = tokens[:TEMPLATE_TOKENS], tokens[-TEMPLATE_TOKENS:]
    return _digest_of(tokens), _digest_of(opening), _digest_of(end)


def _digest_of(texts: Iterable[str]) -> str:
    data = "\x1f".join(texts).encode("utf-8", "replace")
    return hashlib.blake2b(data, digest_size=12).digest()[:6].hex()


# --- Forgetting -------------------------------------------------------------------------------


def restart(crowd: Crowd, clock_ms: int, settings: RewardSettings) -> None:
    """Forget what was counted in windows that have not come yet.

    They are those of a shorter ``crowd_window_ms``, whose numbers are larger: nothing would ever
    move them on. Of a longer one they are long past, and forgotten like everything old.

    Args:
        crowd: Changed in place.
        clock_ms: The largest ``closed_at`` seen in the partition.
        settings: Those of now.
    """
    newest = clock_ms // settings.crowd_window_ms
    ahead = [
        key
        for key, entry in crowd.entries.items()
        if key.kind != "templates"
        and (entry.window > newest or (isinstance(entry, RaterCount) and entry.turned > newest))
    ]
    crowd.drop(ahead)
    for key, entry in crowd.entries.items():
        if isinstance(entry, Templates) and entry.window > newest:
            crowd.put(key, replace(entry, window=newest))


def sweep(crowd: Crowd, clock_ms: int, settings: RewardSettings) -> None:
    """Forget what no later feedback can be compared with any more.

    Raters and sources are kept for ``history_ms``, the rest for ``KEPT_WINDOWS`` windows.
    """
    newest = clock_ms // settings.crowd_window_ms
    brief = newest - KEPT_WINDOWS
    long = newest - max(KEPT_WINDOWS, settings.history_ms // settings.crowd_window_ms)
    gone = [
        key
        for key, entry in crowd.entries.items()
        if key.kind != "templates"
        and entry.window < (long if isinstance(entry, RaterCount | SourceCount) else brief)
    ]
    crowd.drop([*gone, *crowd.old_templates(long)])


def _digest(*parts: object) -> str:
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


__all__ = [
    "RATING",
    "Anomaly",
    "Cohort",
    "Crowd",
    "CrowdKey",
    "Echo",
    "Entry",
    "NewFeedback",
    "PolicyCount",
    "RaterCount",
    "SourceCount",
    "Templates",
    "Words",
    "observe",
    "repeated",
    "restart",
    "sweep",
    "turn",
]
