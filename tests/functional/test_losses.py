"""Policy losses and weights worked by hand, against loops over tokens, and at the edges."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.functional import (
    ImportanceWeights,
    bradley_terry_loss,
    cispo_loss,
    clipped_policy_loss,
    clipped_ratio_loss,
    is_clipped,
    kl,
    leaves_trust_region,
    policy_ratio,
    preference_loss,
    preference_margin,
    reduce_loss,
    regression_loss,
    rest_mass,
    sapo_loss,
    sequence_ratio,
    tapered_weights,
    topk_divergence,
)


def of_ratio(*ratios: float) -> tuple[Tensor, Tensor]:
    """logprobs with gradient and proximal logprobs [1, T] whose ratios these are."""
    proximal = torch.full((1, len(ratios)), -1.0)
    return (proximal + torch.tensor([ratios]).log()).requires_grad_(), proximal


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient"),
    [
        *[(1.0, 2.0, -2.0, -2.0), (1.1, 2.0, -2.2, -2.2), (1.5, 2.0, -2.4, 0.0), (0.5, 2.0, -1.0, -1.0)],
        *[(1.5, -2.0, 3.0, 3.0), (0.5, -2.0, 1.6, 0.0), (0.9, -2.0, 1.8, 1.8), (5.0, 0.0, 0.0, 0.0)],
    ],
    ids=["on policy", "inside, good", "above, good: clipped", "below, good: back", "above, bad: back",
         "below, bad: clipped", "inside, bad", "no advantage"],
)  # fmt: skip
def test_the_clipped_loss_worked_by_hand(ratio, advantage, expected_loss, expected_gradient):
    logprobs, proximal = of_ratio(ratio)
    loss = clipped_policy_loss(logprobs, proximal, torch.tensor([[advantage]]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected_loss)
    assert logprobs.grad.item() == pytest.approx(expected_gradient)


def test_the_clipped_loss_equals_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    logprobs, proximal, advantages = torch.randn(4, 9) - 2, torch.randn(4, 9) - 2, torch.randn(4, 9)
    loss = clipped_policy_loss(logprobs, proximal, advantages, 0.1, 0.3, 2.5)
    for b in range(4):
        for t in range(9):
            ratio = math.exp(logprobs[b, t].item() - proximal[b, t].item())
            a = advantages[b, t].item()
            surrogate = min(ratio * a, max(0.9, min(1.3, ratio)) * a)
            if a < 0:
                surrogate = max(surrogate, 2.5 * a)
            assert loss[b, t].item() == pytest.approx(-surrogate, rel=1e-5)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    logprobs, proximal = of_ratio(10.0, 2.0, 10.0)
    advantages = torch.tensor([[-2.0, -2.0, 2.0]])
    loss = clipped_policy_loss(logprobs, proximal, advantages, dual_clip=3.0)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([[6.0, 4.0, -2.4]]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 4.0, 0.0]]))


def test_the_proximal_policy_gets_no_gradient() -> None:
    logprobs, proximal = (torch.zeros(1, 2, requires_grad=True) for _ in range(2))
    clipped_policy_loss(logprobs, proximal, torch.ones(1, 2)).sum().backward()
    assert proximal.grad is None


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_extreme_logprobs_keep_loss_and_gradient_finite(dual_clip: float | None) -> None:
    logprobs = torch.tensor([[0.0, -1e30, -200.0, 0.0]], requires_grad=True)
    proximal = torch.tensor([[-1e30, 0.0, 0.0, -200.0]])
    for advantage in (1.0, -1.0):
        advantages = torch.full((1, 4), advantage)
        loss = clipped_policy_loss(logprobs, proximal, advantages, dual_clip=dual_clip)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_is_clipped_says_where_the_gradient_is_taken_away() -> None:
    ratios = (0.5, 0.5, 1.0, 1.5, 1.5, 1.5)
    advantages = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, 0.0]])
    logprobs, proximal = of_ratio(*ratios)
    clipped_policy_loss(logprobs, proximal, advantages).sum().backward()
    clipped = is_clipped(policy_ratio(logprobs, proximal), advantages)
    assert clipped.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert logprobs.grad.eq(0).tolist() == [[False, True, False, True, False, True]]
    assert not clipped.requires_grad


def test_the_sequence_ratio_is_the_geometric_mean_over_loss_tokens() -> None:
    logprobs, proximal = of_ratio(9.0, 2.0, 8.0, 100.0)
    mask = torch.tensor([[False, True, True, False]])
    torch.testing.assert_close(sequence_ratio(logprobs, proximal, mask), torch.full((1, 4), 4.0))


def test_gspo_per_token_has_the_loss_and_gradient_of_gspo_per_sequence() -> None:
    torch.manual_seed(0)
    logprobs = (torch.randn(3, 6, dtype=torch.float64) / 4).requires_grad_()
    proximal, advantages = torch.randn(3, 6, dtype=torch.float64) / 4, torch.tensor([1.0, -2.0, 0.5]).double()
    mask = torch.rand(3, 6) < 0.6
    ratio = sequence_ratio(logprobs, proximal, mask)
    losses = clipped_ratio_loss(ratio, advantages[:, None].expand(3, 6), clip_low=0.05, clip_high=0.1)
    loss = reduce_loss(losses, mask, mode="sequence", num_tokens=int(mask.sum()), num_sequences=3)
    # Equations 5 and 7 of the paper, one number per sequence.
    log_ratio = (torch.where(mask, logprobs - proximal, 0.0).sum(1) / mask.sum(1)).exp()
    plain = -torch.minimum(log_ratio * advantages, log_ratio.clamp(0.95, 1.1) * advantages).mean()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs), torch.autograd.grad(plain, logprobs))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_masked_has_no_effect_on_the_sequence_ratio(poison: float) -> None:
    mask = torch.tensor([[False, True, True], [False, False, False]])
    values = torch.tensor([[poison, -1.0, -2.0], [poison, poison, poison]], requires_grad=True)
    ratio = sequence_ratio(values, torch.tensor([[poison, -1.5, -1.5], [poison] * 3]), mask)
    ratio.sum().backward()
    assert ratio.eq(1).all()
    assert values.grad.tolist() == [[0, 1, 1], [0, 0, 0]]


def test_the_cispo_loss_worked_by_hand() -> None:
    logprobs, proximal = of_ratio(1.5, 10.0, 0.1)
    values = logprobs.detach().clone()
    loss = cispo_loss(logprobs, proximal, torch.tensor([[2.0, 1.0, -1.0]]), clip_high=4.0)
    loss.sum().backward()
    weights = torch.tensor([[1.5, 5.0, 0.1]])
    factors = torch.tensor([[2.0, 1.0, -1.0]])
    torch.testing.assert_close(loss, -weights * factors * values)
    torch.testing.assert_close(logprobs.grad, -weights * factors)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient"),
    [
        # 4/τ·sigmoid(τ(r-1)): at r = 1 it is 2/τ, and its slope 1; at r = 2, τ = 1 it is 4·0.731059 with slope
        # 4·0.731059·0.268941 = 0.786448, times r for the gradient by the logprob.
        (1.0, 2.0, -4.0, -2.0),
        (2.0, 1.0, -2.924234, -2 * 0.786448),
        (1.0, -1.0, 2 / 1.05, 1.0),
        (2.0, -1.0, 4 / 1.05 * 0.740775, 2 * 4 * 0.740775 * 0.259225),
    ],
    ids=["on policy", "off policy, good", "on policy, bad", "off policy, bad"],
)
def test_the_sapo_loss_worked_by_hand(ratio, advantage, expected_loss, expected_gradient):
    logprobs, proximal = of_ratio(ratio)
    loss = sapo_loss(policy_ratio(logprobs, proximal), torch.tensor([[advantage]]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(expected_gradient, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *[({}, [0.5, 2.0, 8.0]), ({"cap": 4.0}, [0.5, 2.0, 0.0]), ({"cap": 4.0, "mode": "clamp"}, [0.5, 2.0, 4.0])],
        *[({"cap": 8.001, "mode": "mask"}, [0.5, 2.0, 8.0]), ({"level": "sequence"}, [2.0, 2.0, 2.0])],
        ({"level": "sequence", "cap": 1.5}, [0.0, 0.0, 0.0]),
        ({"level": "sequence", "cap": 1.5, "mode": "clamp"}, [1.5, 1.5, 1.5]),
        ({"level": "product", "cap": 9.0}, [8.0, 8.0, 8.0]),
        ({"level": "product", "cap": 5.0, "mode": "clamp"}, [5.0, 5.0, 5.0]),
        ({"floor": 0.6, "cap": 5.0}, [0.0, 2.0, 0.0]),
        ({"floor": 0.6, "mode": "clamp"}, [0.6, 2.0, 8.0]),
        # log r = -log 2, log 2, 3·log 2 for the ratios 1/2, 2 and 8; estimators of KL(behavior ‖ proximal), in nats:
        # k1 = -log r:         0.6931, -0.6931, -2.0794; mean -0.6931, sum -2.0794, max 0.6931
        # k2 = (log r)²/2:     0.2402,  0.2402,  2.1620; mean  0.8808, sum  2.6425, max 2.1620
        # k3 = r - 1 - log r:  0.1931,  0.3069,  4.9206; mean  1.8069, sum  5.4206, max 4.9206
        ({"metric": "k1", "floor": -0.694, "cap": 0.694}, [0.5, 2.0, 0.0]),
        ({"metric": "k2", "cap": 0.241}, [0.5, 2.0, 0.0]),
        ({"metric": "k3", "cap": 0.3}, [0.5, 0.0, 0.0]),
        ({"metric": "k1", "floor": -0.694, "level": "sequence"}, [2.0, 2.0, 2.0]),
        ({"metric": "k1", "floor": -0.693, "level": "sequence"}, [0.0, 0.0, 0.0]),
        ({"metric": "k1", "cap": 0.694, "aggregation": "max"}, [0.5, 2.0, 8.0]),
        ({"metric": "k1", "cap": 0.693, "aggregation": "max"}, [0.0, 0.0, 0.0]),
        ({"metric": "k2", "cap": 2.643, "level": "sequence", "aggregation": "sum"}, [2.0, 2.0, 2.0]),
        ({"metric": "k2", "cap": 2.642, "level": "sequence", "aggregation": "sum"}, [0.0, 0.0, 0.0]),
        ({"metric": "k3", "cap": 1.807, "aggregation": "mean"}, [0.5, 2.0, 8.0]),
        ({"metric": "k3", "cap": 1.806, "aggregation": "mean"}, [0.0, 0.0, 0.0]),
        ({"cap": 2.001, "aggregation": "mean"}, [0.5, 2.0, 8.0]),
        ({"cap": 1.999, "aggregation": "mean"}, [0.0, 0.0, 0.0]),
    ],
    ids=str,
)
def test_importance_weights_worked_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    # The prompt token's ratio of 1000 takes no part; the geometric mean of 1/2, 2 and 8 is 2.
    proximal, behavior = of_ratio(1000.0, 0.5, 2.0, 8.0)
    mask = torch.tensor([[False, True, True, True]])
    weights = ImportanceWeights(**settings)(proximal, behavior, mask)
    torch.testing.assert_close(weights, torch.tensor([[1.0, *expected]]))
    assert not weights.requires_grad


@pytest.mark.parametrize("metric", ["ratio", "k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", [None, "mean", "sum", "max"])
def test_a_trajectory_is_bounded_without_its_masked_tokens_and_without_the_others(metric, aggregation):
    proximal, behavior = of_ratio(0.5, 2.0, 8.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    settings: dict[str, object] = {"metric": metric, "aggregation": aggregation, "cap": 2.1}
    alone = ImportanceWeights(**settings)(proximal, behavior, mask)
    others = torch.tensor([[-9.0, -9.0, -9.0]])
    pad = functools.partial(torch.nn.functional.pad, pad=(1, 1))
    padded = [pad(torch.cat([part, others]), value=math.nan) for part in (proximal, behavior)]
    padded_mask = pad(torch.cat([mask, ~mask]))
    actual = ImportanceWeights(**settings)(*padded, padded_mask)
    torch.testing.assert_close(actual[0, 1:4], alone[0])
    assert actual[~padded_mask].eq(1).all()


def test_importance_weights_of_extreme_logprobs_are_finite() -> None:
    proximal, behavior = torch.tensor([[0.0, -1e30, 0.0]]), torch.tensor([[-1e30, 0.0, -math.inf]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert ImportanceWeights()(proximal, behavior, mask).isfinite().all()
    assert ImportanceWeights(cap=2.0)(proximal, behavior, mask)[0, 0] == 0


def test_other_shapes_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\) but ratio has shape \(2, 3\).*expand"):
        clipped_policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="proximal_logprobs has shape"):
        sequence_ratio(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("setting", ["clip_low", "clip_high"])
def test_clip_settings_out_of_range_are_refused(setting: str) -> None:
    zeros = [torch.zeros(1, 1)] * 3
    with pytest.raises(ValueError, match=f"{setting} must be >= 0, got -0.1"):
        clipped_policy_loss(*zeros, **{setting: -0.1})
    with pytest.raises(ValueError, match=r"dual_clip must be above 1 .* got 1.0"):
        clipped_policy_loss(*zeros, dual_clip=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cap": 0.0}, "cap for importance weights must be above 0 .* got 0.0"),
        ({"mode": "drop"}, "mode must be mask or clamp, got 'drop'"),
        ({"level": "group"}, "level must be token, sequence or product, got 'group'"),
        ({"floor": 3.0, "cap": 2.0}, "floor for importance weights must be from 0 to cap=2.0 .* got 3.0"),
        ({"metric": "k4"}, "metric must be ratio, k1, k2 or k3, got 'k4'"),
        ({"aggregation": "median"}, "aggregation must be mean, sum, max or None, got 'median'"),
        ({"metric": "k2", "cap": -1.0}, r"cap for importance weights must be above 0 .* got -1\.0"),
        (
            {"metric": "k1", "cap": -1.0, "floor": 0.0},
            r"floor for importance weights must be from -inf to cap=-1\.0 .* got 0\.0",
        ),
        ({"metric": "k2", "cap": 1.0, "mode": "clamp"}, "metric='k2' .* need cap or floor, and mode='mask'"),
        ({"metric": "k2"}, "metric='k2' .* need cap or floor"),
        (
            {"aggregation": "max", "cap": 2.0, "mode": "clamp"},
            "aggregation='max' .* need cap or floor, and mode='mask'",
        ),
    ],
    ids=str,
)
def test_weight_settings_without_a_meaning_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImportanceWeights(**settings)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_gradient"),
    [(1.0, 2.0, -2.0), (5.0, 2.0, -2.0), (0.1, 2.0, -2.0), (1.0, -2.0, 2.0), (5.0, -2.0, 2.0), (0.1, -2.0, 0.2)],
    ids=["on policy", "above", "below", "on policy, bad", "above, bad: bounded", "below, bad: faded"],
)
def test_tapered_weights_worked_by_hand(ratio: float, advantage: float, expected_gradient: float) -> None:
    logprobs, behavior = of_ratio(ratio)
    advantages = torch.tensor([[advantage]])
    weights = tapered_weights(logprobs, behavior, advantages)
    assert not weights.requires_grad
    assert -(weights * advantages).item() == pytest.approx(expected_gradient)


def test_the_regression_has_the_gradient_of_half_a_squared_residual() -> None:
    """β = 1/2; log-ratios 0.5 and 0.3 sum to 0.8: β (0.8 - 1/β) = -0.6 for each token, whatever masked ones are."""
    behavior = torch.tensor([[9.0, -1.0, -2.0], [0.0, -1.0, 0.0]])
    logprobs = torch.tensor([[math.nan, -0.5, -1.7], [0.0, -1.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    advantages = torch.tensor([[1.0] * 3, [-3.0] * 3])
    loss = regression_loss(logprobs, behavior, advantages, mask, beta=0.5)
    (gradient,) = torch.autograd.grad(loss[mask].sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.6, -0.6], [0.0, 3.0, 0.0]]))

    square = 0.5 * (torch.where(mask, logprobs - behavior, 0.0).sum(1) - advantages[:, 0] / 0.5).square() * 0.5
    (expected,) = torch.autograd.grad(square.sum(), logprobs)
    torch.testing.assert_close(gradient, expected.nan_to_num())


def test_the_trust_region_worked_by_hand() -> None:
    """From 0.3 to 0.6 the divergence is 0.18 nats, from 0.9 to 0.99 it is 0.14, from 0.001 to 0.0001 it is 0.0014.

    A ratio's clip would stop the third, whose probability hardly matters, and let the second pass.
    """
    behavior = torch.tensor([[0.3, 0.9, 0.001, 0.5]]).log()
    policy = torch.tensor([[0.6, 0.99, 0.0001, 0.5]]).log()
    signs = {1.0: [True, True, False, False], -1.0: [False] * 4}
    for advantage, expected in signs.items():
        advantages = torch.full((1, 4), advantage)
        assert leaves_trust_region(policy, behavior, advantages, max_nats=0.05).tolist() == [expected]
        assert not leaves_trust_region(behavior, behavior, advantages, max_nats=1e-9).any()
    worse = leaves_trust_region(behavior, policy, torch.full((1, 4), -1.0), max_nats=0.05)
    assert worse.tolist() == [[True, True, False, False]]
    assert leaves_trust_region(policy, behavior, torch.ones(1, 4), max_nats=0.18).tolist() == [[True] + [False] * 3]


def test_the_trust_region_has_no_nan_where_a_token_is_certain() -> None:
    certain, rare = torch.tensor([[0.0, 1e-7, -40.0]]), torch.tensor([[-40.0, -2.0, 0.0]])
    for sign in (1.0, -1.0):
        left = leaves_trust_region(certain, rare, torch.full((1, 3), sign), max_nats=0.05)
        assert left.tolist() == [[sign > 0, sign > 0, sign < 0]]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))]
)
def test_a_token_twice_as_likely_worked_by_hand(estimator: str, expected: float) -> None:
    # d = log(0.5) - log(0.25) = log 2
    value = kl(torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]]), estimator)
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_over_the_policys_tokens_is_the_divergence(estimator: str) -> None:
    policy, reference = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    divergence = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl(policy.log(), reference.log(), estimator)).sum(), divergence)


POLICY_LOGITS = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64, requires_grad=True)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda logprobs: 0 * logprobs.sum()),
        ("k2", lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum()),
        ("k3", lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum()),
    ],
    ids=["k1: none", "k2: KL(policy, reference)", "k3: KL(reference, policy)"],
)
def test_what_an_estimator_minimizes_as_a_loss(estimator: str, divergence: Callable[[Tensor], Tensor]) -> None:
    """The gradient in expectation over the policy's tokens, which are constants to the loss."""
    logprobs = torch.log_softmax(POLICY_LOGITS, dim=0)
    estimate = (logprobs.exp().detach() * kl(logprobs, REFERENCE, estimator)).sum()
    (actual,) = torch.autograd.grad(estimate, POLICY_LOGITS, retain_graph=True)
    (expected,) = torch.autograd.grad(divergence(logprobs), POLICY_LOGITS)
    torch.testing.assert_close(actual, expected)


