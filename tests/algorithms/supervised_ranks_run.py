"""What test_supervised_ranks.py runs, in one process and in two: short supervised runs whose weights it compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rank_scripts import leave
from test_preference_training import Digits
from test_sft import CONFIG, SCALED_HEAD, Sums, make_module
from tiny import tiny_spec

from lightrl import FSDP2Strategy, Trainer
from lightrl.algorithms import DPO, RewardModel
from lightrl.callbacks import HuggingFaceExport
from lightrl.trajectory import Prompt


class UnequalSums(Sums):
    """15 chats in batches of 7: the last batch leaves the second of two ranks without a chat."""

    def make_prompts(self, split: str) -> list[Prompt]:
        texts = [("1+" * (n % 5) + "1", str(n % 5 + 1) * (1 + n % 3)) for n in range(15)]
        return [
            Prompt(id=f"{split}-{n}", messages=[{"role": "user", "content": text}], fields={"answer": answer})
            for n, (text, answer) in enumerate(texts)
        ]


CASES: dict[str, Any] = {
    "SFT": lambda: (make_module(CONFIG), UnequalSums(batch_size=7, validation_batch_size=7)),
    "SFT with scaled logits": lambda: (make_module(SCALED_HEAD), UnequalSums(batch_size=7, validation_batch_size=7)),
    "DPO": lambda: (DPO(tiny_spec("qwen3"), lr=0.01), Digits(None, batch_size=3, validation_batch_size=3)),
    "RewardModel": lambda: (RewardModel(tiny_spec("qwen3"), lr=0.01), Digits(None, batch_size=3)),
}


def play(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case for an epoch and validates; gives what is compared."""
    module, data = CASES[name]()
    export = HuggingFaceExport(to=folder / name / "export")
    spread = {"devices": devices, "strategy": FSDP2Strategy()} if devices > 1 else {"devices": 1}
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        max_epochs=1,
        callbacks=[export],
        **spread,  # type: ignore[arg-type]
    )
    trainer.fit(module, data)
    found = getattr(module, module.trained_role).named_parameters()
    return {
        "weights": {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach() for key, value in found
        },
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    leave({name: play(name, folder, devices=2) for name in CASES}, folder)


if __name__ == "__main__":
    main()
