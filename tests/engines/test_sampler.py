"""The uniform numbers against a plain splitmix64, the drawn tokens against slow loops."""

import math

import pytest
import torch
from torch import Tensor

from lightrl.engines.local.running_batch import ban_stop_tokens, completion_seed, sample_tokens, truncated, uniforms
from lightrl.functional import Supports

MASK = 2**64 - 1


def mix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


def signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def test_the_mixing_function_is_that_of_splitmix64() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the generator's first output for seed 0


def test_uniforms_hash_seed_and_position() -> None:
    seeds = [0, 1, -5, 2**63 - 1]
    drawn = uniforms(torch.tensor(seeds), 3, 4)
    for row, seed in enumerate(seeds):
        for column, position in enumerate(range(3, 7)):
            bits = mix((mix(seed & MASK) + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
            assert drawn[row, column].item() == (bits >> 11) / 2**53


def test_uniforms_do_not_depend_on_how_they_are_cut() -> None:
    seeds = torch.arange(5)
    whole = uniforms(seeds, 0, 100)
    assert torch.equal(whole[:, 60:], uniforms(seeds, 60, 40))
    assert torch.equal(whole[3:4], uniforms(seeds[3:4], 0, 100))


def test_uniforms_of_neighboring_seeds_are_uniform_and_independent() -> None:
    drawn = uniforms(torch.arange(1000), 0, 200)
    counts = torch.histc(drawn, 20, 0, 1)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    for left, right in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]) < 0.01


def test_the_first_completion_keeps_the_seed_and_the_others_get_their_own() -> None:
    assert completion_seed(17, 0) == 17
    expected = signed(mix(17 ^ mix(3 * 0x9E3779B97F4A7C15 & MASK)))
    assert completion_seed(17, 3) == expected
    assert len({completion_seed(seed, sample) for seed in range(50) for sample in range(50)}) == 2500


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 11, generator=generator)
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    temperature = 0.3 + torch.rand(200, generator=generator)
    token_ids, logprobs, *_ = sample_tokens(logits, uniform, temperature=temperature)
    for row in range(200):
        weights = [math.exp(value / temperature[row].item()) for value in logits[row].tolist()]
        threshold, token = uniform[row].item() * sum(weights), 0
        while threshold >= sum(weights[: token + 1]):
            token += 1
        assert token_ids[row] == token
        assert logprobs[row].item() == pytest.approx(math.log(weights[token] / sum(weights)), abs=1e-5)


def test_a_token_without_probability_is_never_sampled() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(3, 1)
    token_ids, *_ = sample_tokens(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64))
    assert token_ids.tolist() == [1, 3, 3]


def test_greedy_rows_take_the_most_likely_token_with_unscaled_logprobs() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    token_ids, logprobs, *_ = sample_tokens(
        logits, torch.zeros(2, dtype=torch.float64), is_greedy=torch.tensor([True, False])
    )
    assert token_ids.tolist() == [1, 0]
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        pytest.param(5, 1.0, [0.1, 0.4, 0.2, 0.25, 0.05], id="everything"),
        pytest.param(2, 1.0, [0.0, 0.4, 0.0, 0.25, 0.0], id="top-k"),
        pytest.param(5, 0.6, [0.0, 0.4, 0.0, 0.25, 0.0], id="top-p keeps the token that reaches it"),
        pytest.param(5, 0.7, [0.0, 0.4, 0.2, 0.25, 0.0], id="top-p with one more"),
        pytest.param(5, 1e-9, [0.0, 0.4, 0.0, 0.0, 0.0], id="top-p keeps at least one"),
        pytest.param(2, 0.6, [0.0, 0.4, 0.0, 0.0, 0.0], id="top-p of what top-k left: 0.4 of 0.65 is more than 0.6"),
    ],
)
def test_truncation_keeps_the_most_likely_tokens(top_k: int, top_p: float, kept: list[float]) -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.25, 0.05]])
    result = truncated(probabilities, torch.tensor([top_k]), torch.tensor([top_p]))
    assert result[0].tolist() == pytest.approx(kept)


def test_ties_in_a_truncation_go_to_the_lower_token() -> None:
    result = truncated(torch.full((1, 4), 0.25), torch.tensor([2]), torch.tensor([1.0]))
    assert result[0].tolist() == [0.25, 0.25, 0.0, 0.0]


