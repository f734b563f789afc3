"""LoRA adapters: attaching, saving and loading them, with a digest for every file.

Names of adapters are immutable for whoever serves them: load a new one under a new name
rather than into an old one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from streams.errors import ArtifactError, ModelError
from streams.settings import ModelSettings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files of a saved adapter, under the names that peft, vLLM and others read."""

DEFAULT_ADAPTER = "default"


def attach_lora(
    model: Any, settings: ModelSettings, *, seed: int, adapter_name: str = DEFAULT_ADAPTER
) -> PeftModel:
    """Put a fresh adapter around `model` (which is changed in place) and make it trainable.

    All linear layers of the decoder from `settings.lora_first_layer` on get one. Until
    trained it changes nothing: B is zero. A is drawn from `seed`, the global random
    generator is left as it was.

    Args:
        model: A causal language model without adapters.
        settings: Rank, alpha and first layer.
        seed: Decides the first weights.
        adapter_name: What to call it.

    Raises:
        ModelError: The model has no layer `lora_first_layer`, or none that can be adapted.
    """
    config = lora_config(model, settings)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        adapted = PeftModel(model, config, adapter_name=adapter_name)
    adapted.eval()
    return adapted


def lora_config(model: Any, settings: ModelSettings) -> LoraConfig:
    """The shape of the adapter that `attach_lora` puts around `model`.

    Raises:
        ModelError: As `attach_lora`.
    """
    alpha: Any = settings.lora_alpha
    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=_linear_names(model),
        layers_to_transform=_layers(model, settings.lora_first_layer),
        task_type="CAUSAL_LM",
    )


def save_adapter(
    model: PeftModel,
    folder: Path,
    *,
    base_model_id: str | None = None,
    adapter_name: str = DEFAULT_ADAPTER,
) -> dict[str, str]:
    """Write an adapter's two files, synced to disk, and return the SHA-256 of each.

    Equal weights give equal bytes.

    Args:
        model: The model that has the adapter.
        folder: Created if need be; files of an adapter in it are replaced.
        base_model_id: Written into the configuration for people; it is not resolved on load.
        adapter_name: Which adapter.

    Returns:
        File name to SHA-256 (hex).

    Raises:
        ArtifactError: The files cannot be written.
    """
    tensors = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    config = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in model.peft_config[adapter_name].to_dict().items()
    }
    config["base_model_name_or_path"] = base_model_id
    config["inference_mode"] = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            str(folder / WEIGHTS_FILE),
            metadata={"format": "pt"},
        )
        (folder / CONFIG_FILE).write_text(
            json.dumps(config, indent=2, sort_keys=True), encoding="utf-8"
        )
        for name in ADAPTER_FILES:
            # Written for the owner alone; whoever serves it may be another user.
            (folder / name).chmod(0o644)
            _sync(folder / name)
        return {name: _sha256_file(folder / name) for name in ADAPTER_FILES}
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot write the adapter to {folder}: {error}") from error


def load_adapter(
    model: Any,
    folder: Path,
    *,
    adapter_name: str,
    files: Mapping[str, str],
    trainable: bool = False,
) -> PeftModel:
    """Add a saved adapter to `model` under a new name, after verifying its files.

    If `model` has no adapters yet it is wrapped (and the new adapter is the active one);
    otherwise the adapter joins the others and stays inactive. Forward passes that go on
    meanwhile are not disturbed, nor is the global random generator.

    Args:
        model: A causal language model, with or without adapters.
        folder: Where `save_adapter` wrote.
        adapter_name: A name that is not in use yet.
        files: The SHA-256 of each file, as `save_adapter` returned them.
        trainable: Whether its tensors get gradients.

    Returns:
        The model with adapters: `model` itself if it already was one.

    Raises:
        ArtifactError: A file is missing or differs from its digest, or the adapter does not
            fit this model.
        ModelError: The name is in use.
    """
    verify_files(folder, files)
    wrapped: bool = isinstance(model, PeftModel)
    if wrapped and adapter_name in model.peft_config:
        raise ModelError(
            f"an adapter named {adapter_name!r} is loaded already; names are not used twice"
        )
    config = read_config(folder)
    tensors = read_weights(folder)
    try:
        if wrapped:
            model.add_adapter(adapter_name, config, low_cpu_mem_usage=True)
            adapted: PeftModel = model
        else:
            adapted = PeftModel(model, config, adapter_name=adapter_name, low_cpu_mem_usage=True)
        fill_adapter(adapted, tensors, adapter_name=adapter_name, on_meta=True)
    except (ArtifactError, ValueError, RuntimeError) as error:
        if wrapped and adapter_name in model.peft_config:
            model.delete_adapter(adapter_name)
        raise ArtifactError(f"the adapter in {folder} does not fit this model: {error}") from error
    for name, parameter in adapted.named_parameters():
        if f".{adapter_name}." in name:
            parameter.requires_grad_(trainable)
    adapted.eval()
    return adapted


