"""RolloutEngine: the protocol of LocalEngine, FakeEngine and SGLangEngine; and Completion, what they generate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# Engines import this at run time: jsonargparse parses a module that imports for type checkers again for each method.
import transformers
from transformers import PretrainedConfig

from lightrl.columns import TOKENS, TokenArray, as_columns
from lightrl.models.tuning import Part
from lightrl.trajectory import FinishReason, Sampling
from lightrl.weights import Bucket


@dataclass(frozen=True)
class Completion:
    """The tokens after a prompt, one entry for each new token; a list that is given becomes a TokenArray."""

    token_ids: Sequence[int]  # int32, the stop token included
    # float32, in nats: log-softmax(logits / temperature), within the token's support; unscaled when greedy.
    logprobs: Sequence[float]
    weight_versions: Sequence[int]  # int32, the weights that sampled each token; never decreasing
    finish_reason: FinishReason
    # What else the engine returns of the tokens, by name (lightrl/columns); truncated sampling needs one.
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TOKENS["token_ids"].array(self.token_ids))
        object.__setattr__(self, "logprobs", TOKENS["behavior_logprobs"].array(self.logprobs))
        object.__setattr__(self, "weight_versions", TOKENS["weight_versions"].array(self.weight_versions))
        object.__setattr__(self, "columns", as_columns(self.columns))

    def state_dict(self) -> dict[str, Any]:
        """Return the fields and columns in plain Python, for checkpoints."""
        values = {**{name: value for name, value in vars(self).items() if name != "columns"}, **self.columns}
        return {name: [it.code, it.text] if isinstance(it, TokenArray) else it for name, it in values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Completion:
        values = {name: TokenArray.of_text(it[1], it[0]) if isinstance(it, list) else it for name, it in state.items()}
        fields = {name: values.pop(name) for name in ("token_ids", "logprobs", "weight_versions", "finish_reason")}
        return cls(**fields, columns=values)


@runtime_checkable
class RolloutEngine(Protocol):
    """Prompts in, completions out, asynchronously, with a weight version on every token.

    Life: `start` once, `load_weights` before the first request, then `generate` any number of times with `load_weights`
    in between, then `close`; then it may be started again. All engines pass one contract suite,
    `tests/engines/engine_contract.py`.
    """

    weight_version: int  # the current weights; -1 before the first load

    def expect_policy(self, policy: transformers.PreTrainedModel, *, num_versions: int) -> None:
        """Called before `start` with the model whose weights it gets, and the number of versions that may be in use."""
        return

    def start(self, config: PretrainedConfig) -> None:
        """Builds the model of this config or connects to it; called on the main thread, before anything else."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        images: tuple[str, ...] = (),
        started: Completion | None = None,
    ) -> list[Completion]:
        """Generates `n` completions of one prompt; requests are admitted in the order of the calls.

        With n > 1, completion i has a seed of its own, derived from (sampling.seed, i). On cancellation the request
        leaves the engine at the next token boundary. An engine may omit the parameters `images` and `started`: they are
        passed only if there are images, and to an engine that continues completions.

        Args:
            session: the conversation's name, for prefix caches.
            images: of the prompt, then of observations; `token_ids` has their image tokens.
            started: the start of the only completion. Its tokens keep their logprobs and versions, and count for
                `sampling.max_new_tokens`; the others are sampled as if nothing had come between.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, or exceeds the context.
            EngineError: if the engine fails or is closed.
        """
        ...

    def generate_group(
        self,
        token_ids: list[int],
        samplings: Sequence[Sampling],
        *,
        session: str,
        images: tuple[str, ...] = (),
        started: Sequence[Completion | None] | None = None,
    ) -> list[asyncio.Future[Completion]]:
        """Starts one completion of this prompt for each sampling, with its seed; each as `generate` would return it.

        This default calls `generate` for each. An engine that takes them in one request spares the event loop a task
        for each; it must not bypass a subclass that replaces `generate` alone (see `replaces_generate_alone`).

        Called on the event loop. A future is done when its own completion is; cancelling it removes that request alone.

        Args:
            started: how each completion begins, None where nothing is generated; passed only to an engine that
                continues completions (`abilities.ContinuesCompletions`), and only if there is one.

        Raises:
            ValueError, EngineError: as `generate`, or in the futures.
        """

        async def generate(index: int, sampling: Sampling) -> Completion:
            request: dict[str, Any] = {"images": images} if images else {}
            if started is not None and started[index] is not None:
                request["started"] = started[index]
            (completion,) = await self.generate(token_ids, sampling, session=f"{session}/{index}", **request)
            return completion

        return [asyncio.ensure_future(generate(index, sampling)) for index, sampling in enumerate(samplings)]

    async def pause(self) -> None:
        """Returns when in-flight requests have stopped at a token boundary; new ones wait."""
        ...

    async def resume(self) -> None:
        """Continues requests; they keep their tokens, and recompute key-values if the weights have changed."""
        ...

    def parts_to_load(self) -> list[Part]:
        """The parts of the policy's weights that the next `load_weights` takes, in order."""
        return ["whole"]

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Pauses, loads, acknowledges `weight_version`, resumes; or rolls back to the old weights and raises.

        Called from another thread than the event loop's. Tokens sampled afterwards carry the new version; key-values of
        old weights are not used again. A paused engine stays paused.

        Raises:
            WeightSyncError: if a name, shape or value does not fit the model; the engine keeps its old weights.
        """
        ...

    def queue_depths(self) -> dict[str, int]:
        """Completions in progress (`running`) and waiting for a slot (`waiting`); for messages."""
        ...

    def close(self) -> None:
        """Ends threads and processes; in-flight requests raise EngineError. May be called twice."""
        ...


def replaces_generate_alone(engine: RolloutEngine) -> bool:
    """Whether a subclass replaces `generate` of an engine that has a `generate_group` of its own, but not that one."""
    for kind in type(engine).__mro__:
        if "generate_group" in vars(kind):
            return False
        if "generate" in vars(kind):
            return True
    return False


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
