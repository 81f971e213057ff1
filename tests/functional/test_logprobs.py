"""Logprobs and entropies against loops over tokens, against each other, and against finite differences."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrl.functional import (
    aligned_to_tokens,
    hidden_logprobs,
    hidden_topk,
    logits_topk,
    predicted_token_ids,
    predicting_positions,
    token_logprobs,
)
from lightrl.functional import logprobs as logprobs_module


def slow_token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> tuple[list[list[float]], ...]:
    """Plain Python, one token at a time."""
    logprobs, entropies = [], []
    for row, ids in zip(logits.tolist(), token_ids.tolist(), strict=True):
        row_logprobs, row_entropies = [0.0], [0.0]
        for t in range(1, len(ids)):
            scaled = [value / temperature for value in row[t - 1]]
            total = sum(math.exp(value) for value in scaled)
            probabilities = [math.exp(value) / total for value in scaled]
            row_logprobs.append(math.log(probabilities[ids[t]]))
            row_entropies.append(-sum(p * math.log(p) for p in probabilities))
        logprobs.append(row_logprobs)
        entropies.append(row_entropies)
    return logprobs, entropies


def head_case(num: int = 7, hidden: int = 5, vocabulary: int = 11, **options: object) -> tuple[Tensor, ...]:
    """hidden [N, H], weight [V, H], bias [V] that want gradients, and token ids [N]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num, hidden), (vocabulary, hidden), (vocabulary,))
    tensors = [torch.randn(shape, generator=generator, **options).requires_grad_() for shape in shapes]
    return *tensors, torch.randint(0, vocabulary, (num,), generator=generator)


def test_a_token_has_its_logprob_in_the_logits_of_the_position_before_it() -> None:
    # softmax(log 1, log 3) = (1/4, 3/4); token 1 has probability 3/4, its logits are at position 0.
    logits = torch.tensor([[[0.0, math.log(3.0)], [50.0, -50.0]]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]))
    expected_entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, math.log(0.75)]]))
    torch.testing.assert_close(entropy, torch.tensor([[0.0, expected_entropy]]))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_token_logprobs_equal_a_loop_over_tokens(temperature: float) -> None:
    torch.manual_seed(0)
    logits, token_ids = torch.randn(3, 6, 9), torch.randint(0, 9, (3, 6))
    results = token_logprobs(logits, token_ids, temperature)
    for result, expected in zip(results, slow_token_logprobs(logits, token_ids, temperature), strict=True):
        torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_position_zero_is_zero_and_the_last_logits_get_no_gradient() -> None:
    logits = torch.randn(2, 4, 5, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.ones(2, 4, dtype=torch.int64))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs[:, 0].eq(0).all()
    assert entropy[:, 0].eq(0).all()
    assert logits.grad[:, -1].eq(0).all()
    assert logits.grad[:, :-1].ne(0).all()


@pytest.mark.parametrize("width", [0, 1])
def test_trajectories_too_short_to_predict_anything_give_zeros(width: int) -> None:
    results = token_logprobs(torch.randn(2, width, 5), torch.zeros(2, width, dtype=torch.int64))
    for result in results:
        assert result.shape == (2, width)
        assert result.eq(0).all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits, token_ids = torch.randn(2, 5, 300).bfloat16(), torch.randint(0, 300, (2, 5))
    for low, full in zip(token_logprobs(logits, token_ids), token_logprobs(logits.float(), token_ids), strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, full, rtol=0, atol=0)


def test_an_id_that_the_model_never_says_leaves_entropy_and_gradient_finite() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]))
    (logprobs.sum() + entropy.sum()).backward()
    assert entropy[0, 1].item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([-0.5, 0.5, 0.0]))


