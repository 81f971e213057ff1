"""What an engine may be able to do beyond RolloutEngine, each a small protocol.

The framework asks `isinstance(engine, ScoresTokens)` before it uses an ability; an engine without it works as well.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable


@runtime_checkable
class LivesOnLoop(Protocol):
    """Requests run on the controller's event loop, instead of a thread of the engine's own."""

    async def attach(self) -> None:
        """Called on the loop, before the first request."""
        ...

    async def detach(self) -> None:
        """Called on the loop when its tasks are cancelled and it is about to end."""
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """Logprobs of given tokens, with which `WeightSync` probes that the engine has the trainer's weights."""

    probe_every_n_loads: int  # 1 probes each load; more where a probe takes a noticeable part of an iteration

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of each token given those before, 0 for the first; empty if it cannot say now."""
        ...


@runtime_checkable
class LimitsContext(Protocol):
    """Prompt and completion together have at most `max_context` tokens, if it is not None."""

    max_context: int | None


@runtime_checkable
class DecodesInThreads(Protocol):
    """Decodes in this process, with this many threads; None until `start` has chosen."""

    threads: int | None


@runtime_checkable
class NamesDtypes(Protocol):
    """Names the dtypes it computes in, from which the probe's bound follows."""

    def dtypes(self) -> set[str]:
        """Of the weights it is given and of its computation, as torch names them, or `auto`."""
        ...


@runtime_checkable
class SharesDevices(Protocol):
    """May be on the trainer's devices (`colocated`); then it releases its memory for each update."""

    placement: Literal["separate", "colocated"]

    def make_room(self) -> None:
        """Releases the memory of weights and key-values; the next `load_weights` takes it again."""
        ...
