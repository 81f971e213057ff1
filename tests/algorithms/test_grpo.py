from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import make_module, minibatch_gradient, sequence_loss_by_hand
from tiny import gradients, random_experience, slow_outputs, tiny_spec
from torch import Tensor

from lightrl.algorithms import GRPO
from lightrl.experience import Experience
from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Sampling


def names(module: GRPO) -> list[str]:
    return [call.outputs[0] for call in module.score_calls()]


def make_loss(module: GRPO, minibatch: Experience) -> Tensor:
    """The number that is backpropagated."""
    (outputs,) = SingleModel(module.policy, LogprobSettings(temperature=0.9)).forward([minibatch])
    return MinibatchLoss(module, minibatch)(minibatch, outputs)


def test_on_policy_the_gradient_is_advantage_times_the_gradient_of_the_logprob() -> None:
    module, minibatch = make_module(), random_experience()
    logprobs, _ = slow_outputs(module.policy, minibatch, temperature=0.9)
    minibatch = replace(minibatch, behavior_logprobs=logprobs.detach())
    (-(minibatch.advantages * logprobs).sum() / minibatch.num_loss_tokens).backward()
    expected = gradients(module)
    found, _ = minibatch_gradient(module, minibatch)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_the_loss_equals_the_papers_formula_token_by_token() -> None:
    """Clip-higher around the behavior policy, each trajectory averaged over its tokens, then the trajectories."""
    module = make_module(clip_low=0.1, clip_high=0.3, loss_reduction="sequence", advantage_std=None)
    minibatch = random_experience()
    expected = sequence_loss_by_hand(
        module,
        minibatch,
        lambda ratio, advantage: -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage),
    )
    assert float(make_loss(module, minibatch)) == pytest.approx(expected, rel=1e-4)


def test_the_decoupled_loss_is_centered_on_the_proximal_policy_and_weighted() -> None:
    module, minibatch = make_module(decoupled=True, importance_cap=1.2), random_experience()
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    total = 0.0
    for row, t in minibatch.loss_mask.nonzero().tolist():
        proximal, advantage = minibatch.proximal_logprobs[row, t], float(minibatch.advantages[row, t])
        ratio = float((logprobs[row, t] - proximal).exp())
        weight = float((proximal - minibatch.behavior_logprobs[row, t]).exp())
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        total -= (weight if weight <= 1.2 else 0.0) * surrogate
    assert float(make_loss(module, minibatch)) == pytest.approx(total / minibatch.num_loss_tokens, rel=1e-4)


def test_a_bound_on_an_estimate_of_the_kl_drops_whole_trajectories() -> None:
    settings: dict[str, Any] = {"decoupled": True, "importance_metric": "k2", "importance_aggregation": "mean"}
    module, minibatch = make_module(**settings, importance_cap=0.005), random_experience()
    mask = minibatch.loss_mask
    squares = torch.where(mask, minibatch.proximal_logprobs - minibatch.behavior_logprobs, 0.0).square() / 2
    is_dropped = squares.sum(1) / mask.sum(1) > 0.005
    assert 0 < int(is_dropped.sum()) < len(minibatch)
    expected = float(mask[is_dropped].sum() / mask.sum())
    assert minibatch_gradient(module, minibatch)[1]["importance_dropped_fraction"] == pytest.approx(expected)


def off_policy(module: GRPO, log_ratio: float, **changes: Any) -> Experience:
    """Each loss token has this log of policy ÷ behavior, and the advantage -1."""
    minibatch = random_experience()
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    moved = torch.where(minibatch.loss_mask, logprobs - log_ratio, 0.0)
    return replace(minibatch, behavior_logprobs=moved, advantages=-minibatch.loss_mask.float(), **changes)