def test_logprobs_are_those_within_the_support() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.25, 0.05]]).log().repeat(2, 1)
    uniform = torch.full((2,), 0.99, dtype=torch.float64)
    rules = {"top_k": torch.tensor([2, 5]), "top_p": torch.ones(2), "num_top": 3}
    token_ids, logprobs, supports, top = sample_tokens(logits, uniform, **rules)
    assert token_ids.tolist() == [3, 4]
    assert logprobs.exp().tolist() == pytest.approx([0.25 / 0.65, 0.05])
    assert supports.tolist() == [[False, True, False, True, False], [False] * 5]  # nothing is left out of the second
    assert top[0][:, :2].tolist() == [[1, 3], [1, 3]]
    assert top[1].exp().flatten().tolist() == pytest.approx([0.4 / 0.65, 0.25 / 0.65, 0, 0.4, 0.25, 0.2])


def test_rows_without_a_setting_draw_the_same_in_a_mixed_batch() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(2))
    uniform = uniforms(torch.arange(50), 0, 1)[:, 0]
    alone = sample_tokens(logits, uniform)
    settings = {"temperature": torch.ones(50), "top_k": torch.full((50,), 300), "top_p": torch.ones(50)}
    mixed = sample_tokens(logits, uniform, **settings, is_greedy=torch.zeros(50, dtype=torch.bool))
    assert torch.equal(alone[0], mixed[0])
    assert torch.equal(alone[1], mixed[1])


def test_banned_stop_tokens_leave_the_others_renormalized() -> None:
    logits = torch.zeros(3, 4)
    stop_token_ids = torch.tensor([[0, 2], [1, -1], [3, -1]])
    ban_stop_tokens(logits, torch.tensor([True, True, False]), stop_token_ids)
    probabilities = logits.softmax(-1)
    expected = [[0, 0.5, 0, 0.5], [1 / 3, 0, 1 / 3, 1 / 3], [0.25] * 4]
    torch.testing.assert_close(probabilities, torch.tensor(expected))


def softmax_rounding(logprobs: Tensor, num: int) -> Tensor:
    """How far float32 may take a logprob from that of a softmax over `num` exact scores, to first order.

    With u = 2^-24: a score's distance to the largest is subtracted and divided by the temperature, 2u of itself, and is
    no more than the logprob for the token and log(num) in the mean over the softmax. The sum of exponentials (2u each)
    adds num - 1 roundings, its logarithm 2u of at most log(num), and the last subtraction u of the logprob.
    """
    return 2**-24 * (3 * logprobs.abs() + 4 * math.log(num) + num + 1)


@pytest.mark.parametrize("spread", [1, 20, 200])
@pytest.mark.parametrize("is_other_order", [False, True], ids=["the same logits", "logits added up in another order"])
def test_engine_and_trainer_round_the_logprob_of_a_truncated_draw_and_not_its_logits(
    is_other_order: bool, spread: int
) -> None:
    """Logits of spread 200 reach 900, where float32 has a spacing of 6e-5: the softmax adds nothing of that size."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 500, generator=generator) * spread
    uniform = torch.rand(1000, dtype=torch.float64, generator=generator)
    temperature, top_k, top_p = torch.full((1000,), 0.9), torch.full((1000,), 20), torch.full((1000,), 0.95)
    rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    token_ids, logprobs, supports, _ = sample_tokens(logits, uniform, **rules)
    rows, ids = supports.nonzero(as_tuple=True)
    counts = supports.sum(1)
    order = (2 * rows + (ids == token_ids[rows])).argsort(stable=True)  # the drawn token is the last
    of_trainer = Supports(torch.arange(1000), torch.arange(0), ids[order], rows, counts, counts.cumsum(0).tolist())
    theirs, spacing = logits, torch.zeros(1000)
    if is_other_order:  # each logit is another neighbor in float32
        up = torch.rand(logits.shape, generator=generator) < 0.5
        theirs = logits.nextafter(torch.where(up, torch.inf, -torch.inf))
        spacing = (theirs - logits).abs().amax(1) / temperature
    found, _ = of_trainer.logprobs(theirs[rows, ids[order]], 0.9, token_ids)
    exact = (logits.double() / temperature[:, None]).masked_fill(~supports, -math.inf).log_softmax(-1)
    expected = exact.gather(1, token_ids[:, None])[:, 0]
    bound = softmax_rounding(logprobs, 20)
    assert bound.max() < 4e-6
    assert ((logprobs - expected).abs() <= bound).all()
    assert ((found - expected).abs() <= bound + 2 * spacing).all()  # the token's logit, and the mean of the others
