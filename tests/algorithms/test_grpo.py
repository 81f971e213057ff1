import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import make_module, minibatch_gradient, sequence_loss_by_hand
from tiny import gradients, random_experience, slow_outputs, tiny_spec
from torch import Tensor

from lightrl.algorithms import DPO, GRPO, IPO, PPO, AdaptiveKL, ReferenceKL, ReinforcePlusPlus
from lightrl.experience import Experience
from lightrl.functional import ImportanceWeights, RewardShaping
from lightrl.loops.update import MinibatchLoss
from lightrl.models import LoRA, Role
from lightrl.models.tuning import tuning_of
from lightrl.rewards import OverlongPenalty
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Sampling

KL = ReferenceKL(0.1, tiny_spec())


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
    actual, _ = minibatch_gradient(module, minibatch)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_the_loss_equals_the_papers_formula_token_by_token() -> None:
    """Clip-higher around the behavior policy, each trajectory averaged over its tokens, then the trajectories."""
    module = make_module(clip_low=0.1, clip_high=0.3, loss_reduction="sequence", advantage_std=None)
    minibatch = random_experience()
    expected = sequence_loss_by_hand(
        module, minibatch, lambda ratio, advantage: -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
    )
    assert float(make_loss(module, minibatch)) == pytest.approx(expected, rel=1e-4)


def test_rewards_are_shaped_before_the_advantages_of_those_that_do_not_undo_it() -> None:
    shaping = RewardShaping(bias=-1.0, scaling=4.0, clip=2.0)
    module = make_module(advantage_mean=None, advantage_std=None, reward_shaping=shaping)
    experience = replace(random_experience(), rewards=torch.tensor([0.0, 0.75, 1.0, 1.25, 3.0, 1.0, 1.0, 1.0, 1.0]))
    assert module.advantages(experience).tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]


def test_the_decoupled_loss_is_centered_on_the_proximal_policy_and_weighted() -> None:
    module, minibatch = make_module(decoupled=ImportanceWeights(cap=1.2)), random_experience()
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    total = 0.0
    for row, t in minibatch.loss_mask.nonzero().tolist():
        proximal, advantage = minibatch.proximal_logprobs[row, t], float(minibatch.advantages[row, t])
        ratio = float((logprobs[row, t] - proximal).exp())
        weight = float((proximal - minibatch.behavior_logprobs[row, t]).exp())
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        total -= (weight if weight <= 1.2 else 0.0) * surrogate
    assert float(make_loss(module, minibatch)) == pytest.approx(total / minibatch.num_loss_tokens, rel=1e-4)


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
    module = make_module(decoupled=ImportanceWeights(level=level))
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
        ({"reference": KL, "num_minibatches": 1}, ["reference_logprobs"]),
        ({"reference": KL, "decoupled": True}, ["proximal_logprobs", "reference_logprobs"]),
    ],
    ids=["coupled", "coupled, many updates", "decoupled, one update", "two", "two epochs", "reference", "both"],
)
def test_models_run_in_the_score_phase_only_where_their_numbers_are_needed(settings, expected):
    module = GRPO(tiny_spec(), **{"reward": len, "num_minibatches": 2, **settings})
    assert [call.outputs[0] for call in module.model_calls()] == expected
    module.data_flow()


def test_the_reference_policy_is_a_model_of_its_own_or_the_policy_without_its_adapters() -> None:
    assert set(GRPO(tiny_spec(), reward=len).models()) == {"policy"}
    assert set(GRPO(tiny_spec(), reward=len, reference=KL).models()) == {"policy", "reference"}
    adapted = GRPO(Role(tiny_spec(), lora=LoRA(rank=2)), reward=len, reference=ReferenceKL(0.1))
    assert set(adapted.models()) == {"policy"}
    assert [(call.role, call.base_only) for call in adapted.model_calls()] == [("policy", True)]


@pytest.mark.parametrize("kind", [GRPO, PPO, ReinforcePlusPlus, DPO, IPO])
def test_every_algorithm_measures_from_the_adapters_that_training_starts_from(tmp_path: Path, kind: Any) -> None:
    Role(tiny_spec(), lora=LoRA(rank=2)).load_model().save_pretrained(tmp_path)
    start = Role(tiny_spec(), lora=LoRA(adapter=str(tmp_path)))
    is_online = issubclass(kind, GRPO)
    module = kind(start, **({"reward": len, "reference": AdaptiveKL(0.1)} if is_online else {}))
    module.configure_model()
    assert tuning_of(module.reference).keeps_base
    assert not any(value.requires_grad for value in module.reference.parameters())
    calls = module.model_calls() if is_online else ()
    assert {(call.role, call.base_only) for call in calls if "reference" in call.name} <= {("reference", False)}


def test_an_entropy_bonus_cannot_begin_where_entropies_have_no_gradient() -> None:
    module = make_module()
    module.entropy_coef = 0.1
    with pytest.raises(ValueError, match="Set entropy_coef in the constructor"):
        minibatch_gradient(module, random_experience())


def test_the_kl_term_adds_its_estimate_to_the_loss() -> None:
    plain = make_module()
    penalized = make_module("GRPO", reference=ReferenceKL(0.5, tiny_spec(seed=1), "k2"))
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
    module = make_module(overlong_penalty=OverlongPenalty(4), advantage_std=None, sampling=sampling)
    experience = random_experience(num_groups=1, group_size=3)
    width = torch.arange(experience.token_ids.shape[1])
    experience = replace(
        experience, loss_mask=(width >= 1) & (width <= torch.tensor([4, 6, 8])[:, None]), rewards=torch.ones(3)
    )
    torch.testing.assert_close(module.advantages(experience), torch.tensor([0.5, 0.0, -0.5]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": ReferenceKL(0.1)}, "reference needs a model: the policy has no LoRA adapters"),
        ({"reference": ReferenceKL(0.1, tiny_spec(), "k1")}, "must be k2 or k3 if the KL is in the loss, got 'k1'"),
        ({"clip_low": -0.1}, "clip_low must be >= 0, got -0.1"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"ratio_level": "seq"}, "ratio_level must be token or sequence, got 'seq'"),
        ({"advantage_std": "all"}, "^advantage_std must be group, batch or None, got 'all'"),
        (
            {"overlong_penalty": OverlongPenalty(100), "sampling": Sampling(max_new_tokens=8)},
            "^buffer_tokens=100 in the overlong penalty must be at most the length limit of 8 tokens",
        ),
        ({"leave_one_out": True, "advantage_mean": None, "advantage_std": "batch"}, "^leave_one_out needs a mean"),
        ({"group_size": 1}, "group_size must be at least 2 for group statistics, got 1"),
        ({"group_size": 1, "advantage_mean": None}, "group_size must be at least 2"),
        ({"loss_reduction": "mean"}, "loss_reduction must be token, sequence or fixed, got 'mean'"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO(tiny_spec(), reward=len, **settings)


def test_groups_of_one_are_allowed_where_nothing_is_compared_within_a_group() -> None:
    assert GRPO(tiny_spec(), reward=len, group_size=1, advantage_mean="batch", advantage_std=None).group_size == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": 0.0}, "reference.coef must be above 0, got 0.0. To train without KL, omit reference"),
        ({"coef": 0.1, "estimator": "k4"}, "estimator must be k1, k2, k3 or None, got 'k4'"),
    ],
    ids=str,
)
def test_a_kl_term_checks_its_own_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReferenceKL(**settings)


def test_grpo_has_at_most_13_settings_of_its_own() -> None:
    assert len(inspect.signature(GRPO).parameters.keys() - {"policy", "kwargs"}) <= 13
