"""The table of loaded policy versions, and the model whose rows may each use another one.

Versions are immutable: ``{policy}-v{N}`` names the same weights for ever, version 0 is the
base. ``live`` (and the policy's own name) is an alias that moves. A request binds a version
when it is admitted and holds it to its end.

What may happen beside a running forward, and what may not:

- Adding or deleting an adapter that no row of the forward names is exact: every layer looks
  its rows' adapters up by name.
- Changing the active adapter, disabling adapters, or wrapping a layer that was not wrapped is
  silently wrong. So every linear layer of the blocks is wrapped once, before the first
  request, and an adapter that wants another layer is refused. The active adapter is an idle
  one that is never changed and never used.
- The library's own way of naming adapters per row walks over all modules at each forward,
  which a load in another thread can break. Here each layer has one permanent hook that reads
  the names of the current forward.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from learner.adapters import ADAPTER_FILES, load_adapter, read_config, read_weights, verify_files
from learner.model import BaseModel
from learner.serving.metrics import ServeMetrics
from streams.clock import Clock
from streams.errors import ArtifactError, ModelError, ServingError, UnknownModelError

log = logging.getLogger(__name__)

LIVE = "live"
BASE_ADAPTER = "__base__"
_IDLE = "idle"
_REFUSED_FEATURES = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
    "target_parameters",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """One immutable version.

    Args:
        version: Its number; 0 is the base.
        name: ``{policy}-v{version}``, or the base model's name.
        adapter: What the layers know it by.
        root: Where its files are.
        parent: The model it adapts; None for the base.
        fingerprint: The SHA-256 of each of its files; empty for the base.
        loaded_at_ms: When it came into memory.
    """

    version: int
    name: str
    adapter: str
    root: str
    parent: str | None = None
    fingerprint: str = ""
    loaded_at_ms: int = 0


class Binding:
    """A version held for one request, so that it stays loaded."""

    def __init__(self, table: AdapterTable, version: PolicyVersion) -> None:
        self._table = table
        self._held = True
        self.version = version

    def release(self) -> None:
        """Let go of the version. Further calls do nothing."""
        held, self._held = self._held, False
        if held:
            self._table._release(self.version)


class _CurrentRows:
    """The adapter of each row of the running forward, read by every layer's hook."""

    def __init__(self) -> None:
        self.adapters: list[str] = []

    def hook(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        return args, {**kwargs, "adapter_names": self.adapters}


class AdapterTable:
    """Loads, names, holds and unloads versions; runs forwards over rows of mixed versions.

    All methods but ``forward`` may be called from any thread; ``forward`` from one only. A
    load takes a few tenths of a second and holds up neither forwards nor ``bind``.

    Args:
        base: The base model. It is wrapped in place and belongs to the table from here on.
        policy: The policy whose versions are served.
        keep_versions: How many adapters stay loaded when nothing uses them, the live one
            included; the last one loaded always does.
        metrics: Where it counts.
        clock: Tells when a version was loaded.

    Raises:
        ModelError: The model uses other than full attention, whose caches rows of different
            ages cannot share here, or has no linear layers to adapt.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        policy: str,
        keep_versions: int,
        metrics: ServeMetrics,
        clock: Clock,
    ) -> None:
        model: nn.Module = base.model
        _require_full_attention(model)
        self.policy = policy
        self._autocast = base.autocast
        self._metrics = metrics
        self._clock = clock
        self._keep_versions = keep_versions
        self._linears = _linear_names(model)
        self._peft = _wrap(model)
        self._wrapped = _wrapped_names(model)
        self._model: Any = model
        self._rows = _CurrentRows()
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.register_forward_pre_hook(self._rows.hook, with_kwargs=True)
        self._device = base.device
        self._base = PolicyVersion(
            version=0,
            name=base.model_id,
            adapter=BASE_ADAPTER,
            root=base.model_id,
            loaded_at_ms=clock.now_ms(),
        )
        # _lock guards the fields below and is held for moments; _loading serialises the slow
        # work on the layers. Where both are needed, _loading comes first.
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._loaded: dict[int, PolicyVersion] = {}
        self._withdrawn: set[int] = set()
        self._users: dict[int, int] = {}
        self._live = self._base
        self._metrics.live_version.set(0)

    @property
    def device(self) -> torch.device:
        """Where the model's tensors are."""
        return self._device

    @property
    def live(self) -> PolicyVersion:
        """The version that ``live`` names."""
        return self._live

    @property
    def base(self) -> PolicyVersion:
        """Version 0."""
        return self._base

    def name_of(self, version: int) -> str:
        """The immutable name of a version."""
        return self._base.name if version == 0 else f"{self.policy}-v{version}"

    def versions(self) -> tuple[PolicyVersion, ...]:
        """What can be asked for: the base, then the loaded versions in order."""
        with self._lock:
            available = sorted(set(self._loaded) - self._withdrawn)
            return (self._base, *(self._loaded[number] for number in available))

    def bind(self, name: str) -> Binding:
        """Hold the version that a name stands for now.

        Args:
            name: ``live`` or the policy's name for the live version, ``{policy}-v{N}``, or
                the base's name.

        Raises:
            UnknownModelError: No loaded version has that name.
        """
        with self._lock:
            version = self._resolve(name)
            self._users[version.version] = self._users.get(version.version, 0) + 1
        return Binding(self, version)

    def load(
        self, version: int, path: Path, *, sha256: Mapping[str, str] | None = None
    ) -> PolicyVersion:
        """Verify and load a version. Running requests go on meanwhile, unchanged.

        Loading what is loaded already does nothing, if the files are the same.

        Args:
            version: Its number, from 1.
            path: The folder of its adapter files.
            sha256: File name to hex digest, of every file that must be as it was published.

        Raises:
            ArtifactError: Files are missing, differ from their digests, or do not fit this
                model.
            ModelError: The adapter uses or changes what cannot be served here.
            ServingError: Other weights are loaded under this version.
        """
        started = time.monotonic()
        with self._loading:
            digests = {name: sha256_of(path / name) for name in ADAPTER_FILES}
            files = {**digests, **(sha256 or {})}
            verify_files(path, files)
            entry = self._entry(version, path, digests)
            known = self._known_again(entry)
            if known is not None:
                return known
            self._check(path)
            load_adapter(self._peft, path, adapter_name=entry.adapter, files=files)
            with self._lock:
                self._loaded[version] = entry
                self._metrics.loaded_versions.set(len(self._loaded))
        self._metrics.load_seconds.observe(time.monotonic() - started)
        self.collect()
        log.info("loaded version=%d name=%s root=%s", version, entry.name, entry.root)
        return entry

    def go_live(self, version: int) -> PolicyVersion:
        """Move the alias: requests admitted from now on get this version.

        Raises:
            UnknownModelError: The version is not loaded.
        """
        with self._lock:
            target = self._resolve(self.name_of(version))
            moved = target != self._live
            self._live = target
            self._metrics.live_version.set(version)
        if moved:
            self._metrics.swaps.labels("moved").inc()
            log.info("live version=%d name=%s", version, target.name)
        self.collect()
        return target

    def unload(self, name: str) -> PolicyVersion:
        """Take a version out of service; its memory is freed when no request uses it.

        Raises:
            UnknownModelError: No loaded version has that name.
            ServingError: It is live, or the base.
        """
        with self._lock:
            target = self._resolve(name)
            if target in (self._base, self._live):
                role = "the base" if target == self._base else "live"
                raise ServingError(f"{name} cannot be unloaded while it is {role}")
            self._withdrawn.add(target.version)
        self.collect()
        return target

    def collect(self) -> None:
        """Delete the adapters that nothing uses and that are not to be kept.

        Returns at once if a load is running: the load collects when it is done.
        """
        while self._unused() and self._loading.acquire(blocking=False):
            try:
                self._delete(self._unused())
            finally:
                self._loading.release()

    def forward(
        self,
        input_ids: Tensor,
        *,
        mask: Tensor,
        position_ids: Tensor,
        cache: Any,
        versions: Sequence[PolicyVersion],
    ) -> Tensor:
        """Logits after each row's last column; every row by its own version.

        Args:
            input_ids: ``[rows, new columns]``.
            mask: ``[rows, all columns]``, 1 = real token.
            position_ids: ``[rows, new columns]``.
            cache: The rows' keys and values; extended in place.
            versions: One a row, each held by a binding.

        Returns:
            Shape ``[rows, vocabulary]``.
        """
        self._rows.adapters = [version.adapter for version in versions]
        with self._autocast():
            output = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[:, -1, :]
        return logits

    def _resolve(self, name: str) -> PolicyVersion:
        if name in (LIVE, self.policy):
            return self._live
        if name in (self._base.name, f"{self.policy}-v0"):
            return self._base
        for number, version in self._loaded.items():
            if version.name == name and number not in self._withdrawn:
                return version
        raise UnknownModelError(
            f"the model {name!r} is not loaded here; /v1/models lists what is, "
            f"and {LIVE!r} names the live version"
        )

    def _release(self, version: PolicyVersion) -> None:
        with self._lock:
            self._users[version.version] -= 1
            if self._users[version.version] == 0:
                del self._users[version.version]
        self.collect()

    def _entry(self, version: int, path: Path, digests: Mapping[str, str]) -> PolicyVersion:
        if version < 1:
            raise ServingError(f"version {version} cannot be loaded: adapters count from 1")
        return PolicyVersion(
            version=version,
            name=self.name_of(version),
            # Of one length, so that no name is part of another: some of the library's
            # functions look for names inside of names. No dots: they are module names.
            adapter=f"policy-v{version:012d}",
            root=str(path),
            parent=self._base.name,
            fingerprint=" ".join(digests[name] for name in ADAPTER_FILES),
            loaded_at_ms=self._clock.now_ms(),
        )

    def _known_again(self, entry: PolicyVersion) -> PolicyVersion | None:
        with self._lock:
            known = self._loaded.get(entry.version)
            if known is None:
                return None
            if known.fingerprint != entry.fingerprint:
                raise ServingError(
                    f"{entry.name} is loaded from {known.root} with other weights than "
                    f"{entry.root} holds; versions are immutable: publish a new one"
                )
            self._withdrawn.discard(entry.version)
            return known

    def _check(self, path: Path) -> None:
        config = read_config(path)
        refused = [name for name in _REFUSED_FEATURES if getattr(config, name, None)]
        if config.bias != "none":
            refused.append("bias")
        if refused:
            raise ModelError(f"the adapter in {path} uses {refused[0]}, which is not served here")
        outside = self._targets(config) - self._wrapped
        if outside:
            raise ModelError(
                f"the adapter in {path} changes {min(outside)}; only the linear layers of the "
                f"model's blocks can be adapted here"
            )
        for name, tensor in read_weights(path).items():
            if not bool(torch.isfinite(tensor).all()):
                raise ArtifactError(
                    f"the adapter in {path} has numbers in {name} that are not finite"
                )

    def _targets(self, config: LoraConfig) -> set[str]:
        if config.target_modules == "all-linear":
            return set(self._wrapped)
        return {name for name in self._linears if check_target_module_exists(config, name)}

    def _unused(self) -> list[PolicyVersion]:
        """What may be deleted; taken out of the table by ``_delete`` only."""
        with self._lock:
            return self._deletable()

    def _deletable(self) -> list[PolicyVersion]:
        kept = self._kept()
        return [
            version
            for number, version in self._loaded.items()
            if number != self._live.version
            and number not in self._users
            and (number in self._withdrawn or number not in kept)
        ]

    def _kept(self) -> set[int]:
        """The live version and the last ones loaded, ``keep_versions`` together.

        The very last one is kept in any case: it was loaded to go live, or to be asked for.
        """
        newest_first = [n for n in reversed(self._loaded) if n not in self._withdrawn]
        kept = {self._live.version, *newest_first[:1]} - {0}
        for number in newest_first:
            if len(kept) >= self._keep_versions:
                break
            kept.add(number)
        return kept

    def _delete(self, candidates: Sequence[PolicyVersion]) -> None:
        for version in candidates:
            with self._lock:
                # It may have been bound, or gone live, since it was found to be unused.
                if version not in self._deletable():
                    continue
                del self._loaded[version.version]
                self._withdrawn.discard(version.version)
                self._metrics.loaded_versions.set(len(self._loaded))
            self._peft.delete_adapter(version.adapter)
            log.info("unloaded version=%d name=%s", version.version, version.name)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex.

    Raises:
        ArtifactError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{str(path)!r} is no path: {error}") from error


def _require_full_attention(model: nn.Module) -> None:
    config: Any = model.config
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers):
        raise ModelError("only models with full attention can be served here; use vLLM")


def _linear_names(model: nn.Module) -> frozenset[str]:
    return frozenset(
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    )


def _wrap(model: nn.Module) -> Any:
    config = LoraConfig(
        r=1, lora_alpha=1, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    try:
        peft_model = PeftModel(model, config, adapter_name=_IDLE)
    except ValueError as error:
        raise ModelError(f"adapters cannot be put on this base model: {error}") from error
    peft_model.eval()
    peft_model.requires_grad_(False)
    return peft_model


def _wrapped_names(model: nn.Module) -> frozenset[str]:
    return frozenset(
        name for name, module in model.named_modules() if isinstance(module, LoraLayer)
    )


__all__ = [
    "BASE_ADAPTER",
    "LIVE",
    "AdapterTable",
    "Binding",
    "PolicyVersion",
    "sha256_of",
]
