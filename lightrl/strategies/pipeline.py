"""Pipeline schedules: who computes what when, decided on paper, and the exchange that follows such a plan.

A stage is a slice of the model; stage s lives on pipeline rank s mod p. A plan is a list of slots. In each slot every
rank does at most one action, the forward or the backward of one microbatch through one stage, and then all that was
made in the slot goes to the neighbors that need it:

    1F1B, p = 2, m = 3    rank 0   F0 F1 B0 F2 B1 -- B2        F: forward, B: backward of a microbatch
                          rank 1   -- F0 B0 F1 B1 F2 B2 ...

So every rank knows every transfer: no shapes travel, any number of microbatches of any sizes will do, and a rank holds
no more activations than the schedule lets it have in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Action:
    """One microbatch through one stage."""

    is_backward: bool
    stage: int
    microbatch: int


# For each rank, the action of this slot.
Slot = list[Action | None]


def max_in_flight(rank: int, num_ranks: int, stages_per_rank: int) -> int:
    """Microbatch activations, one for each of its stages, that a rank may hold at a time.

    Source: 1F1B, https://arxiv.org/abs/1806.03377; interleaved, https://arxiv.org/abs/2104.04473.
    """
    if stages_per_rank == 1:
        return num_ranks - rank
    return 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks + 1


def plan(num_ranks: int, stages_per_rank: int, num_microbatches: int, *, has_backward: bool = True) -> list[Slot]:
    """1F1B, or Interleaved1F1B where a rank has several stages; forwards alone without a backward.

    Forwards go depth first, p microbatches through a rank's first stage, then through its second.

    Args:
        num_ranks: p, of the pipeline.
        stages_per_rank: v; the stages of rank r are r, r + p, r + 2p …
        num_microbatches: m, any number.
        has_backward: False for a pass without gradients.
    """
    num_stages = num_ranks * stages_per_rank
    # Interleaving needs whole rounds of p microbatches: those that are not there are planned and left out.
    planned = num_microbatches if stages_per_rank == 1 else num_microbatches + -num_microbatches % num_ranks
    orders = [_order(rank, num_ranks, stages_per_rank, planned, has_backward) for rank in range(num_ranks)]
    done: set[Action] = set()
    slots: list[Slot] = []

    def next_action(rank: int) -> Action | None:
        if not orders[rank]:
            return None
        action = orders[rank][0]
        before = Action(action.is_backward, action.stage + (1 if action.is_backward else -1), action.microbatch)
        is_ready = before in done or not 0 <= before.stage < num_stages
        return orders[rank].popleft() if is_ready else None

    while any(orders):
        slot = [next_action(rank) for rank in range(num_ranks)]
        assert any(slot), f"the schedule is stuck: {num_ranks} ranks, {stages_per_rank} stages, {num_microbatches}"
        done.update(action for action in slot if action is not None)
        here = [None if action is None or action.microbatch >= num_microbatches else action for action in slot]
        if any(here):
            slots.append(here)
    return slots


def _order(rank: int, num_ranks: int, stages_per_rank: int, num_microbatches: int, has_backward: bool) -> deque[Action]:
    """What a rank does, in order: forwards until all it may hold is in flight but one, then forward and backward."""
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


def bubble_fraction(slots: Sequence[Slot], backward_cost: float = 2.0) -> float:
    """Idle share of the ranks' time, where a backward takes `backward_cost` forwards and a transfer no time."""
    num_ranks = len(slots[0])
    finished: dict[Action, float] = {}
    clock = [0.0] * num_ranks
    busy = 0.0
    for slot in slots:
        for rank, action in enumerate(slot):
            if action is None:
                continue
            before = Action(action.is_backward, action.stage + (1 if action.is_backward else -1), action.microbatch)
            cost = backward_cost if action.is_backward else 1.0
            clock[rank] = max(clock[rank], finished.get(before, 0.0)) + cost
            finished[action] = clock[rank]
            busy += cost
    return 1 - busy / (num_ranks * max(clock))


