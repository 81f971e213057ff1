"""RLTrainer: Lightning's Trainer with the rollout and the RL hooks that the loop and the callbacks use.

It is a class, not a Protocol, because users also need Lightning's Trainer and Python has no intersection types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler

from lightrl.engines import RolloutEngine
from lightrl.models.model_spec import global_seed
from lightrl.rollout.protocol import Rollout
from lightrl.trajectory import Group


class RLTrainer(L.Trainer):
    """The part of `lightrl.Trainer` that loops and callbacks use."""

    callbacks: list[Callback]
    fast_dev_run: int | bool
    profiler: Profiler

    engine: RolloutEngine | None = None  # if not set, the first stage sets LocalEngine() on rank 0
    settings: Mapping[str, object] | None = None  # from the command line and config files; None without a command
    open_rollout: Rollout | None = None  # set while a stage of an RLModule runs
    memory_estimate: str  # describes the estimated memory use of a rank
    # Logs a number of the training batch: (name, value, other arguments of `log`) → False if Lightning must log it.
    log_number: Callable[[str, float, Mapping[str, object]], bool]
    rewarded_groups: Callable[[object], list[Group]]  # rolls out and rewards a validation, test or predict batch
    restoring: object = None  # the checkpoint that a fit is restoring; None once the fit runs
    saved_at: int | None = None  # the iteration after which the last checkpoint was saved
    is_in_iteration: bool = False  # from the start of an iteration to the end of its updates
    phase_seconds: dict[str, float]  # phase of the current iteration (rollout, score, rewards, update, sync) → seconds

    @property
    def rollout(self) -> Rollout:
        """The source of the current stage's groups; raises RuntimeError if no stage of an RLModule is running."""
        if self.open_rollout is None:
            raise RuntimeError("There is no rollout: no fit, validate, test or predict of an RLModule is running.")
        return self.open_rollout

    @property
    def weight_version(self) -> int:
        """The version of the weights being trained, which is the number of finished iterations, `global_step`."""
        return self.global_step

    @property
    def iteration(self) -> int:
        """The current iteration, counted from 1; between iterations, the last one; 0 before the first iteration."""
        return self.global_step + self.is_in_iteration

    @property
    def run_seed(self) -> int:
        """The seed given to `seed_everything`; 0 if it was not called."""
        return global_seed()

    def ended_by_sigterm(self) -> AbstractContextManager[None]:
        """Returns a context in which SIGTERM ends a single-process run at once; used while it waits for the engine."""
        return nullcontext()

    def rl_hooks(self, name: str, module: L.LightningModule | None = None) -> Iterator[Callable[..., Any]]:
        """Yields each callback's hook, if it defines one, then the module's; None is the running module."""
        raise NotImplementedError

    def call_rl_hook(self, name: str, *args: object) -> None:
        """Calls an RL hook of all callbacks and of the module; `self.log` works inside it."""
        raise NotImplementedError