@pytest.mark.parametrize(("dual_clip", "expected"), [(None, 4.0), (3.0, 3.0)], ids=["none", "3"])
def test_the_dual_clip_bounds_the_loss_of_a_bad_token(dual_clip: float | None, expected: float) -> None:
    module = make_module(dual_clip=dual_clip)
    assert float(make_loss(module, off_policy(module, math.log(4)))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence", "product"])
def test_importance_weights_are_of_the_stated_level(level: Any) -> None:
    """On-policy against the proximal policy the loss is the mean of the weights, times minus the advantage of -1."""
    module = make_module(decoupled=True, importance_level=level)
    minibatch = off_policy(module, 0.0)
    proximal = minibatch.behavior_logprobs
    noise = torch.where(minibatch.loss_mask, 0.2 * random_experience().advantages, 0.0)
    minibatch = replace(minibatch, proximal_logprobs=proximal, behavior_logprobs=proximal - noise)
    total = 0.0
    for row in range(len(minibatch)):
        logs = noise[row, minibatch.loss_mask[row]].tolist()
        over_all = {"sequence": sum(logs) / len(logs), "product": sum(logs)}
        total += sum(math.exp(over_all.get(level, one)) for one in logs)
    assert float(make_loss(module, minibatch)) == pytest.approx(total / minibatch.num_loss_tokens, rel=1e-4)


def test_the_only_update_of_an_iteration_takes_its_own_logprobs_as_proximal() -> None:
    module, minibatch = make_module(decoupled=True, num_minibatches=1), random_experience()
    assert module.makes_one_update
    metrics = minibatch_gradient(module, replace(minibatch, proximal_logprobs=None))[1]
    assert metrics["ratio"] == 1
    assert metrics["clipped_fraction"] == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"num_minibatches": 4, "update_epochs": 2}, []),
        ({"decoupled": True, "num_minibatches": 1}, []),
        ({"decoupled": True, "num_minibatches": 2}, ["proximal_logprobs"]),
        ({"decoupled": True, "num_minibatches": 1, "update_epochs": 2}, ["proximal_logprobs"]),
        ({"kl_coef": 0.1, "num_minibatches": 1}, ["reference_logprobs"]),
        ({"kl_coef": 0.1, "decoupled": True}, ["proximal_logprobs", "reference_logprobs"]),
    ],
    ids=["coupled", "coupled, many updates", "decoupled, one update", "two", "two epochs", "reference", "both"],
)
def test_models_run_in_the_score_phase_only_where_their_numbers_are_needed(
    settings: dict[str, Any], expected: list[str]
) -> None:
    defaults: dict[str, Any] = {"reward": len, "num_minibatches": 2, "reference": tiny_spec()}
    module = GRPO(tiny_spec(), **{**defaults, **settings})
    assert names(module) == expected
    module.data_flow()


def test_a_reference_is_loaded_only_for_a_kl_term() -> None:
    assert set(GRPO(tiny_spec(), reward=len, reference=tiny_spec()).models()) == {"policy"}
    assert set(GRPO(tiny_spec(), reward=len, reference=tiny_spec(), kl_coef=0.1).models()) == {"policy", "reference"}


def test_the_kl_term_adds_its_estimate_to_the_loss() -> None:
    plain = make_module()
    penalized = make_module("GRPO", kl_coef=0.5, kl_estimator="k2", reference=tiny_spec(seed=1))
    minibatch = random_experience()
    logprobs = slow_outputs(plain.policy, minibatch, temperature=0.9)[0].detach()
    expected = float((logprobs - minibatch.reference_logprobs)[minibatch.loss_mask].square().mean() / 2)
    assert minibatch_gradient(penalized, minibatch)[1]["kl_reference_nats"] == pytest.approx(expected, rel=1e-4)
    difference = make_loss(penalized, minibatch) - make_loss(plain, minibatch)
    assert float(difference) == pytest.approx(0.5 * expected, rel=1e-3)


def test_the_entropy_bonus_lowers_the_loss_and_has_a_gradient() -> None:
    minibatch = replace(random_experience(), advantages=torch.zeros_like(random_experience().behavior_logprobs))
    module = make_module(entropy_coef=0.5)
    _, entropy = slow_outputs(module.policy, minibatch, temperature=0.9)
    mean = entropy[minibatch.loss_mask].mean()
    (-0.5 * mean).backward()
    expected = gradients(module)["policy.lm_head.weight"]
    assert float(make_loss(module, minibatch)) == pytest.approx(-0.5 * mean.item(), rel=1e-4)
    torch.testing.assert_close(
        minibatch_gradient(module, minibatch)[0]["policy.lm_head.weight"], expected, rtol=1e-3, atol=1e-6
    )


