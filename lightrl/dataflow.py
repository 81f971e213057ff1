"""Which model computes what from what: ModelCalls and the graph that their keys make, checked before anything runs.

    generate ─► reward ─┬─► reference ──┐
                        ├─► values ─────┼─► advantages ─► policy update, critic update
                        └─► teacher … ──┘

A key is the name of a field or an extra of Experience. A call runs as soon as what it needs is there, each trajectory
passes each call once. Calls of models that share ranks run one after another, in the same order on each; those of roles
with ranks of their own run at the same time; calls without a role (a judge behind a server, a function) run beside them
on rank 0, each in a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lightrl.errors import TrainingError

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ModelCall:
    """One use of one model, or of a function, on the whole iteration's Experience.

    With `run` it is a function of (experience, trajectories), both with the same rows, that gives one tensor for its
    one output, or a dict with a tensor for each; [B], [B, T] or [B, T, ...], rows in order, without gradient. Without
    `run` it is the forward of the role's model, whose logprobs, values or scores the output stands for.

    Example:
        ModelCall("reference_logprobs", role="reference", kind="infer",
                  inputs=("token_ids",), outputs=("reference_logprobs",))
        ModelCall("style", outputs=("style_rewards",), run=ask_the_judge)
    """

    name: str  # unique within a module
    role: str | None = None  # the key of `RLModule.models()`; None: no model of ours, runs beside the others
    kind: Literal["generate", "infer", "train"] = "infer"
    inputs: tuple[str, ...] = ()  # keys that must be there
    outputs: tuple[str, ...] = ()  # keys that it fills in; a new name becomes an extra
    microbatch_tokens: int | None = None  # None: the module's
    run: Callable[..., Any] | None = field(default=None, compare=False)
    after: tuple[str, ...] = ()  # names of calls that must have ended, though no key says so
    timeout_s: float = 1800.0  # deadline of a call without a role
    adapters_off: bool = False  # the role's model as it was before it got its LoRA adapters


class DataFlowGraph:
    """Calls in an order in which they can run. Edges follow from the keys, and from `after`.

    Args:
        calls: in any order.
        roles: of the module's models.
        given: keys that are there before any call; those of a trajectory file, for example.

    Raises:
        ValueError: for a name used twice, a role that does not exist, a key given twice or by nobody, an `after` that
            names no call, or calls that wait for each other in a circle.
    """

    def __init__(self, calls: Iterable[ModelCall], *, roles: Iterable[str], given: Iterable[str] = ()) -> None:
        self.given = frozenset(given)
        found = list(calls)
        known_roles = sorted(roles)
        for index, call in enumerate(found):
            if any(call.name == other.name for other in found[:index]):
                raise ValueError(f"Two model calls are named {call.name!r}, expected distinct names. Rename one.")
            if call.role is not None and call.role not in known_roles:
                raise ValueError(
                    f"Model call {call.name!r} uses role {call.role!r}, expected one of {known_roles}. Add the role to "
                    "models() or mend its name."
                )
            if call.role is None and call.run is None and call.kind == "infer":
                raise ValueError(
                    f"Model call {call.name!r} has neither role nor run, expected one of them. Give role= a role of "
                    "models(), or run= a function."
                )
        self.producers = self._find_producers(found)
        self.edges = {call.name: self._needs(call, found) for call in found}
        self.calls = self._in_order(found)

    def __getitem__(self, name: str) -> ModelCall:
        return next(call for call in self.calls if call.name == name)

    def of_kind(self, kind: Literal["generate", "infer", "train"]) -> list[ModelCall]:
        return [call for call in self.calls if call.kind == kind]

    def _find_producers(self, calls: list[ModelCall]) -> dict[str, str]:
        producers: dict[str, str] = {}
        for call in calls:
            for key in call.outputs:
                other = producers.get(key) or ("the rollout" if key in self.given else None)
                if other is not None:
                    raise ValueError(
                        f"Model call {call.name!r} gives {key!r} a second time, after {other!r}, expected a new key. "
                        "Rename it."
                    )
                producers[key] = call.name
        return producers

    def _needs(self, call: ModelCall, calls: list[ModelCall]) -> tuple[str, ...]:
        """Names of the calls that must end before this one starts."""
        names = {other.name for other in calls}
        unknown = [name for name in call.after if name not in names]
        if unknown:
            raise ValueError(
                f"Model call {call.name!r} comes after {unknown[0]!r}, expected one of {sorted(names)}. Mend the name."
            )
        missing = [key for key in call.inputs if key not in self.producers and key not in self.given]
        if missing:
            raise ValueError(
                f"Model call {call.name!r} needs {missing[0]!r}, which no call gives; there are "
                f"{sorted({*self.producers, *self.given})}. Add a call that gives it, or mend the key."
            )
        needed = [self.producers[key] for key in call.inputs if key in self.producers]
        return tuple(dict.fromkeys([*needed, *call.after]))

    def _in_order(self, calls: list[ModelCall]) -> list[ModelCall]:
        """Topological; where there is a choice, what waits for no call beside the trainer's comes first.

        The order follows from the graph alone, so every rank runs its models' collectives in the same one.
        """
        by_name = {call.name: call for call in calls}
        waits_beside: dict[str, bool] = {}
        ordered: list[ModelCall] = []
        left = list(calls)
        while left:
            ready = [call for call in left if all(name in waits_beside for name in self.edges[call.name])]
            if not ready:
                raise ValueError(
                    f"Model calls wait for each other: {' -> '.join(self._circle(left))}, expected no circle. Take one "
                    "of the keys out of inputs, or one name out of after."
                )
            for call in ready:
                waits_beside[call.name] = any(
                    waits_beside[name] or runs_beside(by_name[name]) for name in self.edges[call.name]
                )
            ready.sort(key=lambda call: waits_beside[call.name])  # stable: else as declared
            for call in ready:
                left.remove(call)
            ordered += ready
        return sorted(ordered, key=lambda call: waits_beside[call.name])

    def _circle(self, left: list[ModelCall]) -> list[str]:
        names = {call.name for call in left}
        path = [left[0].name]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in self.edges[path[-1]] if name in names))
        return path[path.index(path[-1]) :][::-1]


def runs_beside(call: ModelCall) -> bool:
    """Whether it uses none of the trainer's devices, so that it can run while they work."""
    return call.role is None and call.kind == "infer"


