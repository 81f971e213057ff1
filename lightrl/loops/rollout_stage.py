"""RolloutStage: opens the models, reward worker, engine and rollout for `fit`, `validate`, `test` or `predict`.

It checks settings before it uses a device, logs the settings that it derives, and always closes everything it opened.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightrl.checks.printable import count_text
from lightrl.concurrency.in_thread import call_all
from lightrl.data import PromptStream, prompt_source
from lightrl.dataflow import DataFlowGraph
from lightrl.engines import LocalEngine
from lightrl.loops.resume import Resume
from lightrl.loops.shared_rollout import SharedRollout
from lightrl.models import ParallelModel
from lightrl.models.chat_template import with_stop_tokens
from lightrl.module import RLModule
from lightrl.rewards import FailureLog, RewardWorker, make_reward_worker
from lightrl.rollout import RecordedRollout, Rollout, RolloutController, RolloutSettings
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import LogprobSettings, Ranks, parallel_model, ranks_of
from lightrl.strategies.layouts.halves import SMALL_MODEL_PARAMETERS
from lightrl.strategies.precision import LeavesBatches, subclassed

_AVERAGES = (
    "it puts averaged weights into the policy when training ends, after the last sync with the engine and the last "
    "validation. Average checkpoints instead: lightrl export 1.ckpt 2.ckpt --to FOLDER."
)

_INSTEAD: dict[type[Callback], str] = {
    LearningRateFinder: (
        "it searches for the steepest drop in the loss, but a policy's loss does not measure progress. Compare short "
        "runs with several values of model.lr."
    ),
    BatchSizeFinder: (
        "it grows the batch until memory runs out, but microbatches are split by tokens. Set model.microbatch_tokens; "
        "`lightrl plan` estimates the memory."
    ),
    GradientAccumulationScheduler: (
        "an update accumulates its microbatches' gradients already. Set model.microbatch_tokens, and "
        "model.num_minibatches for updates per iteration."
    ),
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    ThroughputMonitor: (
        "it counts the samples in a batch, but an iteration's batch has none. `rollout/tokens_per_s` and "
        "`update/tokens_per_s` are logged anyway."
    ),
    SpikeDetection: (
        "it compares the loss with earlier ones, but a policy's loss has no typical level. Set "
        "trainer.gradient_clip_val; an update without a finite gradient is skipped anyway."
    ),
    ModelPruning: ("it renames the parameters, so the engine would not find them. Prune the exported model instead."),
    RichProgressBar: (
        "its line is too short for an iteration's numbers and wraps. Leave it out to get RolloutProgressBar, which "
        "also shows the phases, or use TQDMProgressBar."
    ),
    BaseFinetuning: (
        "it freezes layers before the models are loaded. In configure_model, call super().configure_model(), then "
        "requires_grad_(False) on the layers to freeze."
    ),
}

log = logging.getLogger(__name__)

# New objects per garbage collection. With Python's default of 700, 40 collections took 14 ms of a 340 ms iteration.
_OBJECTS_PER_COLLECTION = 20_000


class RolloutStage:
    """Opens a stage and closes it again.

    Args:
        trainer: its `open_rollout` is set while the stage is open; its `engine` becomes LocalEngine if it is None.
        resume: keeps the rollout's state when the stage closes, and loads it into the next rollout.
    """

    def __init__(self, trainer: RLTrainer, resume: Resume) -> None:
        self.trainer = trainer
        self.resume = resume
        self.tasks: Any = None  # the data module's Tasks; None if it has none
        self._reward_worker: RewardWorker | None = None
        self._engine_is_open = False
        self._num_threads = 0  # closing the stage restores this number and the next two attributes
        self._precision: Precision | None = None
        self._gc_threshold = gc.get_threshold()

    def check(self, module: RLModule, *, is_fit: bool = False) -> None:
        """Raises an error if the trainer cannot run this module; called before any model is built."""
        name = type(module).__name__
        if self.tasks is not None:
            self.tasks.check(module)
        if type(module).training_step is not RLModule.training_step:
            raise ValueError(f"{name}.training_step is never called: an RLModule has no training_step. Write loss.")
        if is_fit and type(module).loss is RLModule.loss:
            raise TypeError(f"{name} has no loss. Write `def loss(self, experience, outputs)`, which returns a dict.")
        if not module.automatic_optimization:
            raise ValueError(
                f"{name}.automatic_optimization must be True, because the loop updates the policy with `loss`."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches must be 1 with an RLModule, got {self.trainer.accumulate_grad_batches}: "
                "microbatches are split by tokens. Set model.microbatch_tokens instead."
            )
        if module.workflow_workers:
            (self.trainer.engine or LocalEngine()).check_workers(module.workflow_workers)
        for callback in getattr(self.trainer, "callbacks", ()):  # `Tuner` adds finder callbacks
            for kind, reason in _INSTEAD.items():
                if isinstance(callback, kind):
                    raise ValueError(f"{type(callback).__name__} cannot be used with an RLModule: {reason}")

    def start_reward_worker(self, module: RLModule) -> RewardWorker:
        """Starts the reward worker before any model is built, only on rank 0. Fails without a reward function."""
        make = functools.partial(
            make_reward_worker,
            workers=module.reward_workers,
            timeout_s=module.reward_timeout_s,
            memory_limit_mib=module.reward_memory_mib,
            recycle_after=module.reward_recycle_after,
            search_paths=[str(Path.cwd())],
        )
        if self._reward_worker is None:
            worker = make(module.reward_source if module.reward_source is not None else module.reward)
            self._reward_worker = self.tasks.reward_worker(worker, make) if self.tasks else worker
        worker = self._reward_worker
        worker.start()
        return worker

    def open(self, module: RLModule) -> None:
        """Opens the stage once the module's models and state are restored. Raises ValueError for bad settings."""
        trainer, self._num_threads = self.trainer, torch.get_num_threads()
        is_fit = trainer.state.fn == TrainerFn.FITTING
        recorded = getattr(getattr(trainer, "datamodule", None), "recorded_groups", None) if is_fit else None
        graph = module.data_flow(from_file=recorded is not None)  # raises if the calls do not form a valid graph
        module.parallel_models = _parallel_models(trainer, module)
        self._precision = trainer.precision_plugin
        if type(self._precision).convert_input is not Precision.convert_input:
            trainer.strategy.precision_plugin = subclassed(self._precision, LeavesBatches)
        if recorded is None:
            trainer.open_rollout = self._open_live(module, graph, is_fit)
        else:
            trainer.fit_loop.setup_data()
            trainer.open_rollout = RecordedRollout(recorded, run_seed=trainer.run_seed)
            num = sum(len(group.trajectories) for groups in recorded for group in groups)
            log.info(
                "no engine: %s with %s", count_text(len(recorded), "recorded iteration"), count_text(num, "trajectory")
            )
        if is_fit:
            self.resume.restore_rollout()
        if recorded is None and trainer.is_global_zero:
            _log_derived_settings(trainer, module, trainer.rollout.settings if is_fit else None)
            for line in self.tasks.lines(module) if self.tasks else ():
                log.info("%s", line)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if module.device.type == "cpu" and num_parameters < SMALL_MODEL_PARAMETERS:
            torch.set_num_threads(1)  # more OpenMP threads would spin and slow down rollout and update
        gc.freeze()  # otherwise every fifth iteration spends 250 ms collecting objects made by imports
        self._gc_threshold = gc.get_threshold()
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *self._gc_threshold[1:])

    def close(self) -> None:
        """Keeps the rollout's state for checkpoints and later fits, then stops threads and processes, even on errors.

        May be called again after a Ctrl-C that interrupted the first call.
        """
        if self._precision is not None:
            self.trainer.strategy.precision_plugin, self._precision = self._precision, None
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
            self._num_threads = 0
            gc.unfreeze()
            gc.set_threshold(*self._gc_threshold)
        call_all(self.resume.keep_rollout, self._close_rollout, self._close_reward_worker, self._close_engine)

    def _close_rollout(self) -> None:
        if self.trainer.open_rollout is not None:
            self.trainer.rollout.close()
            self.trainer.open_rollout = None

    def _close_reward_worker(self) -> None:
        if self._reward_worker is not None:
            self._reward_worker.close()
            self._reward_worker = None

    def _close_engine(self) -> None:
        if self.trainer.engine is not None and self._engine_is_open:
            self.trainer.engine.close()
            self._engine_is_open = False

    def _open_live(self, module: RLModule, graph: DataFlowGraph, is_fit: bool) -> Rollout:
        """Returns a RolloutController or, with several ranks, a SharedRollout of rank 0's controller."""
        trainer, ranks = self.trainer, ranks_of(self.trainer.strategy)
        settings = RolloutSettings(
            group_size=module.group_size,
            group_sizes=self.tasks.group_sizes if self.tasks else {},
            max_failed_fraction=module.max_failed_fraction,
            workflow_workers=module.workflow_workers,
        )
        prompts = None
        if is_fit:
            prompts = prompt_source(
                trainer, module.tokenizer, max_prompt_tokens=module.max_prompt_tokens, seed=trainer.run_seed
            )
            num_iterations = trainer.estimated_stepping_batches
            total_groups = None if num_iterations == float("inf") else int(num_iterations) * prompts.batch_size
            settings = dataclasses.replace(settings, groups_per_iteration=prompts.batch_size, total_groups=total_groups)
            _check_minibatches(module, settings, ranks)
        settings = _apply_hooks(trainer, module, settings)
        if is_fit and not settings.max_staleness and not settings.reads_rewards and graph.before_rewards():
            settings = dataclasses.replace(settings, defers_rewards=True)
        plain: Any = int | float | str | dict | None  # filter, curriculum and metrics stay on rank 0
        shared = ranks.broadcast_json({key: value for key, value in vars(settings).items() if isinstance(value, plain)})
        settings = dataclasses.replace(settings, **shared) if ranks.is_main else RolloutSettings(**shared)
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # on all ranks: reading `log_dir` is a collective
        log_folder = None if trainer.fast_dev_run else folder
        start = functools.partial(self._start_controller, module, settings, prompts, log_folder)
        if ranks.size == 1:
            return start()
        return SharedRollout(start, ranks, run_seed=trainer.run_seed, settings=settings)

    def _start_controller(
        self, module: RLModule, settings: RolloutSettings, prompts: PromptStream | None, folder: Path | None
    ) -> RolloutController:
        """Starts reward worker, engine and controller on rank 0. Logs failed rewards in `folder` unless it is None."""
        worker = self.start_reward_worker(module)
        if self.trainer.engine is None:
            self.trainer.engine = LocalEngine()
        engine = self.trainer.engine
        policy: Any = module.policy
        engine.expect_policy(policy, num_versions=settings.max_staleness + 1)
        log.info("devices: %s", devices_text(self.trainer))
        engine.start(module.policy_config)
        self._engine_is_open = True
        workflow = module.configure_workflow()
        workflow = self.tasks.workflow(workflow, module) if self.tasks else workflow
        if workflow.template is not None:
            module.complete_template(workflow.template)
        contexts = (module.context_tokens, engine.max_context)
        workflow.fit_context(min((tokens for tokens in contexts if tokens is not None), default=None))
        return RolloutController(
            engine,
            workflow,
            worker,
            settings,
            sampling=with_stop_tokens(module.sampling, module.stop_token_ids()),
            run_seed=self.trainer.run_seed,
            prompts=prompts,
            failures=FailureLog(folder / "failed_rewards.jsonl", module.tokenizer.decode) if folder else None,
        )


