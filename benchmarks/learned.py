"""Tasks that SmolLM2 learns in both trainers of `learning_vs_trl`: same prompts in the same order, same reward."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.pretrained.reviews import right_label
from examples.pretrained.tasks import last_number, sums

Row = dict[str, str]  # a question and its answer
NUM_HELD_OUT = 240


@dataclass(frozen=True)
class Learned:
    """What is learned, as in examples/pretrained/<name>.yaml, but without its top_k, which TRL's loss ignores."""

    name: str
    rows_of: Callable[[str], list[Row]]  # of a split, train or test
    reward: Callable[[Any], dict[str, float]]
    cap: int  # most new tokens
    lr: float
    system_prompt: str | None = None
    prompt_template: str = "{prompt}"

    def train_rows(self, seed: int) -> list[Row]:
        """Returns all train rows in the order of this seed."""
        return random.Random(seed).sample(rows := self.rows_of("train"), len(rows))

    def chat(self, row: Row) -> list[dict[str, str]]:
        """Returns the messages that PromptDataModule makes of a row."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.prompt_template.format(prompt=row["question"])}]

    def rewards(self, tokenizer: Any, completion_ids: Sequence[Sequence[int]], answers: Sequence[str]) -> list[float]:
        """Returns what lightrl's reward function gives for these completions, each [T]."""
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        reasons = ["stop" if tokenizer.eos_token_id in ids else "length" for ids in completion_ids]
        return [
            self.reward(
                SimpleNamespace(answer=text, finish_reason=reason, prompt=SimpleNamespace(fields={"answer": answer}))
            )["reward"]
            for text, reason, answer in zip(texts, reasons, answers, strict=True)
        ]


def _reviews(split: str) -> list[Row]:
    lines = Path(f"runs/pretrained/reviews/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


LEARNED = {
    "sums": Learned("sums", sums, last_number, cap=16, lr=1e-5),
    "reviews": Learned(
        "reviews",
        _reviews,
        right_label,
        cap=8,
        lr=2e-5,
        system_prompt="Answer with one word: positive or negative.",
        prompt_template="Movie review: {prompt}\nIs it positive or negative?",
    ),
}


def train_rows(split: str, name: str, seed: int) -> list[Row]:
    """Returns a task's train rows; the source of lightrl's PromptDataModule, which must not shuffle them."""
    assert split == "train"
    return LEARNED[name].train_rows(seed)


def held_out_accuracy(learned: Learned, folder: Path) -> float:
    """Returns the mean reward of a model's greedy answers to at most NUM_HELD_OUT held-out prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = learned.rows_of("test")[:NUM_HELD_OUT]
    rewards: list[float] = []
    for start in range(0, len(rows), 40):
        part = rows[start : start + 40]
        inputs = tokenizer.apply_chat_template(
            [learned.chat(row) for row in part],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=learned.cap)[:, inputs["input_ids"].shape[1] :]
        rewards += learned.rewards(tokenizer, ids.tolist(), [row["answer"] for row in part])
    return statistics.mean(rewards)
