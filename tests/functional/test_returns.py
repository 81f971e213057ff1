import math

import pytest
import torch
from tiny import random_experience
from torch import Tensor

from lightrl.functional import gae, on_last_loss_token, on_loss_tokens


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
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.7, 1.0)])
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
