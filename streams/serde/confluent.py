"""A Confluent-compatible schema registry, as the codec needs it."""

from __future__ import annotations

from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.schema_registry_client import (
    ConfigCompatibilityLevel,
    ServerConfig,
)

from streams.errors import SchemaError, UnknownSchemaError
from streams.serde.schemas import SchemaVersion, parse_writer_schema

_NOT_FOUND = frozenset({404, 40401, 40402, 40403})
_INCOMPATIBLE = 409


class ConfluentRegistry:
    """Looks schemas up by id and ids up by schema, each once.

    Args:
        url: The registry's address.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = SchemaRegistryClient({"url": url})
        self._schemas: dict[int, Any] = {}
        self._ids: dict[tuple[str, bytes], int] = {}

    def schema_for(self, schema_id: int) -> Any:
        """See :class:`streams.serde.codec.SchemaIds`."""
        if schema_id not in self._schemas:
            try:
                text = self._client.get_schema(schema_id).schema_str
            except SchemaRegistryError as error:
                if error.error_code in _NOT_FOUND or error.http_status_code in _NOT_FOUND:
                    raise UnknownSchemaError(
                        f"schema id {schema_id} is not in the registry at {self._url}"
                    ) from error
                raise self._unreachable(error) from error
            except Exception as error:  # the client lets its HTTP library's errors through
                raise self._unreachable(error) from error
            self._schemas[schema_id] = parse_writer_schema(text or "")
        return self._schemas[schema_id]

    def id_for(self, subject: str, schema: SchemaVersion) -> int:
        """See :class:`streams.serde.codec.SchemaIds`."""
        key = (subject, schema.fingerprint)
        if key not in self._ids:
            try:
                found = self._client.lookup_schema(subject, Schema(schema.text, "AVRO"))
            except SchemaRegistryError as error:
                if error.error_code in _NOT_FOUND or error.http_status_code in _NOT_FOUND:
                    raise SchemaError(
                        f"{schema.record} v{schema.version} is not registered under {subject} "
                        f"at {self._url}: run `clawstream schemas register`"
                    ) from error
                raise self._unreachable(error) from error
            except Exception as error:
                raise self._unreachable(error) from error
            self._ids[key] = _id_of(found.schema_id, subject)
        return self._ids[key]

    def register(self, subject: str, schema: SchemaVersion) -> int:
        """Register a schema under ``subject``, which is set to FULL_TRANSITIVE first.

        Returns:
            Its id.

        Raises:
            SchemaError: It is incompatible with an earlier one, or the registry cannot be
                reached.
        """
        level = ServerConfig(compatibility=ConfigCompatibilityLevel.FULL_TRANSITIVE)
        try:
            self._client.set_config(subject, level)
            return self._client.register_schema(subject, Schema(schema.text, "AVRO"))
        except SchemaRegistryError as error:
            if error.http_status_code == _INCOMPATIBLE:
                raise SchemaError(
                    f"{schema.record} v{schema.version} is not compatible (FULL_TRANSITIVE) with "
                    f"what {subject} holds at {self._url}: {error.error_message}"
                ) from error
            raise self._unreachable(error) from error
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> SchemaError:
        return SchemaError(
            f"the schema registry at {self._url} does not answer ({error}); check "
            "SCHEMA_REGISTRY_URL, or unset it to work without a registry"
        )


def _id_of(schema_id: int | None, subject: str) -> int:
    if schema_id is None:
        raise SchemaError(f"the schema registry gave no id for {subject}")
    return schema_id
