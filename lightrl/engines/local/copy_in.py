"""copy_in: new weights into a decoder, all of them or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from lightrl.engines.local.decoder import Decoder
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket


def copy_in(decoder: Decoder, buckets: Iterable[Bucket], *, can_undo: bool) -> None:
    """Copies every parameter; if anything fails, overwritten ones get their old values back.

    Args:
        can_undo: False if the decoder has no weights yet.

    Raises:
        WeightSyncError: if a name is unknown, missing or repeated, a shape differs, or a value is not finite.
    """
    written: set[str] = set()
    with contextlib.ExitStack() as undo:
        for bucket in buckets:
            for name, tensor in bucket.tensors.items():
                _check_parameter(decoder, name, tensor, written)
            for name, tensor in bucket.tensors.items():
                written.add(name)
                if can_undo:
                    undo.callback(decoder.write, name, decoder.read(name))
                decoder.write(name, tensor)
        missing = sorted(set(decoder.shapes) - written)
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(decoder.shapes)} parameters did not arrive, such as {missing[0]!r}. Export "
                "every parameter; the engine keeps its old weights."
            )
        undo.pop_all()


def _check_parameter(decoder: Decoder, name: str, tensor: Tensor, written: set[str]) -> None:
    shape = decoder.shapes.get(name, decoder.optional_shapes.get(name))
    if shape is None:
        raise WeightSyncError(
            f"The engine's model has no parameter {name!r}; its names look like {next(iter(decoder.shapes))!r}. Export "
            "the model that the engine was started with; the engine keeps its old weights."
        )
    if name in written:
        raise WeightSyncError(f"Parameter {name!r} arrived twice. Fix the export.")
    if tensor.shape != shape:
        raise WeightSyncError(
            f"Parameter {name!r} has shape {tuple(tensor.shape)}, but the engine's model needs {tuple(shape)}. Export "
            "the model that the engine was started with; the engine keeps its old weights."
        )
    if tensor.is_floating_point() and tensor.numel():
        low, high = torch.aminmax(tensor.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise WeightSyncError(
                f"Parameter {name!r} has values that are not finite. Find the update that produced them; the engine "
                "keeps its old weights."
            )
