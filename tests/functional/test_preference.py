"""Losses of pairs, worked by hand."""

import math

import pytest
import torch

from lightrl.functional import bradley_terry_loss, preference_loss, preference_margin


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
