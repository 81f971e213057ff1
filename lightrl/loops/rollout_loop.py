"""RolloutLoop: one iteration of RL, from groups of trajectories to new weights, in Lightning's fit loop.

    take groups → Experience → score, advantages → minibatches → version + 1 → weights out

RolloutLoop replaces `trainer.fit_loop.epoch_loop.automatic_optimization`, whose `run` Lightning calls for each training
batch. One batch is one iteration, one `global_step` and one weight version. On-policy, model calls that need no rewards
run while the last rewards are pending (`defers_rewards`). A module that isn't an RLModule uses Lightning's code.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from lightrl.checks.printable import count_text
from lightrl.data import HostBatch, prompts_of
from lightrl.dataflow import ModelCall
from lightrl.errors import TrainingError
from lightrl.loops.resume import Resume
from lightrl.loops.score import score
from lightrl.loops.shared_rollout import SharedRollout
from lightrl.loops.shared_tables import share_tables
from lightrl.loops.sharing import accept, add_rewards, shard
from lightrl.loops.update import GradientGuard, MinibatchLoss, add_parts, values_of
from lightrl.models.chat_template import with_stop_tokens
from lightrl.models.optimizer import by_role, own_parameters
from lightrl.module import RLModule
from lightrl.rollout.protocol import OnWait
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import Microbatches, Ranks, ShardedExperience, mark_as_on_all_ranks, ranks_of
from lightrl.strategies.layouts.pieces import forward_backward
from lightrl.strategies.sharded_experience.placement import microbatch_rows, minibatches, shares, token_imbalance
from lightrl.trace import in_microbatch_spans, span
from lightrl.trajectory import Group, Trajectory, sampling_seed

_Handler = Callable[[int, FrameType | None], None]
_IGNORED: dict[signal.Signals, _Handler] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: None)
_RECEIVED = "Received %s. The run %sends, at the latest after this iteration. Ctrl-C ends it now."


class InterruptGate:
    """Holds back the first SIGINT during an update; `check` raises it afterwards. A second SIGINT raises at once."""

    def __init__(self, saves: Callable[[], bool]) -> None:
        self.saves = saves  # whether the run saves a checkpoint when it ends
        self.begin()

    def begin(self) -> None:
        """Forgets signals from earlier stages."""
        self.is_held = False
        self.is_terminated = False  # a SIGTERM was held back
        self.is_announced = False  # a message has said that the run is going to end

    def check(self) -> None:
        """Raises KeyboardInterrupt if a SIGINT was held back."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Announces the first signal in the context, and holds back a SIGINT. Does nothing outside the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}

        def interrupt(number: int, frame: FrameType | None) -> None:
            is_first, self.is_announced = not self.is_announced, True
            if is_first:
                rank_zero_info(_RECEIVED, signal.Signals(number).name, "saves its state and " * self.saves())
            if number == signal.SIGINT:
                self.is_held = True
            if number == signal.SIGTERM or not is_first:  # Lightning's handler only records SIGTERM
                previous[signal.Signals(number)](number, frame)

        with _handled_by(dict.fromkeys(previous, interrupt)):
            yield

    @contextlib.contextmanager
    def raised_at_once(self, ranks: Ranks) -> Iterator[None]:
        """Makes SIGTERM raise SIGTERMException at once inside the context, to end a start-up that waits for servers.

        Lightning's handler only records the signal until a batch ends. With several ranks, only rank 0 raises; other
        ranks ignore the signal, because a message from rank 0 stops them.
        """
        lightning_handler = signal.getsignal(signal.SIGTERM)
        num_received = 0

        def terminate(number: int, frame: FrameType | None) -> None:
            nonlocal num_received
            num_received += 1
            if ranks.size == 1 and callable(lightning_handler):  # with several ranks, it would wait for other ranks
                lightning_handler(number, frame)
            if num_received == 1:
                raise SIGTERMException

        with _handled_by({signal.SIGTERM: terminate} if ranks.is_main else _IGNORED):
            yield

    @contextlib.contextmanager
    def held_back_on_all_ranks(self, ranks: Ranks) -> Iterator[None]:
        """Makes Ctrl-C and SIGTERM stop all ranks at the same point, which rank 0 chooses. Does nothing with one rank.

        A terminal sends Ctrl-C to all processes, and Slurm sends SIGTERM to all tasks. A rank that stopped alone would
        leave the other ranks waiting in a collective. A second Ctrl-C on rank 0 is not held back.
        """

        def terminate(number: int, frame: FrameType | None) -> None:
            self.is_terminated = True

        if ranks.size == 1:
            yield
        elif ranks.is_main:
            with _handled_by({signal.SIGTERM: terminate}), self.held_back():
                yield
        else:
            with _handled_by(_IGNORED):
                yield


