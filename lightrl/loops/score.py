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
        forward_context: the precision plugin's, for the models only: half precision would make bfloat16 the default
            dtype of what `advantages` creates.
        ranks: who else has this Experience. Each infers its share of the rows, for the roles that it holds; a module's
            own calls run on rank 0 only, since a judge may say something else the second time.
        left_out: names of calls whose outputs `experience` has, or that run later.
    """
    rows = list(trajectories)
    ranks = ranks or Ranks()

    @torch.no_grad()  # in the call's own thread
    def run(call: ModelCall, seen: Experience) -> Mapping[str, Tensor]:
        if call.name == ADVANTAGES:
            return _advantages(module, seen)
        if call.url is not None:
            call = with_server(call, is_scalar=module.models()[_role(call)].spec.head == "scalar")
        if call.run is not None:
            found = asked_once(call, rows, lambda: _own_outputs(call, _called(call, seen, rows), seen))
            return {key: value.to(seen.token_ids.device) for key, value in found.items()}
        with forward_context():
            return _infer(module, call, seen, ranks.of_role(_role(call)))

    def runs_here(call: ModelCall) -> bool:
        if call.run is not None or call.url is not None:
            return ranks.is_main or call.on_all_ranks
        return ranks.of_role(_role(call)).is_here

    def share(call: ModelCall, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        holders = ranks.of_role(_role(call))
        is_forward = call.run is None and call.url is None
        if call.on_all_ranks or (is_forward and holders.size == ranks.size):
            return found
        source = holders.first_rank if is_forward else 0
        with ranks.phase(f"score: {call.name}", has_own_deadline=runs_beside(call)):
            return ranks.broadcast_tensors(found, source=source)

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
    """What an `on_experience_ready` hook returned, with advantages masked anew.

    Raises:
        TypeError: if it is no Experience with advantages.
        ValueError: if it differs from `before` in more than loss mask and advantages, or trains tokens that the loss
            mask left out.
    """
    if not isinstance(changed, Experience) or changed.advantages is None:
        raise TypeError(
            f"on_experience_ready returned {type(changed).__name__}, expected None or an Experience with advantages. "
            "Use dataclasses.replace on the one it got."
        )
    old, new = before.tensors(), changed.tensors()
    for name in sorted((old.keys() | new.keys()) - {"loss_mask", "advantages"}):
        if name not in new or name not in old or not (new[name] is old[name] or torch.equal(new[name], old[name])):
            raise ValueError(
                f"on_experience_ready changed {name!r}, expected changes of loss_mask and advantages only. "
                "Change what the reward or the workflow gives instead."
            )
    num_added = int((changed.loss_mask & ~before.loss_mask).sum())
    if num_added:
        raise ValueError(
            f"on_experience_ready added {num_added} tokens to loss_mask, expected tokens to be taken out only: there "
            "are no logprobs of the others. Return loss_mask & your_mask."
        )
    return replace(changed, advantages=torch.where(changed.loss_mask, changed.advantages, 0.0))


def _infer(module: RLModule, call: ModelCall, experience: Experience, ranks: Ranks) -> dict[str, Tensor]:
    """One forward over all trajectories: what the call's outputs stand for, rows in order, float32.

    `values` are a critic's, [B, T], and `bootstrap_values` the one of the state after a truncated end, [B]. Any other
    output is the number of a scalar head after the last token, [B], or the logprobs of a language model, [B, T]; with
    the call's `topk` its likeliest tokens and their logprobs too, [B, T, K].
    """
    role, key = _role(call), call.outputs[0]
    scores_ends = key != "values" and module.models()[role].spec.head == "scalar"
    seen = experience
    if scores_ends:
        seen = _with_an_end(experience, torch.ones_like(experience.is_truncated))
    elif "bootstrap_values" in call.outputs:
        seen = _with_an_end(experience, experience.is_truncated)
    rows, parts = ranks.microbatch_rows(seen, call.microbatch_tokens or module.microbatch_tokens)
    plain = adapters_off(getattr(module, role)) if call.adapters_off else contextlib.nullcontext()
    with _on_device(module, role), plain:
        outputs = module.parallel_models[role].forward(parts, topk=call.topk)
    founds = [output.values if scores_ends or key == "values" else output.logprobs for output in outputs]
    if any(found is None for found in founds):
        raise ValueError(
            f"Model call {call.name!r} gives {key!r}, but the model of {role!r} has no values. Mend its role."
        )
    # The dtype is spelled out because half precision changes the default, and bfloat16 would round the logprobs.
    result = _whole(founds, rows, seen, ranks, torch.float32)
    if seen is experience:
        tensors = {key: result}
        if call.topk:
            ids, logprobs = zip(*((output.teacher_topk_ids, output.teacher_topk) for output in outputs), strict=True)
            tensors["teacher_topk_ids"] = _whole(ids, rows, seen, ranks, torch.int64)
            tensors["teacher_topk_logprobs"] = _whole(logprobs, rows, seen, ranks, torch.float32)
        return tensors
    at_end = result.gather(1, experience.lengths[:, None])[:, 0]
    if scores_ends:
        return {key: at_end}
    values = torch.where(experience.loss_mask, result[:, :-1], 0.0)
    return {"values": values, "bootstrap_values": torch.where(experience.is_truncated, at_end, 0.0)}


def _role(call: ModelCall) -> str:
    return call.role or "policy"


def _advantages(module: RLModule, experience: Experience) -> dict[str, Tensor]:
    """What the module's `advantages` gives, [B, T], of rewards to which the reward model's numbers are added.

    Raises:
        ValueError: if those are all 0; where models are born without memory nobody has looked at its head before.
    """
    changes: dict[str, Tensor] = {}
    if "reward_model_scores" in experience.extras:
        scores = experience["reward_model_scores"]
        if not scores.any():
            raise mark_as_on_all_ranks(untrained_reward_model(module.models()["reward_model"].spec))
        given = module.reward_model_coef * scores
        changes["rewards"] = experience.rewards + given
        if experience.token_rewards is not None:
            changes["token_rewards"] = experience.token_rewards + on_last_loss_token(given, experience.loss_mask)
        experience = experience.with_tensors(changes)
    found = module.advantages(experience)
    tensors = found if isinstance(found, Mapping) else {"advantages": found}
    return {**changes, **{name: _per_token(name, value, experience) for name, value in tensors.items()}}


def _whole(
    founds: Sequence[Tensor | None], rows: list[list[int]], seen: Experience, ranks: Ranks, dtype: torch.dtype
) -> Tensor:
    """[B, T, ...] of all ranks, in order, from what the microbatches with these rows gave, [b, t, ...] each."""
    assert founds[0] is not None
    shape = (*seen.token_ids.shape, *founds[0].shape[2:])
    result = torch.zeros(shape, dtype=dtype, device=seen.token_ids.device)
    for index, found in zip(rows, founds, strict=True):
        if index:
            assert found is not None
            result[index, : found.shape[1]] = found.to(dtype)
    return ranks.gather_rows(result, seen)


@contextlib.contextmanager
def _on_device(module: RLModule, role: str) -> Iterator[None]:
    """The role's model is on the module's device inside; one with `offload` waits in CPU memory outside."""
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
    """With one more token on the rows of `has_end`, bool [B]: the state before it is that after the trajectory."""
    width = experience.token_ids.shape[1]
    tensors: dict[str, Any] = {
        name: torch.nn.functional.pad(value, (0, 1), value=-1 if name == "weight_versions" else 0)
        for name, value in experience.tensors().items()
        if value.dim() == 2 and name in ROLLOUT_FIELDS
    }
    at_end = torch.arange(width + 1, device=experience.token_ids.device) == experience.lengths[:, None]
    tensors["loss_mask"] = tensors["loss_mask"] | (at_end & has_end[:, None])
    kept = ("rewards", "group_ids", "is_truncated", "pixel_values", "image_rows")
    others = {name: getattr(experience, name) for name in kept}
    return Experience(**others, **tensors, lengths=experience.lengths + has_end)


def _called(call: ModelCall, experience: Experience, trajectories: list[Trajectory]) -> Any:
    """What the call's own function returns.

    Raises:
        TrainingError: if it raises anything but an error of ours, which says itself where it comes from.
    """
    assert call.run is not None
    try:
        return call.run(experience, trajectories)
    except LightRLError:
        raise
    except Exception as error:
        raise TrainingError(
            f"Model call {call.name!r} raised {type(error).__name__}: {error}, expected its outputs "
            f"{list(call.outputs)}. Mend its function, or what it calls."
        ) from error


def _own_outputs(call: ModelCall, result: Any, experience: Experience) -> dict[str, Tensor]:
    """What a call's own function returned, by key.

    Raises:
        ValueError: if it is not a tensor for each of the call's outputs, with a row for each trajectory, or has NaN
            where the rewards are NaN, since they are still awaited.
    """
    found = dict(result) if isinstance(result, Mapping) else {call.outputs[0]: result} if len(call.outputs) == 1 else {}
    if set(found) != set(call.outputs):
        raise ValueError(
            f"Model call {call.name!r} returned {sorted(found) or type(result).__name__}, expected its outputs "
            f"{list(call.outputs)}. Return a dict with a tensor for each."
        )
    num, width = experience.token_ids.shape
    for name, value in found.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if not isinstance(value, Tensor) or (shape != (num,) and shape[:2] != (num, width)):
            raise ValueError(
                f"Model call {call.name!r} returned {name!r} as {shape}, expected a tensor [B] = {(num,)} or [B, T] = "
                f"{(num, width)}. Give one number for each trajectory or token, in the rows' order."
            )
        if "rewards" not in call.inputs and value.isnan().any() and experience.rewards.isnan().any():
            raise ValueError(
                f"Model call {call.name!r} returned NaN in {name!r} while rewards are still awaited, expected numbers. "
                "If it reads rewards, name 'rewards' in its inputs: it then runs when they are there."
            )
    return {name: value.detach() for name, value in found.items()}


def _per_token(name: str, values: Tensor, experience: Experience) -> Tensor:
    num, width = experience.token_ids.shape
    if tuple(values.shape) not in ((num,), (num, width)):
        raise ValueError(
            f"advantages returned {'shape' if name == 'advantages' else name + ' of shape'} {tuple(values.shape)}, "
            f"expected [B] = {(num,)} or [B, T] = {(num, width)}. Return one number for each trajectory or token."
        )
    spread = values[:, None].expand(num, width) if values.dim() == 1 else values
    return torch.where(experience.loss_mask, spread.float(), 0.0)
