"""Tiny models with experts, a family each, and trajectories that an engine sampled with them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.families import FAMILIES, family_spec
from lightrl import LocalEngine, LoRA, ModelSpec, Prompt, RolloutEngine, Sampling
from lightrl.columns import extended
from lightrl.models.tuning import tuning_of
from lightrl.trajectory import Trajectory
from lightrl.weights import Bucket

VOCABULARY = 17
# Changes of a measured config: limits to some groups of experts, and a family whose whole layer is the block.
_CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "glm4_moe": {"n_group": 2},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
}
_QUICK = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
EACH_FAMILY = [
    pytest.param(name, marks=[] if name in _QUICK else pytest.mark.extra)
    for name, config in {**FAMILIES["mixture of experts"], **_CHANGES}.items()
    if "index_topk" not in config
]


def moe_spec(family: str = "qwen3_moe", **changes: Any) -> ModelSpec:
    spec = family_spec(family)
    config = {**(spec.config or {}), **_CHANGES.get(family, {}), **changes}
    config = {name: value for name, value in config.items() if value is not None or name.endswith("token_id")}
    return replace(spec, config=config)


def moe_model(family: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    model: PreTrainedModel = moe_spec(family, **changes).load_model()
    return model.eval()


def adapters_of_experts(model: PreTrainedModel, folder: Path) -> LoRA:
    """Saves adapters of all linear layers and experts, none of them zero, and changes the model."""
    LoRA(rank=2, alpha=4, target_parameters=("experts.gate_up_proj", "experts.down_proj")).add_to(model)
    generator = torch.Generator().manual_seed(0)
    added = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for value in added.values():
        torch.nn.init.normal_(value, std=0.2, generator=generator)
    folder.mkdir()
    tuning_of(model).save(added, str(tuning_of(model).saved_config(model, None)), folder)
    return LoRA(adapter=str(folder))


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


@contextmanager
def engine_of(model: PreTrainedModel, engine: LocalEngine | None = None, **settings: Any) -> Iterator[LocalEngine]:
    """A LocalEngine, with these settings if it is not given, that has the model's weights."""
    engine = engine or LocalEngine(**{"threads": 1, **settings})
    engine.start(model.config)
    try:
        engine.load_weights([Bucket(dict(model.named_parameters()))], weight_version=0)
        yield engine
    finally:
        engine.close()


def sampled(model: PreTrainedModel, **settings: Any) -> list[Trajectory]:
    """Trajectories of unequal length from a LocalEngine with these settings and the model's weights."""
    with engine_of(model, **settings) as engine:
        return sampled_by(engine)


def sampled_by(engine: RolloutEngine) -> list[Trajectory]:
    """Trajectories of unequal length from an engine that has loaded weights."""
    prompts = [[3, 7, 4, 9], [5, 5], [6, 4, 11, 8, 10, 12, 3]]

    async def generate() -> list[Any]:
        samplings = [Sampling(max_new_tokens=4 + 3 * index, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(
            *(engine.generate(*both, session="one") for both in zip(prompts, samplings, strict=True))
        )

    completions = [answers[0] for answers in asyncio.run(generate())]
    return [
        Trajectory(
            prompt=Prompt(str(index), token_ids=prompt), group_id=index, sample=0, token_ids=[*prompt, *made.token_ids],
            loss_mask=[False] * len(prompt) + [True] * len(made.token_ids),
            behavior_logprobs=[0.0] * len(prompt) + [*made.logprobs],
            weight_versions=[-1] * len(prompt) + [*made.weight_versions], completion_ids=made.token_ids, completion="",
            reward=0.0, columns=extended({}, len(prompt), made.columns, len(made.token_ids)),
        )
        for index, (prompt, made) in enumerate(zip(prompts, completions, strict=True))
    ]  # fmt: skip
