"""Trainer: Lightning's Trainer with an engine. It installs RolloutLoop, adds default callbacks and calls RL hooks.

A plain LightningModule runs as in Lightning's Trainer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.algorithms import AdaptiveKL, ReferenceKL
from lightrl.callbacks import RLCallback, RolloutMetrics, RolloutProgressBar, StalenessControl, WeightSync
from lightrl.callbacks.progress import ModelLines
from lightrl.callbacks.run_files import ProblemLog, RunFiles, StatusFile, TimedCheckpoint, keep_slashes_out
from lightrl.callbacks.weight_sync import check_no_overlap
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_kind
from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import check_local, nearest_folder
from lightrl.concurrency.owner import hold, let_go
from lightrl.data import PromptDataModule
from lightrl.engines import RolloutEngine
from lightrl.errors import LightRLError, OtherRankFailed
from lightrl.functional import ImportanceWeights, RewardShaping
from lightrl.loops import (
    CheckpointConnector,
    RolloutLoop,
    RolloutStage,
    StepLog,
    check_exists,
    check_resume,
    keep_rows,
    logging_allowed,
)
from lightrl.models import LoRA, ModelSpec, Role, RoleMesh, check_compiled
from lightrl.models.precision import rounding_warning
from lightrl.module import RLModule, TrainedModule
from lightrl.rewards.length_penalty import OverlongPenalty
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import AtomicCheckpointIO, FSDP2Strategy, check_strategy, named_strategy, ranks_of
from lightrl.strategies.checkpoint.atomic_write import logged_behind_failure
from lightrl.trajectory import Sampling

log = logging.getLogger(__name__)
# Each new Trainer makes Lightning advertise its cloud and report that there is no TPU.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda line: not any(text in line.getMessage() for text in ("Tip: For", "TPU available: False"))
)

# Plain data that hyperparameters may contain: checkpoints are loaded with weights_only=True.
torch.serialization.add_safe_globals([
    LoRA, ModelSpec, Role, RoleMesh, Sampling, AdaptiveKL, ImportanceWeights, OverlongPenalty, ReferenceKL,
    RewardShaping,
])  # fmt: skip

# Lightning's warnings about behavior that lightrl intends.
INTENDED: tuple[tuple[str, type[Warning]], ...] = (
    # Models stay in evaluation mode: dropout would make trainer and engine disagree.
    (r"Found \d+ module\(s\) in eval mode", UserWarning),
    # Validation batches become groups with rewards in a module hook, for any data module.
    (r"You have overridden `(transfer_batch_to_device|on_after_batch_transfer)`", UserWarning),
    # The loader only counts iterations, because prompts are read by position.
    (r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not", UserWarning),
    # For the same reason, batches have no dataset indices, which a prediction writer may request.
    (r"Couldn't infer the batch indices", UserWarning),
    # Lightning 2.6.6 uses a name that torch 2.13 has changed.
    (r".*isinstance\(treespec, LeafSpec\)", FutureWarning),
    # Each run, even a resumed one, saves its best checkpoints in a new folder.
    (r"The dirpath has changed from", UserWarning),
    (r"You defined a `validation_step` but have no `val_dataloader`", UserWarning),  # validation is optional
    (r"Precision [\w-]+ is not supported by the model summary", UserWarning),  # lightrl logs the model's size
)


def ignore_srun_advice() -> None:
    """Hides Lightning's advice to use `srun`, except in Slurm jobs."""
    if "SLURM_JOB_ID" not in os.environ:
        warnings.filterwarnings("ignore", "The `srun` command is available", UserWarning)


def set_device_defaults(flags: LightningSettings) -> None:
    """Sets precision to bf16-mixed on a CUDA GPU unless the user has set it; never chooses MPS, which is untested."""
    accelerator = flags.get("accelerator") or "auto"
    if not torch.cuda.is_available():
        flags["accelerator"] = "cpu" if accelerator == "auto" and torch.backends.mps.is_available() else accelerator
    elif accelerator in ("auto", "gpu", "cuda") and flags.get("precision") is None and not flags.get("plugins"):
        flags["precision"] = "bf16-mixed"
        torch.set_float32_matmul_precision("high")
        log.info("Using bf16-mixed precision, and TF32 for float32 products. Set trainer.precision to change this.")