@pytest.mark.parametrize("scale", [1e4, 1e30], ids=["large", "huge"])
def test_extreme_logits_stay_finite(scale: float) -> None:
    logits = torch.tensor([[[scale, -scale], [0.0, 0.0]]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([[0, 1]]))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.isfinite().all()
    assert entropy[0, 1].item() == 0
    assert logits.grad.isfinite().all()


def test_gradients_equal_finite_differences() -> None:
    hidden, weight, bias, _ = head_case(4, 3, 5, dtype=torch.float64)
    ids, rows = torch.tensor([1, 3]), torch.tensor([True, False, False, True])
    for chunk_tokens in (4, 3):

        def function(*tensors: Tensor, chunk_tokens: int = chunk_tokens) -> tuple[Tensor, Tensor]:
            options = {"chunk_tokens": chunk_tokens, "masked_ids": ids, "masked_rows": rows}
            return hidden_logprobs(*tensors, torch.tensor([0, 1, 2, 4]), 0.7, **options)

        assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("chunk_tokens", [None, 1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_hidden_logprobs_equal_token_logprobs_with_gradients(chunk_tokens: int | None, temperature: float) -> None:
    hidden, weight, bias, token_ids = head_case()
    factors = torch.linspace(-2, 3, len(token_ids))

    def results_and_gradients(logprobs: Tensor, entropy: Tensor) -> list[Tensor]:
        loss = (factors * logprobs).sum() + (factors.square() * entropy).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))]

    # One trajectory whose token t + 1 is predicted by hidden state t.
    logits = torch.nn.functional.pad(hidden @ weight.T + bias, (0, 0, 0, 1))[None]
    expected = token_logprobs(logits, torch.nn.functional.pad(token_ids, (1, 0))[None], temperature)
    expected = results_and_gradients(expected[0][0, 1:], expected[1][0, 1:])
    results = hidden_logprobs(hidden, weight, bias, token_ids, temperature, chunk_tokens=chunk_tokens)
    for result, value in zip(results_and_gradients(*results), expected, strict=True):
        assert (result - value).norm() <= 1e-6 * value.norm()


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_without_positions_the_gradients_are_zeros_and_not_none(chunk_tokens: int | None) -> None:
    hidden, weight, bias, token_ids = head_case(num=0)
    logprobs, entropy = hidden_logprobs(hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    for tensor in (hidden, weight, bias):
        torch.testing.assert_close(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("chunk_tokens", [2, 7], ids=["chunks", "one chunk"])
def test_a_detached_entropy_has_the_same_value_and_no_gradient(chunk_tokens: int) -> None:
    hidden, weight, bias, token_ids = head_case()
    both = [
        hidden_logprobs(hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens, entropy_gradient=wanted)
        for wanted in (True, False)
    ]
    assert [entropy.requires_grad for _, entropy in both] == [True, False]
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
    gradients = [torch.autograd.grad(logprobs.sum(), (hidden, weight, bias)) for logprobs, _ in both]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden, weight, _, token_ids = head_case()
    frozen = weight.detach()
    logprobs, _ = hidden_logprobs(hidden, frozen, None, token_ids, chunk_tokens=2)
    logprobs.sum().backward()
    expected = torch.log_softmax(hidden @ frozen.T, dim=-1).gather(1, token_ids[:, None]).sum()
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0], rtol=1e-5, atol=1e-6)
    assert frozen.grad is None


def test_many_chunks_of_a_bfloat16_head_keep_the_digits_of_its_gradient() -> None:
    hidden, weight, bias, token_ids = head_case(256, 8, 16, dtype=torch.bfloat16)
    gradients = []
    for chunk_tokens in (1, 256):
        logprobs, entropy = hidden_logprobs(hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens)
        assert logprobs.dtype == torch.float32
        gradients.append(torch.autograd.grad((logprobs + entropy).sum(), (weight, bias)))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("chunk_tokens", [2, 7], ids=["chunks", "one chunk"])
