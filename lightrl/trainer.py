"""Trainer: Lightning's, with an engine. It installs RolloutLoop, adds the default callbacks, dispatches the RL hooks.

A plain LightningModule runs through it as through Lightning's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.algorithms import AdaptiveKL, EarlyStop, ReferenceKL
from lightrl.algorithms.supervised import SupervisedModule
from lightrl.callbacks import (
    DynamicSampling,
    PromptCurriculum,
    RolloutMetrics,
    RolloutProgressBar,
    StalenessControl,
    WeightSync,
)
from lightrl.data import PromptStream, prompt_source
from lightrl.engines import LocalEngine, RolloutEngine
from lightrl.errors import OtherRankFailed
from lightrl.functional import ImportanceWeights, RewardShaping
from lightrl.loops import ResumeCheck, RolloutLoop, SharedRollout, StateBefore
from lightrl.models import LoRA, ModelSpec, Role, RoleMesh
from lightrl.models.stop_tokens import stop_token_ids, with_stop_tokens
from lightrl.module import RLModule
from lightrl.rewards import FailureLog, Judge, OverlongPenalty, make_judge
from lightrl.rollout import RecordedRollout, RolloutController, RolloutSettings
from lightrl.strategies import (
    AtomicCheckpointIO,
    LogprobSettings,
    SplitsModels,
    check_strategy,
    load_model,
    load_optimizers,
    named_strategy,
    parallel_model,
)
from lightrl.trajectory import Group, Sampling

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

log = logging.getLogger(__name__)

# Plain data that hyper-parameters may hold: checkpoints are loaded with weights_only=True.
torch.serialization.add_safe_globals([
    LoRA, ModelSpec, Role, RoleMesh, Sampling, AdaptiveKL, EarlyStop, ImportanceWeights, OverlongPenalty, ReferenceKL,
    RewardShaping,
])  # fmt: skip

# Where the loop's groups come from: generated here, by rank 0 for all ranks, or by an earlier run.
AnyRollout = RolloutController | SharedRollout | RecordedRollout

# Lightning's warnings about what our modules do on purpose.
MEANT: tuple[tuple[str, type[Warning]], ...] = (
    # Models stay in evaluation mode: dropout would make trainer and engine disagree.
    (r"Found \d+ module\(s\) in eval mode", UserWarning),
    # Validation batches become judged groups in a module hook, whatever data module they come from.
    (r"You have overridden `(transfer_batch_to_device|on_after_batch_transfer)`", UserWarning),
    # The loader only counts iterations: prompts are read by position.
    (r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not", UserWarning),
    # Every rank has all groups: a number of them must not be summed over the ranks.
    (r"It is recommended to use `self.log\('(val|test)/prompts', \.\.\., sync_dist=True\)`", UserWarning),
    # An RLModule can validate, but need not.
    (r"You defined a `validation_step` but have no `val_dataloader`", UserWarning),
)


def ignore_srun_advice() -> None:
    """Lightning recommends `srun` wherever it is installed; outside a Slurm job that is no advice."""
    if "SLURM_JOB_ID" not in os.environ:
        warnings.filterwarnings("ignore", "The `srun` command is available", UserWarning)


class Trainer(L.Trainer):
    """Lightning's Trainer for RLModules: every flag keeps its meaning, one training batch is one iteration.

    Adds `WeightSync()`, `StalenessControl(0)`, `RolloutMetrics()` and a progress bar of two lines unless given, and a
    ModelCheckpoint that also saves `last.ckpt` and on Ctrl-C, unless one is given or checkpoints are off.

    Args:
        engine: what generates; `LocalEngine()`, in this process, if None.
        callbacks: one or several, Lightning's and lightrl's.
        strategy: Lightning's, an object, or `FSDP2Strategy`, by name too.
        log_every_n_steps: as in Lightning; None is every iteration for an RLModule, Lightning's 50 for other modules.
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
        strategy: Strategy | str = "auto",
        log_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks is not None else []
        with warnings.catch_warnings():
            ignore_srun_advice()
            # Lightning appends its defaults to the very list it gets: with a copy, they can be told from the user's.
            super().__init__(
                callbacks=list(given),
                strategy=named_strategy(strategy),
                log_every_n_steps=log_every_n_steps,
                **kwargs,
            )
        self._logs_every_iteration = log_every_n_steps is None
        self.engine = engine
        self.rollout: AnyRollout | None = None  # while a stage of an RLModule runs
        self._judge: Judge | None = None
        self._engine_is_open = False
        self._has_started = False  # the stage runs: models, state and rollouts are there
        self._muted: list[Any] = []  # checkpoint callbacks that must not save the exception that ended the last stage
        self._hook_calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.rollout_loop = RolloutLoop(self)
        self.fit_loop.epoch_loop.automatic_optimization = self.rollout_loop
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = AtomicCheckpointIO()
        if not isinstance(self.strategy, SplitsModels):  # a checkpoint of several processes can be resumed in one
            vars(self.strategy)["load_optimizer_state_dict"] = functools.partial(
                load_optimizers, self.strategy, self.strategy.load_optimizer_state_dict
            )
            vars(self.strategy)["load_model_state_dict"] = functools.partial(
                load_model, self.strategy, self.strategy.load_model_state_dict
            )
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
        """Calls an RL hook of all callbacks and of the module; one that is called from a hook waits for its end.

        So everybody sees `on_policy_updated` before the `on_weights_synced` that WeightSync makes of it.
        """
        self._hook_calls.append((name, args))
        if len(self._hook_calls) > 1:
            return
        try:
            with self.rollout_loop.logging_allowed(self.lightning_module):
                while self._hook_calls:
                    name, args = self._hook_calls[0]
                    for hook in self.rl_hooks(name):
                        hook(*args)
                    self._hook_calls.popleft()
                    self.rollout_loop.ranks.step()
        finally:
            self._hook_calls.clear()

    # ------------------------------------------------------------------ Lightning's stages

    def fit(self, model: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        is_recorded = any(hasattr(given, "recorded_groups") for given in (*args, *kwargs.values()))
        with self._checked(model, has_judge=not is_recorded):
            before, self._has_started = StateBefore(self), False
            try:
                super().fit(model, *args, **kwargs)
            except BaseException:
                if not self._has_started:
                    before.give_back()
                raise

    def validate(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        with self._checked(model):
            return super().validate(model, *args, **kwargs)

    def test(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        with self._checked(model):
            return super().test(model, *args, **kwargs)

    def predict(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        with self._checked(model):
            return super().predict(model, *args, **kwargs)

    @contextlib.contextmanager
    def _checked(self, model: L.LightningModule | None, *, has_judge: bool = True) -> Iterator[None]:
        """Refuses, before any model is built, what cannot train an RLModule; inside, Lightning's warnings fit one.

        The judge starts here, on the main process, since that finds out whether there is such a reward function.
        """
        module = self.lightning_module if model is None else model
        self._mute_checkpoints()  # until the stage runs: a run whose state is half restored has nothing to save
        with warnings.catch_warnings():
            ignore_srun_advice()
            if isinstance(module, RLModule):
                self._check(module)
            if isinstance(module, RLModule | SupervisedModule):
                for message, category in MEANT:
                    warnings.filterwarnings("ignore", message, category)
            try:
                if isinstance(module, RLModule) and has_judge and vars(rank_zero_only)["rank"] == 0:
                    self._judge = make_judge_of(module)
                    self._judge.start()
                yield
            finally:
                if self._judge is not None:  # the stage did not come so far that it was closed
                    self._close_judge(self._judge)
                self._checkpoint_connector._loaded_checkpoint = {}  # one that was refused; the next stage would read it

    def _run_stage(self) -> Any:
        while self._muted:
            self._muted.pop().save_on_exception = True
        module = self.lightning_module
        if not isinstance(module, RLModule):
            self._has_started = True
            return super()._run_stage()
        try:
            try:
                is_dry_run = bool(self.fast_dev_run) and self.state.fn == TrainerFn.FITTING
                resume_check = ResumeCheck(self) if is_dry_run else None
                with self.rollout_loop.interrupts_of_the_start():
                    if self.received_sigterm:  # while models were loaded
                        raise SIGTERMException
                    self._open_rollout(module)
                self.rollout_loop.ranks.begin()
                self._has_started = True
                with self.rollout_loop.interrupts():
                    results = super()._run_stage()
                if resume_check is not None:
                    resume_check.run()
            finally:
                # Not left to `_teardown`: it is skipped where a callback's `on_exception` raises.
                self._close_rollout()
        except BaseException as error:
            self.rollout_loop.note_failure(error)
            failed_before = self.rollout_loop.ranks.failed_before
            if self.rollout_loop.why_no_checkpoint is not None:  # the close may find that the state cannot be had
                for callback in self._mute_checkpoints():
                    if failed_before is None:  # else the rank that failed says it
                        self._say_no_checkpoint(getattr(callback, "dirpath", None))
            if failed_before is not None and isinstance(error, Exception):
                raise OtherRankFailed(
                    f"Rank {self.global_rank} could not go on, for another one failed first. Mend that; its "
                    f"traceback is above.\n{failed_before}"
                ) from error
            raise
        return results

    def _mute_checkpoints(self) -> list[Any]:
        """The callbacks that save on exceptions; until the next stage runs they do not.

        One would move its links to a checkpoint that `save_checkpoint` refuses.
        """
        found: list[Any] = [item for item in self.checkpoint_callbacks if getattr(item, "save_on_exception", False)]
        for callback in found:
            callback.save_on_exception = False
        self._muted += found
        return found

    def _teardown(self) -> None:
        """The funnel that success, exceptions and Ctrl-C all pass; a second Ctrl-C may have cut the first try short."""
        try:
            self._close_rollout()
        finally:
            super()._teardown()

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        if self.rollout_loop.why_no_checkpoint is not None:
            self._say_no_checkpoint(filepath)
            return
        super().save_checkpoint(filepath, weights_only, storage_options)

    def _say_no_checkpoint(self, where: Any) -> None:
        log.warning(
            "No checkpoint was saved at %s: %s, and what it holds would be trained on twice or never. The last whole "
            "one is still there. Save between iterations, for example in on_train_batch_end.",
            where,
            self.rollout_loop.why_no_checkpoint,
        )

    def with_stop_tokens(self, sampling: Sampling) -> Sampling:
        """`sampling` with the stop tokens of model, tokenizer and chat template added."""
        module: Any = self.lightning_module
        return with_stop_tokens(sampling, stop_token_ids(module.policy, module.tokenizer, module.sampling))

    def _open_rollout(self, module: RLModule) -> None:
        is_fit = self.state.fn == TrainerFn.FITTING
        recorded = getattr(getattr(self, "datamodule", None), "recorded_groups", None) if is_fit else None
        module.data_flow(from_file=recorded is not None)  # refuses calls that make no graph
        staleness = self._one_of(StalenessControl)
        self.rollout_loop.begin()
        sampling = self.with_stop_tokens(module.sampling)
        settings = LogprobSettings(
            temperature=sampling.temperature,
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            entropy_needs_gradient=module.needs_entropy_gradient,
            num_ids=getattr(module.policy_config.get_text_config(), "vocab_size", None),
        )
        module.parallel_models = {
            name: parallel_model(
                self.strategy,
                getattr(module, name),
                settings,
                role=name,
                value_head=module.value_head if name == "policy" else None,
            )
            for name, role in module.models().items()
            if role.spec.url is None
        }
        self._use_plain_no_grad()
        if self._logs_every_iteration:
            self.log_every_n_steps = 1
        # Batches are plain Python; Lightning's walk through them for floats fails at frozen dataclasses.
        vars(self.precision_plugin)["convert_input"] = lambda data: data
        if recorded is not None:
            self._open_recorded(module, recorded)
            return
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
        rollout_settings = RolloutSettings(
            group_size=module.group_size,
            groups_per_iteration=groups_per_iteration,
            total_groups=total_groups,
            max_staleness=staleness.max_staleness,
            max_concurrent=staleness.max_concurrent,
            redraw_stragglers=staleness.redraw_stragglers,
            rollout_timeout_s=staleness.rollout_timeout_s,
            loop_timeout_s=staleness.loop_timeout_s,
            max_failed_fraction=module.max_failed_fraction,
            **self._choice_of_groups(),
        )
        needs_rewards_early = staleness.max_staleness > 0 or rollout_settings.reads_rewards
        if is_fit and not needs_rewards_early and module.data_flow().beside_rewards():
            rollout_settings = dataclasses.replace(rollout_settings, judges_later=True)
        folder = Path(self.log_dir or self.default_root_dir)  # on all ranks: it is a collective
        start = functools.partial(
            self._start_rollout,
            module,
            None if self.fast_dev_run else folder / "failed_rewards.jsonl",
            rollout_settings,
            prompts,
        )
        ranks = self.rollout_loop.ranks
        if ranks.size == 1:
            self.rollout = start()
        else:
            self.rollout = SharedRollout(
                start,
                ranks,
                run_seed=self.run_seed,
                settings=rollout_settings,
            )
        if is_fit:
            self.rollout_loop.restore_rollout()
        self._say_what_runs(module, staleness.max_staleness, groups_per_iteration if is_fit else None)

    def _open_recorded(self, module: RLModule, recorded: list[list[Group]]) -> None:
        """Trajectories of an earlier run, in the place of engine, judge and controller; the same on every rank."""
        self.fit_loop.setup_data()
        self.rollout = RecordedRollout(recorded, run_seed=self.run_seed)
        self.rollout_loop.restore_rollout()
        num = sum(len(group.trajectories) for groups in recorded for group in groups)
        log.info("no engine: %d recorded iterations with %d trajectories", len(recorded), num)

    def _start_rollout(
        self, module: RLModule, failures: Path | None, settings: RolloutSettings, prompts: PromptStream | None
    ) -> RolloutController:
        """Judge, engine and controller; on rank 0 only."""
        if self._judge is None:
            self._judge = make_judge_of(module)
        if failures is not None:
            self._judge = FailureLog(self._judge, failures)
        self._judge.start()
        if self.engine is None:
            self.engine = LocalEngine()
        self.engine.start(module.policy_config)
        self._engine_is_open = True
        workflow = module.configure_workflow()
        contexts = (module.context_tokens, getattr(self.engine, "max_context", None))
        workflow.fit_context(min((tokens for tokens in contexts if tokens is not None), default=None))
        return RolloutController(
            self.engine,
            workflow,
            self._judge,
            settings,
            sampling=self.with_stop_tokens(module.sampling),
            run_seed=self.run_seed,
            prompts=prompts,
        )

    def _say_what_runs(self, module: RLModule, max_staleness: int, groups_per_iteration: int | None) -> None:
        """What follows from the settings and cannot be set: printed, so that nobody has to guess it."""
        if not self.is_global_zero:
            return
        engine_threads = getattr(self.engine, "threads", None)
        threads = "" if engine_threads is None else f", {engine_threads} threads for decoding"
        log.info("engine: %s%s; %d threads for updates", type(self.engine).__name__, threads, torch.get_num_threads())
        policy: Any = module.policy
        sources = stop_token_ids(policy, module.tokenizer, module.sampling)
        stops = (f"{module.tokenizer.decode(ids)} {ids} ({name})" for name, ids in sources.items())
        log.info("stop tokens: %s", "; ".join(stops))
        if groups_per_iteration is not None:
            log.info(
                "iteration: %d groups x %d = %d trajectories, %d updates, max_staleness %d",
                groups_per_iteration,
                module.group_size,
                groups_per_iteration * module.group_size,
                module.num_minibatches * module.update_epochs,
                max_staleness,
            )

    def _choice_of_groups(self) -> dict[str, Any]:
        """What the callbacks that say which prompts and groups are worth an update ask of the controller."""
        settings: dict[str, Any] = {}
        for callback in self.callbacks:
            if isinstance(callback, PromptCurriculum):
                settings["curriculum"] = callback.curriculum
            if isinstance(callback, DynamicSampling):
                settings["group_filter"] = callback.group_filter
                settings["incomplete_groups"] = callback.incomplete_groups
                settings["oversample_fraction"] = callback.oversample_fraction
                settings["max_dropped_groups"] = callback.max_dropped_groups_per_iteration
        if self.lightning_module.loss_unit == "pair" and settings.get("incomplete_groups", "train") == "train":
            settings["incomplete_groups"] = "redraw"  # an odd number of trajectories has no pairs
        return settings

    def _close_rollout(self) -> None:
        """Keeps the rollout's state for checkpoints and later fits; ends threads and processes, each in any case."""
        vars(self.precision_plugin).pop("convert_input", None)
        with contextlib.ExitStack() as stack:
            if self._engine_is_open and self.engine is not None:
                stack.callback(self._close_engine, self.engine)
            if self._judge is not None:
                stack.callback(self._close_judge, self._judge)
            if self.rollout is not None:
                stack.callback(self._close_controller, self.rollout)
                self.rollout_loop.keep_rollout()

    def _close_controller(self, rollout: AnyRollout) -> None:
        rollout.close()
        self.rollout = None

    def _close_judge(self, judge: Judge) -> None:
        judge.close()
        self._judge = None

    def _close_engine(self, engine: RolloutEngine) -> None:
        engine.close()
        self._engine_is_open = False

    # ------------------------------------------------------------------ checks before anything starts

    def _check(self, module: RLModule) -> None:
        check_strategy(self.strategy, module)
        # Lightning would give each rank other prompts, shuffled: here all ranks count the same iterations.
        self._accelerator_connector.use_distributed_sampler = False
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__}.automatic_optimization is False, expected True: the loop updates the policy "
                "with what `loss` returns. Leave it as it is."
            )
        if self.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches={self.accumulate_grad_batches}, expected 1 with an RLModule: microbatches "
                "are cut by tokens. Set model.microbatch_tokens instead."
            )
        for kind in (WeightSync, StalenessControl, RolloutMetrics):
            found = [callback for callback in self.callbacks if isinstance(callback, kind)]
            if len(found) != 1:
                raise ValueError(f"There are {len(found)} {kind.__name__} callbacks, expected one. Remove the others.")
        for optional in (DynamicSampling, PromptCurriculum):
            if sum(isinstance(callback, optional) for callback in self.callbacks) > 1:
                raise ValueError(f"There are several {optional.__name__} callbacks, expected at most one. Remove one.")
        needed = self._one_of(WeightSync).every_n_iterations - 1
        allowed = self._one_of(StalenessControl).max_staleness
        if allowed < needed:
            raise ValueError(
                f"WeightSync(every_n_iterations={needed + 1}) makes trajectories up to {needed} versions old, expected "
                f"max_staleness={allowed} to allow that. Raise StalenessControl.max_staleness to {needed}, "
                "or sync more often."
            )

    def _check_sizes(self, module: RLModule, groups_per_iteration: int) -> None:
        num = groups_per_iteration * module.group_size
        if num % module.num_minibatches:
            raise ValueError(
                f"num_minibatches={module.num_minibatches} does not divide the iteration's {groups_per_iteration} "
                f"groups × group_size={module.group_size} = {num} trajectories, expected a divisor. "
                "Change one of the three."
            )
        dp_size = max(self.rollout_loop.ranks.of_role(role).dp_size for role in module.trained_roles())
        if num // module.num_minibatches < dp_size:
            raise ValueError(
                f"A minibatch has {num // module.num_minibatches} trajectories for {dp_size} data-parallel ranks, "
                f"expected at least one for each. Set num_minibatches to at most {max(1, num // dp_size)}, raise the "
                "batch_size, or use fewer devices."
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
                # Lightning 2.6.6 writes `last.ckpt` under fast_dev_run too, into the working folder.
                keeps = not self.fast_dev_run
                self.callbacks[index] = ModelCheckpoint(save_last=keeps, save_on_exception=keeps)

    def _use_plain_no_grad(self) -> None:
        """Tensors made under Lightning's inference mode could not be loaded into in place later."""
        for loop in (self.fit_loop.epoch_loop.val_loop, self.validate_loop, self.test_loop, self.predict_loop):
            loop.inference_mode = False


def make_judge_of(module: RLModule) -> Judge:
    """What gives rewards to the trajectories of this module, not started."""
    return make_judge(
        module.reward_source if module.reward_source is not None else module.reward,
        workers=module.reward_workers,
        timeout_s=module.reward_timeout_s,
        memory_limit_mib=module.reward_memory_mib,
        recycle_after=module.reward_recycle_after,
        search_paths=[str(Path.cwd())],
    )