class LightningSettings(TypedDict, total=False):
    """The other arguments to Lightning's Trainer, for type checkers."""

    accelerator: str | Accelerator
    devices: list[int] | str | int
    num_nodes: int
    precision: Any
    logger: Logger | Iterable[Logger] | bool | None
    fast_dev_run: int | bool
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: str | timedelta | dict[str, int] | None
    limit_train_batches: float | None
    limit_val_batches: float | None
    limit_test_batches: float | None
    limit_predict_batches: float | None
    overfit_batches: float
    val_check_interval: float | str | timedelta | dict[str, int] | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Profiler | str | None
    detect_anomaly: bool
    barebones: bool
    plugins: Any
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str | Path | None
    enable_autolog_hparams: bool
    model_registry: str | None


class Trainer(RLTrainer):
    """Lightning's Trainer for RLModules. Every flag works as in Lightning; one training batch is one iteration.

    Adds `WeightSync()`, `StalenessControl(0)`, `RolloutMetrics()` and a two-line progress bar unless you pass your own.
    Unless you turn checkpoints off, it saves every 10 minutes in the background (`last-timed.ckpt`), at the end, and on
    Ctrl-C, SIGTERM and errors, next to your ModelCheckpoint's files; without a ModelCheckpoint, also after each epoch.

    Args:
        engine: generates completions; None uses `LocalEngine()`, which runs in this process.
        callbacks: one or several callbacks, from Lightning or lightrl.
        strategy: an object or a name from Lightning or lightrl; for several devices, auto or None means FSDP2Strategy.
        precision: as in Lightning; None uses `bf16-mixed` on a CUDA GPU, otherwise Lightning's default.
        log_every_n_steps: as in Lightning. None logs every iteration of an RLModule, otherwise every 50 steps.
        kwargs: other arguments to Lightning's Trainer.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine | None = None,
        callbacks: list[Callback] | Callback | None = None,
        strategy: Strategy | str | None = "auto",
        log_every_n_steps: int | None = None,
        **kwargs: Unpack[LightningSettings],
    ) -> None:
        if kwargs.get("accelerator") == "gpu" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            raise ValueError(
                f"accelerator=gpu needs a GPU, but torch {torch.__version__} sees none. Set accelerator to auto or "
                "cpu, or install a torch build that fits the driver (nvidia-smi shows whether there is one)."
            )
        if not (logger := logging.getLogger("lightrl")).hasHandlers():  # as Lightning does for its own logger
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logger.level or logging.INFO)
            logger.propagate = False
        check_local(default_root_dir=kwargs.get("default_root_dir"))
        check_kind(RolloutEngine, engine=engine)
        set_device_defaults(kwargs)
        user_callbacks = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks is not None else []
        with warnings.catch_warnings():
            ignore_srun_advice()
            names = ("accelerator", "devices", "num_nodes")
            flags: Any = {name: value for name, value in kwargs.items() if name in names and value is not None}
            strategy = strategy or "auto"  # with several devices Lightning would use DDP
            if strategy == "auto" and not isinstance(_AcceleratorConnector(**flags).strategy, SingleDeviceStrategy):
                strategy = FSDP2Strategy()
            # Lightning appends its defaults to the list that it gets; a copy keeps the user's list unchanged.
            super().__init__(
                callbacks=list(user_callbacks),
                strategy=named_strategy(strategy),
                log_every_n_steps=log_every_n_steps,
                **kwargs,
            )
        self._logger_connector = step_log = StepLog(self)
        self.log_number = step_log.put
        self._logs_every_iteration = log_every_n_steps is None
        self.engine = engine
        self.memory_estimate = "Run `lightrl plan` for a memory estimate."  # of one rank, as text
        self.phase_seconds = {}
        self.rollout_loop = RolloutLoop(self)
        self.rewarded_groups = self.rollout_loop.rewarded_groups
        self.fit_loop.epoch_loop.automatic_optimization = self.rollout_loop
        self._stage = RolloutStage(self, self.rollout_loop.resume)
        self._new_folders: list[Path] = []  # created for this run, until it has started
        self._held: list[Path] = []  # locked for this run
        self._muted: list[Any] = []  # checkpoint callbacks whose saving on exceptions is off until a stage runs
        self._hook_calls: deque[tuple[str, tuple[object, ...]]] = deque()
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = AtomicCheckpointIO()
        self._add_default_callbacks(user_callbacks)
        self._checkpoint_connector = CheckpointConnector(self, self.rollout_loop.resume)

    def rl_hooks(self, name: str, module: L.LightningModule | None = None) -> Iterator[Callable[..., Any]]:
        module = self.lightning_module if module is None else module
        for callback in self.callbacks:
            hook = getattr(callback, name, None)
            if hook is not None and getattr(hook, "__func__", None) is not getattr(RLCallback, name):  # overridden
                yield functools.partial(hook, self, module)
        hook = getattr(module, name, None)
        if hook is not None:
            yield hook

    def call_rl_hook(self, name: str, *args: object) -> None:
        """Calls an RL hook of all callbacks and the module. A call from inside a hook waits until that hook ends.

        So all callbacks get `on_weight_sync` first, although WeightSync calls `on_weights_synced` inside that hook.
        """
        self._hook_calls.append((name, args))
        if len(self._hook_calls) > 1:
            return
        try:
            with logging_allowed(self.lightning_module):
                while self._hook_calls:
                    name, args = self._hook_calls[0]
                    for hook in self.rl_hooks(name):
                        hook(*args)
                    self._hook_calls.popleft()
                    self.rollout_loop.ranks.step()
        finally:
            self._hook_calls.clear()

    @property
    def log_dir(self) -> str | None:
        """The run's folder, where callbacks also write. All ranks must read it together: reading it is a collective.

        Lightning's `log_dir` is a folder per run only if the first logger is TensorBoard or CSV; with Weights & Biases
        or MLflow, all runs share a folder. This is the folder of the first TensorBoard or CSV logger, otherwise
        save_dir/name/version, as for ModelCheckpoint. MLflow on a server has no save_dir.
        """
        loggers: list[Any] = [*self.loggers]
        file_logger = next((logger for logger in loggers if isinstance(logger, CSVLogger | TensorBoardLogger)), None)
        folder = None
        if file_logger is not None:
            version, folder = file_logger._version, file_logger.log_dir
            file_logger._version = version  # reading `log_dir` sets it, but only `_claim_folders` may choose one
        elif loggers and self.is_global_zero:
            _ = loggers[0].experiment  # sets the version
            name, version = str(loggers[0].name), loggers[0].version
            if version not in (None, ""):
                version = version if isinstance(version, str) else f"version_{version}"
                folder = str(Path(loggers[0].save_dir or self.default_root_dir, name, version))
        return self.strategy.broadcast(folder) or super().log_dir

    def fit(self, model: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Trains a module; the arguments are Lightning's.

        Raises:
            RuntimeError: if an earlier fit failed while it resumed, so that a checkpoint may be partly restored.
        """
        if self.restoring is not None:
            raise RuntimeError(
                f"This trainer's last fit failed while it resumed from {self.restoring}, so its counters and "
                "callbacks may be partly restored. Create a new Trainer and new callbacks."
            )
        with self._checked(model, args, kwargs, is_fit=True):
            super().fit(model, *args, **kwargs)

    def validate(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a policy on the validation prompts; the arguments are Lightning's."""
        with self._checked(model, args, kwargs):
            return super().validate(model, *args, **kwargs)

    def test(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a policy on the test prompts; the arguments are Lightning's."""
        with self._checked(model, args, kwargs):
            return super().test(model, *args, **kwargs)

    def predict(self, model: L.LightningModule | None = None, *args: Any, **kwargs: Any) -> Any:
        """Rolls out the test prompts with rewards, without training on them; the arguments are Lightning's."""
        with self._checked(model, args, kwargs):
            return super().predict(model, *args, **kwargs)

    @contextlib.contextmanager
    def _checked(
        self, model: L.LightningModule | None, args: Sequence[object], kwargs: dict[str, Any], *, is_fit: bool = False
    ) -> Iterator[None]:
        """Checks that trainer and module fit together, before any model is built; hides intended warnings inside."""
        given = (*args, *kwargs.values())
        needs_rewards = not (is_fit and any(hasattr(data, "recorded_groups") for data in given))
        if vars(rank_zero_only)["rank"] == 0:  # if another rank failed alone, the rest would wait for it
            check_exists(kwargs.get("ckpt_path"))
        module = self.lightning_module if model is None else getattr(model, "_orig_mod", model)  # undoes torch.compile
        self._mute_checkpoints()  # until the stage runs, because a half-restored state must not be saved
        with warnings.catch_warnings():
            ignore_srun_advice()
            if isinstance(module, RLModule):
                self._stage.tasks = next((data.tasks for data in given if isinstance(data, PromptDataModule)), None)
                self._stage.check(module, is_fit=is_fit)
                self._check_callbacks()
                self._monitors.before_start(self)
                # Lightning's sampler would shuffle and shard prompts, but all ranks must count the same iterations.
                self._accelerator_connector.use_distributed_sampler = False
            if isinstance(module, TrainedModule):
                check_strategy(self.strategy, module)
                if vars(rank_zero_only)["rank"] == 0:
                    self._check_folders()
                for message, category in INTENDED:
                    warnings.filterwarnings("ignore", message, category)
            for check in self.rl_hooks("before_fit", module) if is_fit else ():
                check(next((data for data in given if isinstance(data, L.LightningDataModule)), None))
            try:
                if isinstance(module, RLModule) and needs_rewards and vars(rank_zero_only)["rank"] == 0:
                    self._check_engine(module, is_fit=is_fit)
                    self._stage.start_reward_worker(module)
                yield
            except LightRLError:
                self._new_folders = []  # keep them: their logs explain the error
                raise
            except SystemExit as error:  # a supervisor must see that the run did not finish, and why
                if isinstance(error, SIGTERMException):
                    error.code = 128 + signal.SIGTERM
                elif isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits with 1
                    error.code = 128 + signal.SIGINT
                raise
            except torch.OutOfMemoryError as error:
                raise self.rollout_loop.out_of_memory(error, module) from error
            except (RuntimeError, MisconfigurationException) as error:
                self._monitors.explain(self, error)
                if isinstance(module, RLModule) and str(error).startswith("Training with multiple optimizers"):
                    raise ValueError(
                        f"{type(module).__name__}.configure_optimizers must return one optimizer, with a parameter "
                        "group for each learning rate; `parameter_groups` returns one for each trained model."
                    ) from error
                raise
            finally:
                self._stage.close()  # in case the stage did not start, or a second Ctrl-C interrupted its close
                self._checkpoint_connector._loaded_checkpoint = {}  # the next stage would read a refused checkpoint
                for folder in self._new_folders:  # the run did not start
                    shutil.rmtree(folder, ignore_errors=True)
                for folder in self._held:
                    let_go(folder)
                self._new_folders, self._held = [], []

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `fit`, `validate`, `test` or `predict`; raises OtherRankFailed if another rank failed first."""
        self.restoring = None
        if self.state.fn == TrainerFn.FITTING:
            self.restoring = kwargs.get("ckpt_path")
            self.strategy.optimizers = []  # remove an earlier fit's optimizers, so that settings may still change
        try:
            if self.is_global_zero:
                self._claim_folders()
            if self.is_global_zero and (self.restoring or self.state.fn != TrainerFn.FITTING):
                keep_rows(self.loggers)  # Lightning would delete the rows, which is right only for a new run
            return super()._run(*args, **kwargs)
        except Exception as error:  # another rank's failure can cause any error here
            ranks = ranks_of(self.strategy)
            ranks.fail(error)  # waits until it is clear whether another rank is the cause
            if ranks.failed_before is None or str(error) in ranks.failed_before:  # all ranks raised this same error
                raise
            raise OtherRankFailed(
                f"Rank {self.global_rank} could not continue because another rank failed first. Fix that failure; its "
                f"output is above.\n{ranks.failed_before}"
            ) from error

    def _run_stage(self) -> Any:
        while self._muted:
            self._muted.pop().save_on_exception = True
        module = self.lightning_module
        if self.state.fn == TrainerFn.FITTING and isinstance(module, TrainedModule):
            self.rollout_loop.resume.apply_settings()
            if (warning := rounding_warning(self.optimizers, self.rollout_loop.ranks.total)) and self.is_global_zero:
                log.warning("%s", warning)
        if not isinstance(module, RLModule):
            self.restoring, self._new_folders = None, []
            return super()._run_stage()
        with contextlib.ExitStack() as stack:
            stack.push(self._note_failure)
            stack.callback(self._stage.close)
            return self._run_rl_stage(module)

    def _note_failure(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Records an error that ended the stage; if it prevents a checkpoint, stops callbacks from saving and warns."""
        if error is None:
            return
        resume = self.rollout_loop.resume
        resume.note_failure(error)
        if resume.why_no_checkpoint is not None:  # for example, closing failed to read the state
            muted = self._mute_checkpoints()
            if muted and self.rollout_loop.ranks.failed_before is None and self.global_step:  # else a rank has warned
                self._warn_of_no_checkpoint(getattr(muted[0], "dirpath", None))

    def ended_by_sigterm(self) -> contextlib.AbstractContextManager[None]:
        loop = self.rollout_loop
        return loop.gate.raised_at_once(loop.ranks) if loop.ranks.size == 1 else super().ended_by_sigterm()

    def _run_rl_stage(self, module: RLModule) -> Any:
        """Opens a stage's engine, rollout and other resources, then runs Lightning's loop."""
        loop, ranks = self.rollout_loop, self.rollout_loop.ranks
        with loop.gate.raised_at_once(ranks):
            if self.received_sigterm:  # while models were being loaded
                raise SIGTERMException
            loop.gate.begin()
            loop.resume.begin()
            for inner in (self.fit_loop.epoch_loop.val_loop, self.validate_loop, self.test_loop, self.predict_loop):
                inner.inference_mode = False  # a later weight load cannot overwrite inference tensors
            if self._logs_every_iteration:
                self.log_every_n_steps = 1
            self._stage.open(module)
        ranks.begin()
        self.restoring, self._new_folders = None, []
        with loop.gate.held_back_on_all_ranks(ranks):
            results = super()._run_stage()
        if self.state.fn == TrainerFn.FITTING and self.fast_dev_run:
            check_resume(self)
        return results

    def _mute_checkpoints(self) -> list[Any]:
        """Stops callbacks from saving on exceptions until the next stage runs; returns these callbacks.

        Otherwise a callback would link to a checkpoint that `save_checkpoint` refuses to write.
        """
        saving: list[Any] = [item for item in self.checkpoint_callbacks if getattr(item, "save_on_exception", False)]
        for callback in saving:
            callback.save_on_exception = False
        self._muted += saving
        return saving

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> Any:
        """Saves a checkpoint as Lightning does; returns whether it was saved."""
        if self.rollout_loop.resume.why_no_checkpoint is not None:
            self._warn_of_no_checkpoint(filepath)
        elif isinstance(self.lightning_module, RLModule) and not hasattr(self.lightning_module, "policy"):
            log.warning("No checkpoint was saved at %s: the run failed before its models were loaded.", filepath)
        else:
            with logged_behind_failure():
                super().save_checkpoint(filepath, weights_only, storage_options)
                self.saved_at = self.global_step
                return True
        return False

    def _warn_of_no_checkpoint(self, path: object) -> None:
        log.warning(
            "No checkpoint was saved at %s: %s, so a resumed run would train on groups twice or never. Any earlier "
            "checkpoints are still there. Save between iterations, for example in on_train_batch_end.",
            path,
            self.rollout_loop.resume.why_no_checkpoint,
        )

    def _add_default_callbacks(self, user_callbacks: list[Callback]) -> None:
        for kind in (StalenessControl, RolloutMetrics, WeightSync):
            if not any(isinstance(callback, kind) for callback in self.callbacks):
                self.callbacks.insert(0, kind())
        self._monitors = entry_point("monitors")()
        self.callbacks.insert(0, self._monitors)
        first_saving = len(self.callbacks) - len(self.checkpoint_callbacks)  # Lightning keeps these last
        for files in (ProblemLog, StatusFile, RunFiles):
            if not any(isinstance(callback, files) for callback in self.callbacks):
                self.callbacks.insert(first_saving, files())
        for index, callback in enumerate(self.callbacks):
            if callback in user_callbacks:
                continue
            if isinstance(callback, ProgressBar):
                self.callbacks[index] = RolloutProgressBar()
            elif isinstance(callback, ModelSummary):
                self.callbacks[index] = ModelLines()
            elif type(callback) is ModelCheckpoint:
                # Lightning 2.6.6 writes `last.ckpt` into the working directory even under fast_dev_run.
                should_save = not self.fast_dev_run
                self.callbacks[index] = ModelCheckpoint(save_last=should_save, save_on_exception=should_save)
        saving = [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in saving:
            keep_slashes_out(callback)
        if saving and not self.fast_dev_run and not any(isinstance(item, TimedCheckpoint) for item in saving):
            self.callbacks.append(TimedCheckpoint(saving[0].dirpath))

    def _check_folders(self) -> None:
        """Raises ValueError if this run cannot write to one of its folders."""
        folders: list[Any] = [getattr(logger, "save_dir", None) or self.default_root_dir for logger in self.loggers]
        for folder in folders:  # callbacks also write there
            check_local(save_dir=folder)
        for callback in self.checkpoint_callbacks:  # by default they save next to the first logger's files
            folders.append(getattr(callback, "dirpath", None) or (folders or [self.default_root_dir])[0])
        for folder in folders:
            existing = nearest_folder(Path(folder))
            if "://" not in str(folder) and not os.access(existing, os.W_OK):
                raise ValueError(
                    f"The run would write to {folder}, but {existing} is read-only or not writable by this user. Set "
                    "trainer.default_root_dir, the logger's save_dir or ModelCheckpoint's dirpath to a writable folder."
                )

    def _claim_folders(self) -> None:
        """Creates the folder of each CSV or TensorBoard logger without a version, so that no other run gets it.

        Folders that the user named are locked, because another run may use the same name.
        """
        versions: dict[str, Any] = {}  # root → version, so that loggers without a version share a folder
        loggers: list[Any] = [logger for logger in self.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
        for logger in [logger for logger in loggers if "://" not in str(logger.save_dir)]:
            root = logger.root_dir
            if logger._version is not None:
                self._hold(Path(logger.log_dir), f"{type(logger).__name__}.version")
            elif root in versions:
                logger._version = versions[root]
            else:
                while not self._is_created(Path(logger.log_dir)):
                    logger._version = logger.version + 1
                versions[root] = logger.version
                _ = logger.experiment  # now, because a CSVLogger warns if another logger has written files
        for callback in self.checkpoint_callbacks if self.state.fn == TrainerFn.FITTING else ():
            if not isinstance(callback, ModelCheckpoint) or "://" in str(callback.dirpath):
                continue
            if callback.dirpath:
                self._hold(Path(callback.dirpath), "ModelCheckpoint.dirpath")
            elif not self.loggers:  # all runs share this folder
                self._hold(Path(self.default_root_dir, "checkpoints"), "checkpoints in trainer.default_root_dir")
        has_own_folder = bool(self.loggers) or self.state.fn != TrainerFn.FITTING or bool(self.fast_dev_run)
        for writer in () if has_own_folder else self.callbacks:
            if output := getattr(writer, "run_folder_output", None):
                self._hold(Path(self.default_root_dir, output), f"{type(writer).__name__} in default_root_dir")

    def _is_created(self, log_dir: Path) -> bool:
        folder = next(place for place in (log_dir, *log_dir.parents) if place.name.startswith("version_"))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return False
        self._new_folders.append(folder)
        return True

    def _hold(self, folder: Path, setting: str) -> None:
        hold(folder, setting)
        self._held.append(folder)
        if not folder.exists():
            self._new_folders.append(folder)

    def _check_engine(self, module: RLModule, *, is_fit: bool) -> None:
        if self.engine is None:
            return
        if is_fit and isinstance(self.strategy, FSDP2Strategy) and self.strategy.compile_layers:
            check_compiled(self.engine.records_columns, module.models()["policy"].spec.load_config())
        self.engine.check()
        for sampling in (module.sampling, module.validation_sampling):
            self.engine.check_sampling(sampling)
        if is_fit and self.engine.is_colocated:
            check_no_overlap(next(item for item in self.callbacks if isinstance(item, StalenessControl)).max_staleness)

    def _check_callbacks(self) -> None:
        required = (WeightSync, StalenessControl, RolloutMetrics)
        kinds = (kind for callback in self.callbacks for kind in type(callback).__mro__)
        for kind in (*required, *(kind for kind in kinds if vars(kind).get("is_single"))):
            num = sum(isinstance(callback, kind) for callback in self.callbacks)
            if num > 1 or (num == 0 and kind in required):
                raise ValueError(f"A trainer takes one {kind.__name__} callback, got {num}.")
        sync = next(item for item in self.callbacks if isinstance(item, WeightSync))
        control = next(item for item in self.callbacks if isinstance(item, StalenessControl))
        needed = sync.every_n_iterations - 1
        if control.max_staleness < needed:
            raise ValueError(
                f"WeightSync(every_n_iterations={needed + 1}) lets the staleness reach {needed}, but StalenessControl "
                f"has max_staleness={control.max_staleness}. Increase it to {needed}, or sync more often."
            )
