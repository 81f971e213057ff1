"""Costs on paper against what autograd keeps of a real update, and against numbers worked out by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_update import make_parts
from benchmarks.plan import MODELS
from lightrl.plan.costs import Work, activation_bytes, fsdp2_cost, logit_bytes, parallel_3d_cost, peak_bytes
from lightrl.plan.sizes import ModelSize
from lightrl.strategies import LogprobSettings, SingleModel, single
from lightrl.strategies.layouts import packed_attention


def config(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    return AutoConfig.for_model("qwen3", **{**sizes, **changes})


def size_of(config: Any) -> ModelSize:
    with torch.device("meta"):
        return ModelSize.of(AutoModelForCausalLM.from_config(config))


TOKENS = 16384
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
WIDE |= {"head_dim": 128, "vocab_size": 32_000, "num_hidden_layers": 4, "tie_word_embeddings": False}
GROUPED = {**WIDE, "num_key_value_heads": 2}
PURE, MIXED = Work(TOKENS, parameter_bytes=2), Work(TOKENS)
MIXTURE = {**GROUPED, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8}
LATENT = {**WIDE, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 512, "n_group": 1}
LATENT |= {"n_routed_experts": 64, "topk_group": 1, "head_dim": 64, "pad_token_id": 0, "num_experts_per_tok": 8}
LATENT |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}  # flash attention needs equal heads
COMPILED = Work(TOKENS, copies_weights=True, is_compiled=True)
SHAPES = {
    "Qwen3-0.6B, tied, bfloat16": (MODELS["qwen3-0.6b"], PURE, False),
    "Qwen3-1.7B, tied, bf16-mixed as FSDP2 shards it": (MODELS["qwen3-1.7b"], MIXED, False),
    "Qwen3-0.6B, bf16-mixed, checkpointed": (MODELS["qwen3-0.6b"], MIXED, True),
    "Qwen3-1.7B, bfloat16, checkpointed": (MODELS["qwen3-1.7b"], PURE, True),
    "Llama, untied, bfloat16": ({"model_type": "llama", **WIDE}, PURE, False),
    "Qwen2, untied, grouped keys, bf16-mixed in one process": (
        {"model_type": "qwen2", **GROUPED}, Work(TOKENS, copies_weights=True), False,
    ),
    "Llama, untied, grouped keys, float32": ({"model_type": "llama", **GROUPED}, Work(TOKENS, compute_bytes=4), False),
    "Gemma 3, tied, bfloat16": ({"model_type": "gemma3_text", **GROUPED, "tie_word_embeddings": True}, PURE, False),
    "Qwen3, grouped keys, bf16-mixed in one process, compiled": ({"model_type": "qwen3", **GROUPED}, COMPILED, False),
    "Llama, grouped keys, float32, compiled": (
        {"model_type": "llama", **GROUPED}, Work(TOKENS, compute_bytes=4, is_compiled=True), False,
    ),
    "Gemma 3, bfloat16, compiled": (
        {"model_type": "gemma3_text", **GROUPED}, Work(TOKENS, parameter_bytes=2, is_compiled=True), False,
    ),
    "Qwen3-MoE, bf16-mixed in one process": (
        {"model_type": "qwen3_moe", **MIXTURE}, Work(TOKENS, copies_weights=True), False,
    ),
    "Qwen3-MoE, bf16-mixed as FSDP2 shards it": ({"model_type": "qwen3_moe", **MIXTURE}, MIXED, False),
    "Qwen3-MoE, bfloat16": ({"model_type": "qwen3_moe", **MIXTURE}, PURE, False),
    "DeepSeek-V3, bf16-mixed as FSDP2 shards it": ({"model_type": "deepseek_v3", **LATENT}, MIXED, False),
    "DeepSeek-V3, bfloat16": ({"model_type": "deepseek_v3", **LATENT}, PURE, False),
}  # fmt: skip

EXTRA = {"Qwen3-1.7B, bfloat16, checkpointed", *(name for name in SHAPES if "compiled" in name)}


def kept_bytes(config: Any, work: Work, *, checkpointed: bool) -> tuple[int, int]:
    """What autograd keeps of SingleModel's packed forward, each storage once and no parameter; and its loss tokens.

    The tensors have shapes and dtypes, but no memory: those of the model are fake, those of the experience real.
    """
    experience = make_parts(TOKENS, 1024, config.vocab_size)
    is_mixed = work.compute_bytes != work.parameter_bytes
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = torch.bfloat16 if work.parameter_bytes == 2 else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        for layer in model.model.layers:
            for module in layer.modules() if is_mixed and not work.copies_weights else ():
                for key, value in module.named_parameters(recurse=False):
                    setattr(module, key, torch.nn.Parameter(value.detach().to(torch.bfloat16)))
            if checkpointed:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            if work.is_compiled:  # into the graphs that Inductor gets, which run operation by operation
                layer.compile(dynamic=True, backend="aot_eager_decomp_partition")
    parallel = SingleModel(model, LogprobSettings(entropy_needs_gradient=False), form="packed")
    kept = {parameter.untyped_storage()._cdata: None for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        losses: list[torch.Tensor] = []  # what hangs on them is kept until the function ends
        parallel.forward_backward([experience], lambda _, outputs: outputs.logprobs, losses.append)
    assert losses[0].requires_grad
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values() if tensor is not None)
    return total, experience.num_loss_tokens


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, of fake parameters
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, in its partitioner
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.extra] * (name in EXTRA)) for name in SHAPES])
def test_what_autograd_keeps_is_what_the_paper_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing can be probed without numbers; flash attention is what a GPU runs.
    monkeypatch.setattr(single, "head_is_plain", lambda model: True)
    monkeypatch.setattr(single, "can_mask", lambda model: False)
    monkeypatch.setattr(
        single,
        "can_pack",
        lambda model, shares_prefixes=False: not shares_prefixes and packed_attention.make_packable(model),
    )
    monkeypatch.setattr(packed_attention, "kernel_for", lambda *args: "flash")
    values, work, checkpointed = SHAPES[name]
    made = AutoConfig.for_model(**values)
    work = Work(**{**vars(work), "checkpoint_activations": checkpointed})
    kept, loss_tokens = kept_bytes(made, work, checkpointed=checkpointed)
    paper = activation_bytes(size_of(made), TOKENS, 1.0, work) + logit_bytes(made, loss_tokens, work)[0]
    assert paper == pytest.approx(kept, rel=0.01)


def test_the_peak_of_a_checkpointed_model_has_one_layer_more() -> None:
    layers = 4 * TOKENS * 64 * 8
    last_norm, angles = TOKENS * 8 * 64, TOKENS * 8 * 16
    kept, working = logit_bytes(config(), TOKENS, MIXED)
    peak, logits = peak_bytes(size_of(config()), TOKENS, 1.0, MIXED)
    again = TOKENS * (2 * (8 * 64 + 4) + 2 * (6 * 64 + 4 * 4) + 5 * 2 * 64 + 2 * 4 * 64 + 4 * 4 + 8 * 128)
    assert peak == layers + last_norm + angles + max(0, again - working)
    assert logits == kept + working


# A layer: 4 · 64 · 64 + 3 · 64 · 128 = 40,960 and norms of 2 · 64 + 2 · 16; ends: 2 · 32,768 and a norm of 64.
WORK = Work(tokens=8000, microbatch_tokens=1000)
LAYER, ENDS = 41_120, 65_600
PARAMETERS = 8 * LAYER + ENDS


def test_the_size_of_a_model_has_its_layers_by_kind() -> None:
    """Of three layers the first is dense; each expert has 3 · 1024 · 512 parameters, and so have the shared ones."""
    size = size_of(AutoConfig.for_model("deepseek_v3", **LATENT))
    dense, mixture = size.layers
    assert (dense.num, dense.width, dense.experts) == (1, 4096, 0)
    assert (mixture.num, mixture.width, mixture.experts, mixture.expert_width) == (2, 512, 64, 512)
    assert mixture.expert_parameters == 64 * 3 * 1024 * 512
    assert size.parameters - size.used_in_layers - size.outside_layers == 2 * (64 - 8) * 3 * 1024 * 512
    assert size_of(config()).parameters == PARAMETERS


def test_fsdp2_shares_the_state_and_gathers_each_microbatch_twice() -> None:
    cost = fsdp2_cost(size_of(config()), 4, WORK)
    assert cost.num_microbatches == 2
    assert cost.state_bytes == 16 * PARAMETERS / 4
    assert cost.sent_bytes == pytest.approx((2 * 2 * 2 + 4) * PARAMETERS * 3 / 4)


def test_a_pipeline_divides_layers() -> None:
    cost = parallel_3d_cost(size_of(config()), 2, 1, 1, WORK)
    assert cost.num_microbatches == 8
    assert cost.state_bytes == 16 * (4 * LAYER + 32_768)
    assert cost.sent_bytes == pytest.approx(8 * 2 * 2 * 1000 * 64)  # each microbatch, forward and back, in bfloat16


def test_without_a_pipeline_layers_are_gathered_again_for_each_microbatch() -> None:
    cost = parallel_3d_cost(size_of(config()), 1, 2, 1, WORK)
    assert cost.num_microbatches == 4
    whole = 8 * LAYER + 2 * 32_768
    assert cost.sent_bytes == (8 * whole + 4 * 4 * 8 * LAYER) / 2
    assert cost.gathered_bytes == 4 * whole + 8 * (2 * LAYER + 2 * 32_768)


def test_ep_divides_experts_over_all_ranks_of_a_stage_and_tp_divides_the_rest() -> None:
    size = size_of(AutoConfig.for_model("qwen3_moe", **{**MIXTURE, "tie_word_embeddings": False}))
    experts = 4 * 64 * 3 * 1024 * 768
    others, norm = size.parameters - experts, 1024
    whole, divided = (parallel_3d_cost(size, 1, 2, 2, Work(TOKENS, ep=ep)) for ep in (1, 4))
    assert divided.state_bytes == 16 * (others - norm + experts) / 4
    assert whole.state_bytes == 16 * ((others - norm) / 4 + experts / 2)  # each tensor rank has all experts
    assert divided.sent_experts == 0  # no other rank has the same ones
    assert whole.sent_experts > 0
    assert divided.sent_tp - whole.sent_tp == pytest.approx(TOKENS / 4 * 3 * 4 * (4 * 8 * 2 * 1024) * 3 / 4)
    halves = parallel_3d_cost(size, 2, 2, 1, Work(TOKENS, ep=2))
    assert halves.state_bytes == 16 * (others - norm + experts) / 4


def test_reducing_every_microbatch_saves_whole_gradients_and_costs_a_reduce_each() -> None:
    default, chosen = (fsdp2_cost(size_of(config()), 4, WORK, reduce_every_microbatch=each) for each in (False, True))
    assert default.gradient_bytes - chosen.gradient_bytes == 4 * PARAMETERS
    assert chosen.gradient_bytes == (2 + 4) * LAYER
    assert chosen.sent_bytes - default.sent_bytes == 4 * PARAMETERS * 3 / 4  # two microbatches: one more reduce
