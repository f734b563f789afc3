"""The reward of a step: what feedback and words say about a reply, as numbers with reasons.

Theory of operation. Every piece of feedback on a step is read once (``read``): a number on a
common scale, or the reason why it says nothing. From the readings and the user's next turns
each component of ``COMPONENTS`` makes a value in [-1, 1] with its evidence::

    reward = clip( sum_core w_c * v_c  +  sum_extra w_x * v_x )        in [-1, 1]

The core weights add up to 1 (DESIGN §5: explicit 0.4, implicit 0.3, business 0.3). A core
component without anything to go by counts 0, or, with ``renormalise``, the others' weights are
scaled up to fill its place. Extra components come on top. What credibility
(``processors.reward.credibility``) left of a rating multiplies that rating.

A new component is a function ``(step, context, settings) -> RewardComponent`` and a line in
``COMPONENTS``. Pure: no clock, no randomness, no I/O.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct, field
from msgspec.structs import replace

from processors.reward.plugins import NO_PLUGINS, Plugins, as_line, ask_component, ask_signal
from processors.reward.repetition import Turns, repeats
from processors.reward.signals import Signal, find, tool_error
from streams.contracts import (
    FeedbackKind,
    FeedbackWeight,
    Message,
    RewardComponent,
    Role,
    ScoredSegment,
    Step,
    StepFeedback,
    StepReward,
    TrajectorySegment,
)
from streams.outcomes import NAME_ATTRIBUTE
from streams.settings import RewardSettings

FORMULA_ID = "composite-8"
"""Name and version of these formulas; changes whenever equal input may score differently."""

REPEATED_ATTRIBUTE = "repeated"
"""Attribute of a scored segment: in how many other sessions replies stood, JSON by turn id."""

PLUGINS_ATTRIBUTE = "plugins"
"""Attribute of a scored segment: the plugins in use and the distributions they come from."""

PLUGIN_ERRORS_ATTRIBUTE = "plugin_errors"
"""Attribute of a scored segment: the plugins that failed at one of its steps."""

MAX_TURNS_BETWEEN = 50
"""Repetition is looked for in so many of the user's turns after a reply, of so many of those before
it: with a decay of 0.9 half a percent of the points would be left further away."""

FAILED_PLUGIN = "plugin failed, "
"""How a reason about a plugin that failed begins."""


class Reading(Struct, frozen=True, gc=False):
    """What one piece of feedback says: ``value`` on its kind's scale, or why it says nothing."""

    value: float | None = None
    problem: str | None = None


class Credibility(Struct, frozen=True, kw_only=True, gc=False):
    """How far a piece of feedback is believed.

    Args:
        weight: Multiplies a rating, in [0, 1]; of other feedback 1 or, if it is held, 0.
        filter: Which filter or decision set it; empty where none did.
        reason: On what numbers; None where none did.
    """

    weight: float = 1.0
    filter: str = ""
    reason: str | None = None


BELIEVED = Credibility()


class TextSignal(Struct, frozen=True, kw_only=True, gc=False):
    """A signal in a user's or a tool's turn after a reply.

    Args:
        signal: What it says.
        turn_id: The turn.
        history_length: User turns between the reply and this turn; 0 for the next one.
        detail: The words that gave it away, or the similarity.
        content: The whole turn.
    """

    signal: Signal
    turn_id: str
    history_length: int
    detail: str
    content: str


class StepContext(Struct, frozen=True, kw_only=True, gc=False):
    """What a component may know of a step besides the step itself.

    Args:
        segment: The segment it belongs to.
        rater: Who gave feedback that names nobody.
        given: The step's feedback that says something and is not held, but for ratings.
        opinions: Each rater's latest rating of the reply.
        claims: What a filter holds of other feedback, or a review decided about it.
        credibility: Of feedback by event id; what is missing is believed.
        later_user_turns: The user's turns after the reply, as far as the segment shows them.
        signals: What they say about this reply.
        repeated: In how many other sessions its words, its opening or its end were used lately.
        plugged: Points and evidence of signals that plugins found in the next user turn.
        failures: Plugins that failed at it.
    """

    segment: TrajectorySegment
    rater: str
    given: Given = ()
    opinions: Mapping[str, tuple[StepFeedback, float]] = field(default_factory=dict)
    claims: tuple[tuple[StepFeedback, Credibility], ...] = ()
    credibility: Mapping[str, Credibility] = field(default_factory=dict)
    later_user_turns: tuple[Message, ...] = ()
    signals: tuple[TextSignal, ...] = ()
    repeated: int = 0
    plugged: tuple[tuple[float, str], ...] = ()
    failures: tuple[Failure, ...] = ()


class Failure(Struct, frozen=True, gc=False):
    """A plugin that could not do its part."""

    plugin: str
    error: str


Component = Callable[[Step, StepContext, RewardSettings], RewardComponent]


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """A component in the registry.

    Args:
        function: Makes the component; its ``value`` is in [-1, 1] or None.
        core: Whether its weight is one of those that add up to 1.
        kinds: The kinds of feedback it goes by.
        hears: Whether it finds something in the step where there is no such feedback; None if
            it never does. Where it does not, the component is made once for all such steps.
    """

    function: Component
    core: bool
    kinds: frozenset[FeedbackKind] = frozenset()
    hears: Callable[[StepContext, RewardSettings], bool] | None = None


