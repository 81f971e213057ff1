"""RolloutEngine: the interface of all engines; Completion: what they generate; PlannedEngine: what they will use."""

# ruff: noqa: B027  # a method without a body is a default that does nothing
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch

# Imported at run time: jsonargparse would reparse this module for each method if it had imports for type checkers only.
import transformers
from transformers import PretrainedConfig

from lightrl.columns import TOKENS, TokenArray, as_columns, reserve
from lightrl.models.tuning import Part
from lightrl.trajectory import FinishReason, JsonObject, Sampling
from lightrl.weights import Bucket, SharedFolder

Verification = Literal["digests", "replicas", "version"]


@dataclass(frozen=True)
class Completion:
    """The tokens generated after a prompt; each field has one entry per token. Lists become TokenArrays."""

    token_ids: Sequence[int]  # int32, including the stop token
    # float32, nats: log-softmax(logits / temperature) over the token's support; without temperature if greedy.
    logprobs: Sequence[float]
    weight_versions: Sequence[int]  # int32, version of the weights that sampled each token; never decreasing
    finish_reason: FinishReason
    columns: Mapping[str, Any] = field(default_factory=dict)  # lightrl/columns; truncated sampling requires supports

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
    """The devices and memory that an engine will use, on rank 0's device, on servers or elsewhere on this machine."""

    name: str
    place: Literal["rank 0", "servers", "elsewhere"]
    servers: int = 1
    tp: int = 1
    width: int = 2  # bytes of a parameter, and of a key or value
    max_rows: int | None = None  # rows that are decoded together; None for all in flight
    is_block_fp8: bool = False  # one byte per parameter, except embedding and head


