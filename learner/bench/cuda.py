"""``clawstream bench cuda-check``: does the learner compute the same on a GPU, and use it?

Needs a CUDA device, torch, transformers and peft, and nothing that is downloaded: the model has
SmolLM2-135M's shape and random weights. Everything runs in this process, in a few minutes.

1. One update in float32 on the device against the same update on the CPU: log-probabilities
   before it, the gradient of its single step, and what it reports.
2. Updates in bfloat16, with the bare passes beside them: tokens a second, and the share of the
   device's own matrix speed that the training passes reach (MFU). On a GPU the same updates with
   the decoder's layers compiled, too: whether that pays there.
3. The bound on the device's memory: what updates took, and that more is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from learner.bench.ours import OurUpdate, load
from learner.bench.rivals import vocabulary_of
from learner.bench.rollouts import SHAPE_OF_SMOLLM2, SpeedJob, rollouts_of
from learner.bench.speed_worker import measure
from learner.model import TINY
from streams.bench.environment import OnStep
from streams.bench.machine import describe_machine
from streams.bench.report import Goal, Metrics, Report, ratios_to
from streams.errors import BenchError

AGREEMENT = 1e-3
"""How far numbers of the device may be from those of the CPU; relative where above 1."""

MEMORY_FRACTION = 0.5

_MATRIX = 8_192
_MATRIX_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPlan:
    """What is checked.

    Attributes:
        device: ``cuda``; ``cpu`` runs what can be run without one.
        tiny: Take a tiny model and few tokens.
        repetitions: How often speed is measured.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    tiny: bool = False
    repetitions: int = 3

    @property
    def agreeing(self) -> SpeedJob:
        """The update that CPU and device make both: a single step, small enough for a CPU."""
        return SpeedJob(
            subject="ours",
            base=TINY if self.tiny else SHAPE_OF_SMOLLM2,
            data_dir=".",
            rollouts=4,
            prompt_tokens=32,
            reply_tokens=32,
            epochs=1,
            micro_batch=4,
            threads=0,
        )

    @property
    def measured(self) -> SpeedJob:
        """The update whose speed is measured."""
        cuda = self.device == "cuda"
        return replace(
            self.agreeing,
            rollouts=8 if self.tiny else 128,
            prompt_tokens=16 if self.tiny else 256,
            reply_tokens=16 if self.tiny else 256,
            epochs=2,
            micro_batch=4 if self.tiny else 32,
            device=self.device,
            dtype="bfloat16" if cuda else "float32",
            memory_fraction=MEMORY_FRACTION if cuda else 1.0,
        )

    @property
    def speed_jobs(self) -> dict[str, SpeedJob]:
        """Whose speed is measured, by name."""
        jobs = {"ours": self.measured, "ceiling": replace(self.measured, subject="ceiling")}
        if self.device == "cuda":
            # On a CPU compiling takes minutes and gains nothing.
            jobs["ours_compiled"] = replace(self.measured, compiled=True)
        return jobs


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What one update computed, on the CPU.

    Args:
        logprobs: ``[tokens]``, of the replies before the update.
        gradient: Of its single step, all of the adapter's in one vector.
        metrics: What it reported.
    """

    logprobs: torch.Tensor
    gradient: torch.Tensor
    metrics: Mapping[str, float]


def run(plan: CudaPlan, on_step: OnStep) -> Report:
    """Check everything.

    Raises:
        BenchError: There is no CUDA device, and the plan wants one.
    """
    require_device(plan.device)
    machine = describe_machine() | _describe(plan.device)
    on_step("one update on the CPU and on the device")
    differences = compared(trace(plan.agreeing), trace(replace(plan.agreeing, device=plan.device)))
    # In thousandths: they are too small to be told apart on the screen otherwise.
    apart = {f"{name} differs by, 1e-3": value * 1e3 for name, value in differences.items()}
    goals = [Goal(name, AGREEMENT * 1e3, value, at_most=True) for name, value in apart.items()]
    subjects: dict[str, Metrics] = {"agreement": {name: [v] for name, v in apart.items()}}
    subjects |= _speeds(plan, on_step)
    if plan.device == "cuda":
        on_step("the bound on the device's memory")
        goals.extend(_memory_goals(max(subjects["ours"]["peak_mb"])))
    others = [name for name in plan.speed_jobs if name != "ours"]
    ratios = ratios_to(subjects, "ours", "tokens_per_s", others)
    return Report(
        bench="cuda-check", machine=machine, subjects=subjects, ratios=ratios, goals=goals
    )


def require_device(device: str) -> None:
    """See that the device is there.

    Raises:
        BenchError: It is not.
    """
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        raise BenchError(
            "this check needs a CUDA device and a torch that sees it (torch "
            f"{torch.__version__}, built for CUDA {built}, sees none): run it on a machine with "
            "an NVIDIA GPU and its driver; nothing is downloaded. --device cpu --tiny tries what "
            "can be tried without one"
        )


def trace(job: SpeedJob) -> Trace:
    """One update of one step in float32, and what it computed."""
    # Else a GPU would multiply with 10 bits of mantissa, and rightly differ.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        update = OurUpdate(job)
        rollouts = rollouts_of(job, vocabulary_of(update.base))
        network = update.updater.network
        run_update = update.prepared(rollouts)
        with torch.no_grad():
            rows = [network.row(sample) for sample in update.samples]
            logprobs = network.score(rows).logprobs.cpu()
        metrics = run_update().metrics
    finally:
        torch.set_float32_matmul_precision(before)
    return Trace(logprobs, torch.cat(list(_first_moments(update))), metrics)


def _first_moments(update: OurUpdate) -> Iterator[torch.Tensor]:
    """After one step of Adam the first moments are the clipped gradient, by a factor."""
    state = update.updater.state_dict()["optimizer"]["state"]
    adapter = len(update.updater.network.adapter_parameters())
    for index in range(adapter):
        yield state[index]["exp_avg"].flatten().cpu()


def compared(ours: Trace, theirs: Trace) -> dict[str, float]:
    """How far two traces are apart: the largest difference of log-probabilities (nats), the
    length of the gradients' difference over that of the first, and the largest difference of a
    reported number, over its size where that is above 1."""
    gap = (ours.gradient - theirs.gradient).norm() / ours.gradient.norm().clamp(min=1e-12)
    return {
        "log-probability": float((ours.logprobs - theirs.logprobs).abs().max()),
        "gradient": float(gap),
        "metrics": max(
            abs(value - theirs.metrics[name]) / max(1.0, abs(value))
            for name, value in ours.metrics.items()
        ),
    }


def _speeds(plan: CudaPlan, on_step: OnStep) -> dict[str, Metrics]:
    matrix = _matrix_flops(plan.measured)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in plan.speed_jobs}
    for number in range(1, plan.repetitions + 1):
        for subject, job in plan.speed_jobs.items():
            on_step(f"{subject}: repetition {number} of {plan.repetitions}")
            values = measure(job)
            values["mfu"] = values["tokens_per_s"] * flops_per_token(job) / matrix
            for metric, value in values.items():
                found[subject].setdefault(metric, []).append(value)
    return {**found, "matrix": {"tflops": [matrix / 1e12]}}


def flops_per_token(job: SpeedJob) -> float:
    """Of the training passes alone, per token of the rollouts.

    Forward and backward take 2 operations per weight each: the weights themselves are frozen,
    so that only activations have gradients. The output layer sees the replies' tokens alone.
    Attention and adapter are left out, and so are the passes without gradient.
    """
    base = load(replace(job, device="cpu", dtype="float32", memory_fraction=1.0))
    head: int = base.model.get_output_embeddings().weight.numel()
    blocks: int = sum(p.numel() for p in base.model.parameters()) - head
    rollouts = rollouts_of(job, vocabulary_of(base))
    replies = sum(len(one.reply) for one in rollouts) / sum(map(len, rollouts))
    return 4.0 * job.epochs * (blocks + replies * head)


def _matrix_flops(job: SpeedJob) -> float:
    """Operations a second of one large product of matrices on the device, in its precision."""
    size = _MATRIX if job.device == "cuda" else _MATRIX // 8
    dtype = torch.bfloat16 if job.dtype == "bfloat16" else torch.float32
    left = torch.randn(size, size, device=job.device, dtype=dtype)
    right = torch.randn_like(left)
    _ = left @ right
    _wait(job.device)
    began_s = time.perf_counter()
    for _ in range(_MATRIX_RUNS):
        _ = left @ right
    _wait(job.device)
    operations: float = 2.0 * _MATRIX_RUNS * size * size * size
    return operations / (time.perf_counter() - began_s)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory_goals(peak_mb: float) -> list[Goal]:
    total = torch.cuda.get_device_properties(0).total_memory
    taken = peak_mb * 2**20 / total
    refused = 0.0
    try:
        torch.empty(int(total * min(1.0, MEMORY_FRACTION + 0.1)), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        refused = 1.0
    return [
        Goal("share of the memory taken", MEMORY_FRACTION, taken, at_most=True),
        Goal("more memory is refused", 1.0, refused),
    ]


def _describe(device: str) -> dict[str, object]:
    if device != "cuda":
        return {"device": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "device_memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


__all__ = ["AGREEMENT", "CudaPlan", "Trace", "compared", "flops_per_token", "require_device", "run"]
