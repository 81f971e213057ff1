"""The score phase: runs the module's model calls and advantages on the whole iteration's Experience.

Each call runs as soon as its inputs are ready:

    rank 0    policy's calls ...   function (thread) ...  ─┐
    rank 1    critic's calls ...                          ─┴─► results to all ranks, when needed or at the end
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.checks.entry_points import entry_point
from lightrl.checks.printable import count_text
from lightrl.columns import AGENTS
from lightrl.dataflow import (
    ADVANTAGES,
    GENERATE,
    REWARD,
    DataFlowGraph,
    ModelCall,
    follows_from_trajectories,
    runs_in_thread,
)
from lightrl.errors import LightRLError, TrainingError
from lightrl.experience import Experience
from lightrl.functional import on_last_loss_token
from lightrl.loops.sharing import gather, holders_of, is_forward, share_outputs
from lightrl.models import untrained_reward_model
from lightrl.models.tuning import tuning_of
from lightrl.module import RLModule
from lightrl.strategies import Microbatches, Ranks, ShardedExperience, mark_as_on_all_ranks
from lightrl.strategies.layouts.pieces import forward
from lightrl.strategies.sharded_experience import OnLossTokens, TokenRows
from lightrl.strategies.sharded_experience.other_prompts import OtherPrompts
from lightrl.strategies.sharded_experience.placement import microbatch_rows
from lightrl.trace import span
from lightrl.trajectory import Prompt, Trajectory, as_array, encode_json


def asked_once(
    call: ModelCall, trajectories: Sequence[Trajectory], ask: Callable[[], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Returns the call's outputs, [B] or [B, T, ...], recorded in the trajectories or, if they are not, from `ask`.

    A second call to a function or server might fail or give a different answer. Recorded outputs are padded with 0.
    Floats become float32 either way.
    """
    recorded = [item.call_outputs for item in trajectories]
    is_recorded = bool(recorded) and all(key in outputs for outputs in recorded for key in call.outputs)
    if is_recorded and follows_from_trajectories(call):
        return {key: _as_tensor([outputs[key] for outputs in recorded]) for key in call.outputs}
    return {key: value.float() if value.is_floating_point() else value for key, value in ask().items()}


def _as_tensor(values: list[object]) -> Tensor:
    """Makes a tensor from numbers, or from arrays [T, ...], which it pads."""
    values = [as_array(value) for value in values]
    if isinstance(values[0], np.ndarray):
        return pad_sequence([torch.from_numpy(value) for value in values], batch_first=True)
    # The dtype is explicit because half precision in another thread changes the default dtype.
    return torch.tensor(values, dtype=torch.float32 if isinstance(values[0], float) else None)


_Outputs = dict[str, Tensor | TokenRows | OnLossTokens]  # a Tensor is [B]


@torch.no_grad()
def score(
    module: RLModule,
    experience: Experience | ShardedExperience,
    trajectories: Sequence[Trajectory] = (),
    *,
    forward_context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    left_out: Collection[str] = (),
) -> ShardedExperience:
    """Returns the Experience with the outputs of the module's model calls and its advantages, [B, T].

    Args:
        experience: the whole iteration, as an Experience or as returned by `shard`. Each rank runs the models of its
            roles on its share of the rows. Only rank 0 calls functions and servers, whose answers may vary.
        trajectories: the same rows, for calls that read texts; needed on rank 0.
        forward_context: the precision plugin's context, entered only around models: with half precision, tensors that
            `advantages` creates would otherwise be bfloat16 by default.
        left_out: names of calls whose outputs `experience` already has, or that run later.
    """
    rows = list(trajectories)
    sharded = ShardedExperience.of(experience) if isinstance(experience, Experience) else experience
    ranks = sharded.ranks
    if module.reads_prompts:
        module.prompts = [item.prompt for item in rows]
        if ranks.size > 1:
            records = json.loads(encode_json(module.prompts)) if ranks.is_main else None
            module.prompts = [Prompt(**record) for record in ranks.broadcast_json(records)]

    other_prompts = {
        call.name: OtherPrompts.share(call.prompts, rows, ranks)
        for call in module.data_flow().of_kind("infer")
        if call.prompts is not None and call.name not in left_out
    }

    @torch.no_grad()  # again, because a call may run in a thread
    def run(call: ModelCall, current: ShardedExperience) -> _Outputs:
        if call.name not in other_prompts:
            return compute(call, current, rows)
        prompts = other_prompts[call.name]
        outputs = compute(call, prompts.read(current), []) if prompts.rows else {}
        return {**prompts.completed(outputs, current, call.outputs, call.topk)}

    def compute(call: ModelCall, current: ShardedExperience, asked: Sequence[Trajectory]) -> _Outputs:
        if call.name == ADVANTAGES:
            return _advantages(module, current)
        if is_forward(call):
            with forward_context():
                return _infer(module, call, current, holders_of(call, ranks))
        if call.url is not None and call.role is not None:
            call = entry_point("served model calls")(call, module)
        outputs = asked_once(call, asked, lambda: _function_outputs(call, current, [*asked]))
        per_token = {key: value for key, value in outputs.items() if value.dim() > 1}
        return {**outputs, **{key: TokenRows.of_padded(value, current.lengths) for key, value in per_token.items()}}

    def runs_here(call: ModelCall) -> bool:
        return holders_of(call, ranks).is_here if is_forward(call) else ranks.is_main or call.on_all_ranks

    scored: ShardedExperience = CallRun(
        module.data_flow(),
        sharded,
        run,
        ShardedExperience.with_tensors,
        left_out={GENERATE, REWARD, *left_out},
        runs_here=runs_here,
        share=functools.partial(share_outputs, sharded, module) if ranks.size > 1 else None,
        on_wait=ranks.step,
    ).finish()
    return scored