def run_calls(
    graph: DataFlowGraph,
    start: _Result,
    run: Callable[[ModelCall, _Result], Mapping[str, Any]],
    add: Callable[..., Any],
    *,
    runs_here: Callable[[ModelCall], bool] = lambda call: True,
    share: Callable[[ModelCall, Mapping[str, Any]], Mapping[str, Any]] = lambda call, found: found,
    on_wait: Callable[[], None] = lambda: None,
) -> _Result:
    """Runs the graph's `infer` calls, each as soon as what it needs is there; gives what `add` made of their results.

    The trainer's calls run here, in the graph's order; those beside them in a thread each. Who does not answer by the
    call's deadline is named and left behind, its thread a daemon.

    With several ranks each runs the calls that are its own. What they found is shared as late as can be, when a call
    needs it or at the end, so that calls on different ranks run at the same time.

    Args:
        graph: its generate and train calls are taken as done.
        start: an Experience; `add(experience, tensors)` gives one with more keys.
        run: gives the outputs of a call by key; called from several threads at once.
        runs_here: whether this rank is one of those that run a call.
        share: gives every rank what the ranks that ran the call have; all ranks call it, in the same order.
        on_wait: called about once a second while a call beside the trainer's is awaited.

    Raises:
        TrainingError: if a call misses its deadline.
    """
    calls = graph.of_kind("infer")
    shared = {call.name for call in graph.calls if call.kind != "infer"}
    found: dict[str, Mapping[str, Any]] = {}  # what this rank knows
    beside = _CallsBeside(run, on_wait)
    state = start

    def learn(name: str, result: Mapping[str, Any]) -> None:
        nonlocal state
        found[name] = result
        state = add(state, result)

    def start_ready() -> None:
        for name, result in beside.finished():
            learn(name, result)
        for call in calls:
            needs = [name for name in graph.edges[call.name] if graph[name].kind == "infer"]
            if runs_beside(call) and runs_here(call) and all(name in found for name in needs):
                beside.start(call, state)

    def share_with_all(call: ModelCall) -> None:
        if call.name in shared:
            return
        shared.add(call.name)
        for name in graph.edges[call.name]:
            share_with_all(graph[name])
        while runs_beside(call) and runs_here(call) and call.name not in found:
            start_ready()
            if call.name not in found:
                learn(*beside.wait())
        result = share(call, found.get(call.name, {}))
        if call.name not in found:
            learn(call.name, result)

    for call in calls:
        start_ready()
        if runs_beside(call):
            continue
        for name in graph.edges[call.name]:
            share_with_all(graph[name])
        start_ready()
        if runs_here(call):
            learn(call.name, run(call, state))
    for call in calls:
        share_with_all(call)
    return state


class _CallsBeside:
    """Calls that run in threads of their own, and their results in the order in which they come."""

    def __init__(self, run: Callable[[ModelCall, Any], Mapping[str, Any]], on_wait: Callable[[], None]) -> None:
        self._run = run
        self._on_wait = on_wait
        self._started: set[str] = set()
        self._running: dict[str, tuple[ModelCall, float]] = {}  # with their deadlines
        self._results: queue.SimpleQueue[tuple[str, Mapping[str, Any] | BaseException]] = queue.SimpleQueue()

    def start(self, call: ModelCall, state: Any) -> None:
        """Once."""
        if call.name in self._started:
            return
        self._started.add(call.name)
        self._running[call.name] = call, time.monotonic() + call.timeout_s
        name = f"lightrl-call-{call.name}"
        threading.Thread(target=self._run_one, args=(call, state), name=name, daemon=True).start()

    def finished(self) -> list[tuple[str, Mapping[str, Any]]]:
        """What has come meanwhile; raises what a call raised."""
        results = []
        while not self._results.empty():
            results.append(self._checked(*self._results.get_nowait()))
        return results

    def wait(self) -> tuple[str, Mapping[str, Any]]:
        """The next result; raises what a call raised, and TrainingError at the first deadline."""
        call, deadline = min(self._running.values(), key=lambda item: item[1])
        while True:
            left = deadline - time.monotonic()
            try:
                return self._checked(*self._results.get(timeout=max(0.0, min(1.0, left))))
            except queue.Empty:
                if left > 1:
                    self._on_wait()
                    continue
            raise TrainingError(
                f"Model call {call.name!r} did not answer within timeout_s={call.timeout_s:g}, expected its outputs "
                f"{list(call.outputs)}; still running: {sorted(self._running)}. Look at what it calls, or raise its "
                "timeout_s."
            )

    def _run_one(self, call: ModelCall, state: Any) -> None:
        try:
            self._results.put((call.name, self._run(call, state)))
        except BaseException as error:  # noqa: BLE001 (it is raised where the results are awaited)
            self._results.put((call.name, error))

    def _checked(self, name: str, result: Mapping[str, Any] | BaseException) -> tuple[str, Mapping[str, Any]]:
        if isinstance(result, BaseException):
            raise result
        del self._running[name]
        return name, result
