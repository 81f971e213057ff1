"""Bottleneck: names the part of an iteration that takes the most time, and the setting that would change that."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.trace import Trace, advice_of, area_times, summary_of
from lightrl.trace import Event, Tape, set_tape

if TYPE_CHECKING:
    import lightning as L

    from lightrl.rollout.rl_trainer import RLTrainer

log = logging.getLogger(__name__)

_NUM_ITERATIONS = 3  # the first is a warm-up
_LEAST_FRACTION = 0.5
_WHAT = {
    "rollout": "the wait for completions",
    "reward": "the wait for rewards",
    "score": "model calls and advantages",
    "update": "the update",
    "sync": "the weight sync",
    "data": "the wait for prompts",
}


class Bottleneck(RLCallback):
    """Measures the first iterations of a fit, and logs a line if one part takes at least half of the time.

    `lightrl fit` adds it. A run with `Trace` measures all iterations, so this callback does nothing there.
    """

    def __init__(self) -> None:
        self._tape: Tape | None = None  # while it measures
        self._events: list[Event] = []
        self._ends_ns: list[int] = []  # start of the first iteration, then the end of each
        self._overlaps = False  # whether rollouts overlap the update

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rollout = getattr(trainer, "open_rollout", None)
        is_traced = any(isinstance(callback, Trace) for callback in cast("RLTrainer", trainer).callbacks)
        if trainer.is_global_zero and rollout is not None and not is_traced:
            self._overlaps = rollout.settings.max_staleness > 0
            self._tape, self._events, self._ends_ns = Tape(), [], [time.perf_counter_ns()]
            set_tape(self._tape)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: object) -> None:
        if self._tape is None:
            return
        self._events += self._tape.take()
        self._ends_ns.append(time.perf_counter_ns())
        if len(self._ends_ns) > _NUM_ITERATIONS:
            self.teardown()
            area, text = self.finding(pl_module)
            if area:
                log.log(logging.WARNING if area in ("reward", "data") else logging.INFO, text)

    def finding(self, module: Any) -> tuple[str, str]:
        """Returns the area that took at least half of the time, and a line about it; "", "" if none did."""
        times = [area_times(self._events, start, end) for start, end in pairwise(self._ends_ns)]
        summary = summary_of(times, overlaps=self._overlaps)
        if summary is None or summary["areas_s"][summary["look_first_at"]] < _LEAST_FRACTION * summary["total_s"]:
            return "", ""
        area = summary["look_first_at"]
        share, first = summary["areas_s"][area] / summary["total_s"], 1 + min(len(times) - 1, 1)
        now = f" (model.reward_workers is {module.reward_workers})" if area == "reward" else ""
        iterations = f"iteration {first}" if first == len(times) else f"iterations {first} to {len(times)} of this fit"
        return area, f"{share:.0%} of {iterations} was {_WHAT[area]}{now}. {advice_of(summary)}"

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown()

    def teardown(self, *_: object, **__: object) -> None:
        if self._tape is not None:
            set_tape(None)
            self._tape = None
