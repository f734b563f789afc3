from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.bench.cuda import CudaPlan, Trace, compared, flops_per_token, trace
from learner.bench.rivals import vocabulary_of
from learner.bench.rollouts import rollouts_of
from learner.bench.shape import load_shape
from learner.model import take_share
from streams.cli import main
from streams.settings import ModelSettings

TINY = CudaPlan(device="cpu", tiny=True)


def test_what_needs_no_gpu_runs_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--repetitions", "1", "--json", str(file)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "cuda-check", *arguments])
    assert end.value.code == 0, capsys.readouterr()
    report = json.loads(file.read_text())
    assert report["bench"] == "cuda-check"
    assert [goal["value"] for goal in report["goals"]] == [0.0, 0.0, 0.0]
    assert all(goal["met"] for goal in report["goals"])
    assert 0 < report["subjects"]["ours"]["mfu"][0] < 1
    assert report["subjects"]["ceiling"]["tokens_per_s"][0] > 0


def test_compiled_layers_are_measured_on_a_gpu_alone() -> None:
    assert list(CudaPlan().speed_jobs) == ["ours", "ceiling", "ours_compiled"]
    assert CudaPlan().speed_jobs["ours_compiled"].learner.compile_layers
    assert list(TINY.speed_jobs) == ["ours", "ceiling"]


def test_without_a_gpu_it_fails_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "cuda-check"]) != 0
    assert "needs a CUDA device" in capsys.readouterr().err


def test_updates_that_differ_are_told_apart() -> None:
    one = trace(TINY.agreeing)
    assert compared(one, trace(TINY.agreeing)) == dict.fromkeys(compared(one, one), 0.0)
    assert one.gradient.norm() > 0
    louder = replace(one, logprobs=one.logprobs * 1.01, gradient=one.gradient * 0.99)
    other = compared(one, louder)
    assert other["log-probability"] > 1e-3
    assert other["gradient"] == pytest.approx(0.01, rel=1e-3)


def test_differences_are_relative_where_numbers_are_large() -> None:
    def made(logprob: float, gradient: float, metric: float) -> Trace:
        return Trace(torch.tensor([-1.0, logprob]), torch.tensor([gradient]), {"m": metric})

    found = compared(made(-2.0, 4.0, 100.0), made(-2.5, 3.0, 101.0))
    assert found == {"log-probability": 0.5, "gradient": 0.25, "metrics": pytest.approx(0.01)}


def test_operations_are_counted_for_training_passes_and_chosen_tokens() -> None:
    job = TINY.agreeing
    rollouts = rollouts_of(job, 259)
    replies = sum(len(one.reply) for one in rollouts) / sum(map(len, rollouts))
    one_pass = flops_per_token(job)
    assert flops_per_token(replace(job, epochs=3)) == pytest.approx(3 * one_pass)
    blocks = one_pass / 4 - replies * 259 * 32
    # Four layers of width 32: attention 2 x 32 x 32 + 2 x 32 x 16, feed-forward 3 x 32 x 48.
    assert blocks == pytest.approx(4 * (3_072 + 4_608 + 64) + 32)


def test_the_shape_is_that_of_smollm2() -> None:
    base = load_shape(ModelSettings(device="cpu"))
    assert sum(p.numel() for p in base.model.parameters()) == 134_515_008
    assert vocabulary_of(base) == 49_152


def test_a_share_of_the_gpu_is_asked_for_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    settings = ModelSettings(cuda_memory_fraction=0.4)
    take_share(settings, torch.device("cpu"))
    assert asked == []
    take_share(settings, torch.device("cuda"))
    take_share(ModelSettings(), torch.device("cuda"))
    assert asked == [0.4]
