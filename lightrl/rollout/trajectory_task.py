"""Playing and judging one trajectory: user code at its border, where each failure becomes an error with a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import LightRLError, RewardError, RolloutError
from lightrl.rewards import Judge, Judgment
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.workflows.workflow import Workflow, check_trajectory


async def play_trajectory(
    prompt: Prompt,
    *,
    engine: RolloutEngine,
    workflow: Workflow,
    sampling: Sampling,
    seed_of_turn: Callable[[int], int],
    session: str,
    was_given_up: Callable[[], bool],
) -> Trajectory:
    """One interaction of the workflow with the engine, checked; without reward and group.

    Waits for the workflow, without a deadline of its own. A cancellation that came from above passes through.

    Args:
        sampling: of every turn; the seed is set here.
        seed_of_turn: the seed of turn 0, 1, …
        session: the engine's name for this interaction.
        was_given_up: whether a cancellation of the present task came from above.

    Raises:
        RolloutError: if the workflow raises, ends by a cancellation of its own, or gives no trajectory to train on.
        EngineError: from the engine.
    """
    turn = 0

    async def generate(token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
        nonlocal turn
        seed = seed_of_turn(turn)
        turn += 1
        longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
        shortest = min(sampling.min_new_tokens, longest)
        drawn = replace(sampling, seed=seed, max_new_tokens=longest, min_new_tokens=shortest)
        pictures: dict[str, Any] = {"images": prompt.images} if prompt.images else {}
        completions = await engine.generate(token_ids, drawn, session=session, **pictures)
        if completions[0].finish_reason == "abort":
            raise RolloutError(f"The engine aborted turn {turn - 1} of prompt {prompt.id!r}, expected stop or length.")
        return completions[0]

    name = f"{type(workflow).__name__}.run"
    try:
        return check_trajectory(await workflow.run(prompt, generate), workflow, prompt)
    except LightRLError:
        raise
    except asyncio.CancelledError as error:
        if was_given_up():
            raise
        raise RolloutError(f"{name} let a cancellation of its own escape on prompt {prompt.id!r}.") from error
    except (Exception, SystemExit) as error:
        raise RolloutError(f"{name} raised {error!r} on prompt {prompt.id!r}, expected a Trajectory.") from error


async def judge_trajectory(judge: Judge, trajectory: Trajectory) -> Judgment:
    """The judgment; waits for the judge, which keeps its own deadline.

    Raises:
        RewardError: if there is no reward.
    """
    try:
        return await judge.score(trajectory)
    except LightRLError:
        raise
    except Exception as error:
        raise RewardError(f"{type(judge).__name__}.score raised {error!r}, expected a Judgment.") from error
