"""The embedded node against a real life: started twice, killed, interrupted, robbed of its port."""

from __future__ import annotations

import pytest

from streams.kafka.embedded import answers

pytestmark = pytest.mark.broker


def test_the_suites_broker_answers(kafka_bootstrap: str) -> None:
    assert answers(kafka_bootstrap, timeout_s=10.0)
