"""Muon for weight matrices and AdamW for all other parameters, as one optimizer, in one process and under FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

log = logging.getLogger(__name__)

MOMENTUM = 0.95


class MuonWithAdamW(torch.optim.Optimizer):
    """Updates hidden matrices with `torch.optim.Muon`, and embeddings, heads, fused experts and the rest with AdamW.

    Muon's step is adjusted to the size of AdamW's (`match_rms_adamw`), so both use the same learning rate and weight
    decay. Each rank computes the update of whole matrices: under FSDP2 it gathers the momentum of one matrix at a time,
    which costs one more transfer of each trained matrix per update. The stored momentum stays sharded.

    Source: https://kellerjordan.github.io/posts/muon; the adjusted step: Moonlight, https://arxiv.org/abs/2502.16982.

    Args:
        module: has the trained models as attributes.
        groups: as for AdamW; each group's matrices become a separate group.
        settings: AdamW's arguments; Muon uses the same `lr` and `weight_decay`.

    Raises:
        ValueError: if no hidden matrix is trained.
    """

    def __init__(self, module: torch.nn.Module, groups: list[dict[str, Any]], **settings: Any) -> None:
        hidden = hidden_matrices(module)
        parts: list[tuple[list[Tensor], list[Tensor]]] = []  # each group's hidden matrices and other parameters
        for group in groups:
            is_matrix = [item in hidden for item in group["params"]]
            pairs = list(zip(group["params"], is_matrix, strict=True))
            parts.append(([item for item, yes in pairs if yes], [item for item, yes in pairs if not yes]))
        split = [
            {**group, "params": items, "is_muon": is_muon}
            for is_muon in (True, False)
            for group, part in zip(groups, parts, strict=True)
            if (items := part[not is_muon])  # index 0: matrices, index 1: the others
        ]
        matrices, rest = ([item for part in parts for item in part[index]] for index in (0, 1))
        if not matrices:
            raise ValueError("optimizer='muon' found no trained matrix besides embeddings and heads. Set it to adamw.")
        self._adamw = torch.optim.AdamW(
            [group for group in split if not group["is_muon"]] or [_empty_group()], **settings
        )
        super().__init__(split, {**self._adamw.defaults, "momentum": MOMENTUM, "is_muon": False})
        self._share()
        names = {id(item): name for name, item in module.named_parameters()}
        shown = ", ".join(names.get(id(item), "?") for item in rest[:6]) + (", …" if len(rest) > 6 else "")
        num, num_rest = (sum(item.numel() for item in items) for items in (matrices, rest))
        num_fused = sum(item.numel() for item in rest if item.dim() == 3)
        fused = f", {num_fused} of them in fused experts" if num_fused else ""
        text = f"Muon updates {len(matrices)} matrices ({num} parameters), AdamW the other {num_rest}{fused}: {shown}."
        log.info("%s", text)

    def _share(self) -> None:
        """Makes AdamW use this optimizer's groups and state."""
        self._adamw.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        self._adamw.state = self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state_dict))
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"] if group["is_muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self._adamw.param_groups:
            self._adamw.step()
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, momentum = parameter.grad, group["momentum"]
        assert gradient is not None
        buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(buffer, momentum)  # Nesterov momentum
        whole = torch.nn.Parameter(torch.zeros(parameter.shape, device=parameter.device))
        whole.grad = ahead.full_tensor().float() if isinstance(ahead, DTensor) else ahead.float()
        settings: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        muon: Any = torch.optim.Muon([whole], lr=float(group["lr"]), adjust_lr_fn="match_rms_adamw", **settings)
        muon.step()
        change: Tensor = whole.detach()
        if isinstance(parameter, DTensor):
            change = distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(parameter.dtype))


def _empty_group() -> dict[str, Any]:
    """Returns an empty parameter group, since AdamW needs one."""
    return {"params": [], "is_muon": False}


def hidden_matrices(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Returns the matrices that Muon updates: those outside embeddings, output heads and value heads."""
    found: set[Tensor] = set()
    child: Any
    for child in module.modules():
        head = child.get_output_embeddings() if hasattr(child, "get_output_embeddings") else None
        for item in (head, getattr(child, "score", None), child if isinstance(child, torch.nn.Embedding) else None):
            found |= set(item.parameters()) if isinstance(item, torch.nn.Module) else set()
        found |= {item for item in child.parameters(recurse=False) if item.dim() == 2 and 1 in item.shape}
    return {item for item in module.parameters() if item.dim() == 2} - found
