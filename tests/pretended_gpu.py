"""A GPU in Python: tensors say cuda:0, hold their values in host memory, and every operation runs there.

It shows what the project's Python does on a GPU: which paths it takes, which precision, what is packed, where tensors
of the host meet those of the device, and where the host waits for the device: in torch's sync debug mode "error" that
raises, also where torch cannot see it, at a non-blocking copy from memory that is not pinned.

It cannot show kernels and their numbers, compiled code (`torch.compile` returns what it is given), races of streams,
memory that is used or freed, inference mode (it is `no_grad` here), NCCL (gloo communicates) and CUDA IPC. But copies
between host and device on other streams than the default run when something waits for them, and are NaN before.
To torch's C++ the tensors are the CPU's, so the CPU's choices of autocast apply.

`install` changes torch for the whole process: `LIGHTRL_GPU_DEVICE=pretended pytest -m gpu tests/gpu` is one.
"""

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_GPU = torch.device("cuda", 0)
_HOST = torch.device("cpu")
# Operations whose result, or whose size, the host must know.
_WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "repeat_interleave", "bincount",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_plain_to, _plain_data = Tensor.to, Tensor.data
_sync_debug_mode = "default"


def install() -> None:
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
    methods = {
        "to": _to, "cpu": lambda self, *_, **__: self.to(_HOST), "cuda": lambda self, *_, **__: self.to(_GPU),
        "pin_memory": _pin, "is_pinned": _is_pinned, "record_stream": _record_stream,
    }  # fmt: skip
    for name, method in methods.items():
        setattr(Tensor, name, method)
    Tensor.data = property(_get_data, _set_data)  # type: ignore[assignment]
    torch.tensor, torch.as_tensor = (functools.partial(_make, make) for make in (torch.tensor, torch.as_tensor))
    torch.nn.attention.varlen.varlen_attn = _varlen_attn
    torch._C._InferenceMode = lambda mode: torch.no_grad() if mode else contextlib.nullcontext()
    autocast = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device_type, *args, **settings: autocast(self, "cpu", *args, **settings)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(torch, name, functools.partial(lambda function, *_: function("cpu"), getattr(torch, name)))
    torch._dynamo.config.disable = True
    torch.__future__.set_swap_module_params_on_conversion(True)
    _fsdp_param.alloc_storage = _fsdp_param.free_storage = _fsdp_param_group.alloc_storage = _ignore
    dist.init_process_group = functools.partial(_with_gloo, dist.init_process_group)
    start = threading.Thread._bootstrap_inner

    def start_with_mode(thread: threading.Thread) -> None:
        with _Mode():
            start(thread)

    threading.Thread._bootstrap_inner = start_with_mode
    _Mode().__enter__()