def _parallel_models(trainer: RLTrainer, module: RLModule) -> dict[str, ParallelModel]:
    """Returns each role's parallel model, made by the strategy; omits roles whose model is on a server."""
    sampling = with_stop_tokens(module.sampling, module.stop_token_ids())
    settings = LogprobSettings(
        temperature=sampling.temperature,
        min_new_tokens=sampling.min_new_tokens,
        stop_token_ids=sampling.stop_token_ids,
        entropy_needs_gradient=module.needs_entropy_gradient,
        num_ids=getattr(module.policy_config.get_text_config(), "vocab_size", None),
    )
    return {
        name: parallel_model(
            trainer.strategy,
            getattr(module, name),
            settings,
            role=name,
            value_head=module.value_head if name == "policy" else None,
        )
        for name, role in module.models().items()
        if role.spec.url is None
    }


def _check_minibatches(module: RLModule, settings: RolloutSettings, ranks: Ranks) -> None:
    groups_per_iteration = settings.groups_per_iteration
    num = groups_per_iteration * (size := min([settings.group_size, *settings.group_sizes.values()]))
    if not settings.group_sizes and num % module.num_minibatches:
        raise ValueError(
            f"num_minibatches={module.num_minibatches} does not divide the iteration's {count_text(num, 'trajectory')} "
            f"({groups_per_iteration} groups × group_size={size}). Change one of these three numbers."
        )
    dp_size = max(ranks.of_role(role).dp_size for role in module.trained_roles())
    if num // module.num_minibatches < dp_size:
        raise ValueError(
            f"A minibatch of {count_text(num // module.num_minibatches, 'trajectory')} is too small for {dp_size} "
            f"data-parallel ranks: each needs at least one. Set num_minibatches to at most {max(1, num // dp_size)}, "
            "increase the batch_size, or use fewer devices."
        )


