"""The score phase: the module's score calls and advantages, all on the whole iteration's Experience."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.dataflow import ADVANTAGES, GENERATE, REWARD, ModelCall, runs_beside
from lightrl.engines.sglang.scoring import with_server
from lightrl.errors import LightRLError, TrainingError
from lightrl.experience import ROLLOUT_FIELDS, Experience
from lightrl.functional import on_last_loss_token
from lightrl.loops.asked_once import asked_once
from lightrl.loops.run_calls import run_calls
from lightrl.models import untrained_reward_model
from lightrl.models.lora import adapters_off
from lightrl.strategies import Ranks, mark_as_on_all_ranks
from lightrl.trajectory import Trajectory

if TYPE_CHECKING:
    from lightrl.module import RLModule

_KEPT = ("rewards", "group_ids", "is_truncated", "pixel_values", "image_rows")  # with one more token per trajectory


@torch.no_grad()
def score(
    module: RLModule,
    experience: Experience,
    trajectories: Sequence[Trajectory] = (),
    *,
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ranks: Ranks | None = None,
    left_out: Collection[str] = (),
) -> Experience:
    """Experience with the outputs of the module's score calls and its advantages, [B, T].

    Args:
        module: has `score_calls`, `advantages` and the models.
        experience: of the whole iteration.
        trajectories: its rows, for calls that read texts.
        forward_context: the precision plugin's, around the models only: half precision would make bfloat16 the default
            dtype of what `advantages` creates.
        ranks: who else has this Experience. Each infers its share of the rows, for the roles that it holds; functions
            and servers are called on rank 0 only, because a judge may answer differently the second time.
        left_out: names of calls whose outputs `experience` has, or that run later.
    """
    rows = list(trajectories)
    ranks = ranks or Ranks()

    def holders_of(call: ModelCall) -> Ranks:
        return ranks.of_role(call.role or "policy")

    @torch.no_grad()  # in the call's own thread
    def run(call: ModelCall, current: Experience) -> Mapping[str, Tensor]:
        if call.name == ADVANTAGES:
            return _advantages(module, current)
        if _is_forward(call):
            with forward_context():
                return _infer(module, call, current, holders_of(call))
        if call.url is not None and call.role is not None:
            call = with_server(call, is_scalar=module.models()[call.role].spec.head == "scalar")
        outputs = asked_once(call, rows, lambda: _own_outputs(call, current, rows))
        return {key: value.to(current.token_ids.device) for key, value in outputs.items()}

    def runs_here(call: ModelCall) -> bool:
        return holders_of(call).is_here if _is_forward(call) else ranks.is_main or call.on_all_ranks

    def share(call: ModelCall, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if call.on_all_ranks or (_is_forward(call) and holders_of(call).size == ranks.size):
            return outputs
        source = holders_of(call).first_rank if _is_forward(call) else 0
        with ranks.phase(f"score: {call.name}", has_own_deadline=runs_beside(call)):
            return ranks.broadcast_tensors(outputs, source=source)

    return run_calls(
        module.data_flow(),
        experience,
        run,
        Experience.with_tensors,
        left_out={GENERATE, REWARD, *left_out},
        runs_here=runs_here,
        share=share if ranks.size > 1 else None,
        on_wait=ranks.step,
    )


def accept_changes(before: Experience, changed: Experience) -> Experience:
    """The Experience that an `on_experience_ready` hook returned, with its advantages masked.

    Raises:
        TypeError: if it is not an Experience with advantages.
        ValueError: if it differs from `before` in more than loss mask and advantages, or trains tokens that the loss
            mask left out.
    """
    if not isinstance(changed, Experience) or changed.advantages is None:
        raise TypeError(
            f"on_experience_ready must return None or an Experience with advantages, got {type(changed).__name__}. Use "
            "dataclasses.replace on the one it was given."
        )
    old, new = before.tensors(), changed.tensors()
    for name in sorted((old.keys() | new.keys()) - {"loss_mask", "advantages"}):
        if name not in new or name not in old or not (new[name] is old[name] or torch.equal(new[name], old[name])):
            raise ValueError(
                f"on_experience_ready changed {name!r}, but may change only loss_mask and advantages. Change what the "
                "reward or the workflow returns instead."
            )
    num_added = int((changed.loss_mask & ~before.loss_mask).sum())
    if num_added:
        raise ValueError(
            f"on_experience_ready added {num_added} tokens to loss_mask, but may only remove some: the others have no "
            "logprobs. Return loss_mask & your_mask."
        )
    return replace(changed, advantages=torch.where(changed.loss_mask, changed.advantages, 0.0))


def _infer(module: RLModule, call: ModelCall, experience: Experience, ranks: Ranks) -> dict[str, Tensor]:
    """One forward over all trajectories: the call's outputs, rows in order, float32.

    `values` are a critic's, [B, T], and `bootstrap_values` the one of the state after a truncated end, [B]. Any other
    output is the number of a scalar head after the last token, [B], or the logprobs of a language model, [B, T]; with
    the call's `topk` its most likely tokens and their logprobs too, [B, T, K].
    """
    role, key = call.role or "policy", call.outputs[0]
    scores_ends = key != "values" and module.models()[role].spec.head == "scalar"
    rated = experience
    if scores_ends:
        rated = _with_an_end(experience, torch.ones_like(experience.is_truncated))
    elif "bootstrap_values" in call.outputs:
        rated = _with_an_end(experience, experience.is_truncated)
    rows, parts = ranks.microbatch_rows(rated, call.microbatch_tokens or module.microbatch_tokens)
    plain = adapters_off(getattr(module, role)) if call.adapters_off else contextlib.nullcontext()
    with _on_device(module, role), plain:
        outputs = module.parallel_models[role].forward(parts, topk=call.topk)
    numbers = [output.values if scores_ends or key == "values" else output.logprobs for output in outputs]
    if any(values is None for values in numbers):
        raise ValueError(f"Model call {call.name!r} needs {key!r}, but the model of {role!r} has no values.")
    # The dtype is explicit because half precision changes the default, and bfloat16 would round the logprobs.
    result = _whole(numbers, rows, rated, ranks, torch.float32)
    if rated is experience:
        tensors = {key: result}
        if call.topk:
            ids, logprobs = zip(*((output.teacher_topk_ids, output.teacher_topk) for output in outputs), strict=True)
            tensors["teacher_topk_ids"] = _whole(ids, rows, rated, ranks, torch.int64)
            tensors["teacher_topk_logprobs"] = _whole(logprobs, rows, rated, ranks, torch.float32)
        return tensors
    at_end = result.gather(1, experience.lengths[:, None])[:, 0]
    if scores_ends:
        return {key: at_end}
    values = torch.where(experience.loss_mask, result[:, :-1], 0.0)
    return {"values": values, "bootstrap_values": torch.where(experience.is_truncated, at_end, 0.0)}


def _is_forward(call: ModelCall) -> bool:
    """Whether it is a forward of a model that is here, and no function or server."""
    return call.run is None and call.url is None


def _advantages(module: RLModule, experience: Experience) -> dict[str, Tensor]:
    """What the module's `advantages` returns, [B, T], for rewards that include the reward model's scores.

    Raises:
        ValueError: if those are all 0: its head could not be checked where models start without memory.
    """
    changes: dict[str, Tensor] = {}
    if "reward_model_scores" in experience.extras:
        scores = experience["reward_model_scores"]
        if not scores.any():
            raise mark_as_on_all_ranks(untrained_reward_model(module.models()["reward_model"].spec))
        added = module.reward_model_coef * scores
        changes["rewards"] = experience.rewards + added
        if experience.token_rewards is not None:
            changes["token_rewards"] = experience.token_rewards + on_last_loss_token(added, experience.loss_mask)
        experience = experience.with_tensors(changes)
    result = module.advantages(experience)
    tensors = result if isinstance(result, Mapping) else {"advantages": result}
    return {**changes, **{name: _per_token(name, value, experience) for name, value in tensors.items()}}


def _whole(parts: Sequence[Any], rows: list[list[int]], rated: Experience, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """[B, T, ...] of all ranks, in order, from the microbatches with these rows, [b, t, ...] each."""
    shape = (*rated.token_ids.shape, *parts[0].shape[2:])
    result = torch.zeros(shape, dtype=dtype, device=rated.token_ids.device)
    for index, part in zip(rows, parts, strict=True):
        if index:
            result[index, : part.shape[1]] = part.to(dtype)
    return ranks.gather_rows(result, rated)


@contextlib.contextmanager
def _on_device(module: RLModule, role: str) -> Iterator[None]:
    """Inside, the role's model is on the module's device; one with `offload` is in CPU memory outside."""
    if not module.models()[role].offload:
        yield
        return
    model = module.parallel_models[role]
    model.move_to(module.device)
    try:
        yield
    finally:
        model.move_to(torch.device("cpu"))


def _with_an_end(experience: Experience, has_end: Tensor) -> Experience:
    """With one more token on the rows of `has_end`, bool [B]: the state before it is the one after the trajectory."""
    width = experience.token_ids.shape[1]
    tensors: dict[str, Any] = {
        name: torch.nn.functional.pad(value, (0, 1), value=-1 if name == "weight_versions" else 0)
        for name, value in experience.tensors().items()
        if value.dim() == 2 and name in ROLLOUT_FIELDS
    }
    at_end = torch.arange(width + 1, device=experience.token_ids.device) == experience.lengths[:, None]
    tensors["loss_mask"] = tensors["loss_mask"] | (at_end & has_end[:, None])
    others = {key: getattr(experience, key) for key in _KEPT}
    return Experience(**others, **tensors, lengths=experience.lengths + has_end)


def _own_outputs(call: ModelCall, experience: Experience, trajectories: list[Trajectory]) -> dict[str, Tensor]:
    """What a call's own function returns, by key.

    Raises:
        TrainingError: if it raises anything but an error of ours, which names its own source.
        ValueError: if it is not a tensor for each of the call's outputs, with a row for each trajectory, or has NaN
            because the rewards are NaN until they are there.
    """
    assert call.run is not None
    try:
        result = call.run(experience, trajectories)
    except LightRLError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise TrainingError(
            f"The function of model call {call.name!r} raised {type(error).__name__}: {error}"
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
                f"rows in order, got {shape}."
            )
        if "rewards" not in call.inputs and value.isnan().any() and experience.rewards.isnan().any():
            raise ValueError(
                f"Model call {call.name!r} returned NaN in {name!r} before the rewards were there. If it reads rewards,"
                " add 'rewards' to its inputs: it then runs after them."
            )
    return {name: value.detach() for name, value in outputs.items()}


def _per_token(name: str, values: Tensor, experience: Experience) -> Tensor:
    num, width = experience.token_ids.shape
    if tuple(values.shape) not in ((num,), (num, width)):
        shape = tuple(values.shape)
        raise ValueError(f"advantages must return {name} as [B] = {(num,)} or [B, T] = {(num, width)}, got {shape}.")
    spread = values[:, None].expand(num, width) if values.dim() == 1 else values
    return torch.where(experience.loss_mask, spread.float(), 0.0)
