"""FusedLinear: products with one weight of a decoder, which is kept packed for them where that is faster.

A product of a few rows with a large weight takes as long as reading the weight. `F.linear` copies it into the layout of
its library first, at every call; oneDNN can keep it in that layout between two loads. With 27 M parameters on an AMD
EPYC a step of 4 rows then takes 0.53 of the time, one of 16 rows 0.65, one of 64 rows 0.81.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_PACKED = 2**18  # elements; the call for a packed weight itself takes 10 us longer
_ROWS = 64  # that the layout is chosen for; measured, it is as good for 1 to 2,048


class FusedLinear:
    """`F.linear` with a weight [out, in], and a bias [out] or None.

    A weight that is shared is packed beside its plain form, any other in place of it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_shared: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._is_shared = is_shared
        self._packed: Tensor | None = None

    def __call__(self, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, out], plus `added` [n, out]; without it, `inputs` may have more axes in front."""
        product: Tensor
        if self._packed is not None:
            ops = torch.ops.mkldnn
            if added is None:
                product = ops._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
            else:
                product = ops._linear_pointwise.binary(inputs, added, self._packed, self._bias, "add")
            return product
        if added is None:
            return F.linear(inputs, self._weight, self._bias)
        product = torch.addmm(added, inputs, self._weight.t())
        return product if self._bias is None else product.add_(self._bias)

    def pack(self) -> None:
        """Once the weight is complete."""
        weight = self._weight
        is_faster = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= LEAST_PACKED
        if self._packed is None and is_faster and can_pack():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            if not self._is_shared:
                weight.untyped_storage().resize_(0)

    def unpack(self) -> None:
        """Before the weight is written to."""
        packed, self._packed = self._packed, None
        if packed is not None and not self._is_shared:
            storage = self._weight.untyped_storage()
            storage.resize_(self._weight.numel() * self._weight.element_size())
            self._weight.copy_(packed.to_dense())

    def current(self, view: Tensor) -> Tensor:
        """What a view of the weight shows; of a packed one it is a copy."""
        if self._packed is None or self._is_shared:
            return view
        return self._packed.to_dense().as_strided(view.shape, view.stride(), view.storage_offset())


@functools.cache
def can_pack() -> bool:
    """Whether torch has these operations of oneDNN here, which are its own for compiled models, and they are right."""
    ops, inputs, weight = torch.ops.mkldnn, torch.eye(4, 8), torch.arange(24.0).view(3, 8)
    try:
        packed = ops._reorder_linear_weight(weight, _ROWS)
        once = ops._linear_pointwise(inputs, packed, None, "none", [], "")
        twice = ops._linear_pointwise.binary(inputs, once, packed, None, "add")
        return torch.equal(twice, 2 * F.linear(inputs, weight)) and torch.equal(packed.to_dense(), weight)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
