"""A Confluent-compatible schema registry, as the codec needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.schema_registry_client import (
    ConfigCompatibilityLevel,
    ServerConfig,
)

from streams.errors import SchemaError, UnknownSchemaError
from streams.serde.schemas import SchemaVersion, fingerprint_of, parse_writer_schema

_NOT_FOUND = frozenset({404, 40401, 40402, 40403})
_INCOMPATIBLE = 409
_TIMEOUT_S = 10.0
_SHOWN = 200
"""Of what a registry says, so many characters are shown: it may be a page of HTML."""

_AVRO = "AVRO"
_ADVICE = "check SCHEMA_REGISTRY_URL, or unset it to work without a registry"


@dataclass(frozen=True, slots=True)
class Registered:
    """A version that a subject holds.

    Attributes:
        subject: The subject.
        schema_id: What records that were written with it carry.
        schema: The schema, under the record's name and with the subject's number of it.
    """

    subject: str
    schema_id: int
    schema: SchemaVersion


class ConfluentRegistry:
    """Looks schemas up by id and ids up by schema, each once.

    Args:
        url: The registry's address.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Without a limit a registry that takes a question and never answers would be waited for
        # for ever, in silence.
        self._client = SchemaRegistryClient({"url": url, "timeout": _TIMEOUT_S})
        self._schemas: dict[int, Any] = {}
        self._ids: dict[tuple[str, bytes], int] = {}

    def schema_for(self, schema_id: int) -> Any:
        """See :class:`streams.serde.codec.SchemaIds`."""
        if schema_id not in self._schemas:
            with self._asking(UnknownSchemaError, f"schema id {schema_id} is not in the registry"):
                found = self._client.get_schema(schema_id)
            self._schemas[schema_id] = self._parsed(schema_id, found)
        return self._schemas[schema_id]

    def _parsed(self, schema_id: int, found: Schema) -> Any:
        if not found.schema_str:
            raise self._no_registry(f"it gives no schema for id {schema_id}")
        if (found.schema_type or _AVRO) != _AVRO:
            raise UnknownSchemaError(
                f"schema id {schema_id} in the registry at {self._url} is {found.schema_type}, "
                "not Avro: set the producer's serializer to Avro"
            )
        try:
            return parse_writer_schema(found.schema_str)
        except SchemaError as error:
            # Of this record alone: one who cannot be read must not stop all others.
            raise UnknownSchemaError(
                f"schema id {schema_id} in the registry at {self._url} cannot be used: {error}"
            ) from error

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        """See :class:`streams.serde.codec.SchemaIds`."""
        key = (subject, schema.fingerprint)
        if key not in self._ids:
            missing = (
                f"{schema.record} v{schema.version} is not registered under {subject} "
                "(run `clawstream schemas register`)"
            )
            with self._asking(SchemaError, missing):
                found = self._client.lookup_schema(subject, Schema(schema.text, _AVRO))
            if found.schema_id is None:
                raise self._no_registry(f"it gives no id for {subject}")
            self._ids[key] = found.schema_id
        return self._ids[key]

    def versions(self, subject: str, record: str) -> list[Registered]:
        """Every version that a subject holds, the oldest first; none without such a subject.

        Args:
            subject: The subject.
            record: The record that it is of.

        Raises:
            SchemaError: The registry cannot be reached, or a version is no Avro schema.
        """
        found: list[Registered] = []
        for number in self._numbers(subject):
            with self._asking(SchemaError, f"{subject} version {number} is gone"):
                held = self._client.get_version(subject, number)
            text = held.schema.schema_str
            if not text or held.schema_id is None:
                raise self._no_registry(f"it gives no schema for {subject} version {number}")
            try:
                parsed = parse_writer_schema(text)
            except SchemaError as error:
                raise SchemaError(f"{subject} version {number} at {self._url}: {error}") from error
            version = SchemaVersion(record, number, text, parsed, fingerprint_of(text))
            found.append(Registered(subject, held.schema_id, version))
        return found

    def _numbers(self, subject: str) -> list[int]:
        try:
            with self._asking(_NoSubjectError, subject):
                return sorted(self._client.get_versions(subject))
        except _NoSubjectError:
            return []

    def register(self, subject: str, schema: SchemaVersion) -> int:
        """Register a schema under ``subject``, which is set to FULL_TRANSITIVE first.

        Returns:
            Its id.

        Raises:
            SchemaError: It is incompatible with an earlier one, or the registry cannot be
                reached.
        """
        level = ServerConfig(compatibility=ConfigCompatibilityLevel.FULL_TRANSITIVE)
        with self._asking(SchemaError, f"{subject} cannot be written"):
            self._client.set_config(subject, level)
            try:
                found = self._client.register_schema(subject, Schema(schema.text, _AVRO))
            except SchemaRegistryError as error:
                if error.http_status_code != _INCOMPATIBLE:
                    raise
                raise SchemaError(
                    f"{schema.record} v{schema.version} is not compatible (FULL_TRANSITIVE) with "
                    f"what {subject} holds at {self._url}: {error.error_message}"
                ) from error
        if found is None:
            raise self._no_registry(f"it gives no id for {subject}")
        return found

    @contextmanager
    def _asking(self, missing: type[SchemaError | UnknownSchemaError], what: str) -> Iterator[None]:
        """Make our errors of the client's.

        Args:
            missing: Raised if the registry says that there is no such thing.
            what: Is not there, in words.
        """
        try:
            yield
        except SchemaError:
            raise
        except SchemaRegistryError as error:
            if error.error_code in _NOT_FOUND or error.http_status_code in _NOT_FOUND:
                raise missing(f"{what} at {self._url}") from error
            raise self._refuses(error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # What the client makes of an answer that is none of a registry's.
            raise self._no_registry(f"{type(error).__name__} {error}") from error
        except Exception as error:  # The client lets its HTTP library's errors through.
            raise SchemaError(
                f"the schema registry at {self._url} does not answer ({error}); {_ADVICE}"
            ) from error

    def _refuses(self, error: SchemaRegistryError) -> SchemaError:
        said = " ".join(str(error.error_message).split())[:_SHOWN]
        return SchemaError(
            f"the schema registry at {self._url} answers with HTTP status "
            f"{error.http_status_code}: {said}; {_ADVICE}"
        )

    def _no_registry(self, why: str) -> SchemaError:
        return SchemaError(
            f"what answers at {self._url} is no schema registry that is compatible with "
            f"Confluent's ({why}); {_ADVICE}"
        )


class _NoSubjectError(SchemaError):
    """There is no such subject."""
