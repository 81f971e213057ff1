"""ModelCalls and their graph: which model computes which keys from which inputs. Each run checks its graph first.

    generate ─┬─► reward ─────┐
              ├─► reference ──┤
              ├─► values ─────┼─► advantages ─► policy update, critic update
              └─► teacher … ──┘

A key is the name of a field or an extra in Experience. A call runs once, on all trajectories, as soon as its inputs
exist. Calls to models that share ranks run one after another, in the same order on each rank; roles with separate ranks
run in parallel. At the same time, calls without a role (an LLM judge on a server, a function) run on rank 0, each in a
separate thread. loops/score.py executes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.experience import rollout_fields
from lightrl.trajectory import Sampling

Kind = Literal["generate", "infer", "train"]

GENERATE, REWARD = "generate", "reward"  # the controller runs these calls, trajectory by trajectory
ADVANTAGES = "advantages"


@dataclass(frozen=True)
class ModelCall:
    """One use of a model or a function on the whole iteration's Experience.

    `run(experience, trajectories)` gets the same rows in both arguments. It returns a tensor for a single output, or a
    dict with a tensor for each output: [B], [B, T] or [B, T, ...], in row order, without gradient. Without `run` the
    call is a forward pass of the role's model, and the output is the model's logprobs, values or scores.

    Example:
        ModelCall("reference_logprobs", role="reference", kind="infer",
                  inputs=("token_ids",), outputs=("reference_logprobs",))
        ModelCall("style", outputs=("style_rewards",), run=ask_the_judge)
    """

    name: str  # unique within a module
    role: str | None = None  # a key of `RLModule.models()`; None uses no trainer model and runs in a separate thread
    kind: Kind = "infer"
    inputs: tuple[str, ...] = ()  # keys that the call needs
    outputs: tuple[str, ...] = ()  # keys that the call produces; a new name becomes an extra
    microbatch_tokens: int | None = None  # None uses the module's setting
    run: Callable[..., Any] | None = field(default=None, compare=False)
    after: tuple[str, ...] = ()  # names of calls that must finish first although this call does not read their outputs
    timeout_s: float = 1800.0  # deadline for a call without a role
    base_only: bool = False  # run the role's base model, without the weights that training adds
    on_all_ranks: bool = False  # every rank runs the function, in the trainer's thread
    url: str | None = None  # a server that runs the role's model instead of the trainer
    # Maps rank 0's trajectories to the prompts to read (OtherPrompts). None leaves a row to a call `after` this one.
    prompts: Callable[..., Any] | None = field(default=None, compare=False)
    topk: int = 0  # also return the top-k tokens, as teacher_topk_ids and teacher_topk_logprobs

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "after"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(
                    f"{name} of model call {self.name!r} must be a tuple of names, got {value!r}. Write ({value!r},), "
                    "with the comma."
                )
        check_choice(get_args(Kind), **{f"kind of model call {self.name!r}": self.kind})
        check_bounds(1, **{f"microbatch_tokens for model call {self.name!r}": self.microbatch_tokens})
        if self.kind == "infer" and self.role is not None and self.run is None:
            self._check_forward_outputs()

    def _check_forward_outputs(self) -> None:
        topk_keys = ("teacher_topk_ids", "teacher_topk_logprobs") if self.topk else ()
        outputs = tuple(self.outputs)
        if outputs and outputs in ((outputs[0], *topk_keys), ("values", "bootstrap_values")):
            return
        raise ValueError(
            f"Model call {self.name!r} is a forward of {self.role!r}, which returns one tensor, so outputs must list "
            f"one key{''.join(f', then {key}' for key in topk_keys)}, got {list(outputs)}. Make one call for each key, "
            "or set run= to a function."
        )


class ModelSource(Protocol):
    """Where a role's model runs: on the server at `url`, or in the trainer if `url` is None."""

    @property
    def url(self) -> str | None: ...

    @property
    def head(self) -> Literal["vocabulary", "scalar"]: ...