# --- Reading feedback -------------------------------------------------------------------------

SCALE_MIN = "scale_min"
SCALE_MAX = "scale_max"
"""Attributes of a rating or outcome that is not on [-1, 1]: the ends of its scale."""


def read(feedback: StepFeedback) -> Reading:
    """What ``feedback`` says, on the scale of its kind.

    thumb: -1 or 1 · rating, outcome, judgement: in [-1, 1] · dwell: milliseconds, not negative ·
    review: 1 upheld, -1 rejected · the others: 1, it happened. Anything else has a ``problem``.
    """
    reader = _READERS.get(feedback.kind)
    if reader is None:
        return Reading(problem=f"kind {feedback.kind.value} says nothing here")
    if feedback.value is not None and not math.isfinite(feedback.value):
        return Reading(problem="its value is not a finite number")
    return reader(feedback)


def _read_thumb(feedback: StepFeedback) -> Reading:
    if not feedback.value:
        return Reading(problem="a thumb is above 0 for up or below 0 for down")
    return Reading(math.copysign(1.0, feedback.value))


def _read_scaled(feedback: StepFeedback) -> Reading:
    if feedback.value is None:
        return Reading(problem="it has no value")
    scale = _scale(feedback.attributes)
    if scale is None:
        return Reading(problem=f"{SCALE_MIN} and {SCALE_MAX} must be two numbers, rising")
    low, high = scale
    if not low <= feedback.value <= high:
        return Reading(
            problem=f"its value {feedback.value:g} is outside [{low:g}, {high:g}]; name its "
            f"scale in the attributes {SCALE_MIN} and {SCALE_MAX}"
        )
    if (low, high) == (-1.0, 1.0):
        return Reading(feedback.value)
    return Reading(clip(2.0 * ((feedback.value - low) / (high - low)) - 1.0))


def _scale(attributes: Mapping[str, str]) -> tuple[float, float] | None:
    try:
        low = float(attributes.get(SCALE_MIN, "-1"))
        high = float(attributes.get(SCALE_MAX, "1"))
    except ValueError:
        return None
    return (low, high) if low < high and math.isfinite(high - low) else None


def _read_dwell(feedback: StepFeedback) -> Reading:
    if feedback.value is None or feedback.value < 0:
        return Reading(problem="dwell needs a value, milliseconds, not negative")
    return Reading(feedback.value)


def _read_event(feedback: StepFeedback) -> Reading:
    if feedback.value is not None and feedback.value <= 0:
        return Reading(problem=f"its value {feedback.value:g} says that it did not happen")
    return Reading(1.0)


def _read_review(feedback: StepFeedback) -> Reading:
    if feedback.value is None:
        return Reading(problem="a review is above 0 for upheld, else rejected")
    return Reading(1.0 if feedback.value > 0 else -1.0)


def _read_judgement(feedback: StepFeedback) -> Reading:
    if feedback.value is None:
        return Reading(problem=f"no verdict: {_said(feedback, 'the judge gave no reason')}")
    return _read_scaled(feedback)


def _said(feedback: StepFeedback, otherwise: str) -> str:
    """The words of ``feedback`` as a line of their own; a segment has them whole."""
    return as_line(feedback.text) if feedback.text else otherwise


_READERS: Mapping[FeedbackKind, Callable[[StepFeedback], Reading]] = {
    FeedbackKind.THUMB: _read_thumb,
    FeedbackKind.RATING: _read_scaled,
    FeedbackKind.OUTCOME: _read_scaled,
    FeedbackKind.DWELL: _read_dwell,
    FeedbackKind.FOLLOW_UP: _read_event,
    FeedbackKind.COPY: _read_event,
    FeedbackKind.REGENERATE: _read_event,
    FeedbackKind.ABANDON: _read_event,
    FeedbackKind.REPETITION: _read_event,
    FeedbackKind.CORRECTION: _read_event,
    FeedbackKind.CONFIRMATION: _read_event,
    FeedbackKind.DIRECTIVE: _read_event,
    FeedbackKind.REVIEW: _read_review,
    FeedbackKind.JUDGEMENT: _read_judgement,
}

EXPLICIT_KINDS = frozenset({FeedbackKind.THUMB, FeedbackKind.RATING})

SIGNAL_KINDS: Mapping[FeedbackKind, Signal] = {
    FeedbackKind.REPETITION: Signal.REPETITION,
    FeedbackKind.CORRECTION: Signal.CORRECTION,
    FeedbackKind.CONFIRMATION: Signal.CONFIRMATION,
    FeedbackKind.DIRECTIVE: Signal.DIRECTIVE,
}

