"""Trainer: Lightning's, with an engine. It installs RolloutLoop, adds the default callbacks, dispatches the RL hooks.

A plain LightningModule runs through it as through Lightning's own.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lightrl.callbacks import RolloutMetrics, RolloutProgressBar, StalenessControl, WeightSync
from lightrl.data import prompt_source
from lightrl.dataflow import check_score_calls
from lightrl.errors import LightRLError
from lightrl.loops import RolloutLoop
from lightrl.loops.score import ROLLOUT_FIELDS
from lightrl.module import RLModule
from lightrl.rewards import Judge, make_judge
from lightrl.rollout import LocalEngine, RolloutController, RolloutEngine
from lightrl.strategies import AtomicCheckpointIO, LogprobSettings, check_strategy, parallel_model
from lightrl.trajectory import Sampling

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.profilers import Profiler

log = logging.getLogger(__name__)

# Lightning's warnings about what an RLModule does on purpose.
MEANT: tuple[tuple[str, type[Warning]], ...] = (
    # Models stay in evaluation mode: dropout would make trainer and engine disagree.
    (r"Found \d+ module\(s\) in eval mode", UserWarning),
    # Validation batches become judged groups in a module hook, whatever data module they come from.
    (r"You have overridden `(transfer_batch_to_device|on_after_batch_transfer)`", UserWarning),
)


class Trainer(L.Trainer):
    """Lightning's Trainer for RLModules: every flag keeps its meaning, one training batch is one iteration.

    Adds `WeightSync()`, `StalenessControl(0)`, `RolloutMetrics()` and a progress bar of two lines unless given, and a
    ModelCheckpoint that also saves `last.ckpt` and on Ctrl-C, unless one is given or checkpoints are off.

    Args:
        engine: what generates; `LocalEngine()`, in this process, if None.
        callbacks: one or several, Lightning's and lightrl's.
        kwargs: Lightning's.
    """

    callbacks: list[Callback]
    fast_dev_run: int | bool
    profiler: Profiler

    def __init__(
        self,
        *,
        engine: RolloutEngine | None = None,
        callbacks: list[Callback] | Callback | None = None,
        **kwargs: Any,
    ) -> None:
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks is not None else []
        # Lightning appends its defaults to the very list it gets: with a copy, they can be told from the user's.
        super().__init__(callbacks=list(given), **kwargs)
        self.engine = engine
        self.rollout: RolloutController | None = None  # while a stage of an RLModule runs
        self._judge: Judge | None = None
        self.rollout_loop = RolloutLoop(self)
        self.fit_loop.epoch_loop.automatic_optimization = self.rollout_loop
        if isinstance(self.strategy.checkpoint_io, TorchCheckpointIO):
            self.strategy.checkpoint_io = AtomicCheckpointIO()
        self._add_default_callbacks(given)

    @property
    def weight_version(self) -> int:
        """Of the weights that are trained: the number of finished iterations, `global_step` for an RLModule."""
        return self.rollout_loop.weight_version

    @property
    def run_seed(self) -> int:
        """The seed of `seed_everything`; 0 without one."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    # ------------------------------------------------------------------ RL hooks

    def rl_hooks(self, name: str) -> Iterator[Callable[..., Any]]:
        """The hook of each callback that defines it, then the module's; `self.log` works inside."""
        module = self.lightning_module
        for callback in self.callbacks:
            hook = getattr(callback, name, None)
            if hook is not None:
                yield lambda *args, hook=hook: hook(self, module, *args)
        hook = getattr(module, name, None)
        if hook is not None:
            yield hook

    def call_rl_hook(self, name: str, *args: Any) -> None:
        """Calls an RL hook of all callbacks and of the module."""
        with self.rollout_loop.logging_allowed(self.lightning_module):
            for hook in self.rl_hooks(name):
                hook(*args)

    # ------------------------------------------------------------------ Lightning's stages

    def _run_stage(self) -> Any:
        module = self.lightning_module
        if not isinstance(module, RLModule):
            return super()._run_stage()
        with warnings.catch_warnings():
            for message, category in MEANT:
                warnings.filterwarnings("ignore", message, category)
            self._open_rollout(module)
            results = super()._run_stage()
        if self.fast_dev_run and self.state.fn == TrainerFn.FITTING:
            self._check_resume()
        return results

    def _teardown(self) -> None:
        """The funnel that success, exceptions and Ctrl-C all pass."""
        self._close_rollout()
        super()._teardown()

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        if self.rollout_loop.is_updating:
            log.warning(
                "No checkpoint was saved at %s: the run stopped in the middle of an update, and half an iteration "
                "would be trained on twice. The last whole one is still there.",
                filepath,
            )
            return
        super().save_checkpoint(filepath, weights_only, storage_options)

    def with_stop_tokens(self, sampling: Sampling) -> Sampling:
        """`sampling` with the stop tokens of model, tokenizer and chat template added."""
        module: Any = self.lightning_module
        ids = {token_id for ids in module.stop_token_ids().values() for token_id in ids}
        return dataclasses.replace(sampling, stop_token_ids=tuple(sorted(ids | set(sampling.stop_token_ids))))

    def _open_rollout(self, module: RLModule) -> None:
        self._check(module)
        staleness = self._one_of(StalenessControl)
        is_fit = self.state.fn == TrainerFn.FITTING
        sampling = self.with_stop_tokens(module.sampling)
        settings = LogprobSettings(
            temperature=sampling.temperature,
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            entropy_needs_gradient=module.needs_entropy_gradient,
        )
        module.parallel_models = {
            role: parallel_model(self.strategy, getattr(module, role), settings) for role in module.models()
        }
        self._use_plain_no_grad()
        prompts, groups_per_iteration, total_groups = None, 1, None
        if is_fit:
            prompts = prompt_source(
                self, module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, seed=self.run_seed
            )
            groups_per_iteration = prompts.batch_size
            num_iterations = self.estimated_stepping_batches
            if num_iterations != float("inf"):
                total_groups = int(num_iterations) * groups_per_iteration
            self._check_sizes(module, groups_per_iteration)
        self._judge = make_judge(
            module.reward_source if module.reward_source is not None else module.reward,
            workers=module.reward_workers,
            timeout_s=module.reward_timeout_s,
            search_paths=[str(Path.cwd())],
        )
        self._judge.start()
        if self.engine is None:
            self.engine = LocalEngine()
        self.engine.start(module.policy_config)
        self.rollout = RolloutController(
            self.engine,
            module.configure_workflow(),
            self._judge,
            sampling=sampling,
            run_seed=self.run_seed,
            group_size=module.group_size,
            groups_per_iteration=groups_per_iteration,
            prompts=prompts,
            total_groups=total_groups,
            max_staleness=staleness.max_staleness,
            max_concurrent=staleness.max_concurrent,
            redraw_stragglers=staleness.redraw_stragglers,
            rollout_timeout_s=staleness.rollout_timeout_s,
            max_failed_fraction=module.max_failed_fraction,
        )
        if is_fit:
            self.rollout_loop.restore_rollout()

    def _close_rollout(self) -> None:
        rollout, self.rollout = self.rollout, None
        judge, self._judge = self._judge, None
        if rollout is not None:
            rollout.close()
        if judge is not None:
            judge.close()
        if rollout is not None:
            rollout.engine.close()

    # ------------------------------------------------------------------ checks before a device is touched

    def _check(self, module: RLModule) -> None:
        check_strategy(self.strategy)
        if self.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches={self.accumulate_grad_batches}, expected 1 with an RLModule: microbatches "
                "are cut by tokens. Set model.microbatch_tokens instead."
            )
        for kind in (WeightSync, StalenessControl, RolloutMetrics):
            found = [callback for callback in self.callbacks if isinstance(callback, kind)]
            if len(found) != 1:
                raise ValueError(f"There are {len(found)} {kind.__name__} callbacks, expected one. Remove the others.")
        needed = self._one_of(WeightSync).every_n_iterations - 1
        allowed = self._one_of(StalenessControl).max_staleness
        if allowed < needed:
            raise ValueError(
                f"WeightSync(every_n_iterations={needed + 1}) makes trajectories up to {needed} versions old, expected "
                f"max_staleness={allowed} to allow that. Raise StalenessControl.max_staleness to {needed}, "
                "or sync more often."
            )
        check_score_calls(module.score_calls(), set(module.models()), set(ROLLOUT_FIELDS))

    def _check_sizes(self, module: RLModule, groups_per_iteration: int) -> None:
        num = groups_per_iteration * module.group_size
        if num % module.num_minibatches:
            raise ValueError(
                f"num_minibatches={module.num_minibatches} does not divide the iteration's {groups_per_iteration} "
                f"groups × group_size={module.group_size} = {num} trajectories, expected a divisor. "
                "Change one of the three."
            )

    def _one_of(self, kind: type[Any]) -> Any:
        return next(callback for callback in self.callbacks if isinstance(callback, kind))

    # ------------------------------------------------------------------ set-up

    def _add_default_callbacks(self, given: list[Callback]) -> None:
        for kind in (StalenessControl, RolloutMetrics, WeightSync):
            if not any(isinstance(callback, kind) for callback in self.callbacks):
                self.callbacks.insert(0, kind())
        for index, callback in enumerate(self.callbacks):
            if callback in given:
                continue
            if isinstance(callback, ProgressBar):
                self.callbacks[index] = RolloutProgressBar()
            elif type(callback) is ModelCheckpoint:
                self.callbacks[index] = ModelCheckpoint(save_last=True, save_on_exception=True)

    def _use_plain_no_grad(self) -> None:
        """Tensors made under Lightning's inference mode could not be loaded into in place later."""
        for loop in (self.fit_loop.epoch_loop.val_loop, self.validate_loop, self.test_loop, self.predict_loop):
            loop.inference_mode = False

    # ------------------------------------------------------------------ fast_dev_run

    def _check_resume(self) -> None:
        """Writes a checkpoint to memory, reads it as a resume would, and compares: Lightning saves none here.

        Raises:
            LightRLError: if something of the state would not survive a resume.
        """
        before = self._checkpoint_connector.dump_checkpoint(weights_only=False)
        buffer = io.BytesIO()
        torch.save(before, buffer)
        buffer.seek(0)
        try:
            loaded = torch.load(buffer, weights_only=True)
        except Exception as error:
            raise LightRLError(
                f"The checkpoint cannot be loaded with weights_only=True: {error}. A callback, module or data module "
                "puts something else than tensors and plain Python into its state; convert it there."
            ) from error
        difference = _first_difference(before, loaded, "checkpoint")
        if difference is None:
            self.strategy.load_model_state_dict(loaded, strict=True)
            self.strategy.load_optimizer_state_dict(loaded)
            after = self._checkpoint_connector.dump_checkpoint(weights_only=False)
            difference = _first_difference(before, after, "checkpoint")
        if difference is not None:
            raise LightRLError(f"{difference} differs after a resume, expected it equal. Save it as it was.")
        log.info("fast_dev_run: a resume from this state restores it exactly.")


def _first_difference(left: Any, right: Any, name: str) -> str | None:
    """Where two nested states differ first; None if they are equal."""
    if isinstance(left, torch.Tensor):
        equal = isinstance(right, torch.Tensor) and left.shape == right.shape and torch.equal(left.cpu(), right.cpu())
        return None if equal else name
    if isinstance(left, dict):
        if not isinstance(right, dict) or left.keys() != right.keys():
            return name
        parts: Iterator[str | None] = (_first_difference(left[key], right[key], f"{name}[{key!r}]") for key in left)
        return next((part for part in parts if part), None)
    if isinstance(left, list | tuple):
        if not isinstance(right, list | tuple) or len(left) != len(right):
            return name
        parts = (_first_difference(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((part for part in parts if part), None)
    return None if left == right or (left != left and right != right) else name
