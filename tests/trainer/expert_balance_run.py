"""Script of test_expert_balance.py: the same runs in one process and on two ranks.

    python tests/trainer/expert_balance_run.py FOLDER

Each run leaves its model in `FOLDER/<size> <run>`, and rank 0 the ratios of loads in `FOLDER/<size>.ratios`.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe_cases import moe_spec
from rank_scripts import fork_runs
from several_ranks_run import Recorded
from tiny_run import Digits, make_trainer

from lightrl import SFT, ExpertBalance, FSDP2Strategy, HuggingFaceExport, LocalEngine, ModelSpec, Prompt, SFTDataModule

RL = {"num_minibatches": 2, "microbatch_tokens": 20}


def spec(family: str) -> ModelSpec:
    return replace(moe_spec(family, vocab_size=8, num_hidden_layers=3), tokenizer="tiny_run.tokenizer")


class BySGD(SFT):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=self.lr)


class Chats(SFTDataModule):
    """7 chats of unequal length in batches of 3: the last batch leaves the second of two ranks without a chat."""

    def make_prompts(self, split: str) -> list[Prompt]:
        texts = [(" ".join(map(str, range(n % 3 + 1))), " ".join(map(str, range(n % 4 + 1, 0, -1)))) for n in range(7)]
        return [
            Prompt(id=f"{split}-{n}", messages=[{"role": "user", "content": text}], fields={"answer": answer})
            for n, (text, answer) in enumerate(texts)
        ]


# Name → module, data, callback and strategy: a loss, biases in buffers, and both with biases in parameters.
RUNS: dict[str, Any] = {
    "loss": ("qwen3_moe", True, ExpertBalance(loss_coef=2.0), {"ep": 2, "activation_checkpointing": True}),
    "biases": ("deepseek_v3", True, ExpertBalance(0.25), {"ep": 2}),
    "supervised": ("ernie4_5_moe", False, ExpertBalance(0.25, 2.0), {"activation_checkpointing": True}),
}


def train(folder: Path, name: str, size: int) -> float:
    torch.set_num_threads(1)
    family, is_rl, balance, layout = RUNS[name]
    module: Any = Recorded(policy=spec(family), **RL) if is_rl else BySGD(spec(family), lr=0.1)
    trainer = make_trainer(
        folder / f"{size} {name} files",
        max_steps=3,
        callbacks=[balance, HuggingFaceExport(str(folder / f"{size} {name}"))],
        **({"engine": LocalEngine(threads=1)} if is_rl else {}),
        **({"devices": size, "strategy": FSDP2Strategy(**layout)} if size > 1 else {}),
    )
    trainer.fit(module, datamodule=Digits() if is_rl else Chats(batch_size=3))
    return float(trainer.callback_metrics["rollout/expert_load_max_ratio" if is_rl else "sft/expert_load_max_ratio"])


def on_rank(folder: Path, size: int) -> None:
    torch.save({name: train(folder, name, size) for name in RUNS}, folder / f"{size}.ratios")


if __name__ == "__main__":
    sys.exit(fork_runs([1, 2], partial(on_rank, Path(sys.argv[1]))))