def test_the_overlong_penalty_comes_before_the_group_statistics() -> None:
    """Limit 8, buffer 4: completions of 4, 6 and 8 tokens lose 0, 1/2 and 1."""
    sampling = Sampling(max_new_tokens=8)
    module = make_module(overlong_buffer_tokens=4, advantage_std=None, sampling=sampling)
    experience = random_experience(num_groups=1, group_size=3)
    width = torch.arange(experience.token_ids.shape[1])
    experience = replace(
        experience,
        loss_mask=(width >= 1) & (width <= torch.tensor([4, 6, 8])[:, None]),
        rewards=torch.ones(3),
    )
    torch.testing.assert_close(module.advantages(experience), torch.tensor([0.5, 0.0, -0.5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs a reference policy"),
        ({"kl_coef": -0.1}, "kl_coef=-0.1, expected 0"),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1", "reference": tiny_spec()},
            r"'k1' in the loss does nothing, .* expected k2 .* or k3",
        ),
        ({"decoupled": True, "importance_metric": "k2"}, "importance_metric='k2' .* expected decoupled=True and"),
        ({"importance_cap": 2.0, "importance_aggregation": "max"}, "importance_aggregation='max' say what is held"),
        ({"importance_cap": 2.0}, "importance_cap=2.0, .* are of the decoupled loss, expected decoupled=True"),
        ({"importance_level": "sequence"}, "importance_level='sequence' are of the decoupled loss"),
        (
            {"decoupled": True, "importance_cap": 0.5, "importance_floor": 2.0},
            "^importance_floor=2.0, expected 0 to importance_cap=0.5",
        ),
        ({"clip_low": -0.1}, "clip_low=-0.1, .* expected 0 or more"),
        ({"dual_clip": 0.5}, "dual_clip=0.5, expected more than 1"),
        ({"ratio_level": "seq"}, "ratio_level='seq', expected token or sequence"),
        ({"advantage_std": "all"}, "^advantage_std='all', expected 'group', 'batch' or None"),
        (
            {"overlong_buffer_tokens": 100, "sampling": Sampling(max_new_tokens=8)},
            "^overlong_buffer_tokens=100, expected 1 to sampling.max_new_tokens=8. Lower it, or raise sampling.max_new",
        ),
        ({"overlong_buffer_tokens": 4, "overlong_penalty_factor": -1.0}, "^overlong_penalty_factor=-1.0, expected 0"),
        ({"kl_estimator": "k4"}, "^kl_estimator='k4', expected one of k1, k2, k3"),
        ({"decoupled": True, "importance_cap": -1.0}, "^importance_cap=-1.0, expected more than 0"),
        (
            {"decoupled": True, "importance_cap": 2.0, "importance_mode": "clamp", "importance_metric": "k2"},
            "^importance_mode='clamp' got importance_metric='k2' and importance_aggregation=None.* Use importance_mode",
        ),
        (
            {"leave_one_out": True, "advantage_mean": None, "advantage_std": "batch"},
            "^leave_one_out=True got advantage_mean=None, expected advantage_mean='group'.* Set advantage_mean",
        ),
        ({"group_size": 1}, "group_size=1 leaves nothing to compare"),
        ({"group_size": 1, "advantage_mean": None}, "group_size=1 leaves nothing to compare"),
        ({"loss_reduction": "mean"}, "loss_reduction must be token, sequence or fixed, got 'mean'"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO(tiny_spec(), reward=len, **settings)


def test_groups_of_one_are_allowed_where_nothing_is_compared_within_a_group() -> None:
    assert GRPO(tiny_spec(), reward=len, group_size=1, advantage_mean="batch", advantage_std=None).group_size == 1
