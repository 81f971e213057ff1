from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import make_module
from tiny import random_experience, random_trajectories, slow_outputs, tiny_spec
from torch import Tensor

from lightrl.algorithms import GRPO, ReferenceKL
from lightrl.dataflow import ModelCall
from lightrl.errors import TrainingError
from lightrl.experience import Experience
from lightrl.functional import group_advantages
from lightrl.loops.score import score
from lightrl.loops.sharing import accept_changes
from lightrl.models import Outputs, Role
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Trajectory


def scored_by(module: GRPO, experience: Experience, **settings: Any) -> Experience:
    module.parallel_models = {role: SingleModel(getattr(module, role), LogprobSettings()) for role in module.models()}
    return score(module, experience, **settings).local


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 10**6])
def test_scores_are_those_of_their_models_in_the_rows_order(microbatch_tokens: int) -> None:
    module = make_module("GRPO decoupled")
    module.microbatch_tokens = microbatch_tokens
    experience = scored_by(module, random_experience(is_scored=False))
    logprobs, _ = slow_outputs(module.policy, experience)
    torch.testing.assert_close(experience.proximal_logprobs, logprobs.detach(), rtol=1e-4, atol=1e-4)
    assert experience.reference_logprobs is None


def test_a_call_has_its_own_bound_on_a_microbatch() -> None:
    sizes: list[list[int]] = []

    class Sizes(SingleModel):
        def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
            sizes.append([len(part) for part in microbatches])
            return super().forward(microbatches)

    module = make_module("GRPO decoupled")
    (call,) = module.model_calls()
    module.parallel_models = {"policy": Sizes(module.policy, LogprobSettings())}
    for bound in (None, 1):
        module.model_calls = lambda: [replace(call, microbatch_tokens=bound)]  # noqa: B023
        score(module, random_experience(is_scored=False))
    assert sizes == [[9], [1] * 9]


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_model_that_waits_in_cpu_memory_is_on_the_device_while_it_runs(fails: bool) -> None:
    """The device is `meta`, which shows the moves and computes nothing."""
    places: list[str] = []

    class Reference:
        def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
            places.append("runs")
            if fails:
                raise RuntimeError("out of memory")
            zeros = [torch.zeros(part.token_ids.shape) for part in microbatches]
            return [Outputs(zero, zero) for zero in zeros]

        def move_to(self, device: torch.device) -> None:
            places.append(device.type)

    module: Any = make_module("GRPO", reference=ReferenceKL(0.1, Role(tiny_spec(seed=1), offload=True)))
    module.to("meta")
    module.parallel_models = {"reference": Reference()}
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        score(module, random_experience(is_scored=False))
    assert places == ["meta", "runs", "cpu"]


def test_the_reference_is_another_model() -> None:
    module = make_module("GRPO with KL and entropy")
    experience = scored_by(module, random_experience(is_scored=False))
    logprobs, _ = slow_outputs(module.reference, experience)
    torch.testing.assert_close(experience.reference_logprobs, logprobs.detach(), rtol=1e-4, atol=1e-4)
    assert experience.proximal_logprobs is None
    assert not any(value.requires_grad for value in experience.tensors().values())


@pytest.mark.parametrize(
    ("algorithm", "num_updates", "expected"),
    [("GRPO", 2, 0), ("GRPO decoupled", 1, 0), ("GRPO decoupled", 2, 1), ("CISPO", 2, 0)],
)
def test_the_policy_runs_only_for_proximal_logprobs_that_can_differ(
    algorithm: str, num_updates: int, expected: int
) -> None:
    module = make_module(algorithm, num_minibatches=num_updates)
    module.parallel_models = {"policy": SingleModel(module.policy, LogprobSettings(), form="packed")}
    calls = []
    module.policy.base_model.register_forward_hook(lambda *_: calls.append(1))
    score(module, random_experience(is_scored=False))
    assert len(calls) == expected


@pytest.mark.parametrize("is_per_token", [False, True], ids=["B", "B by T"])
def test_advantages_are_spread_over_loss_tokens_and_masked_elsewhere(is_per_token: bool) -> None:
    experience, module = random_experience(is_scored=False), make_module()
    values = torch.randn(experience.token_ids.shape if is_per_token else experience.rewards.shape)
    module.advantages = lambda _: values  # type: ignore[method-assign]
    found = scored_by(module, experience).advantages
    expected = values if is_per_token else values[:, None].expand(experience.token_ids.shape)
    assert torch.equal(found, torch.where(experience.loss_mask, expected, 0.0))


@pytest.mark.parametrize("shape", [(3,), (9, 3), (9, 1), ()], ids=str)
def test_advantages_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    module = make_module()
    module.advantages = lambda _: torch.zeros(shape)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"advantages must return advantages as \[B\] = \(9,\) or \[B, T\] = \(9, 1"):
        scored_by(module, random_experience(is_scored=False))


def test_scores_stay_float32_and_advantages_keep_the_default_dtype_in_half_precision() -> None:
    @contextlib.contextmanager
    def half_precision() -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    module = make_module("GRPO decoupled")
    default_dtypes = []

    def advantages(experience: Experience) -> Tensor:
        default_dtypes.append(torch.get_default_dtype())
        return experience.rewards

    module.advantages = advantages  # type: ignore[method-assign]
    experience = scored_by(module, random_experience(is_scored=False), forward_context=half_precision)
    assert experience.proximal_logprobs.dtype == torch.float32
    assert not torch.equal(experience.proximal_logprobs, experience.proximal_logprobs.bfloat16().float())
    assert default_dtypes == [torch.float32]