class DataFlowGraph:
    """Model calls, sorted into an order in which they can run. Edges come from the keys and from `after`.

    Args:
        roles: the names of the module's models.
        given: keys that exist before any call runs, for example the fields of a trajectory file.

    Raises:
        ValueError: for a duplicate name, an unknown role, an input that no call produces, a key that several calls
            produce, an unknown name in `after`, or a cycle.
    """

    def __init__(self, calls: Iterable[ModelCall], *, roles: Iterable[str], given: Iterable[str] = ()) -> None:
        self.given = frozenset(given)
        declared = list(calls)
        all_roles = sorted(roles)
        for index, call in enumerate(declared):
            if any(call.name == other.name for other in declared[:index]):
                raise ValueError(f"Two model calls are named {call.name!r}. Rename one.")
            if call.role is not None and call.role not in all_roles:
                raise ValueError(
                    f"role of model call {call.name!r} must be one of {all_roles}, got {call.role!r}. Add the role to "
                    "models(), or fix its name."
                )
            if call.role is None and call.run is None and call.kind == "infer":
                raise ValueError(f"Model call {call.name!r} needs a role from models(), or a function as run=.")
        self.producers = self._find_producers(declared)
        self.edges = {call.name: self._needs(call, declared) for call in declared}
        self.calls = self._in_order(declared)

    def __getitem__(self, name: str) -> ModelCall:
        return next(call for call in self.calls if call.name == name)

    def of_kind(self, kind: Kind) -> list[ModelCall]:
        return [call for call in self.calls if call.kind == kind]

    def before_rewards(self) -> set[str]:
        """Returns the names of the infer calls that can run before the rewards are known; the rest run afterwards.

        The set is empty if any call other than the advantages reads rewards, because that call must also wait for them.
        """
        late = {REWARD}
        for call in self.of_kind("infer"):  # sorted: each call comes after the calls that it needs
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
                # A call with `prompts` may fill in rows that a call in its `after` left out.
                if other is not None and (call.prompts is None or other not in call.after):
                    raise ValueError(
                        f"Model call {call.name!r} produces {key!r}, but {other!r} already does. Rename the key."
                    )
                producers[key] = call.name
        return producers

    def _needs(self, call: ModelCall, calls: list[ModelCall]) -> tuple[str, ...]:
        """Returns the names of the calls that must finish before this one starts."""
        names = {other.name for other in calls}
        unknown = [name for name in call.after if name not in names]
        if unknown:
            raise ValueError(
                f"`after` of model call {call.name!r} must name calls among {sorted(names)}, got {unknown[0]!r}."
            )
        missing = [key for key in call.inputs if key not in self.producers and key not in self.given]
        if missing:
            raise ValueError(
                f"Model call {call.name!r} needs {missing[0]!r}, which no call produces. The existing keys are "
                f"{sorted({*self.producers, *self.given})}. Add a call that produces this key, or fix its name."
            )
        needed = [self.producers[key] for key in call.inputs if key in self.producers]
        updates = [other.name for other in calls if other.kind == "train" and other.name in {*needed, *call.after}]
        if updates and call.kind != "train":
            raise ValueError(
                f"Model call {call.name!r} runs after the update {updates[0]!r}, but updates must come last in an "
                "iteration. Change the call's `inputs` or its `after`."
            )
        return tuple(dict.fromkeys([*needed, *call.after]))

    def _in_order(self, calls: list[ModelCall]) -> list[ModelCall]:
        """Sorts calls topologically; those that do not wait for a call in a thread come first.

        The order depends only on the graph, so every rank runs the models' collectives in the same order.
        """
        by_name = {call.name: call for call in calls}
        waits_for_thread: dict[str, bool] = {}
        ordered: list[ModelCall] = []
        pending = list(calls)
        while pending:
            ready = [call for call in pending if all(name in waits_for_thread for name in self.edges[call.name])]
            if not ready:
                raise ValueError(
                    f"Model calls wait for each other: {' -> '.join(self._find_cycle(pending))}. Remove a key from "
                    "their `inputs`, or a name from their `after`."
                )
            for call in ready:
                waits_for_thread[call.name] = any(
                    waits_for_thread[name] or runs_in_thread(by_name[name]) for name in self.edges[call.name]
                )
                pending.remove(call)
            ordered += ready
        return sorted(ordered, key=lambda call: waits_for_thread[call.name])

    def _find_cycle(self, pending: list[ModelCall]) -> list[str]:
        names = {call.name for call in pending}
        path = [pending[0].name]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in self.edges[path[-1]] if name in names))
        return path[path.index(path[-1]) :][::-1]


