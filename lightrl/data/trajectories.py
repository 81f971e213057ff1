"""TrajectoryDataModule: trajectories that were rolled out before, from the files that TrajectoryLog writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning as L

from lightrl.data.stream import EpochLoader
from lightrl.trajectory import Group, Trajectory


class TrajectoryDataModule(L.LightningDataModule):
    """Trains an RLModule on trajectories from JSONL, without engine, rollout and reward: one iteration after another.

    From the same weights, with the same module, seed and callbacks, the run repeats bit for bit what the run did that
    wrote the files with `TrajectoryLog(every_n_iterations=1)`; with another loss it shows what that would have made of
    the same trajectories. Rewards are those of the files, and so is what a judge, teacher or reward model outside the
    trainer said (`call_outputs`; without it they are asked). Iteration k of the run takes the k-th iteration of the
    files, and begins anew after the last; a run that resumes from a checkpoint of iteration k goes on with the k-th.

    Args:
        path: a file, or a folder of `iteration-000012.jsonl` files, which are read in their order.
        batch_size: groups per iteration; None keeps the iterations of the files.
        max_iterations: take only the first ones; None takes all.

    Raises:
        ValueError: if a setting is out of range.
    """

    def __init__(self, path: str, *, batch_size: int | None = None, max_iterations: int | None = None) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("max_iterations", max_iterations)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}, expected at least 1, or None. Raise it.")
        self.path = Path(path)
        self.batch_size = batch_size
        self.max_iterations = max_iterations
        self.recorded_groups: list[list[Group]] = []  # by iteration; there after `setup("fit")`

    def setup(self, stage: str) -> None:
        """Reads the files.

        Raises:
            ValueError: if the stage is another than fit, there is no file, or a line is no judged trajectory.
        """
        stage_name = str(getattr(stage, "value", stage))  # Lightning gives a member of TrainerFn
        if stage_name != "fit":
            raise ValueError(
                f"TrajectoryDataModule got stage {stage_name!r}, expected 'fit': there is no engine that could answer "
                "validation prompts. Use a PromptDataModule for it."
            )
        iterations = list(read_iterations(self.path))
        if self.batch_size is not None:
            groups = [group for iteration in iterations for group in iteration]
            size = self.batch_size
            iterations = [groups[start : start + size] for start in range(0, len(groups) - size + 1, size)]
        self.recorded_groups = iterations[: self.max_iterations]
        if not self.recorded_groups:
            raise ValueError(
                f"{str(self.path)!r} has fewer groups than batch_size={self.batch_size}, expected at least one "
                "iteration of trajectories. Lower batch_size, or mend the path."
            )

    def train_dataloader(self) -> EpochLoader[int]:
        return EpochLoader(len(self.recorded_groups), lambda epoch, index: index, trainer=self.trainer)


def read_iterations(path: Path) -> Iterator[list[Group]]:
    """The groups of each iteration of one file or of a folder of files, in the order of training.

    A line is a record of TrajectoryLog, or a trajectory alone; those without an iteration make one together.

    Raises:
        ValueError: if there is no file, or a line is no judged trajectory.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(
            f"{str(path)!r} is no file and holds no .jsonl files, expected what TrajectoryLog writes. Mend the path."
        )
    for file in files:
        with file.open(encoding="utf-8") as lines:
            records = [_record(line, file, number) for number, line in enumerate(lines, start=1) if line.strip()]
        for _, found in groupby(records, key=lambda record: record[0]):
            yield _groups([trajectory for _, trajectory in found])


def _record(line: str, file: Path, number: int) -> tuple[Any, Trajectory]:
    try:
        record = json.loads(line)
        trajectory = Trajectory.from_json(record.get("trajectory", record))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"Line {number} of {str(file)!r} is no trajectory ({type(error).__name__}: {error}), expected what "
            "TrajectoryLog writes. Mend the line."
        ) from error
    if trajectory.reward is None:
        raise ValueError(f"Line {number} of {str(file)!r} has no reward, expected a judged trajectory. Judge it.")
    return record.get("iteration"), trajectory


def _groups(trajectories: list[Trajectory]) -> list[Group]:
    groups: dict[int, Group] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.group_id, Group(trajectory.group_id, trajectory.prompt))
        group.trajectories.append(trajectory)
    return list(groups.values())