def _infer(module: RLModule, call: ModelCall, experience: ShardedExperience, ranks: Ranks) -> _Outputs:
    """Runs one forward pass over this rank's share of the trajectories and returns the call's outputs, float32.

    A critic returns `values` per token and `bootstrap_values` [B], the values after truncated trajectories. Any other
    scalar head returns its value after the last token, [B]. A language model returns logprobs per token and, if the
    call sets `topk`, the K most likely tokens and their logprobs.
    """
    role, key = call.role or "policy", call.outputs[0]
    scores_ends = key != "values" and module.models()[role].spec.head == "scalar"
    needs_end = experience.is_truncated if "bootstrap_values" in call.outputs else None
    needs_end = torch.ones_like(experience.is_truncated) if scores_ends else needs_end
    # `is_sampler` is False for the base model, because it did not sample the tokens.
    lengths, read = experience.lengths, experience.rollout_part(needs_end, is_sampler=not call.base_only)
    max_tokens = call.microbatch_tokens or module.microbatch_tokens
    rows = microbatch_rows(read, ranks, max_tokens)
    parts = Microbatches(read, rows, module.device)
    model = getattr(module, role)
    tuning = tuning_of(model).base_only(model) if call.base_only else contextlib.nullcontext()
    numbers: dict[str, list[Tensor]] = {name: [] for name in (key, "teacher_topk_ids", "teacher_topk_logprobs")}
    with _on_device(module, role), tuning:
        for output in forward(module.parallel_models[role], parts, max_tokens=max_tokens, ranks=ranks, topk=call.topk):
            values = output.values if scores_ends or key == "values" else output.logprobs
            if values is None:
                raise ValueError(f"Model call {call.name!r} needs {key!r}, but the model of {role!r} has no values.")
            # Explicitly float32: half precision changes the default dtype, and bfloat16 would round logprobs.
            numbers[key].append(values.float())
            if output.teacher_topk_ids is not None and output.teacher_topk is not None:
                numbers["teacher_topk_ids"].append(output.teacher_topk_ids.long())
                numbers["teacher_topk_logprobs"].append(output.teacher_topk.float())
        numbers = {name: [part.cpu() for part in parts] for name, parts in numbers.items()}  # the only wait
    order = [row for index in rows for row in index]

    def flat(parts: list[Tensor], lengths: Tensor) -> np.ndarray[Any, Any]:
        sizes = [lengths[index][:, None] for index in rows]
        pairs = zip(parts, sizes, strict=True)
        return torch.cat([part[: len(size)][torch.arange(part.shape[1]) < size] for part, size in pairs]).numpy()

    is_read = read.tokens["loss_mask"].flat(order)
    is_frozen = call.base_only or role not in module.trained_roles()  # an update on others' is skipped
    if is_frozen and numbers[key] and (num := int((~np.isfinite(flat(numbers[key], read.lengths)[is_read])).sum())):
        name = f"{role} returned NaN or infinity for {count_text(num, 'token')} in {key!r}"
        raise TrainingError(f"{name}. Check its checkpoint, and its dtype: float16 overflows.")
    result: _Outputs = {}
    for name, parts_of_rows in numbers.items():
        if parts_of_rows and not scores_ends:
            result[name] = TokenRows.of_flat(flat(parts_of_rows, lengths), lengths, order)
    if needs_end is not None:
        at_end = torch.zeros(len(lengths), dtype=torch.float32)
        for index, part in zip(rows, numbers[key], strict=True):
            if index:
                ends = lengths[index].clamp(max=part.shape[1] - 1)  # rows without `needs_end` are set to 0 below
                at_end[index] = part.gather(1, ends[:, None])[:, 0]
        result[key if scores_ends else "bootstrap_values"] = torch.where(needs_end, at_end, 0.0)
    return result