class _Gpu(Tensor):
    """A tensor of the device; `value` is the host's with its values, views of which share their memory."""

    value: Tensor
    device = property(lambda self: _GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: Tensor) -> "_Gpu":
        form = {"strides": value.stride(), "storage_offset": value.storage_offset(), "dtype": value.dtype}
        made = Tensor._make_wrapper_subclass(cls, value.shape, **form)  # type: ignore[attr-defined]
        made.value = value
        return made  # type: ignore[no-any-return]

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy.")

    __array__ = numpy

    def __repr__(self, **_: Any) -> str:
        return f"{self.value} on {_GPU}"

    @classmethod
    def __torch_dispatch__(cls, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, kinds, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Where no argument is a tensor of the device: what makes one."""

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, kinds, args, kwargs or {})


def _wrap(value: Any) -> Any:
    return _Gpu(value) if isinstance(value, Tensor) else value


def _value(item: Any) -> Any:
    if isinstance(item, torch.device) and item.type == "cuda":
        return _HOST
    return item.value if isinstance(item, _Gpu) else item


def _wait(reason: str) -> None:
    if _sync_debug_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")


def _run(op: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
    """Runs the operation on the host, and gives its results as tensors of the device."""
    if any(kind not in (_Gpu, Tensor, nn.Parameter) for kind in kinds):
        return NotImplemented
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
    here = [item for item in tensors if isinstance(item, _Gpu)]
    device = torch.device(kwargs.get("device") or _HOST).type
    if not here and device != "cuda":
        return op(*args, **kwargs)
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    values, named = tree_map(_value, (args, kwargs))
    if name != "copy_" and not name.startswith("empty"):
        _current().run()
    if device == "meta":
        return op(*values, **named)
    if name == "copy_":
        _check_copy(args[1], args[0], *args[2:], **kwargs)
        if kwargs.get("non_blocking") or args[2:] == (True,):
            if not isinstance(args[1], _Gpu):
                return _later(args[0], functools.partial(values[0].copy_, values[1].detach()))
            if not isinstance(args[0], _Gpu):
                return _leave(args[1], args[0])
    elif name == "_to_copy" and not here:
        _check_copy(args[0], None, kwargs.get("non_blocking", False))
    elif name in _INDEXING:
        if any(index is not None and (index.dtype == torch.bool or not isinstance(index, _Gpu)) for index in args[1]):
            _wait("index by bool, or by a tensor of the host")
    elif not name.startswith("empty") and (
        away := [tuple(item.shape) for item in tensors if item.dim() and item.device.type == "cpu"]
    ):
        raise RuntimeError(f"Expected all tensors to be on cuda:0: {schema.name} got tensors {away} of the host.")
    if name in _WAITS and kwargs.get("output_size") is None:
        _wait(name)
    if name == "segment_reduce" and not kwargs.get("unsafe"):
        _wait("segment_reduce checks its lengths")
    result = _STAND_INS.get(f"{name}.{schema.overload_name}", op)(*values, **named)
    if name == "_local_scalar_dense" or name.startswith("c10d::"):
        return result
    given = {**dict(zip((item.name for item in schema.arguments), args, strict=False)), **kwargs}
    is_written = {item.name: item.alias_info is not None and item.alias_info.is_write for item in schema.arguments}
    written = [value for name, value in given.items() if is_written[name]]
    if written and schema.returns:
        return written[0] if len(written) == 1 else tuple(written)
    made = tree_map(_wrap, result)
    sources = {item.value.untyped_storage()._cdata: item for item in here}
    for item in tree_leaves(made):
        if isinstance(item, _Gpu) and (source := sources.get(item.value.untyped_storage()._cdata)) is not None:
            torch._functionalize_unsafe_set(item, source)  # a view has its source's storage
    return made


def _check_copy(source: Tensor, target: Tensor | None, non_blocking: bool = False) -> None:
    """Raises where the host would wait for a copy to the target, None for one that is made on the device."""
    if isinstance(source, _Gpu) and not isinstance(target, _Gpu | None):
        if not (non_blocking and target.is_pinned()):
            _wait("copy to the host")
    elif not isinstance(source, _Gpu) and not (non_blocking and source.is_pinned()) and source.numel():
        _wait("copy to the device from memory that is not pinned")


def _leave(tensor: Any, copy: Tensor) -> Any:
    """Copies to this memory of the host when something waits for the stream."""
    value, content, stream = weakref.ref(tensor.value), tensor.value.clone(), _current()
    memory = tensor.value.untyped_storage()._cdata

    def copied() -> None:
        """Reads memory that was freed, as if it had been reused, unless the stream is recorded."""
        live = value()
        if live is None and memory in stream.recorded:
            live = content
        copy.fill_(torch.nan) if live is None else copy.copy_(live)

    return _later(copy, copied)


class _Move(torch.autograd.Function):
    """Between host and device; the gradient moves back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, non_blocking: bool) -> Tensor:
        if isinstance(tensor, _Gpu):
            if not non_blocking:
                _wait("copy to the host")
            return _leave(tensor, _pin(tensor.value)) if non_blocking else tensor.value.clone()
        _check_copy(tensor, None, non_blocking)
        return _Gpu(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Move.apply(gradient, False), None


def _to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if type(self) not in (_Gpu, Tensor, nn.Parameter):
        return _plain_to(self, *args, copy=copy, **kwargs)
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return _plain_to(self, device=device, dtype=dtype)
    if device is not None and device.type != self.device.type and self.device.type != "meta":
        moved = _Move.apply(self, bool(non_blocking))
        return moved if dtype is None else _plain_to(moved, dtype)  # type: ignore[no-any-return]
    return _plain_to(self, dtype=dtype or self.dtype, copy=copy)


def _get_data(self: Tensor) -> Tensor:
    return self.detach() if isinstance(self, _Gpu) else _plain_data.__get__(self)  # type: ignore[attr-defined]


def _set_data(self: Tensor, data: Tensor) -> None:
    if isinstance(self, _Gpu) != isinstance(data, _Gpu):
        is_parameter = isinstance(self, nn.Parameter)
        torch.utils.swap_tensors(self, nn.Parameter(data, self.requires_grad) if is_parameter else data.detach())
        return
    _plain_data.__set__(self, data)  # type: ignore[attr-defined]
    if isinstance(data, _Gpu):
        self.value = data.value  # type: ignore[attr-defined]


def _make(make: Any, data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **settings: Any) -> Tensor:
    if isinstance(data, _Gpu):
        made = data.to(device or _GPU, *args)
    else:
        made = make(data, *args, **settings).to(_HOST if device is None else device)
    return made.requires_grad_(requires_grad)


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    copy = tensor.detach().clone()
    copy.untyped_storage().is_pretended_pinned = True  # type: ignore[attr-defined]
    return copy


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, _Gpu) and hasattr(tensor.untyped_storage(), "is_pretended_pinned")


