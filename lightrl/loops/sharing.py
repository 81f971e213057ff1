"""Functions to exchange rows, rewards and model call outputs between ranks during an iteration.

    rank 0 ── rows ──► the ranks that work on them        once, after the rollout
    inferring ranks ── values … ──► other ranks that work on the same rows
    rank 0 ── function outputs, token rewards ──► the ranks that work on the rows

B trajectories, W ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightrl.checks.printable import count_text
from lightrl.dataflow import REWARD, ModelCall, runs_in_thread
from lightrl.experience import Experience, rollout_fields
from lightrl.module import RLModule
from lightrl.strategies import Ranks, ShardedExperience
from lightrl.strategies.sharded_experience.exchange import exchange
from lightrl.strategies.sharded_experience.experience import TokenRows
from lightrl.strategies.sharded_experience.placement import place_rows, rows_by_rank
from lightrl.trajectory import Trajectory


def holders_of(call: ModelCall, ranks: Ranks) -> Ranks:
    """Returns the ranks that have the call's model."""
    return ranks.of_role(call.role or "policy")


def is_forward(call: ModelCall) -> bool:
    """Whether the call is a forward pass of one of the trainer's models, not a function or server."""
    return call.run is None and call.url is None


def shard(
    experience: ShardedExperience, module: RLModule, ranks: Ranks, *, seed: int, has_all: Collection[int]
) -> ShardedExperience:
    """Assigns the rows to minibatches and sends their tokens to the ranks that work on them. Collective.

    Args:
        experience: all rows, with tokens on the ranks `has_all`.
        seed: determines the minibatches.
    """
    graph = module.data_flow()
    calls = [*graph.of_kind("train"), *(call for call in graph.of_kind("infer") if is_forward(call))]
    placed = place_rows(
        experience,
        num_minibatches=module.num_minibatches,
        seed=seed,
        unit=module.loss_unit,
        roles=list(dict.fromkeys(holders_of(call, ranks) for call in calls)),
        ranks=ranks,
    )
    if ranks.size == 1:
        return placed
    reads_all = any(runs_in_thread(call) for call in graph.of_kind("infer") if call.name != REWARD)
    has = all_rows_of(placed, has_all)
    needs = working_rows(placed)
    needs[0] |= reads_all  # rank 0 calls functions and servers
    return placed.with_tensors(exchange(placed, placed.tokens, has, needs))


def add_rewards(experience: ShardedExperience, trajectories: Sequence[Trajectory]) -> ShardedExperience:
    """Sets the rewards of all rows; rank 0 sends rewards per token. Collective."""
    rewarded = experience.with_rewards(trajectories)
    tokens, ranks = rewarded.tokens.get("token_rewards"), experience.ranks
    if ranks.size == 1 or not ranks.max_each([int(tokens is not None)])[0]:
        return rewarded
    tokens = tokens or nowhere(rewarded, torch.empty(0, dtype=torch.float32))
    sent = exchange(rewarded, {"token_rewards": tokens}, all_rows_of(rewarded, [0]), working_rows(rewarded))
    return rewarded.with_tensors(sent)


def gather(experience: ShardedExperience, names: Collection[str]) -> ShardedExperience:
    """Sends these fields of all rows to every rank; raises KeyError if a field does not exist. Collective."""
    tokens = {name: experience.tokens[name] for name in names if name in experience.tokens}
    for name in set(names) - set(tokens):
        experience[name]
    has = working_rows(experience)
    return experience.with_tensors(exchange(experience, tokens, has, torch.ones_like(has)))


def accept(before: ShardedExperience, local: Experience, changed: Experience | None) -> ShardedExperience:
    """Returns `before` with an `on_experience_ready` hook's changes on this rank. Collective; see `accept_changes`.

    Args:
        before, local: the Experience passed to the hook, and `before.local`.
        changed: the hook's result, which may have a different loss mask or advantages; None means no change.
    """
    accepted = local if changed is None else accept_changes(local, changed)
    rows = before.local_rows.tolist()
    tensors = {name: TokenRows.of_padded(accepted[name], before.lengths, rows) for name in ("loss_mask", "advantages")}
    counts = torch.zeros(len(before), dtype=torch.int64)
    counts[rows] = accepted.loss_token_counts
    if before.ranks.size > 1:
        tensors = exchange(before, tensors, _owned(before), working_rows(before))
    return before.with_tensors({**tensors, "_loss_tokens": before.total(counts)})


