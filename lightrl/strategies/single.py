"""SingleModel: one model in one process. Padding is removed before the forward, results come back as [B, T].

Shapes: B trajectories, T tokens, N loss tokens, H hidden size. On the CPU trajectories of like length form right-padded
rectangles, which a causal model needs no attention mask for, and a group's prompt is computed once where that is
cheaper; on other devices a microbatch is one packed row with restarting positions. Logprobs come from hidden states at
the N positions that predict a loss token, so no [B, T, V] ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import (
    aligned_to_tokens,
    hidden_logprobs,
    pack,
    predicted_token_ids,
    predicting_positions,
    rectangles,
    token_logprobs,
)
from lightrl.lora import merged_parameters
from lightrl.models import Backward, LossFunction, Outputs, scalar_head
from lightrl.pictures import input_embeddings
from lightrl.strategies.probes import can_pack, can_share_prefixes, head_is_plain
from lightrl.strategies.shared_prefix import SharedPrompt, find_shared_prompts, shared_prefix_hidden, sharing_costs
from lightrl.weights import Bucket, bucketed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Cost of one more forward over a rectangle, in tokens: below that, padding is cheaper than another call of every layer.
RECTANGLE_OVERHEAD_TOKENS = 256

# How the padding is removed; all give the same numbers.
Form = Literal["rectangles", "shared_prefix", "packed"]

# Rows [N], columns [N] and hidden states [N, H] of some predicting positions.
_Part = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LogprobSettings:
    """What the engine did to the logits before drawing, which the trainer's logprobs repeat."""

    temperature: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    entropy_needs_gradient: bool = True


