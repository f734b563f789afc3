from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from learner.adapters import CONFIG_FILE, WEIGHTS_FILE
from learner.model import BaseModel
from learner.serving.adapters import AdapterTable
from learner.serving.batch import pad_prompts
from streams.errors import ArtifactError, ModelError, ServingError, UnknownModelError
from tests.unit.learner.serving.harness import Adapter, make_table, tiny_base, write_adapter


@pytest.fixture
def table(base: BaseModel) -> AdapterTable:
    return make_table(base)


def load(table: AdapterTable, adapter: Adapter) -> None:
    table.load(adapter.version, adapter.folder, sha256=adapter.files)


def names(table: AdapterTable) -> list[str]:
    return [version.name for version in table.versions()]


def copy_of(adapter: Adapter, folder: Path) -> Path:
    return Path(shutil.copytree(adapter.folder, folder))


def edit_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | values))


def row_logits(table: AdapterTable, rows: list[str]) -> torch.Tensor:
    """Logits after one prompt, a row for each of the named versions."""
    padded = pad_prompts([[5, 6, 7]] * len(rows), table.device)
    bindings = [table.bind(name) for name in rows]
    with torch.inference_mode():
        logits = table.forward(
            padded.input_ids,
            mask=padded.mask,
            position_ids=padded.position_ids,
            cache=DynamicCache(),
            versions=[binding.version for binding in bindings],
        )
    for binding in bindings:
        binding.release()
    return logits


def test_a_fresh_table_serves_the_base_under_each_of_its_names(table: AdapterTable) -> None:
    for name in ("live", "default", "default-v0", "tiny-random"):
        assert table.bind(name).version == table.base
    assert table.live.version == 0


def test_a_loaded_version_is_served_by_name_and_live_only_when_told(
    table: AdapterTable, adapters: list[Adapter]
) -> None:
    load(table, adapters[0])
    assert table.bind("default-v1").version.version == 1
    assert table.bind("live").version.version == 0
    table.go_live(1)
    assert table.bind("live").version.version == 1
    assert table.bind("default").version.version == 1


def test_each_row_is_computed_by_its_own_version(
    table: AdapterTable, adapters: list[Adapter], tmp_path: Path
) -> None:
    load(table, adapters[0])
    load(table, adapters[1])
    mixed = row_logits(table, ["default-v1", "tiny-random", "default-v2", "default-v1"])
    untouched = tiny_base(tmp_path).model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    torch.testing.assert_close(mixed[1], untouched, atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed[0], mixed[3], atol=1e-5, rtol=0)
    assert not torch.allclose(mixed[0], mixed[2], atol=1e-2)
    assert not torch.allclose(mixed[0], mixed[1], atol=1e-2)


def test_adapters_come_and_go_beside_running_forwards_without_a_trace(
    table: AdapterTable, adapters: list[Adapter]
) -> None:
    load(table, adapters[0])
    expected = row_logits(table, ["default-v1", "tiny-random"])
    stop, trouble, rounds = threading.Event(), list[BaseException](), [0]

    def churn() -> None:
        try:
            while not stop.is_set():
                load(table, adapters[1])
                table.unload("default-v2")
                rounds[0] += 1
        except BaseException as error:
            trouble.append(error)

    churner = threading.Thread(target=churn)
    churner.start()
    try:
        while rounds[0] < 5 and not trouble:
            torch.testing.assert_close(row_logits(table, ["default-v1", "tiny-random"]), expected)
    finally:
        stop.set()
        churner.join()
    assert trouble == []


def test_nothing_that_is_served_has_gradients(base: BaseModel, adapters: list[Adapter]) -> None:
    table = make_table(base)
    load(table, adapters[0])
    assert [name for name, p in base.model.named_parameters() if p.requires_grad] == []


def test_an_unknown_name_is_refused(table: AdapterTable) -> None:
    with pytest.raises(UnknownModelError, match="default-v9"):
        table.bind("default-v9")
    with pytest.raises(UnknownModelError):
        table.go_live(9)


def test_only_the_newest_versions_are_kept(table: AdapterTable, adapters: list[Adapter]) -> None:
    for adapter in adapters:
        load(table, adapter)
        table.go_live(adapter.version)
    assert names(table) == ["tiny-random", "default-v2", "default-v3", "default-v4"]


def test_the_live_version_is_kept_however_old(table: AdapterTable, adapters: list[Adapter]) -> None:
    load(table, adapters[0])
    table.go_live(1)
    for adapter in adapters[1:]:
        load(table, adapter)
    assert names(table) == ["tiny-random", "default-v1", "default-v3", "default-v4"]


