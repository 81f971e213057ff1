"""Digests of what the trainer sends, against layouts that were written from SGLang's layers and a scalar hash."""

import random

import checkpoint_cases
import pytest
import torch
from checkpoint_cases import checkpoint_of
from fake_sglang.layout import checksums
from tiny import tiny_model

from lightrl.weights import Bucket, Digests, ServerForm, ServerLayout, bucketed
from lightrl.weights.digests import tile_hash
from lightrl.weights.server_layout import unknown_layout

SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 130}


def model_of(family="qwen3", **changes):
    return checkpoint_cases.model_of(family, **{"num_hidden_layers": 2, **SIZES, **changes})


def computed(model, layout, *, bucket_bytes=3000, dtype=None, shuffled=False):
    """The digests of a model's parameters that pass by in buckets."""
    parameters = list(checkpoint_of(model).items())
    if shuffled:
        random.Random(0).shuffle(parameters)
    digests = Digests(model.config, ServerForm.of(model.config, dtype), [layout])
    for bucket in bucketed(parameters, bucket_bytes):
        digests.add(bucket)
    return digests.finish()[layout]


def held(model, layout):
    """What SGLang's ranks answer, from `fake_sglang.layout`."""
    parameters = {name: tensor.to(layout.dtype) for name, tensor in checkpoint_of(model).items()}
    return checksums(parameters, model.config, layout.num_ranks, layout.ep)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_each_rank_has_its_share_of_the_fused_parameters(family, is_tied, num_key_value_heads, num_ranks):
    model = model_of(family, num_key_value_heads=num_key_value_heads, tie_word_embeddings=is_tied)
    layout = ServerLayout(torch.float32, num_ranks)
    ours, theirs = computed(model, layout), held(model, layout)
    if is_tied:  # for servers that hold the head twice, as with pipeline stages
        assert all(rank.pop("lm_head.weight") == rank["model.embed_tokens.weight"] for rank in ours)
    assert ours == theirs


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(("num_ranks", "ep", "size"), [(1, 1, 48), (2, 1, 128), (2, 2, 48), (4, 2, 128)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_each_rank_has_its_share_of_the_experts_in_two_parameters(family, num_ranks, ep, size, shuffled):
    sizes = {"intermediate_size": size, "moe_intermediate_size": size, "num_experts": 4, "num_experts_per_tok": 2}
    model = model_of(family, **sizes, num_key_value_heads=4, tie_word_embeddings=False)
    layout = ServerLayout(torch.bfloat16, num_ranks, ep=ep)
    assert unknown_layout(model.config, layout) is None
    assert computed(model, layout, shuffled=shuffled) == held(model, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_server_of_another_dtype_holds_the_cast_of_what_was_sent(dtype):
    model = model_of(num_key_value_heads=2, tie_word_embeddings=False)
    layout = ServerLayout(dtype, 2)
    assert computed(model, layout) == held(model, layout)
    assert computed(model.to(torch.bfloat16), layout) == computed(model.float(), layout, dtype=torch.bfloat16)


@pytest.mark.parametrize("bucket_bytes", [1, 500, 2**30])
def test_the_parts_of_a_tensor_may_be_in_any_buckets(bucket_bytes):
    model = model_of(num_key_value_heads=2, tie_word_embeddings=False)
    layout = ServerLayout(torch.float32, 2)
    assert computed(model, layout, bucket_bytes=bucket_bytes, shuffled=True) == held(model, layout)


def test_swapped_parameters_and_one_changed_bit_change_the_digests():
    model = model_of(num_key_value_heads=4, tie_word_embeddings=False)
    layout = ServerLayout()
    (before,) = computed(model, layout)
    layers = model.model.layers
    with torch.no_grad():
        for one, other in zip(layers[0].mlp.parameters(), layers[1].mlp.parameters(), strict=True):
            one.data, other.data = other.data, one.data
        model.model.norm.weight[3] = torch.nextafter(model.model.norm.weight[3], torch.tensor(9.0))
    (after,) = computed(model, layout)
    assert {name for name in before if before[name] != after[name]} == {
        "model.norm.weight",
        *(f"model.layers.{layer}.mlp.{name}.weight" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")),
    }


def test_each_rank_of_a_gemma3_server_has_the_whole_embedding_without_padding():
    model = model_of("gemma3_text", num_key_value_heads=2)
    embedding = model.model.embed_tokens.weight.detach()
    expected = checksums({"whole": embedding}, model.config, 1)[0]["whole"]
    ours = computed(model, ServerLayout(torch.float32, 2))
    assert [rank["model.embed_tokens.weight"] for rank in ours] == [expected, expected]


def test_layouts_that_cannot_be_computed_are_named():
    assert "'gpt2'" in str(unknown_layout(tiny_model("gpt2").config, ServerLayout()))
    odd = model_of(num_key_value_heads=1).config
    assert "2 CPU ranks" in str(unknown_layout(odd, ServerLayout(num_ranks=2)))
    assert unknown_layout(odd, ServerLayout(num_ranks=2, is_cpu=False)) is None
    experts = model_of("mixtral", num_local_experts=2).config
    assert "vLLM" in str(unknown_layout(experts, ServerLayout(is_vllm=True)))
    assert "size 80 on 2 CPU ranks" in str(unknown_layout(experts, ServerLayout(num_ranks=2)))
    assert unknown_layout(experts, ServerLayout(num_ranks=2, is_cpu=False)) is None


MASK = 2**32 - 1


def fmix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def rotated(x, by):
    return ((x << by) | (x >> (32 - by))) & MASK


def slow_hash(content: bytes) -> int:
    """SGLang's kernels, word by word."""
    content += b"\0" * (-len(content) % 4)
    words = [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4)]
    seeds = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & MASK)
    total = 0
    for start in range(0, len(words), 8192):
        first = second = 0
        for index in range(start, min(start + 8192, len(words))):
            first += fmix(words[index] ^ ((index * 0x27D4EB2D + seeds[0]) & MASK) ^ rotated(index, 15))
            second += fmix(words[index] ^ ((index * 0x165667B1 + seeds[1]) & MASK) ^ rotated(index, 13))
        size = len(words) * 4
        total += (fmix((first & MASK) ^ size) << 32) | fmix((second & MASK) ^ size)
    total &= 2**64 - 1
    total = ((total ^ (total >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    total = ((total ^ (total >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return total ^ (total >> 31)


@pytest.mark.parametrize("num", [1, 3, 8192, 8193, 30_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_tile_hash_is_that_of_sglangs_kernels(num, dtype, monkeypatch):
    monkeypatch.setattr("lightrl.weights.digests._TILES_AT_ONCE", 2)  # more than one block of tiles
    tensor = (torch.randn(num, generator=torch.Generator().manual_seed(num)) * 100).to(dtype)
    assert tile_hash(tensor) == slow_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_a_gpu_server_has_tile_hashes_of_its_shares():
    model = model_of(num_key_value_heads=1, intermediate_size=80)
    ours = computed(model, ServerLayout(torch.float32, 2, is_cpu=False))
    layer = model.model.layers[0]
    for rank in range(2):  # the one key-value head is on both, and nothing is padded but the vocabulary
        rows = slice(16 * rank, 16 * rank + 16)
        qkv = torch.cat([layer.self_attn.q_proj.weight[rows], layer.self_attn.k_proj.weight,
                         layer.self_attn.v_proj.weight])  # fmt: skip
        down = layer.mlp.down_proj.weight[:, 40 * rank : 40 * rank + 40].contiguous()
        for name, tensor in (("self_attn.qkv_proj", qkv), ("mlp.down_proj", down)):
            expected = slow_hash(tensor.detach().view(torch.uint8).numpy().tobytes())
            assert ours[rank][f"model.layers.0.{name}.weight"] == f"{expected:016x}"


def test_an_empty_tensor_has_the_hash_zero():
    assert tile_hash(torch.empty(0)) == 0


def test_servers_in_bfloat16_get_the_biases_of_routers_in_float32():
    names = ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias")
    sent = dict(ServerForm(torch.bfloat16).tensors(Bucket({name: torch.full((2,), 1.001) for name in names})))
    assert [sent[name].dtype for name in names] == [torch.bfloat16, torch.float32]
