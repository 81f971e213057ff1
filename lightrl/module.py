"""RLModule: the hooks a user writes (a reward and a loss), with defaults for all the others.

One iteration calls, in this order: `configure_workflow`'s workflow and `reward` for each trajectory, `score_calls`,
`advantages` once on the whole iteration, `loss` on each microbatch of each minibatch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds
from lightrl.dataflow import ADVANTAGES, GENERATE, REWARD, DataFlowGraph, ModelCall
from lightrl.engines.sglang.scoring import ServedRewards, ServedScores
from lightrl.experience import ROLLOUT_FIELDS, Experience, LossUnit
from lightrl.functional import group_advantages
from lightrl.models import Metric, ModelSpec, Outputs, ParallelModel, check_adamw, is_silent, untrained_reward_model
from lightrl.models.model_folder import fill_in, keep_trained
from lightrl.models.pictures import Pictures
from lightrl.models.vocabulary import check_size, check_tokens
from lightrl.rewards import RewardPart
from lightrl.trajectory import Group, Sampling, Trajectory
from lightrl.workflows.workflow import SingleTurn, Workflow

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NEEDS_OUR_TRAINER = (
    "An RLModule got Lightning's own Trainer, expected lightrl's, whose loop rolls out and calls loss. "
    "Use lightrl.Trainer instead of lightning.Trainer."
)

CRITIC_KEYS = ("values", "bootstrap_values")  # of a score call; they belong to the critic's loss

RewardFunction = Callable[[Trajectory], Any]


class RLModule(L.LightningModule):
    """A policy, its reward and its loss. Subclass it and write `reward` and `loss`; the rest has defaults.

    The framework packs, masks, sums and divides: `loss` sees [B, T] tensors and returns [B, T] tensors, calls no model
    and normalizes nothing.

    Args:
        policy: the model to train: a hub name, a local folder, or a ModelSpec.
        reward: instead of the `reward` hook, a function or its dotted path, such as `my_project.rewards.exact`; a
            RewardPart, which is a path with arguments; or a list of them, whose weighted sum is the reward. Paths run
            in killable processes; a hook that uses `self` runs in a thread.
        reward_model: a network that judges whole trajectories, such as a RewardModel's export, with the policy's
            tokenizer; its number is added to the reward before advantages, and may be all of it. It may be behind an
            SGLang server: `{url: ...}`.
        reward_model_coef: what that number is multiplied by.
        workflow: makes the Workflow from the tokenizer; one completion for each prompt if None. In YAML a Workflow's
            class_path and init_args, less its tokenizer.
        group_size: G, trajectories of each prompt.
        sampling: how training rollouts are drawn. Stop tokens of model and tokenizer are added.
        validation_sampling: how validation rollouts are drawn; greedy with the same limits if None.
        validation_group_size: completions of each validation prompt; above 1 pass@k is reported too.
        num_minibatches: updates that one pass over the iteration is cut into.
        update_epochs: passes over the iteration.
        microbatch_tokens: bound on the tokens of one forward and backward.
        loss_reduction: `token` Σ/N, `sequence` Σᵢ(Σₜ/nᵢ)/B, `fixed` Σ/(B·max_new_tokens); N and B of the minibatch.
        lr: learning rate of the default AdamW.
        betas: of the default AdamW.
        weight_decay: of the default AdamW.
        warmup_iterations: linear warm-up of the learning rate.
        lr_decay: `constant`, or `linear` to 0 at the end of the run.
        reward_workers: processes that judge, for a reward given by dotted path.
        reward_timeout_s: deadline of one call of the reward.
        reward_memory_mib: bound on the memory of each process that judges; None for no bound.
        reward_recycle_after: calls after which such a process is replaced by a fresh one; None for never.
        max_failed_fraction: the run ends if more of an iteration's trajectories fail.
        max_skipped_updates: the run ends after so many updates in a row with gradients that are not finite.
    """

    # Whether `loss` reads `experience.proximal_logprobs`, or backpropagates through `outputs.entropy`; a module that
    # does not can say so and save the work.
    needs_proximal_logprobs: bool = True
    needs_entropy_gradient: bool = True
    # Whether `advantages` compares the trajectories of a group; then a group of one is refused.
    compares_groups: bool = True
    # What the loss reads as a whole, so that neither minibatches nor microbatches part it. With pairs, a group that
    # loses a trajectory is drawn again.
    loss_unit: LossUnit = "trajectory"
    # Weight of the value loss beside the policy's, where both share a body.
    value_coef: float = 0.5
    # What `advantages` gives.
    advantage_keys: tuple[str, ...] = ("advantages",)

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        reward: str | RewardPart | list[RewardPart] | RewardFunction | None = None,
        reward_model: str | ModelSpec | None = None,
        reward_model_coef: float = 1.0,
        workflow: Callable[[PreTrainedTokenizerBase], Workflow] | None = None,
        group_size: int = 8,
        sampling: Sampling | None = None,
        validation_sampling: Sampling | None = None,
        validation_group_size: int = 1,
        num_minibatches: int = 1,
        update_epochs: int = 1,
        microbatch_tokens: int = 16384,
        loss_reduction: Literal["token", "sequence", "fixed"] = "token",
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_iterations: int = 0,
        lr_decay: Literal["constant", "linear"] = "constant",
        reward_workers: int = 1,
        reward_timeout_s: float = 30.0,
        reward_memory_mib: int | None = 4096,
        reward_recycle_after: int | None = None,
        max_failed_fraction: float = 0.5,
        max_skipped_updates: int = 5,
    ) -> None:
        super().__init__()
        check_bounds(
            1,
            group_size=group_size,
            num_minibatches=num_minibatches,
            update_epochs=update_epochs,
            microbatch_tokens=microbatch_tokens,
            reward_workers=reward_workers,
            validation_group_size=validation_group_size,
            max_skipped_updates=max_skipped_updates,
            reward_memory_mib=reward_memory_mib,
            reward_recycle_after=reward_recycle_after,
        )
        check_bounds(0, warmup_iterations=warmup_iterations)
        check_bounds(0, 1, max_failed_fraction=max_failed_fraction)
        check_adamw(lr=lr, weight_decay=weight_decay, betas=betas)
        if not reward_timeout_s > 0:
            raise ValueError(f"reward_timeout_s={reward_timeout_s}, expected more than 0 seconds. Raise it.")
        if lr_decay not in ("constant", "linear"):
            raise ValueError(f"lr_decay={lr_decay!r}, expected constant or linear. Choose one of them.")
        if loss_reduction not in ("token", "sequence", "fixed"):
            raise ValueError(
                f"loss_reduction={loss_reduction!r}, expected token, sequence or fixed. Choose one of them."
            )
        # False if the reward model's number is all of the reward; then a rollout knows none yet.
        self.has_rollout_reward = reward is not None or type(self).reward is not RLModule.reward or reward_model is None
        if not self.has_rollout_reward:
            reward = _no_rollout_reward
        if reward is None and type(self).reward is RLModule.reward:
            raise TypeError(
                f"{type(self).__name__} has no reward, expected one. Write `def reward(self, trajectory) -> float`, or "
                "give reward= a function or its dotted path."
            )
        if group_size == 1 and self.compares_groups and type(self).advantages is RLModule.advantages:
            raise ValueError(
                "group_size=1 leaves nothing to compare a trajectory with, expected at least 2 for group advantages. "
                "Raise group_size, or override advantages and set compares_groups = False."
            )
        self.policy_spec = ModelSpec.of(policy)
        if self.policy_spec.url is not None:
            raise ValueError(
                f"policy has url={self.policy_spec.url!r}, expected path or config: it is trained here. Give its path; "
                "servers that write its rollouts are trainer.engine's."
            )
        if self.loss_unit == "pair" and group_size % 2:
            raise ValueError(
                f"group_size={group_size} cannot be cut into pairs, expected an even number with loss_unit='pair'. Set "
                "another."
            )
        if self.policy_spec.frozen:
            raise ValueError(
                "policy has frozen=True, expected false: it is what an update trains. To keep its weights give it "
                "lr: 0; frozen is for a critic."
            )
        self.reward_source = reward
        self.reward_model_spec = (
            None if reward_model is None else dataclasses.replace(ModelSpec.of(reward_model), head="scalar")
        )
        self.reward_model_coef = reward_model_coef
        self.workflow = workflow
        self.group_size = group_size
        self.sampling = sampling or Sampling()
        self.validation_sampling = validation_sampling or dataclasses.replace(self.sampling, temperature=0.0)
        self.validation_group_size = validation_group_size
        if validation_group_size > 1 and self.validation_sampling.temperature == 0:
            raise ValueError(
                f"validation_group_size={validation_group_size} draws equal completions at "
                "validation_sampling.temperature=0, expected above 0. Set validation_sampling, or "
                "validation_group_size to 1."
            )
        self.num_minibatches = num_minibatches
        self.update_epochs = update_epochs
        self.microbatch_tokens = microbatch_tokens
        self.loss_reduction = loss_reduction
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_iterations = warmup_iterations
        self.lr_decay = lr_decay
        self.reward_workers = reward_workers
        self.reward_timeout_s = reward_timeout_s
        self.reward_memory_mib = reward_memory_mib
        self.reward_recycle_after = reward_recycle_after
        self.max_failed_fraction = max_failed_fraction
        self.max_skipped_updates = max_skipped_updates
        self.parallel_models: dict[str, ParallelModel] = {}  # by role; the trainer fills it in
        self.value_head: torch.nn.Linear | None = None  # a critic's, on the policy's body
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._pictures: tuple[Pictures | None] | None = None
        self._log_batch_size = 1  # 1 in training, where an iteration counts as one
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 draws G equal completions, expected above 0. Use 1.0 to train.")

    # ------------------------------------------------------------------ hooks to write or override

    def models(self) -> dict[str, ModelSpec]:
        """The roles and where their models come from; each becomes the attribute `self.<role>`."""
        judge = {} if self.reward_model_spec is None else {"reward_model": self.reward_model_spec}
        return {"policy": self.policy_spec, **judge}

    def configure_workflow(self) -> Workflow:
        """What maps a prompt to a trajectory: `workflow`, made with the policy's tokenizer."""
        return SingleTurn(self.tokenizer) if self.workflow is None else self.workflow(self.tokenizer)

    def reward(self, trajectory: Trajectory) -> Any:
        """The number that judges a trajectory; may be async. Must be written, unless `reward=` was given.

        Returns:
            A float, or a dict with `reward` and further numbers to log by name, such as `accuracy`.
        """
        raise NotImplementedError

    def advantages(self, experience: Experience) -> Tensor | dict[str, Tensor]:
        """How much better than expected, [B] or [B, T], from the whole iteration; group advantages by default.

        Returns:
            Advantages; or a dict with `advantages` and further keys that the losses read, such as `returns`.
        """
        return group_advantages(experience.rewards, experience.group_ids)

    def loss(self, experience: Experience, outputs: Outputs) -> Mapping[str, Metric]:
        """The loss of each token [B, T] or trajectory [B] under `loss`, and metrics of either shape under their names.

        A metric is averaged; as a pair `(values, weights)` its mean is Σ w·v / Σ w.

        A pure function of its arguments. Masked positions hold 0 in every float [B, T] input.
        """
        raise NotImplementedError(f"{type(self).__name__}.loss must be written.")

    def value_loss(self, experience: Experience, values: Tensor) -> Mapping[str, Metric]:
        """The critic's loss of each token [B, T] under `loss`, and metrics, as `loss`; only with a critic.

        Args:
            experience: with what `advantages` gave, usually `returns`.
            values: [B, T] of the critic, of the state before each token was drawn; carries the gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} has a critic, so value_loss must be written.")

    def is_update_the_last(self, metrics: dict[str, float]) -> bool:
        """Whether the iteration's further minibatches are left out, from the metrics of the one before."""
        return False

    def score_calls(self) -> list[ModelCall]:
        """The model calls between rollout and advantages, in any order; each sees the whole iteration once.

        Add one of your own, such as a second judge, with `run=` a function; its output is `experience["key"]`.
        """
        calls: list[ModelCall] = []
        if self.reward_model_spec is not None:
            calls.append(ModelCall("reward_model", "reward_model", "infer", ("token_ids",), ("reward_model_scores",)))
        if self.needs_proximal_logprobs and not self.makes_one_update:  # else the update phase has it for nothing
            calls.append(ModelCall("proximal_logprobs", "policy", "infer", ("token_ids",), ("proximal_logprobs",)))
        return calls

    def placed_calls(self) -> list[ModelCall]:
        """`score_calls`; those of a role behind a server ask it, beside the models on the trainer's devices.

        Raises:
            ValueError: if the policy is drawn from otherwise than a server scores, or a critic is behind one.
        """
        specs = {role: spec for role, spec in self.models().items() if spec.url is not None}
        return [
            self._asked(call, specs[call.role]) if call.role is not None and call.role in specs else call
            for call in self.score_calls()
        ]

    def _asked(self, call: ModelCall, spec: ModelSpec) -> ModelCall:
        url = str(spec.url)
        if spec.head == "scalar":
            if "values" in call.outputs:
                raise ValueError(
                    f"The {call.role} has url={url!r}, expected path or config: a server gives one number after a "
                    "trajectory, not one before each token. Give its path."
                )
            return dataclasses.replace(call, role=None, run=ServedRewards(url, call.timeout_s))
        if self.sampling.temperature != 1 or self.sampling.min_new_tokens:
            raise ValueError(
                f"The {call.role} is behind {url}, which scores tokens at temperature 1 with no token masked, but "
                f"sampling has temperature={self.sampling.temperature:g} and min_new_tokens="
                f"{self.sampling.min_new_tokens}, expected 1 and 0. Set them so, or give the model's path."
            )
        return dataclasses.replace(call, role=None, run=ServedScores(url, call.timeout_s, call.topk))

    def train_calls(self) -> list[ModelCall]:
        """The models that each minibatch updates, in order, all with one step of the optimizer."""
        known = [key for call in self.score_calls() for key in call.outputs if key not in CRITIC_KEYS]
        calls = [ModelCall("policy_update", "policy", "train", ("behavior_logprobs", *known, "advantages"))]
        if "critic" in self.trained_roles():
            calls.append(ModelCall("critic_update", "critic", "train", ("values", *self.advantage_keys[1:])))
        return calls

    def resting_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Trained parameters that this iteration leaves as they are: not moved, not decayed, nothing in the moments."""
        return ()

    def trained_roles(self) -> list[str]:
        """The roles whose parameters the optimizer has: the policy, and a critic of its own that is not frozen."""
        return [role for role, spec in self.models().items() if role in ("policy", "critic") and not spec.frozen]

    def saved_roles(self) -> list[str]:
        """The roles that travel with a checkpoint; the others come back from where they came from."""
        return self.trained_roles()

    def data_flow(self, *, from_file: bool = False) -> DataFlowGraph:
        """All that an iteration computes, from the prompt to the updates, as one checked graph.

        Args:
            from_file: trajectories come from a file, so nothing is generated and judged.

        Raises:
            ValueError: if the calls make no graph; see DataFlowGraph.
        """
        calls = self.placed_calls()
        wrong = next((call for call in calls if call.kind != "infer"), None)
        if wrong is not None:
            raise ValueError(
                f"Model call {wrong.name!r} has kind {wrong.kind!r}, expected 'infer' in score_calls. Updates belong "
                "into train_calls."
            )
        judged = ("rewards", "token_rewards")
        written = tuple(sorted(ROLLOUT_FIELDS.difference(judged)))
        rollout = [
            ModelCall(GENERATE, "policy", "generate", (), written),
            ModelCall(REWARD, None, "infer", ("token_ids",), judged, run=self.reward),
        ]
        late = _later_than_advantages(calls, self.advantage_keys)
        scored = tuple(key for call in calls for key in call.outputs if call.name not in late)
        advantages = ModelCall(
            ADVANTAGES,
            inputs=("rewards", *scored),
            outputs=self.advantage_keys,
            run=self.advantages,
            on_all_ranks=True,
        )
        return DataFlowGraph(
            [*([] if from_file else rollout), *calls, advantages, *self.train_calls()],
            roles=self.models(),
            given=ROLLOUT_FIELDS if from_file else (),
        )

    def configure_optimizers(self) -> Any:
        """AdamW over the trained parameters, a group for each role, with warm-up and decay per iteration."""
        optimizer = torch.optim.AdamW(
            self.parameter_groups(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=True
        )
        if not self.warmup_iterations and self.lr_decay == "constant":
            return optimizer
        num_iterations = self.trainer.estimated_stepping_batches
        if self.lr_decay == "linear" and num_iterations == float("inf"):
            raise ValueError("lr_decay='linear' needs the end of the run, expected max_steps or max_epochs. Set one.")

        def factor(iteration: int) -> float:
            warm = min(1.0, (iteration + 1) / max(1, self.warmup_iterations))
            return warm if self.lr_decay == "constant" else warm * max(0.0, 1 - iteration / num_iterations)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: one for each trained role, with its `lr` and `weight_decay`; the policy's has the rest."""
        others = [role for role in self.trained_roles() if role != "policy"]
        parameters = {
            role: [item for item in getattr(self, role).parameters() if item.requires_grad] for role in others
        }
        of_others = {id(item) for items in parameters.values() for item in items}
        rest = [item for item in self.parameters() if item.requires_grad and id(item) not in of_others]
        groups: list[dict[str, Any]] = []
        for role, items in {"policy": rest, **parameters}.items():
            spec = self.models()[role]
            decay = {} if spec.weight_decay is None else {"weight_decay": spec.weight_decay}
            groups.append({"params": items, "lr": self.lr_of(role), **decay})
        return groups

    def lr_of(self, role: str) -> float:
        """The learning rate of a trained role: its own, which may be 0, or the module's."""
        own = self.models()[role].lr
        return self.lr if own is None else own

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """As Lightning's, but each role is clipped by itself: a critic's gradients do not shrink the policy's."""
        if len(optimizer.param_groups) == 1:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for group in optimizer.param_groups:
            one: Any = SimpleNamespace(param_groups=[group])
            super().configure_gradient_clipping(one, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, batch: list[Group], batch_idx: int) -> None:
        """Logs mean reward, accuracy, pass@k and the reward's further numbers of judged validation groups."""
        self._log_evaluation("val", batch)

    def test_step(self, batch: list[Group], batch_idx: int) -> None:
        self._log_evaluation("test", batch)

    def predict_step(self, batch: list[Group], batch_idx: int) -> list[Group]:
        return batch

    # ------------------------------------------------------------------ what the framework and callbacks read

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's; loaded once."""
        if self._tokenizer is None:
            self._tokenizer = self.policy_spec.load_tokenizer()
            if self._tokenizer.eos_token_id is None and not self.sampling.stop_token_ids:
                raise ValueError(
                    f"The tokenizer of {self.policy_spec.path or self.policy_spec.tokenizer!r} has no end token, "
                    "expected eos_token. Set it in the tokenizer's files, or give sampling.stop_token_ids."
                )
        return self._tokenizer

    @property
    def pictures(self) -> Pictures | None:
        """How the policy reads pictures; None if it sees none. Made once."""
        if self._pictures is None:
            self._pictures = (Pictures.of(self.policy_spec.load_config()),)
        return self._pictures[0]

    @property
    def policy_config(self) -> PretrainedConfig:
        """Of the policy's model, once it is there."""
        policy: Any = self.policy
        config: PretrainedConfig = policy.config
        return config

    @property
    def context_tokens(self) -> int | None:
        """What the policy can read and write in all; None if the model states no context length."""
        tokens: int | None = getattr(self.policy_spec.load_config().get_text_config(), "max_position_embeddings", None)
        return tokens

    @property
    def max_prompt_tokens(self) -> int | None:
        """What the context leaves for a prompt; None if the model states no context length."""
        context = self.context_tokens
        longest = max(self.sampling.max_new_tokens, self.validation_sampling.max_new_tokens)
        if context is not None and context <= longest:
            raise ValueError(
                f"sampling.max_new_tokens={longest} leaves no room for a prompt in the context of {context} tokens. "
                "Lower it."
            )
        return None if context is None else context - longest

    @property
    def makes_one_update(self) -> bool:
        """Whether an iteration has one update; then the proximal policy is the current one, at no cost."""
        return self.num_minibatches * self.update_epochs == 1

    def configure_model(self) -> None:
        if self._trainer is not None and not hasattr(self._trainer, "rollout_loop"):
            raise RuntimeError(NEEDS_OUR_TRAINER)
        for role, spec in self.models().items():
            if hasattr(self, role) or spec.url is not None:
                continue
            check_tokens(role, spec, self.policy_spec, self.tokenizer)
            model = spec.load_model()
            check_size(role, model, self.tokenizer)
            if role not in self.trained_roles():
                model.requires_grad_(False)
            elif spec.offload:
                raise ValueError(
                    f"Role {role!r} is trained and has offload=True, expected false: the update needs it. Set it for "
                    "roles that are not trained."
                )
            if role == "reward_model" and is_silent(model):
                raise untrained_reward_model(spec)
            setattr(self, role, model)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise RuntimeError(NEEDS_OUR_TRAINER)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # prompts are plain Python

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Validation, test and predict batches are prompts; their steps get the judged groups."""
        trainer: Any = self.trainer
        if trainer.training:
            self._log_batch_size = 1
            return batch
        groups: list[Group] = trainer.rollout_loop.evaluate(batch)
        self._log_batch_size = max(1, sum(len(group.trajectories) for group in groups))
        return groups

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Lightning's. Where no `batch_size` is given it is the number of trajectories: Lightning looks for tensors."""
        if not args and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = self._log_batch_size
        super().log(name, value, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Frozen roles come back from where they came from, so they do not travel with each checkpoint."""
        keep_trained(checkpoint, self._models_and_specs(), self.saved_roles())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()  # `load_from_checkpoint` comes here before any trainer does
        fill_in(checkpoint, self._models_and_specs(), self.saved_roles())

    def _models_and_specs(self) -> dict[str, tuple[PreTrainedModel, ModelSpec]]:
        return {role: (getattr(self, role), spec) for role, spec in self.models().items() if spec.url is None}

    def stop_token_ids(self) -> dict[str, list[int]]:
        """Where each stop token comes from → ids: generation config, model config, tokenizer, turn end, user."""
        sources: dict[str, list[int]] = {"sampling": list(self.sampling.stop_token_ids)}
        policy: PreTrainedModel = self.policy
        generation_config = getattr(policy, "generation_config", None)
        for name, value in (
            ("generation config", getattr(generation_config, "eos_token_id", None)),
            ("model config", getattr(policy.config, "eos_token_id", None)),
            ("tokenizer", self.tokenizer.eos_token_id),
            ("turn end", _turn_end(self.tokenizer)),
        ):
            if value is not None:
                sources[name] = [int(item) for item in (value if isinstance(value, Sequence) else [value])]
        return {name: ids for name, ids in sources.items() if ids}

    def _log_evaluation(self, stage: str, groups: list[Group]) -> None:
        judged = [group for group in groups if group.trajectories]
        trajectories = [trajectory for group in judged for trajectory in group.trajectories]
        num_asked = len(groups) * self.validation_group_size
        failed_fraction = 1 - len(trajectories) / max(1, num_asked)
        self.log(
            f"{stage}/failed_fraction",
            failed_fraction,
            on_step=False,
            on_epoch=True,
            batch_size=num_asked,
            sync_dist=True,
        )
        self.log(f"{stage}/prompts", float(len(judged)), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        if not trajectories:
            return
        names = sorted({name for trajectory in trajectories for name in trajectory.metrics} | {"accuracy"})
        values: dict[str, list[float]] = {f"{stage}/reward": [float(item.reward or 0.0) for item in trajectories]}
        for name in names:
            key = f"{stage}/accuracy_fraction" if name == "accuracy" else f"{stage}/{name}"
            found = [item.accuracy if name == "accuracy" else item.metrics.get(name) for item in trajectories]
            values[key] = [value for value in found if value is not None]
        values[f"{stage}/length_tokens"] = [float(sum(item.loss_mask)) for item in trajectories]
        values[f"{stage}/truncated_fraction"] = [float(item.is_truncated) for item in trajectories]
        if self.validation_group_size > 1:
            solved = [float(any(item.accuracy >= 1 for item in group.trajectories)) for group in judged]
            values[f"{stage}/pass_at_{self.validation_group_size}_fraction"] = solved
        for key, numbers in values.items():  # a batch weighs as much as it has of the number
            self.log(key, _mean(numbers), on_step=False, on_epoch=True, batch_size=len(numbers), sync_dist=True)


def _later_than_advantages(calls: list[ModelCall], advantage_keys: Sequence[str]) -> set[str]:
    """The names of the calls that need advantages, or what such a call gives."""
    names, keys = {ADVANTAGES}, set(advantage_keys)
    for _ in calls:
        for call in calls:
            if keys.intersection(call.inputs) or names.intersection(call.after):
                names.add(call.name)
                keys.update(call.outputs)
    return names


def _no_rollout_reward(trajectory: Trajectory) -> float:
    """The reward where the reward model's is all of it."""
    return 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after what the assistant said."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    said = "lightrl"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], tokenize=False
    )
    after = text[text.rindex(said) + len(said) :].lstrip() if said in text else ""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)
    found = next((token for token in special if after.startswith(token)), None)
    return None if found is None else int(tokenizer.convert_tokens_to_ids(found))
