"""One step of TRL's DPO and SFT trainers on exported files, with a tiny model.

``python -m tests.unit.streams.export.trl_trains PREFERENCES DEMONSTRATIONS FOLDER`` prints what TRL
made of them. A process of its own: TRL and its libraries warn about themselves.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets
import torch
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import is_conversational

from learner.tiny import build_model, build_tokenizer


def main(preferences: str, demonstrations: str, folder: str) -> int:
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    pairs = _load(preferences, folder)
    replies = _load(demonstrations, folder)
    tokenizer = build_tokenizer()
    dpo = DPOTrainer(
        model=build_model(len(tokenizer)),
        ref_model=build_model(len(tokenizer)),
        args=DPOConfig(**_common(folder)),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    sft = SFTTrainer(
        model=build_model(len(tokenizer)),
        args=SFTConfig(**_common(folder)),
        train_dataset=replies,
        processing_class=tokenizer,
    )
    found = {
        "preferences": _step(dpo, pairs, tokenizer),
        "demonstrations": _step(sft, replies, tokenizer),
    }
    print(json.dumps(found))
    return 0


def _load(file: str, folder: str) -> Any:
    return datasets.load_dataset("json", data_files=file, split="train", cache_dir=folder)


def _common(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 1,
    }


def _step(trainer: Any, lines: Any, tokenizer: Any) -> dict[str, Any]:
    loss = trainer.train().training_loss
    batch = next(iter(trainer.get_train_dataloader()))
    texts = [tokenizer.decode(ids) for ids in batch["input_ids"]]
    return {
        "rows": len(lines),
        "conversational": bool(is_conversational(lines[0])),
        "loss": loss,
        "texts": texts,
    }


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