class RolloutEngine(ABC):
    """Generates completions asynchronously, with a weight version on every token.

    Lifecycle: `start` once, `load_weights` before the first request, `generate` any number of times with `load_weights`
    in between, then `close`; after that it may be started again. All engines pass the same tests,
    `tests/engines/engine_contract.py`.

    A subclass must implement `generate` and `load_weights`, which sets `weight_version`. The other methods have
    defaults for an engine in the trainer's process that cannot compute logprobs of given tokens, cannot continue a
    completion, and is never paused.
    """

    weight_version: int = -1  # of the current weights; -1 before the first load
    max_context: int | None = None  # most tokens of prompt plus completion, set by `start`; None for no limit
    threads: int | None = None  # number of threads that decode in this process, set by `start`
    continues_completions: ClassVar[bool] = False  # `generate` accepts `started`, and `unfinished` is implemented
    can_drop_replicas: ClassVar[bool] = False
    probe_every_n_loads: int = 0  # how often WeightSync compares `score` with the trainer; 0 without `score`
    parameter_names: ClassVar[Literal["module", "checkpoint"]] = "module"  # how `load_weights` names parameters
    should_verify: bool = True  # set before `start`; see `WeightSync.verify`

    @property
    def records_columns(self) -> bool:
        """Whether completions may have columns that the trainer replays, such as each token's experts."""
        return False

    @property
    def is_colocated(self) -> bool:
        """Whether the engine shares the trainer's devices, and releases its memory during the trainer's updates."""
        return False

    def check(self) -> None:
        """Raises ValueError if the engine cannot start with its settings; called early, on every rank."""

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ValueError if the engine does not support this sampling."""

    def check_workers(self, num: int) -> None:
        """Raises ValueError if `num` workflow workers cannot send requests directly; see `open_to_workers`."""
        raise ValueError(
            f"workflow_workers={num} needs an engine with servers, such as SGLangEngine; {type(self).__name__} "
            "generates in rank 0's process. Set workflow_workers to 0."
        )

    def place(self, trainer_devices: Sequence[torch.device]) -> str:
        """Chooses devices, given the trainer's devices on this machine; returns a description of the choice.

        Raises:
            ValueError: if there are too few GPUs.
        """
        return ""

    def planned(self, trainer_device: torch.device, num_parameters: int) -> PlannedEngine | None:
        """Returns the devices and memory that the engine will use, before anything starts; None if unknown."""
        return None

    def take_memory(self, key_value_bytes: float, fraction: float) -> str:
        """Limits its memory on the trainer's GPUs, unless the user set a limit; returns a description of the limit.

        Args:
            key_value_bytes: GPU memory available for key-values.
            fraction: the fraction of a GPU's memory that servers may use.
        """
        return ""

    def expect_policy(self, policy: transformers.PreTrainedModel, *, num_versions: int) -> None:
        """Called before `start` with the policy and the number of weight versions that are in use at the same time."""

    def start(self, config: PretrainedConfig) -> None:
        """Builds this config's model, or connects to servers that have it; called first, on the main thread."""

    async def attach(self) -> None:
        """Called on the rollout's event loop before the first request."""

    async def detach(self) -> None:
        """Called on the rollout's event loop before the loop stops."""

    def open_to_workers(self, num: int) -> tuple[Any, Any]:
        """Returns a Leader, and the Follower that each of `num` workers gets; called after `start`."""
        raise NotImplementedError

    @abstractmethod
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
        """Generates `n` completions of a prompt; requests are admitted in the order of the calls.

        With n > 1, the seed of completion i is derived from (sampling.seed, i). A cancelled request leaves the engine
        at the next token boundary. An engine may omit the parameters `images` and `started`: `images` is passed only if
        there are any, `started` only to an engine that continues completions.

        Args:
            session: name of the conversation, for prefix caches.
            images: those of the prompt, then those of observations; `token_ids` contains their image tokens.
            started: the tokens so far of an interrupted completion (n = 1). They keep their logprobs and versions and
                count toward `sampling.max_new_tokens`; sampling continues as if it had not been interrupted.

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
        images: tuple[str, ...] = (),
        started: Sequence[Completion | None] | None = None,
    ) -> list[asyncio.Future[Completion]]:
        """Starts one completion of this prompt for each sampling, with the results that `generate` would return.

        This default calls `generate` for each sampling. An engine that starts all of them with one request saves tasks
        on the event loop; it must not bypass a subclass that overrides only `generate` (see `replaces_generate_alone`).

        Called on the event loop. Each future is done when its completion is; cancelling it cancels only that one.

        Args:
            started: the tokens so far of each completion, or None. Passed only to an engine that continues completions,
                and only if a completion has tokens.

        Raises:
            ValueError, EngineError: as `generate` does, here or in the futures.
        """

        async def generate(index: int, sampling: Sampling) -> Completion:
            request: dict[str, Any] = {"images": images} if images else {}
            if started is not None and started[index] is not None:
                request["started"] = started[index]
            (completion,) = await self.generate(token_ids, sampling, session=f"{session}/{index}", **request)
            return completion

        return [asyncio.ensure_future(generate(index, sampling)) for index, sampling in enumerate(samplings)]

    async def pause(self) -> None:
        """Stops the requests in flight at a token boundary, and makes new requests wait."""

    async def resume(self) -> None:
        """Continues all requests; they keep their tokens, and recompute key-values if the weights have changed."""

    async def unfinished(self) -> dict[int, Completion]:
        """Returns each running completion so far, by the seed of its sampling, with finish reason `abort`.

        Called while the engine is paused, if it `continues_completions`. The completions continue after `resume`.
        """
        return {}

    def parts_to_load(self) -> list[Part]:
        """Returns the parts of the policy's weights that the next `load_weights` expects, in this order."""
        return ["whole"]

    @abstractmethod
    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Pauses, loads a version, sets `weight_version` and resumes; if a step fails, restores the old weights.

        Called outside the event loop's thread. Tokens sampled afterwards have the new version, and key-values of old
        weights are not used again. An engine that was already paused stays paused.

        Raises:
            WeightSyncError: if a name, shape or value does not fit the model; the engine keeps its old weights.
        """

    def shared_folder(self) -> SharedFolder | None:
        """Returns the folder where each rank may write its share of the weights; None if the engine reads no folder."""
        return None

    def release_memory(self) -> None:
        """If the engine `is_colocated`, releases its memory for the trainer until the next load."""

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Returns the logprobs of the sequences' tokens from each replica that may get requests, by replica name.

        Each is at temperature 1, given the tokens before it, and 0 for the first token; caches of earlier requests are
        not used. A replica that cannot compute them has empty lists. Called if `probe_every_n_loads` is above 0.
        """
        return {}

    def dtypes(self) -> set[str]:
        """Returns torch's names of the dtypes of weights and computation, which set the probe's tolerance."""
        return {"float32"}

    def verified_by(self) -> dict[str, Verification]:
        """Returns the check that each replica that may get requests passed at its last load, by replica name.

        `digests`: every parameter equals the trainer's bit for bit. `replicas`: the checksum equals that of the other
        replicas, but all may be wrong. `version`: it reports the version number; nothing else was compared.
        """
        return {}

    def drop_replica(self, name: str, reason: str) -> None:
        """Stops sending requests to this replica until it has loaded the weights again."""

    def queue_depths(self) -> dict[str, int]:
        """Returns the numbers of completions in progress (`running`) and waiting for a slot (`waiting`)."""
        return {"running": 0, "waiting": 0}

    def server_states(self) -> list[JsonObject]:
        """Returns the state of each of its servers, for `lightrl status`."""
        return []

    def close(self) -> None:
        """Ends threads and processes; requests in flight raise EngineError. May be called twice."""


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
