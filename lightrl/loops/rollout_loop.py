"""RolloutLoop: one iteration, from groups to new weights; the one seam between Lightning's fit loop and RL.

    take groups → Experience → score, advantages → minibatches → version + 1 → weights out

On-policy the last rewards are awaited while the calls run that need none (`RolloutSettings.judges_later`).

It takes the place of `trainer.fit_loop.epoch_loop.automatic_optimization`, whose `run` Lightning calls once for each
training batch. One batch is one iteration is one `global_step` is one weight version. A module that is no RLModule goes
through Lightning's own code untouched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.data import prompts_of
from lightrl.dataflow import ModelCall
from lightrl.errors import LightRLError
from lightrl.experience import Experience
from lightrl.loops.interrupt import InterruptGate
from lightrl.loops.metrics import IterationMetrics, values_of
from lightrl.loops.score import accept_changes, score
from lightrl.loops.update import GradientGuard, MinibatchLoss
from lightrl.models.pictures import with_pictures
from lightrl.module import RLModule
from lightrl.strategies import Ranks, is_on_all_ranks, ranks_of
from lightrl.trajectory import Group, Trajectory, sampling_seed

if TYPE_CHECKING:
    from torch.optim import Optimizer

log = logging.getLogger(__name__)


class JudgedGroups(list[Group]):
    """A validation, test or predict batch after its rollout; Lightning may move it and leaves it as it is."""

    def to(self, *args: Any, **kwargs: Any) -> JudgedGroups:
        return self


class RolloutLoop(_AutomaticOptimization):
    """One iteration of RL for each of Lightning's training batches.

    Args:
        trainer: a lightrl Trainer; it has `rollout`, the controller, while it runs.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.num_updates = 0  # optimizer steps; the fit's `global_step` counts iterations
        self.phase_seconds: dict[str, float] = {}  # of the present iteration: rollout, score, rewards, update, sync
        self.gate = InterruptGate()
        self.guard = GradientGuard()
        self.why_no_checkpoint: str | None = None  # what makes a checkpoint wrong at this moment
        self._rollout_state: dict[str, Any] | None = None  # of the last fit or checkpoint, for the next controller
        self._is_restored = False  # the present controller has taken the state over

    @property
    def weight_version(self) -> int:
        """Of the trainer's weights: the number of finished iterations."""
        return self.optim_progress.optimizer_steps

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        return ranks_of(self.trainer.strategy)

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> Any:
        module = self.trainer.lightning_module
        if not isinstance(module, RLModule):
            return super().run(optimizer, batch_idx, kwargs)
        if self.ranks.size == 1:  # else all ranks are told together, by rank 0's next rollout
            self.gate.check()
        self.phase_seconds = {}
        groups = self._take_groups()
        with self.gate.held_back(), self._own_randomness(module):
            self._learn(module, groups, batch_idx)
        return {}

    @contextlib.contextmanager
    def _own_randomness(self, module: RLModule) -> Iterator[None]:
        """Random numbers drawn inside follow from (seed, weight version) alone, and those outside go on as before.

        A resume cannot repeat all that loaders and validation have drawn from the global state in between.
        """
        trainer: Any = self.trainer
        with torch.random.fork_rng(devices=[module.device] if module.device.type == "cuda" else []):
            torch.manual_seed(sampling_seed(trainer.rollout.run_seed, "iteration", self.weight_version))
            yield

    # ------------------------------------------------------------------ phases

    def _take_groups(self) -> list[Group]:
        trainer: Any = self.trainer
        trainer.call_rl_hook("on_rollout_start")
        with self._phase("rollout"):
            groups: list[Group] = trainer.rollout.take(self.weight_version, on_wait=self._on_wait_rollout)
        self.report_drops()
        trainer.call_rl_hook("on_rollout_end", groups)
        if not trainer.rollout.settings.judges_later:
            trainer.call_rl_hook("on_rewards_ready", groups)
        return groups

    def _learn(self, module: RLModule, groups: list[Group], batch_idx: int) -> None:
        trainer: Any = self.trainer
        experience = self._offer(self._score(module, groups))
        self.why_no_checkpoint = "an update is in progress or failed"
        with self._phase("update"):
            self._update(module, experience, batch_idx)
        progress = self.optim_progress.optimizer.step
        progress.increment_ready()
        progress.increment_completed()
        trainer.rollout.commit()
        self.why_no_checkpoint = "an iteration is in progress or failed"  # Lightning has not counted it yet
        with self._phase("sync"):
            trainer.call_rl_hook("on_policy_updated", self.weight_version)
        self.why_no_checkpoint = None

    def _score(self, module: RLModule, groups: list[Group]) -> Experience:
        """With what the model calls gave, rewards and advantages."""
        trainer: Any = self.trainer
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        experience = Experience.from_trajectories(trajectories, are_judged=not trainer.rollout.settings.judges_later)
        experience = with_pictures(experience, trajectories, module.pictures).to(module.device)
        scored: set[str] = set()
        if trainer.rollout.settings.judges_later:
            graph = module.data_flow()
            scored = graph.beside_rewards()
            later = {call.name for call in graph.calls} - scored
            experience = self._run_calls(module, experience, trajectories, left_out=later)
            with self._phase("rewards"):
                trainer.rollout.wait_for_rewards(groups, on_wait=self._on_wait_rewards)
            self.report_drops()
            experience = experience.judged(trajectories)
            trajectories = [trajectory for trajectory in trajectories if trajectory.reward is not None]
            trainer.call_rl_hook("on_rewards_ready", [group for group in groups if group.trajectories])
        return self._run_calls(module, experience, trajectories, left_out=scored)

    def _run_calls(
        self, module: RLModule, experience: Experience, trajectories: list[Trajectory], *, left_out: set[str]
    ) -> Experience:
        context = self.trainer.precision_plugin.forward_context
        with self._phase("score"), self.logging_allowed(module):
            return score(module, experience, trajectories, forward_context=context, ranks=self.ranks, left_out=left_out)

    def _update(self, module: RLModule, experience: Experience, batch_idx: int) -> None:
        trainer: Any = self.trainer
        seed = sampling_seed(trainer.rollout.run_seed, "minibatches", self.weight_version)
        total = min(module.num_minibatches, len(experience.units(module.loss_unit))) * module.update_epochs
        minibatches = experience.minibatches(
            module.num_minibatches, epochs=module.update_epochs, seed=seed, unit=module.loss_unit
        )
        train_calls = module.data_flow().of_kind("train")
        found = IterationMetrics()
        imbalances: list[float] = []
        holders = self.ranks.of_role("policy")
        for index, minibatch in enumerate(minibatches):
            if holders.dp_size > 1:
                imbalances.append(holders.token_imbalance(minibatch, module.loss_unit))
            trainer.call_rl_hook("on_minibatch_start", minibatch, index, total)
            self.ranks.step()
            metrics, parts = self._step(module, train_calls, minibatch, batch_idx)
            self.num_updates += 1
            trainer.call_rl_hook("on_minibatch_end", metrics, index, total)
            found.add(parts)
            if module.is_update_the_last(metrics):
                break
        with self.logging_allowed(module):
            if imbalances:
                module.log("update/token_imbalance", sum(imbalances) / len(imbalances))
            # By tokens or trajectories; a skipped update has no gradient norm, so over the updates that have a metric.
            module.log_dict(
                {name if "/" in name else f"policy/{name}": value for name, value in found.values().items()}
            )
            module.log("policy/skipped_updates", float(self.guard.num_skipped))

    def _step(
        self, module: RLModule, train_calls: list[ModelCall], minibatch: Experience, batch_idx: int
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """One optimizer step through Lightning's own `optimizer_step`, so clipping and precision plugins apply.

        Gives the metrics, and their parts, which make the iteration's.
        """
        trainer: Any = self.trainer
        optimizer = trainer.strategy._lightning_optimizers[0]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        losses = [MinibatchLoss(module, minibatch, str(call.role), self.ranks) for call in train_calls]
        norms: list[float] = []

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        def backward(loss: torch.Tensor) -> None:
            with torch.autocast(loss.device.type, enabled=False):  # a backward runs in the dtypes of its forward
                call._call_strategy_hook(trainer, "backward", loss, optimizer)

        @torch.enable_grad()
        def closure() -> torch.Tensor:
            zero_grad()
            with trainer.precision_plugin.train_step_context():
                for train, loss in zip(train_calls, losses, strict=True):
                    if not loss.holders.is_here:
                        continue
                    max_tokens = train.microbatch_tokens or module.microbatch_tokens
                    _, microbatches = loss.holders.microbatch_rows(minibatch, max_tokens, unit=module.loss_unit)
                    module.parallel_models[loss.role].forward_backward(microbatches, loss, backward)
            for parameter in module.resting_parameters():
                parameter.grad = None
            for loss in losses:
                loss.reduce()
            if getattr(trainer.precision_plugin, "scaler", None) is None:  # a scaler skips such steps by itself
                bound = module.max_skipped_updates
                norms.append(self.guard.check(parameters, zero_grad, max_in_a_row=bound, ranks=self.ranks))
            return losses[0].parts.get("loss", torch.zeros(2))[0]

        call._call_lightning_module_hook(
            trainer, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, closure
        )
        parts = {name: part for loss in losses for name, part in loss.parts.items()}
        if norms and math.isfinite(norms[0]):
            parts["grad_norm"] = torch.tensor([norms[0], 1.0], dtype=torch.float64)
        return values_of(parts), parts

    def _offer(self, experience: Experience) -> Experience:
        """Shows the Experience to callbacks and the module; each may return one with another mask or advantages."""
        trainer: Any = self.trainer
        for hook in trainer.rl_hooks("on_experience_ready"):
            with self.logging_allowed(trainer.lightning_module):
                changed = hook(experience)
            if changed is not None:
                experience = accept_changes(experience, changed)
        return experience

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, batch: Any) -> list[Group]:
        """Rolls out and judges the prompts of a validation, test or predict batch."""
        trainer: Any = self.trainer
        module: RLModule = trainer.lightning_module
        groups: list[Group] = trainer.rollout.evaluate(
            prompts_of(
                batch,
                module.tokenizer,
                name=f"{trainer.state.fn.value}-{self._evaluation_index()}",
                max_prompt_tokens=module.max_prompt_tokens,
            ),
            sampling=trainer.with_stop_tokens(module.validation_sampling),
            num_samples=module.validation_group_size,
            on_wait=self._on_wait,
        )
        self.report_drops()
        return JudgedGroups(groups)

    def _evaluation_index(self) -> int:
        """Of the batch within its loop: ids, and with them the seeds, are the same in each validation."""
        trainer: Any = self.trainer
        loops = {
            TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }
        return int(loops[trainer.state.fn].batch_progress.current.ready)

    # ------------------------------------------------------------------ resume

    def begin(self) -> None:
        """A stage begins: forgets what an earlier one, which may have failed, left behind."""
        self.gate.is_held = False
        self.gate.is_terminated = False
        self.why_no_checkpoint = None
        self._is_restored = False

    def interrupts_of_the_start(self) -> contextlib.AbstractContextManager[None]:
        """Inside, where rank 0 may wait for servers, Ctrl-C and SIGTERM end the start at once."""
        return self.gate.raised_at_once(is_main=self.ranks.is_main, is_alone=self.ranks.size == 1)

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM end all ranks at the same place."""
        if self.ranks.size == 1:
            yield
            return
        with self.gate.held_back_on_all_ranks(is_main=self.ranks.is_main):
            yield

    def note_failure(self, error: BaseException) -> None:
        """A rank that fails alone cannot save what is spread over all of them."""
        if self.ranks.size > 1 and not is_on_all_ranks(error):
            self.why_no_checkpoint = f"rank {self.ranks.rank} failed and the others did not"
            self.ranks.fail(error)  # now: what callbacks do about exceptions may wait for other ranks

    def on_save_checkpoint(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        state = trainer.rollout.state_dict() if trainer.rollout is not None and self._is_restored else None
        state = state or self._rollout_state
        if state is None:
            return {}
        return {
            "rollout": state,
            "num_updates": self.num_updates,
            "num_skipped": self.guard.num_skipped,
            "num_skipped_in_a_row": self.guard.num_in_a_row,
            "torch_rng": torch.get_rng_state(),
        }

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        self._rollout_state = state_dict.get("rollout")
        if self._rollout_state is None:
            return
        self.num_updates = int(state_dict["num_updates"])
        self.guard.num_skipped = int(state_dict["num_skipped"])
        self.guard.num_in_a_row = int(state_dict["num_skipped_in_a_row"])
        torch.set_rng_state(state_dict["torch_rng"])

    def restore_rollout(self) -> None:
        """Hands the state of the checkpoint or of the fit before, if there is one, to the new controller."""
        trainer: Any = self.trainer
        if self._rollout_state is not None:
            seed = self._rollout_state["run_seed"]
            if seed != trainer.run_seed:
                log.warning(
                    "The checkpoint was made with seed %d and this run has seed %d, expected the same: prompts come in "
                    "another order, some twice. Set seed_everything to %d.", seed, trainer.run_seed, seed,
                )  # fmt: skip
            trainer.rollout.load_state_dict(self._rollout_state)
        self._is_restored = True

    def keep_rollout(self) -> None:
        """Before the controller closes: its state is what checkpoints and later fits go on from."""
        trainer: Any = self.trainer
        if not self._is_restored:
            return
        self._is_restored = False
        reason, self.why_no_checkpoint = self.why_no_checkpoint, "the rollout's state could not be had"
        try:
            self._rollout_state = trainer.rollout.state_dict() or None  # recorded groups need none
            self.why_no_checkpoint = reason
        except LightRLError as error:
            log.warning("The rollout's state could not be had for a checkpoint: %s", error)

    # ------------------------------------------------------------------ while it waits

    def _on_wait_rollout(self, done: int, total: int) -> None:
        trainer: Any = self.trainer
        self._on_wait(done, total)
        if total:
            trainer.call_rl_hook("on_rollout_progress", done, total)

    def _on_wait_rewards(self, done: int, total: int) -> None:
        trainer: Any = self.trainer
        self._on_wait(done, total)
        if total:
            trainer.call_rl_hook("on_rewards_progress", done, total)

    def _on_wait(self, done: int, total: int) -> None:
        trainer: Any = self.trainer
        self.ranks.step()
        if trainer.received_sigterm or self.gate.is_terminated:
            raise SIGTERMException
        self.gate.check()

    def report_drops(self) -> None:
        """Tells callbacks and the module about the trajectories dropped since the last time."""
        trainer: Any = self.trainer
        for drop in trainer.rollout.drain_drops():
            trainer.call_rl_hook("on_trajectory_dropped", drop.reason, drop.message)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        trainer: Any = self.trainer
        start = time.perf_counter()
        with trainer.profiler.profile(f"rl/{name}"), self.ranks.phase(name, has_own_deadline=name == "sync"):
            yield
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def logging_allowed(self, module: Any) -> Iterator[None]:
        """`self.log` works inside: Lightning allows it where it knows the hook it is in."""
        before = module._current_fx_name
        if before is None:
            module._current_fx_name = "training_step"
        try:
            yield
        finally:
            module._current_fx_name = before
