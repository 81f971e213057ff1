"""RolloutSettings: how many groups a rollout keeps in flight, how old they may be, and which of them are dropped."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Literal, Protocol

from lightrl.checks.bounds import check_bounds
from lightrl.rollout.prompt_cursor import Curriculum
from lightrl.trajectory import Group


class DropsGroups(Protocol):
    """Returns why to drop a judged group, as (reason, message), or None to keep it. `GroupFilter` is one."""

    def __call__(self, group: Group) -> tuple[str, str] | None: ...


@dataclass(frozen=True)
class RolloutSettings:
    """The controller's settings.

    Args:
        group_size: G, trajectories per prompt.
        groups_per_iteration: P.
        total_groups: what the whole run needs; None if it has no known end.
        max_staleness: η, in versions; 0 is on-policy.
        max_concurrent: bound on groups in flight; None leaves it to the staleness bound.
        redraw_stragglers: start a group again, instead of waiting for it, when it would exceed the staleness bound.
            Faster with a heavy tail, but it over-represents short completions.
        rollout_timeout_s: the run ends if no trajectory that a batch waits for finishes for this long.
        loop_timeout_s: the run ends if a workflow or async reward blocks the event loop for this long.
        max_failed_fraction: the run ends if more than this fraction of an iteration's trajectories fails.
        curriculum: chooses among the prompts by past success; None plays all of them.
        group_filter: decides which judged groups are dropped, and why; each is replaced by a new prompt.
        max_dropped_groups: the run ends if more than this many groups are dropped per P that are kept, by the filter,
            as incomplete, or because every trajectory failed; 10·P if None.
        incomplete_groups: if some trajectories of a group fail, `train` on the others, `redraw` the whole group with
            new seeds (at most three times), or `drop` it for a new prompt.
        oversample_fraction: start this fraction of P more groups than needed. The run gives up those in flight that
            would hold a batch back and carries the others over; on-policy it gives up all of them.
        workflow_workers: processes that run the workflow; 0 runs it on the controller's event loop.
        judges_later: on-policy, `take` returns groups without rewards, and `wait_for_rewards` waits for them; neither
            `curriculum` nor `group_filter` can read them.
    """

    group_size: int = 1
    groups_per_iteration: int = 1
    total_groups: int | None = None
    max_staleness: int = 0
    max_concurrent: int | None = None
    redraw_stragglers: bool = False
    rollout_timeout_s: float = 1800.0
    loop_timeout_s: float = 60.0
    max_failed_fraction: float = 0.5
    curriculum: Curriculum | None = None
    group_filter: DropsGroups | None = None
    max_dropped_groups: int | None = None
    incomplete_groups: Literal["train", "redraw", "drop"] = "train"
    oversample_fraction: float = 0.0
    workflow_workers: int = 0
    judges_later: bool = False

    def __post_init__(self) -> None:
        check_bounds(1, group_size=self.group_size, groups_per_iteration=self.groups_per_iteration)
        check_bounds(1, max_concurrent=self.max_concurrent)
        check_bounds(0, max_staleness=self.max_staleness, max_dropped_groups=self.max_dropped_groups)
        check_bounds(0, workflow_workers=self.workflow_workers)
        check_bounds(0, 1, max_failed_fraction=self.max_failed_fraction)
        check_bounds(0, 10, oversample_fraction=self.oversample_fraction)
        timeouts = {"rollout_timeout_s": self.rollout_timeout_s, "loop_timeout_s": self.loop_timeout_s}
        check_bounds(1e-3, threading.TIMEOUT_MAX, **timeouts)
        if self.judges_later and (self.max_staleness or self.reads_rewards):
            raise ValueError(
                "judges_later cannot be combined with max_staleness, curriculum, group_filter, incomplete_groups or "
                "oversample_fraction: they need rewards before a group is taken."
            )

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards decide which groups are taken, so that they must be known before."""
        return bool(
            self.curriculum or self.group_filter or self.incomplete_groups != "train" or self.oversample_fraction
        )

    @property
    def passes_over_stragglers(self) -> bool:
        """Whether a batch takes later groups before slow ones; else it takes the stream's order."""
        return self.redraw_stragglers or self.num_oversampled > 0

    @property
    def num_oversampled(self) -> int:
        """Groups started beyond the P that an iteration needs."""
        return math.ceil(self.oversample_fraction * self.groups_per_iteration)
