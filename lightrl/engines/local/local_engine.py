"""LocalEngine: generation in this process, with continuous batching, its own decode thread and its own weights.

    generate() ─► waiting rows ─► RunningBatch (slots) ─► Completion, handed to the caller's event loop
     any loop      in the order     one decode thread       in one call per loop and step
                   of the calls

The decode thread is the only one that touches the batch. Everything else goes through one condition: callers add
requests, cancellations and holds; the thread looks at them between two tokens, which is what "token boundary" means. A
hold (a pause, or a load of weights) keeps it from starting the next token; it says so by `_is_at_boundary`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.engines.abilities import DecodesInThreads, LimitsContext, ScoresTokens
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.engines.local.decoder import Decoder, HuggingFaceDecoder
from lightrl.engines.local.fast_decoder import LlamaDecoder, find_family
from lightrl.engines.local.running_batch import Row, RunningBatch
from lightrl.engines.local.sampler import completion_seed
from lightrl.errors import EngineError, EngineTimeout, WeightSyncError
from lightrl.models.pictures import Pictures, refusal
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Measured on 2 cores, batch 64: with a second thread 1 M parameters fall from 6,789 to 3,610 tokens/s, 27 M rise from
# 415 to 508.
ONE_THREAD_PARAMETERS = 10_000_000
_ADMIT_FRACTION = 8  # rows are admitted when 1/8 of the slots is free: one prefill for several rows


@dataclass(eq=False)
class _Request:
    """One call of `generate`."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Completion]]
    completions: list[Completion | None]
    is_cancelled: bool = False


@dataclass
class _Deliveries:
    """What one step finished, gathered per event loop: waking a loop once for 512 completions costs little."""

    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, EngineError | None]]] = field(default_factory=dict)

    def add(self, request: _Request, error: EngineError | None = None) -> None:
        self.by_loop.setdefault(request.loop, []).append((request, error))

    def send(self) -> None:
        for loop, results in self.by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:  # the loop is closed: nobody waits any more
                continue


def _resolve(results: list[tuple[_Request, EngineError | None]]) -> None:
    for request, error in results:
        if request.future.done():
            continue
        if error is not None:
            request.future.set_exception(error)
        else:
            request.future.set_result([completion for completion in request.completions if completion is not None])