def test_under_autocast_the_head_runs_in_its_dtype_and_parameters_keep_theirs(chunk_tokens: int) -> None:
    hidden, weight, bias, token_ids = head_case()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = hidden_logprobs(hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens)
        logits = torch.nn.functional.linear(hidden, weight, bias)
    logprobs.sum().backward()
    expected = torch.log_softmax(logits.float(), dim=-1).gather(1, token_ids[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    assert weight.grad.dtype == torch.float32


def test_logits_beyond_the_kept_size_are_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "_KEPT_LOGITS", 22)
    monkeypatch.setattr(logprobs_module, "_CHUNK_LOGITS", {"cpu": 33})
    hidden, weight, bias, token_ids = head_case()
    logprobs, _ = hidden_logprobs(hidden, weight, bias, token_ids)
    assert "Head" in type(logprobs.grad_fn).__name__
    assert logprobs_module.tokens_per_chunk(7, 11, "cpu") == 3
    assert logprobs_module.tokens_per_chunk(2, 11, "cpu") == 2


def use_fused_head(monkeypatch: pytest.MonkeyPatch, form: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    monkeypatch.setattr(logprobs_module, "can_compile", lambda device: True)
    monkeypatch.setattr(logprobs_module, "_KEPT_LOGITS", 0)
    monkeypatch.setattr(logprobs_module, "_compiled", form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ids", [None, 3], ids=["one token", "several tokens"])
@pytest.mark.parametrize("is_masked", [False, True], ids=["all ids", "masked ids"])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=["logprobs", "entropy", "both"])
def test_the_head_in_one_pass_gives_the_numbers_of_many(
    dtype: torch.dtype,
    num_ids: int | None,
    is_masked: bool,
    factors: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, token_ids = head_case(60, 16, 90, dtype=dtype)
    if num_ids is not None:
        token_ids = torch.stack([token_ids, token_ids, (token_ids + 5) % 90], 1)
    rows = torch.arange(60) % 2 == 0
    token_ids = torch.where((token_ids == 3) | (token_ids == 7), 1, token_ids)
    mask = {"masked_ids": torch.tensor([3, 7]), "masked_rows": rows} if is_masked else {}
    weights = torch.linspace(-2, 3, token_ids.numel()).view(token_ids.shape)

    def numbers() -> list[Tensor]:
        logprobs, entropy = hidden_logprobs(hidden, weight, bias, token_ids, 0.7, chunk_tokens=16, **mask)
        loss = sum(
            factor * value
            for factor, value in zip(factors, ((weights * logprobs).sum(), entropy.sum()), strict=True)
            if factor
        )
        return [logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))]

    expected = numbers()
    use_fused_head(monkeypatch, lambda function: function)
    for index, (actual, value) in enumerate(zip(numbers(), expected, strict=True)):
        bound = 1e-6 if dtype == torch.float32 or index < 2 else 2**-8
        assert (actual - value).abs().max() <= bound * value.abs().max()


@pytest.mark.extra
def test_the_fused_head_is_compiled_once_for_all_sizes_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # needs no compiler
    use_fused_head(monkeypatch, functools.cache(logprobs_module._compiled.__wrapped__))
    torch.compiler.reset()
    counters.clear()
    for num in (60, 50, 39):
        hidden, weight, _, token_ids = head_case(num, 16, 90)
        logprobs, _ = hidden_logprobs(hidden, weight, None, token_ids, 0.7, chunk_tokens=16)
        logprobs.sum().backward()
        expected = torch.log_softmax(hidden @ weight.T / 0.7, -1).gather(1, token_ids[:, None]).sum()
        torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0], rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
    assert counters["stats"]["unique_graphs"] == 2  # forward and backward


def test_in_chunks_nothing_as_large_as_the_logits_is_kept_for_the_backward_pass() -> None:
    hidden, weight, bias, token_ids = head_case(num=16, hidden=2, vocabulary=64)
    sizes: dict[int, list[int]] = {}
    for chunk_tokens in (4, 16):
        kept = sizes.setdefault(chunk_tokens, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda saved, kept=kept: kept.append(saved.numel()), lambda _: _):
            hidden_logprobs(hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens)
    assert max(sizes[4]) == weight.numel()
    assert max(sizes[16]) == 16 * 64


class LargeAllocations(TorchDispatchMode):
    """Counts results of at least this many elements that are in new memory."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements = num_elements
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        results = function(*args, **(kwargs or {}))
        before = {item.untyped_storage().data_ptr() for item in given}
        self.num += sum(
            item.numel() >= self.num_elements and item.untyped_storage().data_ptr() not in before
            for item in tree_leaves(results)
            if isinstance(item, Tensor)
        )
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [{}, {"masked_ids": torch.tensor([2]), "masked_rows": torch.ones(48).bool()}])
def test_all_chunks_use_the_same_memory(dtype: torch.dtype, mask: dict[str, Tensor]) -> None:
    """In new memory for each chunk, glibc's heap grows with the number of tokens by as much as all logits."""
    hidden, weight, _, token_ids = head_case(48, 3, 400, dtype=dtype)
    bias = torch.zeros(400, dtype=dtype)
    with LargeAllocations(8 * 400) as allocations:
        hidden_topk(hidden, weight, bias, 4, chunk_tokens=8)
        logprobs, entropy = hidden_logprobs(hidden, weight, bias, token_ids, 0.7, chunk_tokens=8, **mask)
        (logprobs + entropy).sum().backward()
    is_smaller = dtype == torch.bfloat16  # then logits have a tensor of their own
    assert allocations.num == (1 + is_smaller) + 2 * (2 + is_smaller)  # for top-k, then for forward and backward