class SingleModel:
    """A Hugging Face causal language model, untouched, as a ParallelModel of one process.

    Args:
        model: with a body (`base_model`) and an output head without further arithmetic, which a probe checks; for
            other models the logits come from the model itself, one rectangle at a time.
        settings: what the engine does to the logits.
        value_head: a critic's, on the body of this policy; a critic of its own has its head, `score`, in the model.
        form: how the padding is removed; None chooses, for each microbatch, the cheapest that is exact for this model.

    Raises:
        ValueError: if the model does not allow `form`, or no head on its body.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        value_head: torch.nn.Linear | None = None,
        form: Form | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.form = form
        own_head = scalar_head(model)
        self.value_head = value_head if own_head is None else own_head
        self.has_logprobs = own_head is None
        self.head_is_plain = not self.has_logprobs or head_is_plain(model)
        if self.value_head is not None and not self.head_is_plain:
            raise ValueError(
                f"A critic cannot share the body of {type(model).__name__}, whose head is more than a matrix product, "
                "expected a critic of its own. Give critic= a checkpoint."
            )
        self.can_share_prefixes = self.head_is_plain and can_share_prefixes(model)
        self.can_pack = self.head_is_plain and can_pack(model)
        allowed = {"rectangles": True, "shared_prefix": self.can_share_prefixes, "packed": self.can_pack}
        if form is not None and not allowed[form]:
            raise ValueError(
                f"form={form!r} is not exact for {type(model).__name__}, expected one of "
                f"{[name for name, is_allowed in allowed.items() if is_allowed]} or None. Use None to choose by itself."
            )

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience]) -> list[Outputs]:
        """Logprobs and entropy of each microbatch, [B, T], 0 where the loss mask is False; without gradient."""
        return [self._outputs(microbatch) for microbatch in microbatches]

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for microbatch in microbatches:
            backward(loss_fn(microbatch, self._outputs(microbatch)))

    def full_parameters(self, bucket_bytes: int) -> Iterator[Bucket]:
        return bucketed(merged_parameters(self.model), bucket_bytes)

    def move_to(self, device: torch.device) -> None:
        self.model.to(device)

    def _outputs(self, experience: Experience) -> Outputs:
        shape = experience.token_ids.shape
        if not self.head_is_plain:
            rows, columns, logprobs, entropy = self._read_logits(experience)
            return Outputs(
                logprobs=aligned_to_tokens(logprobs, rows, columns, shape),
                entropy=aligned_to_tokens(entropy, rows, columns, shape),
            )
        parts = list(self._hidden(experience))
        rows, columns, hidden = (torch.cat([part[index] for part in parts]) for index in range(3))
        zeros = torch.zeros(shape, device=hidden.device)
        logprobs, entropy, values = zeros, zeros, None
        if self.has_logprobs:
            found = self._read_hidden(experience, rows, columns, hidden)
            logprobs, entropy = (aligned_to_tokens(part, rows, columns, shape) for part in found)
        if self.value_head is not None:
            # What predicts a token is the state before it was drawn.
            values = aligned_to_tokens(self.value_head(hidden)[:, 0].float(), rows, columns, shape)
        return Outputs(logprobs=logprobs, entropy=entropy, values=values)

    def _read_hidden(
        self, experience: Experience, rows: Tensor, columns: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logprob [N] and entropy [N] of the tokens that the positions (rows [N], columns [N]) predict."""
        head = self.model.get_output_embeddings()
        masked = stops_are_masked(experience.weight_versions, self.settings.min_new_tokens)
        return hidden_logprobs(
            hidden,
            head.weight,
            head.bias,
            predicted_token_ids(experience.token_ids, rows, columns),
            self.settings.temperature,
            entropy_gradient=self.settings.entropy_needs_gradient,
            masked_ids=self._masked_ids(experience) if masked is not None else None,
            masked_rows=predicted_token_ids(masked, rows, columns) if masked is not None else None,
        )

    def _hidden(self, experience: Experience) -> Iterator[_Part]:
        """Rows [N], columns [N] and hidden states [N, H] of the predicting positions."""
        form, shared = self._choose(experience)
        if form == "packed":
            yield self._packed_hidden(experience)
        elif form == "shared_prefix":
            yield from shared_prefix_hidden(
                self.model, experience, shared, RECTANGLE_OVERHEAD_TOKENS, self._layer_input
            )
        else:
            for picked, token_ids in self._token_rectangles(experience):
                seen = self._layer_input(experience, picked, token_ids)
                hidden = self.model.base_model(**seen, use_cache=False).last_hidden_state
                rows, columns = predicting_positions(experience.loss_mask[picked, : token_ids.shape[1] + 1])
                yield picked[rows], columns, hidden[rows, columns]

    def _layer_input(self, experience: Experience, rows: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
        """Token ids [b, T] of these rows [b] as the model takes them; with pictures, as embeddings [b, T, H]."""
        if experience.pixel_values is None or experience.image_rows is None:
            return {"input_ids": token_ids}
        shown = experience.image_rows[rows]
        return {"inputs_embeds": input_embeddings(self.model, token_ids, experience.pixel_values, shown)}

    def _choose(self, experience: Experience) -> tuple[Form, list[SharedPrompt]]:
        """The cheapest exact form for this microbatch, and its shared prompts if that is the form."""
        form = self.form
        if form is None and self.can_pack and experience.token_ids.device.type != "cpu":
            form = "packed"
        if form in ("packed", "rectangles") or not self.can_share_prefixes:
            return form or "rectangles", []
        shared = find_shared_prompts(experience)
        cost, plain_cost = sharing_costs(shared, experience.lengths.tolist(), RECTANGLE_OVERHEAD_TOKENS)
        if form == "shared_prefix" or cost < plain_cost:
            return "shared_prefix", shared
        return "rectangles", []

    def _token_rectangles(self, experience: Experience) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of like length side by side, and their tokens; the last ones predict nothing and are left out."""
        lengths = (experience.lengths - 1).clamp(min=1)
        for members in rectangles(lengths.tolist(), RECTANGLE_OVERHEAD_TOKENS):
            picked = torch.tensor(members, device=experience.token_ids.device)
            yield picked, experience.token_ids[picked, : int(lengths[picked].max())]

    def _packed_hidden(self, experience: Experience) -> _Part:
        """All trajectories end to end in one row, told apart by their restarting positions."""
        packed = pack(experience.token_ids, experience.lengths)
        every = torch.arange(len(experience), device=packed.rows.device)
        seen = self._layer_input(experience, every, experience.token_ids)
        if "input_ids" in seen:
            seen = {"input_ids": packed.token_ids}
        else:
            seen = {"inputs_embeds": seen["inputs_embeds"][packed.rows, packed.columns][None]}
        hidden = self.model.base_model(**seen, position_ids=packed.position_ids, use_cache=False).last_hidden_state[0]
        place = torch.zeros_like(experience.token_ids)
        place[packed.rows, packed.columns] = torch.arange(len(packed.rows), device=place.device)
        rows, columns = predicting_positions(experience.loss_mask)
        return rows, columns, hidden[place[rows, columns]]

    def _read_logits(self, experience: Experience) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `_read_hidden`, from the model's own logits, for heads that do more than a matrix product."""
        masked = stops_are_masked(experience.weight_versions, self.settings.min_new_tokens)
        found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for picked, token_ids in self._token_rectangles(experience):
            width = token_ids.shape[1] + 1
            logits = self.model(**self._layer_input(experience, picked, token_ids), use_cache=False).logits
            logprobs, entropy = token_logprobs(
                torch.nn.functional.pad(logits, (0, 0, 0, 1)),
                experience.token_ids[picked, :width],
                self.settings.temperature,
                masked_ids=self._masked_ids(experience) if masked is not None else None,
                masked_rows=masked[picked, :width] if masked is not None else None,
            )
            rows, columns = predicting_positions(experience.loss_mask[picked, :width])
            logprobs = predicted_token_ids(logprobs, rows, columns)
            entropy = predicted_token_ids(entropy, rows, columns)
            found.append((picked[rows], columns, logprobs, entropy))
        rows, columns, logprobs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return rows, columns, logprobs, entropy

    def _masked_ids(self, experience: Experience) -> Tensor:
        return torch.tensor(self.settings.stop_token_ids, dtype=torch.int64, device=experience.token_ids.device)


def stops_are_masked(weight_versions: Tensor, min_new_tokens: int) -> Tensor | None:
    """[B, T], True where the engine could not draw a stop token: the first `min_new_tokens` of each turn.

    From the versions, which tell what the policy wrote: a callback may have taken tokens out of the loss mask since.
    """
    if min_new_tokens == 0:
        return None
    is_written = weight_versions >= 0
    count = is_written.long().cumsum(1)
    before_turn = torch.where(is_written, 0, count).cummax(1).values
    return is_written & (count - before_turn <= min_new_tokens)