class LocalEngine(RolloutEngine, ScoresTokens, LimitsContext, DecodesInThreads):
    """A rollout engine in this process, on the CPU (or one GPU), that owns its copy of the weights.

    Llama, Mistral, Qwen2 and Qwen3 models decode on a fast path; any other decoder-only model with a key-value cache
    runs as Hugging Face wrote it, with pictures too. Both share the scheduler: rows wait in the order of the calls, are
    admitted into free slots, and leave with their last token; equal prompts that are admitted together are computed
    once. Tokens depend on (seed, position) and the logits, not on the batch, up to float rounding of the logits.

    `pause` and `resume` set and clear one flag: any number of pauses ends with one resume. A paused engine queues
    requests, so `pause`, many `generate` calls, `resume` admits them as one wave in the order of the calls. `pause` on
    an engine that idles returns at once. A load holds decoding by itself and leaves the flag as it is.

    Memory: the weights once; while a load runs, the old ones too, since a bad bucket must be undone; key-values for the
    rows and tokens that were in use at the most.

    Args:
        max_batch: slots, most completions that decode together.
        threads: cores that decoding uses; None takes 1 for a model below 10 M parameters, whose small operations a
            second thread slows down, and what torch uses in the thread that calls `start` for others.
        max_context: most tokens of prompt and completion together; None is the config's `max_position_embeddings`.
        dtype: of the engine's weights, such as `bfloat16`; `auto` is float32 on the CPU, elsewhere the config's.
        device: where to decode.
        fast_path: False runs every model as Hugging Face wrote it.
        prefill_tokens: most prompt tokens, padding included, in one forward; bounds the memory of a wave's prefill.
        boundary_timeout_s: how long `pause`, `load_weights` and `close` wait for the token in progress.
    """

    probe_every_n_loads = 10  # a probe of a model of 0.8 M parameters takes 9 ms: 3 % of the quickstart after each load

    def __init__(
        self,
        *,
        max_batch: int = 256,
        threads: int | None = None,
        max_context: int | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        fast_path: bool = True,
        prefill_tokens: int = 8192,
        boundary_timeout_s: float = 120.0,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_tokens", prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value}, expected at least 1. Raise it.")
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}, expected at least 1, or None for torch's own number. Raise it.")
        if max_context is not None and max_context < 2:
            raise ValueError(f"max_context={max_context}, expected at least 2, a prompt token and a new one. Raise it.")
        if boundary_timeout_s <= 0:
            raise ValueError(f"boundary_timeout_s={boundary_timeout_s}, expected more than 0. Raise it.")
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype={dtype!r}, expected auto or a torch dtype such as float32 or bfloat16.")
        self.weight_version = -1
        self.max_batch = max_batch
        self.threads = threads
        self.max_context = max_context  # after `start` a number
        self._given_max_context = max_context
        self.dtype = dtype
        self.device = torch.device(device)
        self.fast_path = fast_path
        self.prefill_tokens = prefill_tokens
        self.boundary_timeout_s = boundary_timeout_s

        self._decoder: Decoder | None = None
        self._batch: RunningBatch | None = None
        self._thread: threading.Thread | None = None
        self._vocab_size = 0
        self._pictures: Pictures | None = None  # how the model reads pictures; None if it sees none
        self._load_lock = threading.Lock()  # one load at a time
        self._condition = threading.Condition()  # guards what follows
        self._requests: set[_Request] = set()  # whose callers wait
        self._waiting: deque[Row] = deque()
        self._has_cancellations = False
        self._is_paused = False
        self._is_loading = False
        self._is_stale = False  # the weights have changed since the key-values were made
        self._is_at_boundary = True
        self._boundary_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._is_closed = False
        self._failure: BaseException | None = None
        self._num_running = 0

    def start(self, config: PretrainedConfig) -> None:
        """Builds the model, its weights still unset, and starts the decode thread; after `close` all begins anew.

        Raises:
            ValueError: if the config is of no decoder-only model, or leaves less room than `max_context`.
        """
        if self._thread is not None and (self._thread.is_alive() or not self._is_closed):
            raise EngineError("LocalEngine was started before, expected one start. Close it first, or make a new one.")
        text_config = config.get_text_config()
        room = getattr(text_config, "max_position_embeddings", None)
        if self._given_max_context is None:
            self.max_context = room if room is not None else 2**31 - 1
        elif room is not None and self._given_max_context > room:
            raise ValueError(
                f"max_context={self.max_context}, expected at most the model's max_position_embeddings={room}. "
                "Lower it."
            )
        self.weight_version = -1
        self._is_closed = self._is_paused = self._is_stale = self._has_cancellations = False
        self._failure = None
        self._vocab_size = text_config.vocab_size
        self._pictures = Pictures.of(config)
        self._decoder = self._make_decoder(config)
        if self.threads is None:
            num_parameters = sum(shape.numel() for shape in self._decoder.shapes.values())
            self.threads = 1 if num_parameters < ONE_THREAD_PARAMETERS else torch.get_num_threads()
        self._batch = RunningBatch(
            self._decoder, max_rows=self.max_batch, vocab_size=self._vocab_size, device=self.device
        )
        self._thread = threading.Thread(target=self._decode, name="lightrl-local-engine", daemon=True)
        self._thread.start()

    @property
    def is_fast(self) -> bool:
        """Whether the model decodes on the fast path; known after `start`."""
        return isinstance(self._decoder, LlamaDecoder)

    def queue_depths(self) -> dict[str, int]:
        """Completions that decode (`running`) and that wait for a slot (`waiting`)."""
        with self._condition:
            return {"running": self._num_running, "waiting": len(self._waiting)}

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, images: tuple[str, ...] = ()
    ) -> list[Completion]:
        """`n` completions of one prompt; see `RolloutEngine`.

        Waits for the decode thread, without a deadline of its own: the controller has one. On cancellation the rows
        leave at the next token boundary, or at once if the engine is paused.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, leaves no room in the context, or has
                pictures that cannot be read or have no place in it.
            EngineError: if the engine has no weights, fails or is closed.
        """
        self._check(token_ids, sampling, n)
        pixels = self._pixel_values(images, token_ids) if images else None
        loop = asyncio.get_running_loop()
        request = _Request(loop, loop.create_future(), [None] * n)
        prompt = tuple(token_ids)
        rows = [
            Row(prompt, sampling, completion_seed(sampling.seed, sample), (request, sample), images, pixels)
            for sample in range(n)
        ]
        with self._condition:
            self._check_alive()
            if self.weight_version < 0:
                raise EngineError(
                    "LocalEngine has no weights yet, expected a load before the first request. Call load_weights first."
                )
            self._requests.add(request)
            self._waiting.extend(rows)
            self._condition.notify_all()
        try:
            return await request.future
        except asyncio.CancelledError:
            with self._condition:
                request.is_cancelled = True
                self._has_cancellations = True
                self._condition.notify_all()
            raise
        finally:
            with self._condition:
                self._requests.discard(request)

    async def pause(self) -> None:
        """Returns when the decode thread has stopped between two tokens; requests wait until `resume`.

        The decode thread wakes it. On cancellation the pause stands, `resume` ends it.

        Raises:
            EngineTimeout: if the token in progress is not done after `boundary_timeout_s`; the pause stands.
            EngineError: if the engine fails or is closed.
        """
        loop = asyncio.get_running_loop()
        with self._condition:
            self._check_alive()
            self._is_paused = True
            if self._is_at_boundary:
                return
            future: asyncio.Future[None] = loop.create_future()
            self._boundary_waiters.append((loop, future))
            self._condition.notify_all()
        try:
            await asyncio.wait_for(future, self.boundary_timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineTimeout(self._boundary_message("pause")) from error
        with self._condition:
            self._check_alive()

    async def resume(self) -> None:
        """Decoding goes on; after a load the key-values of all rows are recomputed first."""
        with self._condition:
            self._check_alive()
            self._is_paused = False
            self._condition.notify_all()

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Stops decoding between two tokens, copies the buckets in, goes on; see `RolloutEngine`.

        The copies are made by the calling thread. Waits for the token in progress, up to `boundary_timeout_s`. If
        `buckets` itself raises, the old weights are restored and the exception goes on.

        Raises:
            WeightSyncError: if a name is unknown, missing or given twice, a shape differs, or a value is not finite.
            EngineTimeout: if decoding does not stop in time; nothing was changed.
            EngineError: if the engine fails or is closed.
        """
        with self._load_lock:
            self._hold("load_weights")
            is_loaded = False
            try:
                self._copy_in(buckets)
                is_loaded = True
            finally:
                with self._condition:  # in one go: no token may see new weights under the old version
                    if is_loaded:
                        self.weight_version = weight_version
                        self._is_stale = True
                    self._is_loading = False
                    self._condition.notify_all()

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of each token given those before, 0 for the first; called from another thread.

        Waits for the token in progress, up to `boundary_timeout_s`.
        """
        chosen = torch.tensor(token_ids[1:], device=self.device)[:, None]
        return [0.0, *self._log_probabilities(token_ids).gather(1, chosen)[:, 0].tolist()]

    def likeliest(self, token_ids: list[int], num: int) -> list[list[tuple[float, int]]]:
        """As `score`: logprob and id of the `num` likeliest tokens at each place, likeliest first; none at place 0."""
        found = self._log_probabilities(token_ids)
        logprobs, ids = found.topk(min(num, found.shape[1]), dim=1)
        return [[], *(list(zip(*pair, strict=True)) for pair in zip(logprobs.tolist(), ids.tolist(), strict=True))]

    def _log_probabilities(self, token_ids: list[int]) -> Tensor:
        """[T - 1, V], of what comes behind each token but the last."""
        with self._load_lock:
            self._hold("score")
            try:
                assert self._decoder is not None
                with torch.inference_mode():
                    return torch.log_softmax(self._decoder.logits(token_ids[:-1]), -1)
            finally:
                with self._condition:
                    self._is_loading = False
                    self._condition.notify_all()

    def read_weights(self) -> dict[str, Tensor]:
        """A copy of every parameter under its Hugging Face name, to compare with the trainer's."""
        with self._condition:
            self._check_alive()
        assert self._decoder is not None
        return {name: self._decoder.read(name) for name in self._decoder.shapes}

    def close(self) -> None:
        """Ends the decode thread; in-flight requests raise EngineError. May be called twice.

        Raises:
            EngineTimeout: if the token in progress is not done after `boundary_timeout_s`.
        """
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is None:
            return
        self._thread.join(self.boundary_timeout_s)
        if self._thread.is_alive():
            raise EngineTimeout(self._boundary_message("close"))
        self._decoder = self._batch = None

    def _make_decoder(self, config: PretrainedConfig) -> Decoder:
        family = find_family(config) if self.fast_path else None
        if self.dtype != "auto":
            dtype = getattr(torch, self.dtype)
        elif self.device.type == "cpu":
            dtype = torch.float32
        else:
            dtype = getattr(config, "dtype", None) or torch.float32
        if family is not None:
            return LlamaDecoder(config, family, dtype=dtype, device=self.device, prefill_tokens=self.prefill_tokens)
        return HuggingFaceDecoder(config, dtype=dtype, device=self.device, prefill_tokens=self.prefill_tokens)

    def _check(self, token_ids: list[int], sampling: Sampling, n: int) -> None:
        if self._thread is None or self.max_context is None:
            raise EngineError("LocalEngine was not started, expected start(config) before the first request.")
        if n < 1:
            raise ValueError(f"n={n}, expected at least 1 completion. Raise it.")
        if not token_ids:
            raise ValueError("The prompt is empty, expected at least one token. Add a token, such as the start token.")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self._vocab_size)
            raise ValueError(
                f"The prompt has token id {wrong}, expected 0 to {self._vocab_size - 1}, the model's vocabulary. Use "
                "the tokenizer that belongs to the model."
            )
        if len(token_ids) + sampling.max_new_tokens > self.max_context:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} are more than the "
                f"context of {self.max_context} tokens. Shorten the prompt or lower max_new_tokens."
            )

    def _pixel_values(self, images: tuple[str, ...], token_ids: list[int]) -> Tensor:
        if self._pictures is None:
            raise ValueError(refusal(len(images)))
        self._pictures.check(images, token_ids)
        return self._pictures.pixel_values(images)

    def _check_alive(self) -> None:
        """Raises EngineError if nobody decodes; the condition is held."""
        if self._is_closed:
            raise EngineError("LocalEngine is closed, expected an open one. Make a new engine.")
        if self._failure is not None:
            raise self._failure_error()
        if self._thread is None:
            raise EngineError("LocalEngine was not started, expected start(config) first.")

    def _failure_error(self) -> EngineError:
        error = EngineError(
            f"LocalEngine's decode thread failed with {type(self._failure).__name__}: {self._failure}. Mend the cause "
            "and make a new engine."
        )
        error.__cause__ = self._failure
        return error

    def _boundary_message(self, who: str) -> str:
        return (
            f"{who} waited {self.boundary_timeout_s:.0f} s for LocalEngine's token in progress, with "
            f"{self._num_running} completions running, {len(self._waiting)} waiting, weight version "
            f"{self.weight_version}. Raise boundary_timeout_s, or lower max_batch or prefill_tokens."
        )

    def _hold(self, who: str) -> None:
        """Returns when the decode thread has stopped and will not start again while `_is_loading`."""
        deadline = time.monotonic() + self.boundary_timeout_s
        with self._condition:
            self._check_alive()
            self._is_loading = True
            self._condition.notify_all()
            while not self._is_at_boundary:
                if not self._condition.wait(deadline - time.monotonic()):
                    self._is_loading = False
                    self._condition.notify_all()
                    raise EngineTimeout(self._boundary_message(who))
            try:
                self._check_alive()
            except EngineError:
                self._is_loading = False
                raise

    def _copy_in(self, buckets: Iterable[Bucket]) -> None:
        """All parameters, or none: what was overwritten comes back if anything is wrong."""
        assert self._decoder is not None
        decoder = self._decoder
        old: dict[str, Tensor] = {}
        written: set[str] = set()
        try:
            for bucket in buckets:
                for name, tensor in bucket.tensors.items():
                    self._check_parameter(name, tensor, written)
                for name, tensor in bucket.tensors.items():
                    written.add(name)
                    if self.weight_version >= 0:
                        old[name] = decoder.read(name)
                    decoder.write(name, tensor)
            missing = sorted(set(decoder.shapes) - written)
            if missing:
                raise WeightSyncError(
                    f"{len(missing)} of {len(decoder.shapes)} parameters did not arrive, such as {missing[0]!r}, "
                    "expected all of them. Export every parameter; the old weights serve on."
                )
        except BaseException:
            for name, tensor in old.items():
                decoder.write(name, tensor)
            raise

    def _check_parameter(self, name: str, tensor: Tensor, written: set[str]) -> None:
        assert self._decoder is not None
        shape = self._decoder.shapes.get(name, self._decoder.optional_shapes.get(name))
        if shape is None:
            raise WeightSyncError(
                f"Parameter {name!r} is unknown to the engine's model, expected names such as "
                f"{next(iter(self._decoder.shapes))!r}. Export the model that the engine was started with; the old "
                "weights serve on."
            )
        if name in written:
            raise WeightSyncError(f"Parameter {name!r} arrived twice, expected once. Mend the export.")
        if tensor.shape != shape:
            raise WeightSyncError(
                f"Parameter {name!r} arrived with shape {tuple(tensor.shape)}, expected {tuple(shape)}. Export the "
                "model that the engine was started with; the old weights serve on."
            )
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor.detach())
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise WeightSyncError(
                    f"Parameter {name!r} has values that are not finite, expected finite ones. Look for the update "
                    "that made them; the old weights serve on."
                )

    def _decode(self) -> None:
        """The decode thread: one token for every row, again and again, until `close` or an error."""
        assert self.threads is not None
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                while self._take_orders():
                    self._advance()
        except BaseException as error:  # noqa: BLE001 whoever waits learns why
            with self._condition:
                self._failure = error
        self._dismiss()

    def _take_orders(self) -> bool:
        """Waits until there is a token to draw; False when the engine is closed. The token boundary is in here."""
        assert self._batch is not None
        with self._condition:
            while True:
                if self._has_cancellations:
                    self._has_cancellations = False
                    self._waiting = deque(row for row in self._waiting if not row.owner[0].is_cancelled)
                    self._batch.remove(lambda row: bool(row.owner[0].is_cancelled))
                self._num_running = self._batch.size
                if self._is_closed:
                    return False
                is_held = self._is_paused or self._is_loading
                if not is_held and (self._batch.size or self._waiting):
                    self._is_at_boundary = False
                    return True
                self._is_at_boundary = True
                self._wake_boundary_waiters()
                self._condition.notify_all()
                self._condition.wait()

    def _advance(self) -> None:
        """Recomputes what is stale, fills free slots or draws one token in every row, and hands out what is done."""
        batch = self._batch
        assert batch is not None
        with self._condition:
            weight_version = self.weight_version  # it changes at a boundary only
            is_stale, self._is_stale = self._is_stale, False
            free = batch.max_rows - batch.size
            wanted = min(len(self._waiting), max(1, batch.max_rows // _ADMIT_FRACTION))
            rows: list[Row] = []
            if self._waiting and (free >= wanted or not batch.size):
                rows = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if is_stale:
            batch.recompute(weight_version)
        if rows:
            batch.admit(rows, weight_version)
        else:
            batch.step()
        finished = batch.retire()
        if finished:
            self._deliver(finished)

    def _deliver(self, finished: list[tuple[Row, Completion]]) -> None:
        deliveries = _Deliveries()
        for row, completion in finished:
            request, sample = row.owner
            request.completions[sample] = completion
            if not all(logprob == logprob and logprob > float("-inf") for logprob in completion.logprobs):
                raise FloatingPointError("the logits of a token are not finite")
            if all(done is not None for done in request.completions):
                deliveries.add(request)
        deliveries.send()

    def _dismiss(self) -> None:
        """Last act of the decode thread: everyone who waits gets an error."""
        with self._condition:
            requests = list(self._requests)
            self._waiting.clear()
            self._num_running = 0
            self._is_at_boundary = True
            self._wake_boundary_waiters()
            self._condition.notify_all()
            failure = self._failure
        deliveries = _Deliveries()
        for request in requests:
            if failure is not None:
                deliveries.add(request, self._failure_error())
            else:
                deliveries.add(request, EngineError("LocalEngine was closed before the completion was finished."))
        deliveries.send()

    def _wake_boundary_waiters(self) -> None:
        for loop, future in self._boundary_waiters:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the loop is closed: nobody waits any more
                continue
        self._boundary_waiters.clear()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
