"""Divergences over the teacher's top-k tokens: by hand, against loops, and what makes them divergences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.functional import rest_mass, topk_divergence

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
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    expected = topk_divergence(policy[:1, :1], teacher[:1, :1], kind)[0]
    torch.testing.assert_close(value[0], expected)
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
