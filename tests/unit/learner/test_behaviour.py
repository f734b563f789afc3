"""What the policy server sampled with is what the learner computes, in every turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.adapters import fill_adapter, read_weights
from learner.batch import BuildRules, BuiltSamples, build_samples
from learner.model import BaseModel
from learner.serving.sampling import SamplingParameters
from learner.update import PpoUpdater
from streams.contracts import Sampling, Step
from streams.settings import LearnerSettings
from tests.unit.learner.builders import message, scored, step
from tests.unit.learner.serving.harness import (
    TINY,
    ask,
    make_table,
    running_engine,
    tiny_base,
    write_adapter,
)

TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Talk:
    """A conversation as the aligner passes it on, and the prompts the server really used."""

    steps: tuple[Step, ...]
    prompts: dict[str, tuple[int, ...]]


def talk(base: BaseModel, folder: Path, seed: int, trim: bool = False) -> Talk:
    """Three turns with version 1; only the first step carries its prompt."""
    files = write_adapter(folder, 1, scale=0.2)
    table = make_table(base)
    table.load(1, folder, sha256=files)
    table.go_live(1)
    messages: list[dict[str, Any]] = []
    steps, prompts = [], {}
    with running_engine(base, table) as engine:
        for number, text in enumerate(("Hello é", "More, please.", "世界")):
            messages.append({"role": "user", "content": text})
            prompt = base.render_prompt(messages)
            sampling = SamplingParameters(temperature=TEMPERATURE, seed=10 * seed + number)
            reply = ask(engine, table, prompt, tokens=8, sampling=sampling).wait()
            shown = reply.text.strip() if trim else reply.text
            messages.append({"role": "assistant", "content": shown})
            turn = step(
                shown,
                message(text),
                token_ids=tuple(reply.token_ids),
                behaviour_logprobs=tuple(token.logprob for token in reply.tokens),
                prompt_token_ids=prompt if number == 0 else None,
                sampling=Sampling(temperature=TEMPERATURE),
                policy_version=1,
                finish_reason=reply.finish_reason,
                tokenizer_digest=base.tokenizer_digest,
                template_digest=base.template_digest,
            )
            prompts[turn.turn_id] = prompt
            steps.append(turn)
    return Talk(tuple(steps), prompts)


def built(base: BaseModel, steps: tuple[Step, ...]) -> BuiltSamples:
    return build_samples(
        scored(*steps),
        base.chat,
        tokenizer_digest=base.tokenizer_digest,
        template_digest=base.template_digest,
        rules=BuildRules(max_sequence_tokens=4_096),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_learner_sees_each_reply_as_the_server_sampled_it(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    had = talk(tiny_base(tmp_path), folder, seed, trim=seed == 3)
    base = tiny_base(tmp_path)
    learner = PpoUpdater(base, LearnerSettings(), TINY)
    fill_adapter(learner.network.model, read_weights(folder))
    seen = []
    for one in built(base, had.steps).samples:
        with torch.no_grad():
            scores = learner.network.score([learner.network.row(one)])
        expected = torch.tensor(one.behaviour_logprobs)
        torch.testing.assert_close(scores.logprobs, expected, atol=1e-4, rtol=0)
        assert all(one.behaviour_mask)
        for turn in one.turns:
            assert one.token_ids[: turn.start] == had.prompts[turn.turn_id]
            seen.append(turn.turn_id)
    assert seen == [turn.turn_id for turn in had.steps]


def test_replies_that_tokenize_to_themselves_stay_in_one_sample(tmp_path: Path) -> None:
    base = tiny_base(tmp_path)
    steps = (
        step("Hello.", message("Hi"), token_ids=(*base.chat.encode("Hello."), 2)),
        step("Bye.", message("Go"), token_ids=base.chat.encode("Bye."), finish_reason="length"),
        step("!", message("x"), token_ids=(*base.chat.encode("!"), 2)),
    )
    (one,) = built(base, steps).samples
    assert len(one.turns) == 3
