"""Rewards that read the folder in which the agent's program ran."""

import functools
from pathlib import Path

from lightrl import Trajectory
from lightrl.rewards.sandbox import Limits, LocalSandbox


def wrote_largest_digit(trajectory: Trajectory) -> float:
    """Returns 1 for the right digit in answer.txt; the workspace is None if the program was stopped at max_tokens."""
    file = Path(trajectory.workspace or "", "answer.txt")
    return float(file.is_file() and file.read_text() == max(trajectory.prompt.id[:4]))


def reported(trajectory: Trajectory) -> float:
    """Returns the number that the program wrote into reward.txt; 0 if it was stopped at max_tokens."""
    file = Path(trajectory.workspace or "", "reward.txt")
    return float(file.read_text()) if file.is_file() else 0.0


def repaired_half(trajectory: Trajectory) -> float:
    """Returns 1 if half.py halves numbers; the policy's code runs in the sandbox."""
    file = Path(trajectory.workspace or "", "half.py")
    program = f"{file.read_text()}\nassert half(4) == 2 and half(7) == 3.5" if file.is_file() else "raise SystemExit(1)"
    return float(_sandbox().run(program, "", Limits()).exit_code == 0)


@functools.cache
def _sandbox() -> LocalSandbox:
    return LocalSandbox()
