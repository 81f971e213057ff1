"""A policy of a few thousand parameters on six prompts, and quiet trainers: what the tests of this folder share."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from digit_reward import token_reward
from lightning.pytorch.callbacks import Callback
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import lightrl
from lightrl import GRPO, ModelSpec, Prompt, PromptDataModule, Role, Sampling, Trajectory

EOS = 1
GROUP_SIZE = 4
BATCH_SIZE = 2  # P: prompts per iteration, of NUM_PROMPTS
NUM_PROMPTS = 6  # 3 iterations per epoch
CONFIG = {
    "model_type": "qwen3", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "tie_word_embeddings": True, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<eos>": EOS} | {str(digit): digit + 2 for digit in range(6)}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


POLICY = ModelSpec(config=CONFIG, tokenizer="tiny_run.tokenizer", seed=3)


class Digits(PromptDataModule):
    def __init__(self, batch_size: int = BATCH_SIZE, num_prompts: int = NUM_PROMPTS, **kwargs: Any) -> None:
        super().__init__(None, batch_size=batch_size, **kwargs)
        self.num_prompts = num_prompts

    def make_prompts(self, split: str) -> list[Prompt]:
        num = self.num_prompts if split == "train" else 4
        return [Prompt(f"{split}-{index}", token_ids=[2 + index % 6, 2, 2 + index // 6 % 6]) for index in range(num)]


class TinyGRPO(GRPO):
    """Computes rewards in this process, so that no worker has to start, and with a record of what it was trained on."""

    def __init__(self, policy: str | ModelSpec | Role = POLICY, **kwargs: Any) -> None:
        settings = {"group_size": GROUP_SIZE, "sampling": Sampling(max_new_tokens=6), "lr": 1e-2} | kwargs
        super().__init__(policy, **settings)
        self.trained: list[list[int]] = []  # stream positions, by iteration
        self.experiences: list[lightrl.Experience] = []

    def reward(self, trajectory: Trajectory) -> Any:
        return token_reward(trajectory)

    def on_experience_ready(self, experience: lightrl.Experience) -> None:
        self.trained.append(list(dict.fromkeys(experience.group_ids.tolist())))
        self.experiences.append(experience)


def make_trainer(folder: Path | str, **kwargs: Any) -> lightrl.Trainer:
    settings = {
        "accelerator": "cpu", "default_root_dir": folder, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }  # fmt: skip
    settings |= {"max_steps": 3} if not {"max_epochs", "max_time", "fast_dev_run"} & kwargs.keys() else {}
    return lightrl.Trainer(**(settings | kwargs))


def train(folder: Path | str, module: Any = None, data: Any = None, *, ckpt_path: Any = None, **flags: Any) -> Any:
    """Trains a module, TinyGRPO if None, on the data, Digits if None; returns its trainer."""
    trainer = make_trainer(folder, **flags)
    trainer.fit(module or TinyGRPO(), datamodule=data or Digits(), ckpt_path=ckpt_path)
    return trainer


def weights(module: TinyGRPO) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.policy.state_dict().items()}


def are_equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def our_threads() -> list[str]:
    names = ("lightrl", "reward")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names) and thread.is_alive()]


class Logged(Callback):
    """The values of a metric, by iteration."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


class CountValidations(Callback):
    """The iterations after which there was a validation."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(trainer.global_step)
