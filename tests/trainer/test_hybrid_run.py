"""GRPO on models whose layers keep states: rows of unlike lengths, and weights that change amid completions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import BATCH_SIZE, GROUP_SIZE, TinyGRPO, make_trainer, train

from benchmarks.families import family_spec
from lightrl import Experience, LocalEngine, LoRA, ModelSpec, Prompt, PromptDataModule, RLCallback, Role, Sampling
from lightrl.callbacks import StalenessControl
from lightrl.strategies import LogprobSettings, SingleModel


def spec_of(family: str) -> ModelSpec:
    """With weights so small that scans over chunks, which round more than steps over tokens do, stay within 1e-5."""
    spec = family_spec(family)
    return replace(spec, config={**(spec.config or {}), "initializer_range": 0.08})


class Prompts(PromptDataModule):
    def __init__(self) -> None:
        super().__init__(None, batch_size=BATCH_SIZE)

    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{i}", token_ids=[2 + (i + k) % 15 for k in range(1 + 7 * i % 24)]) for i in range(12)]


class Weights(RLCallback):
    """The policy's weights of each version."""

    def __init__(self) -> None:
        self.of_version: dict[int, dict[str, torch.Tensor]] = {}

    def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
        state = module.policy.state_dict()
        self.of_version[weight_version] = {name: value.clone() for name, value in state.items()}


def num_mixed_rows(experience: Experience) -> int:
    """Trajectories whose tokens are of several versions."""
    return sum(len(set(row[row >= 0].tolist())) > 1 for row in experience.weight_versions)


class UntilMixed(RLCallback):
    """Ends the run after a sync came amid completions: when that is depends on how fast the machine decodes."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        trainer.should_stop = any(map(num_mixed_rows, pl_module.experiences))


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.extra) for name in ("lfm2", "nemotron_h", "qwen3_next"))],
)
def test_each_token_has_the_logprob_of_its_version_where_syncs_come_amid_completions(
    family: str, tmp_path: Path
) -> None:
    spec, weights = spec_of(family), Weights()
    module = TinyGRPO(spec, sampling=Sampling(max_new_tokens=30, stop_token_ids=(3,)), microbatch_tokens=128)
    callbacks = [StalenessControl(2), weights, UntilMixed()]
    train(tmp_path, module, Prompts(), max_steps=60, engine=LocalEngine(threads=1, max_batch=6), callbacks=callbacks)
    model = spec.load_model()
    num_mixed = 0
    for experience in module.experiences:
        assert len(experience) == BATCH_SIZE * GROUP_SIZE
        num_mixed += num_mixed_rows(experience)
        for version in experience.weight_versions[experience.loss_mask].unique().tolist():
            model.load_state_dict(weights.of_version[version])
            single = SingleModel(model, LogprobSettings(), form="rectangles", is_policy=False)  # as of this version
            (outputs,) = single.forward([experience])
            is_its = experience.loss_mask & (experience.weight_versions == version)
            expected = experience.behavior_logprobs[is_its]
            torch.testing.assert_close(outputs.logprobs[is_its], expected, rtol=0, atol=1e-5)
    assert num_mixed > 0, "no sync came amid a completion in 60 iterations"


class Compared(RLCallback):
    """Compares each experience's logprobs with the policy's, which has sampled it."""

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        (outputs,) = module.parallel_models["policy"].forward([experience])
        expected = experience.behavior_logprobs
        torch.testing.assert_close(outputs.logprobs * experience.loss_mask, expected, rtol=0, atol=1e-5)


@pytest.mark.extra
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "lfm2", "falcon_h1", "nemotron_h", "jamba"])
def test_adapters_on_all_linear_layers_of_a_hybrid_reach_the_engine(family: str, tmp_path: Path) -> None:
    module = TinyGRPO(Role(spec_of(family), lora=LoRA(rank=2)))
    make_trainer(tmp_path, engine=LocalEngine(threads=1), callbacks=[Compared()]).fit(module, datamodule=Prompts())
    names = {name for name, parameter in module.policy.named_parameters() if parameter.requires_grad}
    layers = {"qwen3_5_moe_text": "linear_attn", "lfm2": "conv", "jamba": "mamba", "falcon_h1": "mamba"}
    assert any(layers.get(family, "mixer") in name for name in names)
