"""Rewards of tiny_task.py, in a file of their own: a reward process imports only these, not torch and Lightning."""

from lightrl.trajectory import Trajectory

ANSWER = 5


def exact(trajectory: Trajectory) -> float:
    return float(trajectory.completion_ids[0] == ANSWER)


def never(trajectory: Trajectory) -> float:
    return 0.0


def broken(trajectory: Trajectory) -> float:
    raise RuntimeError("this reward is broken")


def of_service(trajectory: Trajectory, token: str, headers: dict[str, str], max_new_tokens: int) -> float:
    return exact(trajectory)


def in_parts(trajectory: Trajectory) -> dict[str, float]:
    accuracy, is_long = exact(trajectory), len(trajectory.completion_ids) > 1
    return {"reward": accuracy + is_long / 2, "accuracy": accuracy, "format": is_long / 2}


def of_texts(trajectory: Trajectory, texts: dict[str, object]) -> float:
    assert all(type(text) is str for text in texts.values()), texts
    return exact(trajectory)