@contextlib.contextmanager
def _handled_by(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Installs these signal handlers inside the context. Does nothing in other threads, where Python forbids it."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENGINE = "trainer.engine's max_batch or prefill_tokens (SGLang: mem_fraction_static)"
_ADVICE = {
    "rollout": f"Lower {_ENGINE}, or model.microbatch_tokens, which leaves the engine more memory.",
    "sync": f"Lower {_ENGINE}.",
    "start": "Use more devices with trainer.strategy: FSDP2Strategy, or a smaller model.",
}


class RolloutLoop(_AutomaticOptimization):
    """Runs one iteration of RL for each of Lightning's training batches, while `trainer.rollout` is open."""

    trainer: RLTrainer

    def __init__(self, trainer: RLTrainer) -> None:
        super().__init__(trainer)
        self.num_updates = 0  # optimizer steps; the fit's `global_step` counts iterations
        self.gate = InterruptGate(self._saves_at_end)
        self.guard = GradientGuard()
        self.resume = Resume(trainer, self.guard)
        self.phase = "start"  # the current phase, or the last one
        self.lengths = torch.zeros(0, dtype=torch.int64)  # number of tokens per trajectory, for an error message

    def _saves_at_end(self) -> bool:
        saving = (getattr(item, "save_on_exception", False) for item in cast(Any, self.trainer).checkpoint_callbacks)
        return not self.trainer.fast_dev_run and any(saving)

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        return ranks_of(self.trainer.strategy)

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> Any:
        module = self.trainer.lightning_module
        if not isinstance(module, RLModule):
            self.phase = "training step"
            return super().run(optimizer, batch_idx, kwargs)
        if self.ranks.size == 1:  # several ranks stop together, in rank 0's next rollout
            self.gate.check()
        trainer, resume = self.trainer, self.resume
        trainer.phase_seconds, trainer.is_in_iteration = {}, True
        with trainer.profiler.profile("run_training_step"):  # PyTorchProfiler's schedule counts these steps
            trainer.call_rl_hook("on_rollout_start")
            with self._phase("rollout"):
                groups = trainer.rollout.take(trainer.weight_version, on_wait=self._make_on_wait("on_rollout_progress"))
            self._report_drops()
            trainer.call_rl_hook("on_rollout_end", groups)
            if not trainer.rollout.settings.defers_rewards:
                trainer.call_rl_hook("on_rewards_ready", groups)
            with self.gate.held_back(), self._seeded_randomness(module):
                experience = self._offer(self._score(module, groups))
                resume.why_no_checkpoint = "an update is in progress or failed"
                with self._phase("update"):
                    self._update(module, experience, batch_idx)
                self.optim_progress.optimizer.step.increment_ready()
                self.optim_progress.optimizer.step.increment_completed()
                trainer.is_in_iteration = False
                trainer.rollout.commit()
                resume.why_no_checkpoint = "an iteration is in progress or failed"  # Lightning has not counted it yet
                with self._phase("sync"):
                    trainer.call_rl_hook("on_policy_updated", trainer.weight_version)
                    trainer.call_rl_hook("on_weight_sync", trainer.weight_version)
                resume.why_no_checkpoint = None
        loss = trainer.callback_metrics.get("policy/loss")
        return {} if loss is None else {"loss": loss}

    @contextlib.contextmanager
    def _seeded_randomness(self, module: RLModule) -> Iterator[None]:
        """Seeds torch's generators from run seed and weight version inside the context; restores them afterwards.

        A resumed run could not reproduce the global random state, because data loaders and validation also use it.
        """
        is_cuda = module.device.type == "cuda"
        # On a CPU, torch.manual_seed would format the call stack once for each missing kind of accelerator.
        set_seed: Any = torch.manual_seed if is_cuda else torch.default_generator.manual_seed
        with torch.random.fork_rng(devices=[module.device] if is_cuda else []):
            set_seed(sampling_seed(self.trainer.rollout.run_seed, "iteration", self.trainer.weight_version))
            yield

    def _score(self, module: RLModule, groups: list[Group]) -> ShardedExperience:
        if self.trainer.rollout.settings.defers_rewards:
            return self._score_before_rewards(module, groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        with self._phase("score"):
            return self._run_calls(module, self._make_experience(module, trajectories), trajectories, left_out=set())

    def _score_before_rewards(self, module: RLModule, groups: list[Group]) -> ShardedExperience:
        """Runs the calls that need no rewards while the last rewards are pending, then the remaining calls."""
        rollout, graph = self.trainer.rollout, module.data_flow()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scored = graph.before_rewards()
        with self._phase("score"):
            experience = self._make_experience(module, trajectories)
            later = {call.name for call in graph.calls} - scored
            experience = self._run_calls(module, experience, trajectories, left_out=later)
        with self._phase("rewards"):
            rollout.wait_for_rewards(groups, on_wait=self._make_on_wait("on_rewards_progress"))
        self._report_drops()
        experience, trajectories = self._drop_unrewarded_rows(module, experience, groups, trajectories)
        with self._phase("score"):
            experience = add_rewards(experience, trajectories)
        self.trainer.call_rl_hook("on_rewards_ready", [group for group in groups if group.trajectories])
        with self._phase("score"):
            return self._run_calls(module, experience, trajectories, left_out=scored)

    def _make_experience(self, module: RLModule, trajectories: list[Trajectory]) -> ShardedExperience:
        """Returns an Experience in host memory: numbers for all rows, tokens only for rows that this rank works on."""
        rollout = self.trainer.rollout
        if isinstance(rollout, SharedRollout):
            experience, has_all = rollout.pop_experience(), range(1)
        else:  # one rank, or recorded trajectories, which every rank has read
            has_rewards = not rollout.settings.defers_rewards
            experience = ShardedExperience.from_trajectories(trajectories, has_rewards=has_rewards)
            has_all = range(self.ranks.size)
        self.lengths = experience.rows["lengths"]
        experience = shard(experience, module, self.ranks, seed=self._minibatch_seed, has_all=has_all)
        return share_tables(experience, trajectories, module, has_all=has_all)

    def _drop_unrewarded_rows(
        self, module: RLModule, experience: ShardedExperience, groups: list[Group], trajectories: list[Trajectory]
    ) -> tuple[ShardedExperience, list[Trajectory]]:
        """Drops rows without a reward and the other rows of their loss units. All other rows stay on their ranks."""
        units = experience.units(module.loss_unit)
        has_reward = [trajectory.reward is not None for trajectory in trajectories]
        rewarded_rows = sorted(row for rows in units if all(has_reward[row] for row in rows) for row in rows)
        if len(rewarded_rows) == len(experience):
            return experience, trajectories
        if not rewarded_rows:
            raise mark_as_on_all_ranks(ValueError("No trajectory has a reward. Fix the reward function."))
        for row in sorted(set(range(len(trajectories))) - set(rewarded_rows)):
            if has_reward[row]:
                message = f"the reward of another trajectory in the same {module.loss_unit} failed"
                self.trainer.call_rl_hook("on_trajectory_dropped", "loss_unit", message)
        rewarded = [trajectories[row] for row in rewarded_rows]
        rewarded_ids = set(map(id, rewarded))
        for group in groups:
            group.trajectories = [item for item in group.trajectories if id(item) in rewarded_ids]
        return experience.select(rewarded_rows), rewarded

    @property
    def _minibatch_seed(self) -> int:
        return sampling_seed(self.trainer.rollout.run_seed, "minibatches", self.trainer.weight_version)

    def _run_calls(
        self, module: RLModule, experience: ShardedExperience, trajectories: list[Trajectory], *, left_out: set[str]
    ) -> ShardedExperience:
        context = self.trainer.precision_plugin.forward_context
        with logging_allowed(module):
            return score(module, experience, trajectories, forward_context=context, left_out=left_out)

    def _update(self, module: RLModule, experience: ShardedExperience, batch_idx: int) -> None:
        trainer = self.trainer
        cuts = minibatches(experience, epochs=module.update_epochs, seed=self._minibatch_seed)
        train_calls = module.data_flow().of_kind("train")
        iteration: dict[str, torch.Tensor] = {}  # parts of the iteration's metrics
        imbalances: list[float] = []
        holders = self.ranks.of_role("policy")
        for index, rows in enumerate(cuts):
            minibatch = experience if len(rows) == len(experience) else experience.select(rows)
            if holders.dp_size > 1:
                imbalances.append(token_imbalance(minibatch.forward_tokens.tolist(), shares(minibatch, holders)))
            trainer.call_rl_hook("on_minibatch_start", minibatch, index, len(cuts))
            self.ranks.step()
            metrics, parts = self._step(module, train_calls, minibatch, batch_idx, is_first=index == 0)
            self.num_updates += 1
            trainer.call_rl_hook("on_minibatch_end", metrics, index, len(cuts))
            add_parts(iteration, parts)
            if module.is_update_the_last(metrics):
                break
        with logging_allowed(module):
            if imbalances:
                module.log("update/token_imbalance", sum(imbalances) / len(imbalances))
            # A skipped update has no gradient norm, so the mean norm covers only the other updates.
            values = values_of(iteration)
            module.log_dict({name if "/" in name else f"policy/{name}": value for name, value in values.items()})
            module.log("policy/skipped_updates", float(self.guard.num_skipped))

    def _step(
        self,
        module: RLModule,
        train_calls: list[ModelCall],
        minibatch: ShardedExperience,
        batch_idx: int,
        *,
        is_first: bool,
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Takes one optimizer step through Lightning's `optimizer_step`, so clipping and precision plugins apply.

        Returns the minibatch's metrics, and the parts from which the iteration's metrics are computed (see update.py).
        """
        trainer = self.trainer
        plugin = trainer.precision_plugin
        optimizer: Any = module.optimizers()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters_by_role = by_role(module, module.trained_roles(), parameters)
        own = [value for value in own_parameters(module).values() if value.requires_grad]
        version = trainer.weight_version if is_first else None
        losses = [MinibatchLoss(module, minibatch, str(call.role), self.ranks, version) for call in train_calls]
        norms: dict[str, float] = {}  # metric → a role's gradient norm

        def zero_grad() -> None:
            with logging_allowed(module):
                for callback in trainer.callbacks:
                    callback.on_before_zero_grad(trainer, module, optimizer)
                module.on_before_zero_grad(optimizer)
            module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)

        def backward(loss: torch.Tensor) -> None:
            with torch.autocast(loss.device.type, enabled=False):  # a backward pass uses its forward pass's dtypes
                trainer.strategy.backward(loss, optimizer)

        @torch.enable_grad()
        def closure() -> torch.Tensor:
            zero_grad()
            with plugin.train_step_context():
                for train, loss in zip(train_calls, losses, strict=True):
                    if not loss.holders.is_here:
                        continue
                    max_tokens = train.microbatch_tokens or module.microbatch_tokens
                    rows = microbatch_rows(minibatch, loss.holders, max_tokens, unit=module.loss_unit)
                    forward_backward(
                        module.parallel_models[loss.role],
                        Microbatches(minibatch, rows, module.device),
                        *in_microbatch_spans(loss, backward),
                        max_tokens=max_tokens,
                        unit=module.loss_unit,
                        ranks=loss.holders,
                        own=own,
                    )
            for parameter in module.resting_parameters():
                parameter.grad = None
            self.ranks.average_gradients()
            for loss in losses:
                loss.reduce()
            if getattr(plugin, "scaler", None) is None:  # a scaler skips non-finite steps itself
                bound = module.max_skipped_updates
                norm = self.guard.check(parameters, zero_grad, max_in_a_row=bound, ranks=self.ranks)
                for name, of_role in parameters_by_role.items() if math.isfinite(norm) else ():  # all ranks agree
                    key = "grad_norm" if name == "policy" else f"{name}/grad_norm"
                    gradients = [item.grad for item in of_role if item.grad is not None]
                    norms[key] = norm if len(parameters_by_role) == 1 else self.ranks.total_norm(gradients)
            return losses[0].parts.get("loss", torch.zeros(2))[0]

        with trainer.profiler.profile("rl/optimizer_step"):
            module.optimizer_step(trainer.current_epoch, batch_idx, optimizer, closure)
        parts = {name: part for loss in losses for name, part in loss.parts.items()}
        parts |= {key: torch.tensor([norm, 1.0], dtype=torch.float64) for key, norm in norms.items()}
        return values_of(parts), parts

    def _offer(self, experience: ShardedExperience) -> ShardedExperience:
        """Calls the `on_experience_ready` hooks, which may replace the loss mask and the advantages."""
        shown = experience.shown
        for hook in self.trainer.rl_hooks("on_experience_ready"):
            with logging_allowed(self.trainer.lightning_module):
                changed = hook(shown)
            if self.ranks.max_each([int(changed is not None)])[0]:  # a hook changed it on some rank
                experience = accept(experience, shown.local, changed)
                shown = experience.shown
        return experience

    def rewarded_groups(self, batch: object) -> list[Group]:
        """Rolls out and rewards a validation, test or predict batch: prompts, or rows from a user's loader."""
        trainer = self.trainer
        module = cast("RLModule", trainer.lightning_module)
        stage: Any = trainer.state.fn
        loops: dict[Any, Any] = {
            TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }
        # The name includes the batch's index, so prompt ids, and therefore seeds, are the same in each validation.
        name = f"{stage.value}-{loops[stage].batch_progress.current.ready}"
        groups = trainer.rollout.evaluate(
            prompts_of(batch, module.tokenizer, name=name, max_prompt_tokens=module.max_prompt_tokens),
            sampling=with_stop_tokens(module.validation_sampling, module.stop_token_ids()),
            num_samples=module.validation_group_size,
            on_wait=self._make_on_wait(),
        )
        self._report_drops()
        return HostBatch(groups)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = self.resume.state_dict()
        return {**state, "num_updates": self.num_updates} if "rollout" in state else state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        self.resume.load_state_dict(state_dict)
        self.num_updates = int(state_dict.get("num_updates", self.num_updates))

    def _make_on_wait(self, hook: str | None = None) -> OnWait:
        """Returns a function that a rollout calls while it waits, to report its progress to an RL hook."""

        def on_wait(done: int, total: int) -> None:
            self.ranks.step()
            if self.trainer.received_sigterm or self.gate.is_terminated:
                raise SIGTERMException
            self.gate.check()
            if hook is not None and total:
                self.trainer.call_rl_hook(hook, done, total)

        return on_wait

    def _report_drops(self) -> None:
        for drop in self.trainer.rollout.drain_drops():
            self.trainer.call_rl_hook("on_trajectory_dropped", drop.reason, drop.message)

    def out_of_memory(self, error: torch.OutOfMemoryError, module: object) -> TrainingError:
        """Returns an error that states the phase, the number of tokens, the estimated memory, and what to change."""
        tokens = getattr(module, "microbatch_tokens", None)
        smaller = "data.batch_size" if tokens is None else f"model.microbatch_tokens (now {tokens})"
        other = f"Lower {smaller}, or set activation_checkpointing in trainer.strategy (FSDP2Strategy) to true."
        text = " ".join(str(error).split()).partition(" If reserved but")[0]
        num, longest = len(self.lengths), max(self.lengths.tolist(), default=0)
        sizes = f", with {count_text(num, 'trajectory')} of at most {count_text(longest, 'token')}" if num else ""
        return TrainingError(
            f"Rank {self.trainer.global_rank} ran out of GPU memory in {self.phase!r}{sizes}. "
            f"{_ADVICE.get(self.phase, other)} {self.trainer.memory_estimate} Torch says: {text}"
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.phase = name
        with span(name, "phase") as measured, self.trainer.profiler.profile(f"rl/{name}"), self.ranks.phase(name):
            yield
        seconds = self.trainer.phase_seconds
        seconds[name] = seconds.get(name, 0.0) + measured.seconds


@contextlib.contextmanager
def logging_allowed(module: Any) -> Iterator[None]:
    """Makes `self.log` work inside the context; Lightning allows it only inside a hook that it called."""
    before = module._current_fx_name
    if before is None:
        module._current_fx_name = "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before
