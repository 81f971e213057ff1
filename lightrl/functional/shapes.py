"""The check on entry that the equations share."""

from __future__ import annotations

from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Rejects tensors that would broadcast; the names are those of the caller's arguments.

    Raises:
        ValueError: if a tensor's shape differs from the first one's.
    """
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first} has shape {tuple(expected.shape)}; they must be "
                "equal. Align both to the tokens they describe; value[:, None].expand(B, T) turns a value per "
                "trajectory into one per token."
            )
