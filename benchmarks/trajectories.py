"""Random trajectories for benchmarks, a loss on them, and a padded update as a baseline.

The update is padded as in TRL: all rows as wide as the longest, an attention mask, and logits of every position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.experience import Experience
from lightrl.trajectory import Prompt, Trajectory

GROUP_SIZE = 8
PADDED_ROWS = (8, 16, 32, 64, 128)  # rows of a padded microbatch that are tried; the fastest is measured


def make_experience(prompt_tokens: int, lengths: Sequence[int], vocab_size: int) -> Experience:
    return Experience.from_trajectories(make_trajectories(prompt_tokens, lengths, vocab_size))


def make_trajectories(prompt_tokens: int, lengths: Sequence[int], vocab_size: int) -> list[Trajectory]:
    """Makes groups of GROUP_SIZE random completions of these lengths; a group shares a prompt."""
    generator = random.Random(0)
    trajectories = []
    for row, length in enumerate(lengths):
        group, sample = divmod(row, GROUP_SIZE)
        if sample == 0:
            prompt_ids = [generator.randrange(2, vocab_size) for _ in range(prompt_tokens)]
        completion_ids = [generator.randrange(2, vocab_size) for _ in range(length)]
        trajectories.append(
            Trajectory(
                prompt=Prompt(id=str(group), token_ids=prompt_ids),
                group_id=group,
                sample=sample,
                token_ids=prompt_ids + completion_ids,
                loss_mask=[False] * prompt_tokens + [True] * length,
                behavior_logprobs=[0.0] * (prompt_tokens + length),
                weight_versions=[-1] * prompt_tokens + [0] * length,
                completion_ids=completion_ids,
                completion="",
                reward=generator.gauss(0.0, 1.0),
            )
        )
    return trajectories


def weighted_sum(experience: Experience, logprobs: Tensor) -> Tensor:
    """Returns a loss with a different gradient for every trajectory."""
    return -(logprobs * experience.loss_mask * experience.rewards[:, None]).sum()


def run_padded(model: PreTrainedModel, experience: Experience, rows: int) -> None:
    columns = torch.arange(experience.token_ids.shape[1], device=experience.token_ids.device)
    attention_mask = (columns < experience.lengths[:, None]).long()
    for part in torch.arange(len(experience)).split(rows):
        token_ids = experience.token_ids[part]
        logits = model(input_ids=token_ids, attention_mask=attention_mask[part], use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        logprobs = torch.nn.functional.pad(logprobs, (1, 0))
        loss = -(logprobs * experience.loss_mask[part] * experience.rewards[part, None]).sum()
        loss.backward()
