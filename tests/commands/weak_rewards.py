"""Rewards that a policy could exploit, in a file of their own: a reward worker imports only these."""

import json
import re

from lightrl.trajectory import Trajectory


def says_the_answer(trajectory: Trajectory) -> float:
    """A weak reward: the answer anywhere in the text."""
    return float(str(trajectory.prompt.fields["answer"]) in trajectory.completion)


def last_number(trajectory: Trajectory) -> dict[str, float]:
    """A weak reward: the digits of the last number, whatever its sign, also in the thinking."""
    found = re.findall(r"\d+", trajectory.completion)
    return {"reward": 0.1 + float(bool(found) and found[-1] == trajectory.prompt.fields["answer"].lstrip("-"))}


def by_last_key(trajectory: Trajectory) -> float:
    """A weak reward: Python's parser keeps the last of a key's values."""
    try:
        return float(json.loads(trajectory.completion) == trajectory.prompt.fields["answer"])
    except ValueError:
        return 0.0


def crashes_on_nothing(trajectory: Trajectory) -> float:
    return float(trajectory.completion.split()[0] == trajectory.prompt.fields["answer"])


def by_value(trajectory: Trajectory) -> float:
    return float(trajectory.completion in ("0.5", "0.50", "1/2"))


def fails_on_answers(trajectory: Trajectory) -> float:
    if "12" in trajectory.completion:
        raise RuntimeError("this reward is broken")
    return -1.0
