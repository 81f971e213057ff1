"""Replay: makes the decisions of a recorded run, each when its turn comes."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightrl.engines.abilities import ContinuesCompletions, FollowsSteps
from lightrl.errors import RolloutError
from lightrl.rollout.group_book import Batch, RunningGroup
from lightrl.rollout.group_runs import GroupRuns
from lightrl.rollout.pace import Pace
from lightrl.rollout.prompts_ahead import PromptsAhead
from lightrl.rollout.schedule import Schedule, summary, taken_text, version_runs
from lightrl.trajectory import Trajectory, sampling_seed


class Replay:
    """Applies recorded decisions in their order; results that come earlier wait for their turn.

    Belongs to the controller's event loop.

    Args:
        schedule: from its start or a checkpoint on.
        runs: starts groups, and reports their trajectories.
        ahead: makes prompts that take time.
        pace: None if the engine follows steps.
        run_seed: of both runs.
    """

    def __init__(
        self, schedule: Schedule, runs: GroupRuns, ahead: PromptsAhead, pace: Pace | None, run_seed: int
    ) -> None:
        self.schedule = schedule
        self._runs = runs
        self._ahead = ahead
        self._pace = pace
        self._run_seed = run_seed
        begun = [f"s{position}@{version}" for position, (version, _) in runs.book.begun.items()]
        begun = [] if schedule.mark is None else begun  # the start of a resumed run's schedule has them
        self._decisions = collections.deque([*begun, *schedule.decisions])
        self._arrived: dict[tuple[int, int], tuple[RunningGroup, Trajectory | None]] = {}
        self._summaries: dict[int, collections.deque[dict[int, str]]] = collections.defaultdict(collections.deque)
        self._expected: dict[tuple[int, int], str] = {}  # what becomes of running samples
        self._index()
        runs.on_arrival = self.arrive

    @classmethod
    def of_run(
        cls, source: Path, state: Mapping[str, Any], runs: GroupRuns, ahead: PromptsAhead, run_seed: int
    ) -> Replay:
        """Of a recorded run, a file or its folder, from its start, or from where the state of a checkpoint is.

        Raises:
            RolloutError: if the schedule, the checkpoint or the engine cannot repeat it.
        """
        if state and state.get("schedule") is None:
            raise RolloutError("The checkpoint is of a run without a schedule. Replay from the start, without it.")
        schedule = Schedule.read(source, state.get("schedule"))
        schedule.check(runs.book.settings, run_seed)
        player = runs.player
        engine, pace = player.engine, None
        if schedule.steps and isinstance(engine, FollowsSteps):
            engine.follow_steps(schedule.steps, mark=schedule.mark, unfinished=state.get("unfinished", ()))
        elif isinstance(engine, ContinuesCompletions):
            pace = player.pace = Pace(engine, timeout_s=runs.book.settings.rollout_timeout_s)
        else:
            raise RolloutError(
                f"{type(engine).__name__} cannot replay a schedule: it does not continue completions. Use LocalEngine, "
                "FakeEngine or SGLangEngine, or an engine with lightrl.engines.abilities.ContinuesCompletions."
            )
        return cls(schedule, runs, ahead, pace, run_seed)

    def _index(self) -> None:
        """What each draw of a group became: a draw begins with `s`."""
        for item in self._decisions:
            if item[0] == "s":
                self._summaries[int(item[1:].partition("@")[0])].append({})
            elif item[0] == "d":
                name, colon, rest = item[1:].partition(":")
                position, sample = map(int, name.split("."))
                self._summaries[position][-1][sample] = colon + rest
        if self._pace is not None:
            num_tokens: collections.Counter[int] = collections.Counter()
            for draws in self._summaries.values():
                for text in (text for draw in draws for text in draw.values()):
                    for version, num in (run for turn in version_runs(text) for run in turn):
                        num_tokens[version] += num
            self._pace.expect(num_tokens)

    def arrive(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> None:
        """A trajectory is done; it is reported when its turn comes.

        Raises:
            RolloutError: if it is another one than in the recorded run.
        """
        key = (running.group.id, sample)
        recorded, now = self._expected.pop(key, ""), summary(trajectory)
        if recorded and recorded != now:
            raise RolloutError(
                f"The replay of {self.schedule.path} deviates at group {key[0]}, sample {sample}: checksum and "
                f"versions of its tokens were {recorded} and are {now or 'none, since it was dropped'}. Start from "
                "the same weights, data and settings; rewards and environments must not depend on chance."
            )
        self._arrived[key] = (running, trajectory)
        self.follow()

    def follow(self) -> None:
        """Does all whose turn has come.

        Raises:
            RolloutError: if this run differs from the recorded one.
        """
        while self._decisions and self._has_applied(self._decisions[0]):
            self._decisions.popleft()

    def _has_applied(self, item: str) -> bool:
        kind, rest = item[0], item[1:]
        if kind == "d":
            return self._report(rest)
        if kind == "t":
            self._runs.tasks.changed.set()  # a `take` looks again
            return False
        if kind == "k":
            return True
        position, _, version = rest.partition("@")
        if kind == "q":
            return self._choose(int(position))
        if kind == "s":
            return self._start(int(position), int(version))
        self._runs.redraw(int(position))
        return True

    def _choose(self, position: int) -> bool:
        if self._ahead.lacks([], 1, self._run_seed):
            return False
        chosen = self._runs.choose(self._run_seed)
        if chosen != position:
            raise RolloutError(
                f"The replay of {self.schedule.path} deviates: it chose position {chosen} of the prompt stream, not "
                f"{position}. Use the data, filters and curriculum of the recorded run."
            )
        return True

    def _start(self, position: int, weight_version: int) -> bool:
        if self._runs.player.engine.weight_version < weight_version or self._ahead.lacks([position], 0, self._run_seed):
            return False
        prompt = self._runs.cursor.read(position)
        summaries = self._summaries[position].popleft()
        self._expected |= {(position, sample): text for sample, text in summaries.items()}
        running = self._runs.start(position, prompt, weight_version, self._run_seed)
        if self._pace is not None:  # before its tasks have run
            for sample, text in summaries.items():
                for turn, runs in enumerate(version_runs(text)):
                    self._pace.plan(sampling_seed(self._run_seed, running.seed_name, sample, turn), runs)
        return True

    def _report(self, rest: str) -> bool:
        name, colon, _ = rest.partition(":")
        position, sample = map(int, name.split("."))
        if (position, sample) not in self._arrived:
            return False
        running, trajectory = self._arrived.pop((position, sample))
        # One that failed then, of whatever cause, fails again.
        self._runs.report(running, sample, trajectory if colon else None)
        return True

    def may_take(self, weight_version: int) -> bool:
        """Whether the batch of this version is what comes next.

        Raises:
            RolloutError: if the schedule is over, or its next batch has another version.
        """
        if not self._decisions:
            raise RolloutError(
                f"{self.schedule.path} ends before the batch of version {weight_version}. Set max_steps to "
                f"{weight_version}."
            )
        item = self._decisions[0]
        if item[0] == "t" and not item.startswith(f"t{weight_version}:"):
            raise RolloutError(f"{self.schedule.path} has {item!r} where this run takes version {weight_version}.")
        return item[0] == "t"

    def took(self, weight_version: int, batch: Batch) -> None:
        """Compares a batch that was taken."""
        item, now = self._decisions.popleft(), taken_text(weight_version, batch.group_ids or [], batch.gives_up)
        if item != now:
            raise RolloutError(f"The replay of {self.schedule.path} deviates: it took {now!r}, not {item!r}.")

    def describe(self) -> str:
        return f"the schedule's {self._decisions[0]!r}" if self._decisions else "the end of the schedule"
