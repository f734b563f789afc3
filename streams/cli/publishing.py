"""How commands put records into the input topics."""

from __future__ import annotations

from collections.abc import Sequence

from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import BrokerError
from streams.gateway.spool import Envelope
from streams.settings import Settings
from streams.topics import FEEDBACK, TURNS


def encode(
    settings: Settings, records: Sequence[DialogueTurn | FeedbackEvent], *, dry_run: bool
) -> tuple[list[Envelope], list[str]]:
    """``records`` as their topics take them, and what they do not take.

    All are encoded before any is published: nothing half-imported is left behind by one that
    cannot be. A dry run needs no schema registry.
    """
    from streams.gateway.limits import largest_records
    from streams.serde import build_codec

    codec = build_codec(None if dry_run else settings.schema_registry_url)
    limits = largest_records(settings)
    envelopes: list[Envelope] = []
    skipped: list[str] = []
    for record in records:
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        key, value = record.session_id.encode(), codec.encode(record, topic)
        if len(key) + len(value) > limits[topic]:
            skipped.append(f"{record.event_id}: larger than {topic} takes ({limits[topic]} bytes)")
        else:
            envelopes.append(Envelope(topic, key, value))
    return envelopes, skipped


def publish(settings: Settings, envelopes: Sequence[Envelope]) -> None:
    """Produce in order and wait for every acknowledgement.

    Raises:
        TopicError: A topic is missing; nothing was published.
        BrokerError: Kafka did not take all of them; importing again is safe.
    """
    from confluent_kafka import KafkaException
    from rich.console import Console
    from rich.progress import track

    from streams.kafka.admin import Admin
    from streams.kafka.clients import make_producer, resolve_bootstrap

    bootstrap = resolve_bootstrap(settings)
    Admin(settings.kafka, bootstrap).require((TURNS, FEEDBACK))
    producer = make_producer(settings.kafka, bootstrap)
    failures: list[str] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failures.append(str(error))

    # Progress goes to stderr: stdout may be read by a machine.
    console = Console(stderr=True)
    for envelope in track(
        envelopes,
        description="publishing",
        transient=True,
        console=console,
        disable=not console.is_terminal,
    ):
        while True:
            try:
                producer.produce(
                    envelope.topic, key=envelope.key, value=envelope.value, on_delivery=delivered
                )
                break
            except BufferError:
                producer.poll(0.1)
            except KafkaException as error:
                told = error.args[0].str()
                raise BrokerError(f"Kafka refused a record of {envelope.topic}: {told}") from error
    unsent = producer.flush(30)
    if unsent or failures:
        raise BrokerError(
            f"Kafka did not take {unsent + len(failures)} of {len(envelopes)} records"
            f"{': ' + failures[0] if failures else ''}; import again, nothing is doubled"
        )


__all__ = ["encode", "publish"]
