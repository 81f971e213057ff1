"""The quickstart's reward, in a separate file so that its process imports neither torch nor transformers."""

from lightrl import Trajectory


def exact(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 for the right digit and the end token. It compares token ids, because `9<unk>` would decode to `9`."""
    right = float(trajectory.completion_ids == trajectory.prompt.fields["answer_ids"])
    return {"reward": right, "accuracy": right}
