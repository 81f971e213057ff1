"""Nim's exploitability against values of piles, and the same updates on a table of probabilities, which learn it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.self_play.nim import EOS, LARGEST, TAKES, VOCABULARY, Nim, exploitability
from lightrl import Prompt

CHOICES = torch.tensor([VOCABULARY.index(letter) for letter in TAKES])


class ByPile:
    """A policy that reads only the last pile: the logits of its first token, [LARGEST + 1, V], then always the end."""

    device = "cpu"

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, input_ids: Tensor) -> Any:
        first = self.logits[(input_ids - VOCABULARY.index("1") + 1).clamp(0, LARGEST)]
        end = torch.full_like(first, -1e9).index_fill_(-1, torch.tensor(EOS), 0.0)
        takes_at = (input_ids != 0).sum(1) - 1  # a row ends with a take, then padding; it follows the pile
        is_pile = torch.arange(input_ids.shape[1]) == takes_at[:, None] - 1
        return SimpleNamespace(logits=torch.where(is_pile[..., None], first, end))


def values_of(taken: Tensor) -> float:
    """The exploitability of a policy that reads only the pile, from the largest pile's value down to 0.

    Args:
        taken: [LARGEST + 1, 3], the probability of each take.
    """
    mine, its = [-1.0], [1.0]  # what a perfect opponent wins when it is to move, and when the policy is
    for pile in range(1, LARGEST + 1):
        takes = [take for take in TAKES.values() if take <= pile]
        chances = [float(taken[pile, take - 1]) for take in takes]
        mine.append(max(its[pile - take] for take in takes))
        its.append(
            sum(chance * mine[pile - take] for chance, take in zip(chances, takes, strict=True)) + 1 - sum(chances)
        )
    return sum(mine[1:] + its[1:]) / (2 * LARGEST)


def of_takes(takes: dict[int, int]) -> Tensor:
    """Logits of a policy that takes so many of each pile."""
    logits = torch.full((LARGEST + 1, len(VOCABULARY)), -1e9)
    for pile, take in takes.items():
        logits[pile, CHOICES[take - 1]] = 0.0
    return logits


def test_perfect_play_cannot_be_exploited_and_illegal_play_loses_everything() -> None:
    piles = range(1, LARGEST + 1)
    assert exploitability(ByPile(of_takes({pile: pile % 4 or 1 for pile in piles}))) == 0
    # A policy that leaves the last one lets a perfect opponent take it; alone, it must take more than there is.
    never_ends = dict.fromkeys(piles, 1) | {1: 2, 3: 2}
    assert exploitability(ByPile(of_takes(never_ends))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_exploitability_equals_the_value_of_each_pile(seed: int) -> None:
    logits = 2 * torch.randn(LARGEST + 1, len(VOCABULARY), generator=torch.Generator().manual_seed(seed))
    assert exploitability(ByPile(logits)) == pytest.approx(values_of(logits.softmax(-1)[:, CHOICES]), abs=1e-6)


def play(
    pile: int, chances: list[list[float]], rng: random.Random
) -> tuple[dict[str, float], list[tuple[str, int, int]]]:
    """One episode between a table and itself: rewards, and (agent, pile, token) of each turn."""
    game, turns = Nim(), list[tuple[str, int, int]]()
    agent, _ = game.reset(Prompt("", token_ids=[VOCABULARY.index(str(pile))]))
    while agent is not None:
        (token,) = rng.choices(range(len(VOCABULARY)), chances[game.pile])
        turns.append((agent, game.pile, token))
        agent, _, rewards = game.step(VOCABULARY[token])
    return rewards, turns


def test_a_table_of_probabilities_learns_the_game_by_the_same_updates() -> None:
    """Groups of 16 episodes of each pile; each player is compared with the same player of its group."""
    rng, logits = random.Random(0), torch.zeros(LARGEST + 1, len(VOCABULARY))
    before = exploitability(ByPile(logits))
    for _ in range(100):
        chances, gradient = logits.softmax(-1), torch.zeros_like(logits)
        table = chances.tolist()
        for pile in range(1, LARGEST + 1):
            episodes = [play(pile, table, rng) for _ in range(16)]
            for agent in Nim.agents:
                rewards = torch.tensor([rewards[agent] for rewards, _ in episodes if agent in rewards])
                if len(rewards) < 2 or rewards.eq(rewards[0]).all():
                    continue
                advantages = iter(((rewards - rewards.mean()) / rewards.std()).tolist())
                for _, turns in (episode for episode in episodes if agent in episode[0]):
                    advantage = next(advantages)
                    for _, at, token in (turn for turn in turns if turn[0] == agent):
                        gradient[at] -= advantage * chances[at]
                        gradient[at, token] += advantage
        logits += 0.05 * gradient
    assert before > 0.9
    assert exploitability(ByPile(logits)) < 0.1
