"""FakeEngine: a deterministic rollout engine without a model. It can be set to be slow, to fail or to hang."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from lightrl.columns import SUPPORTS
from lightrl.concurrency.loop_thread import wake_up
from lightrl.engines.engine import Completion, RolloutEngine, check_request
from lightrl.errors import EngineError, WeightSyncError
from lightrl.functional import encode_supports
from lightrl.trajectory import FinishReason, Sampling
from lightrl.weights import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Script = Callable[[list[int], Sampling, int], list[int]]
Allowed = Callable[[str, list[int]], Collection[int]]
Seconds = float | Callable[[list[int], Sampling], float]


@dataclass(frozen=True)
class FakeRequest:
    """The arguments to one `generate` call."""

    number: int  # 0 for the first call
    token_ids: list[int]
    sampling: Sampling
    session: str
    n: int
    weight_version: int  # the engine's version when the call was made


@dataclass
class _Draft:
    is_truncated: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)  # the tokens' encoded supports, if sampling is truncated

    @classmethod
    def of(cls, started: Completion | None, sampling: Sampling) -> _Draft:
        draft = cls(sampling.is_truncated)
        if started is not None:
            draft.token_ids, draft.logprobs = list(started.token_ids), list(started.logprobs)
            draft.weight_versions = list(started.weight_versions)
            draft.supports = [bytes(started.columns.get(SUPPORTS.name, ()))]
        return draft

    def completion(self, finish_reason: FinishReason) -> Completion:
        columns = {SUPPORTS.name: b"".join(self.supports)} if self.is_truncated else {}
        return Completion(list(self.token_ids), list(self.logprobs), list(self.weight_versions), finish_reason, columns)


class FakeEngine(RolloutEngine):
    """Generates completions from a script or a hash, token by token at a given pace; supports pauses and weight syncs.

    Without a script, token i is a hash of (seed, i), uniform over the vocabulary, as if all logits were equal. Its
    logprob is minus the log of the number of tokens that may be sampled. Stop tokens cannot be sampled before
    `min_new_tokens`; top-k and top-p keep the lowest ids, because lower ids win ties. A weight sync during a completion
    changes the versions of later tokens, but not the tokens.

    All arguments are also attributes and may be set between requests. `script` and `seconds_per_token` are called once
    per completion, `delay_s` once per request, and `allowed` once per token.

    Args:
        script: maps (prompt, sampling, sample) to the token ids of completion number `sample`. They are cut off after
            the first stop token or after `max_new_tokens`.
        seconds_per_token: a number, or a function of (prompt, sampling) that slows some completions, for example
            `lambda prompt, sampling: 0.3 if prompt[0] == 7 else 0.01`. Even at 0, other tasks run between tokens.
        delay_s: seconds before the first token: a number, or a function of (prompt, sampling).
        fail_requests: indices of the requests that raise EngineError; the first request is 0.
        hang_requests: indices of the requests that hang until they are cancelled or the engine is closed.
        fail_loads: weight versions whose load raises WeightSyncError.
        logprob_error_nats: added to every logprob, to test checks that compare logprobs.
        allowed: maps (`Sampling.grammar`, the completion's tokens so far) to the token ids that the grammar allows.

    Example:
        engine = FakeEngine(script=lambda prompt, sampling, sample: [prompt[-1], 1])
    """

    continues_completions = True

    def __init__(
        self,
        *,
        script: Script | None = None,
        seconds_per_token: Seconds = 0.0,
        delay_s: Seconds = 0.0,
        fail_requests: Collection[int] = (),
        hang_requests: Collection[int] = (),
        fail_loads: Collection[int] = (),
        logprob_error_nats: float = 0.0,
        allowed: Allowed | None = None,
    ) -> None:
        self.script = script
        self.seconds_per_token = seconds_per_token
        self.delay_s = delay_s
        self.fail_requests = fail_requests
        self.hang_requests = hang_requests
        self.fail_loads = fail_loads
        self.logprob_error_nats = logprob_error_nats
        self.allowed, self.reads_grammars = allowed, allowed is not None
        self.requests: list[FakeRequest] = []  # all requests so far
        self.loaded_versions: list[int] = []  # all versions loaded so far
        self.num_running = 0  # completions in progress
        self._drafts: dict[int, _Draft] = {}  # seed → draft of a completion in progress
        self._vocab_size = 0
        self._max_context: int | None = None
        self._shapes: dict[str, torch.Size] | None = None  # parameter shapes in the first load
        self._lock = threading.Lock()  # guards the attributes below
        self._is_paused = False
        self._is_loading = False
        self._is_closed = False
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def start(self, config: PretrainedConfig) -> None:
        with self._lock:
            self._is_closed = self._is_paused = False
        self.weight_version = -1
        self._shapes = None
        config = config.get_text_config()
        self._vocab_size = config.vocab_size
        self._max_context = getattr(config, "max_position_embeddings", None)

    def queue_depths(self) -> dict[str, int]:
        return {"running": self.num_running, "waiting": 0}

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
        """Generates `n` completions concurrently; ignores images."""
        check_request(token_ids, sampling, n, vocab_size=self._vocab_size, max_context=self._max_context)
        number = len(self.requests)
        self.requests.append(FakeRequest(number, list(token_ids), sampling, session, n, self.weight_version))
        self._check_open()
        if self.weight_version < 0:
            raise EngineError("FakeEngine has no weights yet. Call load_weights before the first request.")
        if number in self.fail_requests:
            raise EngineError(f"FakeEngine fails request {number}, as set in fail_requests.")
        if number in self.hang_requests:
            await self._sleep(math.inf)
        await self._sleep(_seconds(self.delay_s, token_ids, sampling))
        completions = (self._complete(token_ids, sampling, sample, started) for sample in range(n))
        return list(await asyncio.gather(*completions))

    async def unfinished(self) -> dict[int, Completion]:
        return {seed: draft.completion("abort") for seed, draft in self._drafts.items()}

    async def pause(self) -> None:
        self._check_open()
        with self._lock:
            self._is_paused = True

    async def resume(self) -> None:
        self._check_open()
        with self._lock:
            self._is_paused = False
        self._wake_sleepers()

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Reads the buckets and sets the version; names and shapes must be the same as in the first load."""
        self._check_open()
        with self._lock:
            self._is_loading = True
        try:
            shapes: dict[str, torch.Size] = {}
            for bucket in buckets:
                for name, tensor in bucket.tensors.items():
                    if not torch.isfinite(tensor).all():
                        raise WeightSyncError(f"Parameter {name!r} has non-finite values.")
                    shapes[name] = tensor.shape
            if self._shapes is not None and shapes != self._shapes:
                different = sorted(name for name, _ in shapes.items() ^ self._shapes.items())
                raise WeightSyncError(f"Parameters {different[:4]} differ from the first load's.")
            if weight_version in self.fail_loads:
                raise WeightSyncError(f"FakeEngine fails the load of version {weight_version}, as set in fail_loads.")
            self._shapes = shapes
            self.weight_version = weight_version
            self.loaded_versions.append(weight_version)
        finally:
            with self._lock:
                self._is_loading = False
            self._wake_sleepers()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._wake_sleepers()

    async def _complete(
        self, prompt: list[int], sampling: Sampling, sample: int, started: Completion | None
    ) -> Completion:
        seconds = _seconds(self.seconds_per_token, prompt, sampling)
        script = None if self.script is None else self.script(prompt, sampling, sample)
        draft = _Draft.of(started, sampling)
        if sample == 0:
            self._drafts[sampling.seed] = draft
        finish_reason: FinishReason = "length"
        self.num_running += 1
        try:
            while len(draft.token_ids) < sampling.max_new_tokens:
                position = len(draft.token_ids)
                if script is not None and position >= len(script):
                    break
                await self._sleep(seconds)
                banned = set(sampling.stop_token_ids) if position < sampling.min_new_tokens else set()
                if sampling.grammar and self.allowed is not None:
                    banned = {*range(self._vocab_size)} - {*self.allowed(sampling.grammar, draft.token_ids)}
                choices = self._choices(sampling, banned)
                token = self._pick(prompt, sampling, sample, position, choices) if script is None else script[position]
                draft.token_ids.append(token)
                if sampling.is_truncated:
                    support = np.asarray(sorted({*choices, token}))
                    draft.supports += encode_supports(
                        np.zeros_like(support), support, np.array([token]), self._vocab_size
                    )
                logprob = 0.0 if sampling.temperature == 0 else -math.log(len(choices))
                draft.logprobs.append(logprob + self.logprob_error_nats)
                draft.weight_versions.append(self.weight_version)
                if token in sampling.stop_token_ids:
                    finish_reason = "stop"
                    break
        finally:
            self.num_running -= 1
            if self._drafts.get(sampling.seed) is draft:
                del self._drafts[sampling.seed]
        return draft.completion(finish_reason)

    def _choices(self, sampling: Sampling, banned: set[int]) -> Sequence[int]:
        """Returns the tokens that may be sampled; all are equally likely."""
        vocabulary = range(self._vocab_size)
        allowed = [token for token in vocabulary if token not in banned] if banned else vocabulary
        if not sampling.is_truncated:
            return allowed
        top_k = allowed[: sampling.max_support]
        return top_k[: math.ceil(sampling.top_p * len(top_k))]

    def _pick(self, prompt: list[int], sampling: Sampling, sample: int, position: int, choices: Sequence[int]) -> int:
        """Picks one of the choices by hashing the position with the seed, or with the prompt if sampling is greedy."""
        source = f"{prompt}" if sampling.temperature == 0 else f"{sampling.seed}/{sample}"
        digest = hashlib.blake2b(f"{source}/{position}".encode(), digest_size=8).digest()
        return choices[int.from_bytes(digest, "big") % len(choices)]

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("FakeEngine is closed. Start it, or create a new one.")

    async def _sleep(self, seconds: float) -> None:
        """Waits for `seconds`, then until no pause or load is in progress; raises EngineError if the engine closes."""
        loop, woken = entry = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + seconds
        if seconds <= 0:
            await asyncio.sleep(0)
        while True:
            remaining_s = deadline - loop.time()
            with self._lock:
                if self._is_closed:
                    raise EngineError("FakeEngine was closed before the completion finished.")
                if remaining_s <= 0 and not (self._is_paused or self._is_loading):
                    return
                woken.clear()
                self._sleepers.add(entry)
            try:
                await asyncio.wait_for(woken.wait(), remaining_s if 0 < remaining_s < math.inf else None)
            except TimeoutError:
                continue
            finally:
                with self._lock:
                    self._sleepers.discard(entry)

    def _wake_sleepers(self) -> None:
        with self._lock:
            sleepers = list(self._sleepers)
        for loop, event in sleepers:
            wake_up(loop, event.set)


def _seconds(setting: Seconds, token_ids: list[int], sampling: Sampling) -> float:
    return setting(token_ids, sampling) if callable(setting) else setting
