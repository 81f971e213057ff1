"""SingleModel: a model in one process. Removes padding before the forward, and returns results as [B, T].

Shapes: B trajectories, T tokens, N loss tokens, H hidden size. Logprobs are computed from the hidden states at the N
positions that predict loss tokens, without a [B, T, V] tensor. On NVIDIA GPUs decoder layers are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import aligned_to_tokens, logits_logprobs, logits_topk
from lightrl.models import Backward, Candidates, LossFunction, Outputs, scalar_head
from lightrl.models.conversion import Names, exported_tensors
from lightrl.models.tuning import Part, held_tensors, tuning_of
from lightrl.strategies.head import LogprobSettings, Targets, read_head, teacher_candidates, whole_head
from lightrl.strategies.layouts.branches import branch_rows
from lightrl.strategies.layouts.forms import Form, Forms
from lightrl.strategies.layouts.halves import cut_in_halves, forward_backward_halves, halves_pay
from lightrl.strategies.layouts.packed_attention import Total
from lightrl.strategies.layouts.probes import compiles, decoder_layers, head_is_plain
from lightrl.strategies.precision import set_expert_precision
from lightrl.weights import Bucket, bucketed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SingleModel:
    """A Hugging Face causal language model as the ParallelModel of one process.

    Args:
        model: has a body (`base_model`) and an output head. If a probe shows that the head is more than a matrix
            product, the model computes its logits itself, one rectangle at a time.
        settings: the engine's changes to the logits.
        value_head: a critic's head on this policy's body; a separate critic contains its head, `score`.
        form: how to remove padding; None chooses the cheapest exact form for each microbatch.
        compile_layers: `torch.compile` each decoder layer. None compiles on NVIDIA GPUs if the model has no experts and
            no states (models/hybrids.py). Layers of equal shapes share compiled code, for microbatches of any lengths.
        is_policy: whether this model sampled the tokens, so that it replays the engine's choice of experts.
        context_group: ranks that share packed rows and pass the same microbatches; None for one rank.

    Raises:
        ValueError: if `form` is not exact for the model, or the model's body cannot have a value head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        value_head: torch.nn.Linear | None = None,
        form: Form | None = None,
        compile_layers: bool | None = None,
        is_policy: bool = True,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.num_cores = torch.get_num_threads()  # rollout_stage.py may set it to 1 later
        set_expert_precision(model)
        own_head = scalar_head(model)
        self.value_head = value_head if own_head is None else own_head
        self.has_logprobs = own_head is None
        reads_logits = self.has_logprobs and not head_is_plain(model)
        if self.value_head is not None and reads_logits:
            raise ValueError(
                f"A critic cannot share the body of {type(model).__name__}, whose output head is more than a matrix "
                "product. Set critic to a checkpoint."
            )
        self.forms = Forms(
            model, form=form, reads_logits=reads_logits, is_policy=is_policy, context_group=context_group
        )
        self.forms.is_compiled = compiles(model, model.device, compile_layers)
        for layer in decoder_layers(model) if self.forms.is_compiled else ():
            layer.compile(dynamic=True)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterator[Outputs]:
        """Yields each microbatch's logprobs and entropy, [B, T], 0 outside the loss mask; without gradient."""
        for microbatch in microbatches:
            yield self._outputs(microbatch, topk)

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for microbatch in microbatches:
            halves = cut_in_halves(microbatch) if halves_pay(self.model, microbatch, self.num_cores) else None
            if halves is None:
                backward(loss_fn(microbatch, self._outputs(microbatch, teacher_candidates(microbatch))))
            else:
                forward_backward_halves(
                    halves,
                    lambda half: self._outputs(half, teacher_candidates(half)),
                    loss_fn,
                    backward,
                    self._trained_parameters(),
                )

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        return self._outputs(microbatch, topk)

    def _trained_parameters(self) -> list[Tensor]:
        """Returns each trained parameter once, including those of a critic's head."""
        heads = () if self.value_head is None else self.value_head.parameters()
        parameters = {id(parameter): parameter for parameter in (*self.model.parameters(), *heads)}
        return [parameter for parameter in parameters.values() if parameter.requires_grad]

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        held = held_tensors(self.model)
        exported = (
            exported_tensors(self.model, names, name, [held[source] for source in sources])
            for name, sources in tuning_of(self.model).sources(self.model, part).items()
        )
        return bucketed((pair for tensors in exported for pair in tensors.items()), bucket_bytes)

    def move_to(self, device: torch.device) -> None:
        source = self.model.device
        self.model.to(device, non_blocking=True)  # torch uses pinned memory for copies to the host
        if source.type not in ("cpu", device.type):
            torch.get_device_module(source).synchronize(source)

    def _outputs(self, experience: Experience, candidates: Candidates = 0) -> Outputs:
        """Runs the forward, and places the head's results at their tokens, [B, T] or [B, T, K]; 0 elsewhere."""
        if experience.gaps is not None:
            tree_rows, join = branch_rows(experience)
            return join(
                self._outputs(tree_rows, candidates if isinstance(candidates, int) else teacher_candidates(tree_rows))
            )
        parts = [
            {"rows": rows, "columns": columns, **self._head_outputs(experience, rows, columns, states, candidates)}
            for rows, columns, states in self.forms.states(experience)
        ]
        results = parts[0]  # a single part is not copied, so the host still has its rows and columns
        if len(parts) > 1:
            results = {name: torch.cat([part[name] for part in parts]) for name in results}
        rows, columns, shape = results.pop("rows"), results.pop("columns"), experience.token_ids.shape
        results = {name: aligned_to_tokens(value, rows, columns, shape) for name, value in results.items()}
        group = self.forms.context_group
        if group is not None and self.forms.choose(experience)[0] == "packed":  # otherwise each rank has all rows
            results = {name: Total.apply(value, group) for name, value in results.items()}  # type: ignore[no-untyped-call]
        return Outputs(**results)

    def _head_outputs(
        self, experience: Experience, rows: Tensor, columns: Tensor, states: Tensor, candidates: Candidates
    ) -> dict[str, Tensor]:
        """Computes the fields of Outputs from states, for the tokens predicted at (rows [N], columns [N])."""
        zeros = torch.zeros(len(rows), device=states.device)
        results = {"logprobs": zeros, "entropy": zeros}
        if self.has_logprobs:
            targets = Targets.at(experience, rows, columns, candidates, self.settings)
            if self.forms.reads_logits:
                topk, logprobs = functools.partial(logits_topk, states), functools.partial(logits_logprobs, states)
                results = read_head(topk, logprobs, targets, self.settings)
            else:
                results = read_head(*whole_head(self.model.get_output_embeddings(), states), targets, self.settings)
        if self.value_head is not None:
            # A token's value is that of the state before it was sampled.
            results["values"] = self.value_head(states.to(self.value_head.weight.dtype))[:, 0].float()
        return results