def test_a_version_in_use_stays_until_its_last_request_ends(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    table = make_table(base, keep_versions=1)
    load(table, adapters[0])
    first, second = table.bind("default-v1"), table.bind("default-v1")
    load(table, adapters[1])
    table.go_live(2)
    assert names(table) == ["tiny-random", "default-v1", "default-v2"]
    first.release()
    first.release()
    assert "default-v1" in names(table)
    second.release()
    assert names(table) == ["tiny-random", "default-v2"]
    assert not [name for name, _ in base.model.named_parameters() if "v000000000001" in name]


def test_an_unloaded_version_takes_no_new_requests_but_finishes_the_old(
    base: BaseModel, adapters: list[Adapter]
) -> None:
    table = make_table(base)
    load(table, adapters[0])
    expected = row_logits(table, ["default-v1"])
    binding = table.bind("default-v1")
    table.unload("default-v1")
    with pytest.raises(UnknownModelError):
        table.bind("default-v1")
    assert [name for name, _ in base.model.named_parameters() if "v000000000001" in name]
    binding.release()
    assert not [name for name, _ in base.model.named_parameters() if "v000000000001" in name]
    load(table, adapters[0])
    torch.testing.assert_close(row_logits(table, ["default-v1"]), expected)


def test_live_and_base_cannot_be_unloaded(table: AdapterTable, adapters: list[Adapter]) -> None:
    load(table, adapters[0])
    table.go_live(1)
    for name in ("default-v1", "live", "tiny-random"):
        with pytest.raises(ServingError, match="cannot be unloaded"):
            table.unload(name)


def test_loading_again_does_nothing_but_other_weights_are_refused(
    table: AdapterTable, adapters: list[Adapter]
) -> None:
    load(table, adapters[0])
    load(table, adapters[0])
    with pytest.raises(ServingError, match="immutable"):
        table.load(1, adapters[1].folder)


@pytest.mark.parametrize("version", [0, -1])
def test_adapters_count_from_one(
    table: AdapterTable, adapters: list[Adapter], version: int
) -> None:
    with pytest.raises(ServingError, match="count from 1"):
        table.load(version, adapters[0].folder)


def test_a_changed_file_is_refused(
    table: AdapterTable, adapters: list[Adapter], tmp_path: Path
) -> None:
    folder = copy_of(adapters[0], tmp_path / "damaged")
    weights = bytearray((folder / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(weights)
    with pytest.raises(ArtifactError, match=WEIGHTS_FILE):
        table.load(1, folder, sha256=adapters[0].files)
    assert names(table) == ["tiny-random"]


def test_a_missing_folder_is_refused(table: AdapterTable, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere"):
        table.load(1, tmp_path / "nowhere")


def test_an_adapter_of_another_shape_is_refused_and_leaves_nothing(
    base: BaseModel, adapters: list[Adapter], tmp_path: Path
) -> None:
    table = make_table(base)
    folder = copy_of(adapters[0], tmp_path / "other")
    tensors = load_file(str(folder / WEIGHTS_FILE))
    narrow = {name: tensor[:, :-1].contiguous() for name, tensor in tensors.items()}
    save_file(narrow, folder / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match="does not fit"):
        table.load(1, folder)
    assert not [name for name, _ in base.model.named_parameters() if "v000000000001" in name]
    load(table, adapters[0])
    assert "default-v1" in names(table)


def test_an_adapter_with_numbers_that_are_not_finite_is_refused(
    table: AdapterTable, adapters: list[Adapter], tmp_path: Path
) -> None:
    folder = copy_of(adapters[0], tmp_path / "nan")
    tensors = load_file(str(folder / WEIGHTS_FILE))
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match="not finite"):
        table.load(1, folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_what_cannot_be_served_beside_others_is_refused(
    table: AdapterTable,
    adapters: list[Adapter],
    tmp_path: Path,
    change: dict[str, Any],
    complaint: str,
) -> None:
    folder = copy_of(adapters[0], tmp_path / "odd")
    edit_config(folder, **change)
    with pytest.raises(ModelError, match=complaint):
        table.load(1, folder)
    assert names(table) == ["tiny-random"]


def test_another_kind_of_adapter_is_refused(
    table: AdapterTable, adapters: list[Adapter], tmp_path: Path
) -> None:
    folder = copy_of(adapters[0], tmp_path / "ia3")
    edit_config(folder, peft_type="IA3")
    with pytest.raises(ArtifactError, match="not the configuration of a LoRA"):
        table.load(1, folder)


def test_an_adapter_of_some_layers_only_leaves_the_others_alone(
    base: BaseModel, tmp_path: Path
) -> None:
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        layers_to_transform=[2, 3],
        init_lora_weights=False,
    )
    adapted = PeftModel(tiny_base(tmp_path).model, config, adapter_name="default").eval()
    adapted.save_pretrained(str(tmp_path / "partial"))
    table = make_table(base)
    table.load(1, tmp_path / "partial")
    expected = adapted(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    actual = row_logits(table, ["tiny-random", "default-v1"])
    torch.testing.assert_close(actual[1], expected, atol=1e-5, rtol=0)
    assert not torch.allclose(actual[0], actual[1], atol=1e-3)


def test_a_policy_name_may_hold_anything(base: BaseModel, tmp_path: Path) -> None:
    table = make_table(base, policy="shop/eu.2")
    write_adapter(tmp_path / "a", seed=1)
    table.load(1, tmp_path / "a")
    table.go_live(1)
    assert table.bind("shop/eu.2").version.name == "shop/eu.2-v1"