def iteration_graph(
    model_calls: Sequence[ModelCall],
    train_calls: Sequence[ModelCall],
    *,
    roles: Mapping[str, ModelSource],
    sampling: Sampling,
    reward: Callable[..., object],
    advantages: Callable[..., object],
    advantage_keys: tuple[str, ...],
    from_file: bool,
) -> DataFlowGraph:
    """Builds the graph of everything that an iteration computes, from the prompt to the updates.

    Raises:
        ValueError: if a model call is an update, a server cannot compute a call, or DataFlowGraph rejects the calls.
    """
    model_calls = [_with_server(call, roles.get(call.role or ""), sampling) for call in model_calls]
    update = next((call for call in model_calls if call.kind != "infer"), None)
    if update is not None:
        raise ValueError(
            f"Model call {update.name!r} in model_calls must have kind 'infer', got {update.kind!r}. Updates belong in "
            "train_calls."
        )
    reward_fields = ("rewards", "token_rewards")
    rollout = [
        ModelCall(GENERATE, "policy", "generate", (), tuple(sorted(rollout_fields().difference(reward_fields)))),
        ModelCall(REWARD, None, "infer", ("token_ids",), reward_fields, run=reward),
    ]
    late = _later_than_advantages(model_calls, advantage_keys)
    inputs = ("rewards", *(key for call in model_calls for key in call.outputs if call.name not in late))
    advantage = ModelCall(ADVANTAGES, inputs=inputs, outputs=advantage_keys, run=advantages, on_all_ranks=True)
    calls = [*([] if from_file else rollout), *model_calls, advantage, *train_calls]
    return DataFlowGraph(calls, roles=roles, given=rollout_fields() if from_file else ())


def _later_than_advantages(calls: Sequence[ModelCall], advantage_keys: Sequence[str]) -> set[str]:
    """Returns the names of the calls that need advantages, directly or through other calls."""
    names, keys = {ADVANTAGES}, set(advantage_keys)
    for _ in calls:  # as many passes as calls: enough even if the calls form one chain in reverse order
        for call in calls:
            if keys.intersection(call.inputs) or names.intersection(call.after):
                names.add(call.name)
                keys.update(call.outputs)
    return names


def _with_server(call: ModelCall, source: ModelSource | None, sampling: Sampling) -> ModelCall:
    """Adds the server's URL if the role's model is on one; raises ValueError if a server cannot compute the call."""
    if source is None or source.url is None:
        return call
    url, is_scalar = source.url, source.head == "scalar"
    if is_scalar and "values" in call.outputs:
        raise ValueError(
            f"The {call.role} must have a path or config, got url={url!r}: a server returns one value after the "
            "trajectory, not one before each token."
        )
    if not is_scalar and (sampling.temperature != 1 or sampling.min_new_tokens or sampling.is_truncated):
        raise ValueError(
            f"The {call.role} is on {url}, which computes logprobs at temperature 1 with no token masked, so sampling "
            "must have temperature 1, min_new_tokens 0, top_p 1 and top_k -1, got "
            f"{sampling.temperature:g}, {sampling.min_new_tokens}, {sampling.top_p:g} and {sampling.top_k}. Change "
            "these, or set the model's path instead of url."
        )
    return replace(call, url=url)


def runs_in_thread(call: ModelCall) -> bool:
    """Whether the call uses none of the trainer's devices, so that it can run while they are busy."""
    return (call.role is None or call.url is not None) and call.kind == "infer" and not call.on_all_ranks


def follows_from_trajectories(call: ModelCall) -> bool:
    """Whether the call's outputs depend only on trajectories, not on trainer models, so recorded outputs stay valid."""
    return runs_in_thread(call) and not call.after and rollout_fields().issuperset(call.inputs)
