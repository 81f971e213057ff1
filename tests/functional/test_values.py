import math

import pytest
import torch
from tiny import random_experience
from torch import Tensor

from lightrl.functional import (
    KLController,
    ValueNormalizer,
    explained_variance,
    gae,
    on_last_loss_token,
    on_loss_tokens,
    value_loss,
)


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


def slow_gae(rewards, values, gamma, lam, end):
    """Of one trajectory's loss tokens alone: the sum over k of (gamma·lam)^k·delta_{t+k}, written out."""
    num = len(rewards)
    after = [*values[1:], end]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(num)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, num)) for t in range(num)]
    return advantages, [advantages[t] + values[t] for t in range(num)]


def ragged(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, mask and bootstraps of trajectories with several turns and gaps between them."""
    mask = random_experience(num_groups=4, num_turns=3, completion_tokens=(1, 5), seed=seed).loss_mask
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    return rewards, values, mask, torch.randn(len(mask), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.7, 1.0)])
@pytest.mark.parametrize("is_truncated", [False, True], ids=["ended", "truncated"])
def test_gae_is_that_of_each_trajectorys_loss_tokens_alone(seed, gamma, lam, is_truncated):
    rewards, values, mask, ends = ragged(seed)
    advantages, returns = gae(rewards, values, mask, gamma, lam, ends if is_truncated else None)
    for row in range(len(mask)):
        end = float(ends[row]) if is_truncated else 0.0
        steps = mask[row]
        expected = slow_gae(rewards[row][steps].tolist(), values[row][steps].tolist(), gamma, lam, end)
        torch.testing.assert_close(advantages[row][steps], torch.tensor(expected[0], dtype=torch.float64))
        torch.testing.assert_close(returns[row][steps], torch.tensor(expected[1], dtype=torch.float64))
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gae_of_bfloat16_values_and_a_bootstrap_with_gradient_is_that_of_float32() -> None:
    rewards, mask = torch.linspace(-1, 1, 64)[None], torch.ones(1, 64, dtype=torch.bool)
    values, bootstrap = rewards.bfloat16(), torch.tensor([0.3], requires_grad=True)
    found, expected = (
        gae(rewards, values, mask, bootstrap=bootstrap),
        gae(rewards, values.float(), mask, bootstrap=bootstrap),
    )
    assert all(map(torch.equal, found, expected))
    assert not any(part.requires_grad for part in found)


def test_gae_by_hand() -> None:
    # gamma = 1/2, lam = 1/2; a gap at position 2. delta_3 = 4 - 2 = 2, delta_1 = 0 + 2/2 - 3 = -2.
    # A_3 = 2, A_1 = -2 + 2/4 = -1.5; returns 4 and 1.5.
    mask = torch.tensor([[False, True, False, True]])
    advantages, returns = gae(
        torch.tensor([[9.0, 0.0, 9.0, 4.0]]), torch.tensor([[9.0, 3.0, 9.0, 2.0]]), mask, 0.5, 0.5
    )
    assert advantages.tolist() == [[0.0, -1.5, 0.0, 2.0]]
    assert returns.tolist() == [[0.0, 1.5, 0.0, 4.0]]
    # Truncated where the critic expects 8 more: delta_3 = 4 + 8/2 - 2 = 6, A_1 = -2 + 6/4 = -0.5.
    truncated, _ = gae(
        torch.tensor([[0.0, 0.0, 0.0, 4.0]]), torch.tensor([[0, 3.0, 0, 2.0]]), mask, 0.5, 0.5, torch.tensor([8.0])
    )
    assert truncated.tolist() == [[0.0, -0.5, 0.0, 6.0]]


def test_the_operations_of_gae_grow_with_the_logarithm_of_the_tokens() -> None:
    with torch.autograd.profiler.profile() as run:
        gae(*torch.randn(2, 3, 4096), torch.ones(3, 4096, dtype=torch.bool))
    assert 12 < len(run.function_events) < 30 * math.log2(4096)


@pytest.mark.parametrize("junk", [math.nan, math.inf], ids=str)
def test_what_stands_at_masked_places_has_no_effect(junk: float) -> None:
    rewards, values, mask, _ = ragged(0)
    expected = gae(rewards, values, mask)
    actual = gae(torch.where(mask, rewards, junk), torch.where(mask, values, junk), mask)
    assert all(map(torch.equal, actual, expected))


def test_settings_and_shapes_are_checked() -> None:
    rewards, values, mask, ends = ragged(0)
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1, got 1\.5"):
        gae(rewards, values, mask, 1.5)
    with pytest.raises(ValueError, match="they must be equal"):
        gae(rewards, values, mask, bootstrap=ends[:2])


def test_an_outcome_is_on_the_last_loss_token_whatever_follows_it() -> None:
    mask = torch.tensor([[False, True, True, False], [True, False, False, False], [False, False, False, False]])
    actual = on_last_loss_token(torch.tensor([2.0, -1.0, 5.0]), mask)
    assert actual.tolist() == [[0.0, 0.0, 2.0, 0.0], [-1.0, 0.0, 0.0, 0.0], [0.0] * 4]


def test_a_reward_in_a_gap_is_earned_by_the_loss_token_before_it() -> None:
    mask = torch.tensor([[False, True, True, False, False, True, False]])
    actual = on_loss_tokens(torch.tensor([[7.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), mask)
    assert actual.tolist() == [[0.0, 1.0, 9.0, 0.0, 0.0, 11.0, 0.0]]