@dataclass
class _Transfers:
    """What one rank sends and receives in one slot."""

    works: list[dist.Work]
    sent: list[Tensor]  # kept until they have arrived

    def wait(self) -> None:
        while self.works:  # gloo waits for ever at the second wait for the same receive
            self.works.pop().wait()
        self.sent.clear()


@dataclass
class Pipeline:
    """Executes plans on one rank of a pipeline.

    Args:
        group: of the pp axis; None for one rank.
        num_ranks, stages_per_rank: p and v.
        device: where activations live.
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
        forward: Callable[[int, int, Tensor | None], Tensor],
        backward: Callable[[int, int, Tensor, Tensor | None, bool], None] | None,
        activation: Callable[[int], tuple[torch.Size, torch.dtype]],
    ) -> None:
        """All microbatches through all stages, in the plan's order.

        Args:
            num_microbatches: the same on all ranks of the pipeline.
            forward: (stage, microbatch, what the stage before gave) → what the next stage gets; for the last stage,
                what `backward` gets.
            backward: (stage, microbatch, output, its gradient or None for the last stage, whether it is the stage's
                last one); None for a pass without gradients.
            activation: of a microbatch, shape and dtype of what goes from stage to stage.
        """
        slots = plan(self.num_ranks, self.stages_per_rank, num_microbatches, has_backward=backward is not None)
        received: dict[Action, tuple[Tensor, _Transfers]] = {}
        held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        sending: deque[_Transfers] = deque()
        num_backwards = dict.fromkeys(range(self.num_stages), 0)
        for slot in slots:
            action = slot[self.rank]
            made: Tensor | None = None
            if action is not None and not action.is_backward:
                given = self._take(received, action, from_stage=action.stage - 1)
                if given is not None and backward is not None:
                    given.requires_grad_()
                output = forward(action.stage, action.microbatch, given)
                if backward is not None:
                    held[action.stage, action.microbatch] = given, output
                made = output.detach()
            elif action is not None and backward is not None:
                given, output = held.pop((action.stage, action.microbatch))
                gradient = self._take(received, action, from_stage=action.stage + 1)
                num_backwards[action.stage] += 1
                is_last = num_backwards[action.stage] == num_microbatches
                backward(action.stage, action.microbatch, output, gradient, is_last)
                made = None if given is None else given.grad
            if self.num_ranks > 1:
                self._exchange(slot, made, received, sending, activation)
        while sending:
            sending.popleft().wait()

    def _take(
        self, received: dict[Action, tuple[Tensor, _Transfers]], action: Action, *, from_stage: int
    ) -> Tensor | None:
        if not 0 <= from_stage < self.num_stages:
            return None
        tensor, transfers = received.pop(Action(action.is_backward, from_stage, action.microbatch))
        transfers.wait()
        return tensor

    def _exchange(
        self,
        slot: Slot,
        made: Tensor | None,
        received: dict[Action, tuple[Tensor, _Transfers]],
        sending: deque[_Transfers],
        activation: Callable[[int], tuple[torch.Size, torch.dtype]],
    ) -> None:
        """Posts this rank's transfers of the slot, in the one order that all ranks use."""
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
                assert made is not None
                sent.append(made.contiguous())
                operations.append(dist.P2POp(dist.isend, sent[-1], group=self.group, group_peer=target))
            elif target == self.rank:
                shape, dtype = activation(action.microbatch)
                arriving.append((action, torch.empty(shape, dtype=dtype, device=self.device)))
                operations.append(dist.P2POp(dist.irecv, arriving[-1][1], group=self.group, group_peer=source))
        if not operations:
            return
        transfers = _Transfers(dist.batch_isend_irecv(operations), sent)
        for what, tensor in arriving:
            received[what] = tensor, transfers
        sending.append(transfers)
        if len(sending) > 2:  # what was sent is kept until it has arrived
            sending.popleft().wait()
