"""Forms: how a microbatch goes through a model without its padding; all forms give the same results.

On the CPU, trajectories of similar length form right-padded rectangles, or share the states of their prompt if that is
cheaper; on other devices a microbatch is one packed row with restarting positions.

Shapes: B trajectories, T tokens, N predicting positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import on_host, predicting_positions, rectangles, to_device
from lightrl.models import CONTEXT, context_tokens
from lightrl.models.hybrids import keeps_states
from lightrl.models.images import ImageTable, image_inputs, image_kind
from lightrl.models.routes import NOT_COMPILED, Routes
from lightrl.strategies.layouts.packed_attention import PackedRows, arguments
from lightrl.strategies.layouts.probes import can_pack, exact_layouts, rope_depends_on_length
from lightrl.strategies.layouts.shared_prefix import (
    CALL_OVERHEAD_TOKENS,
    PackedTokens,
    Plan,
    cost,
    each_alone,
    find_shared_prompts,
    packed,
    shared_hidden,
    whole_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# shared_keys and shared_rows are layouts of shared_prefix.py.
Form = Literal["rectangles", "shared_keys", "shared_rows", "packed"]

# A packed row shares prompts only if at most this fraction of its tokens remains, since attention copies key-values.
_LARGEST_SHARED_FRACTION = 0.9

# Rows [N], columns [N] and states of predicting positions: hidden states [N, H], or logits [N, V].
Part = tuple[Tensor, Tensor, Tensor]


class Forms:
    """The forms that a model supports for its microbatches; chooses one and runs the forward.

    Args:
        model: a causal language model.
        form: the form of all microbatches; None chooses the cheapest exact form for each.
        reads_logits: compute logits instead of hidden states; only possible in rectangles.
        is_policy: whether the model sampled the tokens; only then does it replay the engine's experts.
        context_group: ranks that share packed rows; None for one rank.

    Raises:
        ValueError: if `form` is not exact for the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        form: Form | None = None,
        reads_logits: bool = False,
        is_policy: bool = True,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.form, self.reads_logits, self.context_group = model, form, reads_logits, context_group
        self.is_compiled = False  # whether its layers are compiled
        self.num_calls = 0  # minimum number of model calls for a microbatch if its form is rectangles
        self.layouts = {} if reads_logits else exact_layouts(model)
        wants_packed = form == "packed" or context_group is not None or model.device.type != "cpu"
        self.can_pack = not reads_logits and wants_packed and can_pack(model)
        self.shares_packed_prompts = self.can_pack and can_pack(model, shares_prompt=True)
        exact = ["rectangles", *self.layouts, *(["packed"] if self.can_pack else [])]
        if form not in (None, *exact):
            raise ValueError(f"form={form!r} is not exact for {type(model).__name__}. Use one of {exact}, or None.")
        self.routes = Routes(model) if is_policy else None
        self._max_row_tokens = context_tokens(model.config) if rope_depends_on_length(model) else None
        self._keeps_states = keeps_states(model.config)

    def choose(self, experience: Experience) -> tuple[str, Plan]:
        """Returns the cheapest exact form for this microbatch, and its plan if prompts can be shared."""
        kind = None if experience.pixel_values is None else image_kind(self.model.config)
        if kind == "bidirectional":
            return "rectangles", []
        if self.form is None and self.can_pack and experience.token_ids.device.type != "cpu":
            return "packed", []
        # Replayed routes belong to a trajectory, and a cached prompt has no image grid positions.
        if self.form in ("packed", "rectangles") or not self.layouts or self.replays(experience) or kind == "grid":
            return self.form or "rectangles", []
        prompts = find_shared_prompts(experience, getattr(self.model.config, "image_token_id", None))
        if self.form is not None:
            return self.form, self.layouts[self.form](prompts)
        plans = {name: layout(prompts) for name, layout in self.layouts.items()}
        return min({"rectangles": whole_rows(prompts), **plans}.items(), key=lambda plan: cost(plan[1]))

    def packs_all(self, microbatches: Sequence[Experience]) -> bool:
        """Whether `form` packs all these microbatches; builds the first one's tensors only if it has to read them."""
        may_be_whole = image_kind(self.model.config) == "bidirectional"
        return self.form == "packed" and not (may_be_whole and microbatches[0].pixel_values is not None)

    def replays(self, experience: Experience) -> bool:
        """Whether a forward over these tokens uses the experts that the engine chose."""
        return self.routes is not None and experience.routes is not None

    def states(self, experience: Experience) -> Iterator[Part]:
        """Runs the model and yields the states of all predicting positions at once, or logits for each rectangle.

        Raises:
            ValueError: if a trajectory is too long for the model.
        """
        longest = int(on_host(experience.lengths).max()) if self._max_row_tokens is not None else 0
        if self._max_row_tokens is not None and longest > self._max_row_tokens:
            raise ValueError(
                f"A trajectory of {longest} tokens exceeds {CONTEXT}, {self._max_row_tokens} tokens. Remove it."
            )
        if self.reads_logits:
            yield from self._parts(experience)
            return
        parts = list(self._parts(experience))
        rows, columns, hidden = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        yield rows, columns, hidden

    def _parts(self, experience: Experience) -> Iterator[Part]:
        """Yields the predicting positions of each forward."""
        form, plan = self.choose(experience)
        if form == "packed":
            yield self._packed(experience)
        elif plan:
            predicting = predicting_positions(on_host(experience.loss_mask))
            layer_input = functools.partial(self._layer_input, experience)
            yield from shared_hidden(self.model, experience.token_ids, predicting, plan, layer_input)
        else:
            for members, token_ids in self._rectangles(experience):
                inputs = self._layer_input(experience, members, token_ids)
                with self._replaying(experience, members, slice(token_ids.shape[1])):
                    if self.reads_logits:
                        states = self.model(**inputs, use_cache=False).logits
                    else:
                        states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
                rows, columns = predicting_positions(experience.loss_mask[members, : token_ids.shape[1] + 1])
                yield members[rows], columns, states[rows, columns]

    def _rectangles(self, experience: Experience) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields rows of similar length and their tokens, without the last column, which predicts nothing.

        If there are fewer rectangles than `num_calls`, adds dummy ones of one token.
        """
        lengths, device = (on_host(experience.lengths) - 1).clamp(min=1).tolist(), experience.token_ids.device
        parts = rectangles(lengths, CALL_OVERHEAD_TOKENS)
        for members in parts:
            indices = to_device(torch.tensor(members), device)
            yield indices, experience.token_ids[indices, : max(lengths[row] for row in members)]
        for _ in range(self.num_calls - len(parts)):
            yield torch.zeros(0, dtype=torch.int64, device=device), experience.token_ids[:1, :1]

    def _packed(self, experience: Experience) -> Part:
        """Runs all trajectories concatenated in one row, or this rank's part of it; attention gets their starts."""
        device, group = experience.token_ids.device, self.context_group
        index, num = (0, 1) if group is None else (group.rank(), group.size())
        layout = self._packed_tokens(experience)
        size = -(-len(layout.rows) // num)  # tokens of each rank's part; the row's first token pads the last part
        padding = num * size - len(layout.rows)
        first = index * size
        filled = torch.nn.functional.pad(torch.stack([layout.rows, layout.columns]), (0, padding))
        tokens = to_device(filled[0, first : first + size], device), to_device(filled[1, first : first + size], device)
        packed_rows = PackedRows([*layout.lengths, padding], device, prompt_indices=[*layout.prompts, -1], group=group)
        starts = arguments(self.model, packed_rows, with_states=self._keeps_states)
        inputs = self._layer_input(experience, torch.arange(len(experience)), experience.token_ids, tokens)
        inputs = {"position_ids": tokens[1][None], **inputs, **starts}
        with self._replaying(experience, *tokens):
            output = self.model.base_model(**inputs, use_cache=False)
        rows, columns = predicting_positions(on_host(experience.loss_mask))
        indices = layout.flat_indices[rows, columns] - first
        is_here = (indices >= 0) & (indices < size)
        rows, columns, indices = (to_device(values[is_here], device) for values in (rows, columns, indices))
        return rows, columns, output.last_hidden_state[0][indices]

    def _packed_tokens(self, experience: Experience) -> PackedTokens:
        """Returns the layout of the packed row, with each prompt only once if that saves enough."""
        if self.shares_packed_prompts and not self.replays(experience):  # routes belong to a trajectory
            prompts = find_shared_prompts(experience, getattr(self.model.config, "image_token_id", None))
            layout = packed(prompts, experience.token_ids.shape)
            if len(layout.rows) <= _LARGEST_SHARED_FRACTION * int((on_host(experience.lengths) - 1).sum()):
                return layout
        return packed(each_alone(experience), experience.token_ids.shape)

    def _layer_input(
        self, experience: Experience, rows: Tensor, token_ids: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """Returns the model's arguments for token ids [b, T] of rows [b], or for a packed row of `positions`."""
        if experience.pixel_values is None:
            return {"input_ids": token_ids if positions is None else token_ids[positions][None]}
        images = ImageTable(*(experience[name] for name in ImageTable._fields))
        images = images._replace(image_rows=on_host(images.image_rows)[on_host(rows)])
        return image_inputs(self.model, token_ids, images, positions=positions)

    def _replaying(self, experience: Experience, rows: Tensor, columns: Tensor | slice) -> AbstractContextManager[None]:
        """Inside, a forward over the tokens at these rows and columns uses the experts that the engine chose."""
        if self.routes is None or experience.routes is None:
            return nullcontext()
        if self.is_compiled:
            raise ValueError(NOT_COMPILED)
        return self.routes.replaying(experience.routes[rows, columns].flatten(0, -2))
