"""A second device on the CPU, in Python: counts how often the host would wait for it.

Tensors of the device are empty to torch; `values` gives what they hold, and every operation runs on that. What makes a
host wait for a GPU is counted by the name of the operation: numbers read from the device, copies from it, results whose
size depends on values. Copies to the device count too, unless they are non-blocking.

Source: test/test_privateuseone_python_backend.py of torch; needs torch >= 2.11.
"""

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

SYNCS: Counter[str] = Counter()
# Results whose size, or whose being, the host must know.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "is_nonzero", "bincount", "histc", "allclose",
}  # fmt: skip


# The values of each tensor of the device, by its storage: copies of a tensor that autograd makes share it.
_VALUES: dict[int, Tensor] = {}


def _wrap(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch._C._acc.create_empty_tensor(value.shape, value.dtype)
    _VALUES[made.untyped_storage()._cdata] = value
    return made


def _is_fake(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "fake"


def values(value: Any) -> Any:
    """A tensor on the host with the memory of one on the device; everything else as it is."""
    if isinstance(value, torch.device) and value.type == "fake":
        return torch.device("cpu")
    if not _is_fake(value):
        return value
    held = _VALUES[value.untyped_storage()._cdata]
    return held if held.shape == value.shape or held.numel() != value.numel() else held.reshape(value.shape)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name.removeprefix("aten::")
    if name in _WAITS or (name == "_copy_from" and args[1].device.type != "fake"):
        SYNCS[name] += 1
    if name == "segment_reduce" and not kwargs.get("unsafe"):
        SYNCS["check of lengths"] += 1
    if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    ):
        SYNCS["index by bool"] += 1
    if name in ("view", "_unsafe_view"):
        op = torch.ops.aten.reshape.default
    takes = [str(item.type) for item in op._schema.arguments]
    given = [
        torch.tensor(value) if kind == "Tensor" and isinstance(value, int | float) else tree_map(values, value)
        for kind, value in zip(takes, args, strict=False)
    ]  # torch passes a number that it has wrapped as a number again
    result = op(*given, **tree_map(values, kwargs))
    named = {**dict(zip((item.name for item in op._schema.arguments), args, strict=False)), **kwargs}
    writes = [item.name for item in op._schema.arguments if item.alias_info is not None and item.alias_info.is_write]
    written = [named[name] for name in writes if name in named]
    for target in written:
        if _is_fake(target) and target.shape != values(target).shape:  # an empty one, which the operation has resized
            target.data = _wrap(values(target))
    if not op._schema.returns:
        return None
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    return tree_map(_wrap, result)


def _copied(tensor: Tensor, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
    device = tensor.device if device is None else torch.device(device)
    raw = values(tensor)
    if tensor.device.type == "fake" and device.type != "fake":
        SYNCS["copy to the host"] += 1
    if tensor.device.type != "fake" and device.type == "fake" and not non_blocking:
        SYNCS["blocking copy to the device"] += 1
    copy = raw.to(dtype=dtype or raw.dtype, copy=True)
    return _wrap(copy) if device.type == "fake" else copy


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if source.device.type == "fake" and target.device.type != "fake":
        SYNCS["copy to the host"] += 1
    if source.device.type != "fake" and target.device.type == "fake" and not non_blocking and source.dim():
        SYNCS["blocking copy to the device"] += 1
    values(target).copy_(values(source))
    return target


def _strided(tensor: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Takes `size` and `stride` for those of a contiguous tensor that starts at 0, whatever its values are."""
    held = values(tensor).contiguous()
    return _wrap(held.as_strided(size, stride, held.storage_offset() + (storage_offset or 0)))


@functools.cache
def fake_device() -> torch.device:
    module = _DummyBackendModule()
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.synchronize = lambda device: None
    _setup_privateuseone_for_python_backend("fake", backend_module=module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_to_copy", _copied, "PrivateUse1")
    aten.impl("copy_", _copy_, "PrivateUse1")
    aten.impl("as_strided", _strided, "PrivateUse1")
    fake_device.kept = (everything, aten)  # type: ignore[attr-defined]
    return torch.device("fake")
