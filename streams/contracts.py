"""The records that travel between clawstream's processes, as frozen structs.

Every class mirrors one Avro schema of ``schemas/avro`` field for field; what a field means,
and its unit, is written once, in the ``doc`` of that schema. Times are milliseconds since
the Unix epoch, UTC. A contract test holds both sides together.

Arrays are tuples and records are frozen, so a record can be shared and kept in state without
anybody changing it behind another's back; ``msgspec.structs.replace`` makes a changed copy.
msgspec makes a struct several times faster than Python a frozen dataclass. ``gc=False``: a
record refers to nothing that could refer back to it, so the garbage collector need not look.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field


class _Growing(StrEnum):
    """An enum that can grow: a symbol of a later version reads as ``unknown``."""

    @classmethod
    def _missing_(cls, value: object) -> _Growing | None:
        return cls.__members__.get("UNKNOWN") if isinstance(value, str) else None


class Role(_Growing):
    UNKNOWN = "unknown"
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TurnType(_Growing):
    UNKNOWN = "unknown"
    MAIN = "main"
    SIDE = "side"


class FeedbackKind(_Growing):
    UNKNOWN = "unknown"
    THUMB = "thumb"
    RATING = "rating"
    CORRECTION = "correction"
    CONFIRMATION = "confirmation"
    REPETITION = "repetition"
    DIRECTIVE = "directive"
    DWELL = "dwell"
    FOLLOW_UP = "follow_up"
    COPY = "copy"
    REGENERATE = "regenerate"
    ABANDON = "abandon"
    OUTCOME = "outcome"
    RETRACTION = "retraction"
    REVIEW = "review"
    JUDGEMENT = "judgement"


class ClosedBy(_Growing):
    UNKNOWN = "unknown"
    END = "end"
    GAP = "gap"
    SIZE = "size"
    DURATION = "duration"


class AttributedBy(_Growing):
    UNKNOWN = "unknown"
    TURN_ID = "turn_id"
    TIME = "time"


class VersionStatus(_Growing):
    UNKNOWN = "unknown"
    CANDIDATE = "candidate"
    LIVE = "live"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    RETIRED = "retired"


class DeadLetterReason(_Growing):
    UNKNOWN = "unknown"
    NULL_VALUE = "null_value"
    UNDECODABLE = "undecodable"
    UNKNOWN_SCHEMA = "unknown_schema"
    OVERSIZED = "oversized"
    INVALID = "invalid"
    FUTURE_TIMESTAMP = "future_timestamp"
    CONFLICTING_DUPLICATE = "conflicting_duplicate"
    BEYOND_HORIZON = "beyond_horizon"
    UNMATCHED_FEEDBACK = "unmatched_feedback"
    PROCESSING_ERROR = "processing_error"


class ControlAction(_Growing):
    UNKNOWN = "unknown"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    ROLLBACK = "rollback"


class EncryptionEnvelope(Struct, frozen=True, kw_only=True, gc=False):
    """Reserved: content under a key that can be destroyed (``forget-user``)."""

    key_id: str
    algorithm: str
    nonce: bytes
    ciphertext: bytes


class ToolCall(Struct, frozen=True, kw_only=True, gc=False):
    """One call of a tool that an assistant turn asks for."""

    id: str
    name: str
    arguments: str


class Sampling(Struct, frozen=True, kw_only=True, gc=False):
    """How the tokens of an assistant turn were drawn."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None


class DialogueTurn(Struct, frozen=True, kw_only=True, gc=False):
    """One turn of a conversation (topic ``dialogue.turns``, key ``session_id``)."""

    event_id: str
    session_id: str
    turn_id: str
    role: Role
    content: str
    event_time: int
    source: str
    policy: str = "default"
    parent_turn_id: str | None = None
    request_id: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    user_id: str | None = None
    turn_type: TurnType = TurnType.MAIN
    session_done: bool = False
    model: str | None = None
    policy_version: int | None = None
    token_ids: tuple[int, ...] | None = None
    behaviour_logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    finish_reason: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    encryption: EncryptionEnvelope | None = None


class FeedbackEvent(Struct, frozen=True, kw_only=True, gc=False):
    """One sign of how a reply was received (topic ``dialogue.feedback``, key ``session_id``)."""

    event_id: str
    session_id: str
    event_time: int
    kind: FeedbackKind
    source: str
    policy: str = "default"
    turn_id: str | None = None
    value: float | None = None
    text: str | None = None
    tags: tuple[str, ...] = ()
    supersedes: str | None = None
    user_id: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    encryption: EncryptionEnvelope | None = None


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """A turn as context: what was said, without what only its author needs."""

    turn_id: str
    role: Role
    content: str
    event_time: int
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    carried: bool = False


class StepFeedback(Struct, frozen=True, kw_only=True, gc=False):
    """Feedback as shown on the reply it was attributed to."""

    event_id: str
    kind: FeedbackKind
    event_time: int
    delay_ms: int
    attributed_by: AttributedBy
    source: str
    value: float | None = None
    text: str | None = None
    tags: tuple[str, ...] = ()
    supersedes: str | None = None
    user_id: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class BranchReply(Struct, frozen=True, kw_only=True, gc=False):
    """A reply off the continued branch: an alternative, or one nobody continued."""

    turn_id: str
    reply: str
    event_time: int
    policy_version: int | None = None
    feedback: tuple[StepFeedback, ...] = ()


