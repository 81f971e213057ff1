"""Task: the settings for the prompts from one data source; Tasks: a data module's tasks, by the source's label.

    train:                                        # in YAML
      - {source: math.parquet, label: math, task: {reward: lightrl.rewards.math_answer, group_size: 16}}
      - source: games.jsonl
        label: games
        task:
          workflow: {class_path: MultiTurn, init_args: {environment: my_project.games.GuessNumber}}
          reward: lightrl.rewards.environment_reward

`Prompt.source` is the label. It selects the workflow that runs a prompt, and the reward function for its trajectories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightrl.checks.bounds import check_bounds
from lightrl.checks.entry_points import entry_point
from lightrl.checks.printable import count_text
from lightrl.rewards import RewardPart, RewardResult, RewardWorker
from lightrl.rewards.parts import parts_of
from lightrl.rewards.reward_result import RewardFunction
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.workflows.workflow import Generate, GroupGenerate, GroupResult, Workflow, check_workflow, class_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """The settings for the prompts from one source; None uses the module's setting.

    Args:
        workflow: replaces the module's `workflow`, with the source's turns, environment, tools or agent.
        reward: replaces the module's `reward`; it gets its own worker processes.
        group_size: G, trajectories per prompt. The advantages of a group do not depend on the other groups' sizes, but
            with `loss_reduction: sequence`, a prompt's weight is its number of trajectories.
        max_new_tokens: token limit for a completion, at most the module's `sampling.max_new_tokens`.
    """

    workflow: Callable[[PreTrainedTokenizerBase], Workflow] | None = None
    reward: str | RewardPart | list[RewardPart] | RewardFunction | None = None
    group_size: int | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        check_bounds(1, group_size=self.group_size, max_new_tokens=self.max_new_tokens)
        check_workflow(self.workflow)
        if self.reward is not None and not callable(self.reward):
            parts_of(self.reward)


class Tasks(dict[str, Task]):
    """A data module's tasks: source label → Task. Prompts from other sources use the module's settings."""

    @property
    def group_sizes(self) -> dict[str, int]:
        return {label: task.group_size for label, task in self.items() if task.group_size is not None}

    def check(self, module: Any) -> None:
        """Raises ValueError if a workflow or task does not fit the module; called before a model is built."""
        own = module.reward if module.reward_source is None else module.reward_source
        tasks = [
            (module.workflow if task.workflow is None else task.workflow, own if task.reward is None else task.reward)
            for task in (Task(), *self.values())
        ]
        rewards = [reward for workflow, reward in tasks if getattr(class_of(workflow), "has_agents", False)]
        if rewards:
            entry_point("agent check")(module, rewards)
        sampling, overlong = module.sampling, getattr(module, "overlong_penalty", None)
        for label, task in self.items():
            name, size, limit = f"of source {label!r}", task.group_size, task.max_new_tokens
            if size == 1 and module.compares_groups:
                raise ValueError(f"group_size {name} must be at least 2 for group statistics, got 1.")
            if size is not None and size % 2 and module.loss_unit == "pair":
                raise ValueError(f"group_size {name} must be even with loss_unit='pair', got {size}.")
            if limit is not None and not sampling.min_new_tokens <= limit <= sampling.max_new_tokens:
                raise ValueError(
                    f"max_new_tokens {name} must be from sampling.min_new_tokens={sampling.min_new_tokens} to "
                    f"sampling.max_new_tokens={sampling.max_new_tokens}, got {limit}. Raise the module's limit to the "
                    "largest of all sources."
                )
            if overlong is not None and (limit is not None or task.workflow is not None):
                raise ValueError(
                    f"overlong_penalty compares all trajectories with sampling.max_new_tokens, but source {label!r} "
                    "has its own workflow or limit. Put the penalty into the rewards."
                )

    def workflow(self, default: Workflow, module: Any) -> WorkflowOfSource:
        """Builds the sources' workflows with the module's tokenizer; `default` runs all other prompts."""
        built = {label: task.workflow(module.tokenizer) for label, task in self.items() if task.workflow is not None}
        for workflow in built.values():
            if workflow.template is not None:
                module.complete_template(workflow.template)
        limits = {label: task.max_new_tokens for label, task in self.items() if task.max_new_tokens is not None}
        return WorkflowOfSource(default, built, limits)

    def reward_worker(self, default: RewardWorker, make: Callable[[Any], RewardWorker]) -> TaskRewards:
        """Returns a worker that computes each trajectory's reward with its source's function."""
        own = {label: make(task.reward) for label, task in self.items() if task.reward is not None}
        return TaskRewards(default, own)

    def lines(self, module: Any) -> list[str]:
        """Describes the settings of each source, for the log and for `lightrl plan`."""
        lines = []
        for source, task in {**{f"source {label}": task for label, task in self.items()}, "others": Task()}.items():
            size, limit = task.group_size or module.group_size, task.max_new_tokens or module.sampling.max_new_tokens
            workflow = _name(task.workflow) or _name(module.workflow) or "the module's workflow"
            reward = _name(task.reward) or _name(module.reward_source) or "the module's reward"
            lines.append(f"{source}: {workflow}, {reward}, group_size {size}, at most {count_text(limit, 'new token')}")
        return lines


def by_source(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Returns the groups of each labeled data source, keyed by the suffix of its metrics, for example `/math`."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        if group.prompt.source is not None:
            parts.setdefault(f"/{group.prompt.source}", []).append(group)
    return parts


class WorkflowOfSource(Workflow):
    """Runs each prompt with the workflow of its source.

    Args:
        default: runs prompts from sources without a workflow.
        workflows: source label → workflow.
        limits: source label → token limit for a completion.
    """

    own_timeout_s = None  # each workflow's own limit applies

    def __init__(self, default: Workflow, workflows: Mapping[str, Workflow], limits: Mapping[str, int]) -> None:
        self.default, self.workflows, self.limits = default, dict(workflows), dict(limits)
        self.template = default.template
        self.continues = all(workflow.continues for workflow in self._all())

    def _all(self) -> list[Workflow]:
        return [self.default, *self.workflows.values()]

    def of(self, prompt: Prompt) -> Workflow:
        return self.workflows.get(prompt.source or "", self.default)

    @property
    def samples_apart(self) -> bool:
        return all(workflow.samples_apart for workflow in self._all())

    def sampling_of(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        sampling = self.of(prompt).sampling_of(prompt, sampling)
        limit = self.limits.get(prompt.source or "", sampling.max_new_tokens)
        return replace(sampling, max_new_tokens=min(limit, sampling.max_new_tokens))

    def fit_context(self, context_tokens: int | None) -> None:
        for workflow in self._all():
            workflow.fit_context(context_tokens)

    def run_group(self, prompt: Prompt, generate: GroupGenerate) -> AsyncGenerator[GroupResult, None]:
        return self.of(prompt).run_group(prompt, generate)

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        return await self.of(prompt).run(prompt, generate)

    def clean_up(self, trajectory: Trajectory) -> None:
        self.of(trajectory.prompt).clean_up(trajectory)


class TaskRewards:
    """A RewardWorker that passes each trajectory to the worker of its source."""

    def __init__(self, default: RewardWorker, own: Mapping[str, RewardWorker]) -> None:
        self.default, self.own = default, dict(own)

    def start(self) -> None:
        for worker in self._all():
            worker.start()

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        """Sends one request to each worker; the futures are in the trajectories' order."""
        indices: dict[str, list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            source = trajectory.prompt.source or ""
            indices.setdefault(source if source in self.own else "", []).append(index)
        futures: dict[int, asyncio.Future[RewardResult]] = {}
        for source, part in indices.items():
            computing = self.own.get(source, self.default).compute_rewards([trajectories[index] for index in part])
            futures |= zip(part, computing, strict=True)
        return [futures[index] for index in range(len(trajectories))]

    def close(self) -> None:
        for worker in self._all():
            worker.close()

    def _all(self) -> list[RewardWorker]:
        return [self.default, *self.own.values()]


def _name(setting: object) -> str:
    """Returns the name of a workflow or reward for `lines`; "" for None."""
    if setting is None or isinstance(setting, str):
        return setting or ""
    if isinstance(setting, RewardPart):
        return setting.path
    if isinstance(setting, Iterable):
        return " + ".join(map(_name, setting))
    kind: object = class_of(setting) or setting
    name: str = getattr(kind, "__qualname__", type(kind).__qualname__)
    environment = getattr(setting, "keywords", {}).get("environment")
    return name if environment is None else f"{name}({_name(environment)})"