def _advantages(module: RLModule, experience: ShardedExperience) -> _Outputs:
    """Calls the module's `advantages`, with the reward model's scores added to the rewards."""
    changes = _scored_rewards(module, experience) if "reward_model_scores" in experience.rows else {}
    experience = experience.with_tensors(changes)
    if experience.ranks.size > 1 and module.advantage_inputs:
        experience = gather(experience, module.advantage_inputs)
    has_agents = AGENTS.name in experience.tokens
    result = entry_point("agent advantages")(module, experience) if has_agents else module.advantages(experience.shown)
    tensors = result if isinstance(result, Mapping) else {"advantages": result}
    is_whole = experience.ranks.size == 1 or bool(module.advantage_inputs)
    return {**changes, **{name: _on_loss(name, value, experience, is_whole) for name, value in tensors.items()}}


def _scored_rewards(module: RLModule, experience: ShardedExperience) -> _Outputs:
    """Adds the reward model's scores to the rewards; raises an error if all are 0, as from an untrained head."""
    scores = experience["reward_model_scores"]
    if not scores.any():  # cannot be detected earlier, while the model is on the meta device
        raise mark_as_on_all_ranks(untrained_reward_model(module.models()["reward_model"].spec))
    added = module.reward_model_coef * scores
    changes: _Outputs = {"rewards": experience.rewards + added}
    if "token_rewards" in experience.tokens:
        rows = experience.tokens["loss_mask"].here
        part: Any = experience.dense(rows)
        rewards = part.token_rewards + on_last_loss_token(added[rows], part.loss_mask)
        changes["token_rewards"] = TokenRows.of_padded(rewards, experience.lengths, rows)
    return changes


def _on_loss(name: str, values: Tensor, experience: ShardedExperience, is_whole: bool) -> OnLossTokens | TokenRows:
    """Checks a result of `advantages`, [B] or per token, and sets it to 0 outside the loss mask."""
    num = len(experience)
    if tuple(values.shape) == (num,):
        return OnLossTokens(values.detach().float().cpu())
    rows = range(num) if is_whole else experience.local_rows.tolist()
    mask = experience["loss_mask"] if is_whole else experience.local.loss_mask
    if values.shape != mask.shape:
        shape = tuple(values.shape)
        local = "" if is_whole else " of experience.local"
        raise ValueError(
            f"advantages must return {name} as [B] = {(num,)} or [B, T] = {tuple(mask.shape)}{local}, got {shape}."
        )
    return TokenRows.of_padded(torch.where(mask, values.detach().float().cpu(), 0.0), experience.lengths, rows)


@contextlib.contextmanager
def _on_device(module: RLModule, role: str) -> Iterator[None]:
    """Moves a model with `offload` to the module's device inside the context, and back to CPU memory afterwards."""
    if not module.models()[role].offload:
        yield
        return
    model = module.parallel_models[role]
    model.move_to(module.device)
    try:
        yield
    finally:
        model.move_to(torch.device("cpu"))


def _function_outputs(
    call: ModelCall, experience: ShardedExperience, trajectories: list[Trajectory]
) -> dict[str, Tensor]:
    """Calls a model call's function and returns its results by key.

    Raises:
        TrainingError: if the function raises anything but a LightRLError, whose message already names its source.
        ValueError: if the result is not a tensor for each output, with a row for each trajectory, or is not finite on
            loss tokens, for example because the function read rewards, which are NaN until they are known.
    """
    assert call.run is not None
    try:
        result = call.run(experience.shown, trajectories)
    except LightRLError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise TrainingError(
            f"The function for model call {call.name!r} raised {type(error).__name__}: {error}"
        ) from error
    outputs = result if isinstance(result, Mapping) else {call.outputs[0]: result} if len(call.outputs) == 1 else {}
    if set(outputs) != set(call.outputs):
        raise ValueError(
            f"Model call {call.name!r} must return a dict with a tensor for each of its outputs {list(call.outputs)}, "
            f"got {sorted(outputs) or type(result).__name__}."
        )
    num, width = experience.token_ids.shape
    for name, value in outputs.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or (shape != (num,) and shape[:2] != (num, width)):
            raise ValueError(
                f"Model call {call.name!r} must return {name!r} as a tensor [B] = {(num,)} or [B, T] = {(num, width)}, "
                f"with its rows in order, got {shape}."
            )
        if not (value if value.dim() == 1 else value[experience["loss_mask"].to(value.device)]).isfinite().all():
            problem = ", which no loss can use. Values of tokens outside the loss mask have no effect"
            if "rewards" not in call.inputs and experience.rewards.isnan().any():
                problem = " before the rewards were known. If it reads rewards, add 'rewards' to its inputs"
            raise ValueError(f"Model call {call.name!r} returned NaN or infinity in {name!r}{problem}.")
    return {name: value.detach() for name, value in outputs.items()}


