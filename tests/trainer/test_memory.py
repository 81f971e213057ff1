"""An iteration leaves nothing in memory; `benchmarks.soak` shows the same for a process and 10,000 iterations."""

import gc
import sys
import zlib
from collections import Counter
from typing import Any

import pytest
from tiny_run import POLICY, Digits, make_trainer

from lightrl import GRPO, LearningCurve, RLCallback, Sampling, StalenessControl, Trajectory, TrajectoryLog
from lightrl.callbacks import learning_curve

WARM, LAST = 100, 250  # iterations


class Census(RLCallback):
    """Between two iterations, how many more blocks Python's allocator holds, and for the message which objects."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == WARM:
            self.types = objects()
            self.num_blocks = sys.getallocatedblocks()
        if trainer.global_step == LAST:
            gc.collect()
            self.num_more = sys.getallocatedblocks() - self.num_blocks
            self.more = (objects() - self.types).most_common(10)


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(item).__qualname__ for item in gc.get_objects())


class SometimesFails(GRPO):
    def reward(self, trajectory: Trajectory) -> float:
        name = f"{trajectory.group_id}/{trajectory.sample}"
        if zlib.crc32(name.encode()) % 20 == 0:
            raise ValueError(f"{name} fails")
        return float(trajectory.completion_ids[0] % 2)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.extra), 2])
def test_an_iteration_leaves_nothing_in_memory(max_staleness, tmp_path, monkeypatch):
    monkeypatch.setattr(learning_curve, "MAX_POINTS", 8)
    census = Census()
    callbacks = [census, LearningCurve(), TrajectoryLog(), StalenessControl(max_staleness)]
    module = SometimesFails(POLICY, group_size=4, sampling=Sampling(max_new_tokens=2), lr=1e-4, max_failed_fraction=1.0)
    make_trainer(tmp_path, max_steps=LAST, callbacks=callbacks).fit(module, datamodule=Digits(batch_size=2))
    num_trajectories = (LAST - WARM) * 8
    assert census.num_more < num_trajectories, census.more  # one object for each would be more
