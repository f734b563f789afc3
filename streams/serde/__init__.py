"""Records to bytes and back."""

from __future__ import annotations

from streams.serde.codec import Codec, encode_json
from streams.serde.schemas import SchemaStore, SchemaVersion, load_schemas


def build_codec(
    schema_registry_url: str | None = None, *, max_record_bytes: int | None = None
) -> Codec:
    """The codec of this installation's schemas.

    Args:
        schema_registry_url: A Confluent-compatible registry; None writes single-object encoding.
        max_record_bytes: Larger values are refused; None takes any.

    Raises:
        SchemaError: A schema file is missing or broken.
    """
    registry = None
    if schema_registry_url is not None:
        from streams.serde.confluent import ConfluentRegistry

        registry = ConfluentRegistry(schema_registry_url)
    return Codec(load_schemas(), registry, max_record_bytes)


__all__ = ["Codec", "SchemaStore", "SchemaVersion", "build_codec", "encode_json", "load_schemas"]