class Step(Struct, frozen=True, kw_only=True, gc=False):
    """One reply of the continued branch with what it answered and what came back."""

    turn_id: str
    reply: str
    event_time: int
    context: tuple[Message, ...] = ()
    tool_calls: tuple[ToolCall, ...] | None = None
    model: str | None = None
    policy_version: int | None = None
    token_ids: tuple[int, ...] | None = None
    behaviour_logprobs: tuple[float, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Sampling | None = None
    finish_reason: str | None = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    feedback: tuple[StepFeedback, ...] = ()
    alternatives: tuple[BranchReply, ...] = ()
    next_user_turn: Message | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class SourceRef(Struct, order=True, frozen=True, kw_only=True, gc=False):
    """The coordinates of one source record."""

    topic: str
    partition: int
    offset: int


class TrajectorySegment(Struct, frozen=True, kw_only=True, gc=False):
    """A closed, aligned run of steps of one session (topic ``trajectory.segments``)."""

    segment_id: str
    revision: int
    session_id: str
    source: str
    ordinal: int
    closed_by: ClosedBy
    closed_at: int
    first_closed_at: int
    settle_ms: int
    first_event_time: int
    last_event_time: int
    digest: str
    policy: str = "default"
    user_id: str | None = None
    steps: tuple[Step, ...] = ()
    off_branch: tuple[BranchReply, ...] = ()
    lineage: tuple[SourceRef, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    encryption: EncryptionEnvelope | None = None


class RewardComponent(Struct, frozen=True, kw_only=True, gc=False):
    """One part of a step's reward: its value in [-1, 1], its weight and what it rests on."""

    name: str
    weight: float
    value: float | None = None
    evidence: tuple[str, ...] = ()


class FeedbackWeight(Struct, frozen=True, kw_only=True, gc=False):
    """How far a piece of feedback was believed, and which filter said so."""

    event_id: str
    weight: float
    filter: str
    reason: str


class StepReward(Struct, frozen=True, kw_only=True, gc=False):
    """The reward of one step, with everything a person needs to understand it."""

    turn_id: str
    reward: float
    credibility: float = 1.0
    components: tuple[RewardComponent, ...] = ()
    reasons: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    weighed: tuple[FeedbackWeight, ...] = ()


class ScoredSegment(Struct, frozen=True, kw_only=True, gc=False):
    """A segment and its rewards (topic ``trajectory.scored``)."""

    segment: TrajectorySegment
    formula_id: str
    config_hash: str
    trainable: bool
    untrainable_reason: str | None = None
    rewards: tuple[StepReward, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)


class ReviewRequest(Struct, frozen=True, kw_only=True, gc=False):
    """Feedback that counts nothing until a person decides (topic ``reward.reviews``)."""

    event_id: str
    session_id: str
    segment_id: str
    turn_id: str
    feedback_event_ids: tuple[str, ...]
    reason: str
    event_time: int
    policy: str = "default"
    user_id: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class OffsetRange(Struct, frozen=True, kw_only=True, gc=False):
    """Source records ``start`` (inclusive) to ``end`` (exclusive) of one partition."""

    topic: str
    partition: int
    start: int
    end: int


class GateDecision(Struct, frozen=True, kw_only=True, gc=False):
    """One check a version had to pass before it could go live."""

    name: str
    passed: bool
    value: float | None = None
    threshold: float | None = None
    detail: str | None = None


class ModelVersion(Struct, frozen=True, kw_only=True, gc=False):
    """A policy version and all it came from (topic ``model.versions``, key ``policy``)."""

    event_id: str
    version: int
    status: VersionStatus
    base_model_id: str
    base_model_digest: str
    tokenizer_digest: str
    template_digest: str
    event_time: int
    policy: str = "default"
    parent: int | None = None
    previous_live: int | None = None
    adapter_uri: str | None = None
    adapter_files: dict[str, str] = field(default_factory=dict)
    adapter_rank: int | None = None
    adapter_alpha: float | None = None
    source_offsets: tuple[OffsetRange, ...] = ()
    segment_count: int = 0
    segments_digest: str | None = None
    behaviour_versions: dict[str, int] = field(default_factory=dict)
    optimizer_step: int = 0
    config_hash: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    gate: tuple[GateDecision, ...] = ()
    reason: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class RecordHeader(Struct, frozen=True, kw_only=True, gc=False):
    """One Kafka record header."""

    key: str
    value: bytes | None = None


class DeadLetter(Struct, frozen=True, kw_only=True, gc=False):
    """A record that could not be used, kept as it was (topic ``pipeline.dead_letters``)."""

    stage: str
    reason: DeadLetterReason
    message: str
    topic: str
    partition: int
    offset: int
    time: int
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[RecordHeader, ...] = ()
    timestamp: int | None = None
    attributes: dict[str, str] = field(default_factory=dict)


class ControlCommand(Struct, frozen=True, kw_only=True, gc=False):
    """What a person told the pipeline to do (topic ``pipeline.control``)."""

    event_id: str
    command: ControlAction
    target: str
    actor: str
    event_time: int
    reason: str | None = None
    policy: str = "default"
    attributes: dict[str, str] = field(default_factory=dict)


Record = (
    DialogueTurn
    | FeedbackEvent
    | TrajectorySegment
    | ScoredSegment
    | ReviewRequest
    | ModelVersion
    | DeadLetter
    | ControlCommand
)
"""Any record that is the value of one of our topics."""

RECORD_TYPES: tuple[type[Record], ...] = (
    DialogueTurn,
    FeedbackEvent,
    TrajectorySegment,
    ScoredSegment,
    ReviewRequest,
    ModelVersion,
    DeadLetter,
    ControlCommand,
)

TICK_HEADER = "clawstream-tick"
"""A record with a null value and this header only moves the aligner's clock."""