def accept_changes(before: Experience, changed: Experience) -> Experience:
    """Checks the Experience that an `on_experience_ready` hook returned, and returns it with masked advantages.

    Raises:
        TypeError: if it is not an Experience with advantages.
        ValueError: if it changes anything but the loss mask and advantages, or adds tokens to the loss mask.
    """
    if not isinstance(changed, Experience) or changed.advantages is None:
        raise TypeError(
            f"on_experience_ready must return None or an Experience with advantages, got {type(changed).__name__}. Use "
            "dataclasses.replace on experience.local."
        )
    old, new = before.tensors(), changed.tensors()
    for name in sorted((old.keys() | new.keys()) - {"loss_mask", "advantages"}):
        if name not in new or name not in old or not (new[name] is old[name] or torch.equal(new[name], old[name])):
            raise ValueError(
                f"on_experience_ready changed {name!r}, but may change only loss_mask and advantages. Change what the "
                "reward or workflow returns instead."
            )
    num_added = int((changed.loss_mask & ~before.loss_mask).sum())
    if num_added:
        raise ValueError(
            f"on_experience_ready added {count_text(num_added, 'token')} to loss_mask, but may only remove "
            "tokens, because added tokens have no logprobs. Return loss_mask & your_mask."
        )
    return replace(changed, advantages=torch.where(changed.loss_mask, changed.advantages, 0.0))


def share_outputs(
    experience: ShardedExperience, module: RLModule, call: ModelCall, outputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Gives every rank a call's outputs: [B] for all rows, per token for rows that the rank works on. Collective.

    The call ran on rank 0, or on each rank of its role for a share of the rows. On all other ranks, `outputs` is empty.
    """
    ranks, needs = experience.ranks, working_rows(experience)
    with ranks.phase(f"score: {call.name}", has_own_deadline=runs_in_thread(call)):
        if call.on_all_ranks:  # advantages: from each row's owner, or already on every rank with `advantage_inputs`
            tokens = {name: value for name, value in outputs.items() if isinstance(value, TokenRows)}
            tokens = {name: value for name, value in tokens.items() if name not in rollout_fields()}
            has = torch.ones_like(needs) if module.advantage_inputs else _owned(experience)
            return {**outputs, **exchange(experience, tokens, has, needs)}
        holders = holders_of(call, ranks) if is_forward(call) else None  # None: the call ran on rank 0
        has = all_rows_of(experience, [0]) if holders is None else rows_by_rank(experience, holders)
        source = 0 if holders is None else holders.first_rank
        # `source` sends the outputs' names, dtypes and shapes to the other ranks: a per-token output as an empty
        # tensor, and a [B] output with the values that `source` has.
        from_source = {
            name: torch.from_numpy(value.empty.copy()) if isinstance(value, TokenRows) else value
            for name, value in (outputs if ranks.rank == source else {}).items()
        }
        from_source = ranks.broadcast_tensors(from_source, source=source)
        read_on_rank_0 = {key for other in module.data_flow().calls if runs_in_thread(other) for key in other.inputs}
        shared: dict[str, Any] = {}
        for name, sent in sorted(from_source.items()):
            if not len(sent):  # per token
                tokens = {name: outputs[name] if name in outputs else nowhere(experience, sent)}
                needed = needs.clone()
                needed[0] |= name in read_on_rank_0 or holders is None  # the trajectory log records function outputs
                shared |= exchange(experience, tokens, has, needed)
            elif holders is None:  # [B], complete on rank 0
                shared[name] = sent
            else:  # [B]: a dp rank has 0 in other dp ranks' rows, so a sum over one member of each has all values
                is_sender = holders.is_here and ranks.rank == holders.dp_members[holders.dp_rank][0]
                shared[name] = ranks.total(outputs[name] if is_sender else torch.zeros_like(sent))
        return shared


def working_rows(experience: ShardedExperience) -> Tensor:
    """Returns the rows that each rank works on, bool [W, B]."""
    return experience.rows["_work"].T.clone()


def _owned(experience: ShardedExperience) -> Tensor:
    """Returns the rows that each rank owns, bool [W, B]."""
    return torch.arange(experience.ranks.size)[:, None] == experience.rows["_owner"]


def all_rows_of(experience: ShardedExperience, ranks: Collection[int]) -> Tensor:
    """Returns bool [W, B]: True for all rows of these ranks, False for all other ranks."""
    has = torch.zeros(experience.ranks.size, len(experience), dtype=torch.bool)
    has[list(ranks)] = True
    return has


def nowhere(experience: ShardedExperience, empty: Tensor) -> TokenRows:
    """Returns a field whose rows are all on other ranks."""
    return TokenRows([None] * len(experience), empty.numpy())
