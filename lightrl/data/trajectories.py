"""TrajectoryDataModule: recorded trajectories, from the files that TrajectoryLog writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import lightning as L
import numpy as np

from lightrl.checks.bounds import check_bounds
from lightrl.data.batches import EpochLoader
from lightrl.trajectory import Group, Trajectory, files_of, read_records


class TrajectoryDataModule(L.LightningDataModule):
    """Trains an RLModule on recorded trajectories, without an engine, a rollout or a reward.

    With the same weights, module, seed and callbacks, it repeats bit for bit the run that wrote the files, if that run
    used `TrajectoryLog(every_n_iterations=1)`. With a different loss, it shows the effect of that loss on the same
    trajectories. Rewards come from the files, as do the outputs of an LLM judge, teacher or reward model outside the
    trainer (`call_outputs`; if missing, they are requested again). Iteration k of the run trains on iteration k in the
    files, even after a resume. After the last iteration in the files, the run starts over with the first.

    Args:
        path: a JSONL file, or a folder of `iteration-000012.jsonl` files, read in order.
        batch_size: groups per iteration; None keeps the iterations in the files.
        max_iterations: use only the first iterations, up to this number; None uses all.
    """

    def __init__(self, path: str, *, batch_size: int | None = None, max_iterations: int | None = None) -> None:
        super().__init__()
        check_bounds(1, batch_size=batch_size, max_iterations=max_iterations)
        self.path = Path(path)
        self.batch_size = batch_size
        self.max_iterations = max_iterations
        self.recorded_groups: list[list[Group]] = []  # a list per iteration, filled by `setup("fit")`

    def setup(self, stage: str) -> None:
        """Reads the files; raises ValueError if the stage is not fit, or a line is not a trajectory with a reward."""
        stage_name = str(getattr(stage, "value", stage))  # Lightning passes a member of TrainerFn
        if stage_name != "fit":
            raise ValueError(
                f"TrajectoryDataModule only supports stage 'fit', got {stage_name!r}, because it has no engine. Use a "
                "PromptDataModule to validate."
            )
        iterations = list(read_iterations(self.path))
        if self.batch_size is not None:
            groups = [group for iteration in iterations for group in iteration]
            size = self.batch_size
            iterations = [groups[start : start + size] for start in range(0, len(groups) - size + 1, size)]
        self.recorded_groups = iterations[: self.max_iterations]
        if not self.recorded_groups:
            raise ValueError(
                f"{str(self.path)!r} has fewer groups than one iteration needs (batch_size={self.batch_size}). Lower "
                "batch_size, or fix the path."
            )

    def train_dataloader(self) -> EpochLoader[int]:
        return EpochLoader(len(self.recorded_groups), lambda epoch, index: index, trainer=self.trainer)


def read_iterations(path: Path) -> Iterator[list[Group]]:
    """Yields each iteration's groups from a file or a folder of files, in the order of training.

    A line is a TrajectoryLog record, or a bare trajectory; a file's lines without an iteration form one iteration.
    """
    for file in files_of(path):
        for _, iteration in groupby(read_records(file), key=lambda item: item[1].get("iteration")):
            trajectories = []
            for where, _, trajectory in iteration:
                if trajectory.reward is None:
                    raise ValueError(f"{where} has no reward; training needs one.")
                for name in ("reward", "rewards", "behavior_logprobs"):
                    if not np.isfinite(np.asarray(getattr(trajectory, name) or 0.0)).all():
                        raise ValueError(f"{where} has NaN or infinity in {name!r}, which training cannot use.")
                trajectories.append(trajectory)
            yield _groups(trajectories)


def _groups(trajectories: list[Trajectory]) -> list[Group]:
    groups: dict[int, Group] = {}
    for trajectory in trajectories:
        group = groups.setdefault(trajectory.group_id, Group(trajectory.group_id, trajectory.prompt))
        group.trajectories.append(trajectory)
    return list(groups.values())
