"""RolloutEngine, the interface for all engines; Completion, what they return; PlannedEngine, for memory estimates."""

# ruff: noqa: B027  # a method without a body is a default that does nothing
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Unpack

import torch

# Imported at run time: with type-checking-only imports, jsonargparse would reparse this module for each method.
import transformers
from transformers import PretrainedConfig

from lightrl.columns import TOKENS, TokenArray, as_columns, reserve
from lightrl.models.tuning import Part
from lightrl.trajectory import Attached, FinishReason, JsonObject, Sampling
from lightrl.weights import Bucket, SharedFolder

Verification = Literal["digests", "replicas", "version"]


@dataclass(frozen=True)
class Completion:
    """The tokens generated for a prompt. Each sequence has one entry per token; lists become TokenArrays."""

    token_ids: Sequence[int]  # int32, including the stop token
    # float32, in nats: log-softmax(logits / temperature) over the token's support; greedy tokens use temperature 1.
    logprobs: Sequence[float]
    weight_versions: Sequence[int]  # int32, the weight version that sampled each token; never decreases
    finish_reason: FinishReason
    columns: Mapping[str, Any] = field(default_factory=dict)  # see lightrl/columns; truncated sampling needs supports

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TOKENS["token_ids"].array(self.token_ids))
        object.__setattr__(self, "logprobs", TOKENS["behavior_logprobs"].array(self.logprobs))
        object.__setattr__(self, "weight_versions", TOKENS["weight_versions"].array(self.weight_versions))
        object.__setattr__(self, "columns", as_columns(self.columns))

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields and columns as plain Python objects, for checkpoints."""
        values = {**{name: value for name, value in vars(self).items() if name != "columns"}, **self.columns}
        return {name: [it.code, it.text] if isinstance(it, TokenArray) else it for name, it in values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Completion:
        values = {name: TokenArray.of_text(it[1], it[0]) if isinstance(it, list) else it for name, it in state.items()}
        required = {name: values.pop(name) for name in ("token_ids", "logprobs", "weight_versions", "finish_reason")}
        return cls(**required, columns=values)


reserve(item.name for item in fields(Completion))


@dataclass(frozen=True)
class PlannedEngine:
    """Where an engine will run, and what determines its memory use; known before anything starts."""

    name: str
    place: Literal["rank 0", "servers", "elsewhere"]
    servers: int = 1
    tp: int = 1
    width: int = 2  # bytes per parameter, and per element of the KV cache
    max_rows: int | None = None  # maximum number of rows decoded together; None means all rows in flight
    is_block_fp8: bool = False  # one byte per parameter, except in the embedding and the head
    starts_servers: bool = True  # if False, the plan cannot change `servers` and `tp`


class RolloutEngine(ABC):
    """Generates completions asynchronously, and records the weight version of every token.

    Lifecycle: call `start`, then `load_weights`, then `generate` any number of times with more loads in between, then
    `close`. A closed engine may be started again. Every engine passes `tests/engines/engine_contract.py`.

    A subclass must implement `generate` and `load_weights`, which sets `weight_version`. The defaults of the other
    methods suit an engine in the trainer's process that cannot compute logprobs of given tokens, cannot continue a
    completion, and is never paused.
    """

    weight_version: int = -1  # version of the current weights; -1 before the first load
    max_context: int | None = None  # maximum tokens in prompt plus completion, set by `start`; None means no limit
    threads: int | None = None  # number of threads that decode in this process, set by `start`
    continues_completions: ClassVar[bool] = False  # `generate` accepts `started`, and `unfinished` is implemented
    can_drop_replicas: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = False  # `log_probabilities` is implemented
    returns_topk: ClassVar[bool] = False  # completions can include the most likely tokens (columns/topk.py)
    probe_every_n_loads: int = 0  # WeightSync compares `score` with the trainer every n loads; 0 means never
    reads_grammars: bool = False  # supports `Sampling.grammar`, which restricts the tokens that may be sampled
    parameter_names: ClassVar[Literal["module", "checkpoint"]] = "module"  # which names `load_weights` expects
    should_verify: bool = True  # see `WeightSync.verify`; set before `start`
    trainer_precision: str = "32-true"  # set before `place`, `planned` and `start`

    @property
    def records_columns(self) -> bool:
        """Whether completions may include columns that the trainer replays, such as the experts of each token."""
        return False

    @property
    def is_colocated(self) -> bool:
        """Whether the engine shares the trainer's devices, and releases its memory during the trainer's updates."""
        return False

    def check(self) -> None:
        """Raises ValueError if the engine cannot start with its settings; called early, on every rank."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ValueError if the engine does not support this sampling."""
        if sampling.topk_logprobs and not self.returns_topk:
            raise ValueError(
                f"sampling.topk_logprobs={sampling.topk_logprobs} needs an engine that returns the most likely tokens, "
                f"but {type(self).__name__} does not. Use LocalEngine, SGLangEngine or VLLMEngine, or set it to 0."
            )
        if sampling.grammar and not self.reads_grammars:
            raise ValueError(
                "The engine does not support grammars. Servers need server_args.tokenizer_path (vLLM: tokenizer)."
            )

    def check_workers(self, num: int) -> None:
        """Raises ValueError if `num` workflow workers cannot send requests on their own; see `open_to_workers`."""
        raise ValueError(
            f"workflow_workers={num} needs an engine with servers, such as SGLangEngine; {type(self).__name__} "
            "generates in rank 0's process. Set workflow_workers to 0."
        )

    def place(self, trainer_devices: Sequence[torch.device]) -> str:
        """Chooses and describes its devices, given the trainer's devices here; raises ValueError for too few GPUs."""
        return ""

    def planned(self, trainer_device: torch.device, num_parameters: int) -> PlannedEngine | None:
        """Predicts before anything starts where the engine will run and how much memory it needs; None if unknown."""
        return None

    def take_memory(self, key_value_bytes: float, fraction: float) -> str:
        """Limits the engine's memory on the trainer's GPUs, unless the user set a limit; describes the limit.

        Args:
            key_value_bytes: GPU memory available for the KV cache.
            fraction: the fraction of each GPU's memory that a server may use.
        """
        return ""

    def expect_policy(self, policy: transformers.PreTrainedModel, *, num_versions: int) -> None:
        """Receives the policy and the number of weight versions that may be in use at once. Called before `start`."""

    def start(self, config: PretrainedConfig) -> None:
        """Builds the model for this config, or connects to servers that run it. Called first, on the main thread."""

    async def attach(self) -> None:
        """Called on the rollout's event loop before the first request."""

    async def detach(self) -> None:
        """Called on the rollout's event loop before the loop stops."""

    def open_to_workers(self, num: int) -> tuple[Any, Any]:
        """Returns a Leader for this process and the Follower to open in each of `num` workers; called after `start`."""
        raise NotImplementedError

    @abstractmethod
    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        started: Completion | None = None,
        **attached: Unpack[Attached],
    ) -> list[Completion]:
        """Generates `n` completions for a prompt; requests are admitted in call order.

        With n > 1, the seed of completion i is derived from (sampling.seed, i). A cancelled request leaves the engine
        at the next token boundary. An engine may omit the parameters `started` and `attached`: `started` is passed only
        to an engine that continues completions, and each key of `attached` only if it has a value.

        Args:
            session: name of the conversation, used for prefix caching.
            started: an interrupted completion to continue (n = 1). Its tokens keep their logprobs and versions and
                count toward `sampling.max_new_tokens`; sampling continues as if it had not been interrupted.
            attached: the policy's inputs other than token ids; see `Attached` in trajectory.py.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, or exceeds the context.
            EngineError: if the engine fails or is closed.
        """

    def generate_group(
        self,
        token_ids: list[int],
        samplings: Sequence[Sampling],
        *,
        session: str,
        started: Sequence[Completion | None] | None = None,
        **attached: Unpack[Attached],
    ) -> list[asyncio.Future[Completion]]:
        """Starts one completion for this prompt per sampling; `generate` would return the same completions.

        This default calls `generate` for each sampling. An override that sends one request for the group needs fewer
        tasks, but must not bypass a subclass that overrides only `generate` (see `replaces_generate_alone`).
        Called on the event loop. Cancelling one of the futures cancels only that completion.

        Args:
            started: for each sampling, an interrupted completion to continue, or None. Passed only to an engine that
                continues completions, and only if at least one has tokens.

        Raises:
            ValueError, EngineError: as in `generate`, either from this call or from the futures.
        """

        async def generate(index: int, sampling: Sampling) -> Completion:
            request: dict[str, Any] = {**attached}
            if started is not None and started[index] is not None:
                request["started"] = started[index]
            (completion,) = await self.generate(token_ids, sampling, session=f"{session}/{index}", **request)
            return completion

        return [asyncio.ensure_future(generate(index, sampling)) for index, sampling in enumerate(samplings)]

    async def pause(self) -> None:
        """Stops the requests in flight at a token boundary, and makes new requests wait."""

    async def resume(self) -> None:
        """Continues all requests where they stopped; recomputes the KV cache if the weights have changed."""

    async def unfinished(self) -> dict[int, Completion]:
        """Returns every unfinished completion, with finish reason `abort`, keyed by sampling seed.

        Called while the engine is paused, if it `continues_completions`. The completions continue after `resume`.
        """
        return {}

    def parts_to_load(self) -> list[Part]:
        """Returns the parts of the policy's weights that the next `load_weights` expects, in this order."""
        return ["whole"]

    @abstractmethod
    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Pauses, loads new weights, sets `weight_version` and resumes; on failure, restores the old weights.

        Not called on the event loop's thread. Later tokens are tagged with the new version, and KV cache entries
        computed with old weights are not reused. An engine that was already paused stays paused.

        Raises:
            WeightSyncError: if a name, shape or value does not fit the model; the engine keeps its old weights.
        """

    def shared_folder(self) -> SharedFolder | None:
        """Returns the folder where each rank may write its share of the weights; None if the engine reads no folder."""
        return None

    def release_memory(self) -> None:
        """If the engine `is_colocated`, releases its memory for the trainer until the next load."""

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Returns the logprobs that each routable replica computes for these sequences' tokens, keyed by replica name.

        The temperature is 1, and each first logprob is 0. Cached prefixes from earlier requests are not used. A
        replica that cannot compute logprobs returns empty lists. Called if `probe_every_n_loads` is above 0.
        """
        return {}

    def log_probabilities(self, token_ids: list[int]) -> torch.Tensor:
        """Returns, for each token but the last, the log probabilities of the next token, [T - 1, V]."""
        raise NotImplementedError

    def dtypes(self) -> set[str]:
        """Returns the torch names of the dtypes used for weights and computation; they set the probe's tolerance."""
        return {"float32"}

    def verified_by(self) -> dict[str, Verification]:
        """Returns which check each routable replica passed at its last load, keyed by replica name.

        `digests`: every parameter is bit-identical to the trainer's. `replicas`: all replicas have the same checksum,
        but all could be wrong. `version`: only the version number was compared.
        """
        return {}

    def drop_replica(self, name: str, reason: str) -> None:
        """Stops sending requests to this replica until it has loaded the weights again."""

    def queue_depths(self) -> dict[str, int]:
        """Returns how many completions are in progress (`running`) and how many wait for a slot (`waiting`)."""
        return {"running": 0, "waiting": 0}

    def server_states(self) -> list[JsonObject]:
        """Returns the state of each server, for `lightrl status`."""
        return []

    def close(self) -> None:
        """Stops threads and processes; requests in flight raise EngineError. Safe to call twice."""


def replaces_generate_alone(engine: RolloutEngine) -> bool:
    """Whether the engine's class overrides `generate` but inherits `generate_group`, which would bypass it."""
    for kind in type(engine).__mro__:
        if "generate_group" in vars(kind):
            return False
        if "generate" in vars(kind):
            return True
    return False


def check_request(
    token_ids: list[int], sampling: Sampling, n: int, *, vocab_size: int, max_context: int | None
) -> None:
    """Raises ValueError if the request is invalid for this model."""
    if n < 1:
        raise ValueError(f"n must be at least 1 completion, got {n}.")
    if not token_ids:
        raise ValueError("The prompt is empty. Add a token, such as the start token.")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"The prompt has token id {wrong}, outside the model's vocabulary (0 to {vocab_size - 1}). Use the model's "
            "tokenizer."
        )
    if max_context is not None and len(token_ids) + sampling.max_new_tokens > max_context:
        raise ValueError(
            f"{len(token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed the context of "
            f"{max_context} tokens. Shorten the prompt or lower max_new_tokens."
        )