def test_k3_is_never_negative_and_keeps_its_digits_for_close_policies() -> None:
    difference = torch.tensor([[1e-3, -1e-3, 3.0, -3.0]])
    values = kl(difference, torch.zeros_like(difference), "k3")
    exact = [math.expm1(-d) + d for d in difference.double()[0].tolist()]
    assert values.ge(0).all()
    torch.testing.assert_close(values, torch.tensor([exact]), rtol=2e-4, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_differences_stay_finite_with_finite_gradients(estimator: str) -> None:
    logprobs = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    values = kl(logprobs, torch.tensor([[0.0, -1e4]]), estimator)
    values.sum().backward()
    assert values.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_the_reference_gets_no_gradient() -> None:
    logprobs, reference = (torch.zeros(1, 2, requires_grad=True) for _ in range(2))
    kl(logprobs, reference, "k2").sum().backward()
    assert reference.grad is None


def test_unknown_estimators_and_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="estimator must be k1, k2 or k3, got 'k4'"):
        kl(torch.zeros(1, 2), torch.zeros(1, 2), "k4")
    with pytest.raises(ValueError, match=r"reference_logprobs has shape \(2,\) but logprobs has shape \(1, 2\)"):
        kl(torch.zeros(1, 2), torch.zeros(2), "k1")


