"""SingleModel: a model in one process, which removes padding before the forward pass and returns results as [B, T].

Shapes: B trajectories, T tokens, N loss tokens, H hidden size. Logprobs are computed from the hidden states at the N
positions that predict loss tokens, without a [B, T, V] tensor. On NVIDIA GPUs decoder layers are compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.experience import Experience
from lightrl.functional import (
    aligned_to_tokens,
    logits_logprobs,
    logits_topk,
    on_host,
    predicting_positions,
    rectangles,
    to_device,
)
from lightrl.models import (
    CONTEXT,
    Backward,
    Candidates,
    LossFunction,
    Outputs,
    context_tokens,
    forward_inputs,
    scalar_head,
    vision_kind,
)
from lightrl.models.conversion import Names, as_in_checkpoint
from lightrl.models.hybrids import keeps_states
from lightrl.models.routes import NOT_COMPILED, Routes
from lightrl.models.tuning import Part, whole_parameters
from lightrl.strategies.head import LogprobSettings, Targets, read_head, topk_candidates, whole_head
from lightrl.strategies.layouts.branches import branch_rows
from lightrl.strategies.layouts.halves import cut_in_halves, forward_backward_halves, halves_pay
from lightrl.strategies.layouts.packed_attention import PackedRows, Total, arguments
from lightrl.strategies.layouts.probes import (
    can_mask,
    can_pack,
    compiles,
    decoder_layers,
    head_is_plain,
    rope_depends_on_length,
)
from lightrl.strategies.layouts.shared_prefix import (
    CALL_OVERHEAD_TOKENS,
    MIN_SEGMENT_TOKENS,
    Plan,
    Prefixes,
    PrefixTree,
    cost_of_packed,
    cost_of_rectangles,
    cost_of_shared_rows,
    each_alone,
    packed,
    shared_hidden,
    shared_rows,
)
from lightrl.strategies.precision import set_expert_precision
from lightrl.weights import Bucket, bucketed

Form = Literal["rectangles", "shared_rows", "packed"]

# A packed row shares prefixes only if at most this fraction of its tokens remains: sharing copies keys and values.
_LARGEST_SHARED_FRACTION = 0.9

# Predicting positions: their rows [N], columns [N] and states, which are hidden states [N, H] or logits [N, V].
States = tuple[Tensor, Tensor, Tensor]


class SingleModel:
    """A Hugging Face causal language model as the ParallelModel for one process.

    A microbatch goes through the model with little or no padding, in one of several forms with the same results. On the
    CPU, rows of similar length form right-padded rectangles, or share the states of common prefixes if that is cheaper.
    On other devices a microbatch is one packed row, in which positions restart at each trajectory.

    Args:
        model: has a body (`base_model`) and an output head. If a probe shows that the head is more than a matrix
            product, the whole model computes the logits, one rectangle at a time.
        settings: the engine's changes to logits.
        value_head: a critic's head on this policy's body; a separate critic contains its head, `score`.
        form: how to remove padding. None chooses the cheapest form that is exact for the model, for each microbatch.
        compile_layers: `torch.compile` each decoder layer. None compiles on NVIDIA GPUs if the model has no experts and
            no states (models/hybrids.py). Layers of equal shapes share compiled code, for microbatches of any lengths.
        is_policy: whether this model sampled the tokens; if so, it replays the engine's choice of experts.
        context_group: the ranks that share packed rows and pass the same microbatches; None for one rank.

    Raises:
        ValueError: if `form` would change this model's results, or the model's body cannot have a value head.
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
        self.num_cores = torch.get_num_threads()  # rollout_stage.py may limit torch to 1 thread later
        set_expert_precision(model)
        own_head = scalar_head(model)
        self.value_head = value_head if own_head is None else own_head
        self.has_logprobs = own_head is None
        self.reads_logits = self.has_logprobs and not head_is_plain(model)
        if self.value_head is not None and self.reads_logits:
            raise ValueError(
                f"A critic cannot share the body of {type(model).__name__}, whose output head is more than a matrix "
                "product. Set critic to a checkpoint."
            )
        self.form, self.context_group = form, context_group
        self.num_calls = 0  # minimum number of model calls for a microbatch that is laid out as rectangles
        self.can_mask = not self.reads_logits and can_mask(model)
        self.can_pack = not self.reads_logits and can_pack(model)
        self.packs_prefixes = self.can_pack and can_pack(model, shares_prefixes=True)
        exact = ["rectangles", *["shared_rows"] * self.can_mask, *["packed"] * self.can_pack]
        if form not in (None, *exact):
            raise ValueError(f"form={form!r} is not exact for {type(model).__name__}. Use one of {exact}, or None.")
        self.routes = Routes(model) if is_policy else None
        self._max_row_tokens = context_tokens(model.config) if rope_depends_on_length(model) else None
        self._keeps_states = keeps_states(model.config)
        self.is_compiled = compiles(model, model.device, compile_layers)
        for layer in decoder_layers(model) if self.is_compiled else ():
            layer.compile(dynamic=True)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterator[Outputs]:
        """Yields each microbatch's logprobs and entropy, [B, T], 0 outside the loss mask; without gradient."""
        for microbatch in microbatches:
            yield self._outputs(microbatch, topk or topk_candidates(microbatch))

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for microbatch in microbatches:
            halves = cut_in_halves(microbatch) if halves_pay(self.model, microbatch, self.num_cores) else None
            if halves is None:
                backward(loss_fn(microbatch, self._outputs(microbatch, topk_candidates(microbatch))))
            else:
                modules = torch.nn.ModuleList(item for item in (self.model, self.value_head) if item is not None)
                forward_backward_halves(
                    halves,
                    lambda half: self._outputs(half, topk_candidates(half)),
                    loss_fn,
                    backward,
                    [parameter for parameter in modules.parameters() if parameter.requires_grad],
                )

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        return self._outputs(microbatch, topk)

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        parameters = whole_parameters(self.model, part)
        return bucketed(parameters if names == "module" else as_in_checkpoint(self.model, parameters), bucket_bytes)

    def move_to(self, device: torch.device) -> None:
        source = self.model.device
        self.model.to(device, non_blocking=True)  # torch uses pinned memory for copies to the host
        if source.type not in ("cpu", device.type):
            torch.get_device_module(source).synchronize(source)

    def _outputs(self, experience: Experience, candidates: Candidates = 0) -> Outputs:
        """Runs the forward pass; returns the head's results, [B, T] or [B, T, K], 0 outside the loss mask."""
        experience, join = branch_rows(experience)  # `join` maps the rows' outputs back to trees
        candidates = candidates if isinstance(candidates, int) else topk_candidates(experience)
        parts = [
            {"rows": rows, "columns": columns, **self._head_outputs(experience, rows, columns, states, candidates)}
            for rows, columns, states in self.states(experience)
        ]
        results = parts[0]  # a single part is not copied, so the host's copies of its rows and columns stay valid
        if len(parts) > 1:
            results = {name: torch.cat([part[name] for part in parts]) for name in results}
        rows, columns, shape = results.pop("rows"), results.pop("columns"), experience.token_ids.shape
        results = {name: aligned_to_tokens(value, rows, columns, shape) for name, value in results.items()}
        group = self.context_group
        if group is not None and self.packs_all([experience]):  # each rank has part of a row; otherwise all rows
            results = {name: Total.apply(value, group) for name, value in results.items()}  # type: ignore[no-untyped-call]
        return join(Outputs(**results))

    def _head_outputs(
        self, experience: Experience, rows: Tensor, columns: Tensor, states: Tensor, candidates: Candidates
    ) -> dict[str, Tensor]:
        """Computes the fields of Outputs from states, for the tokens predicted at positions (rows [N], columns [N])."""
        zeros = torch.zeros(len(rows), device=states.device)
        results = {"logprobs": zeros, "entropy": zeros}
        if self.has_logprobs:
            targets = Targets.at(experience, rows, columns, candidates, self.settings)
            if self.reads_logits:
                topk, logprobs = functools.partial(logits_topk, states), functools.partial(logits_logprobs, states)
                results = read_head(topk, logprobs, targets, self.settings)
            else:
                results = read_head(*whole_head(self.model.get_output_embeddings(), states), targets, self.settings)
        if self.value_head is not None:
            # A token's value is the value of the state before the token was sampled.
            results["values"] = self.value_head(states.to(self.value_head.weight.dtype))[:, 0].float()
        return results

    def shares_prefixes(self, experience: Experience) -> bool:
        can_share = self.packs_prefixes if self.form == "packed" else self.form != "rectangles" and self.can_mask
        return can_share and not self.replays(experience) and not self._is_whole(experience)

    def choose(self, experience: Experience) -> tuple[str, Plan]:
        """Returns this microbatch's form and Plan; by default packed if possible on a GPU, otherwise the cheapest."""
        if self.form == "rectangles" or self._is_whole(experience):
            return "rectangles", []
        on_cpu = experience.token_ids.device.type == "cpu"
        form: str | None = "packed" if self.form is None and self.can_pack and not on_cpu else self.form
        plans: dict[str, tuple[float, Plan]] = {}
        if not self.replays(experience):  # each trajectory has its own routes
            prefixes = Prefixes.of(experience, self.model.config)
            if form is None:
                plans["rectangles"] = cost_of_rectangles(prefixes.ends), []
            if self.packs_prefixes and form != "shared_rows":
                tree = prefixes.tree(MIN_SEGMENT_TOKENS)
                if tree.num_tokens <= _LARGEST_SHARED_FRACTION * sum(prefixes.ends):
                    plans["packed"] = cost_of_packed(tree), [[tree]]
            is_on_grid = experience.pixel_values is not None and vision_kind(self.model.config) == "grid"
            if self.can_mask and form != "packed" and not is_on_grid:  # shared rows have no positions on a grid
                plan = shared_rows(prefixes)
                plans["shared_rows"] = cost_of_shared_rows(plan), plan
        if form is None:
            form = min(plans, key=lambda name: plans[name][0], default="rectangles")
        if form == "packed" and form not in plans:
            return "packed", [[each_alone(experience)]]
        return form, plans[form][1] if form in plans else []

    def packs_all(self, microbatches: Sequence[Experience]) -> bool:
        """Whether `form` packs all these microbatches; reads the first microbatch only if the answer depends on it."""
        may_be_whole = vision_kind(self.model.config) == "bidirectional"
        return self.form == "packed" and not (may_be_whole and self._is_whole(microbatches[0]))

    def _is_whole(self, experience: Experience) -> bool:
        """Whether some tokens see later ones, so that the model must read separate rows."""
        return experience.pixel_values is not None and vision_kind(self.model.config) == "bidirectional"

    def replays(self, experience: Experience) -> bool:
        """Whether a forward pass over these tokens uses the experts that the engine chose."""
        return self.routes is not None and self.routes.replays(experience)

    def states(self, experience: Experience) -> Iterator[States]:
        """Runs the model; yields the states of all predicting positions at once, or logits, one rectangle at a time.

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

    def _parts(self, experience: Experience) -> Iterator[States]:
        """Yields the predicting positions and states of each forward pass."""
        form, plan = self.choose(experience)
        if form == "packed":
            yield self._packed(experience, plan[0][0])
        elif plan:
            predicting = predicting_positions(on_host(experience.loss_mask))
            layer_input = functools.partial(forward_inputs, self.model, experience)
            yield from shared_hidden(self.model, experience.token_ids, predicting, plan, layer_input)
        else:
            for members, token_ids in self._rectangles(experience):
                inputs = forward_inputs(self.model, experience, members, token_ids)
                with self._replaying(experience, members, slice(token_ids.shape[1])):
                    if self.reads_logits:
                        states = self.model(**inputs, use_cache=False).logits
                    else:
                        states = self.model.base_model(**inputs, use_cache=False).last_hidden_state
                rows, columns = predicting_positions(experience.loss_mask[members, : token_ids.shape[1] + 1])
                yield members[rows], columns, states[rows, columns]

    def _rectangles(self, experience: Experience) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields rectangles: rows of similar length and their tokens, without last tokens, which predict nothing.

        If there are fewer rectangles than `num_calls`, adds dummy rectangles of one token.
        """
        lengths, device = (on_host(experience.lengths) - 1).clamp(min=1).tolist(), experience.token_ids.device
        parts = rectangles(lengths, CALL_OVERHEAD_TOKENS)
        for members in parts:
            indices = to_device(torch.tensor(members), device)
            yield indices, experience.token_ids[indices, : max(lengths[row] for row in members)]
        for _ in range(self.num_calls - len(parts)):
            yield torch.zeros(0, dtype=torch.int64, device=device), experience.token_ids[:1, :1]

    def _packed(self, experience: Experience, tree: PrefixTree) -> States:
        """Runs all rows as one packed row, or this rank's part of it; `tree` contains all rows' segments."""
        device, group = experience.token_ids.device, self.context_group
        layout = packed(tree, experience.token_ids.shape, group)
        tokens = to_device(layout.rows, device), to_device(layout.columns, device)
        packed_rows = PackedRows(layout.lengths, device, parents=layout.parents, group=group)
        starts = arguments(self.model, packed_rows, with_states=self._keeps_states)
        inputs = forward_inputs(self.model, experience, torch.arange(len(experience)), experience.token_ids, tokens)
        with self._replaying(experience, *tokens):
            output = self.model.base_model(**{"position_ids": tokens[1][None], **inputs, **starts}, use_cache=False)
        rows, columns = predicting_positions(on_host(experience.loss_mask))
        indices = layout.flat_indices[rows, columns]
        rows, columns, indices = (to_device(values[indices >= 0], device) for values in (rows, columns, indices))
        return rows, columns, output.last_hidden_state[0][indices]

    def _replaying(self, experience: Experience, rows: Tensor, columns: Tensor | slice) -> AbstractContextManager[None]:
        """Inside the context, a forward pass over the tokens at these positions uses the engine's experts."""
        if self.routes is None or not self.routes.replays(experience):
            return nullcontext()
        if self.is_compiled:
            raise ValueError(NOT_COMPILED)
        return self.routes.at(experience, rows, columns)
