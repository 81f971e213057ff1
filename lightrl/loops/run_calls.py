"""run_calls: executes the infer calls of a DataFlowGraph, each as soon as its inputs are ready.

rank 0    policy's calls ...   function (thread) ...  ─┐
rank 1    critic's calls ...                          ─┴─► each result to all ranks when a call needs it, or at the end
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lightrl.dataflow import DataFlowGraph, ModelCall, runs_in_thread
from lightrl.errors import TrainingError
from lightrl.trace import span

WAIT_S = 1.0  # between two calls of `on_wait`

_State = TypeVar("_State")
_Outputs = Mapping[str, Any]


def run_calls(
    graph: DataFlowGraph,
    start: _State,
    run: Callable[[ModelCall, _State], _Outputs],
    add: Callable[[_State, _Outputs], _State],
    *,
    left_out: Collection[str] = (),
    runs_here: Callable[[ModelCall], bool] = lambda call: True,
    share: Callable[[ModelCall, _Outputs], _Outputs] | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> _State:
    """Runs all infer calls and returns `start` with their results added.

    Calls of the trainer's models run in this thread, each other call in its own thread. A call that misses its deadline
    is named in the error and abandoned; its thread is a daemon.

    With several ranks, each rank runs its own calls, the trainer's in the graph's order. Results are shared as late as
    possible, when a call needs them or at the end, so that calls on different ranks run at the same time.

    Args:
        graph: the calls; its train calls are skipped.
        start: an Experience; `add(experience, tensors)` returns one with more keys.
        run: returns the outputs of a call by key; called from several threads concurrently.
        left_out: names of calls whose outputs `start` has, or that run later.
        runs_here: whether this rank runs a call.
        share: gives every rank the outputs that it needs from the ranks that ran the call; all ranks call it, in the
            same order. None for one rank, which runs the trainer's calls in the order in which they become ready.
        on_wait: called about once a second while waiting for a call in another thread.

    Raises:
        TrainingError: if a call misses its deadline.
    """
    calls = [call for call in graph.of_kind("infer") if call.name not in left_out]
    execution = _Execution(graph, calls, start, run, add, runs_here, on_wait)
    execution.start_ready()
    trainer_calls = [call for call in calls if not runs_in_thread(call)]
    if share is not None:
        execution.run_with_others(trainer_calls, share)
        return execution.state
    while trainer_calls:
        execution.wait_for(lambda: any(map(execution.is_ready, trainer_calls)))
        call = next(filter(execution.is_ready, trainer_calls))
        trainer_calls.remove(call)
        execution.run_now(call)
    execution.wait_for(lambda: all(call.name in execution.outputs for call in calls))
    return execution.state


@dataclass
class _Execution(Generic[_State]):
    """This rank's results. The calls' threads add theirs and start the calls that were waiting for them."""

    graph: DataFlowGraph
    calls: list[ModelCall]
    state: _State
    run: Callable[[ModelCall, _State], _Outputs]
    add: Callable[[_State, _Outputs], _State]
    runs_here: Callable[[ModelCall], bool]
    on_wait: Callable[[], None]
    outputs: dict[str, _Outputs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._todo = {call.name for call in self.calls}
        self._partial: set[str] = set()  # calls whose outputs are still divided over several ranks
        self._started: set[str] = set()
        self._running: dict[str, tuple[ModelCall, float]] = {}  # in other threads, with their deadlines
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def is_ready(self, call: ModelCall) -> bool:
        ready = self.outputs.keys() - self._partial
        return all(name in ready or name not in self._todo for name in self.graph.edges[call.name])

    def start_ready(self) -> None:
        with self._changed:
            for call in self.calls:
                if not runs_in_thread(call) or not self.runs_here(call) or call.name in self._started:
                    continue
                if self.is_ready(call):
                    self._started.add(call.name)
                    self._running[call.name] = call, time.monotonic() + call.timeout_s
                    name, args = f"lightrl-call-{call.name}", (call, self.state)
                    threading.Thread(target=self._run_in_thread, args=args, name=name, daemon=True).start()

    def run_with_others(self, trainer_calls: list[ModelCall], share: Callable[[ModelCall, _Outputs], _Outputs]) -> None:
        """Runs the trainer's calls of this rank and shares all results with the other ranks."""
        shared = {call.name for call in self.graph.calls} - self._todo

        def share_with_all(call: ModelCall) -> None:
            if call.name in shared:
                return
            shared.add(call.name)
            for name in self.graph.edges[call.name]:
                share_with_all(self.graph[name])
            if runs_in_thread(call) and self.runs_here(call):
                self.wait_for(lambda: call.name in self.outputs)
            outputs = share(call, self.outputs.get(call.name, {}))
            self._partial.discard(call.name)
            self.add_outputs(call.name, outputs)

        for call in trainer_calls:
            for name in self.graph.edges[call.name]:
                share_with_all(self.graph[name])
            if self.runs_here(call):
                self._partial.add(call.name)
                self.run_now(call)
        for call in self.calls:
            share_with_all(call)

    def run_now(self, call: ModelCall) -> None:
        """Runs the call in the caller's thread."""
        with self._changed:
            self._raise_if_failed()
            state = self.state
        with span(call.name, "score"):
            outputs = self.run(call, state)
        self.add_outputs(call.name, outputs)

    def add_outputs(self, name: str, outputs: _Outputs) -> None:
        with self._changed:
            self.state = self.add(self.state, outputs)
            self.outputs[name] = outputs
            self._running.pop(name, None)
            self.start_ready()
            self._changed.notify_all()

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Waits; raises the error of a call in another thread, or TrainingError at the first missed deadline."""
        with self._changed:
            self._raise_if_failed()
            while not is_enough():
                call, deadline = min(self._running.values(), key=lambda item: item[1])
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TrainingError(
                        f"Model call {call.name!r} did not return its outputs {list(call.outputs)} within timeout_s="
                        f"{call.timeout_s:g}; still running: {sorted(self._running)}. Check what it calls, or increase "
                        "its timeout_s."
                    )
                self._changed.wait(min(remaining_s, WAIT_S))
                self._raise_if_failed()
                self.on_wait()

    def _run_in_thread(self, call: ModelCall, state: _State) -> None:
        try:
            with span(call.name, "score"):
                outputs = self.run(call, state)
            self.add_outputs(call.name, outputs)
        except BaseException as error:  # noqa: BLE001  # `wait_for` raises it in the main thread
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