@pytest.mark.parametrize("chunk_tokens", [2, 7], ids=["chunks", "one chunk"])
def test_masked_ids_have_probability_zero_where_they_could_not_be_sampled(chunk_tokens: int) -> None:
    hidden, weight, bias, _ = head_case()
    token_ids = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    ids, rows = torch.tensor([8, 10]), torch.tensor([True, False, True, True, False, False, True])
    logprobs, entropy = hidden_logprobs(
        hidden, weight, bias, token_ids, chunk_tokens=chunk_tokens, masked_ids=ids, masked_rows=rows
    )
    for n in range(7):
        kept = [v for v in range(11) if not (rows[n] and v in ids)]
        distribution = torch.distributions.Categorical(logits=(weight[kept] @ hidden[n] + bias[kept]))
        assert logprobs[n].item() == pytest.approx(distribution.log_prob(token_ids[n]).item(), rel=1e-5)
        assert entropy[n].item() == pytest.approx(distribution.entropy().item(), rel=1e-5)


def test_token_logprobs_apply_the_mask_at_the_token_it_describes() -> None:
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    rows = torch.tensor([[False, True, False]])
    logprobs, entropy = token_logprobs(
        logits, torch.tensor([[0, 1, 3]]), masked_ids=torch.tensor([2, 3]), masked_rows=rows
    )
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, -math.log(2), -math.log(4)]]))
    torch.testing.assert_close(entropy, torch.tensor([[0.0, math.log(2), math.log(4)]]))
    logprobs.sum().backward()
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([-0.5, 0.5, 0.0, 0.0]))


def test_the_callers_logits_are_left_as_they_are() -> None:
    logits = torch.randn(1, 3, 4)
    before = logits.clone()
    mask = {"masked_ids": torch.tensor([1]), "masked_rows": torch.tensor([[True, True, True]])}
    token_logprobs(logits, torch.tensor([[0, 0, 0]]), 0.5, **mask)
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [3, 7], ids=["chunks", "one chunk"])
def test_several_tokens_at_a_position_have_the_logprobs_and_gradients_of_plain_autograd(chunk_tokens: int) -> None:
    """Some of them twice at one position."""
    hidden, weight, bias, token_ids = head_case()
    ids = torch.stack([token_ids, (token_ids + 1) % 11, token_ids, (token_ids + 5) % 11], 1)
    factors = torch.linspace(-2, 3, ids.numel()).view(ids.shape)
    logprobs, entropy = hidden_logprobs(hidden, weight, bias, ids, 0.7, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad((factors * logprobs).sum() + entropy.sum(), (hidden, weight, bias))
    plain = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / 0.7, dim=-1)
    torch.testing.assert_close(logprobs, plain.gather(1, ids))
    expected = (factors * plain.gather(1, ids)).sum() - (plain.exp() * plain).sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (hidden, weight, bias)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_top_k_tokens_are_those_of_the_whole_distribution(chunk_tokens: int) -> None:
    hidden, weight, bias, _ = head_case()
    expected = torch.nn.functional.linear(hidden, weight, bias).argsort(1, descending=True)
    actual = hidden_topk(hidden, weight, bias, 4, chunk_tokens=chunk_tokens)
    assert torch.equal(actual, expected[:, :4])
    assert not actual.is_floating_point()
    among = hidden_topk(hidden, weight, bias, 4, num_ids=6, chunk_tokens=chunk_tokens)
    assert torch.equal(among, torch.stack([row[row < 6][:4] for row in expected]))


