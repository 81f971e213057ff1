"""Sharing: what the ranks give each other in an iteration beside sums: rows of the rollout, outputs of model calls.

    rank 0 ── rows ──► who works on them        after the rollout, and again if a reward fails
    who inferred ── values … ──► who works on the same rows, where that is another rank
    rank 0 ── a judge's answers ──► who works on the rows

With one rank there is nothing to share. B trajectories, W ranks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.dataflow import REWARD, ModelCall, runs_beside
from lightrl.experience import ROLLOUT_FIELDS, Experience
from lightrl.strategies import Message, Ranks, SpreadExperience
from lightrl.strategies.row_exchange import (
    exchange,
    held_by,
    owned,
    scoring_shares,
    sent_to_work,
    work_of,
)
from lightrl.strategies.token_rows import TokenRows

if TYPE_CHECKING:
    from lightrl.module import RLModule


def holders_of(call: ModelCall, ranks: Ranks) -> Ranks:
    """The ranks that hold the model of a call."""
    return ranks.of_role(call.role or "policy")


def is_forward(call: ModelCall) -> bool:
    """Whether it is a forward of a model that is here, and no function or server."""
    return call.run is None and call.url is None


def spread(
    experience: SpreadExperience, module: RLModule, ranks: Ranks, *, seed: int, has_all: Collection[int]
) -> SpreadExperience:
    """The rows on the ranks that work on them, for the minibatches that `seed` gives. Collective.

    Args:
        experience: all rows; their tokens are on the ranks `has_all`, or where its `work` says.
        module: has the minibatches, and the roles of the ranks.
        ranks: all of the run.
        seed: of the minibatches.
        has_all: ranks with the tokens of all rows; none if an earlier `spread` has spread them.
    """
    graph = module.data_flow()
    minibatches = list(
        experience.minibatch_rows(module.num_minibatches, epochs=module.update_epochs, seed=seed, unit=module.loss_unit)
    )
    trained = list(dict.fromkeys(holders_of(call, ranks) for call in graph.of_kind("train")))
    infers = {holders_of(call, ranks) for call in graph.of_kind("infer") if is_forward(call)}
    work = work_of(
        experience,
        minibatches,
        trained=trained,
        scoring=[role for role in infers if role not in trained],
        num_first_pass=len(minibatches) // module.update_epochs,
        num_ranks=ranks.size,
        unit=module.loss_unit,
    )
    has = torch.zeros_like(work.rows) if experience.work is None else experience.work.clone()
    for rank in has_all:
        has[rank] = True
    needs = work.rows.clone()
    if _has_functions(module):  # on rank 0, where they read all rows
        needs[0] = True
    return sent_to_work(experience, work, has, needs, ranks)


def gathered(experience: SpreadExperience, names: Collection[str], ranks: Ranks) -> SpreadExperience:
    """With these fields of all rows on every rank. Collective.

    Raises:
        KeyError: if the Experience has no such field.
    """
    tokens = {name: experience.tokens[name] for name in names if name in experience.tokens}
    for name in set(names) - set(tokens):
        experience[name]
    has = experience.work
    assert has is not None
    return experience.with_tensors(exchange(tokens, experience.lengths, has, torch.ones_like(has), ranks))


def respread(
    experience: SpreadExperience, module: RLModule, ranks: Ranks, *, seed: int, is_fewer: bool, has_token_rewards: bool
) -> SpreadExperience:
    """`spread` again, after the rewards came. Collective.

    Args:
        experience: of the rows that have a reward; rewards per token are on rank 0.
        is_fewer: whether some rows had none: other minibatches follow, in which other ranks work on a row.
        has_token_rewards: whether there are rewards per token.
    """
    nowhere = TokenRows.nowhere(len(experience), torch.float32)
    rewards = experience.tokens.get("token_rewards", nowhere)
    rest = experience.without("token_rewards")
    if is_fewer:
        rest = spread(rest, module, ranks, seed=seed, has_all=[])
    if not has_token_rewards:
        return rest
    assert rest.work is not None
    has = held_by([range(len(rest))], [[0]], rest.work.shape)
    return rest.with_tensors(exchange({"token_rewards": rewards}, rest.lengths, has, rest.work, ranks))


def accepted(before: SpreadExperience, changed: Experience | None, ranks: Ranks) -> SpreadExperience:
    """`accept_changes` of what a hook returned on this rank, which is of `before.own`. Collective.

    Raises:
        ValueError: see accept_changes.
    """
    own: Any = before.own
    kept: Any = own if changed is None else accept_changes(own, changed)
    rows = before.own_rows.tolist()
    tensors = {name: TokenRows.of_padded(kept[name], before.lengths, rows) for name in ("loss_mask", "advantages")}
    counts = torch.zeros(len(before), dtype=torch.int64)
    counts[rows] = kept.loss_token_counts
    assert before.work is not None
    moved = exchange(tensors, before.lengths, owned(before), before.work, ranks)
    return before.with_tensors({**moved, "_loss_tokens": before.total(counts)})


def accept_changes(before: Experience, changed: Experience) -> Experience:
    """The Experience that an `on_experience_ready` hook returned, with its advantages masked.

    Raises:
        TypeError: if it is not an Experience with advantages.
        ValueError: if it differs from `before` in more than loss mask and advantages, or trains tokens that the loss
            mask left out.
    """
    if not isinstance(changed, Experience) or changed.advantages is None:
        raise TypeError(
            f"on_experience_ready must return None or an Experience with advantages, got {type(changed).__name__}. Use "
            "dataclasses.replace on the one it was given."
        )
    old, new = before.tensors(), changed.tensors()
    for name in sorted((old.keys() | new.keys()) - {"loss_mask", "advantages"}):
        if name not in new or name not in old or not (new[name] is old[name] or torch.equal(new[name], old[name])):
            raise ValueError(
                f"on_experience_ready changed {name!r}, but may change only loss_mask and advantages. Change what the "
                "reward or the workflow returns instead."
            )
    num_added = int((changed.loss_mask & ~before.loss_mask).sum())
    if num_added:
        raise ValueError(
            f"on_experience_ready added {num_added} tokens to loss_mask, but may only remove some: the others have no "
            "logprobs. Return loss_mask & your_mask."
        )
    return replace(changed, advantages=torch.where(changed.loss_mask, changed.advantages, 0.0))


def _has_functions(module: RLModule) -> bool:
    """Whether functions or servers read the iteration's trajectories beside the trainer, after the reward."""
    return any(runs_beside(call) for call in module.data_flow().of_kind("infer") if call.name != REWARD)


