"""Which model computes what from what: ModelCalls and the graph that their keys make, checked before anything runs.

    generate ─┬─► reward ─────┐
              ├─► reference ──┤
              ├─► values ─────┼─► advantages ─► policy update, critic update
              └─► teacher … ──┘

A key is the name of a field or an extra of Experience. A call runs as soon as what it needs is there, each trajectory
passes each call once. Calls of models that share ranks run one after another, in the same order on each; those of roles
with ranks of their own run at the same time; calls without a role (a judge behind a server, a function) run beside them
on rank 0, each in a thread of its own. loops/run_calls.py executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lightrl.experience import ROLLOUT_FIELDS
from lightrl.trajectory import Sampling

Kind = Literal["generate", "infer", "train"]

GENERATE, REWARD = "generate", "reward"  # the controller runs them, trajectory by trajectory
ADVANTAGES = "advantages"


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
    kind: Kind = "infer"
    inputs: tuple[str, ...] = ()  # keys that must be there
    outputs: tuple[str, ...] = ()  # keys that it fills in; a new name becomes an extra
    microbatch_tokens: int | None = None  # None: the module's
    run: Callable[..., Any] | None = field(default=None, compare=False)
    after: tuple[str, ...] = ()  # names of calls that must have ended, though no key says so
    timeout_s: float = 1800.0  # deadline of a call without a role
    adapters_off: bool = False  # the role's model as it was before it got its LoRA adapters
    on_all_ranks: bool = False  # a function that each rank runs for itself, in the trainer's thread
    url: str | None = None  # of the server that has the role's model and answers instead of it
    topk: int = 0  # of so many likeliest tokens too: the outputs have teacher_topk_ids and teacher_topk_logprobs

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "after"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(
                    f"Model call {self.name!r} has {name}={value!r}, expected a tuple of names. Write ({value!r},), "
                    "with the comma."
                )
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"Model call {self.name!r} has kind={self.kind!r}, expected one of {', '.join(get_args(Kind))}. "
                "Mend it."
            )
        if self.microbatch_tokens is not None and self.microbatch_tokens < 1:
            raise ValueError(
                f"Model call {self.name!r} has microbatch_tokens={self.microbatch_tokens}, expected at least 1, or "
                "None for the module's. Raise it."
            )
        if self.kind == "infer" and self.role is not None and self.run is None:
            self._check_outputs_of_a_forward()

    def _check_outputs_of_a_forward(self) -> None:
        further = ("teacher_topk_ids", "teacher_topk_logprobs") if self.topk else ()
        outputs = tuple(self.outputs)
        if outputs and outputs in ((outputs[0], *further), ("values", "bootstrap_values")):
            return
        raise ValueError(
            f"Model call {self.name!r} is a forward of {self.role!r} with outputs {list(outputs)}, expected one key"
            f"{''.join(f', then {key}' for key in further)}: a forward gives one tensor. Make a call for each, or give "
            "it run= a function."
        )


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

    def of_kind(self, kind: Kind) -> list[ModelCall]:
        return [call for call in self.calls if call.kind == kind]

    def beside_rewards(self) -> set[str]:
        """Names of the infer calls that can run while rewards are awaited; all others come after the rewards.

        Empty where something else than the advantages reads rewards: it would have to wait for these, too.
        """
        late = {REWARD}
        for call in self.of_kind("infer"):  # in an order in which they can run
            if late.intersection(self.edges[call.name]):
                late.add(call.name)
        if any(REWARD in self.edges[name] for name in late - {ADVANTAGES}):
            return set()
        return {call.name for call in self.of_kind("infer")} - late

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
        updates = [other.name for other in calls if other.kind == "train" and other.name in {*needed, *call.after}]
        if updates and call.kind != "train":
            raise ValueError(
                f"Model call {call.name!r} comes after the update {updates[0]!r}, expected it before all updates: an "
                "iteration ends with them. Let it need something else."
            )
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


def iteration_graph(
    score_calls: Sequence[ModelCall],
    train_calls: Sequence[ModelCall],
    *,
    roles: Iterable[str],
    reward: Callable[..., Any],
    advantages: Callable[..., Any],
    advantage_keys: tuple[str, ...],
    from_file: bool,
) -> DataFlowGraph:
    """Everything that an iteration computes, from the prompt to the updates.

    Raises:
        ValueError: if a score call is an update, or the calls make no graph; see DataFlowGraph.
    """
    wrong = next((call for call in score_calls if call.kind != "infer"), None)
    if wrong is not None:
        raise ValueError(
            f"Model call {wrong.name!r} in score_calls must have kind 'infer', got {wrong.kind!r}. Updates belong in "
            "train_calls."
        )
    judged = ("rewards", "token_rewards")
    rollout = [
        ModelCall(GENERATE, "policy", "generate", (), tuple(sorted(ROLLOUT_FIELDS.difference(judged)))),
        ModelCall(REWARD, None, "infer", ("token_ids",), judged, run=reward),
    ]
    late = _later_than_advantages(score_calls, advantage_keys)
    inputs = ("rewards", *(key for call in score_calls for key in call.outputs if call.name not in late))
    learn = ModelCall(ADVANTAGES, inputs=inputs, outputs=advantage_keys, run=advantages, on_all_ranks=True)
    calls = [*([] if from_file else rollout), *score_calls, learn, *train_calls]
    return DataFlowGraph(calls, roles=roles, given=ROLLOUT_FIELDS if from_file else ())


def _later_than_advantages(calls: Sequence[ModelCall], advantage_keys: Sequence[str]) -> set[str]:
    """The names of the calls that need advantages, directly or through another call."""
    names, keys = {ADVANTAGES}, set(advantage_keys)
    for _ in calls:
        for call in calls:
            if keys.intersection(call.inputs) or names.intersection(call.after):
                names.add(call.name)
                keys.update(call.outputs)
    return names


def served(call: ModelCall, url: str, *, is_scalar: bool, sampling: Sampling) -> ModelCall:
    """The call of a role whose model is behind a server.

    Args:
        call: of the role.
        url: of the server.
        is_scalar: whether the model has a scalar head.
        sampling: what the policy is sampled with.

    Raises:
        ValueError: if a server cannot compute the outputs.
    """
    if is_scalar and "values" in call.outputs:
        raise ValueError(
            f"The {call.role} must have a path or config, got url={url!r}: a server gives one number after a "
            "trajectory, not one before each token."
        )
    if not is_scalar and (sampling.temperature != 1 or sampling.min_new_tokens):
        raise ValueError(
            f"The {call.role} is behind {url}, which scores tokens at temperature 1 with no token masked, so sampling "
            f"must have temperature 1 and min_new_tokens 0, got {sampling.temperature:g} and "
            f"{sampling.min_new_tokens}. Change them, or set the model's path instead of url."
        )
    return replace(call, url=url)


def runs_beside(call: ModelCall) -> bool:
    """Whether it uses none of the trainer's devices, so that it can run while they work."""
    return (call.role is None or call.url is not None) and call.kind == "infer" and not call.on_all_ranks


def follows_from_trajectories(call: ModelCall) -> bool:
    """Whether what it gives does not depend on any model of ours, so that a recorded answer stays right."""
    return runs_beside(call) and not call.after and ROLLOUT_FIELDS.issuperset(call.inputs)
