"""RolloutEngine: what generates. The protocol that LocalEngine, FakeEngine and SGLangEngine fulfil, and Completion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightrl.trajectory import FinishReason, Sampling
from lightrl.weights import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Completion:
    """What the engine wrote after a prompt; the lists have one entry for each new token."""

    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # nats, log-softmax(logits / temperature), before top-p and top-k; unscaled when greedy
    weight_versions: list[int]  # the weights that sampled each token; never decreasing
    finish_reason: FinishReason


@runtime_checkable
class RolloutEngine(Protocol):
    """Prompts in, completions out, asynchronously, with a weight version on every token.

    Life: `start` once, then `load_weights` before the first request, then `generate` as often as wanted with
    `load_weights` in between, then `close`; then it may be started again, for another life. One contract suite,
    `tests/engines/engine_contract.py`, holds for all.
    """

    weight_version: int  # of the weights that sample now; -1 before the first load

    def start(self, config: PretrainedConfig) -> None:
        """Builds or reaches the model of this config; called on the main thread, before anything else."""
        ...

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, images: tuple[str, ...] = ()
    ) -> list[Completion]:
        """`n` completions of one prompt; requests are admitted in the order of the calls.

        `images` are the prompt's pictures, whose image tokens are in `token_ids`; it is given only where there are
        some, so an engine for text alone may leave the argument out.

        With n > 1 completion i draws with `sampling_seed`-like independence from (sampling.seed, i). On cancellation
        the request leaves the engine at the next token boundary. `session` names the conversation, for prefix caches.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, or leaves no room in the context.
            EngineError: if the engine fails or is closed.
        """
        ...

    async def pause(self) -> None:
        """Returns when in-flight requests have stopped at a token boundary; new ones wait."""
        ...

    async def resume(self) -> None:
        """Requests go on; prefix tokens are kept, their key-values recomputed if the weights have changed."""
        ...

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Pause, load, acknowledge `weight_version`, resume; or roll back to the old weights and raise.

        Called from a thread that is not the event loop's. Tokens drawn afterwards carry the new version; no key-value
        made by old weights is used again. An engine that was paused stays paused.

        Raises:
            WeightSyncError: if a name, shape or value is not what the model wants; the old weights serve on.
        """
        ...

    def queue_depths(self) -> dict[str, int]:
        """Completions that are being written (`running`) and that wait for a slot (`waiting`); for messages."""
        ...

    def close(self) -> None:
        """Ends threads and processes; in-flight requests raise EngineError. May be called twice."""
        ...


def check_request(
    token_ids: list[int], sampling: Sampling, n: int, *, vocab_size: int, max_context: int | None
) -> None:
    """Raises ValueError if no engine of this model can answer."""
    if n < 1:
        raise ValueError(f"n must be at least 1 completion, got {n}.")
    if not token_ids:
        raise ValueError("The prompt is empty. Add a token, such as the start token.")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"The prompt has token id {wrong}, outside the model's vocabulary (0 to {vocab_size - 1}). Use the model's "
            "own tokenizer."
        )
    if max_context is not None and len(token_ids) + sampling.max_new_tokens > max_context:
        raise ValueError(
            f"{len(token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed the context of "
            f"{max_context} tokens. Shorten the prompt or lower max_new_tokens."
        )