class Allocated(TorchDispatchMode):
    """The dtypes of new tensors of this shape, without their content."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.dtypes = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.name() and result.shape == self.shape:
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_top_k_takes_one_buffer_beside_smaller_logits_and_logprobs_take_two(dtype: torch.dtype) -> None:
    hidden, weight, bias, token_ids = (each.to(dtype) if each.is_floating_point() else each for each in head_case())
    smaller = [torch.bfloat16] if dtype == torch.bfloat16 else []
    with Allocated(2, 11) as allocated:
        hidden_topk(hidden, weight, bias, 4, chunk_tokens=2)
    assert sorted(allocated.dtypes, key=str) == [*smaller, torch.float32]
    with Allocated(2, 11) as allocated, torch.no_grad():
        hidden_logprobs(hidden, weight, bias, token_ids, 0.7, chunk_tokens=2)
    assert sorted(allocated.dtypes, key=str) == [*smaller, torch.float32, torch.float32]


def test_tokens_that_could_not_be_sampled_are_the_last_of_the_top_k() -> None:
    hidden, weight, bias, _ = head_case()
    masks = {
        "masked_ids": torch.tensor([8, 10]),
        "masked_rows": torch.tensor([True, False, True, True, False] + [True] * 2),
    }
    actual = hidden_topk(hidden, weight, bias, 11, chunk_tokens=2, **masks)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    for n, row in enumerate(actual.tolist()):
        order = logits[n].argsort(descending=True).tolist()
        kept = [token for token in order if not (masks["masked_rows"][n] and token in (8, 10))]
        assert row[: len(kept)] == kept
    assert hidden_topk(hidden[:0], weight, bias, 3).shape == (0, 3)


def test_the_top_k_tokens_of_logits_leave_out_those_that_could_not_be_sampled() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    masks = {"masked_ids": torch.tensor([0]), "masked_rows": torch.tensor([False, True])}
    assert logits_topk(logits, 2).tolist() == [[1, 2], [0, 2]]
    assert logits_topk(logits, 2, **masks).tolist() == [[1, 2], [2, 1]]
    assert logits_topk(logits, 2, num_ids=2).tolist() == [[1, 0], [0, 1]]


def test_a_top_k_above_the_vocabulary_is_refused() -> None:
    hidden, weight, bias, _ = head_case()
    with pytest.raises(ValueError, match="num must be at most 11, the number of token ids, got 12"):
        hidden_topk(hidden, weight, bias, 12)


def test_gather_by_positions_then_align_equals_the_logits_of_the_whole_tensor() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 6, 4), torch.randn(7, 4)
    token_ids, loss_mask = torch.randint(0, 7, (3, 6)), torch.rand(3, 6) < 0.5
    loss_mask[:, 0] = True  # nothing predicts position 0: it has to be left out
    rows, columns = predicting_positions(loss_mask)
    logprobs, _ = hidden_logprobs(hidden[rows, columns], weight, None, predicted_token_ids(token_ids, rows, columns))
    aligned = aligned_to_tokens(logprobs, rows, columns, token_ids.shape)
    expected, _ = token_logprobs(hidden @ weight.T, token_ids)
    torch.testing.assert_close(aligned, torch.where(loss_mask, expected, 0.0))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    hidden, weight, _, token_ids = head_case()
    with pytest.raises(ValueError, match=r"temperature must be above 0"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64), temperature)
    with pytest.raises(ValueError, match=r"temperature must be above 0"):
        hidden_logprobs(hidden, weight, None, token_ids, temperature)


def test_shapes_that_do_not_fit_are_refused_with_both_shapes() -> None:
    hidden, weight, _, token_ids = head_case()
    with pytest.raises(ValueError, match=r"\(2, 3, 5\).*\(2, 4\)"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(7, 5\).*\(11, 4\)"):
        hidden_logprobs(hidden, weight[:, 1:], None, token_ids)
    with pytest.raises(ValueError, match=r"\(6,\).*\(7, 5\)"):
        hidden_logprobs(hidden, weight, None, token_ids[1:])
    with pytest.raises(ValueError, match="masked_ids and masked_rows must be passed together"):
        hidden_logprobs(hidden, weight, None, token_ids, masked_ids=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"chunk_tokens must be >= 1, got 0"):
        hidden_logprobs(hidden, weight, None, token_ids, chunk_tokens=0)
