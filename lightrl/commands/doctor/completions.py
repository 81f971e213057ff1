"""What `lightrl doctor reward` judges: the first prompts of a run, and completions for them from the data or a file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightrl.commands.config_layers import UsageError
from lightrl.data import ChatRenderer, PromptStream, wrap_train_loader
from lightrl.module import RLModule
from lightrl.rewards.replay import read_failures
from lightrl.trajectory import Prompt, Trajectory


def not_judged(trajectory: Trajectory) -> dict[str, Any]:
    """Stands in for the reward while the policy writes; keeps the rewards of an environment."""
    return {"reward": 0.0} if trajectory.rewards is None else {"rewards": trajectory.rewards}


def first_prompts(module: RLModule, datamodule: Any, num: int) -> list[Prompt]:
    """The first prompts that a run trains on, `num` or as many as there are.

    Raises:
        UsageError: if the config has no data.
    """
    attach(module, datamodule)
    datamodule.setup("fit")
    stream: PromptStream | None = getattr(datamodule, "prompt_stream", None)
    if stream is None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        loader = datamodule.train_dataloader()
        stream = wrap_train_loader(loader, module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, seed=seed)
    positions = itertools.count() if stream.num_prompts is None else range(stream.num_prompts)
    return list(islice((prompt for position in positions if (prompt := stream[position]) is not None), num))


def attach(module: Any, datamodule: Any) -> None:
    if datamodule is None:
        raise UsageError("lightrl doctor needs prompts. Add a `data:` section to the config.")
    if hasattr(datamodule, "attach"):
        pictures, max_tokens = getattr(module, "pictures", None), getattr(module, "max_prompt_tokens", None)
        datamodule.attach(module.tokenizer, max_prompt_tokens=max_tokens, pictures=pictures)
    datamodule.prepare_data()


def references(prompts: Sequence[Prompt], datamodule: Any) -> list[str]:
    column = getattr(datamodule, "answer_column", None) or "answer"
    for prompt in prompts:
        if column not in prompt.fields:
            raise UsageError(
                f"Prompt {prompt.id!r} has no column {column!r}, only {', '.join(prompt.fields) or 'none at all'}. Set "
                "data.answer_column, or pass --completions a file."
            )
    return [str(prompt.fields[column]) for prompt in prompts]


def of_file(path: str, prompts: Sequence[Prompt], module: RLModule) -> list[Trajectory]:
    if not Path(path).is_file():
        raise UsageError(f"--completions must be policy, reference or a JSONL file; there is no file {path}.")
    texts: list[str] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}:{number} is not JSON: {error}.") from error
        if isinstance(record, dict) and "trajectory" in record:
            return list(islice(read_failures(path), len(prompts)))
        text = record.get("completion") if isinstance(record, dict) else record
        if record is not None and not isinstance(text, str):
            raise UsageError(
                f'{path}:{number} has no text in "completion". Lines must look like {{"completion": "..."}} or come '
                "from a trajectory log."
            )
        texts += [] if text is None else [text]
    num = min(len(prompts), len(texts))
    return of_texts(prompts[:num], texts[:num], module)


def of_texts(prompts: Sequence[Prompt], texts: Sequence[str], module: RLModule) -> list[Trajectory]:
    """Trajectories as if the policy had written these completions and its end token."""
    renderer = ChatRenderer(module.tokenizer)
    trajectories: list[Trajectory] = []
    for prompt, text in zip(prompts, texts, strict=True):
        prompt_ids, written = prompt.token_ids or [], renderer.completion_ids(None, text)
        start, num_new = len(prompt_ids), len(written)
        trajectories.append(
            Trajectory(
                prompt,
                group_id=len(trajectories),
                sample=0,
                token_ids=[*prompt_ids, *written],
                loss_mask=[False] * start + [True] * num_new,
                behavior_logprobs=[0.0] * (start + num_new),
                weight_versions=[-1] * start + [0] * num_new,
                completion_ids=written,
                completion=text,
            )
        )
    return trajectories
