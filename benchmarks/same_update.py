"""Compares a GRPO update of TRL's GRPOTrainer and of lightrl on the same completions: how far apart are the weights?

    python -m benchmarks.same_update [--model FOLDER]

Needs TRL: `pip install -c constraints.txt -e ".[bench]"`. The default is the quickstart's model with random weights.

Both load the same folder in float32 and get the same groups: prompts, random completions of unequal lengths, some cut
off, and random rewards. Each computes advantages, the clipped loss and its gradient, clips the gradient's norm to 1,
and takes an SGD step at a learning rate of 1, so the weights change by the clipped gradient. The behavior logprobs come
from transformers' forward. `difference` is the norm of the difference between both changes, over the norm of TRL's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lightrl
from benchmarks.grpo_vs_trl import Task, save_model, trl_settings
from benchmarks.report import Report
from examples.quickstart.task import LargestDigit
from lightrl.trajectory import Trajectory

TASK = Task("same", num_prompts=4, group_size=8, cap=12, trl_batch=16)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def make_groups(folder: Path) -> list[list[Trajectory]]:
    """Makes groups of random completions."""
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    drawn, end = random.Random(0), int(tokenizer.eos_token_id)
    words = [index for index in range(len(tokenizer)) if index not in tokenizer.all_special_ids]
    groups = []
    for number, prompt in enumerate(
        LargestDigit(batch_size=TASK.num_prompts).make_prompts("train")[: TASK.num_prompts]
    ):
        before = tokenizer(prompt.id)["input_ids"]
        group = []
        for sample in range(TASK.group_size):
            completion = drawn.choices(words, k=drawn.randint(1, TASK.cap))
            is_cut = len(completion) == TASK.cap
            completion += [] if is_cut else [end]
            ids = torch.tensor([before + completion])
            with torch.no_grad():
                logprobs = model(ids).logits[0, len(before) - 1 : -1].log_softmax(-1)
            behavior = logprobs.gather(1, ids[0, len(before) :, None])[:, 0].tolist()
            group.append(
                Trajectory(
                    prompt=replace(prompt, token_ids=before),
                    group_id=number,
                    sample=sample,
                    token_ids=before + completion,
                    loss_mask=[False] * len(before) + [True] * len(completion),
                    behavior_logprobs=[0.0] * len(before) + behavior,
                    weight_versions=[-1] * len(before) + [0] * len(completion),
                    completion_ids=completion,
                    completion=tokenizer.decode(completion),
                    finish_reason="length" if is_cut else "stop",
                    is_truncated=is_cut,
                    reward=float(drawn.random() < 0.5),
                )
            )
        groups.append(group)
    return groups


def updated_by_trl(folder: Path, groups: Sequence[Sequence[Trajectory]]) -> Mapping[str, Tensor]:
    from datasets import Dataset
    from transformers import PrinterCallback, ProgressCallback
    from trl import GRPOTrainer

    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    by_prompt = {group[0].prompt.id: group for group in groups}
    of_ids = {tuple(group[0].prompt.token_ids or ()): group for group in groups}

    def generate(input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        left: dict[tuple[int, ...], Iterator[Trajectory]] = {ids: iter(group) for ids, group in of_ids.items()}
        prompts = [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, attention_mask, strict=True)]
        rows = [list(next(left[prompt]).completion_ids) for prompt in prompts]
        padded = [row + [tokenizer.pad_token_id] * (TASK.cap - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(padded)], 1)

    def recorded(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        left, rewards = {name: iter(group) for name, group in by_prompt.items()}, []
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            trajectory = next(left[prompt])
            assert list(ids) == list(trajectory.completion_ids)
            rewards.append(float(trajectory.reward or 0.0))
        return rewards

    model.generate = generate
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=recorded,
            args=trl_settings(TASK, Path(scratch), num_iterations=1),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": name} for name in by_prompt]),
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        trainer.train()
    return model.state_dict()


class PlainSGD(lightrl.GRPO):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class KeepWeights(lightrl.RLCallback):
    weights: Mapping[str, Tensor]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        state: Mapping[str, Tensor] = pl_module.parallel_models["policy"].model.state_dict()
        self.weights = {name: value.clone() for name, value in state.items()}


def updated_by_lightrl(folder: Path, groups: Sequence[Sequence[Trajectory]]) -> Mapping[str, Tensor]:
    kept = KeepWeights()
    module = PlainSGD(str(folder), reward="examples.quickstart.reward.exact", group_size=TASK.group_size)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trajectories.jsonl"
        path.write_text("".join(json.dumps(item.to_json()) + "\n" for group in groups for item in group))
        trainer = lightrl.Trainer(
            accelerator="cpu", devices=1, max_steps=1, gradient_clip_val=1.0, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False, callbacks=[kept],
            default_root_dir=scratch,
        )  # fmt: skip
        trainer.fit(module, datamodule=lightrl.TrajectoryDataModule(str(path)))
    return kept.weights


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_update", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    given = parser.parse_args(arguments)
    report = Report("same_update")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or Path(scratch) / "model"
        if given.model is None:
            save_model(folder)
        groups, start = make_groups(folder), load(folder).state_dict()
        changes: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, update in (("trl", updated_by_trl), ("lightrl", updated_by_lightrl)):
            changes[name] = {key: (value - start[key]).double() for key, value in update(folder, groups).items()}
    norms = {name: norm(change.values()) for name, change in changes.items()}
    apart = norm(value - changes["lightrl"][key] for key, value in changes["trl"].items())
    tokens = sum(len(trajectory.completion_ids) for group in groups for trajectory in group)
    report.add("update", model=given.model.name if given.model else "random", loss_tokens=tokens,
               trl_norm=norms["trl"], lightrl_norm=norms["lightrl"], difference=apart / norms["trl"])  # fmt: skip
    report.finish(["model", "loss_tokens", "trl_norm", "lightrl_norm", "difference"])


def norm(values: Any) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in values))


if __name__ == "__main__":
    main()
