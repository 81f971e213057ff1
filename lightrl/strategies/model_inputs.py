"""What a model's forward does with columns: the experts that the engine took, and the tokens that could be sampled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightrl.columns import ROUTES, SUPPORTS
from lightrl.experience import Experience
from lightrl.functional import Supports
from lightrl.models.routes import NOT_COMPILED, Routes, recompute_contexts

__all__ = ["ModelInputs", "logprob_inputs", "prepare_layers", "recompute_contexts"]


class ModelInputs:
    """The columns that a model reads in its forward.

    Args:
        model: of transformers; its blocks are wrapped, which changes nothing outside of `forward`.
        is_sampler: whether the model sampled the tokens. Others, such as a critic, choose experts of their own.
        is_compiled: whether its layers are, which cannot replay the experts of an engine.
    """

    def __init__(self, model: nn.Module, *, is_sampler: bool, is_compiled: bool) -> None:
        self._routes = Routes(model) if is_sampler else None
        self._is_compiled = is_compiled

    def are_read(self, experience: Experience) -> bool:
        """Whether it reads any of this experience: then tokens belong to a trajectory, and prompts are not shared."""
        return self._routes is not None and ROUTES.name in experience.columns

    def forward(self, experience: Experience, rows: Tensor, columns: Tensor | slice) -> AbstractContextManager[None]:
        """A context for a forward over the tokens at these rows and columns of the experience.

        Raises:
            ValueError: if compiled layers would have to replay experts.
        """
        if self._routes is None or not self.are_read(experience):
            return nullcontext()
        if self._is_compiled:
            raise ValueError(NOT_COMPILED)
        return self._routes.replaying(experience[ROUTES.name][rows, columns].flatten(0, -2))


def prepare_layers(model: nn.Module) -> None:
    """Wrap the blocks that read columns, before their layers are checkpointed or sharded."""
    Routes(model)


def logprob_inputs(experience: Experience, rows: Tensor, columns: Tensor) -> dict[str, Any]:
    """Further arguments of the logprob functions, for the tokens predicted at (rows [N], columns [N])."""
    if SUPPORTS.name not in experience.columns:
        return {}
    codes = experience.row_codes(SUPPORTS.name)
    return {"supports": Supports.at(codes, experience.lengths, experience.token_ids, rows, columns)}
