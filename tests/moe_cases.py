"""Tiny models with experts, a family each, and trajectories that an engine sampled with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lightrl import LocalEngine, ModelSpec, Prompt, Sampling
from lightrl.models.routes import joined_routes
from lightrl.trajectory import Trajectory
from lightrl.weights import Bucket

VOCABULARY = 17
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.3, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_AFTER_A_DENSE_LAYER = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    **_AFTER_A_DENSE_LAYER, "head_dim": None, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
# Settings of each family's config.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _FOUR,
    "mixtral": _LOCAL,
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_LOCAL, "sliding_window": 8},
    "qwen2_moe": {**_FOUR, "shared_expert_intermediate_size": 8},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "glm4_moe": _AFTER_A_DENSE_LAYER,
    "glm4_moe_lite": _LATENT,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": _LOCAL,
    "granitemoe": _LOCAL,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
    "llama4_text": {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "attention_chunk_size": 8},
    "dots1": {**_AFTER_A_DENSE_LAYER, "n_group": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}
_QUICK = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
EACH_FAMILY = [pytest.param(name, marks=[] if name in _QUICK else pytest.mark.extra) for name in FAMILIES]


def moe_spec(family: str = "qwen3_moe", **changes: Any) -> ModelSpec:
    config = {"model_type": family, **_SIZES, **FAMILIES[family], **changes}
    config = {name: value for name, value in config.items() if value is not None or name.endswith("token_id")}
    return ModelSpec(config=config, tokenizer="lightrl.testing.char_tokenizer", seed=0)


def moe_model(family: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    model: PreTrainedModel = moe_spec(family, **changes).load_model()
    return model.eval()


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def sampled(model: PreTrainedModel, **settings: Any) -> list[Trajectory]:
    """Trajectories of unequal length from a LocalEngine with these settings and the model's weights."""
    engine = LocalEngine(threads=1, **settings)
    engine.start(model.config)
    prompts = [[3, 7, 4, 9], [5, 5], [6, 4, 11, 8, 10, 12, 3]]

    async def generate() -> list[Any]:
        samplings = [Sampling(max_new_tokens=4 + 3 * index, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(
            *(engine.generate(*both, session="one") for both in zip(prompts, samplings, strict=True))
        )

    try:
        engine.load_weights([Bucket(dict(model.named_parameters()))], weight_version=0)
        completions = [answers[0] for answers in asyncio.run(generate())]
    finally:
        engine.close()
    return [
        Trajectory(
            prompt=Prompt(str(index), token_ids=prompt),
            group_id=index,
            sample=0,
            token_ids=[*prompt, *made.token_ids],
            loss_mask=[False] * len(prompt) + [True] * len(made.token_ids),
            behavior_logprobs=[0.0] * len(prompt) + [*made.logprobs],
            weight_versions=[-1] * len(prompt) + [*made.weight_versions],
            completion_ids=made.token_ids,
            completion="",
            reward=0.0,
            routes=joined_routes(None, len(prompt), made.routes, len(made.token_ids)),
        )
        for index, (prompt, made) in enumerate(zip(prompts, completions, strict=True))
    ]