KINDS = ["reverse_kl", "forward_kl", "jsd"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def distributions(num: int = 40, vocabulary: int = 9, *, spread: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a policy and of a teacher, [num, V] each, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, num, vocabulary, generator=generator, dtype=torch.float64)
    policy, teacher = torch.log_softmax(logits, -1)
    return policy, teacher


def topk(policy: Tensor, teacher: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """What both say of the teacher's top-k tokens."""
    actual = teacher.topk(num, dim=-1)
    return policy.gather(-1, actual.indices), actual.values


def slow_divergence(policy: Tensor, teacher: Tensor, num: int, kind: str, beta: float = 0.5) -> list[float]:
    """Of whole distributions, one position and one outcome at a time; all but the top-k are one outcome."""
    results = []
    for q_row, p_row in zip(policy.exp().tolist(), teacher.exp().tolist(), strict=True):
        order = sorted(range(len(p_row)), key=lambda index, row=p_row: -row[index])
        kept, others = order[:num], order[num:]
        q, p = ([row[index] for index in kept] + [sum(row[index] for index in others)] for row in (q_row, p_row))

        def kl(left: list[float], right: list[float]) -> float:
            return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True) if a > 0)

        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        both = beta * kl(p, m) + (1 - beta) * kl(q, m)
        results.append({"reverse_kl": kl(q, p), "forward_kl": kl(p, q), "jsd": both}[kind])
    return results


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("reverse_kl", 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)),
        ("forward_kl", 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)),
        # M = 1/2 · (3/4, 1/4) + 1/2 · (1/2, 1/2) = (5/8, 3/8)
        (
            "jsd",
            0.5 * (0.75 * math.log(0.75 / 0.625) + 0.25 * math.log(0.25 / 0.375))
            + 0.5 * (0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375)),
        ),
    ],
)
def test_one_token_and_the_rest_worked_by_hand(kind: Any, expected: float) -> None:
    """The teacher's most likely token has 3/4 of its mass and 1/2 of the policy's."""
    value = topk_divergence(torch.tensor([[[math.log(0.5)]]]), torch.tensor([[[math.log(0.75)]]]), kind)
    assert value.shape == (1, 1)
    assert value.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("num", [1, 3, 9])
