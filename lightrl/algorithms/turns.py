"""GiGPO: credit for each turn in an episode, from groups of turns in addition to groups of trajectories.

    rewards of turns ──► discounted return of each turn ──► compared with other turns of the prompt's trajectories that
    start from the same observation (or have the same index) ──► + the trajectory's advantage ──► tokens of the turn

Shapes: B trajectories, T tokens; N turns of all trajectories.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.agents import gives_one_number
from lightrl.algorithms.grpo import GRPO, AllButBaseline, StatisticsSettings
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.columns import TURN_INDICES, TURN_STATES
from lightrl.experience import Experience
from lightrl.functional import group_advantages
from lightrl.models import ModelSpec, Role
from lightrl.workflows import SingleTurn, Workflow
from lightrl.workflows.workflow import class_of

StepGroups = Literal["state", "turn"]
_FIX = "Use a workflow based on MultiTurn, with the reward lightrl.rewards.environment_reward."


class AllButSteps(AllButBaseline, StatisticsSettings, total=False):
    group_size: int


class GiGPO(GRPO):
    """Adds an advantage per turn to the trajectory's group advantage, for environments with several turns.

    A turn's return is its reward plus the discounted rewards of later turns. With `step_groups: state`, it is compared
    with the returns of other turns that follow the same observation in trajectories of the same prompt: the policy saw
    the same text, but acted differently. A turn without a match gets only the trajectory's advantage, and so do tokens
    outside turns, for example from another data source. `step_groups: turn` compares turns with the same index; with
    `episode_weight: 0`, only the turns' returns count. The rewards of turns come from `MultiTurn` with `discount: 1`
    and from `lightrl.rewards.environment_reward`.

    Source: https://arxiv.org/abs/2505.10978, equations 3 to 9. The paper compares the environment's text; here the
    tokens between two turns are compared, so turns never match if the chat template numbers them.

    Args:
        step_weight: weight of the turns' advantages; the paper's omega.
        episode_weight: weight of the trajectory's advantage.
        discount: gamma, applied once for each turn between a turn and a later reward.
        step_groups: which turns are compared, `state` or `turn`.
        kwargs: arguments to GRPO; `advantage_mean` and `advantage_std` also apply to groups of turns.
    """

    advantage_inputs = (TURN_INDICES.name, TURN_STATES.name, "token_rewards", "loss_mask")  # gathered from all ranks

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        step_weight: float = 1.0,
        episode_weight: float = 1.0,
        discount: float = 0.95,
        step_groups: StepGroups = "state",
        **kwargs: Unpack[AllButSteps],
    ) -> None:
        check_bounds(0, step_weight=step_weight, episode_weight=episode_weight)
        check_bounds(0, 1, discount=discount)
        check_choice(("state", "turn"), step_groups=step_groups)
        if not 0 < step_weight + episode_weight < math.inf:
            raise ValueError("step_weight + episode_weight must be above 0 and finite; otherwise nothing is learned.")
        if kwargs.get("advantage_mean", "group") != "group":
            raise ValueError(f"advantage_mean must be 'group' for GiGPO, got {kwargs['advantage_mean']!r}.")
        if kwargs.get("workflow") is None:
            raise ValueError("GiGPO compares the turns in an episode. Set workflow to MultiTurn, or use GRPO.")
        _check_discount(getattr(kwargs["workflow"], "keywords", {}).get("discount", 1.0))
        super().__init__(policy, **kwargs)
        self.step_weight, self.episode_weight = step_weight, episode_weight
        self.discount = discount
        self.step_groups = step_groups

    def before_fit(self, data: Any) -> None:
        """Checks that at least one source has turns and a reward for each turn."""
        if hasattr(data, "recorded_groups"):  # recorded trajectories already have rewards
            return
        own: Any = self.reward if self.reward_source is None else self.reward_source
        pairs = [(self.workflow, own)]
        for task in getattr(data, "tasks", {}).values():
            pairs.append((task.workflow or self.workflow, own if task.reward is None else task.reward))
        pairs = [pair for pair in pairs if not issubclass(class_of(pair[0]) or Workflow, SingleTurn)]
        if all(gives_one_number(reward) for _, reward in pairs):
            problem = "the reward returns one number for a trajectory" if pairs else "SingleTurn has none"
            raise ValueError(f"GiGPO needs turns and their rewards, but {problem}. {_FIX}")

    def configure_workflow(self) -> Workflow:
        workflow = super().configure_workflow()
        _check_discount(getattr(workflow, "discount", 1.0))
        return workflow

    def advantages(self, experience: Experience) -> Tensor:
        try:
            indices, states, rewards = (experience[name] for name in self.advantage_inputs[:3])
        except KeyError as error:
            raise ValueError(
                f"GiGPO needs turns and their rewards, but the trajectories have no {error}. {_FIX}"
            ) from error
        in_turn = indices >= 0
        row, turn, place = turns_of(indices)
        earned = torch.zeros(len(row), dtype=torch.float64).index_add_(0, place[in_turn], rewards[in_turn].double())
        returns = discounted_returns(earned, row, self.discount)
        if self.step_groups == "state":
            turn = turn.index_put((place[in_turn],), states[in_turn])
        keys = torch.stack([experience.group_ids[row], turn], 1)
        groups: Tensor = torch.unique(keys, dim=0, return_inverse=True)[1]
        std: Literal["group"] | None = None if self.advantage_std is None else "group"
        steps = group_advantages(returns, groups, std=std, leave_one_out=self.leave_one_out)
        episodes = self.episode_weight * super().advantages(experience)[:, None]
        by_token = self.step_weight * steps[place.clamp(min=0)].to(episodes.dtype)
        return torch.where(experience["loss_mask"], episodes + torch.where(in_turn, by_token, 0.0), 0.0)


def _check_discount(discount: float) -> None:
    if discount != 1:
        raise ValueError(
            f"MultiTurn.discount must be 1 with GiGPO, got {discount}: GiGPO itself discounts later turns. Set "
            "GiGPO's discount instead."
        )


def turns_of(turn_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the row and index of each turn, int64 [N] each, in order, and the turn of each token, int64 [B, T].

    Args:
        turn_indices: int64 [B, T], -1 for tokens outside turns; the result also has -1 there.
    """
    rows = torch.arange(len(turn_indices))[:, None].expand_as(turn_indices)
    is_sampled = turn_indices >= 0
    keys = torch.stack([rows[is_sampled], turn_indices[is_sampled]], 1)
    pairs, inverse = torch.unique(keys, dim=0, return_inverse=True)
    place = torch.full_like(turn_indices, -1)
    place[is_sampled] = inverse
    return pairs[:, 0], pairs[:, 1], place


def discounted_returns(rewards: Tensor, rows: Tensor, discount: float) -> Tensor:
    """Returns each turn's reward plus the discounted rewards of the later turns of its row, [N].

    Args:
        rewards: the turns' rewards, [N]; the turns of a row are consecutive and in order.
        rows: the turns' rows, int64 [N].
    """
    returns = rewards.clone()
    for index in range(len(rewards) - 2, -1, -1):
        if rows[index] == rows[index + 1]:
            returns[index] += discount * returns[index + 1]
    return returns
