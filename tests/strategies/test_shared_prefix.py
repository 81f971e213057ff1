"""Which rows share what, by hand, and that a tree has the hidden states and the gradient of its rows."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import gradients, tiny_model
from torch.testing import assert_close
from transformers import PreTrainedModel

from lightrl.experience import Experience
from lightrl.functional import predicting_positions
from lightrl.strategies import LogprobSettings, SingleModel, single
from lightrl.strategies.layouts import shared_prefix
from lightrl.strategies.layouts.shared_prefix import Prefixes, packed, shared_hidden, shared_rows


def experience(*rows: tuple[int, Sequence[int], Sequence[int]]) -> Experience:
    """Rows of (group, token ids, places in the loss mask)."""
    num, width = len(rows), max(len(token_ids) for _, token_ids, _ in rows)
    token_ids, loss_mask = torch.zeros(num, width, dtype=torch.int64), torch.zeros(num, width, dtype=torch.bool)
    for row, (_, ids, trained) in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        loss_mask[row, list(trained)] = True
    return Experience(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(num, width),
        weight_versions=torch.where(loss_mask, 0, -1),
        rewards=torch.zeros(num),
        group_ids=torch.tensor([group for group, _, _ in rows]),
        is_truncated=torch.zeros(num, dtype=torch.bool),
        lengths=torch.tensor([len(ids) for _, ids, _ in rows]),
    )


def segments_of(*rows: tuple[int, Sequence[int], Sequence[int]], min_tokens: int = 1) -> list[tuple[int, ...]]:
    """(row, start, end, parent) of each segment."""
    return [tuple(segment) for segment in Prefixes.of(experience(*rows)).tree(min_tokens).segments]


def test_rows_that_part_twice_share_two_segments() -> None:
    rows = (0, [3, 4, 5, 9], [2]), (0, [3, 4, 6, 7, 2, 9], [2]), (0, [3, 4, 6, 7, 8, 9], [2])
    assert segments_of(*rows) == [(0, 0, 2, -1), (0, 2, 3, 0), (1, 2, 4, 0), (1, 4, 5, 2), (2, 4, 5, 2)]


def test_a_row_that_another_continues_has_no_segment_of_its_own() -> None:
    tree = Prefixes.of(experience((0, [3, 4, 5, 9], [2]), (0, [3, 4, 5, 8, 7, 9], [2]))).tree()
    assert tree.segments == [(0, 0, 3, -1), (1, 3, 5, 0)]
    assert (tree.last_segments, tree.is_chain, tree.num_tokens) == ({0: 0, 1: 1}, True, 5)


def test_equal_rows_of_different_groups_are_kept_apart() -> None:
    assert segments_of((0, [3, 4, 5], [2]), (1, [3, 4, 5], [2])) == [(0, 0, 2, -1), (1, 0, 2, -1)]


def test_a_short_segment_is_repeated_and_a_longer_one_below_it_is_not() -> None:
    rows = (0, [1, 2, 5, 9], [2]), (0, [1, 2, 3, 4, 6, 9], [2]), (0, [1, 2, 3, 4, 7, 9], [2])
    assert segments_of(*rows, min_tokens=3) == [(1, 0, 4, -1), (1, 4, 5, 0), (2, 4, 5, 0), (0, 0, 3, -1)]


def test_a_packed_row_has_each_segment_after_those_it_follows() -> None:
    tree = Prefixes.of(experience((0, [3, 4, 5], [2]), (0, [3, 4, 6, 7], [2, 3]))).tree()
    layout = packed(tree, (2, 5))
    assert (layout.rows.tolist(), layout.columns.tolist()) == ([0, 0, 1], [0, 1, 2])
    assert (layout.lengths, layout.parents) == ([2, 1, 0], [-1, 0, -1])
    assert layout.flat_indices.tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, -1, -1]]


rows_of_few_tokens = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=2, max_size=9)), min_size=1, max_size=9
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(rows_of_few_tokens, st.integers(1, 12), st.integers(1, 4))
def test_trees_contain_each_row_and_each_prefix_once(
    rows: list[tuple[int, list[int]]], max_tokens: int, min_tokens: int
) -> None:
    made = experience(*((group, ids, [len(ids) - 1]) for group, ids in rows))
    prefixes = Prefixes.of(made)
    prefixes_by_hand = {(group, *ids[:end]) for group, ids in rows for end in range(1, len(ids))}
    assert prefixes.tree().num_tokens == len(prefixes_by_hand)
    parts = prefixes.chunks(max_tokens)
    assert sorted(row for part in parts for row in part.order) == list(range(len(rows)))
    assert all(part.tree().num_tokens <= max(max_tokens, *part.ends) for part in parts)
    assert all(sum(segment.parent < 0 for segment in part.tree().segments) == 1 for part in parts)
    layout = packed(prefixes.tree(min_tokens), made.token_ids.shape)
    assert len(layout.rows) >= len(prefixes_by_hand)
    for row, (_, ids) in enumerate(rows):
        indices = layout.flat_indices[row]
        assert made.token_ids[layout.rows, layout.columns][indices[: len(ids) - 1]].tolist() == ids[:-1]
        assert (indices[len(ids) - 1 :] == -1).all()


@pytest.mark.parametrize(("num_shared", "num_own"), [(80, 20), (10, 40), (300, 16)])
def test_a_packed_row_counts_the_keys_that_it_repeats(num_shared: int, num_own: int) -> None:
    """A prefix of fewer than 16 tokens is computed for each row; a longer one's keys are kept for each row."""
    rows = [(0, [*[1] * num_shared, *[row + 2] * num_own, 0], [num_shared]) for row in range(9)]
    prefixes = Prefixes.of(experience(*rows))
    each = num_own + (num_shared if num_shared < 16 else num_shared / 8)
    for num_rows in (2, 4, 9):
        held = num_rows * each + (num_shared if num_shared >= 16 else 0)
        parts = list(prefixes.packed_chunks(math.ceil(held)))
        assert [len(part.order) for part in parts][:-1] == [num_rows] * ((9 - 1) // num_rows)
        assert [row for part in parts for row in part.order] == prefixes.order
    assert [len(part.order) for part in prefixes.packed_chunks(1)] == [1] * 9


def test_packing_compares_few_times_as_many_rows_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, tree = list[int](), Prefixes.tree
    monkeypatch.setattr(Prefixes, "tree", lambda self, *args: [sizes.append(len(self.order)), tree(self, *args)][1])
    for num in (1, 9, 500):
        parts = Prefixes(list(range(500)), [0] * 500, [50] * 500).packed_chunks(50 * num)
        assert [len(part.order) for part in parts][:-1] == [num] * (499 // num)
    assert sum(sizes) < 20 * 500


def conversations(*, num_rows: int = 4, num_groups: int = 3) -> Experience:
    """Rows of an agent, each of which continues half of the row before it; every group's rows part at other tokens."""
    generator, rows = torch.Generator().manual_seed(0), []
    for group in range(num_groups):
        ids: list[int] = []
        for _ in range(num_rows):
            ids = ids[: len(ids) // 2] + torch.randint(17, (6 + 3 * group,), generator=generator).tolist()
            rows.append((group, ids, range(len(ids) - 4, len(ids))))
    return experience(*rows)


@pytest.mark.parametrize("max_tokens", [1, 8, 128])
def test_hidden_states_do_not_depend_on_the_rows(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MAX_ROW_TOKENS", max_tokens)
    monkeypatch.setattr(shared_prefix, "CALL_OVERHEAD_TOKENS", 0)
    model, made = tiny_model(), conversations()
    whole = model.base_model(input_ids=made.token_ids, use_cache=False).last_hidden_state
    places: list[list[int]] = []
    at, plan = predicting_positions(made.loss_mask), shared_rows(Prefixes.of(made))
    for rows, columns, hidden in shared_hidden(model, made.token_ids, at, plan, lambda _, ids: {"input_ids": ids}):
        assert_close(hidden, whole[rows, columns])
        places += torch.stack([rows, columns], 1).tolist()
    assert sorted(places) == torch.stack(at, 1).tolist()


def in_float64(family: str) -> PreTrainedModel:
    """transformers' norms compute in float32 and would round differently in each layout; torch's keep the dtype."""
    model = tiny_model(family, dtype=torch.float64)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral with a window"])
def test_the_gradient_of_a_tree_is_that_of_its_rows_in_float64(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last hidden states: the head computes in float32. Segments start anywhere, so positions count."""
    monkeypatch.setattr(single, "MIN_SEGMENT_TOKENS", 1)
    model, made = in_float64(family), conversations()
    weights = torch.randn(*made.token_ids.shape, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for form in ("rectangles", "shared_rows", "packed"):
        if form == "shared_rows" and "window" in family:
            continue  # a mask of the whole row says nothing about windows
        parallel = SingleModel(model, LogprobSettings(), form=form)
        plan = parallel.choose(made)[1]
        num_tokens = sum(tree.num_tokens for trees in plan for tree in trees)
        assert num_tokens < 0.9 * int((made.lengths - 1).sum())
        assert bool(plan) == (form != "rectangles")
        ((rows, columns, hidden),) = parallel.states(made)
        (hidden.tanh() * weights[rows, columns, : hidden.shape[1]]).sum().backward()
        found[form] = gradients(model)
    largest = max(float(value.abs().max()) for value in found["rectangles"].values())
    for form, values in found.items():
        assert values.keys() == found["rectangles"].keys()
        for name, value in values.items():
            error = float((value - found["rectangles"][name]).abs().max())
            assert error <= 1e-10 * largest, (form, name, error / largest)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"), [(8, 4, "shared_rows"), (600, 100, "packed"), (2, 600, "rectangles")]
)
def test_the_cheapest_form_is_taken(prompt: int, completion: int, expected: str) -> None:
    """Four samples of each of four prompts; rows of a mask are short, and a prompt of two tokens is worth no call."""
    trained = range(prompt, prompt + completion)
    rows = [(group, [group] * prompt + [3 + sample] * completion, trained) for group in range(4) for sample in range(4)]
    form, _ = SingleModel(tiny_model(), LogprobSettings()).choose(experience(*rows))
    assert form == expected
