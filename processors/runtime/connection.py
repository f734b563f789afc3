"""Kafka settings in the words of the three clients a worker uses."""

from __future__ import annotations

import ssl
from typing import Any

from streams.errors import SettingsError
from streams.settings import KafkaSettings


def bootstrap_servers(kafka: KafkaSettings) -> str:
    """The brokers' addresses, comma separated.

    Raises:
        SettingsError: None are set.
    """
    if not kafka.bootstrap_servers:
        raise SettingsError(
            "no Kafka address: set kafka.bootstrap_servers or KAFKA_BOOTSTRAP_SERVERS"
        )
    return kafka.bootstrap_servers


def faust_brokers(kafka: KafkaSettings) -> str:
    """The brokers as the URL list that Faust reads."""
    servers = (part.strip() for part in bootstrap_servers(kafka).split(","))
    return ";".join(f"kafka://{server}" for server in servers if server)


def faust_credentials(kafka: KafkaSettings) -> Any:
    """Faust's credentials object, None for a plain connection."""
    # Here, for processes that have no other use for Faust: it takes long to import.
    from faust import SASLCredentials, SSLCredentials

    if kafka.security_protocol.startswith("SASL"):
        return SASLCredentials(
            username=kafka.sasl_username,
            password=_password(kafka),
            mechanism=kafka.sasl_mechanism or "PLAIN",
            ssl_context=_ssl_context(kafka),
        )
    if kafka.security_protocol == "SSL":
        return SSLCredentials(context=_ssl_context(kafka))
    return None


def aiokafka_config(kafka: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments that connect an aiokafka client."""
    config: dict[str, Any] = {
        "bootstrap_servers": bootstrap_servers(kafka),
        "security_protocol": kafka.security_protocol,
        "ssl_context": _ssl_context(kafka),
    }
    if kafka.security_protocol.startswith("SASL"):
        config["sasl_mechanism"] = kafka.sasl_mechanism or "PLAIN"
        config["sasl_plain_username"] = kafka.sasl_username
        config["sasl_plain_password"] = _password(kafka)
    return config


def _password(kafka: KafkaSettings) -> str | None:
    return kafka.sasl_password.get_secret_value() if kafka.sasl_password else None


def _ssl_context(kafka: KafkaSettings) -> ssl.SSLContext | None:
    if not kafka.security_protocol.endswith("SSL"):
        return None
    cafile = str(kafka.ssl_ca_location) if kafka.ssl_ca_location else None
    return ssl.create_default_context(cafile=cafile)
