"""Pipeline schedules: plans the order in which each rank runs its stages and microbatches, and executes the plan.

A stage is a slice of the model; stage s is on pipeline rank s mod p. A plan is a list of slots. In each slot every rank
runs at most one action, the forward or backward of one microbatch through one stage. Then the slot's results are sent
to the neighbors that need them:

    1F1B, p = 2, m = 3    rank 0   F0 F1 B0 F2 B1 -- B2        F: forward, B: backward of a microbatch
                          rank 1   -- F0 B0 F1 B1 F2 B2 ...

Every rank knows all transfers, so no shapes are sent. There may be any number of microbatches, of any sizes, and a rank
holds only the activations that the schedule has in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Action:
    """The forward or backward of one microbatch through one stage."""

    is_backward: bool
    stage: int
    microbatch: int

    @property
    def previous(self) -> Action:
        """The neighboring stage's action whose result this one needs; the stages at the ends lack one neighbor."""
        return Action(self.is_backward, self.stage + (1 if self.is_backward else -1), self.microbatch)


# The action of each rank in a slot.
Slot = list[Action | None]

# (stage, microbatch) → input and output of a forward, with their autograd graph.
HeldActivations = dict[tuple[int, int], tuple[Tensor | None, Tensor]]


def max_in_flight(rank: int, num_ranks: int, stages_per_rank: int) -> int:
    """Returns the maximum number of microbatches, counted per stage, whose activations a rank holds at a time.

    Source: 1F1B, https://arxiv.org/abs/1806.03377; interleaved, https://arxiv.org/abs/2104.04473.
    """
    if stages_per_rank == 1:
        return num_ranks - rank
    return 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1


def plan(num_ranks: int, stages_per_rank: int, num_microbatches: int, *, has_backward: bool = True) -> list[Slot]:
    """Plans 1F1B, or Interleaved1F1B if a rank has several stages.

    A rank runs the forwards of p microbatches through its first stage, then through its second, and so on.

    Args:
        num_ranks: p, the number of pipeline ranks.
        stages_per_rank: v; the stages of rank r are r, r + p, r + 2p …
        num_microbatches: m.
        has_backward: False plans only forwards, for a pass without gradients.
    """
    num_stages = num_ranks * stages_per_rank
    # Interleaving needs full rounds of p microbatches; dummies fill the last round, and are removed later.
    planned = num_microbatches if stages_per_rank == 1 else num_microbatches + -num_microbatches % num_ranks
    orders = [_order(rank, num_ranks, stages_per_rank, planned, has_backward) for rank in range(num_ranks)]
    done: set[Action] = set()
    slots: list[Slot] = []

    def next_action(rank: int) -> Action | None:
        if not orders[rank]:
            return None
        previous = orders[rank][0].previous
        is_ready = previous in done or not 0 <= previous.stage < num_stages
        return orders[rank].popleft() if is_ready else None

    while any(orders):
        slot = [next_action(rank) for rank in range(num_ranks)]
        assert any(slot), f"the schedule is stuck: {num_ranks} ranks, {stages_per_rank} stages, {num_microbatches}"
        done.update(action for action in slot if action is not None)
        kept = [None if action is None or action.microbatch >= num_microbatches else action for action in slot]
        if any(kept):
            slots.append(kept)
    return slots


def _order(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, has_backward: bool) -> deque[Action]:
    """Orders a rank's actions: forwards up to the limit in flight, then alternating backwards and forwards."""
    chunks = range(stages_per_rank)

    def all_of(is_backward: bool) -> deque[Action]:
        return deque(
            Action(is_backward, chunk * num_ranks + rank, microbatch)
            for start in range(0, num_microbatches, num_ranks)
            for chunk in (reversed(chunks) if is_backward else chunks)
            for microbatch in range(start, min(start + num_ranks, num_microbatches))
        )

    forwards = all_of(False)
    if not has_backward:
        return forwards
    backwards = all_of(True)
    order: deque[Action] = deque()
    in_flight = 0
    limit = max_in_flight(rank, num_ranks, stages_per_rank)
    while backwards:
        if forwards and in_flight < limit:
            order.append(forwards.popleft())
            in_flight += 1
        else:
            order.append(backwards.popleft())
            in_flight -= 1
    return order


@dataclass
class _Transfers:
    """A rank's pending sends and receives of one slot."""

    works: list[dist.Work]
    sent: list[Tensor]  # kept until they have arrived

    def wait(self) -> None:
        while self.works:  # gloo hangs if a receive is awaited twice
            self.works.pop().wait()
        self.sent.clear()


