"""Every error clawstream raises.

::

    ClawstreamError
    ├── SettingsError          a configuration key is unknown or its value cannot be used
    ├── RecordError            a record cannot be used; carries topic, partition, offset
    │   ├── NullValueError     it has no value and is no tick
    │   ├── UndecodableError   its bytes are not one of the three wire forms
    │   ├── UnknownSchemaError its schema id or fingerprint is not known here
    │   ├── InvalidRecordError it decodes, but breaks its contract
    │   └── OversizedError     it is larger than the topic takes
    ├── SchemaError            a schema file is broken or incompatible
    ├── TopicError             the cluster's topics differ from topics.yaml in a way that is refused
    ├── BrokerError            Kafka cannot be reached, started or stopped
    ├── StateError             state cannot be restored or written
    ├── TransitionError        the aligner was asked for a step that its rules do not have
    ├── FencedError            a successor took over; this worker must stop
    ├── RegistryError          the version registry cannot be used
    ├── ArtifactError          adapter files are missing or damaged
    ├── ModelError             a model or adapter cannot be loaded
    ├── LearnerError           an update cannot be made
    │   ├── UpdateStoppedError it was interrupted; nothing has changed
    │   └── TrainingFileError  a file of labelled examples cannot be used
    ├── ProcessError           one of the learner's processes lost the others
    ├── ServingError           the policy server cannot do what it was asked to
    │   ├── UnknownModelError  no version of that name is loaded
    │   └── RequestRefusedError a field of a request is wrong or asks for what is not done here
    ├── ForbiddenError         who asks for it may not have it done
    ├── RewardError            a review, segment or weight that was named cannot be used
    │   ├── PluginError        a plugin is missing or is not what its kind needs
    │   └── JudgeError         the judge cannot be asked, or its answer is no verdict
    │       ├── JudgeBusyError the judge says that it is asked too much
    │       └── JudgeRefusedError the judge is there, but does not take this question
    ├── DeadLetterError        a dead letter cannot be found, retried or marked
    ├── ArchiveError           an archive cannot be written, or a topic not be restored from it
    │   └── DamagedArchiveError a file of an archive is cut short or altered
    ├── ReplayError            a part of the log cannot be replayed as asked
    ├── ExportError            there is nothing to export, or it cannot be written
    ├── SpoolError             events can be kept neither in Kafka nor on the gateway's disk
    ├── ImportFormatError      an export file is not what its importer reads
    └── BenchError             a bench cannot measure what it is to measure

A message names what, where and what to do. Errors of the libraries underneath are mapped to
these at the edge where they appear.
"""

from __future__ import annotations

from streams.contracts import DeadLetterReason


class ClawstreamError(Exception):
    """Base of all errors raised by clawstream."""


class SettingsError(ClawstreamError):
    """A configuration key is unknown, or its value cannot be used."""


class RecordError(ClawstreamError):
    """A record cannot be used.

    Args:
        message: What is wrong with it.
        topic: Where it was read, if known.
        partition: Its partition, if known.
        offset: Its offset, if known.
    """

    reason: DeadLetterReason = DeadLetterReason.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        topic: str | None = None,
        partition: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.detail = message
        self.topic = topic
        self.partition = partition
        self.offset = offset
        super().__init__(message)

    def at(self, topic: str, partition: int, offset: int) -> RecordError:
        """This error with the coordinates of the record it is about."""
        return type(self)(self.detail, topic=topic, partition=partition, offset=offset)

    def __str__(self) -> str:
        if self.topic is None:
            return self.detail
        return f"{self.detail} (topic={self.topic} partition={self.partition} offset={self.offset})"


class NullValueError(RecordError):
    """A record has no value and is no tick."""

    reason = DeadLetterReason.NULL_VALUE


class UndecodableError(RecordError):
    """A record's bytes are not one of the three wire forms."""

    reason = DeadLetterReason.UNDECODABLE


class UnknownSchemaError(RecordError):
    """A record names a schema id or fingerprint that is not known here."""

    reason = DeadLetterReason.UNKNOWN_SCHEMA


class InvalidRecordError(RecordError):
    """A record decodes, but breaks its contract."""

    reason = DeadLetterReason.INVALID


class OversizedError(RecordError):
    """A record is larger than its topic takes."""

    reason = DeadLetterReason.OVERSIZED


class SchemaError(ClawstreamError):
    """A schema file is broken or incompatible."""


class TopicError(ClawstreamError):
    """The cluster's topics differ from the inventory in a way that is refused."""


class BrokerError(ClawstreamError):
    """Kafka cannot be reached, started or stopped."""


class StateError(ClawstreamError):
    """A processor's state cannot be restored or written."""


class TransitionError(ClawstreamError):
    """The aligner was asked for a step that its rules do not have."""


class FencedError(ClawstreamError):
    """A successor took over this partition; nothing more may be written for it."""


class RegistryError(ClawstreamError):
    """The version registry cannot be used."""


class ArtifactError(ClawstreamError):
    """Adapter files are missing or damaged."""


class ModelError(ClawstreamError):
    """A model or adapter cannot be loaded."""


class LearnerError(ClawstreamError):
    """An update cannot be made."""


class UpdateStoppedError(LearnerError):
    """An update was interrupted because the learner is to stop; nothing has changed."""


class ProcessError(ClawstreamError):
    """One of the learner's processes cannot go on with the others, or they cannot with it."""


class TrainingFileError(LearnerError):
    """A file of labelled examples cannot be read or used; the message names file and line."""


class ServingError(ClawstreamError):
    """The policy server cannot do what it was asked to."""


class UnknownModelError(ServingError):
    """No version of that name is loaded."""


class ForbiddenError(ClawstreamError):
    """Who asks for it may not have it done."""


class RequestRefusedError(ServingError):
    """A field of a request is wrong, or asks for what is not done here.

    Args:
        message: What is wrong and what would be right.
        param: The field, as a path (``messages.0.content``).
        code: A short name for the case, for programs.
    """

    def __init__(self, message: str, *, param: str | None, code: str = "invalid_value") -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class RewardError(ClawstreamError):
    """A review request, a segment or a weight that was named cannot be used."""


class PluginError(RewardError):
    """A plugin is missing, or is not what its kind needs."""


class JudgeError(RewardError):
    """The judge cannot be asked, or what it answers is no verdict."""


class JudgeBusyError(JudgeError):
    """The judge says that it is asked too much, and perhaps when to ask again.

    Args:
        message: What it says.
        retry_after_s: In how many seconds it may be asked again; None if it does not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JudgeRefusedError(JudgeError):
    """The judge is there, but does not take this question; asking again would not help."""


class DeadLetterError(ClawstreamError):
    """A dead letter cannot be found, retried or marked."""


class ArchiveError(ClawstreamError):
    """An archive cannot be written, or a topic cannot be restored from it."""


class DamagedArchiveError(ArchiveError):
    """A file of an archive is cut short or altered; the message names it."""


class ExportError(ClawstreamError):
    """There is nothing to export, or it cannot be written."""


class SpoolError(ClawstreamError):
    """Events can be kept neither in Kafka nor on the gateway's disk."""


class ImportFormatError(ClawstreamError):
    """An export file is not what its importer reads."""


class ReplayError(ClawstreamError):
    """A part of the log cannot be replayed as it was asked for."""


class BenchError(ClawstreamError):
    """A bench cannot measure what it is to measure."""
