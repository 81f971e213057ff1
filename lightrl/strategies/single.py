"""SingleModel: one model in one process. Padding is removed before the forward, results come back as [B, T].

Shapes: B trajectories, T tokens, N loss tokens, H hidden size. On the CPU trajectories of like length form right-padded
rectangles, which a causal model needs no attention mask for; on other devices a microbatch is one packed row with
restarting positions. Logprobs come from hidden states at the N positions that predict a loss token, so no [B, T, V]
ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional.logprobs import hidden_logprobs, predicting_positions, token_logprobs
from lightrl.functional.packing import pack, rectangles
from lightrl.models import Backward, LossFunction, Outputs
from lightrl.weights import Bucket, bucketed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Cost of one more forward over a rectangle, in tokens: below that, padding is cheaper than another call of every layer.
RECTANGLE_OVERHEAD_TOKENS = 256


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
    """

    def __init__(self, model: PreTrainedModel, settings: LogprobSettings) -> None:
        self.model = model
        self.settings = settings
        self.head_is_plain = _head_is_plain(model)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience]) -> list[Outputs]:
        """Logprobs and entropy of each microbatch, [B, T], 0 where the loss mask is False; without gradient."""
        return [self._outputs(microbatch) for microbatch in microbatches]

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for microbatch in microbatches:
            backward(loss_fn(microbatch, self._outputs(microbatch)))

    def full_parameters(self, bucket_bytes: int) -> Iterator[Bucket]:
        return bucketed(self.model.named_parameters(), bucket_bytes)

    def _outputs(self, experience: Experience) -> Outputs:
        rows, columns, logprobs, entropy = [], [], [], []
        for part_rows, part_columns, part_logprobs, part_entropy in self._parts(experience):
            rows.append(part_rows)
            columns.append(part_columns)
            logprobs.append(part_logprobs)
            entropy.append(part_entropy)
        index = (torch.cat(rows), torch.cat(columns))
        empty = torch.zeros(experience.token_ids.shape, device=experience.token_ids.device)
        return Outputs(
            logprobs=empty.index_put(index, torch.cat(logprobs)), entropy=empty.index_put(index, torch.cat(entropy))
        )

    def _parts(self, experience: Experience) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(row [N], column [N], logprob [N], entropy [N]) of the loss tokens, part by part."""
        masked = _stops_are_masked(experience.loss_mask, self.settings.min_new_tokens)
        if experience.token_ids.device.type != "cpu" and self.head_is_plain:
            # Position T - 1 of each trajectory predicts nothing, but cutting it would cost a copy of the row.
            packed = pack(experience.token_ids, experience.lengths)
            hidden = self.model.base_model(
                input_ids=packed.token_ids, position_ids=packed.position_ids, use_cache=False
            ).last_hidden_state[0]
            place = torch.zeros_like(experience.token_ids)
            place[packed.rows, packed.columns] = torch.arange(len(packed.rows), device=place.device)
            rows, columns = predicting_positions(experience.loss_mask)
            yield self._read(experience, rows, columns, hidden[place[rows, columns]], masked)
            return
        # The last token of a trajectory predicts nothing: it is not put through the model.
        lengths = (experience.lengths - 1).clamp(min=1)
        for members in rectangles(lengths.tolist(), RECTANGLE_OVERHEAD_TOKENS):
            picked = torch.tensor(members, device=experience.token_ids.device)
            width = int(lengths[picked].max())
            token_ids = experience.token_ids[picked, :width]
            rows, columns = predicting_positions(experience.loss_mask[picked, : width + 1])
            if not self.head_is_plain:
                yield self._read_logits(experience, picked, token_ids, masked)
                continue
            hidden = self.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
            yield self._read(experience, picked[rows], columns, hidden[rows, columns], masked)

    def _read(
        self, experience: Experience, rows: Tensor, columns: Tensor, hidden: Tensor, masked: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        logprobs, entropy = hidden_logprobs(
            hidden,
            head.weight,
            head.bias,
            experience.token_ids[rows, columns + 1],
            self.settings.temperature,
            entropy_gradient=self.settings.entropy_needs_gradient,
            masked_ids=self._masked_ids(hidden.device) if masked is not None else None,
            masked_rows=masked[rows, columns + 1] if masked is not None else None,
        )
        return rows, columns + 1, logprobs, entropy

    def _read_logits(
        self, experience: Experience, picked: Tensor, token_ids: Tensor, masked: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = token_ids.shape[1] + 1
        logits = self.model(input_ids=token_ids, use_cache=False).logits
        logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))
        logprobs, entropy = token_logprobs(
            logits,
            experience.token_ids[picked, :width],
            self.settings.temperature,
            masked_ids=self._masked_ids(logits.device) if masked is not None else None,
            masked_rows=masked[picked, :width] if masked is not None else None,
        )
        rows, columns = experience.loss_mask[picked, :width].nonzero(as_tuple=True)
        return picked[rows], columns, logprobs[rows, columns], entropy[rows, columns]

    def _masked_ids(self, device: torch.device) -> Tensor:
        return torch.tensor(self.settings.stop_token_ids, device=device)


def _stops_are_masked(loss_mask: Tensor, min_new_tokens: int) -> Tensor | None:
    """[B, T], True where the engine could not draw a stop token: the first `min_new_tokens` of each turn."""
    if min_new_tokens == 0:
        return None
    trains = loss_mask.long()
    count = trains.cumsum(1)
    before_turn = torch.where(loss_mask, 0, count).cummax(1).values
    return loss_mask & (count - before_turn <= min_new_tokens)


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Whether the logits are the output head applied to the body's last hidden state and nothing else."""
    head = model.get_output_embeddings()
    if head is None or not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    token_ids = torch.arange(min(4, head.weight.shape[0]), device=head.weight.device)[None]
    logits = model(input_ids=token_ids, use_cache=False).logits
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return torch.allclose(head(hidden).float(), logits.float(), rtol=1e-3, atol=1e-3)
