"""Module of the Ray launcher's runs, whose numbers can be compared: SGD, and the first gradients kept."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.recovery import Losses
from lightrl import GRPO

GRADIENTS = "gradients.pt"


class BySGD(GRPO):
    """AdamW would divide the rounding of a small gradient by itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=self.lr)


class Numbers(Losses):
    """Keeps the losses of each iteration, and the gradients of the first update."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step or (self.folder / GRADIENTS).exists():
            return
        gradients = [value.grad for value in pl_module.policy.parameters() if value.grad is not None]
        whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in gradients]
        if trainer.is_global_zero:
            torch.save(whole, self.folder / GRADIENTS)


def numbers_in(folder: Path) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The gradients, and the losses by iteration."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return torch.load(folder / GRADIENTS), [json.loads(line) for line in lines]
