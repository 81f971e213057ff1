"""What may start and what may be trained on: the decisions that bound staleness, as pure functions of counts.

Letters: v the weight version (now), η `max_staleness`, P `groups_per_iteration`, s any version. A group's version is
that of its oldest token; for one that still runs it is the version that served when it started, a lower bound.

Admission alone does not hold the bound: with 5 % stragglers 30 times slower, staleness reached 29 at η = 1. With both
rules it held exactly for η = 0, 1, 2, 4, 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Batch:
    """What `choose_batch` decided: the groups to train on, or which running groups it has to wait for."""

    group_ids: list[int] | None  # P group ids, or None: wait
    waits_for: list[int]  # running groups without which nothing can be taken; empty if only more groups are missing
    gives_up: list[int] = field(default_factory=list)  # over-sampled groups, which would hold this batch back


def num_admissible(
    *,
    running: int,
    accepted: int,
    weight_version: int,
    groups_per_iteration: int,
    max_staleness: int,
    max_concurrent: int | None = None,
    total: int | None = None,
    oversampled: int = 0,
) -> int:
    """How many groups may start now.

    A group may start while `accepted + running < (η + v + 1)·P`: even if it finishes at once, it is trained on no
    later than η versions from now. With over-sampling some more may start, of which `choose_batch` gives up those that
    would hold a batch back.

    Args:
        running: groups in flight.
        accepted: groups finished and kept since the run began, trained on or waiting; dropped ones do not count.
        weight_version: the version that all routable engines have acknowledged.
        groups_per_iteration: P.
        max_staleness: η, in versions.
        max_concurrent: bound on `running`; None for no bound.
        total: groups that the whole run needs; None if it has no known end.
        oversampled: groups that may start beyond the bound.

    Returns:
        A number of groups, 0 or more.
    """
    room = (max_staleness + weight_version + 1) * groups_per_iteration + oversampled - accepted - running
    if total is not None:
        room = min(room, total - accepted - running)
    if max_concurrent is not None:
        room = min(room, max_concurrent - running)
    return max(0, room)


def choose_batch(
    finished: Mapping[int, int],
    running: Mapping[int, int],
    *,
    weight_version: int,
    groups_per_iteration: int,
    max_staleness: int,
    max_given_up: int = 0,
) -> Batch:
    """The oldest P finished groups, if the ones left over can still be trained on in time; else whom to wait for.

    Left over with version ≤ s there may be at most `(s + η - v)·P`, for every s in [v - η, v]: that many the
    iterations up to version s + η can take.

    With over-sampling some groups may be given up, but only where that lets a batch be taken at once, running ones
    before finished ones, older versions first; the others are carried over. As many as admission lets in beyond the
    bound always suffice: what of version ≤ s is left over is at most so many too many, for every s.

    Args:
        finished: group id → version of its oldest token.
        running: group id → version that served when it started.
        weight_version: v, of the trainer.
        groups_per_iteration: P.
        max_staleness: η, in versions.
        max_given_up: groups that may be given up, the `oversampled` of `num_admissible`.
    """
    finished, running = dict(finished), dict(running)
    gives_up: list[int] = []
    at_first = batch = _choose_batch(finished, running, weight_version, groups_per_iteration, max_staleness)
    while batch.group_ids is None and len(gives_up) < max_given_up and len(finished) >= groups_per_iteration:
        if batch.waits_for:
            given_up = min(batch.waits_for, key=lambda group_id: (running[group_id], -group_id))
            del running[given_up]
        else:
            given_up = _oldest_first(finished)[groups_per_iteration]
            del finished[given_up]
        gives_up.append(given_up)
        batch = _choose_batch(finished, running, weight_version, groups_per_iteration, max_staleness)
    return at_first if batch.group_ids is None else Batch(batch.group_ids, [], sorted(gives_up))


def _oldest_first(finished: Mapping[int, int]) -> list[int]:
    return sorted(finished, key=lambda group_id: (finished[group_id], group_id))


def _choose_batch(
    finished: Mapping[int, int],
    running: Mapping[int, int],
    weight_version: int,
    groups_per_iteration: int,
    max_staleness: int,
) -> Batch:
    oldest_first = _oldest_first(finished)
    taken = set(oldest_first[:groups_per_iteration])
    late = [group_id for group_id in running if running[group_id] <= weight_version - max_staleness]
    if len(taken) < groups_per_iteration:
        return Batch(None, sorted(late))
    left_over = [version for group_id, version in finished.items() if group_id not in taken] + list(running.values())
    for version in range(weight_version - max_staleness, weight_version + 1):
        room = (version + max_staleness - weight_version) * groups_per_iteration
        if sum(1 for oldest in left_over if oldest <= version) > room:
            stragglers = [group_id for group_id, oldest in running.items() if oldest <= version]
            return Batch(None, sorted(stragglers))
    return Batch(sorted(taken), [])


def find_overdue(
    finished: Mapping[int, int], *, weight_version: int, groups_per_iteration: int, max_staleness: int
) -> list[int]:
    """The finished groups that no batch can take in time any more.

    None in a run that kept both rules; some after a resume with a smaller η or P. Their prompts are drawn again.

    Args:
        finished: group id → version of its oldest token.
        weight_version: v, of the trainer.
        groups_per_iteration: P.
        max_staleness: η, in versions.
    """
    overdue: list[int] = []
    num_kept = 0
    for group_id in _oldest_first(finished):
        if num_kept < (finished[group_id] + max_staleness - weight_version + 1) * groups_per_iteration:
            num_kept += 1
        else:
            overdue.append(group_id)
    return sorted(overdue)


def describe_waiting(waits_for: Sequence[int], limit: int = 5) -> str:
    """The first few group ids, for messages."""
    shown = ", ".join(str(group_id) for group_id in waits_for[:limit])
    return shown + (f" and {len(waits_for) - limit} more" if len(waits_for) > limit else "")
