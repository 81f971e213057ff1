import pytest
import torch

from lightrl.functional import KLController, ValueNormalizer, explained_variance, value_loss


def test_the_value_loss_by_hand() -> None:
    values, returns = torch.tensor([[1.0, 5.0, -2.0]]), torch.tensor([[3.0, 5.0, 1.0]])
    assert value_loss(values, returns).tolist() == [[2.0, 0.0, 4.5]]
    # Beyond a distance of 1: 1·(d - 1/2).
    assert value_loss(values, returns, huber_delta=1.0).tolist() == [[1.5, 0.0, 2.5]]


def test_a_value_that_moved_beyond_the_clip_gains_nothing_and_has_no_gradient() -> None:
    old = torch.zeros(1, 3)
    # From 0 to 0.5 with clip 0.2: the bound is farther from a return of 1, 0.8²/2; the value itself from one of -1.
    values = torch.tensor([[0.5, 0.5, 0.1]], requires_grad=True)
    loss = value_loss(values, torch.tensor([[1.0, -1.0, 1.0]]), old, value_clip=0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.32, 1.125, 0.405]]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1.5, -0.9]]))


def test_old_values_have_no_gradient_and_settings_are_checked() -> None:
    values = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"value_clip=0\.2 needs old_values"):
        value_loss(values, values, value_clip=0.2)
    with pytest.raises(ValueError, match="huber_delta must be a finite number above 0, got 0"):
        value_loss(values, values, huber_delta=0)


def test_explained_variance_is_1_for_the_returns_and_0_for_a_constant() -> None:
    returns, mask = torch.randn(4, 5), torch.rand(4, 5) < 0.7
    junk = torch.where(mask, returns, 99.0)
    assert explained_variance(junk, returns, mask) == 1
    assert explained_variance(torch.ones(4, 5), returns, mask) == pytest.approx(0)
    assert explained_variance(returns, torch.ones(4, 5), mask) == 0


def test_running_statistics_are_those_of_all_returns_so_far() -> None:
    parts = [torch.randn(num) * 3 + 5 for num in (4, 1, 9)]
    normalizer = ValueNormalizer("running")
    for part in parts:
        normalizer.update(part)
    whole = torch.cat(parts).double()
    assert normalizer.mean == pytest.approx(float(whole.mean()))
    assert normalizer.std == pytest.approx(float(whole.std(unbiased=False)))
    normalized = normalizer.normalize(whole)
    assert float(normalized.mean()) == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(normalizer.denormalize(normalized), whole)


def test_exponential_statistics_are_weighted_means_without_the_bias_of_the_start() -> None:
    normalizer = ValueNormalizer("exponential", decay=0.5)
    normalizer.update(torch.tensor([4.0]))
    assert normalizer.mean == 4
    normalizer.update(torch.tensor([1.0, 1.0, 1.0]))  # (4·1/4 + 1·1/2) / (3/4)
    assert normalizer.mean == pytest.approx(2.0)


def test_before_any_return_and_with_equal_returns_values_stay_finite() -> None:
    normalizer = ValueNormalizer()
    assert normalizer.normalize(torch.tensor([3.0])).tolist() == [3.0]
    normalizer.update(torch.tensor([]))
    normalizer.update(torch.tensor([2.0, 2.0]))
    assert normalizer.normalize(torch.tensor([2.0, 2.1])).tolist() == pytest.approx([0, 10], rel=1e-4)


def test_the_normalizer_continues_after_a_resume() -> None:
    one, other = ValueNormalizer(), ValueNormalizer()
    one.update(torch.randn(9))
    other.load_state_dict(one.state_dict())
    assert other == one


def test_the_kl_weight_follows_its_target() -> None:
    fixed, adaptive = KLController(0.1), KLController(0.1, target_nats=0.5, horizon=100)
    for controller in (fixed, adaptive):
        controller.update(0.55, 50)  # 10 % above: 0.1 · (1 + 0.1 · 50/100)
    assert (fixed.coef, adaptive.coef) == (0.1, pytest.approx(0.105))
    adaptive.update(99.0, 50)  # far above counts as 20 %
    assert adaptive.coef == pytest.approx(0.105 * 1.1)
    adaptive.update(0.0, 50)
    assert adaptive.coef == pytest.approx(0.105 * 1.1 * 0.9)


def test_the_kl_weight_stays_above_0_whatever_an_update_has() -> None:
    controller = KLController(0.1, target_nats=0.5, horizon=32)
    controller.update(0.0, 256)  # eight horizons at once, as far below the target as can be
    assert controller.coef == pytest.approx(0.1 * 0.8)
    for _ in range(5000):
        controller.update(0.0, 256)
    assert controller.coef > 0
    off = KLController(0.0, target_nats=0.5)
    off.update(99.0, 256)
    assert off.coef == 0
