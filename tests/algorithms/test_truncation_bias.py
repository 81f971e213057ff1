"""A bandit whose best arm is known, drawn under top-p: which policy gradient finds it.

Every arm pays 1, arm 2 pays 1.02, and there is no baseline, which changes no true policy gradient. The arms are
weighted with their probabilities, so the gradients are exact: what differs is the softmax of the logprobs, not luck.
"""

import torch

from lightrl.columns import EVERY_TOKEN
from lightrl.engines.local.running_batch import truncated
from lightrl.functional import Supports, encode_supports, token_logprobs

ARMS = 6
REWARDS = torch.tensor([1.0, 1.0, 1.02, 1.0, 1.0, 1.0])
TOKEN_IDS = torch.tensor([[0, arm] for arm in range(ARMS)])  # the first is the prompt


def supports_of(draws: torch.Tensor) -> Supports:
    """Of each arm, as an engine records them; an arm that cannot be sampled has weight 0 and is in its own."""
    allowed = (draws > 0) | torch.eye(ARMS, dtype=torch.bool)
    places = allowed.nonzero().numpy()
    codes = encode_supports(places[:, 0], places[:, 1], TOKEN_IDS[:, 1].numpy(), ARMS)
    coded = [torch.frombuffer(bytearray(EVERY_TOKEN + code), dtype=torch.uint8) for code in codes]
    rows = torch.arange(ARMS)
    return Supports.at(coded, torch.full((ARMS,), 2), TOKEN_IDS, rows, torch.zeros_like(rows))


def trained_probabilities(*, has_supports: bool) -> torch.Tensor:
    """Of the arms, after gradient ascent."""
    logits = torch.tensor([1.2, 0.8, 0.1, 0.5, -0.4, -0.4]).requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=4.0)
    for _ in range(400):
        cut = truncated(logits.detach().softmax(-1)[None], torch.tensor([ARMS]), torch.tensor([0.9]))[0]
        draws = cut / cut.sum()
        supports = supports_of(draws) if has_supports else None
        both = torch.stack([logits, torch.zeros(ARMS)]).expand(ARMS, 2, ARMS)
        logprobs, _ = token_logprobs(both, TOKEN_IDS, supports=supports)
        loss = -(draws * REWARDS * logprobs[:, 1]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draws


def test_a_truncated_policy_finds_the_best_arm() -> None:
    assert trained_probabilities(has_supports=True)[2] > 0.99


def test_a_softmax_over_all_arms_is_biased_to_the_likeliest() -> None:
    """It raises the whole support with every reward, more likely arms most: the support shrinks until the best arm is
    never sampled again."""
    assert trained_probabilities(has_supports=False)[0] > 0.99