CLAIMS: Mapping[FeedbackKind, str] = {
    FeedbackKind.COPY: "event",
    FeedbackKind.REGENERATE: "event",
    FeedbackKind.ABANDON: "event",
    **dict.fromkeys(SIGNAL_KINDS, "signal"),
    FeedbackKind.OUTCOME: "outcome",
}
"""The kinds besides ratings that are held where somebody floods with them, and what they are: each
of the three is counted by itself. Dwell and follow-ups are measured with every reply: who has
much of them uses the product much."""


Given = Sequence[tuple[StepFeedback, float]]
"""Pieces of feedback with what they say, the oldest first."""


def readable(feedback: Sequence[StepFeedback]) -> Given:
    """The feedback that says something."""
    known = [(item, value) for item in feedback if (value := read(item).value) is not None]
    if len(known) > 1:
        known.sort(key=lambda pair: pair[0].event_time)
    return known


def of_kinds(given: Given, kinds: Collection[FeedbackKind]) -> Given:
    """What was given of these kinds."""
    return [pair for pair in given if pair[0].kind in kinds] if given else ()


def default_rater(segment: TrajectorySegment) -> str:
    """Who gave the segment's feedback that names nobody: its user, else its session."""
    return f"user {segment.user_id}" if segment.user_id else f"session {segment.session_id}"


def rater_of(feedback: StepFeedback, default: str) -> str:
    """Who gave ``feedback``."""
    return f"user {feedback.user_id}" if feedback.user_id else default


def latest_ratings(given: Given, default: str) -> dict[str, tuple[StepFeedback, float]]:
    """Each rater's opinion of one reply: the latest thumb or rating that can be read."""
    return {
        rater_of(item, default): (item, value) for item, value in of_kinds(given, EXPLICIT_KINDS)
    }


def latest_claims(
    given: Given, default: str
) -> dict[tuple[str, FeedbackKind], tuple[StepFeedback, float]]:
    """What each rater claims of one reply: of each kind of ``CLAIMS`` the latest."""
    return {
        (rater_of(item, default), item.kind): (item, value)
        for item, value in of_kinds(given, CLAIMS)
    }


# --- Components -------------------------------------------------------------------------------


