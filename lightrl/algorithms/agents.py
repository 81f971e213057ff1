"""Advantages of agents: each is compared with the same agent, not with the others of its episode.

Shapes: B trajectories, T tokens, b trajectories on this rank, R roles, C agents of one role in an episode.
"""

from __future__ import annotations

from typing import Any

import torch

from lightrl.algorithms.grpo import GRPO
from lightrl.columns import COPIES
from lightrl.module import RLModule


def check_agents(module: RLModule) -> None:
    """Raises ValueError if the module has no baseline per agent; called before a run with MultiAgent starts."""
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
                f"{type(module).__name__}.{name} changes a trajectory's reward, not an agent's, as MultiAgent needs. "
                "Override advantages instead."
            )
    if module.reward_model_role is not None:
        raise ValueError(
            "A reward model scores a trajectory, not an agent. Remove reward_model, or override advantages."
        )


def agent_advantages(module: RLModule, experience: Any) -> Any:
    """Returns advantages of trajectories with the column `agents`, [b, T]; a user's `advantages` is called instead.

    An agent's reward is the sum of its tokens' rewards. Its baseline is the mean of its role over the trajectory's
    group, with `advantage_mean: batch` over the iteration. If its role has several agents in the episode, such as the
    solvers of one proposed task, they are a group of their own: the mean is over them. A trajectory without agents, as
    of another source, gets its group's advantage.

    Source: role-conditioned advantages, SPIRAL, https://arxiv.org/abs/2506.24119, with the group's mean instead of a
    moving average.

    Raises:
        ValueError: if the algorithm has no such baseline, or the rewards are not per agent.
    """
    kind = type(module).advantages
    if kind is not GRPO.advantages and not kind.__module__.startswith("lightrl."):
        return module.advantages(experience.shown)
    check_agents(module)
    assert isinstance(module, GRPO)
    local, rows = experience.local, experience.local_rows
    agents, token_rewards = local["agents"], local.token_rewards
    role, copy = agents.clamp(min=0) // COPIES, agents.clamp(min=0) % COPIES
    # A row whose reward is one number has NaN in a column of rewards that other rows have (columns/rewards.py).
    lacks_rewards = (agents >= 0) if token_rewards is None else (agents >= 0) & token_rewards.isnan()
    largest = torch.tensor([int(part.max()) if part.numel() else 0 for part in (role, copy, lacks_rewards)])
    num_roles, num_copies, has_missing = (experience.total(largest, "max") + 1).tolist()
    if has_missing > 1 or token_rewards is None:
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
        # A group for each group of trajectories and, where the role has several agents, one for each trajectory.
        ids = torch.where(has.sum(1) > 1, len(groups) + torch.arange(len(groups)), groups)[:, None].expand_as(values)
        result = torch.zeros_like(values)
        result[has] = module.group_advantages_of(values[has], ids[has])
        advantages[:, columns] = result
    alone, others = ~present.any(1), torch.zeros(len(experience), dtype=torch.float64)
    if alone.any():
        others[alone] = module.group_advantages_of(experience.rewards[alone].double(), experience.group_ids[alone])
    result = torch.where(agents >= 0, advantages[rows].gather(1, index), others[rows, None])
    return torch.where(local.loss_mask, result, 0.0).float()
