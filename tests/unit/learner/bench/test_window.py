from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from learner.bench.window import WindowPlan, conversation, run
from learner.window import Window, segment_tokens
from streams.contracts import SourceRef
from streams.settings import LearnerSettings, ModelSettings, Settings

SMOLLM2 = 49_152
"""Its vocabulary."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_window_of_3_000_such_conversations_is_within_the_token_cap() -> None:
    one = conversation(40, random.Random(0), SMOLLM2)
    assert len(one.segment.steps) == 40
    assert 3_000 * segment_tokens(one) <= LearnerSettings().window_tokens
    prompts = [step.prompt_token_ids or () for step in one.segment.steps]
    assert all(later[: len(prompt)] == prompt for prompt, later in pairwise(prompts))


def test_3_000_conversations_of_40_replies_are_held_in_few_bytes() -> None:
    settings = LearnerSettings()
    held = Window(
        max_segments=settings.window_segments, max_tokens=settings.window_tokens, max_uses=8
    )
    packed = [
        held.pack(
            SourceRef(topic="t", partition=0, offset=n), conversation(40, random.Random(n), SMOLLM2)
        )
        for n in range(20)
    ]
    in_prompts = 0
    for number in range(3_600):
        one = packed[number % len(packed)]
        held.add(replace(one, segment_id=str(number), session_id=str(number)))
    for step in packed[0].open().scored.segment.steps:
        in_prompts += len(step.prompt_token_ids or ())
    assert len(held) == 3_000
    assert 0.9 * settings.window_tokens < held.tokens <= settings.window_tokens
    # As objects the prompts alone take 36 bytes a token: 2.8 GB.
    assert 3_000 * in_prompts * 36 > 2.5e9
    assert held.held_bytes < 60e6


def test_the_bench_measures_appends_while_an_update_runs(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path,
        model=ModelSettings(base="tiny-random", device="cpu"),
        learner=LearnerSettings(batch_segments=8, micro_batch_segments=2, epochs=1),
    )
    steps: list[str] = []
    plan = WindowPlan(segments=30, turns=4, rate=50.0, seconds=2.0)
    report = run(settings, plan, steps.append)
    assert report.subjects["memory"]["segments"] == [30.0]
    assert report.subjects["memory"]["tokens"] == [30.0 * 4 * 32]
    assert report.subjects["idle"]["appends"][0] >= 1
    assert report.subjects["training"]["append_p99_ms"][0] > 0
    assert [goal.name for goal in report.goals] == [
        "segments held",
        "tokens held, share of the cap",
        "growth while the content changed",
        "append p99 ms during an update",
        "longest time between two polls during an update, s",
    ]
    assert report.goals[0].met
    assert report.goals[1].met
    assert len(steps) == 4
