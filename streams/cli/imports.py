"""``clawstream import``: exports of other chat products, into the input topics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from streams.cli.common import print_json, settings_of
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.errors import BrokerError, ImportFormatError
from streams.settings import Settings

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Import exports of other chat products."
)


@app.callback()
def _group() -> None:
    """Import exports of other chat products."""


@app.command("open-webui")
def open_webui(
    ctx: typer.Context,
    file: Path = typer.Argument(help="The JSON file of Open WebUI's feedback export."),
    policy: str = typer.Option("default", help="The policy these conversations belong to."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Read and count, publish nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Import Open WebUI's ratings with the chats they belong to."""
    from streams.importers.open_webui import read_open_webui

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ImportFormatError(f"cannot read {file}: {error.strerror}") from error
    try:
        imported = read_open_webui(data, policy=policy)
    except ImportFormatError as error:
        raise ImportFormatError(f"{file}: {error}") from error
    if not dry_run:
        _publish(settings_of(ctx), [*imported.turns, *imported.feedback])
    counts = {
        "turns": len(imported.turns),
        "feedback": len(imported.feedback),
        "skipped": list(imported.skipped),
        "published": not dry_run,
    }
    if as_json:
        print_json(counts)
        return
    verb = "found" if dry_run else "imported"
    typer.echo(f"{verb} {counts['turns']} turns and {counts['feedback']} feedback events")
    for reason in imported.skipped:
        typer.echo(f"skipped {reason}", err=True)


def _publish(settings: Settings, records: Sequence[DialogueTurn | FeedbackEvent]) -> None:
    """Produce ``records`` in order and wait for every acknowledgement.

    Raises:
        BrokerError: Kafka did not take all of them; importing again is safe.
    """
    from confluent_kafka import KafkaException
    from rich.progress import track

    from streams.kafka.clients import make_producer, resolve_bootstrap
    from streams.serde import build_codec
    from streams.topics import FEEDBACK, TURNS

    codec = build_codec(
        settings.schema_registry_url, max_record_bytes=settings.kafka.max_message_bytes
    )
    producer = make_producer(settings.kafka, resolve_bootstrap(settings))
    failures: list[str] = []

    def delivered(error: object, _message: object) -> None:
        if error is not None:
            failures.append(str(error))

    for record in track(records, description="publishing", transient=True):
        topic = TURNS if isinstance(record, DialogueTurn) else FEEDBACK
        value = codec.encode(record, topic)
        while True:
            try:
                producer.produce(
                    topic, key=record.session_id.encode(), value=value, on_delivery=delivered
                )
                break
            except BufferError:
                producer.poll(0.1)
            except KafkaException as error:
                raise BrokerError(f"Kafka refused {record.event_id}: {error}") from error
    unsent = producer.flush(30)
    if unsent or failures:
        raise BrokerError(
            f"Kafka did not take {unsent + len(failures)} of {len(records)} records"
            f"{': ' + failures[0] if failures else ''}; import again, nothing is doubled"
        )
