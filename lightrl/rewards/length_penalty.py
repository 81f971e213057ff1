"""OverlongPenalty: the part of a reward that discourages completions close to their length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import count_text

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment: 0 up to `max_tokens - buffer_tokens`, then linear to -factor at `max_tokens`.

    Source: DAPO, equation 13, https://arxiv.org/abs/2503.14476.

    Args:
        buffer_tokens: the penalty starts this many tokens before the length limit.
        factor: the penalty at the limit and beyond.
    """

    buffer_tokens: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_bounds(1, **{"buffer_tokens in the overlong penalty": self.buffer_tokens})
        if not self.factor >= 0:
            raise ValueError(
                f"factor in the overlong penalty must be >= 0, got {self.factor}: it is subtracted from the reward."
            )

    @overload
    def __call__(self, num_tokens: int, max_tokens: int) -> float: ...
    @overload
    def __call__(self, num_tokens: Tensor, max_tokens: int) -> Tensor: ...

    def __call__(self, num_tokens: Any, max_tokens: int) -> Any:
        """Returns the penalty, from -factor to 0, for one number of tokens or for each in an integer tensor [B].

        Args:
            num_tokens: tokens that the policy generated.
            max_tokens: the limit on their number.

        Raises:
            ValueError: if the buffer is larger than the limit.
        """
        if self.buffer_tokens > max_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} in the overlong penalty must be at most the length limit of "
                f"{count_text(max_tokens, 'token')}."
            )
        over = num_tokens - (max_tokens - self.buffer_tokens)
        clamped_twice = abs(over) - abs(over - self.buffer_tokens) + self.buffer_tokens  # 2 · min(max(over, 0), buffer)
        return -self.factor * (clamped_twice / (2 * self.buffer_tokens))
