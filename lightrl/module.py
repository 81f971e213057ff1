"""RLModule: a run's hooks. The user writes a reward and a loss; all other hooks have defaults.

An iteration runs the workflow and `reward` for each trajectory, then the `model_calls`, `advantages` once for all
trajectories, and `loss` for each microbatch of each minibatch.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypedDict, cast

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightrl.checks.bounds import check_adamw, check_bounds, check_choice, check_effect, check_kind, check_positive
from lightrl.checks.entry_points import entry_point
from lightrl.dataflow import DataFlowGraph, ModelCall, iteration_graph
from lightrl.errors import RewardError
from lightrl.experience import Experience, LossUnit
from lightrl.functional import group_advantages
from lightrl.models import LONGROPE_LENGTH, ModelSpec, Outputs, ParallelModel, Role, context_tokens
from lightrl.models import Metric as LossMetric
from lightrl.models.chat_template import ChatTemplate, stop_token_ids
from lightrl.models.images import ImageReader
from lightrl.models.model_folder import fill_in, keep_trained
from lightrl.models.optimizer import adamw, by_role, parameter_groups, with_schedule
from lightrl.models.role import load_role, trainable_policy
from lightrl.rewards import RewardPart
from lightrl.rewards.evaluation import Evaluation
from lightrl.rewards.hook import REWARD_THREAD
from lightrl.rewards.reward_result import RewardFunction
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.workflows.workflow import SingleTurn, Workflow, check_workflow

NEEDS_OUR_TRAINER = (
    "An RLModule needs lightrl.Trainer, whose loop does the rollouts and calls loss, but got Lightning's own Trainer. "
    "Use lightrl.Trainer instead of lightning.Trainer."
)

ESS_WEIGHTS = "ess_weights"  # a key of the dict that `loss` returns
CRITIC_KEYS = ("values", "bootstrap_values")  # model call outputs that the policy's loss does not read


class TrainedModule(L.LightningModule):
    """A module with models that `lightrl.Trainer` builds, shards, trains and saves.

    Setting one of `fixed_settings` during a run is an error: only parts of the run would use the new value.
    """

    fixed_settings: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed_settings and self._is_fitted():
            raise ValueError(
                f"{type(self).__name__}.{name} cannot be set during a run, because parts of the run have already read "
                "it. Resume from a checkpoint with the new value. For lr, you can set the optimizer's learning rate."
            )
        super().__setattr__(name, value)

    def _is_fitted(self) -> bool:
        try:
            return bool(self.trainer.state.status == "running" and self.trainer.optimizers)
        except (AttributeError, RuntimeError):  # inside the constructor, or not attached
            return False

    def add_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Adds the module's warm-up and decay to an optimizer; returns the result for `configure_optimizers`."""
        raise NotImplementedError(f"{type(self).__name__} must define add_schedule.")


class SharedSettings(TypedDict, total=False):
    """Arguments to RLModule that every algorithm passes on as `kwargs`, for type checkers."""

    reward: str | RewardPart | list[RewardPart] | RewardFunction | None
    reward_model: str | ModelSpec | Role | None
    reward_model_coef: float
    workflow: Callable[[PreTrainedTokenizerBase], Workflow] | None
    workflow_workers: int
    sampling: Sampling | None
    validation_sampling: Sampling | None
    validation_group_size: int
    num_minibatches: int
    update_epochs: int
    microbatch_tokens: int
    optimizer: Literal["adamw", "muon"]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_iterations: float
    lr_decay: Literal["constant", "linear", "cosine"]
    min_lr_ratio: float
    reward_workers: int
    reward_timeout_s: float
    reward_memory_mib: int | None
    reward_recycle_after: int | None
    max_failed_fraction: float
    max_skipped_updates: int


class RLModuleSettings(SharedSettings, total=False):
    group_size: int
    loss_reduction: Literal["token", "sequence", "fixed"]


