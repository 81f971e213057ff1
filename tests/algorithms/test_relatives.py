import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import assert_same, make_module, minibatch_gradient, sequence_loss_by_hand
from tiny import gradients, random_experience, random_trajectories, slow_outputs, tiny_spec

from lightrl.algorithms import (
    CISPO,
    DAPO,
    DPPO,
    GDPO,
    GRPO,
    GSPO,
    M2PO,
    OAPL,
    RLOO,
    SAPO,
    TOPR,
    DrGRPO,
    LitePPO,
    ReferenceKL,
    ReinforceBaseline,
    ReinforcePlusPlus,
)
from lightrl.experience import Experience
from lightrl.functional import ImportanceWeights
from lightrl.rewards import OverlongPenalty


def experience_with(rewards: list[float], group_ids: list[int]) -> Experience:
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
        (SAPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        (TOPR, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        (DPPO, [1.5, -0.5, -0.5, -0.5, 0.0, 0.0]),
        # With β = 1/4: V = log((e⁴ + 3)/4)/4 = 0.666796, and 1 where all are right.
        (OAPL, [0.333204, -0.666796, -0.666796, -0.666796, 0.0, 0.0]),
        # The deviation of all six, sqrt(6 · 1/4 / 5) = 0.547723.
        (LitePPO, [1.369306, -0.456435, -0.456435, -0.456435, 0.0, 0.0]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_advantages_are_those_of_the_paper(algorithm: type[GRPO], expected: list[float]) -> None:
    module = algorithm(tiny_spec(), reward=len)
    actual = module.advantages(experience_with([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [5, 5, 5, 5, 2, 2]))
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (DrGRPO, {"loss_reduction": "fixed", "advantage_std": None}),
        (DAPO, {"loss_reduction": "token", "clip_low": 0.2, "clip_high": 0.28}),
        (RLOO, {"loss_reduction": "fixed", "leave_one_out": True}),
        (ReinforceBaseline, {"group_size": 1, "advantage_mean": "batch"}),
        (GSPO, {"loss_reduction": "sequence", "ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}),
        (CISPO, {"clip_low": 1.0}),
        (LitePPO, {"advantage_mean": "group", "advantage_std": "batch", "loss_reduction": "token"}),
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
    expected = gradients(module)
    actual, _ = minibatch_gradient(module, minibatch)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_cispo_weighs_the_policy_gradient_by_the_clipped_ratio() -> None:
    module, minibatch = make_module("CISPO", clip_high=0.5), random_experience()
    logprobs, _ = slow_outputs(module.policy, minibatch, temperature=0.9)
    weights = (logprobs.detach() - minibatch.behavior_logprobs).exp().clamp(0.0, 1.5)
    (-(weights * minibatch.advantages * logprobs)[minibatch.loss_mask].mean()).backward()
    expected = gradients(module)
    actual, _ = minibatch_gradient(module, minibatch)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["GRPO", "dual clip", "CISPO", "SAPO", "TOPR", "OAPL", "IcePop"])
@pytest.mark.parametrize("microbatch_tokens", [10**6, 20])
def test_the_effective_sample_size_is_of_the_weights_that_the_loss_applies(algorithm, microbatch_tokens):
    settings = {"dual_clip": 1.1} if algorithm == "dual clip" else {}
    module, minibatch = make_module("GRPO" if settings else algorithm, **settings), random_experience()
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    weights = []
    for row, column in minibatch.loss_mask.nonzero().tolist():
        policy, behavior = float(logprobs[row, column]), float(minibatch.behavior_logprobs[row, column])
        center = float(minibatch.proximal_logprobs[row, column]) if algorithm == "IcePop" else behavior
        advantage, ratio = float(minibatch.advantages[row, column]), math.exp(policy - center)
        is_clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
        importance = math.exp(center - behavior)
        gate = 1 / (1 + math.exp(-(1.0 if advantage > 0 else 1.05) * (ratio - 1)))
        weight_of = {
            "GRPO": 0.0 if is_clipped else ratio,
            "dual clip": 0.0 if is_clipped or (advantage < 0 and ratio > 1.1) else ratio,
            "SAPO": ratio * 4 * gate * (1 - gate),
            "CISPO": min(ratio, 5.0),
            "TOPR": 1.0 if advantage > 0 else min(ratio, 1.0),
            "OAPL": 1.0,
            "IcePop": ratio * importance if not is_clipped and 0.8 <= importance <= 1.25 else 0.0,
        }
        weights.append(weight_of[algorithm])
    learning = [weight for weight in weights if weight]
    expected = sum(learning) ** 2 / (len(learning) * sum(weight**2 for weight in learning))
    assert 0 < expected < 0.99 or algorithm == "OAPL"
    assert algorithm in ("TOPR", "CISPO", "SAPO", "OAPL") or len(learning) < len(weights)
    _, metrics = minibatch_gradient(module, minibatch, microbatch_tokens=microbatch_tokens)
    assert metrics["ess_fraction"] == pytest.approx(expected, rel=1e-4)


def test_on_policy_all_of_one_reduction_have_the_same_gradient() -> None:
    """With ratio 1 nothing is clipped or weighted, and what is left is the policy gradient."""
    minibatch = random_experience()
    first = make_module("GRPO", loss_reduction="token")
    logprobs, _ = slow_outputs(first.policy, minibatch, temperature=0.9)
    fields = dict.fromkeys(("behavior_logprobs", "proximal_logprobs"), logprobs.detach())
    minibatch = replace(minibatch, **fields)
    expected, _ = minibatch_gradient(first, minibatch)
    relatives = ["DrGRPO", "DAPO", "RLOO", "ReinforceBaseline", "CISPO", "SAPO", "M2PO", "OAPL", "TOPR", "DPPO"]
    for algorithm in ["GRPO decoupled", *relatives]:
        actual, _ = minibatch_gradient(make_module(algorithm, loss_reduction="token"), minibatch)
        assert_same((actual, {}), (expected, {}))


def two_trajectories(rewards: tuple[float, float]) -> Experience:
    """Of two and of one loss token, each after a prompt of one."""
    loss_mask = torch.tensor([[False, True, True], [False, True, False]])
    zeros = torch.zeros(2, 3)
    return Experience(
        token_ids=zeros.long(),
        loss_mask=loss_mask,
        behavior_logprobs=zeros,
        weight_versions=torch.where(loss_mask, 0, -1),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([0, 1]),
        is_truncated=torch.zeros(2, dtype=torch.bool),
        lengths=torch.tensor([3, 2]),
        reference_logprobs=torch.tensor([[0.0, -0.2, 0.4], [0.0, -0.1, 0.0]]),
    )


def test_reinforce_plus_plus_normalizes_returns_over_all_tokens_of_the_batch() -> None:
    """k1 is 0.2, -0.4 and 0.1; at 0.5 the returns are 1 - 0.5·(0.2 - 0.4) = 1.1, 1 + 0.2 = 1.2 and 0 - 0.05."""
    module = ReinforcePlusPlus(tiny_spec(), reward=len, reference=ReferenceKL(0.5, tiny_spec()))
    actual = module.advantages(two_trajectories((1.0, 0.0)))
    returns = torch.tensor([1.1, 1.2, -0.05])
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(actual[[0, 0, 1], [1, 2, 1]], expected, rtol=1e-4, atol=1e-5)
    assert actual[0, 0] == actual[1, 0] == actual[1, 2] == 0


def test_the_baseline_of_reinforce_plus_plus_is_taken_off_first() -> None:
    module = ReinforcePlusPlus(tiny_spec(), reward=len, advantage_mean="group", group_size=2)
    experience = experience_with([1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1])
    actual = module.advantages(experience)
    assert (actual[:2].sum(1).sign() == torch.tensor([1, -1])).all()
    centered = torch.tensor([0.5, -0.5, 0.0, 0.0])[:, None].expand(experience.loss_mask.shape)[experience.loss_mask]
    expected = (centered - centered.mean()) / centered.std()
    torch.testing.assert_close(actual[experience.loss_mask], expected, rtol=1e-4, atol=1e-4)


def test_m2po_leaves_out_outliers_and_clips_nothing() -> None:
    module = make_module("M2PO", group_size=3)
    experience = random_experience()
    advantages = module.advantages(experience)
    log_ratios = (experience.proximal_logprobs - experience.behavior_logprobs)[experience.loss_mask]
    group = GRPO(tiny_spec(), reward=len).advantages(experience)[:, None].expand(advantages.shape)
    is_left_out = (advantages == 0) & (group != 0) & experience.loss_mask
    kept = experience.loss_mask & ~is_left_out
    assert 0 < int(is_left_out.sum()) < len(log_ratios)
    torch.testing.assert_close(advantages[kept], group[kept])
    squares = (experience.proximal_logprobs - experience.behavior_logprobs).square()
    assert squares[is_left_out].min() > squares[kept & (group != 0)].max()
    weights = module.gradient_weights(experience.loss_mask.float(), replace(experience, advantages=advantages), None)
    assert torch.equal(weights[experience.loss_mask] == 0, (advantages == 0)[experience.loss_mask])  # for ess_fraction
    assert minibatch_gradient(module, experience)[1]["clipped_fraction"] == 0


def test_m2po_has_its_proximal_logprobs_even_for_a_single_update() -> None:
    module = M2PO(tiny_spec(), reward=len, num_minibatches=1)
    assert [call.name for call in module.model_calls()] == ["proximal_logprobs"]
    decoupled = M2PO(tiny_spec(), reward=len, num_minibatches=2, decoupled=True)
    assert [call.name for call in decoupled.model_calls()] == ["proximal_logprobs"]


def test_sapo_has_the_papers_loss_token_by_token() -> None:
    def gated(ratio: float, advantage: float) -> float:
        heat = 1.0 if advantage > 0 else 1.05
        return -4 / heat / (1 + math.exp(-heat * (ratio - 1))) * advantage

    module, minibatch = make_module("SAPO"), random_experience()
    expected = sequence_loss_by_hand(module, minibatch, gated)
    assert minibatch_gradient(module, minibatch)[1]["loss"] == pytest.approx(expected, rel=1e-4)


def gdpo(reward_weights: dict[str, float], **settings: Any) -> GDPO:
    return GDPO(tiny_spec(), reward=len, reward_weights=reward_weights, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SAPO(tiny_spec(), reward=len, temperature_negative=0.0),
            r"must be above 0 \(1 and 1.05 in the paper\), got 1.0 and 0.0",
        ),
        (lambda: M2PO(tiny_spec(), reward=len, second_moment_threshold=0.0), "second_moment_threshold must be above 0"),
        (
            lambda: M2PO(tiny_spec(), reward=len, decoupled=ImportanceWeights(approximate_proximal=True)),
            "M2PO's mask needs exact proximal logprobs",
        ),
        (lambda: OAPL(tiny_spec(), reward=len, beta=0.0), "beta must be above 0"),
        (lambda: OAPL(tiny_spec(), reward=len, group_size=1), "group_size must be at least 2"),
        (lambda: DPPO(tiny_spec(), reward=len, max_nats=0.0), "max_nats must be above 0"),
        (lambda: gdpo({}), "at least one reward a finite weight"),
        (lambda: gdpo({"a": math.nan}), "at least one reward a finite weight"),
        (lambda: gdpo({"a": 1.0}, overlong_penalty=OverlongPenalty(4)), "no effect with GDPO"),
    ],
    ids=["a flat gate", "no threshold", "a guess under M2PO's mask", "no β", "a group of one", "no distance",
         "no rewards", "a weight of NaN", "a penalty that cannot count"],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(make: Callable[[], GRPO], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        *[(DrGRPO, {"advantage_std": "group"}), (GSPO, {"ratio_level": "token"}), (CISPO, {"dual_clip": 3.0})],
        *[(SAPO, {"clip_high": 0.2}), (OAPL, {"decoupled": True}), (OAPL, {"advantage_mean": "batch"})],
        *[(DPPO, {"clip_low": 0.2}), (ReinforcePlusPlus, {"advantage_std": None})],
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else next(iter(value)),
)
def test_settings_that_an_algorithm_does_not_read_are_none_of_its_settings(algorithm, setting):
    with pytest.raises(TypeError, match=f"multiple values for keyword argument '{next(iter(setting))}'"):
        algorithm(tiny_spec(), reward=len, **setting)


def test_a_guessed_proximal_policy_needs_no_forward_and_lies_between_behavior_and_policy() -> None:
    module = make_module("GRPO with a guessed proximal policy")
    assert module.model_calls() == []
    minibatch = random_experience()
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    minibatch = replace(minibatch, weight_versions=torch.where(minibatch.loss_mask, -3, -1))  # the module is at 0
    behavior = minibatch.behavior_logprobs
    given = replace(minibatch, proximal_logprobs=behavior + 0.75 * (logprobs - behavior))
    actual = minibatch_gradient(module, replace(minibatch, proximal_logprobs=None))
    assert_same(actual, minibatch_gradient(make_module("GRPO", decoupled=True), given))


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({"cap": 1.1, "mode": "clamp"}, lambda w: w.clamp(max=1.1)),
        ({"cap": 1.1}, lambda w: w * (w <= 1.1)),
        ({"floor": 0.9, "cap": 1.1}, lambda w: w * ((w <= 1.1) & (w >= 0.9))),
    ],
    ids=["TIS", "MIS", "IcePop"],
)
def test_importance_sampling_weighs_each_token_and_is_measured(settings, weight):
    module, minibatch = make_module("GRPO", decoupled=ImportanceWeights(**settings)), random_experience()
    metrics = minibatch_gradient(module, minibatch)[1]
    log_weights = (minibatch.proximal_logprobs - minibatch.behavior_logprobs)[minibatch.loss_mask]
    expected = weight(log_weights.exp())
    assert metrics["importance_weights"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert metrics["importance_dropped_fraction"] == pytest.approx(float((expected == 0).float().mean()))
    assert metrics["kl_proximal_k1_nats"] == pytest.approx(float(-log_weights.mean()), rel=1e-4)
    assert metrics["kl_proximal_k2_nats"] == pytest.approx(float(log_weights.square().mean() / 2), rel=1e-4)
    assert metrics["kl_proximal_k3_nats"] == pytest.approx(float((log_weights.expm1() - log_weights).mean()), rel=1e-3)


def test_several_rewards_are_normalized_by_themselves_before_they_are_added() -> None:
    right, short, ids = [1.0, 0.0, 0.0, 1.0, 1.0], [30.0, 10.0, 20.0, 5.0, 7.0], [5, 5, 5, 2, 2]

    def normalized(values: list[float]) -> list[float]:
        deviation = statistics.stdev(values)
        return [(value - statistics.mean(values)) / (deviation + 1e-5) if deviation else 0.0 for value in values]

    sums = [
        1.0 * one + 0.5 * other
        for group in (slice(0, 3), slice(3, 5))
        for one, other in zip(normalized(right[group]), normalized(short[group]), strict=True)
    ]
    module = gdpo({"right": 1.0, "short": 0.5})
    experience = experience_with([9.0] * 5, ids)
    rows = random_trajectories(num_groups=5, group_size=1)
    for row, one, other in zip(rows, right, short, strict=True):
        row.metrics = {"right": one, "short": other, "unused": 4.0}
    (call,) = (call for call in module.model_calls() if call.name == "reward_parts")
    assert call.inputs == ("rewards",)  # it runs once they are known
    parts = call.run(experience, rows)
    assert module.advantages(experience.with_tensors(parts)).tolist() == pytest.approx(normalized(sums), abs=1e-6)
    del rows[3].metrics["short"]
    with pytest.raises(ValueError, match=r"has no 'short', which reward_weights names; it has \['right', 'unused'\]"):
        call.run(experience, rows)
