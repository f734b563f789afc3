"""What every process does with its log."""

from __future__ import annotations

import logging

from openai import AsyncOpenAI

from streams.process import configure_logging


def test_a_request_to_a_judge_or_policy_server_leaves_no_line_in_the_log() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging()
        sends = type(AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")._client)
        # Whichever library it is: its name has changed before.
        libraries = {kind.__module__.partition(".")[0] for kind in sends.__mro__}
        libraries -= {"openai", "builtins"}
        assert libraries
        for name in libraries:
            assert not logging.getLogger(name).isEnabledFor(logging.INFO)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
