from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import assert_same, make_module, minibatch_gradient
from tiny import gradients, random_experience, slow_outputs, tiny_spec

from lightrl.algorithms import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO, ReinforceBaseline
from lightrl.experience import Experience


def judged(rewards: list[float], group_ids: list[int]) -> Experience:
    experience = random_experience(num_groups=len(rewards), group_size=1)
    return replace(experience, rewards=torch.tensor(rewards), group_ids=torch.tensor(group_ids))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Two groups with rewards (1, 0, 0, 0) and (1, 1): means 1/4 and 1, of the batch 1/2; deviation 1/2.
        (GRPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        (DrGRPO, [0.75, -0.25, -0.25, -0.25, 0.0, 0.0]),
        (DAPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        (RLOO, [1.0, -1 / 3, -1 / 3, -1 / 3, 0.0, 0.0]),
        (ReinforceBaseline, [0.5, -0.5, -0.5, -0.5, 0.5, 0.5]),
        (GSPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        (CISPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_advantages_are_those_of_the_paper(algorithm: type[GRPO], expected: list[float]) -> None:
    module = algorithm(tiny_spec(), reward=len)
    found = module.advantages(judged([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [5, 5, 5, 5, 2, 2]))
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (DrGRPO, {"loss_reduction": "fixed", "advantage_std": None}),
        (DAPO, {"loss_reduction": "token", "clip_low": 0.2, "clip_high": 0.28}),
        (RLOO, {"loss_reduction": "fixed", "leave_one_out": True}),
        (ReinforceBaseline, {"group_size": 1, "advantage_mean": "batch"}),
        (GSPO, {"loss_reduction": "sequence", "ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        (CISPO, {"clip_low": 1.0}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_each_differs_from_grpo_by_the_settings_of_its_paper(algorithm: type[GRPO], expected: dict[str, Any]) -> None:
    module = algorithm(tiny_spec(), reward=len)
    assert {name: getattr(module, name) for name in expected} == expected
    other = algorithm(tiny_spec(), reward=len, clip_high=0.5, group_size=6)
    assert (other.clip_high, other.group_size) == (0.5, 6)


def test_gspo_clips_whole_trajectories() -> None:
    """min(s·A, clip(s)·A) with s = exp(mean log-ratio), averaged over trajectories."""
    module, minibatch = make_module("GSPO"), random_experience()
    advantages = torch.linspace(-1, 1, len(minibatch))
    minibatch = replace(minibatch, advantages=torch.where(minibatch.loss_mask, advantages[:, None], 0.0))
    logprobs, _ = slow_outputs(module.policy, minibatch, temperature=0.9)
    total = torch.zeros(())
    for row in range(len(minibatch)):
        mask = minibatch.loss_mask[row]
        ratio = (logprobs[row, mask] - minibatch.behavior_logprobs[row, mask]).mean().exp()
        total = total - torch.minimum(ratio * advantages[row], ratio.clamp(0.9, 1.1) * advantages[row])
    (total / len(minibatch)).backward()
    expected = gradients(module.policy)
    found, _ = minibatch_gradient(module, minibatch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_cispo_weighs_the_policy_gradient_by_the_clipped_ratio() -> None:
    module, minibatch = make_module("CISPO", clip_high=0.5), random_experience()
    logprobs, _ = slow_outputs(module.policy, minibatch, temperature=0.9)
    weights = (logprobs.detach() - minibatch.behavior_logprobs).exp().clamp(0.0, 1.5)
    (-(weights * minibatch.advantages * logprobs)[minibatch.loss_mask].mean()).backward()
    expected = gradients(module.policy)
    found, _ = minibatch_gradient(module, minibatch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("setting", [{"ratio_level": "sequence"}, {"dual_clip": 3.0}], ids=str)
def test_cispo_refuses_what_its_loss_does_not_read(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"CISPO got {next(iter(setting))}"):
        CISPO(tiny_spec(), reward=len, **setting)


def test_on_policy_all_of_one_reduction_have_the_same_gradient() -> None:
    """With ratio 1 nothing is clipped or weighted, and what is left is the policy gradient."""
    minibatch = random_experience()
    first = make_module("GRPO", loss_reduction="token")
    logprobs, _ = slow_outputs(first.policy, minibatch, temperature=0.9)
    fields = dict.fromkeys(("behavior_logprobs", "proximal_logprobs"), logprobs.detach())
    minibatch = replace(minibatch, **fields)
    expected, _ = minibatch_gradient(first, minibatch)
    for algorithm in ("GRPO decoupled", "DrGRPO", "DAPO", "RLOO", "ReinforceBaseline", "CISPO"):
        found, _ = minibatch_gradient(make_module(algorithm, loss_reduction="token"), minibatch)
        assert_same((found, {}), (expected, {}))
