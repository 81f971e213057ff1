"""FusedLinear: products with one weight of a decoder, which is kept packed between two loads where kernels are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrl.engines.local.kernels import Kernels, LinearOfKernel, address

_LEAST_MOVED = 2**18  # elements; a smaller weight keeps its plain form beside the packed one: no load restores it


class FusedLinear:
    """`F.linear` with a weight [out, in], and a bias [out] or None.

    Args:
        kernels: None computes with torch.
        is_shared: another part of the model reads the weight: it is packed beside its plain form, as small ones are;
            any other in place of it.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: Kernels | None = None, *, is_shared: bool = False
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels
        self._is_plain_kept = is_shared or weight.numel() < _LEAST_MOVED
        self._packed: Tensor | None = None

    def __call__(self, inputs: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, out], plus `added` [n, out]; without it, `inputs` may have more axes in front."""
        if self._kernels is not None and self._packed is not None:
            return self._kernels.linear(inputs, self.of_kernel(), added)
        if added is None:
            return F.linear(inputs, self._weight, self._bias)
        product = torch.addmm(added, inputs, self._weight.t())
        return product if self._bias is None else product.add_(self._bias)

    def pack(self) -> None:
        """Once the weight is complete."""
        if self._packed is None and self._kernels is not None:
            self._packed = self._kernels.pack(self._weight)
            if not self._is_plain_kept:
                self._weight.untyped_storage().resize_(0)

    def unpack(self) -> None:
        """Before the weight is written to."""
        packed, self._packed = self._packed, None
        if packed is not None and self._kernels is not None and not self._is_plain_kept:
            self._weight.untyped_storage().resize_(self._weight.numel() * self._weight.element_size())
            self._kernels.unpack(packed, self._weight)

    def current(self, view: Tensor) -> Tensor:
        """What a view of the weight shows; of a packed one it may be a copy."""
        if self._kernels is None or self._packed is None or self._is_plain_kept:
            return view
        plain = torch.empty(self._weight.shape)
        self._kernels.unpack(self._packed, plain)
        return plain.as_strided(view.shape, view.stride(), view.storage_offset())

    def of_kernel(self) -> LinearOfKernel:
        """Of the packed weight; valid until the next `unpack`."""
        outputs, inputs = self._weight.shape
        return LinearOfKernel(address(self._packed), address(self._bias), inputs, outputs)
