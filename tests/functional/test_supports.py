"""The codes of supports against a loop over bits, and the softmax over a support against one over its logits alone."""

import math

import numpy as np
import pytest
import torch

from lightrl.columns import EVERY_TOKEN, SUPPORTS, support_ends
from lightrl.functional import Supports, encode_supports, hidden_logprobs, logits_logprobs
from lightrl.functional.supports import decode_supports


def encoded(supports: list[list[int]], drawn: list[int], vocabulary: int | None = None) -> list[bytes]:
    rows = np.repeat(np.arange(len(supports)), [len(support) for support in supports])
    ids = np.array([token for support in supports for token in support], np.int64)
    return encode_supports(rows, ids, np.array(drawn), vocabulary)


def test_a_code_is_the_gaps_between_the_other_ids_and_an_end() -> None:
    codes = encoded([[5], [2, 5, 6], [], [0, 200, 20_000]], [5, 5, 7, 0])
    # 2 more than the gap, 7 bits in a byte: 200 + 2 = 1 · 128 + 74, 19,799 + 2 = 1 · 16,384 + 26 · 128 + 89
    bits = [[0], [4, 5, 0], [1], [128 + 74, 1, 128 + 89, 128 + 26, 1, 0]]
    assert [list(code) for code in codes] == bits
    assert codes[2] == EVERY_TOKEN
    assert encoded([[0, 1, 2]], [1], vocabulary=3) == [EVERY_TOKEN]
    ends = [len(b"".join(codes[: index + 1])) for index in range(4)]
    assert support_ends(list(b"".join(codes))).tolist() == ends  # the 1 that ends a gap ends no code


@pytest.mark.parametrize("vocabulary", [20, 300, 150_000, 3_000_000])
def test_decoding_gives_the_supports_again(vocabulary: int) -> None:
    random = np.random.default_rng(0)
    sizes = [*random.integers(0, 20, 200).tolist(), 0, 1]
    supports = [sorted(random.choice(vocabulary, size, replace=False).tolist()) for size in sizes]
    drawn = [int(random.choice(support)) if support else 3 for support in supports]
    is_every, counts, ids = decode_supports(np.frombuffer(b"".join(encoded(supports, drawn)), np.uint8))
    assert is_every.tolist() == [not support for support in supports]
    others = np.split(ids, counts.cumsum()[:-1])
    assert [others.tolist() for others in others] == [
        [token for token in support if token != own] for support, own in zip(supports, drawn, strict=True)
    ]


def test_twenty_ids_of_a_large_vocabulary_take_forty_bytes() -> None:
    ids = np.sort(np.random.default_rng(0).integers(0, 150_000, (1000, 18)), axis=1)  # top-p 0.9 of 20 equal ones
    ids += np.arange(18)  # different ones
    codes = encode_supports(np.arange(1000).repeat(18), ids.reshape(-1), ids[:, 4])
    assert sum(map(len, codes)) / 1000 <= 40


def test_a_token_outside_its_support_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in the support"):
        encoded([[1, 2], [3]], [2, 4])


def test_parts_without_codes_could_be_any_token() -> None:
    assert SUPPORTS.joined([(None, 2), (None, 3)]) is None
    own = SUPPORTS.array(encoded([[4, 5]], [4])[0])
    assert SUPPORTS.joined([(None, 2), (own, 1), (None, 1)]) == [1, 1, 7, 0, 1]


def test_a_softmax_over_supports_is_one_over_their_logits_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 5, generator=generator), torch.randn(11, 5, generator=generator)
    supports = [[3], [1, 4, 9], [], [0, 10], [2, 3, 4, 5, 6], []]
    token_ids = torch.tensor([[0, 3, 9, 7, 0, 4, 1]])
    codes = b"".join(encoded([[], *supports], token_ids[0].tolist()))
    rows, columns = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    coded = [torch.frombuffer(bytearray(codes), dtype=torch.uint8)]
    made = Supports.at(coded, torch.tensor([7]), token_ids, rows, columns)
    targets = token_ids[0, 1:]
    candidates = torch.stack([targets, (targets + 5) % 11, torch.arange(6)], 1)
    for chunk_tokens in (None, 1, 4):
        logprobs, entropy = hidden_logprobs(hidden, weight, None, targets, supports=made, chunk_tokens=chunk_tokens)
        for row, support in enumerate(supports):
            ids = support or list(range(11))
            alone = torch.log_softmax((weight[ids] @ hidden[row]).double(), -1)
            assert logprobs[row].item() == pytest.approx(alone[ids.index(int(targets[row]))].item(), abs=1e-6)
            assert entropy[row].item() == pytest.approx(-(alone.exp() * alone).sum().item(), abs=1e-6)
        several, _ = hidden_logprobs(hidden, weight, None, candidates, supports=made, chunk_tokens=chunk_tokens)
        from_logits, _ = logits_logprobs(hidden @ weight.T, candidates, supports=made)
        assert torch.equal(several[:, 0], logprobs)
        for row, support in enumerate(supports):
            ids = support or list(range(11))
            alone = torch.log_softmax((weight[ids] @ hidden[row]).double(), -1)
            expected = [alone[ids.index(token)].item() if token in ids else -math.inf for token in candidates[row]]
            for values in (several, from_logits):
                assert values[row].tolist() == pytest.approx(expected, abs=1e-6)
