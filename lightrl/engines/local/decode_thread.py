"""DecodeThread: the only thread that uses a LocalEngine's batch.

    submit() ─► waiting rows ─► RunningBatch (slots) ─► completions, handed to the caller's event loop
    any loop    in call order   this thread              in one call per loop and step

One condition variable guards the shared state. Callers add requests, cancellations and holds; the thread handles them
between two tokens, at a "token boundary". A hold (a pause, a weight load, a score) keeps the thread from starting the
next token.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from lightrl.concurrency.loop_thread import settle_all
from lightrl.engines.engine import Completion
from lightrl.engines.local.running_batch import Row, RunningBatch
from lightrl.errors import EngineError, EngineTimeout

_ADMIT_FRACTION = 8  # rows are admitted when 1/8 of the slots are free, so that a prefill contains several rows


class DecodeThread(threading.Thread):
    """Decodes from `start` until `close`, or until decoding fails. After that, all other methods raise EngineError.

    `pause` and `held` raise EngineTimeout if a token takes over `boundary_timeout_s`, and `close` if a layer does.
    """

    def __init__(self, batch: RunningBatch, threads: int, ending: threading.Event, boundary_timeout_s: float) -> None:
        super().__init__(name="lightrl-local-engine", daemon=True)
        self._batch = batch
        # High priority, so that a decoding step's short kernels run before an update's long kernels.
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(batch.device, priority=-1) if batch.device.type == "cuda" else None
        self._threads = threads
        self._boundary_timeout_s = boundary_timeout_s
        self._hold_lock = threading.Lock()  # one `held` at a time
        self._condition = threading.Condition()  # guards everything below
        self.weight_version = -1
        self._ending = ending  # the decoder's event; set by `close`
        self._awaited: set[asyncio.Future[Completion]] = set()  # futures of waiting and running rows
        self._waiting: deque[Row] = deque()
        self._num_running = 0
        self._has_cancellations = self._is_paused = self._is_held = False
        self._is_stale = False  # whether the KV cache must be recomputed before the next token
        self._is_at_boundary = True
        self._boundary_waiters: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None

    def queue_depths(self) -> dict[str, int]:
        with self._condition:
            return {"running": self._num_running, "waiting": len(self._waiting)}

    def submit(self, rows: list[Row]) -> list[asyncio.Future[Completion]]:
        """Returns a future for each row's completion; a row whose future is cancelled leaves at the next boundary."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = []
        for row in rows:
            row.owner = future = loop.create_future()
            future.add_done_callback(self._on_done)
            futures.append(future)
        with self._condition:
            self.check_alive()
            if self.weight_version < 0:
                raise EngineError("LocalEngine has no weights yet. Call load_weights before the first request.")
            self._awaited.update(futures)
            self._waiting.extend(rows)
            self._condition.notify_all()
        return futures

    def _on_done(self, future: asyncio.Future[Completion]) -> None:
        if future.cancelled():
            with self._condition:
                self._has_cancellations = True
                self._condition.notify_all()

    async def pause(self) -> None:
        """Stops decoding between two tokens until `resume`, even if this call is cancelled."""
        with self._condition:
            self.check_alive()
            self._is_paused = True
            if self._is_at_boundary:
                return
            boundary: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._boundary_waiters.append(boundary)
            self._condition.notify_all()
        try:
            await asyncio.wait_for(boundary, self._boundary_timeout_s)
        except TimeoutError as error:
            raise self._overdue("pause") from error
        with self._condition:
            self.check_alive()

    def resume(self) -> None:
        with self._condition:
            self.check_alive()
            self._is_paused = False
            self._condition.notify_all()

    @contextlib.contextmanager
    def held(self, caller: str) -> Iterator[None]:
        """Context manager that stops decoding. Only one caller can be inside, and the decode thread must not enter."""
        with self._hold_lock:
            try:
                with self._condition:
                    self.check_alive()
                    self._is_held = True
                    self._condition.notify_all()
                    if not self._condition.wait_for(lambda: self._is_at_boundary, self._boundary_timeout_s):
                        raise self._overdue(caller)
                    self.check_alive()
                if self._stream is not None:  # the caller's GPU work runs after the last token and before the next
                    torch.cuda.current_stream(self._batch.device).wait_stream(self._stream)
                yield
            finally:
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._batch.device))
                with self._condition:
                    self._is_held = False
                    self._condition.notify_all()

    def unfinished(self) -> dict[int, Completion]:
        """Returns the unfinished completions, keyed by seed, in slot order; must be called during a pause.

        The KV cache is recomputed before the next token, as in a run that resumes from these completions.
        """
        with self._condition:
            self.check_alive()
            self._is_stale = True
            return self._batch.unfinished()

    def take_version(self, weight_version: int) -> None:
        """Tags later tokens with this version and marks the KV cache as stale; called inside `held` after a load."""
        self.weight_version = weight_version
        self._is_stale = True

    def close(self) -> None:
        """Stops decoding; pending requests raise EngineError."""
        with self._condition:
            self._ending.set()
            self._condition.notify_all()
        self.join(self._boundary_timeout_s)
        if self.is_alive():
            raise self._overdue("close")

    def check_alive(self) -> None:
        """Raises EngineError if decoding has stopped for good."""
        if self._ending.is_set():
            raise EngineError("LocalEngine is closed. Create a new engine.")
        if self._failure is not None:
            raise self._failure_error()

    def _failure_error(self) -> EngineError:
        fix = "Fix the cause"
        if isinstance(self._failure, torch.OutOfMemoryError):
            fix = "Lower LocalEngine's max_batch or prefill_tokens, or the trainer's microbatch_tokens,"
        error = EngineError(
            f"LocalEngine's decode thread failed with {type(self._failure).__name__}: {self._failure}. {fix} and "
            "create a new engine."
        )
        error.__cause__ = self._failure
        return error

    def _overdue(self, caller: str) -> EngineTimeout:
        return EngineTimeout(
            f"{caller} waited {self._boundary_timeout_s:.0f} s for LocalEngine to finish a token, with "
            f"{self._num_running} completions running, {len(self._waiting)} waiting and weight version "
            f"{self.weight_version}. Increase boundary_timeout_s, or lower max_batch or prefill_tokens."
        )

    def run(self) -> None:
        """Decodes token by token until `close` or an error."""
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode(), contextlib.ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(torch.cuda.stream(self._stream))
                while self._next_token_is_due():
                    self._advance()
        except BaseException as error:  # noqa: BLE001  # passed on to all waiting callers
            with self._condition:
                self._failure = None if self._ending.is_set() else error
        self._fail_requests()

    def _next_token_is_due(self) -> bool:
        """Waits at the token boundary until there is a token to sample; returns False once the engine is closed."""
        with self._condition:
            while True:
                if self._has_cancellations:
                    self._has_cancellations = False
                    self._waiting = deque(row for row in self._waiting if not row.owner.cancelled())
                    self._batch.remove(lambda row: bool(row.owner.cancelled()))
                    self._awaited = {future for future in self._awaited if not future.cancelled()}
                self._num_running = self._batch.size
                if self._ending.is_set():
                    return False
                if not (self._is_paused or self._is_held) and (self._batch.size or self._waiting):
                    self._is_at_boundary = False
                    return True
                self._batch.read()
                self._reach_boundary()
                self._condition.wait()

    def _reach_boundary(self) -> None:
        self._is_at_boundary = True
        settle_all((waiter, None) for waiter in self._boundary_waiters)
        self._boundary_waiters.clear()
        self._condition.notify_all()

    def _advance(self) -> None:
        """Recomputes a stale KV cache, admits rows or samples a token, and delivers finished completions."""
        batch = self._batch
        with self._condition:
            weight_version = self.weight_version  # changes only at a boundary
            is_stale, self._is_stale = self._is_stale, False
            capacity = batch.capacity(self._waiting) if self._waiting else batch.max_rows
            free = capacity - batch.size
            num_needed = min(len(self._waiting), max(1, capacity // _ADMIT_FRACTION))
            num_admitted = min(free, len(self._waiting)) if free >= num_needed or not batch.size else 0
            rows = [self._waiting.popleft() for _ in range(num_admitted)]
        if is_stale:
            batch.recompute(weight_version)
        if rows:
            batch.reserve(rows)
        if started := [row for row in rows if row.started is not None]:
            batch.readmit(started, weight_version)
        if new := [row for row in rows if row.started is None]:
            batch.admit(new, weight_version)
        if not rows:
            batch.step()
        finished = [(row.owner, completion) for row, completion in batch.retire()]
        if finished:
            with self._condition:
                self._awaited.difference_update(future for future, _ in finished)
            settle_all(finished)

    def _fail_requests(self) -> None:
        if self._stream is not None and self._failure is None:
            self._stream.synchronize()  # kernels may still use memory that is freed below
        with self._condition:
            futures = list(self._awaited)
            self._waiting.clear()
            self._num_running = 0
            self._reach_boundary()
        del self._batch  # also frees the model
        closed = "LocalEngine was closed before the completion finished."
        settle_all(
            (future, EngineError(closed) if self._failure is None else self._failure_error()) for future in futures
        )