def _apply_hooks(trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
    for hook in trainer.rl_hooks("configure_rollout"):
        changed: object = hook(settings)
        if not isinstance(changed, RolloutSettings):
            raise TypeError(
                f"configure_rollout must return RolloutSettings, got {type(changed).__name__}. Return the given "
                "settings, or dataclasses.replace(settings, ...)."
            )
        settings = changed
    if module.loss_unit == "pair" and settings.incomplete_groups == "train":
        settings = dataclasses.replace(settings, incomplete_groups="resample")  # a single trajectory is not a pair
    return settings


def devices_text(trainer: RLTrainer) -> str:
    """Describes trainer and engine devices on this machine; gives the engine the trainer's devices and precision."""
    devices = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
    engine = trainer.engine or LocalEngine()
    engine.trainer_precision = str(trainer.precision)
    return f"trainer {', '.join(map(str, devices))}; {type(engine).__name__} {engine.place(devices)}".rstrip()


def _log_derived_settings(trainer: RLTrainer, module: RLModule, settings: RolloutSettings | None) -> None:
    engine, threads = trainer.engine, count_text(torch.get_num_threads(), "update thread")
    decoding = f", {count_text(engine.threads, 'decoding thread')}" if engine is not None and engine.threads else ""
    log.info("engine: %s%s; %s", type(engine).__name__, decoding, threads)
    stops = (f"{module.tokenizer.decode(ids)} {ids} ({name})" for name, ids in module.stop_token_ids().items())
    log.info("stop tokens: %s", "; ".join(stops))
    if settings is not None:
        log.info(
            "iteration: %s x %d = %s, %s, max_staleness %d",
            count_text(settings.groups_per_iteration, "group"),
            settings.group_size,
            count_text(settings.groups_per_iteration * settings.group_size, "trajectory"),
            count_text(module.num_minibatches * module.update_epochs, "update"),
            settings.max_staleness,
        )
