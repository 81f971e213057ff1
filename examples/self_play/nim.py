"""Nim: two players take turns removing 1 to 3 objects from a pile; whoever takes the last one wins.

The best strategy is known: leave a multiple of 4. Both players are the policy. `val/exploitability` is computed from
the policy's probabilities in all positions, without sampling: the mean reward of a perfect opponent as the first and as
the second player, 0 for perfect play and 1 for a policy that always loses.

Piles are digits and takes are letters. If both were digits, the policy would first learn to end its turn after a digit.
After reading a pile of 1 or 2 it would then end its turn without a move, and its opponent would learn to leave it that.
"""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torchmetrics import Metric
from transformers import PreTrainedTokenizerFast

from lightrl import GRPO, Group, Prompt, PromptDataModule
from lightrl.workflows import AgentEnvironment

LARGEST = 7  # the largest pile
TAKES = {"a": 1, "b": 2, "c": 3}
VOCABULARY = ["<pad>", "<eos>", *map(str, range(1, LARGEST + 1)), *TAKES]
LETTERS = dict(zip(TAKES.values(), TAKES, strict=True))
EOS = VOCABULARY.index("<eos>")


def tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=32
    )


class Piles(PromptDataModule):
    """One prompt for each pile: its digit."""

    def make_prompts(self, split: str) -> list[Prompt]:
        piles = range(1, LARGEST + 1)
        return [Prompt(f"{split}-{pile}", token_ids=[VOCABULARY.index(str(pile))]) for pile in piles]


class Nim(AgentEnvironment):
    """A player reads the pile and answers how many it takes; an invalid answer, or more than the pile has, loses."""

    agents = ("first", "second")

    def reset(self, prompt: Prompt) -> Any:
        self.pile, self.player, self.num_turns = int(VOCABULARY[(prompt.token_ids or [0])[0]]), 0, 0
        return self.agents[0], None  # the prompt shows the pile

    def step(self, completion: str) -> Any:
        self.num_turns += 1
        player, other = self.agents[self.player], self.agents[1 - self.player]
        take = TAKES.get(completion, 0)
        if not 1 <= take < self.pile:
            won = 1.0 if take == self.pile else -1.0
            return None, None, {player: won, other: -won} if self.num_turns > 1 else {player: won}
        self.pile, self.player = self.pile - take, 1 - self.player
        return other, str(self.pile), {}


class Exploitability(Metric):
    """The mean reward of a perfect opponent against the policy, over all piles and both seats: 0 to 1."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.owner = [module]  # in a list, so that torch does not register it as a submodule

    def update(self, groups: list[Group]) -> None:
        """Does nothing: the policy's probabilities are read directly."""

    def compute(self) -> torch.Tensor:
        return torch.tensor(exploitability(self.owner[0].policy))


class NimGRPO(GRPO):
    """GRPO that validates by the policy's exploitability."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.validation_metrics = {"exploitability": Exploitability(self)}


@torch.no_grad()
def exploitability(policy: Any) -> float:
    """Computes the exploitability by recursion over all sequences of legal takes."""
    contexts: dict[tuple[int, ...], list[int]] = {}  # (pile, *takes) → token ids that the player to move has read
    for pile in range(1, LARGEST + 1):
        _add_contexts(contexts, (pile,))
    rows = [[*context, VOCABULARY.index(letter)] for context in contexts.values() for letter in TAKES]
    lengths, width = [len(row) for row in rows], max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    logprobs = policy(input_ids=ids.to(policy.device)).logits.float().log_softmax(-1).cpu()
    # The probability of sampling the take's letter and then the end token.
    pairs = enumerate(zip(rows, lengths, strict=True))
    taken = [float((logprobs[n, size - 2, row[-1]] + logprobs[n, size - 1, EOS]).exp()) for n, (row, size) in pairs]
    chances = {key: taken[3 * number : 3 * number + 3] for number, key in enumerate(contexts)}
    piles = range(1, LARGEST + 1)
    return sum(_best(chances, (pile,), seat) for pile in piles for seat in (0, 1)) / (2 * LARGEST)


def _add_contexts(contexts: dict[tuple[int, ...], list[int]], history: tuple[int, ...]) -> None:
    left, player = history[0] - sum(history[1:]), (len(history) - 1) % 2
    if left == 0:
        return
    text, rest = str(history[0]), history[0]  # each player's conversation begins with the prompt
    for number, take in enumerate([*history[1:], 0]):
        if number % 2 == player:
            text += ("" if number == 0 else str(rest)) + (f"{LETTERS[take]}." if take else "")
        rest -= take
    contexts[history] = [EOS if character == "." else VOCABULARY.index(character) for character in text]
    for take in TAKES.values():
        if take <= left:
            _add_contexts(contexts, (*history, take))


def _best(chances: dict[tuple[int, ...], list[float]], history: tuple[int, ...], seat: int) -> float:
    """Returns the expected reward of a perfect player in this seat (0 or 1) against the policy, from here on."""
    left, player = history[0] - sum(history[1:]), (len(history) - 1) % 2
    if left == 0:  # the other player has taken the last one
        return 1.0 if player != seat else -1.0
    takes = [take for take in TAKES.values() if take <= left]
    values = [_best(chances, (*history, take), seat) for take in takes]
    if player == seat:
        return max(values)
    legal = chances[history][: len(takes)]
    return sum(chance * value for chance, value in zip(legal, values, strict=True)) + (1 - sum(legal))
