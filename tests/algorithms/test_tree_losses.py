"""Rollouts of several conversations: a session cut into rows trains as the uncut one, a subagent as worked by hand."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_cases import (
    advantages_of,
    assert_same,
    every_algorithm,
    every_reduction,
    experience_for,
    make_module,
    minibatch_gradient,
)
from tiny import slow_outputs, with_supports
from torch import Tensor

from lightrl.columns import EVERY_TOKEN, support_ends
from lightrl.experience import Experience, row_tensors
from lightrl.loops.update import MinibatchLoss, values_of
from lightrl.strategies import LogprobSettings, ShardedExperience, SingleModel
from lightrl.strategies.sharded_experience.placement import Microbatches, lengths_of
from lightrl.strategies.single import Form
from lightrl.trajectory import Prompt, Trajectory

FORMS: list[Form] = ["rectangles", "shared_rows", "packed"]


def cut_at(experience: Experience, turn: int) -> Experience:
    """Every trajectory's request `turn` begins a conversation of its own, which repeats all tokens before it."""
    mask, width = experience.loss_mask, experience.token_ids.shape[1]
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    places: list[list[int]] = []
    copied: list[list[bool]] = []
    gaps: list[list[int]] = []
    for row, length in enumerate(experience.lengths.tolist()):
        # The row ends with the turn before; the next request adds what was read since.
        request = int(begins[row].nonzero()[turn, 0])
        end = int(mask[row, :request].nonzero()[-1, 0]) + 1
        padding = [0] * (width - end)
        places.append([*range(end), *range(length), *padding][: 2 * width])
        copied.append([*[False] * end, *[True] * end, *[False] * (length - end)])
        gaps.append([*[0] * end, end, *[0] * (length - 1)])
    longest = max(map(len, copied))

    def padded(rows: list[Any]) -> Tensor:
        return torch.tensor([[*row[:longest], *[0] * (longest - len(row))] for row in rows])

    lengths = torch.tensor([len(row) for row in copied])
    is_token = torch.arange(longest) < lengths[:, None]
    index, is_trained = padded(places), is_token & ~padded(copied).bool()
    changed: dict[str, Tensor] = {"lengths": lengths, "gaps": padded(gaps)}
    for name, value in experience.tensors().items():
        if value.dim() >= 2:
            picked = value[torch.arange(len(index))[:, None], index]
            keep = is_token if name == "token_ids" else is_trained
            fill = -1 if name == "weight_versions" else 0
            kept = keep[(...,) + (None,) * (value.dim() - 2)]
            changed[name] = torch.where(kept, picked, picked.new_full((), fill))
    if experience.supports is not None:
        parts = []
        for codes, place, copy in zip(experience.row_codes("supports"), places, copied, strict=True):
            bounds = [0, *support_ends(codes.numpy()).tolist()]
            each = [codes[start:end] for start, end in itertools.pairwise(bounds)]
            kept = zip(place[: len(copy)], copy, strict=True)
            parts.append(
                torch.cat(
                    [
                        torch.tensor([*EVERY_TOKEN], dtype=torch.uint8) if is_copy else each[index]
                        for index, is_copy in kept
                    ]
                )
            )
        changed |= row_tensors("supports", parts)
    return Experience.of_tensors({**experience.tensors(), **changed})


def scored(module: Any, experience: Experience) -> Experience:
    """With the module's own advantages, on the loss tokens."""
    found = module.advantages(experience)
    tensors = found if isinstance(found, dict) else {"advantages": found}
    mask = experience.loss_mask
    tensors = {
        name: value if value.dim() == 2 else value[:, None].expand(mask.shape) for name, value in tensors.items()
    }
    return experience.with_tensors({name: torch.where(mask, value, 0.0) for name, value in tensors.items()})


