"""Evidence that tokens are too likely or too unlikely; tests/trainer/test_sync_checks.py has AnswerCheck in runs."""

import math
import random

import pytest
import torch

from lightrl import Prompt, Sampling, Trajectory
from lightrl.callbacks.answer_check import LIMIT_NATS, TOP, copies_nats, evidence_nats


def sampled(logits: torch.Tensor, asked: Sampling, actual: Sampling) -> list[float]:
    """The most evidence at any time for too likely and too unlikely tokens, one of each row of logits."""
    top, ids = torch.log_softmax(logits / asked.temperature, -1).topk(min(TOP, logits.shape[1]))
    chances, order = torch.softmax(logits / max(actual.temperature, 1e-3), -1).sort(descending=True)
    is_kept = chances.cumsum(1) - chances < actual.top_p
    is_kept &= torch.arange(logits.shape[1]) < (actual.top_k if actual.top_k > 0 else logits.shape[1])
    tokens = order.gather(1, torch.multinomial(chances * is_kept, 1))
    most = []
    for column in evidence_nats(top, ids == tokens, asked, 1e-3).T.tolist():
        total, largest = 0.0, 0.0
        for value in column:
            total = max(0.0, total + value)
            largest = max(largest, total)
        most.append(largest)
    return most


ASKED = [Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.9), Sampling(top_k=20), Sampling(top_p=0.9, top_k=5)]
IDS = ["plain", "cooler", "top-p", "top-k", "both"]
OTHERS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.6, top_k=3),
    Sampling(),
    Sampling(),
    Sampling(top_p=1.0, top_k=20),
]


@pytest.mark.parametrize("asked", [*ASKED, Sampling(top_k=1)], ids=[*IDS, "one"])
@pytest.mark.parametrize(("vocab_size", "spread"), [(14, 0.1), (61, 0.1), (61, 3.0), (61, 300.0), (500, 2.0)])
def test_tokens_that_are_sampled_as_asked_are_no_evidence(asked, vocab_size, spread):
    torch.manual_seed(0)
    assert max(sampled(spread * torch.randn(3000, vocab_size), asked, asked)) < LIMIT_NATS / 2


@pytest.mark.parametrize(("asked", "actual", "index"), [*zip(ASKED, OTHERS, [0, 0, 1, 1, 1], strict=True)], ids=IDS)
@pytest.mark.parametrize("spread", [0.1, 1.5])
def test_tokens_that_are_sampled_otherwise_are_evidence_after_some_hundred(asked, actual, index, spread):
    torch.manual_seed(0)
    assert sampled(spread * torch.randn(600, 61), asked, actual)[index] > LIMIT_NATS


def completed(token_ids: list[int], logprobs: list[float], versions: list[int] | None = None) -> Trajectory:
    """A trajectory of a prompt of one token and this completion."""
    return Trajectory(
        prompt=Prompt("p", token_ids=[3]), group_id=0, sample=0, token_ids=[3, *token_ids],
        loss_mask=[False, *[True] * len(token_ids)], behavior_logprobs=[0.0, *logprobs],
        weight_versions=[-1, *(versions or [4] * len(token_ids))], completion_ids=token_ids, completion="",
    )  # fmt: skip


def test_equal_completions_are_evidence_by_the_logprob_of_all_but_one():
    same, other = completed([5, 1], [-4.0, -6.0]), completed([6, 1], [-4.0, -6.0])
    assert copies_nats([same] * 4) == pytest.approx(3 * 10 - 4 * math.log(2))
    assert copies_nats([same, same, other]) == pytest.approx(10 - 3 * math.log(2))
    assert copies_nats([same, other]) == pytest.approx(-2 * math.log(2))


def test_completions_under_different_weights_and_with_a_load_amid_are_no_copies():
    rows = [completed([5, 1], [-4.0, -6.0], versions) for versions in ([3, 3], [4, 4], [3, 4], [3, 4], [3, 4])]
    assert copies_nats(rows) <= 0
    assert copies_nats([]) <= 0


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9, 0.999])
def test_completions_that_are_equal_by_chance_are_no_evidence(chance):
    draw = random.Random(0)
    logprobs = {0: math.log(1 - chance), 1: math.log(chance)}
    for _ in range(1000):
        rows = [[int(draw.random() < chance) for _ in range(3)] for _ in range(16)]
        assert copies_nats([completed(row, [logprobs[token] for token in row]) for row in rows]) < LIMIT_NATS / 2