def explicit(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """What people said: the mean over raters of their latest rating times its credibility.

    A rating that counts nothing has no part in the mean.
    """
    values: list[float] = []
    evidence: list[str] = []
    for rater, (item, value) in context.opinions.items():
        weight = context.credibility.get(item.event_id, BELIEVED).weight
        if weight > 0.0:
            values.append(value * weight)
        believed = "" if weight == 1.0 else f", counts {weight:g}"
        evidence.append(f"{item.kind.value} {item.event_id} by {rater}: {_signed(value)}{believed}")
    mean = math.fsum(values) / len(values) if values else None
    return RewardComponent(
        name="explicit",
        weight=settings.weight_explicit,
        value=None if mean is None else clip(mean),
        evidence=tuple(evidence),
    )


def implicit(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """What people did: dwell, follow-ups, copying and the like, and what their words say.

    ``clip(dwell + follow-ups + events + clip(signals))``: ``dwell_points``,
    ``follow_up_points``; another event counts once however often it is sent; signals decay with
    the user turns in between.
    """
    behaviour = [
        *_dwell(context, settings),
        *_follow_ups(context, settings),
        *_events(context, settings),
    ]
    signals = _signals(context, settings)
    value: float | None = None
    if behaviour or signals:
        said = clip(math.fsum(points for points, _ in signals))
        value = clip(math.fsum(points for points, _ in behaviour) + said)
    return RewardComponent(
        name="implicit",
        weight=settings.weight_implicit,
        value=value,
        evidence=tuple(line for _, line in (*behaviour, *signals)),
    )


def business(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """What came of it: the latest outcome."""
    outcomes = of_kinds(context.given, (FeedbackKind.OUTCOME,))
    value: float | None = None
    evidence: tuple[str, ...] = ()
    if outcomes:
        item, value = outcomes[-1]
        name = item.attributes.get(NAME_ATTRIBUTE)
        said = f" ({as_line(name)})" if name else ""
        evidence = (f"outcome {item.event_id}{said}: {_signed(value)}",)
    return RewardComponent(
        name="business", weight=settings.weight_business, value=value, evidence=evidence
    )


def process(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """How it went on: the user said more (+1), and asked for details (+1), each by its weight."""
    parts: list[tuple[float, str]] = []
    weight = settings.process_continued + settings.process_details
    if step.next_user_turn is not None and weight > 0:
        turn_id = step.next_user_turn.turn_id
        parts.append((settings.process_continued, f"went on with turn {turn_id}"))
        if any(s.signal is Signal.DETAILS and s.history_length == 0 for s in context.signals):
            parts.append((settings.process_details, f"turn {turn_id} asks for details"))
    counted = [part for part in parts if part[0] > 0]
    value = clip(math.fsum(part for part, _ in counted) / weight) if counted else None
    return RewardComponent(
        name="process",
        weight=weight,
        value=value,
        evidence=tuple(line for _, line in counted),
    )


def judge(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """What a judge said: the latest judgement that has a verdict (``processors.reward.judge``)."""
    judgements = sorted(
        (item for item in step.feedback if item.kind is FeedbackKind.JUDGEMENT),
        key=lambda item: item.event_time,
    )
    verdicts = of_kinds(context.given, (FeedbackKind.JUDGEMENT,))
    value: float | None = None
    evidence: tuple[str, ...] = ("no verdict yet",) if settings.weight_judge > 0 else ()
    if verdicts:
        item, value = verdicts[-1]
        words = _said(item, "no words")
        evidence = (f"judgement {item.event_id}: {_signed(value)} ({words})",)
    elif judgements:
        last = judgements[-1]
        evidence = (f"no verdict, {last.event_id}: {_said(last, 'the judge gave no reason')}",)
    return RewardComponent(
        name="judge", weight=settings.weight_judge, value=value, evidence=evidence
    )


def diversity(step: Step, context: StepContext, settings: RewardSettings) -> RewardComponent:
    """A penalty for words that the policy uses in session after session.

    ``-(n - free) / (full - free)``, at least -1, where n other sessions of the latest
    ``diversity_replies`` replies had the same words, opening or end; nothing up to ``free``.
    """
    over = context.repeated - settings.diversity_free
    value = clip(-over / (settings.diversity_full - settings.diversity_free)) if over > 0 else None
    evidence = (f"the same words in {context.repeated} other sessions",) if over > 0 else ()
    return RewardComponent(
        name="diversity", weight=settings.weight_diversity, value=value, evidence=evidence
    )


def _hears_signals(context: StepContext, _settings: RewardSettings) -> bool:
    return bool(context.signals or context.plugged)


def _hears_going_on(_context: StepContext, settings: RewardSettings) -> bool:
    return settings.process_continued + settings.process_details > 0


def _hears_templates(context: StepContext, settings: RewardSettings) -> bool:
    return context.repeated > settings.diversity_free


IMPLICIT_KINDS = frozenset(
    {
        FeedbackKind.DWELL,
        FeedbackKind.FOLLOW_UP,
        FeedbackKind.COPY,
        FeedbackKind.REGENERATE,
        FeedbackKind.ABANDON,
        *SIGNAL_KINDS,
    }
)

COMPONENTS: Mapping[str, ComponentSpec] = {
    "explicit": ComponentSpec(explicit, core=True, kinds=EXPLICIT_KINDS),
    "implicit": ComponentSpec(implicit, core=True, kinds=IMPLICIT_KINDS, hears=_hears_signals),
    "business": ComponentSpec(business, core=True, kinds=frozenset({FeedbackKind.OUTCOME})),
    "process": ComponentSpec(process, core=False, hears=_hears_going_on),
    "judge": ComponentSpec(judge, core=False, kinds=frozenset({FeedbackKind.JUDGEMENT})),
    "diversity": ComponentSpec(diversity, core=False, hears=_hears_templates),
}
"""Every component by name, in the order in which they are shown."""

_HEARING = tuple(spec.hears for spec in COMPONENTS.values() if spec.hears is not None)

CORE = frozenset(name for name, spec in COMPONENTS.items() if spec.core)
"""Those whose weights add up to 1."""


def dwell_points(seen_ms: float, settings: RewardSettings) -> float:
    """Points of the time a reply was looked at: linear in ms, up to ``dwell_saturation_ms``.

    ``implicit_dwell * min(seen, saturation) / saturation``
    """
    full = float(settings.dwell_saturation_ms)
    return settings.implicit_dwell * (min(seen_ms, full) / full)


def follow_up_points(count: int, settings: RewardSettings) -> float:
    """Points of so many follow-ups: each the same, up to ``follow_up_saturation`` of them.

    ``implicit_follow_up * min(count, saturation)``
    """
    return settings.implicit_follow_up * min(count, settings.follow_up_saturation)


def _dwell(context: StepContext, settings: RewardSettings) -> list[tuple[float, str]]:
    times = [value for _, value in of_kinds(context.given, (FeedbackKind.DWELL,))]
    if not times:
        return []
    full = settings.dwell_saturation_ms
    seen = min(sum(times), float(full))
    points = dwell_points(seen, settings)
    return [(points, f"dwell {seen:.0f} of {full} ms: {_signed(points)}")]


def _follow_ups(context: StepContext, settings: RewardSettings) -> list[tuple[float, str]]:
    sent = of_kinds(context.given, (FeedbackKind.FOLLOW_UP,))
    if not sent:
        return []
    points, last = follow_up_points(len(sent), settings), sent[-1][0].event_id
    return [(points, f"follow_up {last}, {len(sent)} of them: {_signed(points)}")]


def _events(context: StepContext, settings: RewardSettings) -> list[tuple[float, str]]:
    points = {
        FeedbackKind.COPY: settings.implicit_copy,
        FeedbackKind.REGENERATE: settings.implicit_regenerate,
        FeedbackKind.ABANDON: settings.implicit_abandon,
    }
    happened = {item.kind: item for item, _ in of_kinds(context.given, points)}
    return [
        (points[kind], f"{kind.value} {happened[kind].event_id}: {_signed(points[kind])}")
        for kind in points
        if kind in happened
    ]


def _signals(context: StepContext, settings: RewardSettings) -> list[tuple[float, str]]:
    """Points of each signal: those the front end sent, else those in the user's words."""
    found = [
        (s.signal, s.history_length, f"turn {s.turn_id} ({s.detail})") for s in context.signals
    ]
    sent = of_kinds(context.given, SIGNAL_KINDS)
    if sent:
        # Of each kind the latest by each rater: said twice it says nothing more.
        sent = list(latest_claims(sent, context.rater).values())
        found = [line for line in found if line[0] is Signal.TOOL_ERROR]
        found += [
            (SIGNAL_KINDS[item.kind], _turns_before(item, context), f"event {item.event_id}")
            for item, _ in sent
        ]
    points = {
        Signal.TOOL_ERROR: settings.tool_error,
        Signal.REPETITION: settings.repetition,
        Signal.CORRECTION: settings.correction,
        Signal.CONFIRMATION: settings.confirmation,
    }
    scored: list[tuple[float, str]] = []
    for signal, history_length, where in found:
        if signal in points:
            value = points[signal] * settings.decay**history_length
            between = f", user turns between: {history_length}" if history_length else ""
            scored.append((value, f"{signal.value} in {where}{between}: {_signed(value)}"))
    return [*scored, *context.plugged]


def _turns_before(item: StepFeedback, context: StepContext) -> int:
    """User turns between the reply and a signal the front end sent."""
    return sum(turn.event_time < item.event_time for turn in context.later_user_turns)


# --- Context: the user's words after each reply -----------------------------------------------


def contexts(
    segment: TrajectorySegment,
    settings: RewardSettings,
    credibility: Mapping[str, Credibility],
    repeated: Mapping[str, int],
    plugins: Plugins = NO_PLUGINS,
) -> tuple[StepContext, ...]:
    """One context for each step of ``segment``, in order."""
    rater = default_rater(segment)
    result: list[StepContext] = []
    asked: tuple[str, ...] = ()
    turns = Turns()
    following = _later_user_turns(segment.steps)
    for index, step in enumerate(segment.steps):
        asked = _asked(step.context)[-MAX_TURNS_BETWEEN:] or asked
        later = following[index]
        signals = (
            _text_signals(step, asked, later, settings, turns) if settings.text_signals else ()
        )
        signals += _tool_errors(segment.steps, index) if settings.tool_errors else ()
        plugged, failures = _plugged(plugins, later[0]) if later and plugins.signals else ((), ())
        given = readable(step.feedback)
        opinions = latest_ratings(given, rater) if given else {}
        given, claims = _believed(given, rater, credibility)
        result.append(
            StepContext(
                segment=segment,
                rater=rater,
                given=given,
                opinions=opinions,
                claims=claims,
                credibility=credibility,
                later_user_turns=later,
                signals=signals,
                repeated=repeated.get(step.turn_id, 0),
                plugged=plugged,
                failures=failures,
            )
        )
    return tuple(result)


def _believed(
    given: Given, rater: str, credibility: Mapping[str, Credibility]
) -> tuple[Given, tuple[tuple[StepFeedback, Credibility], ...]]:
    """What was given without the claims that are held, and those that were weighed."""
    if not (given and credibility):
        return given, ()
    claims = latest_claims(given, rater)
    weighed = {
        name: (item, credibility[item.event_id])
        for name, (item, _) in claims.items()
        if item.event_id in credibility
    }
    held = {name for name, (_, belief) in weighed.items() if belief.weight == 0.0}
    # With the latest of a kind, whatever its rater sent of that kind before.
    kept = [(i, value) for i, value in given if (rater_of(i, rater), i.kind) not in held]
    return kept, tuple(weighed.values())


def _asked(context: Sequence[Message]) -> tuple[str, ...]:
    """The user's words that a reply answers: those after the last assistant message."""
    asked: list[str] = []
    for message in context:
        if message.role is Role.ASSISTANT:
            asked.clear()
        elif message.role is Role.USER:
            asked.append(message.content)
    return tuple(asked)


def _later_user_turns(steps: Sequence[Step]) -> list[tuple[Message, ...]]:
    """Of each step the user's turns after it, as far as the segment shows them, each once."""
    found: list[tuple[Message, ...]] = []
    later = _users(steps[-1].next_user_turn) if steps else {}
    # From the end, as what follows a step is what follows the next one and a little more.
    for step in reversed(steps):
        found.append(tuple(_before(_users(step.next_user_turn), later).values()))
        later = _before(_users(*step.context), later)
    return found[::-1]


def _users(*messages: Message | None) -> dict[str, Message]:
    users: dict[str, Message] = {}
    for message in messages:
        if message is not None and message.role is Role.USER:
            users.setdefault(message.turn_id, message)
    return users


def _before(first: dict[str, Message], then: dict[str, Message]) -> dict[str, Message]:
    """Both in this order; of a turn that is in both, the first."""
    return first | then | first


def _plugged(
    plugins: Plugins, turn: Message
) -> tuple[tuple[tuple[float, str], ...], tuple[Failure, ...]]:
    """What signals of plugins find in the user's next turn, and which of them failed."""
    found: list[tuple[float, str]] = []
    failures: list[Failure] = []
    for plugin in plugins.signals:
        result = ask_signal(plugin, turn.content)
        if result.error is not None:
            failures.append(Failure(plugin.name, result.error))
        elif result.value is not None:
            where = f'{plugin.name} in turn {turn.turn_id} ("{result.value}")'
            found.append((plugin.amount, f"{where}: {_signed(plugin.amount)}"))
    return tuple(found), tuple(failures)


def _tool_errors(steps: Sequence[Step], index: int) -> tuple[TextSignal, ...]:
    """What the tools that a reply called had to complain about, one signal for each answer."""
    calls = {call.id for call in steps[index].tool_calls or ()}
    following = steps[index + 1].context if index + 1 < len(steps) else ()
    answers = (
        message
        for message in following
        if message.role is Role.TOOL
        and not message.carried
        and (not calls or message.tool_call_id is None or message.tool_call_id in calls)
    )
    return tuple(
        TextSignal(
            signal=Signal.TOOL_ERROR,
            turn_id=answer.turn_id,
            history_length=0,
            detail=f'"{words}"',
            content=answer.content,
        )
        for answer in answers
        if (words := tool_error(answer.content)) is not None
    )


def _text_signals(
    step: Step,
    asked: Sequence[str],
    later: Sequence[Message],
    settings: RewardSettings,
    turns: Turns,
) -> tuple[TextSignal, ...]:
    """What later turns say about a reply.

    Words are about the reply right before them, so only the next turn is read for them, beside
    that reply. A
    repetition is about the reply that answered the same before, however many turns ago.
    """
    found: list[TextSignal] = []
    for history_length, turn in enumerate(later[: MAX_TURNS_BETWEEN + 1]):
        similarity = repeats(turn.content, asked, settings.repetition_similarity, turns)
        details: list[tuple[Signal, str]] = []
        if similarity is not None:
            details.append((Signal.REPETITION, f"similarity {similarity:.2f}"))
        if history_length == 0:
            found_here = find(turn.content, step.reply, learn=settings.learned_signals)
            details.extend((match.signal, f'"{match.quote}"') for match in found_here)
        found.extend(
            TextSignal(
                signal=signal,
                turn_id=turn.turn_id,
                history_length=history_length,
                detail=detail,
                content=turn.content,
            )
            for signal, detail in details
        )
    return tuple(found)


# --- Putting it together ----------------------------------------------------------------------


def composite(components: Sequence[RewardComponent], *, renormalise: bool) -> float:
    """The reward in [-1, 1] of these components (equation in the module's docstring)."""
    core: list[float] = []
    extra: list[float] = []
    weights: list[float] = []
    for c in components:
        if c.value is None:
            continue
        if c.name in CORE:
            weights.append(c.weight)
            core.append(c.weight * c.value)
        else:
            extra.append(c.weight * c.value)
    present = math.fsum(weights)
    scale = 1.0 / present if renormalise and present > 0 else 1.0
    return clip(scale * math.fsum(core) + math.fsum(extra))


def score_step(
    step: Step, context: StepContext, settings: RewardSettings, plugins: Plugins = NO_PLUGINS
) -> StepReward:
    """The reward of one step, with everything a person needs to understand it."""
    known = _nothing(settings)
    if not _is_quiet(step, context, settings, plugins):
        return _score(step, context, settings, plugins, known)
    if known.reward is None:
        known.reward = _score(step, context, settings, plugins, known)
    return replace(known.reward, turn_id=step.turn_id)


def _is_quiet(step: Step, context: StepContext, settings: RewardSettings, plugins: Plugins) -> bool:
    """Whether nothing was said about a reply: most are alike in that, and are scored once."""
    if step.feedback or context.signals or context.failures or plugins.components:
        return False
    return True not in [hears(context, settings) for hears in _HEARING]


@dataclass(slots=True)
class _Nothing:
    """What is made where nothing was said, kept for the next time.

    Args:
        settings: With which settings.
        components: By name.
        reward: Of a step of which nothing at all was said.
    """

    settings: RewardSettings
    components: dict[str, RewardComponent]
    reward: StepReward | None = None


def _nothing(settings: RewardSettings) -> _Nothing:
    known = _NOTHING.get(id(settings))
    if known is None or known.settings is not settings:
        if len(_NOTHING) >= MAX_HASHES:
            _NOTHING.clear()
        known = _NOTHING[id(settings)] = _Nothing(settings, {})
    return known


_NOTHING: dict[int, _Nothing] = {}


def _components(
    step: Step, context: StepContext, settings: RewardSettings, known: _Nothing
) -> list[RewardComponent]:
    kinds = {item.kind for item in step.feedback}
    made: list[RewardComponent] = []
    for name, spec in COMPONENTS.items():
        hears = spec.hears is not None and spec.hears(context, settings)
        if hears or not kinds.isdisjoint(spec.kinds):
            made.append(spec.function(step, context, settings))
            continue
        if name not in known.components:
            known.components[name] = spec.function(step, context, settings)
        made.append(known.components[name])
    return made


def _score(
    step: Step,
    context: StepContext,
    settings: RewardSettings,
    plugins: Plugins,
    known: _Nothing,
) -> StepReward:
    made = _components(step, context, settings, known)
    own = [c for c in made if c.weight > 0 or c.value is not None or c.name in CORE]
    theirs, failed = _plugin_components(step, context, settings, plugins)
    components = (*own, *theirs)
    failures = (*context.failures, *failed)
    reward = composite(components, renormalise=settings.renormalise)
    opinions = context.opinions
    ratings = [(i, context.credibility.get(i.event_id, BELIEVED)) for i, _ in opinions.values()]
    weighed = [*ratings, *context.claims]
    reasons = (
        _sum_line(components, reward, settings),
        *(f"{c.name}: {'; '.join(c.evidence)}" for c in components if c.evidence),
        *(belief.reason for _, belief in weighed if belief.reason is not None),
        *(f"{FAILED_PLUGIN}{failure.plugin}: {failure.error}" for failure in failures),
        *_remarks(step, context),
        *_overruled(context),
    )
    return StepReward(
        turn_id=step.turn_id,
        reward=reward,
        credibility=_credibility(ratings or context.claims),
        components=components,
        reasons=reasons,
        directives=_directives(context),
        weighed=tuple(
            FeedbackWeight(
                event_id=item.event_id,
                weight=belief.weight,
                filter=belief.filter,
                reason=belief.reason,
            )
            for item, belief in weighed
            if belief.reason is not None
        ),
    )


def _credibility(weighed: Sequence[tuple[StepFeedback, Credibility]]) -> float:
    """The mean weight of what was weighed."""
    return math.fsum(belief.weight for _, belief in weighed) / len(weighed) if weighed else 1.0


def _plugin_components(
    step: Step, context: StepContext, settings: RewardSettings, plugins: Plugins
) -> tuple[tuple[RewardComponent, ...], tuple[Failure, ...]]:
    """The parts that plugins make of the reward, and which of them failed at it."""
    parts: list[RewardComponent] = []
    failures: list[Failure] = []
    for plugin in plugins.components:
        result = ask_component(plugin, step, context.segment, settings)
        if result.error is not None:
            failures.append(Failure(plugin.name, result.error))
        parts.append(
            RewardComponent(
                name=plugin.name,
                weight=plugin.amount,
                value=result.value,
                evidence=result.evidence if result.error is None else (f"failed: {result.error}",),
            )
        )
    return tuple(parts), tuple(failures)


def _sum_line(
    components: Sequence[RewardComponent], reward: float, settings: RewardSettings
) -> str:
    terms = " + ".join(
        f"{c.name} {c.weight:g} x {'nothing' if c.value is None else _signed(c.value)}"
        for c in components
        if c.name in CORE or c.value is not None
    )
    how = ", weights scaled to what is there" if settings.renormalise else ""
    return f"reward {_signed(reward)} = {terms}{how}"


def _remarks(step: Step, context: StepContext) -> tuple[str, ...]:
    latest = {item.event_id for item, _ in context.opinions.values()}
    weighed = {item.event_id for item, _ in context.claims}
    held = {
        (rater_of(item, context.rater), item.kind)
        for item, belief in context.claims
        if belief.weight == 0.0
    }
    lines: list[str] = []
    for item in step.feedback:
        reading = read(item)
        name = f"{item.kind.value} {item.event_id}"
        if reading.problem is not None:
            lines.append(f"ignored {name}: {reading.problem}")
        elif item.kind in EXPLICIT_KINDS and item.event_id not in latest:
            lines.append(f"ignored {name}: the same rater gave a later one")
        elif (rater_of(item, context.rater), item.kind) in held and item.event_id not in weighed:
            lines.append(f"ignored {name}: a later one by the same rater is held")
        elif item.kind is FeedbackKind.REVIEW:
            lines.append(f"{name}: {'upheld' if reading.value == 1.0 else 'rejected'}")
    return tuple(lines)


def _overruled(context: StepContext) -> tuple[str, ...]:
    """The signals in the user's words that count nothing beside those the front end sent."""
    if not of_kinds(context.given, SIGNAL_KINDS):
        return ()
    return tuple(
        f"ignored {found.signal.value} in turn {found.turn_id} ({found.detail}): the front end "
        "sent signals on this reply"
        for found in context.signals
        if found.signal is not Signal.TOOL_ERROR
    )


def _directives(context: StepContext) -> tuple[str, ...]:
    """What the user told the model to do instead: as sent, else as said, each text once.

    Of a longer text the first ``MAX_DIRECTIVE_CHARS``.
    """
    sent = of_kinds(context.given, SIGNAL_KINDS)
    if sent:
        texts = [i.text for i, _ in sent if i.kind is FeedbackKind.DIRECTIVE and i.text]
    else:
        texts = [s.content for s in context.signals if s.signal is Signal.DIRECTIVE]
    said = (text.strip()[:MAX_DIRECTIVE_CHARS] for text in texts)
    return tuple(dict.fromkeys(filter(None, said)))


MAX_DIRECTIVE_CHARS = 4_000


def score_segment(
    segment: TrajectorySegment,
    settings: RewardSettings,
    credibility: Mapping[str, Credibility] | None = None,
    repeated: Mapping[str, int] | None = None,
    plugins: Plugins = NO_PLUGINS,
) -> ScoredSegment:
    """Score every step of ``segment``.

    Args:
        segment: What to score.
        settings: The weights.
        credibility: Of feedback, by event id; what is missing is believed.
        repeated: In how many other sessions a reply was used lately, by turn id.
        plugins: Signals and components of other packages.

    Returns:
        The segment with one reward for each step, in order, and whether to train on it.
    """
    around = contexts(segment, settings, credibility or {}, repeated or {}, plugins)
    rewards = tuple(
        [
            score_step(step, context, settings, plugins)
            for step, context in zip(segment.steps, around, strict=True)
        ]
    )
    reason = _untrainable_reason(segment, rewards)
    again = {turn_id: count for turn_id, count in (repeated or {}).items() if count}
    return ScoredSegment(
        segment=segment,
        formula_id=FORMULA_ID,
        config_hash=config_hash(settings),
        trainable=reason is None,
        untrainable_reason=reason,
        rewards=rewards,
        attributes=_attributes(again, rewards, plugins),
    )


def _attributes(
    repeated: Mapping[str, int], rewards: Sequence[StepReward], plugins: Plugins
) -> dict[str, str]:
    if not (repeated or plugins.signals or plugins.components):
        return {}
    failed = {
        line.removeprefix(FAILED_PLUGIN).partition(":")[0]
        for reward in rewards
        for line in reward.reasons
        if line.startswith(FAILED_PLUGIN)
    }
    found = {
        REPEATED_ATTRIBUTE: _json(dict(repeated)) if repeated else "",
        PLUGINS_ATTRIBUTE: plugins.origins,
        PLUGIN_ERRORS_ATTRIBUTE: ",".join(sorted(failed)),
    }
    return {name: value for name, value in found.items() if value}


def score_again(
    scored: ScoredSegment, settings: RewardSettings, plugins: Plugins = NO_PLUGINS
) -> ScoredSegment:
    """Score what ``scored`` holds with other settings.

    How far feedback was believed and how often words were repeated are taken from the record:
    they follow from what was known of others at the time.
    """
    beliefs = {
        item.event_id: Credibility(weight=item.weight, filter=item.filter, reason=item.reason)
        for reward in scored.rewards
        for item in reward.weighed
    }
    repeated = json.loads(scored.attributes.get(REPEATED_ATTRIBUTE, "{}"))
    return score_segment(scored.segment, settings, beliefs, repeated, plugins)


def _untrainable_reason(segment: TrajectorySegment, rewards: Sequence[StepReward]) -> str | None:
    if not segment.steps:
        return "the segment has no reply"
    if all(_is_empty(step) for step in segment.steps):
        return "no reply has any text, tool call or token"
    for reward in rewards:
        if reward.reward != 0.0:
            return None
    if any(reward.credibility < 1.0 for reward in rewards):
        return "all rewards are zero: feedback is held back, see the rewards' reasons"
    if any(c.value is not None for reward in rewards for c in reward.components):
        return "all rewards are zero: what was said for and against adds up to nothing"
    return "all rewards are zero: there is no feedback and no signal on any reply"


def _is_empty(step: Step) -> bool:
    return not (step.reply.strip() or step.tool_calls or step.token_ids)


def config_hash(settings: RewardSettings) -> str:
    """SHA-256 (hex) of the settings as canonical JSON: sorted keys, no spaces."""
    known = _HASHES.get(id(settings))
    # By identity: hashing settings to look them up would take longer than scoring a step.
    if known is not None and known[0] is settings:
        return known[1]
    made = hashlib.sha256(_json(settings.model_dump(mode="json")).encode()).hexdigest()
    if len(_HASHES) >= MAX_HASHES:
        _HASHES.clear()
    _HASHES[id(settings)] = settings, made
    return made


MAX_HASHES = 64
_HASHES: dict[int, tuple[RewardSettings, str]] = {}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def clip(value: float) -> float:
    """``value`` limited to [-1, 1]; never negative zero."""
    return max(-1.0, min(1.0, value)) + 0.0


def _signed(value: float) -> str:
    return f"{value + 0.0:+.3g}" if value else "0"


__all__ = [
    "BELIEVED",
    "CLAIMS",
    "COMPONENTS",
    "EXPLICIT_KINDS",
    "FORMULA_ID",
    "PLUGIN_ERRORS_ATTRIBUTE",
    "Component",
    "ComponentSpec",
    "Credibility",
    "Reading",
    "StepContext",
    "TextSignal",
    "clip",
    "composite",
    "config_hash",
    "contexts",
    "default_rater",
    "dwell_points",
    "follow_up_points",
    "latest_claims",
    "latest_ratings",
    "rater_of",
    "read",
    "of_kinds",
    "readable",
    "score_again",
    "score_segment",
    "score_step",
]