class Sharing:
    """Gives every rank what it needs of each model call's outputs.

    Args:
        experience: spread over the ranks.
        module: has the calls.
        ranks: all of the run.
    """

    def __init__(self, experience: SpreadExperience, module: RLModule, ranks: Ranks) -> None:
        self.experience = experience
        self.module = module
        self.ranks = ranks

    def share(self, call: ModelCall, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Collective: the call's outputs of all rows if they are [B], else of the rows that this rank works on."""
        ranks = self.ranks
        with ranks.phase(f"score: {call.name}", has_own_deadline=runs_beside(call)):
            if call.on_all_ranks:
                return self._advantages(outputs)
            shared: dict[str, Any] = {}
            for name, (dtype, shape) in self._kinds(call, outputs).items():
                if shape is not None:
                    tokens = outputs.get(name, TokenRows.nowhere(len(self.experience), dtype, shape))
                    shared[name] = self._moved(call, name, tokens)
                elif is_forward(call):
                    shared[name] = self._joined(holders_of(call, ranks), dtype, outputs.get(name))
                else:
                    shared |= ranks.broadcast_tensors({name: outputs[name]} if ranks.is_main else {})
            return shared

    def _kinds(
        self, call: ModelCall, outputs: Mapping[str, Any]
    ) -> dict[str, tuple[torch.dtype, Sequence[int] | None]]:
        """Of each output its dtype, and if it is per token the shape of one token's, from a rank that ran the call."""
        source = holders_of(call, self.ranks).first_rank if is_forward(call) else 0
        if self.ranks.rank == source:
            found = [
                (name, str((value.empty if isinstance(value, TokenRows) else value).dtype).removeprefix("torch."),
                 list(value.empty.shape[1:]) if isinstance(value, TokenRows) else None)
                for name, value in outputs.items()
            ]  # fmt: skip
            self.ranks.send(Message("data", payload=json.dumps(found).encode()), source)
        else:
            found = json.loads(self.ranks.receive(source).payload)
        return {name: (getattr(torch, dtype), shape) for name, dtype, shape in found}

    def _joined(self, holders: Ranks, dtype: torch.dtype, value: Tensor | None) -> Tensor:
        """[B] of all rows, from the role's ranks, each with those of its share."""
        counts = value is not None and self.ranks.rank == holders.dp_members[holders.dp_rank][0]
        zeros = torch.zeros(len(self.experience), dtype=dtype)
        return self.ranks.total(value if counts and value is not None else zeros)

    def _moved(self, call: ModelCall, name: str, tokens: TokenRows) -> TokenRows:
        """An output per token, on all ranks that work on the rows; on rank 0 of all rows if a function reads it."""
        experience = self.experience
        assert experience.work is not None
        shares: Sequence[Sequence[int]] = [range(len(experience))]
        members: Sequence[Sequence[int]] = [[0]]
        if is_forward(call):
            holders = holders_of(call, self.ranks)
            shares, members = scoring_shares(experience, holders, self.module.loss_unit), holders.dp_members
        needs = experience.work.clone()
        read_on_rank_0 = {key for other in self.module.data_flow().calls if runs_beside(other) for key in other.inputs}
        if name in read_on_rank_0 or not is_forward(call):  # and the trajectory log keeps a judge's answers
            needs[0] = True
        has = held_by(shares, members, needs.shape)
        return exchange({name: tokens}, experience.lengths, has, needs, self.ranks)[name]

    def _advantages(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Advantages per token go from who answers for a row to all who work on it."""
        experience = self.experience
        assert experience.work is not None
        tokens = {
            name: value
            for name, value in outputs.items()
            if isinstance(value, TokenRows) and name not in ROLLOUT_FIELDS
        }
        has = owned(experience)
        if self.module.advantage_inputs:  # every rank has computed all rows
            has = torch.ones_like(has)
        return {**outputs, **exchange(tokens, experience.lengths, has, experience.work, self.ranks)}