@every_kind
def test_it_equals_a_loop_over_outcomes(kind: Any, num: int, beta: float) -> None:
    policy, teacher = distributions()
    actual = topk_divergence(*topk(policy, teacher, num), kind, jsd_beta=beta)
    expected = torch.tensor(slow_divergence(policy, teacher, num, kind, beta), dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@every_kind
def test_it_is_zero_where_both_agree_on_the_k_tokens_and_nowhere_else(kind: Any) -> None:
    policy, teacher = distributions()
    own, kept = topk(policy, teacher, 3)
    assert topk_divergence(kept, kept, kind).abs().max() < 1e-12
    assert topk_divergence(own, kept, kind).min() > 1e-6
    halves = torch.tensor([0.5, 0.25, 0.25]).log()
    assert topk_divergence(halves[:2], halves[:2], kind).item() == pytest.approx(0, abs=1e-6)


@every_kind
def test_the_gradient_is_that_of_finite_differences_and_only_the_policys(kind: Any) -> None:
    policy, teacher = topk(*distributions(5), 3)
    policy, teacher = policy.requires_grad_(), teacher.requires_grad_()
    assert torch.autograd.gradcheck(lambda logprobs: topk_divergence(logprobs, teacher.detach(), kind), (policy,))
    topk_divergence(policy, teacher, kind).sum().backward()
    assert teacher.grad is None


@every_kind
def test_tokens_without_any_probability_leave_value_and_gradient_finite(kind: Any) -> None:
    """Stop tokens where they could not be sampled are such; and positions that the loss mask takes out hold 0."""
    lowest = torch.finfo(torch.float32).min
    policy = torch.tensor([[math.log(0.5), lowest], [0.0, 0.0], [-300.0, -0.1]]).requires_grad_()
    teacher = torch.tensor([[math.log(0.75), lowest], [0.0, 0.0], [-0.1, -300.0]])
    value = topk_divergence(policy, teacher, kind)
    value.sum().backward()
    assert value.isfinite().all()
    assert policy.grad.isfinite().all()
    torch.testing.assert_close(value[0], topk_divergence(policy[:1, :1], teacher[:1, :1], kind)[0])
    if kind == "forward_kl":  # the others leave alone what the policy would never say
        assert policy.grad[2, 0] < -0.9


def test_the_rest_is_what_the_k_tokens_leave() -> None:
    assert rest_mass(torch.tensor([0.5, 0.25]).log()).item() == pytest.approx(0.25)
    assert 0 < rest_mass(torch.tensor([0.5, 0.5]).log()).item() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 4)), r"\(2, 4\).*\(2, 3\)"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), "kl"), "divergence must be reverse_kl, forward_kl or jsd, got 'kl'"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), "jsd", 1.0), "jsd_beta must be above 0 and below 1, got 1.0"),
    ],
    ids=["shapes", "a name", "beta"],
)
def test_what_is_no_divergence_is_refused(arguments: Any, match: str) -> None:
    beta = {"jsd_beta": arguments[3]} if len(arguments) > 3 else {}
    with pytest.raises(ValueError, match=match):
        topk_divergence(*arguments[:3], **beta)


