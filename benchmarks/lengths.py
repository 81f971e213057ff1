"""Forced completion lengths: lists for benchmarks, and a logits processor that makes `model.generate` follow one.

To sample the same number of tokens, both sides of a comparison ban the end token until a completion has its length.
Then LocalEngine ends the row by `max_new_tokens`; `generate`, without limits per row, must sample the end token.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


def equal_lengths(count: int, cap: int) -> list[int]:
    """Returns lengths that are all half the cap."""
    return [cap // 2] * count


def skewed_lengths(count: int, cap: int, seed: int = 0) -> list[int]:
    """Returns 5 % at the cap, the others quantiles of a geometric distribution; the mean is a quarter of the cap."""
    num_capped = max(1, round(0.05 * count))
    num_others = count - num_capped
    target_mean = (0.25 * count - num_capped) / num_others * cap

    def others(mean: float) -> list[int]:
        stay = math.log1p(-1 / mean)
        quantiles = [(place + 0.5) / num_others for place in range(num_others)]
        return [min(cap - 1, max(1, math.ceil(math.log1p(-quantile) / stay))) for quantile in quantiles]

    # The cap cuts off the tail, so the distribution's mean is above the mean of the lengths.
    low, high = 1.01, 4.0 * max(target_mean, 2.0)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(others(middle)) < target_mean * num_others else (low, middle)
    lengths = others(high) + [cap] * num_capped
    random.Random(seed).shuffle(lengths)
    return lengths


def lognormal_lengths(count: int, cap: int, sigma: float = 0.8, seed: int = 0) -> list[int]:
    """Returns quantiles of a lognormal distribution, the longest at the cap.

    With the default sigma and any cap, the 95th percentile is 3.7 times the median, the mean 1.4 times; of 128 lengths,
    the longest is 6 times the mean.
    """
    normal = statistics.NormalDist(sigma=sigma)
    logs = [normal.inv_cdf((place + 0.5) / count) for place in range(count)]
    lengths = [max(1, round(cap * math.exp(value - logs[-1]))) for value in logs]
    random.Random(seed).shuffle(lengths)
    return lengths


def session_length(session: str, lengths: Sequence[int], group_size: int) -> int:
    """Returns the length for a session of the controller, `position:prompt/sample`; the list repeats."""
    position, sample = int(session.split(":")[0]), int(session.rsplit("/")[-1])
    return lengths[(position * group_size + sample) % len(lengths)]


class ForcedLengths(LogitsProcessor):  # type: ignore[misc]
    """Bans the end token until a row's last token, which it forces to be the end token.

    Args:
        lengths: tokens of each row's completion, including the end token.
        end_token: id of the end token.
        prompt_tokens: width of the prompts, including padding.
        cap: `max_new_tokens`, which ends rows of that length without an end token; None if they sample one too.
    """

    def __init__(self, lengths: Sequence[int], *, end_token: int, prompt_tokens: int, cap: int | None = None) -> None:
        self.lengths = torch.tensor(lengths)
        self.end_token = end_token
        self.prompt_tokens = prompt_tokens
        self.cap = cap

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        num_new = token_ids.shape[1] - self.prompt_tokens + 1  # with the token to be drawn
        is_end = self.lengths <= num_new
        if num_new == self.cap:
            is_end = is_end & (self.lengths < num_new)
        scores[:, self.end_token] = torch.where(is_end, scores[:, self.end_token], float("-inf"))
        ends_now = (self.lengths == num_new) & is_end
        if ends_now.any():
            only_end = torch.full_like(scores[0], float("-inf"))
            only_end[self.end_token] = 0.0
            scores[ends_now] = only_end
        return scores
