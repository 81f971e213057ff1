"""KL estimators worked by hand, in expectation, and at the edges."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightrl.functional import kl


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
