"""What every subject of the learning bench has in common: model, adapter, draws, update size.

The values were tried on SmolLM2-135M: a rate far above the default, for there are eight to ten
small updates, and an adapter on the upper third of the layers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from learner.bench.sampling import Draws
from learner.bench.users import Condition
from learner.model import BaseModel
from streams.demo.users import TASTES, Taste
from streams.settings import AlignSettings, LearnerSettings, Mode, ModelSettings, RewardSettings

Subject = Literal[
    "clean", "flipped20", "sparse", "late", "frozen", "shuffled", "trl_grpo", "trl_ppo"
]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
RIVALS: tuple[Subject, ...] = ("trl_grpo", "trl_ppo")
CONTROLS: tuple[Subject, ...] = ("frozen", "shuffled")

TASTE: Taste = TASTES["warm"]
TEMPERATURE = 0.7
MAX_NEW_TOKENS = 24
SYSTEM_PROMPT = "You are a helpful assistant."

LORA_RANK = 8
LORA_ALPHA = 16.0
FIRST_LAYER = 20

EPOCHS = 2
MINIBATCHES = 2
LEARNING_RATE = 1e-3
VALUE_LEARNING_RATE = 3e-3
KL_COEF = 0.1
CLIP_COEF = 0.2
MAX_GRAD_NORM = 0.5
LAMBDA = 0.95

SPARSE_USES = 4
"""In how many updates a segment may be used where feedback is sparse; else in one."""

SPARSE_ROUNDS = 3
"""How many times as many updates are made where feedback is sparse: each comes after fewer
ratings, five of 24."""

HINTED_MODES: tuple[Mode, ...] = ("opd", "hybrid")
"""Where words teach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One subject with one seed.

    Attributes:
        subject: Which.
        seed: Of prompts, draws, adapter and users.
        updates: How many.
        replies: Before each update.
        base: The base model, as ``model.base``.
        mode: Of our learner. In `HINTED_MODES` users who dislike a reply say in words what they
            would rather have had.
        data_dir: Where converted models are.
        first_layer: The first that has an adapter.
        threads: Of torch.
    """

    subject: Subject
    seed: int
    updates: int
    replies: int
    base: str
    data_dir: str
    mode: Mode = "ppo"
    first_layer: int = FIRST_LAYER
    threads: int = 1

    @property
    def condition(self) -> Condition:
        """What happens to the feedback."""
        match self.subject:
            case "frozen" | "trl_grpo" | "trl_ppo":
                return "clean"
            case condition:
                return condition

    @property
    def hints(self) -> bool:
        """Whether users say what they would rather have had."""
        return self.mode in HINTED_MODES

    @property
    def minibatch(self) -> int:
        """Replies of one optimizer step, which fit into one forward and backward pass."""
        return max(1, self.replies // MINIBATCHES)

    @property
    def data(self) -> Path:
        """``data_dir`` as a path."""
        return Path(self.data_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The replies before one update, and the update.

    Attributes:
        update: Its number, from 0.
        reward: Mean honest reward of the replies, in [-1, 1].
        kl: Of the policy that wrote them to the base model, k1, nats per reply; None where
            nothing was learned from them.
        seconds: What all of it took.
    """

    update: int
    reward: float
    kl: float | None
    seconds: float


def model_settings(job: Job) -> ModelSettings:
    """Base model and adapter."""
    return ModelSettings(
        base=job.base,
        device="cpu",
        dtype="float32",
        num_threads=job.threads,
        lora_rank=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_first_layer=job.first_layer,
        system_prompt=SYSTEM_PROMPT,
    )


def learner_settings(job: Job) -> LearnerSettings:
    """Our learner's."""
    sparse = job.subject == "sparse"
    return LearnerSettings(
        mode=job.mode,
        opd_hint="next_user_turn",
        batch_segments=job.replies,
        micro_batch_segments=job.minibatch,
        minibatches=MINIBATCHES,
        epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        learning_rate_schedule="constant",
        value_learning_rate=VALUE_LEARNING_RATE,
        kl_coef=KL_COEF,
        clip_coef=CLIP_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        gae_lambda=LAMBDA,
        max_updates_per_segment=SPARSE_USES if sparse else 1,
        seed=job.seed,
    )


def align_settings() -> AlignSettings:
    """The aligner's: the defaults."""
    return AlignSettings()


def reward_settings() -> RewardSettings:
    """The reward's: thumbs are all there is, so they count in full."""
    return RewardSettings(renormalise=True)


def draws_of(base: BaseModel) -> Draws:
    """How replies are drawn."""
    return Draws(
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
        end_token_id=base.chat.eos_token_id,
        pad_token_id=base.chat.pad_token_id,
    )


def draw_seed(job: Job, update: int) -> int:
    """Of the draws before an update: the same for every subject with this seed."""
    return 1_000 * job.seed + update