WAIT_S = 1.0  # seconds between calls to `on_wait`

_Results = Mapping[str, Any]


@dataclass
class CallRun:
    """Runs the infer calls in a graph; `finish` returns the state with their results added.

    Calls to the trainer's models run in the thread that calls `finish`. Every other call runs in a separate thread,
    which adds the result and starts the calls that were waiting for it. If a call misses its deadline, the error names
    the call, and its daemon thread is abandoned.

    With several ranks, each rank runs the calls whose models it has, in the graph's order. Results are shared as late
    as possible, when a call needs them or at the end, so that calls on different ranks run at the same time.

    Args:
        graph: all calls; train calls are skipped.
        state: an Experience. `add(state, outputs)` returns a copy that also has these outputs.
        run: returns the outputs of a call by key; called from several threads concurrently.
        left_out: names of calls whose outputs `state` already has, or that run later.
        runs_here: whether this rank runs a call.
        share: sends a call's outputs from the ranks that ran the call to the ranks that need them. All ranks call it in
            the same order. None if there is one rank, which runs each trainer call as soon as it is ready.
        on_wait: called about once a second while waiting for a call in another thread.
    """

    graph: DataFlowGraph
    state: Any
    run: Callable[[ModelCall, Any], _Results]
    add: Callable[[Any, _Results], Any]
    left_out: Collection[str] = ()
    runs_here: Callable[[ModelCall], bool] = lambda call: True
    share: Callable[[ModelCall, _Results], _Results] | None = None
    on_wait: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.calls = [call for call in self.graph.of_kind("infer") if call.name not in self.left_out]
        self.outputs: dict[str, _Results] = {}
        self._todo = {call.name for call in self.calls}
        self._partial: set[str] = set()  # calls whose outputs are still divided over several ranks
        self._started: set[str] = set()
        self._running: dict[str, tuple[ModelCall, float]] = {}  # calls in other threads, with their deadlines
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def finish(self) -> Any:
        """Runs all calls; raises TrainingError if one misses its deadline."""
        self.start_ready()
        trainer_calls = [call for call in self.calls if not runs_in_thread(call)]
        if self.share is not None:
            self._run_with_others(trainer_calls, self.share)
            return self.state
        while trainer_calls:
            self.wait_for(lambda: any(map(self.is_ready, trainer_calls)))
            call = next(filter(self.is_ready, trainer_calls))
            trainer_calls.remove(call)
            self.run_now(call)
        self.wait_for(lambda: all(call.name in self.outputs for call in self.calls))
        return self.state

    def is_ready(self, call: ModelCall) -> bool:
        ready = self.outputs.keys() - self._partial
        return all(name in ready or name not in self._todo for name in self.graph.edges[call.name])

    def start_ready(self) -> None:
        with self._changed:
            for call in self.calls:
                is_own = runs_in_thread(call) and self.runs_here(call)
                if is_own and call.name not in self._started and self.is_ready(call):
                    self._started.add(call.name)
                    self._running[call.name] = call, time.monotonic() + call.timeout_s
                    name, args = f"lightrl-call-{call.name}", (call, self.state)
                    threading.Thread(target=self._run_in_thread, args=args, name=name, daemon=True).start()

    def _run_with_others(
        self, trainer_calls: list[ModelCall], share: Callable[[ModelCall, _Results], _Results]
    ) -> None:
        """Runs this rank's trainer calls, and shares the results of all calls among the ranks."""
        shared = {call.name for call in self.graph.calls} - self._todo

        def share_with_all(call: ModelCall) -> None:  # shares the calls that it depends on first
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
        with self._changed:
            self._raise_if_failed()
            state = self.state
        with span(call.name, "score"):
            outputs = self.run(call, state)
        self.add_outputs(call.name, outputs)

    def add_outputs(self, name: str, outputs: _Results) -> None:
        with self._changed:
            self.state = self.add(self.state, outputs)
            self.outputs[name] = outputs
            self._running.pop(name, None)
            self.start_ready()
            self._changed.notify_all()

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Waits until `is_enough()`; raises a failed call's error, or TrainingError if a call misses its deadline."""
        with self._changed:
            self._raise_if_failed()
            while not is_enough():
                call, deadline = min(self._running.values(), key=lambda item: item[1])
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TrainingError(
                        f"Model call {call.name!r} did not return its outputs {list(call.outputs)} within timeout_s="
                        f"{call.timeout_s:g}; still running: {sorted(self._running)}. Check the function or server, or "
                        "increase the call's timeout_s."
                    )
                self._changed.wait(min(remaining_s, WAIT_S))
                self._raise_if_failed()
                self.on_wait()

    def _run_in_thread(self, call: ModelCall, state: Any) -> None:
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
