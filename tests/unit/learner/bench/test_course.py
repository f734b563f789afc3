from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from learner.bench import course, preset, worker
from learner.bench.course import HINT, Course, Talk, thumb_of, turns_of
from learner.bench.figures import rise
from learner.bench.pipeline import DryPipeline
from learner.bench.preset import (
    Job,
    Round,
    Subject,
    align_settings,
    draws_of,
    model_settings,
    reward_settings,
)
from learner.bench.sampling import draw_replies
from learner.bench.users import Opinion
from learner.hints import hint_of
from learner.model import BaseModel, load_base
from streams.contracts import DialogueTurn, FeedbackEvent
from streams.demo.users import Taste
from streams.serde import build_codec
from streams.settings import Mode

RISING_OR_NOT: tuple[Subject, ...] = ("clean", "shuffled")


def job(subject: Subject = "clean", updates: int = 2, **fields: object) -> Job:
    values = {"seed": 1, "replies": 6, "base": "tiny-random", "data_dir": ".", "first_layer": 2}
    return Job(subject=subject, updates=updates, **{**values, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base(model_settings(job()), Path())


def prompts(base: BaseModel) -> list[tuple[int, ...]]:
    return [base.chat.render_prompt([{"role": "user", "content": text}]) for text in ("Hi", "Why?")]


def test_replies_are_drawn_as_the_learner_scores_them(base: BaseModel) -> None:
    drawn = draw_replies(base.model, prompts(base), draws_of(base), seed=3)
    for reply in drawn:
        ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
        logits = base.model(input_ids=ids).logits[0, len(reply.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, dim=1).gather(1, ids[0, -len(logits) :, None])
        assert torch.allclose(torch.tensor(reply.logprobs), expected[:, 0], atol=1e-4)


def test_the_same_seed_draws_the_same_and_leaves_the_global_generator(base: BaseModel) -> None:
    state = torch.random.get_rng_state()
    first = draw_replies(base.model, prompts(base), draws_of(base), seed=3)
    assert draw_replies(base.model, prompts(base), draws_of(base), seed=3) == first
    assert draw_replies(base.model, prompts(base), draws_of(base), seed=4) != first
    assert torch.equal(torch.random.get_rng_state(), state)


def talk(base: BaseModel, at_ms: int) -> Talk:
    reply = draw_replies(base.model, prompts(base)[:1], draws_of(base), seed=1)[0]
    return Talk("s", at_ms, "Hi", base.chat.decode(reply.token_ids), reply)


def test_a_thumb_becomes_the_reward_and_the_tokens_stay(base: BaseModel) -> None:
    pipeline = DryPipeline(build_codec(), align_settings(), reward_settings())
    one = talk(base, at_ms=1_000_000)
    thumb = thumb_of(one, Opinion(-1.0), 1_006_000)
    records: list[DialogueTurn | FeedbackEvent] = [*turns_of(one, base, 4), thumb]
    (scored,) = pipeline.take(records, 2_000_000)
    assert scored.trainable
    assert scored.rewards[0].reward == -1.0
    (step,) = scored.segment.steps
    assert step.token_ids == one.reply.token_ids
    assert step.policy_version == 4


def test_a_late_thumb_comes_as_a_revision(base: BaseModel) -> None:
    pipeline = DryPipeline(build_codec(), align_settings(), reward_settings())
    one = talk(base, at_ms=1_000_000)
    (first,) = pipeline.take(turns_of(one, base, 0), 2_000_000)
    assert not first.trainable
    late = thumb_of(one, Opinion(1.0), 2_500_000)
    (revised,) = pipeline.take([late], 4_000_000)
    assert revised.segment.revision == 1
    assert revised.rewards[0].reward == 1.0


def test_a_hint_follows_the_reply_that_was_disliked(base: BaseModel) -> None:
    pipeline = DryPipeline(build_codec(), align_settings(), reward_settings())
    one = talk(base, at_ms=1_000_000)
    thumb = thumb_of(one, Opinion(-1.0), 1_006_000)
    records: list[DialogueTurn | FeedbackEvent] = [*turns_of(one, base, 4, HINT), thumb]
    (scored,) = pipeline.take(records, 2_000_000)
    (step,) = scored.segment.steps
    assert hint_of(step, scored.rewards[0], "next_user_turn") == HINT
    assert step.token_ids == one.reply.token_ids


@pytest.mark.parametrize("mode", ["grpo", "opd", "hybrid"])
def test_every_mode_learns_in_the_bench(mode: Mode) -> None:
    played = list(Course(job("clean", mode=mode)).rounds())
    assert [one.kl is None for one in played] == [False, False]


def test_only_what_is_judged_is_learned_from() -> None:
    late = list(Course(job("late")).rounds())
    assert [played.kl is None for played in late] == [True, False]
    frozen = list(Course(job("frozen")).rounds())
    assert [played.kl for played in frozen] == [None, None]


def test_honest_opinions_teach_a_taste_and_shuffled_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Met by one in five of the random model's replies.
    monkeypatch.setattr(course, "TASTE", Taste("vowels", re.compile("[aeiou]")))
    monkeypatch.setattr(preset, "LEARNING_RATE", 5e-3)
    monkeypatch.setattr(preset, "KL_COEF", 0.02)
    rises = {
        subject: rise([played.reward for played in Course(big(subject)).rounds()])
        for subject in RISING_OR_NOT
    }
    assert rises["clean"] > 0.25
    assert rises["shuffled"] < rises["clean"] - 0.15


def big(subject: Subject) -> Job:
    return job(subject, updates=8, replies=32, first_layer=0)


def test_a_worker_writes_each_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(asdict(job("frozen"))))
    assert worker.main([str(file)]) == 0
    rounds = [Round(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert [played.update for played in rounds] == [0, 1]


def test_results_reach_the_bench_whatever_a_rival_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = Round(update=0, reward=0.5, kl=None, seconds=1.0)

    def play(_job: Job, on_round: Callable[[Round], None]) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            print("{'noise': 1}")
            on_round(played)

    monkeypatch.setattr(worker, "_player_of", lambda _: play)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(asdict(job("trl_ppo"))))
    worker.main([str(file)])
    (line,) = capsys.readouterr().out.splitlines()
    assert Round(**json.loads(line)) == played