def fill_adapter(
    model: PeftModel,
    tensors: Mapping[str, torch.Tensor],
    *,
    adapter_name: str = DEFAULT_ADAPTER,
    on_meta: bool = False,
) -> None:
    """Overwrite an adapter's weights.

    Raises:
        ArtifactError: Names or shapes are not those of the adapter; nothing is changed then.
    """
    wanted = get_peft_model_state_dict(
        model, adapter_name=adapter_name, save_embedding_layers=False
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != given:
        odd = sorted(
            name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name)
        )
        raise ArtifactError(f"{len(odd)} tensors differ in name or shape, the first is {odd[0]}")
    device = next(model.get_base_model().parameters()).device
    set_peft_model_state_dict(
        model,
        {name: tensor.to(device) for name, tensor in tensors.items()},
        adapter_name=adapter_name,
        low_cpu_mem_usage=on_meta,
    )


def read_config(folder: Path) -> LoraConfig:
    """The configuration of a saved adapter.

    Raises:
        ArtifactError: It cannot be read or is not that of a LoRA adapter.
    """
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if values.get("peft_type") != "LORA":
            raise ArtifactError(f"{folder / CONFIG_FILE} is not the configuration of a LoRA")
        config: LoraConfig = LoraConfig.from_peft_type(**values)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(f"cannot read {folder / CONFIG_FILE}: {error}") from error
    config.inference_mode = True
    return config


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter, on the CPU.

    Raises:
        ArtifactError: They cannot be read.
    """
    try:
        return dict(load_file(str(folder / WEIGHTS_FILE)))
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {folder / WEIGHTS_FILE}: {error}") from error


def verify_files(folder: Path, files: Mapping[str, str]) -> None:
    """Check an adapter's files against their digests.

    Args:
        folder: Where they are.
        files: File name to SHA-256 (hex); must name both files of an adapter.

    Raises:
        ArtifactError: A file is not listed, is missing, or differs.
    """
    for name in ADAPTER_FILES:
        if name not in files:
            raise ArtifactError(f"no digest is known for {name} of the adapter in {folder}")
    for name, digest in files.items():
        path = folder / name
        try:
            actual = _sha256_file(path)
        except OSError as error:
            raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
        if actual != digest:
            raise ArtifactError(
                f"{path} is damaged: its SHA-256 is {actual}, it was published as {digest}"
            )


def _linear_names(model: Any) -> list[str]:
    """Names of the linear layers inside decoder layers; the output head is not one of them."""
    head = model.get_output_embeddings()
    names = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if not names:
        raise ModelError("the base model has no linear layers that an adapter could be put on")
    return sorted(names)


def _layers(model: Any, first: int) -> list[int]:
    count = int(model.config.get_text_config().num_hidden_layers)
    if first >= count:
        raise ModelError(
            f"model.lora_first_layer is {first}, but the base model has layers 0 to {count - 1}"
        )
    return list(range(first, count))


def _sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "ADAPTER_FILES",
    "CONFIG_FILE",
    "DEFAULT_ADAPTER",
    "WEIGHTS_FILE",
    "attach_lora",
    "fill_adapter",
    "load_adapter",
    "lora_config",
    "read_config",
    "read_weights",
    "save_adapter",
    "verify_files",
]
