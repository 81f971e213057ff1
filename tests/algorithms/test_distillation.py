from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import make_module, minibatch_gradient
from tiny import gradients, random_experience, slow_outputs, tiny_spec

from lightrl.algorithms import Distillation
from lightrl.functional import group_advantages


def make(**settings: Any) -> Distillation:
    return Distillation(tiny_spec(), **{"teacher": tiny_spec(seed=1), **settings})


def test_the_advantage_of_a_token_is_what_the_teacher_thinks_of_it() -> None:
    """The policy gave the token 1/4 and the teacher 1/2, then 1/2 and 1/8: log 2 and -log 4."""
    experience = random_experience(num_groups=1, group_size=1, completion_tokens=(2, 2))
    behavior = torch.zeros(experience.token_ids.shape)
    behavior[0, -2:] = torch.tensor([0.25, 0.5]).log()
    teacher = torch.zeros(experience.token_ids.shape)
    teacher[0, -2:] = torch.tensor([0.5, 0.125]).log()
    found = make().advantages(replace(experience, behavior_logprobs=behavior, teacher_logprobs=teacher))
    torch.testing.assert_close(found[0, -2:], torch.tensor([2.0, 0.25]).log())


def test_a_reward_can_be_trained_on_too() -> None:
    experience = random_experience()
    plain, judged = make().advantages(experience), make(reward_coef=0.5, group_size=3).advantages(experience)
    expected = 0.5 * group_advantages(experience.rewards, experience.group_ids)[:, None].expand(plain.shape)
    torch.testing.assert_close(judged - plain, expected)


def test_on_policy_the_gradient_is_that_of_the_sampled_reverse_kl() -> None:
    """Σ over tokens of (log policy - log teacher), with the score function's weight held fixed."""
    module, experience = make_module("Distillation"), random_experience()
    logprobs, _ = slow_outputs(module.policy, experience, temperature=0.9)
    teacher = slow_outputs(module.teacher, experience, temperature=0.9)[0].detach()
    ((logprobs.detach() - teacher) * logprobs)[experience.loss_mask].mean().backward()
    expected = gradients(module)
    on_policy = replace(experience, behavior_logprobs=logprobs.detach(), teacher_logprobs=teacher)
    advantages = torch.where(experience.loss_mask, module.advantages(on_policy), 0.0)
    found, metrics = minibatch_gradient(module, replace(on_policy, advantages=advantages))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    divergence = (logprobs.detach() - teacher)[experience.loss_mask].mean()
    assert metrics["kl_teacher_nats"] == pytest.approx(float(divergence), rel=1e-4)


def test_the_teacher_is_a_frozen_role_with_a_call_of_its_own() -> None:
    module = make(num_minibatches=2, decoupled=True)
    module.configure_model()
    assert [call.name for call in module.score_calls()] == ["proximal_logprobs", "teacher_logprobs"]
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())


def test_no_reward_is_needed() -> None:
    assert make().reward(None) == 0.0
    assert make().group_size == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_coef": -1.0}, "reward_coef=-1.0, expected 0"),
        ({"reward_coef": 1.0, "group_size": 1}, "group_size=1 leaves nothing to compare"),
    ],
    ids=str,
)
def test_distillation_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)
