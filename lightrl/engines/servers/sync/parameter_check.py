"""ParameterCheck: every load must have the parameters of the first one, with finite values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket


class ParameterCheck:
    """Compares names and shapes of each load with those of the first."""

    def __init__(self) -> None:
        self._first: dict[str, list[int]] | None = None  # parameters of the first load, with their shapes

    def checked(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yields the buckets of a load, the last one, which carries the version, only if all parameters are right.

        Raises:
            WeightSyncError: if a parameter is missing, new, there twice, of another shape, or not finite.
        """
        shapes: dict[str, list[int]] = {}
        for bucket in buckets:
            for name, shape in bucket.shapes.items():
                if name in shapes or (self._first is not None and self._first.get(name) != shape):
                    raise WeightSyncError(
                        f"Parameter {name!r} of shape {shape} arrived twice, or was not in the first load in this "
                        "shape. Every load must have the same parameters."
                    )
                shapes[name] = shape
            for name, tensor in bucket.tensors.items():  # the ranks that wrote the others have checked them
                if not torch.isfinite(tensor).all():
                    raise WeightSyncError(f"Parameter {name!r} has values that are not finite.")
            if bucket.is_last and self._first is not None and (missing := sorted(set(self._first) - set(shapes))):
                raise WeightSyncError(f"Parameters {missing[:4]} are missing; the first load had them.")
            yield bucket
        self._first = shapes