def _varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, max_q: int, max_k: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's, of causal attention: [tokens, heads, D], one trajectory after another."""
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] % 8:
        raise RuntimeError("head_size should be a multiple of 8")
    outputs = []
    spans = zip(*(itertools.pairwise(_value(item).tolist()) for item in (starts, key_starts)), strict=True)
    for (first, end), (first_key, end_key) in spans:
        own = torch.arange(end_key - first_key - (end - first), end_key - first_key, device=query.device)[:, None]
        keys = torch.arange(end_key - first_key, device=query.device)
        mask = (keys <= own) & (keys >= own - window_size[0]) if window_size[0] >= 0 else keys <= own
        parts = (query[first:end], key[first_key:end_key], value[first_key:end_key])
        parts = (part.transpose(0, 1)[None].float() for part in parts)
        output = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def _efficient_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *_: Any, **__: Any) -> Any:
    if mask.stride(-1) != 1 or mask.stride(-2) * mask.element_size() % 16:
        raise RuntimeError("attn_bias is not correctly aligned")
    none = torch.zeros(1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask), none, none, none


def _addmm(added: Tensor, left: Tensor, right: Tensor, *_: Any, out: Tensor, **__: Any) -> Tensor:
    return out.copy_(added + left.to(out.dtype) @ right.to(out.dtype))


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """As kernels of a GPU do, rounds differently for other numbers of rows."""
    product = left @ right
    is_up = left.dtype == torch.bfloat16 and left.shape[0] % 2 == 0
    return product.nextafter(torch.full_like(product, torch.inf)) if is_up else product


# Operations that the CPU lacks, or has in another way.
_STAND_INS: dict[str, Any] = {
    "_scaled_dot_product_efficient_attention.": _efficient_attention,
    "addmm.dtype_out": _addmm,
    "mm.": _mm,
}


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing, in the place of what has no meaning here."""


class _Stream:
    """Operations run at once, but copies between host and device on other streams than the default when one waits."""

    device = _GPU

    def __init__(self, *_: Any, **__: Any) -> None:
        self.copies: list[Callable[[], object]] = []  # all, in order
        self.num_done = 0
        self.recorded: set[int] = set()
        _streams.add(self)

    def run(self, end: int | None = None) -> None:
        for copy in self.copies[self.num_done : end]:
            self.num_done += 1
            with torch.no_grad():
                copy()

    def wait_stream(self, other: "_Stream") -> None:
        other.run()

    def wait_event(self, event: "_Event") -> None:
        event.wait()

    def record_event(self, event: Any = None) -> "_Event":
        return (event or _Event()).record(self)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        _wait("synchronize of a stream")
        self.run()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream, self.end = _DEFAULT, 0

    def record(self, stream: Any = None) -> "_Event":
        self.stream = stream or _current()
        self.end = len(self.stream.copies)
        return self

    def query(self) -> bool:
        return self.stream.num_done >= self.end

    def wait(self, stream: Any = None) -> None:
        self.stream.run(self.end)

    def synchronize(self) -> None:
        _wait("synchronize of an event")
        self.wait()


_streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
_DEFAULT = _Stream()
_local = threading.local()


def _current(*_: Any) -> _Stream:
    return getattr(_local, "stream", _DEFAULT)


@contextlib.contextmanager
def _on(stream: _Stream | None) -> Iterator[None]:
    before = _current()
    _local.stream = stream or before
    try:
        yield
    finally:
        _local.stream = before


def _later(target: Tensor, copy: Callable[[], object]) -> Tensor:
    """Copies at once on the default stream, and on others when something waits."""
    if (stream := _current()) is _DEFAULT:
        copy()
    else:
        _value(target).fill_(torch.nan if target.is_floating_point() else 0)
        stream.copies.append(copy)
    return target


def _record_stream(tensor: Tensor, stream: _Stream) -> None:
    stream.recorded.add(_value(tensor).untyped_storage()._cdata)


def _synchronize(*_: Any) -> None:
    _wait("synchronize of the device")
    for stream in [*_streams]:
        stream.run()


def _cuda_functions() -> dict[str, Any]:
    """Functions and classes of torch.cuda that lightrl, Lightning and torch call."""
    properties = types.SimpleNamespace(total_memory=80 * 2**30, major=9, minor=0, name="pretended", uuid="0")
    results = {
        "is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "is_bf16_supported": True,
        "device_count": 1, "current_device": 0, "get_device_properties": properties, "get_device_name": "pretended",
        "get_device_capability": (9, 0), "mem_get_info": (70 * 2**30, 80 * 2**30), "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_stats": {}, "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "get_rng_state_all": [],
    }  # fmt: skip
    ignored = (
        "_lazy_init", "init", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
        "set_rng_state", "set_rng_state_all",
    )  # fmt: skip
    results |= dict.fromkeys(ignored)
    return {
        **{name: lambda *_, result=result, **__: result for name, result in results.items()},
        "device": lambda *_: contextlib.nullcontext(), "stream": _on, "current_stream": _current,
        "Stream": _Stream, "Event": _Event, "set_sync_debug_mode": _set_sync_debug_mode,
        "synchronize": _synchronize,
    }  # fmt: skip


def _set_sync_debug_mode(mode: str) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode


def _with_gloo(init_process_group: Any, backend: str, *, device_id: Any = None, **settings: Any) -> None:
    init_process_group(backend.replace("nccl", "gloo"), **settings)