class RLModule(TrainedModule):
    """A policy, its reward and its loss. Subclass it and write `reward` and `loss`; everything else has a default.

    The framework packs, masks and normalizes: `loss` maps [B, T] tensors to [B, T] tensors, and calls no model.

    Args:
        policy: the model to train: a hub name, a local folder, a ModelSpec, or a Role, which has more settings.
        reward: instead of the `reward` hook, a function or its dotted path, for example `my_project.rewards.exact`; a
            RewardPart, which is a path with arguments; or a list of RewardParts, to use their weighted sum. Functions
            given by path run in processes that can be killed; a hook that uses `self` runs in a thread.
        reward_model: a network that scores whole trajectories, for example a RewardModel's export, with the policy's
            tokenizer. The score is added to the reward before advantages, and may be the whole reward. The model may
            be on an SGLang server: `{url: ...}`.
        reward_model_coef: weight of the reward model's score.
        workflow: a function that builds the Workflow from the tokenizer; in YAML, a Workflow's class_path and init_args
            without the tokenizer. None uses SingleTurn, one completion per prompt.
        workflow_workers: number of processes on rank 0's host that run workflows; needs server engines. 0 uses rank 0.
        group_size: G, the number of trajectories per prompt.
        sampling: how to sample training rollouts. The model's and the tokenizer's stop tokens are added.
        validation_sampling: how to sample validation rollouts; None samples greedily with the same limits.
        validation_group_size: number of completions per validation prompt. Above 1, pass@k is also reported.
        num_minibatches: number of updates in one pass over the iteration.
        update_epochs: number of passes over the iteration, with the same minibatches in different orders.
        microbatch_tokens: maximum number of tokens in one forward and backward pass. A single longer row may exceed it;
            with several ranks per model, so may a single larger loss unit.
        loss_reduction: over a minibatch's N trained tokens and B trajectories, `token` is Σ/N, `sequence` Σᵢ(Σₜ/nᵢ)/B,
            and `fixed` Σ/(B·max_new_tokens).
        optimizer: `adamw`, or `muon` for hidden matrices with AdamW for the rest (models/muon.py).
        lr: learning rate for the default optimizer.
        betas: the default AdamW's decay rates for the two moments.
        eps: the default AdamW's epsilon.
        weight_decay: the default optimizer's weight decay.
        warmup_iterations: linear warm-up of the learning rate; a number below 1 is a fraction of the run.
        lr_decay: `constant`, or `linear` or `cosine` to the end of the run.
        min_lr_ratio: fraction of `lr` that remains at the end of a decay.
        reward_workers: number of processes that compute rewards, for a reward given by dotted path.
        reward_timeout_s: deadline for one call to the reward; must be below StalenessControl's rollout_timeout_s.
        reward_memory_mib: memory limit for each reward process; None means no limit.
        reward_recycle_after: number of calls after which a reward process is replaced; None means never.
        max_failed_fraction: the run stops if a larger fraction of an iteration's trajectories fails.
        max_skipped_updates: the run stops after this many updates in a row with non-finite gradients.
    """

    fixed_settings = frozenset({
        "policy_role", "reward_source", "reward_model_role", "workflow", "workflow_workers", "group_size", "sampling",
        "validation_sampling", "validation_group_size", "num_minibatches", "update_epochs", "lr", "betas", "eps",
        "weight_decay", "warmup_iterations", "lr_decay", "min_lr_ratio", "reward_workers", "reward_timeout_s",
        "reward_memory_mib", "reward_recycle_after", "max_failed_fraction", "loss_unit", "optimizer",
        "needs_entropy_gradient",
    })  # fmt: skip
    # Whether `loss` reads `proximal_logprobs`, and whether it uses the gradient of `outputs.entropy`; False saves time.
    needs_proximal_logprobs: bool = True
    needs_entropy_gradient: bool = True
    # Whether `advantages` compares the trajectories in a group, which must then have at least two.
    compares_groups: bool = True
    # Whether `advantages` reads `self.prompts`, the prompt of each trajectory, [B]; rank 0 sends them to all ranks.
    reads_prompts: bool = False
    prompts: Sequence[Prompt] = ()
    # The rows that the loss must see together: minibatches never split a unit. If a unit exceeds microbatch_tokens,
    # its rows go through the model separately (layouts/pieces.py). With pairs, a group that loses a trajectory is
    # sampled again; a group that loses a reward after model calls have run on its trajectories is dropped.
    loss_unit: LossUnit = "trajectory"
    # Weight of the value loss relative to the policy loss, if critic and policy share a body.
    value_coef: float = 0.5
    # The keys that `advantages` returns.
    advantage_keys: tuple[str, ...] = ("advantages",)
    # The per-token keys that `advantages` reads for all trajectories; each rank gathers them from the other ranks. For
    # other per-token keys, `advantages` gets only the rows in `experience.local`; [B] fields cover all trajectories.
    advantage_inputs: tuple[str, ...] = ()

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        reward: str | RewardPart | list[RewardPart] | RewardFunction | None = None,
        reward_model: str | ModelSpec | Role | None = None,
        reward_model_coef: float = 1.0,
        workflow: Callable[[PreTrainedTokenizerBase], Workflow] | None = None,
        workflow_workers: int = 0,
        group_size: int = 8,
        sampling: Sampling | None = None,
        validation_sampling: Sampling | None = None,
        validation_group_size: int = 1,
        num_minibatches: int = 1,
        update_epochs: int = 1,
        microbatch_tokens: int = 16384,
        loss_reduction: Literal["token", "sequence", "fixed"] = "token",
        optimizer: Literal["adamw", "muon"] = "adamw",
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_iterations: float = 0,
        lr_decay: Literal["constant", "linear", "cosine"] = "constant",
        min_lr_ratio: float = 0.0,
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
        check_bounds(0, warmup_iterations=warmup_iterations, workflow_workers=workflow_workers)
        check_bounds(0, 1, max_failed_fraction=max_failed_fraction, min_lr_ratio=min_lr_ratio, eps=eps)
        check_adamw(lr=lr, weight_decay=weight_decay, betas=betas)
        check_positive(reward_timeout_s=reward_timeout_s)
        check_kind(Sampling, sampling=sampling, validation_sampling=validation_sampling)
        check_choice(("constant", "linear", "cosine"), lr_decay=lr_decay)
        check_choice(("token", "sequence", "fixed"), loss_reduction=loss_reduction)
        check_choice(("adamw", "muon"), optimizer=optimizer)
        if lr_decay == "constant":
            check_effect("with lr_decay='constant'", min_lr_ratio=(min_lr_ratio, 0.0))
        if reward_model is None:
            check_effect("without reward_model", reward_model_coef=(reward_model_coef, 1.0))
        check_workflow(workflow)
        has_reward = reward is not None or type(self).reward is not RLModule.reward
        if not has_reward and reward_model is None:
            raise TypeError(
                f"{type(self).__name__} has no reward. Write `def reward(self, trajectory) -> float`, or set reward= "
                "to a function or its dotted path."
            )
        self.has_rollout_reward = has_reward  # if False, the reward model's score is the whole reward
        if group_size == 1 and self.compares_groups and type(self).advantages is RLModule.advantages:
            raise ValueError(
                "group_size must be at least 2 for group advantages, got 1. Increase it, or override advantages and "
                "set compares_groups = False."
            )
        if self.loss_unit == "pair" and group_size % 2:
            raise ValueError(f"group_size must be even with loss_unit='pair', got {group_size}.")
        self.policy_role = trainable_policy(policy)
        self.policy_spec = self.policy_role.spec
        self.reward_source = reward
        self.reward_model_role = None if reward_model is None else Role.of(reward_model).with_scalar_head()
        self.reward_model_coef = reward_model_coef
        self.workflow = workflow
        self.workflow_workers = workflow_workers
        self.group_size = group_size
        self.sampling = sampling or Sampling()
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature must be above 0, got 0: all completions in a group would be identical. Use 1."
            )
        self.validation_sampling = validation_sampling or dataclasses.replace(
            self.sampling, temperature=0.0, topk_logprobs=0
        )
        seeds = {"sampling.seed": self.sampling.seed, "validation_sampling.seed": self.validation_sampling.seed}
        check_effect("in a run, which gives each request its seed", **{name: (seed, 0) for name, seed in seeds.items()})
        self.validation_group_size = validation_group_size
        if validation_group_size > 1 and self.validation_sampling.temperature == 0:
            raise ValueError(
                f"validation_group_size={validation_group_size} needs validation_sampling.temperature above 0, got 0: "
                "all completions for a prompt would be identical. Pass validation_sampling, or validation_group_size=1."
            )
        self.num_minibatches = num_minibatches
        self.update_epochs = update_epochs
        self.microbatch_tokens = microbatch_tokens
        self.loss_reduction = loss_reduction
        self.optimizer = optimizer
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.warmup_iterations = warmup_iterations
        self.lr_decay = lr_decay
        self.min_lr_ratio = min_lr_ratio
        self.reward_workers = reward_workers
        self.reward_timeout_s = reward_timeout_s
        self.reward_memory_mib = reward_memory_mib
        self.reward_recycle_after = reward_recycle_after
        self.max_failed_fraction = max_failed_fraction
        self.max_skipped_updates = max_skipped_updates
        self.parallel_models: dict[str, ParallelModel] = {}  # role → model; the trainer fills it in
        self.value_head: torch.nn.Linear | None = None  # a critic's head on the policy's body
        # The user's metrics by name, updated with the groups of every validation or test batch.
        self.validation_metrics: dict[str, Metric] = {}
        self._data_flows: dict[bool, tuple[object, DataFlowGraph]] = {}  # `from_file` → its sources, the graph
        self._evaluation = Evaluation(validation_group_size)
        self._log_batch_size = 1  # stays 1 in training: each iteration has the same weight
        self._set_name: str | None = None  # name of the current batch's validation set, if there are several

    def models(self) -> dict[str, Role]:
        """Returns the roles by name; each role's model becomes the `self.<name>` attribute."""
        reward_model = {} if self.reward_model_role is None else {"reward_model": self.reward_model_role}
        return {"policy": self.policy_role, **reward_model}

    def configure_workflow(self) -> Workflow:
        """Builds the workflow, which maps a prompt to a trajectory, from the policy's tokenizer."""
        return SingleTurn(self.tokenizer) if self.workflow is None else self.workflow(self.tokenizer)

    def reward(self, trajectory: Trajectory) -> Any:
        """Computes the reward of a trajectory; may be async. Override it unless you pass `reward=`.

        Returns:
            A float, or a dict with `reward` and other numbers to log by name, for example `accuracy`.
        """
        if self.has_rollout_reward:
            raise NotImplementedError(f"{type(self).__name__} must define reward.")
        return 0.0  # the reward model's score, added later, is the whole reward

    def advantages(self, experience: Experience) -> Tensor | dict[str, Tensor]:
        """Computes how much better than expected each trajectory or token was; by default, group advantages.

        Returns:
            Advantages [B] or [B, T]; or a dict with `advantages` and other keys that losses read, like `returns`.
        """
        return group_advantages(experience.rewards, experience.group_ids)

    def loss(self, experience: Experience, outputs: Outputs) -> Mapping[str, LossMetric]:
        """Returns the loss of each token [B, T] or trajectory [B] under `loss`, and metrics of either shape by name.

        Metrics are averaged; a pair `(values, weights)` gives the weighted mean Σ w·v / Σ w. `ess_weights` [B, T] are
        the factors by which the loss multiplies each token's policy gradient, 0 for tokens without gradient. They are
        used to compute the `ess_fraction` metric; without them, policy ÷ behavior is used.

        Must be a pure function of its arguments. Masked positions are 0 in every float [B, T] input.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss.")

    def value_loss(self, experience: Experience, values: Tensor) -> Mapping[str, LossMetric]:
        """Returns the critic's loss of each token [B, T] under `loss`, and metrics, as `loss` does; only with a critic.

        Args:
            experience: includes the keys that `advantages` returned, usually `returns`.
            values: [B, T], the critic's value of the state before each token was sampled, with gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} has a critic, so it must define value_loss.")

    def row_weights(self, row_tokens: Tensor, trees: Tensor) -> Tensor | None:
        """Returns a weight for each row's loss. A row is a conversation; a trajectory with subagents has several rows.

        None, the default, weights all rows by 1: a trajectory counts once, however many rows it has, and its tokens
        count equally. A token shared by several rows belongs to the first. Losses per trajectory are not weighted.

        Args:
            row_tokens: int64 [R], the number of trained tokens in each row of a microbatch.
            trees: int64 [R], the index of each row's trajectory in the microbatch, ascending.

        Returns:
            [R], or None.
        """
        return None

    def is_update_the_last(self, metrics: dict[str, float]) -> bool:
        """Whether to skip the iteration's remaining minibatches, given the last minibatch's metrics."""
        return False

    def model_calls(self) -> list[ModelCall]:
        """Returns the model calls between rollout and advantages, in any order; each runs once per iteration.

        You can add your own, for example an LLM judge, with a function as `run`; read its output as `experience[key]`.
        """
        calls: list[ModelCall] = []
        if self.reward_model_role is not None:
            calls.append(ModelCall("reward_model", "reward_model", "infer", ("token_ids",), ("reward_model_scores",)))
        if self.needs_proximal_logprobs and not self.makes_one_update:  # otherwise the update computes them anyway
            calls.append(ModelCall("proximal_logprobs", "policy", "infer", ("token_ids",), ("proximal_logprobs",)))
        return calls

    def train_calls(self) -> list[ModelCall]:
        """Returns the update of each trained model, in order. One optimizer step per minibatch performs all updates."""
        scores = [key for call in self.model_calls() for key in call.outputs if key not in CRITIC_KEYS]
        calls = [ModelCall("policy_update", "policy", "train", ("behavior_logprobs", *scores, "advantages"))]
        if "critic" in self.trained_roles():
            calls.append(ModelCall("critic_update", "critic", "train", ("values", *self.advantage_keys[1:])))
        return calls

    def resting_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Returns trained parameters that this iteration leaves unchanged, including their optimizer state."""
        return ()

    def trained_roles(self) -> list[str]:
        """Lists the roles that the optimizer updates: the policy, and a separate critic unless it is frozen."""
        return [name for name, role in self.models().items() if name in ("policy", "critic") and not role.frozen]

    def saved_roles(self) -> list[str]:
        """Lists the roles that checkpoints contain; other roles are loaded again from their source."""
        return self.trained_roles()

    def configure_optimizers(self) -> Any:
        """Creates the optimizer for the trained parameters, with groups by role, warm-up and decay."""
        settings = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        make = entry_point("Muon") if self.optimizer == "muon" else adamw
        return self.add_schedule(make(self, self.parameter_groups(), **settings))

    def add_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.warmup_iterations and self.lr_decay == "constant":
            return optimizer
        num_iterations = self.trainer.estimated_stepping_batches
        return with_schedule(optimizer, num_iterations, self.warmup_iterations, self.lr_decay, self.min_lr_ratio)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups, one for each trained role, with the role's `lr` and `weight_decay`."""
        roles = self.models()
        return parameter_groups(self, {name: roles[name] for name in self.trained_roles()}, lr=self.lr)

    def validation_step(self, batch: list[Group], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs `val/…`, see docs/reference/metrics.md; with several loaders, Lightning adds `/dataloader_idx_<n>`."""
        self._log_evaluation("val", batch, dataloader_idx)

    def test_step(self, batch: list[Group], batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_evaluation("test", batch, dataloader_idx)

    def predict_step(self, batch: list[Group], batch_idx: int, dataloader_idx: int = 0) -> list[Group]:
        return batch

    def data_flow(self, *, from_file: bool = False) -> DataFlowGraph:
        """Returns a checked graph of everything that an iteration computes, from the prompt to the updates.

        The graph is rebuilt only if the module's calls, models or sampling have changed.

        Args:
            from_file: trajectories come from a file, so nothing is generated and no reward is computed.

        Raises:
            ValueError: if the calls do not form a valid graph (see DataFlowGraph), or a server cannot compute a call.
        """
        model_calls, train_calls, models = self.model_calls(), self.train_calls(), self.models()
        source = (model_calls, [call.run for call in model_calls], train_calls, models, self.sampling)
        if from_file not in self._data_flows or self._data_flows[from_file][0] != source:
            graph = iteration_graph(
                model_calls,
                train_calls,
                roles={name: role.spec for name, role in models.items()},
                sampling=self.sampling,
                reward=self.reward,
                advantages=self.advantages,
                advantage_keys=self.advantage_keys,
                from_file=from_file,
            )
            self._data_flows[from_file] = source, graph
        return self._data_flows[from_file][1]

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self.policy_spec.load_tokenizer()
        if tokenizer.eos_token_id is None and not self.sampling.stop_token_ids:
            raise ValueError(
                f"The tokenizer of {self.policy_spec.path or self.policy_spec.tokenizer!r} has no end token. Set "
                "eos_token in its files, or set sampling.stop_token_ids."
            )
        return tokenizer

    @functools.cached_property
    def image_reader(self) -> ImageReader | None:
        """Prepares images for the policy; None for a text-only policy."""
        return ImageReader.of(self.policy_spec.load_config())

    def stop_token_ids(self) -> dict[str, list[int]]:
        """Maps each source of stop tokens to its token ids."""
        return stop_token_ids(cast("PreTrainedModel", self.policy), self.tokenizer, self.sampling)

    def complete_template(self, template: ChatTemplate) -> None:
        """Sets a template's image reader and adds the tokens that end the policy's turns."""
        template.image_reader = self.image_reader
        for source, token_ids in self.stop_token_ids().items():
            template.end_token_ids.update(token_ids if source != "sampling" else ())

    @property
    def policy_config(self) -> PretrainedConfig:
        """The config of the policy's model; available once the model is loaded."""
        return cast("PreTrainedModel", self.policy).config

    @property
    def context_tokens(self) -> int | None:
        """Maximum length of prompt and completion together; None if the model does not state its context length."""
        return context_tokens(self.policy_spec.load_config())

    @property
    def max_prompt_tokens(self) -> int | None:
        """Maximum length of a prompt within `context_tokens`; None if `context_tokens` is None."""
        context = self.context_tokens
        longest = max(self.sampling.max_new_tokens, self.validation_sampling.max_new_tokens)
        if context is not None and context <= longest:
            name = "sampling" if longest == self.sampling.max_new_tokens else "validation_sampling"
            raise ValueError(
                f"{name}.max_new_tokens={longest} leaves no room for a prompt: the model's context is {context} tokens "
                f"(for longrope models, {LONGROPE_LENGTH}). Lower max_new_tokens."
            )
        return None if context is None else context - longest

    @property
    def makes_one_update(self) -> bool:
        """Whether an iteration has only one update; the proximal policy is then the current policy, at no cost."""
        return self.num_minibatches * self.update_epochs == 1

    @property
    def is_attached(self) -> bool:
        try:
            return self.trainer is not None
        except RuntimeError:
            return False

    @property
    def weight_version(self) -> int:
        """The version of the weights at the start of the update; 0 outside a run."""
        trainer: Any = self.trainer if self.is_attached else None
        return 0 if trainer is None else int(trainer.weight_version)

    def setup(self, stage: str) -> None:
        if not hasattr(self.trainer, "call_rl_hook"):
            raise RuntimeError(NEEDS_OUR_TRAINER)

    def configure_model(self) -> None:
        for name, role in self.models().items():
            if not hasattr(self, name) and role.spec.url is None:
                is_trained = name in self.trained_roles()
                setattr(self, name, load_role(name, role, self.policy_role, self.tokenizer, is_trained=is_trained))

    def training_step(self, batch: object, batch_idx: int) -> None:
        raise RuntimeError(NEEDS_OUR_TRAINER)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips each role separately, however the optimizer groups them: a critic must not shrink policy gradients."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for role_parameters in by_role(self, self.trained_roles(), parameters).values():
            role_optimizer: Any = SimpleNamespace(param_groups=[{"params": role_parameters}])
            super().configure_gradient_clipping(role_optimizer, gradient_clip_val, gradient_clip_algorithm)

    def transfer_batch_to_device(self, batch: object, device: torch.device, dataloader_idx: int) -> object:
        return batch  # prompts are plain Python

    def on_after_batch_transfer(self, batch: object, dataloader_idx: int) -> object:
        """Rolls out the prompts in a validation, test or predict batch, so that the step gets rewarded groups."""
        trainer: Any = self.trainer
        if trainer.training:
            self._log_batch_size = 1
            return batch
        groups: list[Group] = trainer.rewarded_groups(batch)
        self._set_name = getattr(batch, "set_name", None)
        self._log_batch_size = max(1, sum(len(group.trajectories) for group in groups))
        return groups

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Logs as Lightning does, but ten times as fast for plain numbers of the current iteration.

        The default `batch_size` is the number of trajectories; Lightning would infer it from tensors.

        Raises:
            RewardError: if called inside `reward`.
        """
        if threading.current_thread().name == REWARD_THREAD:
            raise RewardError(
                f"self.log({name!r}, ...) cannot be called in reward, which runs outside the training loop. Return the "
                f"number with the reward: {{'reward': ..., {name!r}: ...}}. It is logged as rollout/{name}."
            )
        if isinstance(value, int | float) and not args and self._current_fx_name is not None:
            trainer: Any = self.trainer
            if trainer.log_number(name, value, kwargs):
                return
        if not args and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = self._log_batch_size
        super().log(name, value, *args, **kwargs)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Removes the weights of frozen roles, which are loaded again from their source."""
        keep_trained(checkpoint, self._loaded_models(), self.saved_roles())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()  # `load_from_checkpoint` calls this before a trainer is attached
        fill_in(checkpoint, self._loaded_models(), self.saved_roles())

    def _loaded_models(self) -> dict[str, tuple[PreTrainedModel, Role]]:
        return {name: (getattr(self, name), role) for name, role in self.models().items() if role.spec.url is None}

    def _log_evaluation(self, stage: str, groups: list[Group], dataloader_idx: int) -> None:
        # Lightning requires an attribute name for each Metric that is not a submodule.
        for suffix in ("",) if self._set_name is None else ("", f"/{self._set_name}"):
            updated = self._evaluation.update(groups, self.validation_metrics, part=f"{dataloader_idx}{suffix}")
            for name, metric in updated.items():
                key = f"{stage}/{name}{suffix}"
                self.log(key, metric, on_step=False, on_epoch=True, metric_attribute="validation_metrics")
