"""AdamW with moments in bfloat16, in half of the memory, rounded stochastically so that they do not stall."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
# elements to update at once: few enough for float32 copies in a CPU's cache or in a GPU's memory
_CPU_CHUNK, _CHUNK = 2**16, 2**24


class BF16AdamW(torch.optim.AdamW):
    """AdamW that computes in float32 and stores its moments in bfloat16, for whole and sharded parameters.

    bfloat16 has 8 bits of precision: rounded to nearest, a moment ignores changes below 1/512 of its value, so at
    beta2=0.999 the second moment never decreases. Stochastic rounding keeps the expected value. It adds a relative
    standard deviation of at most 9% at beta2=0.999, 1.3% at 0.95, and half of that to the size of a step.

    The random numbers are a function of step, shape and element: a resumed run repeats them, replicas of a shard
    stay equal, and the number of ranks does not matter. Checkpoints are interchangeable with AdamW's.

    Source: stochastic rounding to bfloat16, https://arxiv.org/abs/2010.06192; the hash function of `random_bits`,
    https://nullprogram.com/blog/2018/07/31 (lowbias32).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state and keeps its moments in bfloat16; torch would convert them to the parameters' dtype.

        Raises ValueError for a state with amsgrad or maximize.
        """
        if any(group.get("amsgrad") or group.get("maximize") for group in state_dict["param_groups"]):
            raise ValueError("BF16AdamW has no amsgrad and no maximize, which this checkpoint's optimizer used.")
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if saved := state_dict["state"].get(key):
                moments = {name: saved[name].to(parameter.device, torch.bfloat16) for name in MOMENTS}
                self.state[parameter] = {"step": saved["step"].cpu(), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state |= {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
                    state["step"] += 1
                    # the same for the two copies of tied embeddings that pipeline stages train
                    key = random.Random(f"{int(state['step'])} {tuple(parameter.shape)}").getrandbits(32)
                    _update(parameter, state, group, key)
        return loss


def _update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int) -> None:
    """Updates this rank's part of a parameter and of its moments, some rows at a time."""
    assert parameter.grad is not None
    lr, (beta1, beta2), step = float(group["lr"]), group["betas"], float(state["step"])
    shape, offsets = parameter.shape or (1,), [0] * max(1, parameter.dim())
    tensors = [parameter, parameter.grad, *(state[name] for name in MOMENTS)]
    if isinstance(parameter, DTensor):
        tensors = [item.to_local() for item in tensors]
        offsets = list(parameter.__create_chunk_list__()[0].offsets) or [0]  # type: ignore[no-untyped-call]
    tensors = [item.view(item.shape or (1,)) for item in tensors]
    chunk = _CPU_CHUNK if tensors[0].device.type == "cpu" else _CHUNK
    num_rows = max(1, chunk // max(1, math.prod(tensors[0].shape[1:])))
    for start in range(0, len(tensors[0]), num_rows):
        weights, gradient, *moments = (item[start : start + num_rows] for item in tensors)
        gradient = gradient.float()
        first = moments[0].float().lerp_(gradient, 1 - beta1)
        second = moments[1].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bits = random_bits(weights, (offsets[0] + start, *offsets[1:]), shape, key)
        moments[0].copy_(rounded(first, bits & 0xFFFF))
        moments[1].copy_(rounded(second, bits >> 16 & 0xFFFF))
        divisor = second.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weights.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, divisor, value=-lr / (1 - beta1**step))


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Rounds float32 to bfloat16: away from zero if the 16 bits to drop and `noise`, of [0, 2**16), add to 2**16."""
    bits = (values.view(torch.int32) + noise) & -(2**16)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()


def random_bits(part: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], key: int) -> Tensor:
    """Returns 32 bits for each element of a part that starts at these offsets in a tensor of this shape."""
    bits = torch.zeros((), dtype=torch.int32, device=part.device)
    for dim, size in enumerate(part.shape):  # the index in the whole tensor
        numbers = torch.arange(size, dtype=torch.int32, device=part.device) + _int32(offsets[dim])
        bits = bits.unsqueeze(-1) + numbers * _int32(math.prod(shape[dim + 1 :]))
    bits ^= _int32(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        shifted = bits >> shift & 2 ** (32 - shift) - 1  # without copies of the sign
        bits = (bits ^ shifted) * _int32(factor)
    return bits


def _int32(number: int) -> int:
    """Keeps the lowest 32 bits of a number, as a signed one."""
    return (number + 2**31) % 2**32 - 2**31