@every_reduction
@every_algorithm
def test_a_session_cut_into_rows_trains_as_the_uncut_one(algorithm: str, reduction: str) -> None:
    module = make_module(algorithm, loss_reduction=reduction)
    whole = experience_for(algorithm, num_turns=3, completion_tokens=(1, 4))
    expected = minibatch_gradient(module, scored(module, whole))
    for turn in (1, 2):
        rows = cut_at(whole, turn)
        assert rows.loss_token_counts.tolist() == whole.loss_token_counts.tolist()
        found = minibatch_gradient(module, scored(module, rows), microbatch_tokens=60)
        assert_same(found, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_supports", [False, True], ids=["all tokens", "supports"])
def test_rows_have_the_logprobs_of_their_conversations_in_every_form(form: Form, has_supports: bool) -> None:
    whole = experience_for("GRPO", num_turns=2)
    if has_supports:
        whole = with_supports(whole)[0]
    tree = cut_at(whole, 1)
    model = SingleModel(make_module().policy, LogprobSettings(min_new_tokens=1, stop_token_ids=(2, 5)), form=form)
    expected, found = (next(iter(model.forward([part]))) for part in (whole, tree))
    for name in ("logprobs", "entropy"):
        actual = getattr(found, name)
        torch.testing.assert_close(actual[tree.loss_mask], getattr(expected, name)[whole.loss_mask])
        assert not actual[~tree.loss_mask].any()


def tree_of(group: int, sample: int, reward: float) -> Trajectory:
    """Prompt 3 4 with completion 5 6; a subagent's 7 with 8 9 10; then 11, read after 6, with 12."""
    said = {2, 3, 5, 6, 7, 9}
    num = 10
    return Trajectory(
        prompt=Prompt(id=str(group), token_ids=[3, 4]), group_id=group, sample=sample,
        token_ids=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], columns={"gaps": [0, 0, 0, 0, 4, 0, 0, 0, 4, 0]},
        loss_mask=[index in said for index in range(num)],
        behavior_logprobs=[-0.5 - 0.3 * index if index in said else 0.0 for index in range(num)],
        weight_versions=[4 if index in said else -1 for index in range(num)],
        completion_ids=[12], completion="", reward=reward,
    )  # fmt: skip


def line_of(group: int, sample: int, reward: float) -> Trajectory:
    return Trajectory(
        prompt=Prompt(id=str(group), token_ids=[3, 4]), group_id=group, sample=sample, token_ids=[3, 4, 6, 5],
        loss_mask=[False, False, True, True], behavior_logprobs=[0.0, 0.0, -1.0, -2.0], weight_versions=[-1, -1, 4, 4],
        completion_ids=[6, 5], completion="", reward=reward,
    )  # fmt: skip


def conversation(token_ids: list[int], trained: list[int]) -> Experience:
    """A row of its own for the slow logprobs."""
    mask = [index in trained for index in range(len(token_ids))]
    item = replace(line_of(0, 0, 0.0), token_ids=token_ids, loss_mask=mask, completion_ids=token_ids[-1:],
                   behavior_logprobs=[0.0] * len(mask), weight_versions=[4] * len(mask))  # fmt: skip
    return Experience.from_trajectories([item])


@pytest.mark.parametrize("weights", [None, (0.5, 2.0)], ids=["each token alike", "rows with weights"])
@pytest.mark.parametrize("reduction", ["token", "sequence", "fixed"])
def test_a_session_with_a_subagent_has_the_loss_worked_by_hand(reduction: str, weights: Any) -> None:
    module = make_module(loss_reduction=reduction, clip_low=1.0, clip_high=math.inf)
    if weights is not None:  # the subagent's row is the first
        module.row_weights = lambda row_tokens, trees: torch.where(  # type: ignore[method-assign]
            trees == 0, torch.tensor([*weights, 1.0]), 1.0
        )
    experience = Experience.from_trajectories([tree_of(0, 0, 1.0), line_of(0, 1, 0.0)])
    advantages = advantages_of(module, experience)
    assert advantages.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)  # two rollouts, not three rows
    found, metrics = minibatch_gradient(module, scored(module, experience))

    slow = [
        slow_outputs(module.policy, conversation(ids, trained), temperature=0.9)[0][0, trained]
        for ids, trained in (([3, 4, 5, 6, 11, 12], [2, 3, 5]), ([7, 8, 9, 10], [1, 2, 3]), ([3, 4, 6, 5], [2, 3]))
    ]
    logprobs = [torch.cat([slow[0][:2], slow[1], slow[0][2:]]), slow[2]]
    of_row = [1, 1, 0, 0, 0, 1]
    factors = [torch.tensor([1.0 if weights is None else weights[row] for row in of_row]), torch.ones(2)]
    losses = [
        -factor * advantage * (now - before[mask]).exp()
        for now, before, mask, advantage, factor in zip(
            logprobs, experience.behavior_logprobs, experience.loss_mask, advantages, factors, strict=True
        )
    ]
    total = {
        "token": torch.cat(losses).sum() / 8,
        "sequence": (losses[0].sum() / 6 + losses[1].sum() / 2) / 2,
        "fixed": torch.cat(losses).sum() / (2 * 8),
    }[reduction]
    total.backward()
    expected = {f"policy.{name}": value.grad for name, value in module.policy.named_parameters()}
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_row_weights_get_each_rows_tokens_that_train_and_must_fit_them() -> None:
    module = make_module()
    seen: list[tuple[list[int], list[int]]] = []

    def row_weights(row_tokens: Tensor, trees: Tensor) -> Tensor | None:
        seen.append((row_tokens.tolist(), trees.tolist()))
        return row_tokens[:1].float() if len(seen) > 1 else None

    module.row_weights = row_weights  # type: ignore[method-assign]
    minibatch = scored(module, Experience.from_trajectories([tree_of(0, 0, 1.0), line_of(0, 1, 0.0)]))
    minibatch_gradient(module, minibatch)
    assert seen == [([3, 3, 2], [0, 0, 1])]
    with pytest.raises(ValueError, match=r"GRPO.row_weights must return \[R\] = \(3,\), got \(1,\)"):
        minibatch_gradient(module, minibatch)


