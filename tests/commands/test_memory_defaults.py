"""What a GPU's memory decides where the user has not, with a GPU's size but without one."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl import GRPO, FSDP2Strategy, LocalEngine, SGLangEngine, Trainer
from lightrl.commands.memory_defaults import use_estimate
from lightrl.commands.plan_run import planned_run
from lightrl.launch.memory import rank_memories
from lightrl.models import ModelSpec
from lightrl.strategies.costs import USABLE_FRACTION
from lightrl.trajectory import Sampling

CONFIG = {
    "model_type": "qwen3", "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
GIVEN = ("trainer.strategy.init_args.activation_checkpointing", "model.init_args.microbatch_tokens")


class Data:
    batch_size = 8
    max_prompt_tokens = 64


def made(**settings: Any) -> tuple[GRPO, Trainer]:
    module = GRPO(ModelSpec(config=CONFIG), reward=len, group_size=8, sampling=Sampling(max_new_tokens=192))
    return module, Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)


@pytest.mark.parametrize(
    ("gigabytes", "given", "checkpoints", "is_cut"),
    [
        (80, (), False, False),
        (2.4, (), True, False),
        (2.4, GIVEN, False, False),
        (1.2, (), True, True),
        (1.2, GIVEN[1:], True, False),
    ],
)
def test_a_small_gpu_gets_checkpoints_then_smaller_microbatches_unless_the_user_set_them(
    gigabytes: float, given: tuple[str, ...], checkpoints: bool, is_cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module, trainer = made(strategy=FSDP2Strategy())
    before = module.microbatch_tokens
    with caplog.at_level("INFO", "lightrl"):
        use_estimate(module, trainer, Data(), gigabytes * 1e9, given)
    assert trainer.strategy.activation_checkpointing is checkpoints  # type: ignore[attr-defined]
    assert (module.microbatch_tokens < before) is is_cut
    (line,) = [record.message for record in caplog.records if "on paper" in record.message]
    assert ("activation_checkpointing is true" in line) is checkpoints
    assert (f"model.microbatch_tokens is {module.microbatch_tokens}" in line) is is_cut
    assert trainer.memory_estimate in line


def test_an_engine_on_the_trainers_gpu_may_keep_what_is_left() -> None:
    module, trainer = made()
    use_estimate(module, trainer, Data(), 8e9, ())
    assert isinstance(trainer.engine, LocalEngine)
    memory = rank_memories(planned_run(module, trainer, Data()))[0]  # type: ignore[arg-type]
    others = memory.total - memory.device["key-values"]
    assert trainer.engine.key_value_bytes == pytest.approx(USABLE_FRACTION * 8e9 - others)


@pytest.mark.parametrize(("args", "fraction"), [({}, 0.77), ({"mem_fraction_static": 0.5}, 0.5)])
def test_servers_on_the_trainers_gpus_leave_room_for_its_weights(args: dict[str, Any], fraction: float) -> None:
    engine = SGLangEngine(servers=1, placement="colocated", server_args=args)
    module, trainer = made(engine=engine)
    use_estimate(module, trainer, Data(), 8e9, ())  # weights and gradients: 2 · 4 · 29 M parameters, 3 % of it
    assert engine.server_args["mem_fraction_static"] == fraction
