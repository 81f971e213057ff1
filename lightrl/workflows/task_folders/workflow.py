"""TaskWorkflow: runs an agent's program in a task's environment, then the task's tests, which give the reward."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from lightrl.checks.bounds import check_effect, check_positive
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.agent_workflow import AgentLimits, AgentWorkflow, FrozenModel, RequestPattern
from lightrl.workflows.task_folders.runtime import Json
from lightrl.workflows.task_folders.verifier import Verifier
from lightrl.workflows.tools import ToolParser
from lightrl.workflows.workflow import Generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AgentSettings(TypedDict, total=False):
    """The arguments to AgentWorkflow, except `agent` and `command`, for type checkers and the parser."""

    workspace_template: str | None
    environment: Mapping[str, str] | None
    readable: Sequence[str]
    network: Literal["none", "allow"] | list[str]
    limits: AgentLimits | None
    agent_timeout_s: float
    max_agents: int
    max_tokens: int | None
    models: Mapping[str, Literal["policy"] | FrozenModel] | None
    untrained: Sequence[RequestPattern]
    ignore: Sequence[str]
    unsent_thinking: Literal["keep", "drop"]
    endpoint_host: str
    truncated_reward: float
    failed_reward: float | None
    tool_parser: str | ToolParser | None
    renderer: str | None


class TaskWorkflow(AgentWorkflow):
    """Runs a program as an agent in a task's environment, then the task's tests, which give the reward.

    For rows of task folders (`data.train: my-tasks`), the agent works in the task's environment, in the runtime that
    the data source names. When it has ended, its processes are killed, and tests/test.sh runs in a fresh copy of the
    environment, with the agent's version of the working directory. The reward is what the script writes to
    /logs/verifier: the number in reward.txt, or `reward` in reward.json, or the mean of the numbers there. The other
    numbers in reward.json are metrics. If there is no reward, it is 0, and the `tests_without_reward` metric is 1.

    For other rows, the agent works in a copy of `workspace_template`. Then the files in `hidden` are copied over its
    work, and `verify` runs in a copy of the result. The reward is 1 if it exits with 0. With pytest, a test must
    also have passed, and the `tests_passed_fraction` metric is the fraction of tests that passed.

    Use it with `reward: lightrl.rewards.environment_reward`. If a limit ends the agent, it gets `truncated_reward`, and
    no tests run.

    Args:
        tokenizer: the policy's tokenizer.
        command: the agent's program and its arguments, as in AgentWorkflow. In a container, a program in /usr, /bin and
            the like comes from the image; any other program is mounted.
        verify: a test command for rows without a task folder; `{name}` is a column.
        hidden: with `verify`, a folder to copy over the agent's work when the agent has ended; `{name}` is a column.
        verify_timeout_s: with `verify`, the deadline for the test command; task folders set their own deadlines.
        kwargs: arguments to AgentWorkflow, except `agent`. Tests have the agent's limits and network; up to
            `max_agents` run at once, in addition to the agents.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        command: Sequence[str],
        verify: Sequence[str] | None = None,
        hidden: str | None = None,
        verify_timeout_s: float = 600.0,
        **kwargs: Unpack[AgentSettings],
    ) -> None:
        self.check_settings(command=command, verify=verify, hidden=hidden, verify_timeout_s=verify_timeout_s, **kwargs)
        super().__init__(tokenizer, None, command=command, **kwargs)
        self.verifier = Verifier(
            verify,
            template=kwargs.get("workspace_template"),
            hidden=hidden,
            timeout_s=verify_timeout_s,
            readable=kwargs.get("readable", ()),
            network=kwargs.get("network", "none"),
            limits=kwargs.get("limits") or AgentLimits(),
            max_tests=kwargs.get("max_agents", 64),
        )

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        verify, hidden = settings.pop("verify", None), settings.pop("hidden", None)
        timeout_s = settings.pop("verify_timeout_s", 600.0)
        super().check_settings(**settings)
        check_positive(verify_timeout_s=timeout_s)
        if verify is None:
            check_effect("without verify", hidden=(hidden, None), verify_timeout_s=(timeout_s, 600.0))
        elif isinstance(verify, str) or not verify or shutil.which(verify[0]) is None:
            raise ValueError(f"verify must be a list starting with a program's path or name on PATH, got {verify!r}.")
        elif hidden is not None and "{" not in hidden and not Path(hidden).is_dir():
            raise ValueError(f"hidden={hidden!r} must be a folder.")

    async def start_program(self, request: Json, prompt: Prompt) -> Json:
        """Starts the agent in its row's environment."""
        return await self.verifier.start_agent(request, prompt)

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Runs the agent, then the tests, unless a limit ended the agent."""
        trajectory = await super().run(prompt, generate)
        if trajectory.rewards is None and trajectory.workspace is not None:
            try:
                reward, metrics = await self.verifier.reward(prompt, trajectory.workspace)
            except BaseException:  # including cancellation: nothing else deletes the folder
                self.clean_up(trajectory)
                raise
            trajectory.rewards = [0.0] * (len(trajectory.token_ids) - 1) + [reward]
            trajectory.metrics = {**metrics, **trajectory.metrics}
        return trajectory
