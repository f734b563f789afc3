from __future__ import annotations

import re
from pathlib import Path

import pytest

from learner.bench.trl_env import environment


@pytest.mark.parametrize(("subject", "version"), [("trl_ppo", "1.12.0"), ("trl_grpo", "1.16.0")])
def test_the_locks_hold_what_trl_needs_with_hashes_and_no_address(
    subject: str, version: str
) -> None:
    text = environment(subject, Path()).lock.read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    assert versions["trl"] == version
    assert {"torch", "transformers", "peft", "datasets", "msgspec", "pydantic-settings"} <= set(
        versions
    )
    assert text.count("--hash=sha256:") > len(versions)
    assert "://" not in text
