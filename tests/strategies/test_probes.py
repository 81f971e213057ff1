"""What the probes find, for families whose code is known; a wrong yes would train on wrong logprobs."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import FAMILIES, VOCABULARY, random_experience, tiny_model
from transformers import MambaConfig, MambaForCausalLM, Phi3Config, Phi3ForCausalLM

from benchmarks.families import family_spec
from lightrl.models.moe import moe_blocks, router_of
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.layouts.probes import can_mask, can_pack, head_is_plain

PLAIN = ["llama", "qwen2", "qwen3", "gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_plain_unless_it_caps_logits(family: str) -> None:
    assert head_is_plain(tiny_model(family)) == ("capped" not in family)


def test_a_cap_is_found_though_it_hardly_changes_the_logits_of_small_weights() -> None:
    model = tiny_model("gemma2 with capped logits", initializer_range=1e-3, final_logit_softcapping=30.0)
    assert not head_is_plain(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_shared_under_full_attention_only(family: str) -> None:
    assert can_mask(tiny_model(family)) == (family in PLAIN)


def test_a_mask_that_the_model_does_not_follow_is_found() -> None:
    model = tiny_model("qwen3")
    forward = model.base_model.forward
    model.base_model.forward = lambda attention_mask=None, **inputs: forward(**inputs)
    assert not can_mask(model)


@pytest.mark.parametrize("family", PLAIN)
def test_packed_rows_and_shared_prefixes_are_exact_for_common_families(family: str) -> None:
    assert can_pack(tiny_model(family))
    assert can_pack(tiny_model(family, dtype=torch.bfloat16))
    assert can_pack(tiny_model(family), shares_prefixes=True)
    assert can_mask(tiny_model(family, dtype=torch.bfloat16))


def test_a_state_that_runs_through_the_row_can_be_neither_packed_nor_shared() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4, use_cache=False)
    model = MambaForCausalLM(config).eval()
    assert not can_pack(model)
    assert not can_mask(model)


def keep_apart(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Replaces transformers' operations over a row by ones that heed its trajectories, as packages with kernels do."""

    def replace(name: str, dim: int, arguments: tuple[str, ...] = ()) -> None:
        if (whole := getattr(module, name, None)) is None:
            return

        def apart(*inputs: Any, seq_idx: Any = None, cu_seqlens: Any = None, **settings: Any) -> Any:
            settings = {key: value for key, value in settings.items() if key not in ("packed_rows", "cu_seq_lens_q")}
            if seq_idx is None and cu_seqlens is None:
                return whole(*inputs, **settings)
            sizes = seq_idx[0].unique_consecutive(return_counts=True)[1] if cu_seqlens is None else cu_seqlens.diff()
            length = int(sizes.sum())

            def cut(values: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
                is_row = {k: torch.is_tensor(v) and v.dim() > 2 and v.shape[dim] == length for k, v in values.items()}
                parts = {k: v.split(sizes.tolist(), dim) for k, v in values.items() if is_row[k]}
                for index in range(len(sizes)):
                    yield {k: parts[k][index] if is_row[k] else v for k, v in values.items()}

            outputs = [
                whole(*positional.values(), **named)
                for positional, named in zip(cut(dict(enumerate(inputs))), cut(settings), strict=True)
            ]
            if isinstance(outputs[0], tuple):
                return torch.cat([output for output, _ in outputs], dim), None
            return torch.cat(outputs, dim)

        monkeypatch.setattr(module, name, apart)

    replace("causal_conv1d_fn", 2)
    replace("torch_chunk_gated_delta_rule", 1)
    replace("mamba2_chunk_scan", 1)


@pytest.mark.parametrize(
    ("family", "packs"),
    [
        ("qwen3_5_text", True),
        pytest.param("qwen3_next", True, marks=pytest.mark.extra),
        pytest.param("lfm2", True, marks=pytest.mark.extra),
        pytest.param("nemotron_h", True, marks=pytest.mark.extra),
        ("jamba", False),  # its scan is not told where trajectories start
    ],
)
def test_a_hybrid_is_packed_if_all_its_layers_heed_the_starts(
    family: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_spec(family).load_model()
    assert not can_pack(model)  # plain torch cannot keep trajectories apart, and transformers says so
    keep_apart(monkeypatch, sys.modules[type(model).__module__])
    assert can_pack(model) == packs
    if packs:
        rows = random_experience(prompt_tokens=(1, 9), completion_tokens=(1, 90))
        (packed,) = SingleModel(model, LogprobSettings(), form="packed").forward([rows])
        (padded,) = SingleModel(model, LogprobSettings(), form="rectangles").forward([rows])
        torch.testing.assert_close(packed.logprobs, padded.logprobs, rtol=0, atol=1e-5)


def test_a_row_beyond_longropes_original_length_is_refused() -> None:
    """Its factors are those of the longest row of a forward: 6 nats, by which rows happened to be together."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Phi3Config(**sizes, **heads, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=8)
    parallel = SingleModel(Phi3ForCausalLM(config).eval(), LogprobSettings())
    row = random_experience(prompt_tokens=(4, 4), completion_tokens=(4, 4))
    (outputs,) = parallel.forward([row])
    assert outputs.logprobs.isfinite().all()
    with pytest.raises(ValueError, match=r"trajectory of 9 tokens.*with longrope, its original_max.*, 8 tokens"):
        list(parallel.forward([random_experience(prompt_tokens=(4, 4), completion_tokens=(5, 5))]))


def test_rotary_angles_that_depend_on_the_length_of_a_forward_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", rope_parameters=rope)
    assert not can_mask(model)
    assert not can_pack(model)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_row_longer_than_the_sparse_selection_is_not_packed(family: str) -> None:
    model = family_spec(family).load_model()
    assert not can_pack(model)
    rows = random_experience()
    assert int(rows.lengths.max()) > model.config.index_topk
    (alone,) = SingleModel(model, LogprobSettings(), form="rectangles").forward([rows])
    for row in range(len(rows)):
        (one,) = SingleModel(model, LogprobSettings(), form="rectangles").forward([rows.select([row])])
        width = one.logprobs.shape[1]
        torch.testing.assert_close(alone.logprobs[row, :width], one.logprobs[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "ernie4_5_moe"])
def test_routers_compute_in_float32_and_experts_in_the_dtype_of_autocast(family: str) -> None:
    model = family_spec(family).load_model()
    single = SingleModel(model, LogprobSettings(), form="rectangles")
    block = list(moe_blocks(model).values())[-1]
    dtypes = []

    def keep(module: torch.nn.Module, inputs: object, output: Any) -> None:
        dtypes.append((output[0] if isinstance(output, tuple) else output).dtype)

    router_of(block).register_forward_hook(keep)
    block.experts.register_forward_hook(keep)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        list(single.forward([random_experience(num_groups=1)]))
    assert set(dtypes[:1]) == {torch.float32}
    assert dtypes[-1] == torch.bfloat16