def test_rows_that_count_alike_as_the_docs_show() -> None:
    docs = (Path(__file__).parents[2] / "docs/train-an-agent.md").read_text()
    namespace: dict[str, Any] = {"torch": torch}
    exec(docs[docs.index("def row_weights") :].partition("```")[0], namespace)
    found = namespace["row_weights"](None, torch.tensor([6, 2, 1, 5]), torch.tensor([0, 0, 0, 1]))
    assert found.tolist() == pytest.approx([9 / 18, 9 / 6, 9 / 3, 1])


def test_a_microbatch_counts_the_tokens_that_the_model_reads() -> None:
    experience = Experience.from_trajectories([tree_of(0, 0, 1.0), line_of(0, 1, 0.0), line_of(1, 0, 0.0)])
    assert experience.forward_tokens.tolist() == [10, 4, 4]
    repeating = replace(tree_of(0, 0, 1.0), columns={"gaps": [0, 0, 0, 0, 1, 0, 0, 0, 4, 0]})
    assert Experience.from_trajectories([repeating]).forward_tokens.tolist() == [3 + 4 + 6]
    assert [len(part) for part in experience.microbatch_rows(8)[1]] == [1, 2]


def test_the_rows_of_a_microbatch_are_counted_alike_before_it_is_dense() -> None:
    experience = Experience.from_trajectories([tree_of(0, 0, 1.0), line_of(0, 1, 0.0), line_of(1, 0, 0.0)])
    for of_all, expected in ((experience, [[4, 6, 4], [4], [2]]), (experience.without(["gaps"]), [[10, 4], [4], [2]])):
        parts = Microbatches(ShardedExperience.of(of_all), [[0, 2], [1], []], torch.device("cpu"))
        assert lengths_of(parts) == lengths_of(list(parts)) == expected


@pytest.mark.parametrize(
    ("gaps", "match"),
    [
        pytest.param([0, 0, 0, -1, 0, 0, 0, 0, 0, 0], "has invalid gaps. Each must be from 0", id="negative"),
        pytest.param([0, 0, 3, 0, 0, 0, 0, 0, 0, 0], "has invalid gaps. Each must be from 0", id="before the start"),
        pytest.param([0, 0, 0, 0, 4, 5, 0, 0, 4, 0], "trains on its first token", id="a first token that trains"),
        pytest.param([0, 0], "one entry of gaps for each of its 10", id="too few"),
    ],
)
def test_gaps_that_make_no_tree_are_refused(gaps: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Experience.from_trajectories([replace(tree_of(0, 0, 1.0), columns={"gaps": gaps})])


def test_a_trajectory_metric_and_a_loss_per_trajectory_count_the_rollout_once() -> None:
    module = make_module(loss_reduction="sequence")
    module.loss = lambda experience, outputs: {  # type: ignore[method-assign]
        "loss": outputs.logprobs.sum(1),
        "num_rollouts": torch.ones(len(experience)),
        "long": experience.lengths.float(),
    }
    minibatch = scored(module, Experience.from_trajectories([tree_of(0, 0, 1.0), line_of(0, 1, 0.0)]))
    losses = MinibatchLoss(module, minibatch)
    SingleModel(module.policy, LogprobSettings()).forward_backward([minibatch], losses, Tensor.backward)
    values = values_of(losses.parts)
    assert (values["num_rollouts"], values["long"]) == (2, 7)