def test_a_hook_may_take_tokens_out_and_change_advantages() -> None:
    experience = random_experience()
    loss_mask = experience.loss_mask & (experience.token_ids > 4)
    changed = replace(experience, loss_mask=loss_mask, advantages=experience.advantages + 1)
    accepted = accept_changes(experience, changed)
    assert torch.equal(accepted.loss_mask, loss_mask)
    assert torch.equal(accepted.advantages, torch.where(loss_mask, experience.advantages + 1, 0.0))


@pytest.mark.parametrize(
    "name", ["rewards", "token_ids", "behavior_logprobs", "proximal_logprobs", "lengths", "values"]
)
def test_a_hook_may_neither_change_nor_add_nor_remove_anything_else(name: str) -> None:
    experience = random_experience()
    changed = replace(experience, **{name: 1 + getattr(experience, "rewards" if name == "values" else name)})
    for before, after in ((experience, changed), (changed, experience)):
        with pytest.raises(ValueError, match=f"on_experience_ready changed '{name}'"):
            accept_changes(before, after)


def test_a_hook_may_not_train_tokens_that_have_no_logprobs() -> None:
    experience = random_experience()
    changed = replace(experience, loss_mask=torch.ones_like(experience.loss_mask))
    with pytest.raises(ValueError, match=r"added \d+ tokens? to loss_mask, but may only remove tokens"):
        accept_changes(experience, changed)


@pytest.mark.parametrize("changed", [True, replace(random_experience(), advantages=None)], ids=["a bool", "none left"])
def test_a_hook_that_returns_no_experience_with_advantages_is_an_error(changed: Any) -> None:
    with pytest.raises(TypeError, match="must return None or an Experience with advantages"):
        accept_changes(random_experience(), changed)


class TwoRewards(GRPO):
    """README's and docs' example: an LLM judge whose number is added to the reward."""

    def model_calls(self) -> list[ModelCall]:
        return [*super().model_calls(), ModelCall("style", outputs=("style_rewards",), run=self.style)]

    def style(self, experience: Experience, trajectories: list[Trajectory]) -> Tensor:
        return torch.tensor([float(len(trajectory.token_ids)) for trajectory in trajectories])

    def shaped_rewards(self, experience: Experience) -> Tensor:
        return super().shaped_rewards(experience) + experience["style_rewards"]


def two_rewards(**settings: Any) -> TwoRewards:
    module = TwoRewards(tiny_spec(), reward=len, **settings)
    module.configure_model()
    return module


def test_a_call_of_the_users_own_adds_to_the_reward() -> None:
    module, trajectories = two_rewards(group_size=3), random_trajectories()
    experience = score(module, Experience.from_trajectories(trajectories), trajectories)
    assert torch.equal(experience["style_rewards"], experience.lengths.float())
    expected = group_advantages(experience.rewards + experience.lengths, experience.group_ids)
    assert torch.equal(
        experience.advantages[experience.loss_mask], expected.repeat_interleave(experience.loss_mask.sum(1))
    )
    assert "style" in [call.name for call in module.data_flow().calls]


def test_a_call_of_the_users_own_may_come_after_any_other() -> None:
    seen: dict[str, Experience] = {}

    def look(name: str) -> Any:
        def run(experience: Experience, trajectories: list[Trajectory]) -> Tensor:
            seen[name] = experience
            return experience.rewards

        return run

    module = two_rewards()
    module.model_calls = lambda: [  # type: ignore[method-assign]
        *TwoRewards.model_calls(module),
        ModelCall("early", outputs=("early",), run=look("early"), after=("reward",)),
        ModelCall("late", inputs=("advantages",), outputs=("late",), run=look("late")),
    ]
    trajectories = random_trajectories()
    experience = score(module, Experience.from_trajectories(trajectories), trajectories)
    assert seen["early"].advantages is None
    assert torch.equal(seen["late"].advantages, experience.advantages)
    assert {"early", "late", "style_rewards"} <= experience.extras.keys()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4), r"'style' must return 'style_rewards' as a tensor \[B\] = \(9,\) .* got \(4,\)"),
        ([0.0] * 9, "'style' must return 'style_rewards' as a tensor .* got list"),
        ({"other": torch.zeros(9)}, r"'style' must return .* outputs \['style_rewards'\], got \['other'\]"),
    ],
    ids=["too few", "a list", "another key"],
)
def test_what_a_call_of_the_users_own_returns_is_checked(returned: Any, message: str) -> None:
    module = two_rewards()
    module.style = lambda *_: returned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        score(module, random_experience(is_scored=False))


def test_what_a_call_of_the_users_own_raises_names_the_call() -> None:
    module = two_rewards()

    def ask(*_: Any) -> Any:
        raise KeyError("score")

    module.style = ask  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"function of model call 'style' raised KeyError: 'score'") as seen:
        score(module, random_experience(is_scored=False))
    assert isinstance(seen.value.__cause__, KeyError)


def test_advantages_may_give_further_keys() -> None:
    module, experience = make_module(), random_experience(is_scored=False)
    found = torch.randn(experience.token_ids.shape)
    module.advantages = lambda _: {"advantages": experience.rewards, "returns": found}  # type: ignore[method-assign]
    scored = scored_by(module, experience)
    assert torch.equal(scored.returns, torch.where(experience.loss_mask, found, 0.0))