def test_the_margin_and_dpo_loss_of_a_pair_worked_by_hand() -> None:
    """Chosen -3 against the reference's -4, rejected -5 against -2: margin 1 - (-3) = 4; at 0.1 the loss is
    -log sigmoid(0.4) = log(1 + e^-0.4) = 0.5130."""
    pair = [torch.tensor([value]) for value in (-3.0, -5.0, -4.0, -2.0)]
    margin = preference_margin(*pair)
    assert margin.item() == 4.0
    assert preference_loss(margin).item() == pytest.approx(math.log(1 + math.exp(-0.4)))


def test_the_gradient_of_dpo_worked_by_hand() -> None:
    """-kl_coef · sigmoid(-kl_coef · margin) for the chosen completion, the opposite for the rejected one."""
    chosen, rejected = torch.tensor([-3.0], requires_grad=True), torch.tensor([-5.0], requires_grad=True)
    margin = preference_margin(chosen, rejected, torch.tensor([-4.0]), torch.tensor([-2.0]))
    preference_loss(margin, kl_coef=0.5).sum().backward()
    expected = -0.5 / (1 + math.exp(2.0))
    assert chosen.grad.item() == pytest.approx(expected)
    assert rejected.grad.item() == pytest.approx(-expected)


def test_ipo_has_its_target_at_one_over_twice_the_coefficient() -> None:
    margins = torch.tensor([5.0, 4.0, 7.0])
    assert preference_loss(margins, kl_coef=0.1, kind="ipo").tolist() == pytest.approx([0.0, 1.0, 4.0])


def test_bradley_terry_worked_by_hand() -> None:
    """Rewards 2 and 0.5: -log sigmoid(1.5); equal rewards: log 2."""
    loss = bradley_terry_loss(torch.tensor([2.0, 1.0]), torch.tensor([0.5, 1.0]))
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-1.5)), math.log(2)])


def test_extreme_margins_stay_finite() -> None:
    margins = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = preference_loss(margins)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.0, 1e3])
    assert margins.grad.tolist() == pytest.approx([0.0, -0.1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0}, "kl_coef must be above 0 .* got 0"),
        ({"kind": "hinge"}, "kind must be sigmoid or ipo, got 'hinge'"),
    ],
    ids=str,
)
def test_preference_settings_without_a_meaning_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preference_loss(torch.zeros(1), **settings)
