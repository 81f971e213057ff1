"""Which model computes what from what: ModelCalls and the graph that their keys make, checked before anything runs.

    generate ─► reward ─┬─► reference ──┐
                        ├─► values ─────┼─► advantages ─► policy update, critic update
                        └─► teacher … ──┘

A key is the name of a field or an extra of Experience. A call runs as soon as what it needs is there, each trajectory
passes each call once. Calls of models on the trainer's devices run one after another, in the same order on every rank;
calls without a role (a judge behind a server, a function) run beside them, each in a thread of its own.
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
) -> _Result:
    """Runs the graph's `infer` calls, each as soon as what it needs is there; gives what `add` made of their results.

    The trainer's calls run here, in the graph's order; those beside them in a thread each. It waits for the threads'
    results; who does not answer by the call's deadline is named and left behind, its thread a daemon.

    Args:
        graph: its generate and train calls are taken as done.
        start: an Experience; `add(experience, tensors)` gives one with more keys.
        run: gives the outputs of a call by key; called from several threads at once.

    Raises:
        TrainingError: if a call misses its deadline.
    """
    todo = {call.name: call for call in graph.of_kind("infer")}
    done = {call.name for call in graph.calls if call.kind != "infer"}
    finished: queue.SimpleQueue[tuple[str, Mapping[str, Any] | BaseException]] = queue.SimpleQueue()
    deadlines: dict[str, float] = {}
    state = start

    def beside(call: ModelCall, seen: _Result) -> None:
        try:
            finished.put((call.name, run(call, seen)))
        except BaseException as error:  # noqa: BLE001 (it is raised where the results are awaited)
            finished.put((call.name, error))

    def is_ready(call: ModelCall) -> bool:
        return all(name in done for name in graph.edges[call.name])

    while len(done) < len(graph.calls):
        for call in [call for call in todo.values() if runs_beside(call) and is_ready(call)]:
            del todo[call.name]
            deadlines[call.name] = time.monotonic() + call.timeout_s
            name = f"lightrl-call-{call.name}"
            threading.Thread(target=beside, args=(call, state), name=name, daemon=True).start()
        mine = next((call for call in todo.values() if not runs_beside(call)), None)
        if mine is not None and is_ready(mine):
            del todo[mine.name]
            state = add(state, run(mine, state))
            done.add(mine.name)
            results = _drained(finished)
        else:
            results = [_awaited(finished, deadlines, graph)]
        for name, result in results:
            if isinstance(result, BaseException):
                raise result
            state = add(state, result)
            done.add(name)
            del deadlines[name]
    return state


def _drained(finished: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    while not finished.empty():
        found.append(finished.get_nowait())
    return found


def _awaited(finished: queue.SimpleQueue[Any], deadlines: dict[str, float], graph: DataFlowGraph) -> Any:
    name = min(deadlines, key=lambda name: deadlines[name])
    try:
        return finished.get(timeout=max(0.0, deadlines[name] - time.monotonic()))
    except queue.Empty:
        raise TrainingError(
            f"Model call {name!r} did not answer within timeout_s={graph[name].timeout_s:g}, expected its outputs "
            f"{list(graph[name].outputs)}; still running: {sorted(deadlines)}. Look at what it calls, or raise its "
            "timeout_s."
        ) from None