@dataclass
class Pipeline:
    """Executes plans on one rank of a pipeline.

    Args:
        group: process group of the pp axis; None for one rank.
        num_ranks, stages_per_rank: p and v of `plan`.
    """

    group: dist.ProcessGroup | None
    num_ranks: int
    stages_per_rank: int
    device: torch.device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank

    def run(
        self,
        num_microbatches: int,
        forward: Callable[[int, int, Tensor | None], Tensor] | None,
        backward: Callable[[int, int, Tensor, Tensor | None, bool], None] | None,
        activation: Callable[[int], tuple[torch.Size, torch.dtype]],
        *,
        held: HeldActivations | None = None,
    ) -> None:
        """Runs all microbatches through all stages, in the plan's order.

        Args:
            num_microbatches: the same on all ranks in the pipeline.
            forward: (stage, microbatch, input from the previous stage) → input of the next stage; for the last stage,
                the output that `backward` gets.
            backward: gets stage, microbatch, output, its gradient (None for the last stage), and whether this is the
                stage's last backward; None for a pass without gradients.
            activation: microbatch → shape and dtype of the tensors that stages send each other.
            held: activations that a call without `backward` keeps for a later call without `forward`.
        """
        is_both = forward is not None and backward is not None
        slots = plan(self.num_ranks, self.stages_per_rank, num_microbatches, has_backward=is_both)
        if forward is None:  # the plan of the forwards, reversed
            slots = [[action and replace(action, is_backward=True) for action in slot] for slot in reversed(slots)]
        has_gradients = backward is not None or held is not None
        held = {} if held is None else held
        received: dict[Action, tuple[Tensor, _Transfers]] = {}
        sending: deque[_Transfers] = deque()
        num_backwards = dict.fromkeys(range(self.num_stages), 0)
        for slot in slots:
            action = slot[self.rank]
            result: Tensor | None = None
            if action is not None and not action.is_backward and forward is not None:
                hidden = self._take(received, action)
                if hidden is not None and has_gradients:
                    hidden.requires_grad_()
                output = forward(action.stage, action.microbatch, hidden)
                if has_gradients:
                    held[action.stage, action.microbatch] = hidden, output
                result = output.detach()
            elif action is not None and backward is not None:
                hidden, output = held.pop((action.stage, action.microbatch))
                gradient = self._take(received, action)
                num_backwards[action.stage] += 1
                is_last = num_backwards[action.stage] == num_microbatches
                if output.requires_grad:  # False for a first stage with only frozen parameters
                    backward(action.stage, action.microbatch, output, gradient, is_last)
                result = None if hidden is None else hidden.grad
            if self.num_ranks > 1:
                self._exchange(slot, result, received, sending, activation)
        while sending:
            sending.popleft().wait()

    def _take(self, received: dict[Action, tuple[Tensor, _Transfers]], action: Action) -> Tensor | None:
        """Returns the tensor that the neighboring stage sent for this action; None if there is no such stage."""
        if not 0 <= action.previous.stage < self.num_stages:
            return None
        tensor, transfers = received.pop(action.previous)
        transfers.wait()
        return tensor

    def _exchange(
        self,
        slot: Slot,
        result: Tensor | None,
        received: dict[Action, tuple[Tensor, _Transfers]],
        sending: deque[_Transfers],
        activation: Callable[[int], tuple[torch.Size, torch.dtype]],
    ) -> None:
        """Starts this rank's transfers in the slot, in the same order on all ranks."""
        operations: list[dist.P2POp] = []
        sent: list[Tensor] = []
        arriving: list[tuple[Action, Tensor]] = []
        for source, action in enumerate(slot):
            if action is None:
                continue
            to_stage = action.stage + (-1 if action.is_backward else 1)
            if not 0 <= to_stage < self.num_stages:
                continue
            target = to_stage % self.num_ranks
            if source == self.rank:
                assert result is not None
                sent.append(result.contiguous())
                operations.append(dist.P2POp(dist.isend, sent[-1], group=self.group, group_peer=target))
            elif target == self.rank:
                shape, dtype = activation(action.microbatch)
                arriving.append((action, torch.empty(shape, dtype=dtype, device=self.device)))
                operations.append(dist.P2POp(dist.irecv, arriving[-1][1], group=self.group, group_peer=source))
        if not operations:
            return
        transfers = _Transfers(dist.batch_isend_irecv(operations), sent)
        for action, tensor in arriving:
            received[action] = tensor, transfers
        sending.append(transfers)
        if len(sending) > 2:  # limits the memory of tensors that have not arrived yet
            sending.popleft().wait()
