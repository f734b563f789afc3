"""Settings: one typed file plus the environment, loaded once, frozen.

Order, first wins: environment, the file, the preset that either names, the defaults below.
Every key can be set in the environment as ``CLAWSTREAM_<SECTION>__<KEY>``; the four addresses
also answer to the short names that DESIGN gives them (``KAFKA_BOOTSTRAP_SERVERS``,
``SCHEMA_REGISTRY_URL``, ``REGISTRY_URL``, ``ARTIFACTS_URL``). Unknown keys and unknown
``CLAWSTREAM_`` names are refused, so that a misspelt setting never passes for a default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from streams.errors import SettingsError
from streams.yamlfile import read_yaml

LARGEST_INT = 2**53
"""Larger numbers are slips, and not the same in every language that reads them."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Points = Annotated[float, Field(ge=-10, le=10)]
Praise = Annotated[float, Field(ge=0, le=10)]
Blame = Annotated[float, Field(ge=-10, le=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]


def _http_url(value: str) -> str:
    for url in value.split(","):
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""An address, or several with commas between them, as text."""

Preset = Literal["customer-service", "personal-assistant", "game-npc"]
"""Settings for a kind of dialogue, under the user's own: a file of this name in ``presets``."""

PRESETS: tuple[str, ...] = get_args(Preset)

ENV_PREFIX = "CLAWSTREAM_"
PRESET_ENV = "CLAWSTREAM_PRESET"
"""Names the preset; stands above the file's ``preset``."""
CONFIG_ENV = "CLAWSTREAM_CONFIG"
"""Names the settings file, for processes that are started without ``--config``."""

_PRESET_FOLDER = Path(__file__).parent / "presets"


class Amounts(dict[str, float]):
    """Numbers by name that nobody changes, so that settings with them can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys, and true or false for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError(f"must not be {str(value).lower()}; put text in quotes")
        if isinstance(value, Mapping):
            for name, item in value.items():
                if isinstance(item, bool):
                    raise ValueError(f"{name} must not be {str(item).lower()}; put text in quotes")
        return value


def _outcome_names(outcomes: dict[str, float]) -> dict[str, float]:
    """Names that an outcome can have: it is compared without the blanks around it."""
    for name in outcomes:
        if not name or name != name.strip():
            raise ValueError(f"{name!r} cannot be an outcome's name: empty, or blanks around it")
    return outcomes


class KafkaSettings(Section):
    """How to reach Kafka."""

    bootstrap_servers: str | None = None
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_ca_location: Path | None = None
    session_timeout_ms: PositiveInt = 10_000
    max_message_bytes: PositiveInt = 8 * 1024 * 1024


class AlignSettings(Section):
    """The aligner's rules (ALIGNMENT.md, Settings)."""

    settle_ms: NonNegativeInt = 30_000
    gap_ms: PositiveInt = 300_000
    max_open_ms: PositiveInt = 1_800_000
    max_steps: PositiveInt = 16
    max_bytes: PositiveInt = 64 * 1024
    attribution_window_ms: NonNegativeInt = 600_000
    orphan_wait_ms: NonNegativeInt = 3_600_000
    horizon_ms: PositiveInt = 86_400_000
    max_skew_ms: NonNegativeInt = 60_000
    max_context_bytes: NonNegativeInt = 32 * 1024

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.settle_ms <= self.gap_ms <= self.max_open_ms:
            raise ValueError("settle_ms <= gap_ms <= max_open_ms must hold")
        if self.max_open_ms < self.settle_ms + self.max_skew_ms:
            raise ValueError("max_open_ms >= settle_ms + max_skew_ms must hold")
        if self.horizon_ms < self.max_open_ms + self.orphan_wait_ms:
            raise ValueError("horizon_ms >= max_open_ms + orphan_wait_ms must hold")
        return self


class WorkerSettings(Section):
    """How the Faust workers run."""

    tick_interval_ms: PositiveInt = 250
    max_batch_records: PositiveInt = 5_000
    max_buffered_records: PositiveInt = 20_000
    body_cache_bytes: PositiveInt = 64 * 1024 * 1024
    hot_sessions: NonNegativeInt = 20_000
    processor_processes: NonNegativeInt = 2
    group_instance_id: str | None = None
    web_host: str = "127.0.0.1"
    align_web_port: Port = 0
    reward_web_port: Port = 0


class RewardSettings(Section):
    """Weights and filters of the reward (DESIGN §5; docs/rewards.md explains every key)."""

    weight_explicit: Share = 0.4
    weight_implicit: Share = 0.3
    weight_business: Share = 0.3
    renormalise: bool = False
    process_continued: Share = 0.0
    process_details: Share = 0.0
    weight_diversity: Share = 0.2
    diversity_free: NonNegativeInt = 3
    diversity_full: PositiveInt = 12
    diversity_replies: PositiveInt = 256
    weight_judge: Share = 0.0
    text_signals: bool = True
    learned_signals: bool = True
    tool_errors: bool = True
    repetition: Blame = -0.8
    correction: Blame = -1.2
    confirmation: Praise = 0.5
    tool_error: Blame = -0.5
    decay: Share = 0.9
    repetition_similarity: PositiveShare = 0.8
    dwell_saturation_ms: PositiveInt = 60_000
    follow_up_saturation: PositiveInt = 2
    implicit_dwell: Points = 0.5
    implicit_follow_up: Points = 0.3
    implicit_copy: Points = 0.8
    implicit_regenerate: Points = -0.8
    implicit_abandon: Points = -1.0
    negatives_in_a_row: PositiveInt = 3
    rate_departure: Share = 0.3
    rate_departure_weight: Share = 0.5
    rate_window: PositiveInt = 5
    rate_history_min: PositiveInt = 10
    filter_row: bool = True
    filter_departure: bool = True
    filter_flood: bool = True
    filter_burst: bool = True
    filter_contradiction: bool = True
    cohort_suspension: bool = True
    crowd_window_ms: PositiveInt = 3_600_000
    flood_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 5.0
    flood_claims_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 15.0
    flood_ratings_min: PositiveInt = 20
    flood_raters_min: PositiveInt = 5
    flood_source_windows_min: Annotated[int, Field(ge=1, le=168)] = 24
    burst_ratings: Annotated[int, Field(ge=2)] = 10
    burst_texts: Annotated[int, Field(ge=2)] = 5
    burst_window_ms: PositiveInt = 60_000
    contradiction_share: Annotated[float, Field(gt=0.5, le=1)] = 0.8
    contradiction_ratings_min: PositiveInt = 5
    contradiction_others_min: Annotated[int, Field(ge=2)] = 3
    cohort_raters_min: Annotated[int, Field(ge=2)] = 5
    cohort_share: PositiveShare = 0.3
    verified_sources: tuple[str, ...] = ()
    plugin_signals: Annotated[dict[str, Points], AfterValidator(Amounts)] = Amounts()
    plugin_components: Annotated[dict[str, Share], AfterValidator(Amounts)] = Amounts()
    history_ratings: PositiveInt = 64
    history_segments: PositiveInt = 128
    history_ms: PositiveInt = 30 * 86_400_000
    nonzero_share_alarm: Share = 0.05

    @model_validator(mode="after")
    def _diversity_rises(self) -> Self:
        if self.diversity_full <= self.diversity_free:
            raise ValueError(
                f"diversity_full must be above diversity_free ({self.diversity_free}), "
                f"not {self.diversity_full}"
            )
        return self

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = self.weight_explicit + self.weight_implicit + self.weight_business
        if abs(total - 1.0) > 1e-9:
            raise ValueError(
                f"weight_explicit + weight_implicit + weight_business must be 1, not "
                f"{self.weight_explicit:g} + {self.weight_implicit:g} + {self.weight_business:g} "
                f"= {total:g}; set all three"
            )
        return self

    @model_validator(mode="after")
    def _history_reaches(self) -> Self:
        needed = max(self.negatives_in_a_row, self.rate_window + self.rate_history_min)
        if self.history_ratings < needed:
            raise ValueError(
                f"history_ratings must be at least {needed} (the larger of negatives_in_a_row "
                f"and rate_window + rate_history_min), not {self.history_ratings}"
            )
        return self


class JudgeSettings(Section):
    """The judge of replies (``clawstream judge``; docs/judge.md explains every key).

    ``url`` is an OpenAI-compatible endpoint up to ``/v1``; ``plugin`` names a judge of another
    package instead. ``rubric`` is a file; the one that is shipped if it is null.
    """

    url: HttpUrl | None = None
    api_key: SecretStr | None = None
    model: str = "default"
    plugin: str | None = None
    rubric: Path | None = None
    votes: PositiveInt = 3
    temperature: NonNegativeFloat = 0.7
    max_tokens: PositiveInt = 256
    concurrency: PositiveInt = 8
    timeout_ms: PositiveInt = 30_000
    tries: PositiveInt = 2
    breaker_failures: PositiveInt = 5
    breaker_pause_ms: PositiveInt = 60_000
    max_waiting: PositiveInt = 256
    web_port: Port = 0

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.url is not None and self.plugin is not None:
            raise ValueError("url and plugin are two judges; name one")
        return self

    @property
    def is_named(self) -> bool:
        """Whether there is a judge."""
        return self.url is not None or self.plugin is not None


class ModelSettings(Section):
    """The base model, shared by learner and policy server.

    ``cuda_memory_fraction`` bounds what a process may take of a GPU's memory, so that learner
    and policy server can share one. ``weights: 4bit`` keeps the frozen base weights in 4 bits; it
    needs CUDA and bitsandbytes.
    """

    base: str = "smollm2-135m"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["full", "4bit"] = "full"
    num_threads: NonNegativeInt = 0
    cuda_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    lora_rank: PositiveInt = 8
    lora_alpha: PositiveFloat = 16.0
    lora_first_layer: NonNegativeInt = 0
    system_prompt: str | None = None


Tracker = Literal[
    "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"
]
"""Tools for curves that accelerate knows, by its names."""


Mode = Literal["ppo", "grpo", "opd", "hybrid"]
"""Where advantages come from (docs/learning.md)."""


class LearnerSettings(Section):
    """Window, schedule and update of the learner (DESIGN §6).

    ``clip_coef_high`` widens the upper clip bound alone (``clip_coef`` where it is null);
    ``negative_advantage_weight`` scales the policy loss of tokens worse than expected;
    ``detach_value`` keeps the value loss out of the adapter; ``digest_mismatch`` says what
    becomes of turns recorded under another tokenizer or chat template. ``mode`` says where
    advantages come from; the ``hybrid_`` weights are read in mode ``hybrid`` alone. What each
    setting does, with its equation: docs/learning.md.
    """

    policy: str = "default"
    mode: Mode = "ppo"
    hybrid_ppo_weight: NonNegativeFloat = 0.0
    hybrid_grpo_weight: NonNegativeFloat = 1.0
    hybrid_opd_weight: NonNegativeFloat = 1.0
    grpo_group: Literal["update", "version"] = "update"
    opd_hint: Literal["directive", "next_user_turn"] = "directive"
    opd_teacher: Literal["policy", "reference"] = "policy"
    opd_max_hint_tokens: PositiveInt = 256
    opd_advantage_bound: PositiveFloat = 5.0
    window_segments: PositiveInt = 3_000
    window_tokens: PositiveInt = 4_000_000
    min_sample_size: PositiveInt = 64
    update_segments: PositiveInt = 256
    update_interval_ms: NonNegativeInt = 300_000
    update_max_interval_ms: PositiveInt = 1_800_000
    max_updates: NonNegativeInt = 0
    batch_segments: PositiveInt = 128
    micro_batch_segments: PositiveInt = 8
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 2
    learning_rate: PositiveFloat = 5e-6
    learning_rate_floor: PositiveFloat = 5e-7
    learning_rate_schedule: Literal["constant", "linear", "quadratic"] = "linear"
    learning_rate_decay_updates: PositiveInt = 1_000
    learning_rate_warmup_updates: NonNegativeInt = 0
    value_learning_rate: PositiveFloat = 1e-4
    kl_coef: NonNegativeFloat = 0.2
    clip_coef: PositiveFloat = 0.15
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    value_clip: PositiveFloat = 0.2
    vf_coef: NonNegativeFloat = 0.5
    ent_coef: NonNegativeFloat = 0.0
    gamma: Share = 1.0
    gae_lambda: Share = 0.95
    max_grad_norm: PositiveFloat = 0.5
    target_kl: PositiveFloat | None = None
    importance_weight_cap: PositiveFloat = 2.0
    stale_objective: Literal["decoupled", "behaviour"] = "decoupled"
    max_version_gap: NonNegativeInt = 4
    max_updates_per_segment: PositiveInt = 8
    max_updates_per_session: PositiveInt = 8
    max_sequence_tokens: PositiveInt = 2_048
    whiten_advantages: bool = True
    seed: int = 0
    clip_coef_high: PositiveFloat | None = None
    negative_advantage_weight: Share = 1.0
    detach_value: bool = True
    gradient_checkpointing: bool = False
    compile_layers: bool = False
    logprob_chunk_tokens: PositiveInt = 256
    measure_every: PositiveInt = 4
    digest_mismatch: Literal["refuse", "rerender"] = "refuse"
    interrupted_replies: Literal["skip", "train"] = "skip"
    warm_start_epochs: PositiveInt = 1
    warm_start_batch: PositiveInt = 16
    warm_start_learning_rate: PositiveFloat = 1e-4
    warm_start_beta: PositiveFloat = 0.1
    warm_start_chosen_weight: NonNegativeFloat = 1.0
    warm_start_save_steps: PositiveInt = 50
    gate_max_kl: PositiveFloat = 1.0
    keep_checkpoints: PositiveInt = 5
    trackers: tuple[Tracker, ...] = ()
    tracker_dir: Path | None = None
    web_port: Port = 0
    imbalance_max_share: Share = 0.9
    imbalance_min_sign_share: Annotated[float, Field(ge=0, le=0.5)] = 0.1

    @model_validator(mode="after")
    def _require_a_weight(self) -> Self:
        weights = (self.hybrid_ppo_weight, self.hybrid_grpo_weight, self.hybrid_opd_weight)
        if self.mode == "hybrid" and not any(weights):
            raise ValueError(
                "mode hybrid needs one of hybrid_ppo_weight, hybrid_grpo_weight and "
                "hybrid_opd_weight above 0"
            )
        return self

    @model_validator(mode="after")
    def _require_that_it_can_learn(self) -> Self:
        if self.min_sample_size > self.window_segments:
            raise ValueError(
                f"min_sample_size is {self.min_sample_size}, but the window holds "
                f"{self.window_segments} (window_segments): no update would ever be due"
            )
        if self.stale_objective == "behaviour" and self.importance_weight_cap < 1.0:
            raise ValueError(
                f"importance_weight_cap is {self.importance_weight_cap:g}: with stale_objective "
                "behaviour it bounds the ratio, and below 1 nothing would be learned from bad "
                "replies"
            )
        return self

    @property
    def mode_weights(self) -> tuple[float, float, float]:
        """The weights of ppo, grpo and opd in an update's advantages."""
        if self.mode == "hybrid":
            return self.hybrid_ppo_weight, self.hybrid_grpo_weight, self.hybrid_opd_weight
        return float(self.mode == "ppo"), float(self.mode == "grpo"), float(self.mode == "opd")

    @property
    def hint(self) -> Literal["directive", "next_user_turn"] | None:
        """Where hints come from; None if nothing is learned from them."""
        return self.opd_hint if self.mode_weights[2] > 0 else None


class ServeSettings(Section):
    """The policy server.

    ``max_new_tokens`` is the longest reply to a request that names no limit. An adapter that
    could not be loaded is tried again after ``adapter_retry_ms``; ``startup_wait_ms`` bounds
    how long the first request waits for the versions in Kafka, ``shutdown_grace_ms`` how long
    running replies may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Port = 8001
    policy: str = "default"
    max_batch: PositiveInt = 8
    max_prefill_tokens: PositiveInt = 4_096
    batch_wait_ms: NonNegativeInt = 10
    max_new_tokens: PositiveInt = 256
    keep_versions: PositiveInt = 3
    adapter_retry_ms: PositiveInt = 30_000
    startup_wait_ms: NonNegativeInt = 15_000
    shutdown_grace_ms: PositiveInt = 5_000


class GatewaySettings(Section):
    """The HTTP front door.

    ``outcomes`` says what each named outcome is worth (docs/front-ends.md).

    ``request_timeout_ms`` bounds each wait for the policy server or a client: for its next
    bytes, or until it takes ours. Larger requests than ``max_body_bytes`` are refused.

    ``api_keys`` are keys by the name of the source that they prove. Of these sources only
    ``deciding_sources`` may send reviews and judgements, which decide about the rewards of others.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    upstream_url: HttpUrl = "http://127.0.0.1:8001/v1"
    upstream_api_key: SecretStr | None = None
    policy: str = "default"
    source: str = "gateway"
    spool_dir: Path | None = None
    request_timeout_ms: PositiveInt = 120_000
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    api_keys: dict[str, SecretStr] = Field(default_factory=dict)
    deciding_sources: tuple[str, ...] = ()
    outcomes: Annotated[
        dict[str, Annotated[float, Field(ge=-1, le=1)]], AfterValidator(_outcome_names)
    ] = Field(
        default_factory=lambda: {"bought": 1.0, "solved": 1.0, "unsolved": -1.0, "returned": -1.0}
    )

    @model_validator(mode="after")
    def _deciding_sources_have_keys(self) -> Self:
        if unknown := sorted(set(self.deciding_sources) - set(self.api_keys)):
            raise ValueError(f"deciding_sources: {', '.join(unknown)} has no key in api_keys")
        return self


class DemoSettings(Section):
    """The simulated users of ``clawstream demo``."""

    preference: Literal["warm", "you"] = "warm"
    sessions: PositiveInt = 8
    turns_per_session: PositiveInt = 4
    target_versions: PositiveInt = 2
    feedback_delay_ms_max: PositiveInt = 45_000
    temperature: PositiveFloat = 0.7
    time_limit_s: PositiveInt = 540
    seed: int = 7


class ArchiveSettings(Section):
    """Where topics are archived, and when a file is finished (docs/archive.md).

    ``url`` is a folder or what fsspec takes (``s3://bucket/prefix``); ``options`` are passed to
    its file system. A file is finished at ``roll_bytes`` before compression, or ``roll_ms`` after
    its first record came.
    """

    url: str | None = None
    options: dict[str, str] = {}
    roll_bytes: PositiveInt = 64 * 1024 * 1024
    roll_ms: PositiveInt = 600_000


class Settings(BaseSettings):
    """Everything that can be configured."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        populate_by_name=True,
    )

    preset: Preset | None = None
    data_dir: Path = Path(".clawstream")
    schema_registry_url: HttpUrl | None = Field(
        default=None,
        validation_alias=AliasChoices("SCHEMA_REGISTRY_URL", "schema_registry_url"),
    )
    registry_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("REGISTRY_URL", "registry_url")
    )
    artifacts_url: str | None = Field(
        default=None, validation_alias=AliasChoices("ARTIFACTS_URL", "artifacts_url")
    )
    kafka: KafkaSettings = KafkaSettings()
    align: AlignSettings = AlignSettings()
    worker: WorkerSettings = WorkerSettings()
    reward: RewardSettings = Field(default=RewardSettings(), validate_default=True)
    judge: JudgeSettings = JudgeSettings()
    model: ModelSettings = ModelSettings()
    learner: LearnerSettings = LearnerSettings()
    serve: ServeSettings = ServeSettings()
    gateway: GatewaySettings = GatewaySettings()
    demo: DemoSettings = DemoSettings()
    archive: ArchiveSettings = ArchiveSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # The file's values arrive as init arguments; the environment stands above them.
        return env_settings, init_settings

    @field_validator("reward")
    @classmethod
    def _history_outlives_revisions(
        cls, reward: RewardSettings, others: ValidationInfo
    ) -> RewardSettings:
        align = others.data.get("align")
        if align is not None and reward.history_ms < (
            needed_ms := align.horizon_ms + align.settle_ms
        ):
            raise ValueError(
                f"history_ms must be at least {needed_ms} (align.horizon_ms + align.settle_ms), "
                f"not {reward.history_ms}: a revision would show ratings that were held and are "
                "forgotten as new ones, and they would count"
            )
        return reward

    @property
    def effective_registry_url(self) -> str:
        """The version registry's address; SQLite in the data folder unless one is set."""
        if self.registry_url is not None:
            return self.registry_url.get_secret_value()
        return f"sqlite:///{(self.data_dir / 'registry.db').absolute()}"

    @property
    def effective_artifacts_url(self) -> str:
        """Where adapter files are kept; a folder in the data folder unless one is set."""
        return self.artifacts_url or (self.data_dir / "artifacts").absolute().as_uri()

    @property
    def effective_archive_url(self) -> str:
        """Where topics are archived; a folder in the data folder unless one is set."""
        return self.archive.url or str((self.data_dir / "archive").absolute())


def write_settings(values: Mapping[str, Any], path: Path) -> None:
    """Leave settings in a file for another process; only the user may read it.

    Args:
        values: What to write, as ``model_dump()`` gives it: secrets are written as they are.
        path: The YAML file.
    """
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(yaml.safe_dump(_plain(values)), encoding="utf-8")


def _plain(value: Any) -> Any:
    """What YAML can hold."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def load_settings(
    path: Path | None = None, *, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings file (if any) and the environment.

    Args:
        path: A YAML file; ``CLAWSTREAM_CONFIG`` names one if this is None.
        environ: The environment to check for unknown names; the process's own if None.

    Raises:
        SettingsError: A key or an environment name is unknown, or a value cannot be used.
            The message names the key's path.
    """
    env = os.environ if environ is None else environ
    if path is None and env.get(CONFIG_ENV):
        path = Path(env[CONFIG_ENV])
    _refuse_unknown_names(env)
    values = _read_file(path) if path is not None else {}
    name = env.get(PRESET_ENV) or values.get("preset")
    if name in PRESETS:
        values = _over(_read_file(_PRESET_FOLDER / f"{name}.yaml"), values)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError(explain_error(error, path, environ=env)) from None
    except SourceError as error:
        # What it could not read may be a secret: the library names the section only, so do we.
        raise SettingsError(
            f"environment: {error}: a section or a mapping must be JSON, for example "
            'CLAWSTREAM_GATEWAY__API_KEYS=\'{"web": "KEY"}\''
        ) from None
    if settings.kafka.bootstrap_servers is None and env.get("KAFKA_BOOTSTRAP_SERVERS"):
        kafka = settings.kafka.model_copy(
            update={"bootstrap_servers": env["KAFKA_BOOTSTRAP_SERVERS"]}
        )
        settings = settings.model_copy(update={"kafka": kafka})
    return settings


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, sections key by key; what is in both is as it is above."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[key] = _over(known, value)
        else:
            merged[key] = value
    return merged


def _read_file(path: Path) -> dict[str, Any]:
    loaded = read_yaml(path)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(
            f"{path} must hold a mapping of sections, not a {type(loaded).__name__}"
        )
    return {str(key): value for key, value in loaded.items()}


def _known_names() -> set[str]:
    names = {CONFIG_ENV}
    for name, info in Settings.model_fields.items():
        names.add(f"{ENV_PREFIX}{name.upper()}")
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            names.update(
                f"{ENV_PREFIX}{name.upper()}__{key.upper()}" for key in annotation.model_fields
            )
    return names


def _refuse_unknown_names(env: Mapping[str, str]) -> None:
    known = _known_names()
    unknown = sorted(n for n in env if n.startswith(ENV_PREFIX) and n.upper() not in known)
    if unknown:
        hints = "".join(_nearest(name, known) for name in unknown)
        raise SettingsError(
            f"unknown environment name {', '.join(unknown)}{hints}: settings are named "
            f"{ENV_PREFIX}<SECTION>__<KEY>, for example CLAWSTREAM_ALIGN__SETTLE_MS"
        )


def explain_error(
    error: ValidationError,
    path: Path | None,
    *,
    within: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> str:
    """A line for each key that cannot be used: where it is set, its path and what is wrong.

    Args:
        error: What validation found.
        path: The file; "settings" if None.
        within: The section that was validated, if it was not all of the settings.
        environ: The environment, if it stands above the file.
    """
    where = str(path) if path is not None else "settings"
    outer = () if within is None else (within,)
    lines: list[str] = []
    for item in error.errors(include_input=False, include_url=False):
        place = (*outer, *item["loc"])
        name = ".".join(map(str, place)) or "(top level)"
        source = _set_by(place, environ or {}) or where + _partly_set_by(place, environ or {})
        lines.append(f"{source}: {name}: {_problem(item, place)}")
    return "\n".join(lines)


def _set_by(place: tuple[Any, ...], environ: Mapping[str, str]) -> str | None:
    """The environment's name that sets the key at ``place``, if one does."""
    known = {name.upper(): name for name in environ}
    for depth in (2, 1):
        found = known.get(ENV_PREFIX + "__".join(map(str, place[:depth])).upper())
        if found is not None and len(place) >= depth:
            return f"environment: {found}"
    return None


def _partly_set_by(place: tuple[Any, ...], environ: Mapping[str, str]) -> str:
    """The environment's names that set keys of the section at ``place``."""
    if len(place) != 1:
        return ""
    start = f"{ENV_PREFIX}{place[0]}__".upper()
    names = sorted(name for name in environ if name.upper().startswith(start))
    return f" and the environment ({', '.join(names)})" if names else ""


def _problem(item: Mapping[str, Any], place: tuple[Any, ...]) -> str:
    if item["type"] == "extra_forbidden":
        *sections, key = place
        return f"unknown key{_nearest(str(key), _keys_of(sections))}"
    if item["type"] == "model_type":
        return "must be a mapping of its keys"
    return str(item["msg"]).removeprefix("Value error, ")


def _keys_of(sections: list[Any]) -> set[str]:
    model: Any = Settings
    for name in sections:
        model = model.model_fields[name].annotation
    return set(model.model_fields)


def _nearest(name: str, known: set[str]) -> str:
    """The known name that was probably meant, in words; nothing if none is near."""
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


__all__ = [
    "AlignSettings",
    "ArchiveSettings",
    "DemoSettings",
    "GatewaySettings",
    "JudgeSettings",
    "KafkaSettings",
    "LearnerSettings",
    "ModelSettings",
    "RewardSettings",
    "ServeSettings",
    "Settings",
    "WorkerSettings",
    "explain_error",
    "load_settings",
    "write_settings",
]
