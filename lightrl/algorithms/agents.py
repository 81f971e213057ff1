"""Advantages per agent: each agent is compared with agents in the same role, usually in other episodes.

Shapes: B trajectories, T tokens, b trajectories on this rank, R roles, C agents with the same role in an episode.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch

from lightrl.algorithms.grpo import GRPO
from lightrl.checks.user_code import function_of
from lightrl.columns import COPIES
from lightrl.module import RLModule
from lightrl.rewards.parts import parts_of

_ONE_NUMBER = re.compile(r"float|int|bool|dict\[str, (float|int|bool|str|None| \| )+\]")  # without rewards per agent


def check_agents(module: RLModule, rewards: Iterable[Any] = ()) -> None:
    """Raises ValueError if the module has no baseline per agent, or a reward function returns no rewards per agent.

    Args:
        rewards: the reward functions, checked by annotation before a run; `agent_advantages` checks their results.
    """
    kind = type(module).advantages
    if kind is not GRPO.advantages and not kind.__module__.startswith("lightrl."):
        return
    if not isinstance(module, GRPO) or kind is not GRPO.advantages:
        raise ValueError(
            f"{type(module).__name__} has no baseline per agent, which MultiAgent needs. Use GRPO, DrGRPO or RLOO, or "
            "override advantages."
        )
    if module.overlong_penalty is not None or module.reward_shaping is not None:
        raise ValueError(
            "overlong_penalty and reward_shaping change a trajectory's reward, not an agent's. Remove them."
        )
    for name in ("shaped_rewards", "penalized_rewards"):
        if getattr(type(module), name) is not getattr(GRPO, name):
            raise ValueError(
                f"{type(module).__name__}.{name} changes a trajectory's reward, but MultiAgent needs rewards per "
                "agent. Override advantages instead."
            )
    if module.reward_model_role is not None:
        raise ValueError(
            "A reward model scores a trajectory, not an agent. Remove reward_model, or override advantages."
        )
    for reward in rewards:
        if gives_one_number(reward):
            raise ValueError(
                f"MultiAgent needs rewards per agent, but reward={getattr(reward, '__qualname__', reward)!r} returns "
                "one number for a trajectory. Set reward to lightrl.rewards.environment_reward, or combine both."
            )


def gives_one_number(reward: Any) -> bool:
    """Whether a module's or task's reward is annotated to return one number for a trajectory."""
    try:
        functions = [reward] if callable(reward) else [function_of(part.path, "reward") for part in parts_of(reward)]
        calls = [item.__call__ if isinstance(item, type) else item for item in functions]
        kinds = [inspect.formatannotation(inspect.signature(call).return_annotation).strip("'") for call in calls]
    except (TypeError, ValueError):  # a builtin, or a path that the reward worker refuses
        return False
    return all(map(_ONE_NUMBER.fullmatch, kinds))


def agent_advantages(module: RLModule, experience: Any) -> Any:
    """Returns the advantages, [b, T], of trajectories with the `agents` column. A user's `advantages` takes precedence.

    An agent's reward is the sum of its tokens' rewards. Its baseline is the mean reward of its role over the
    trajectory's group, or over the iteration with `advantage_mean: batch`. If an episode has several agents with
    the same role, such as the solvers of one proposed task, they form their own group, and the mean is over them. A
    trajectory without agents, for example from another data source, gets its group's advantage.

    Source: SPIRAL's role-conditioned advantages, https://arxiv.org/abs/2506.24119, but with the mean of the group.

    Raises:
        ValueError: if the algorithm has no baseline per agent, or the rewards are not per agent.
    """
    kind = type(module).advantages
    if kind is not GRPO.advantages and not kind.__module__.startswith("lightrl."):
        return module.advantages(experience.shown)
    check_agents(module)
    assert isinstance(module, GRPO)
    local, rows = experience.local, experience.local_rows
    agents, token_rewards = local["agents"], local.token_rewards
    role, copy = agents.clamp(min=0) // COPIES, agents.clamp(min=0) % COPIES  # agents = role * COPIES + copy
    # A row whose reward is a single number has NaN here if other rows have token rewards (columns/rewards.py).
    lacks_rewards = (agents >= 0) if token_rewards is None else (agents >= 0) & token_rewards.isnan()
    largest = torch.tensor([int(part.max()) if part.numel() else 0 for part in (role, copy, lacks_rewards)])
    num_roles, num_copies, missing_plus_1 = (experience.total(largest, "max") + 1).tolist()
    if missing_plus_1 > 1 or token_rewards is None:
        raise ValueError("MultiAgent needs rewards per agent. Set reward to lightrl.rewards.environment_reward.")
    index = role * num_copies + copy
    is_agents = (agents >= 0).double()
    earned, present = torch.zeros(2, len(experience), num_roles * num_copies, dtype=torch.float64)
    earned[rows] = torch.zeros_like(earned[rows]).scatter_add_(1, index, token_rewards.double() * is_agents)
    present[rows] = torch.zeros_like(present[rows]).scatter_add_(1, index, is_agents)
    earned, present = experience.total(earned), experience.total(present) > 0
    advantages = torch.zeros_like(earned)
    groups = torch.unique(experience.group_ids, return_inverse=True)[1]
    for columns in torch.arange(num_roles * num_copies).view(num_roles, num_copies).unbind():
        has, values = present[:, columns], earned[:, columns]
        # Compare within the group or, if a trajectory has several agents with this role, within the trajectory.
        ids = torch.where(has.sum(1) > 1, len(groups) + torch.arange(len(groups)), groups)[:, None].expand_as(values)
        result = torch.zeros_like(values)
        result[has] = module.group_advantages_of(values[has], ids[has])
        advantages[:, columns] = result
    alone, others = ~present.any(1), torch.zeros(len(experience), dtype=torch.float64)
    if alone.any():
        others[alone] = module.group_advantages_of(experience.rewards[alone].double(), experience.group_ids[alone])
    result = torch.where(agents >= 0, advantages[rows].gather(1, index), others[rows, None])
    return torch.where(local.loss_mask, result, 0.0).float()
