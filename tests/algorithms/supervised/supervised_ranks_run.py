"""Short supervised runs in one process and in two, whose weights test_supervised_ranks.py compares."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from moe_cases import moe_spec
from rank_scripts import leave
from test_preference_training import Digits
from test_sft import CONFIG, SCALED_HEAD, Sums, make_module
from tiny import tiny_spec

from lightrl import FSDP2Strategy, LoRA, Parallel3DStrategy, Role, Trainer
from lightrl.algorithms import DPO, SFT, RewardModel
from lightrl.callbacks import HuggingFaceExport
from lightrl.models import ModelSpec
from lightrl.strategies import whole
from lightrl.testing import QUIET, TINY_CONFIG
from lightrl.trajectory import Prompt


class UnequalSums(Sums):
    """15 chats in batches of 7: the last batch leaves the second of two ranks without a chat."""

    def make_prompts(self, split: str) -> list[Prompt]:
        texts = [("1+" * (n % 5) + "1", str(n % 5 + 1) * (1 + n % 3)) for n in range(15)]
        return [
            Prompt(id=f"{split}-{n}", messages=[{"role": "user", "content": text}], fields={"answer": answer})
            for n, (text, answer) in enumerate(texts)
        ]


# Name → what makes module and data from the run's folder.
CASES: dict[str, Any] = {
    "SFT": lambda _: (make_module(CONFIG), UnequalSums(batch_size=7, validation_batch_size=7)),
    "SFT, two batches an update": lambda _: (make_module(CONFIG), UnequalSums(batch_size=3, validation_batch_size=7)),
    "SFT with scaled logits": lambda _: (make_module(SCALED_HEAD), UnequalSums(batch_size=7, validation_batch_size=7)),
    "DPO": lambda _: (DPO(tiny_spec("qwen3"), lr=0.01), Digits(None, batch_size=3, validation_batch_size=3)),
    "RewardModel": lambda folder: (RewardModel(str(folder / "reward_model"), lr=0.01), Digits(None, batch_size=3)),
}
STAGES, SLICES, PARTS = "in two stages", "on two tensor ranks", "in two parts of each row"
EXPERTS = "on two ranks with half of the experts each"
# Under Parallel3DStrategy, or with cp; with `more`, all of them.
CASES |= {
    f"SFT {STAGES}": lambda _: (SFT(tiny_spec(), lr=0.01), UnequalSums(batch_size=7, validation_batch_size=7)),
    f"DPO with LoRA {SLICES}": lambda _: (DPO(Role(tiny_spec(), lora=LoRA(rank=2)), lr=0.01), digits()),
}
MORE: dict[str, Any] = {
    f"SFT, two batches an update, {STAGES}": lambda _: (SFT(tiny_spec(), lr=0.01), UnequalSums(batch_size=3)),
    f"SFT with scaled logits {SLICES}": lambda _: (SFT(tiny_spec(config=SCALED), lr=0.01), UnequalSums(batch_size=7)),
    f"DPO {SLICES}": lambda _: (DPO(tiny_spec(), lr=0.01), digits()),
    f"DPO with LoRA {STAGES}": lambda _: (DPO(Role(tiny_spec(), lora=LoRA(rank=2)), lr=0.01), digits()),
    f"RewardModel {STAGES}": lambda folder: (RewardModel(str(folder / "reward_model"), lr=0.01), digits()),
    f"RewardModel {SLICES}": lambda folder: (RewardModel(str(folder / "reward_model"), lr=0.01), digits()),
    f"SFT, two batches an update, {PARTS}": lambda _: (SFT(tiny_spec(), lr=0.01), UnequalSums(batch_size=3)),
    f"DPO with LoRA {PARTS}": lambda _: (DPO(Role(tiny_spec(), lora=LoRA(rank=2)), lr=0.01), digits()),
    f"RewardModel {PARTS}": lambda folder: (RewardModel(str(folder / "reward_model"), lr=0.01), digits()),
    f"SFT of a mixture {STAGES}": lambda _: (SFT(mixture(), lr=0.01), UnequalSums(batch_size=7)),
    f"SFT of a mixture, two batches an update, {EXPERTS}": lambda _: (
        SFT(mixture(), lr=0.01),
        UnequalSums(batch_size=3),
    ),
    "SFT on two data ranks": lambda _: (SFT(tiny_spec(), lr=0.01), UnequalSums(batch_size=7)),
}
FOUR: dict[str, Any] = {  # on four ranks
    f"SFT of mixtral {STAGES}, {EXPERTS}": lambda _: (SFT(mixture("mixtral"), lr=0.01), UnequalSums(batch_size=7)),
    f"SFT of gpt_oss {STAGES}, {EXPERTS}": lambda _: (SFT(mixture("gpt_oss"), lr=0.01), UnequalSums(batch_size=7)),
    f"DPO of a mixture {STAGES}, {PARTS}": lambda _: (DPO(mixture("glm4_moe"), lr=0.01), digits()),
}
SCALED = {**TINY_CONFIG, "model_type": "granite", "logits_scaling": 3.0}


def mixture(family: str = "qwen3_moe") -> ModelSpec:
    return replace(moe_spec(family), tokenizer=tiny_spec().tokenizer, seed=3)


def digits() -> Digits:
    return Digits(None, batch_size=3, validation_batch_size=3)


def strategy_of(name: str) -> FSDP2Strategy:
    if name in FOUR:
        return Parallel3DStrategy(pp=2, ep=2) if EXPERTS in name else Parallel3DStrategy(pp=2, cp=2)
    if STAGES in name:
        return Parallel3DStrategy(pp=2)
    if SLICES in name:
        return Parallel3DStrategy(tp=2)
    if EXPERTS in name:
        return Parallel3DStrategy(tp=2, ep=2)
    if PARTS in name:
        return FSDP2Strategy(cp=2)
    return Parallel3DStrategy(dp=2) if "data ranks" in name else FSDP2Strategy()


def save_reward_model(folder: Path) -> None:
    """A reward model to start from: a head that says 0 sends nothing back to its body."""
    module = RewardModel(tiny_spec())
    module.configure_model()
    torch.nn.init.normal_(module.reward_model.score.weight, generator=torch.Generator().manual_seed(3))
    module.reward_model.save_pretrained(folder / "reward_model")
    module.tokenizer.save_pretrained(folder / "reward_model")


class FirstGradients(Callback):
    """Keeps the gradient of each parameter before clipping; Adam's epsilon divides no rounding by itself."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["eps"] = pl_module.lr

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.found:
            gradients = ((key, value.grad) for key, value in pl_module.named_parameters())
            self.found = {key: whole(gradient).clone() for key, gradient in gradients if gradient is not None}


def train(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case for an epoch and validates; gives what is compared."""
    module, data = {**CASES, **MORE, **FOUR}[name](folder)
    first = FirstGradients()
    export = HuggingFaceExport(to=folder / name / "export")
    spread: dict[str, Any] = {"devices": devices, "strategy": strategy_of(name)} if devices > 1 else {"devices": 1}
    flags = {"default_root_dir": folder, "num_sanity_val_steps": 0, "gradient_clip_val": 1.0, "max_epochs": 1, **spread}
    flags |= {"accumulate_grad_batches": 2 if "two batches" in name else 1, "callbacks": [first, export]}
    trainer = Trainer(**(QUIET | flags))
    trainer.fit(module, data)
    found = getattr(module, module.trained_role).named_parameters()
    return {
        "weights": {key: whole(value).detach() for key, value in found},
        "gradients": first.found,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    cases, devices = {"more": (MORE, 2), "four": (FOUR, 4)}.get(sys.argv[-1], (CASES, 2))
    leave({name: train(name, folder, devices=devices) for name in cases}, folder)


if __name__ == "__main__":
    main()
