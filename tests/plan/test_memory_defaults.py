"""What a GPU's memory decides where the user has not, with a GPU's size but without one."""

from dataclasses import replace
from typing import Any

import pytest
from moe_cases import moe_spec
from tiny import tiny_spec

from lightrl import GRPO, FSDP2Strategy, LocalEngine, ModelSpec, Parallel3DStrategy, SGLangEngine, Trainer
from lightrl.plan.costs import USABLE_FRACTION
from lightrl.plan.memory import RankMemory, rank_memories
from lightrl.plan.planned_run import TrainerSettings, planned_run, use_estimate
from lightrl.testing import TINY_CONFIG
from lightrl.trajectory import Sampling

CONFIG = {**TINY_CONFIG, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 4,
          "max_position_embeddings": 512}  # fmt: skip
CHECKPOINTS = "trainer.strategy.init_args.activation_checkpointing"
TOKENS = "model.init_args.microbatch_tokens"


class Data:
    batch_size = 8
    max_prompt_tokens = 64


def module_of(policy: ModelSpec) -> GRPO:
    return GRPO(policy, reward=len, group_size=8, sampling=Sampling(max_new_tokens=192), microbatch_tokens=4096)


def made(**settings: Any) -> tuple[GRPO, Trainer]:
    return module_of(tiny_spec(config=CONFIG)), Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, **settings
    )


def memory_of(module: GRPO, trainer: Trainer) -> RankMemory:
    return rank_memories(planned_run(module, trainer, Data()))[0]


def needed(*, checkpoints: bool) -> float:
    """Bytes of a GPU on which the run just fits."""
    elsewhere = SGLangEngine(urls=["http://localhost:1"])
    return memory_of(*made(strategy=FSDP2Strategy(activation_checkpointing=checkpoints), engine=elsewhere)).total / 0.9


@pytest.mark.parametrize(
    ("fraction", "of_checkpoints", "given", "checkpoints", "is_cut"),
    [
        pytest.param(1.01, False, (), False, False, id="all fits"),
        pytest.param(1.01, True, (), True, False, id="with checkpoints"),
        pytest.param(0.9, True, (), True, True, id="with smaller microbatches too"),
        pytest.param(0.9, True, (CHECKPOINTS,), False, True, id="the user wants no checkpoints"),
        pytest.param(0.9, True, (TOKENS,), True, False, id="the user chose the microbatches"),
        pytest.param(0.9, True, (TOKENS, CHECKPOINTS), False, False, id="the user chose both"),
    ],
)
def test_a_small_gpu_gets_checkpoints_then_smaller_microbatches(
    fraction: float,
    of_checkpoints: bool,
    given: tuple[str, ...],
    checkpoints: bool,
    is_cut: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, trainer = made(strategy=FSDP2Strategy(), engine=SGLangEngine(urls=["http://localhost:1"]))
    with caplog.at_level("INFO", "lightrl"):
        use_estimate(module, trainer, Data(), fraction * needed(checkpoints=of_checkpoints), given)
    assert trainer.strategy.activation_checkpointing is checkpoints  # type: ignore[attr-defined]
    assert (module.microbatch_tokens < 4096) is is_cut
    (line,) = [record.message for record in caplog.records if "Estimated memory" in record.message]
    assert ("activation_checkpointing is true" in line) is checkpoints
    assert (f"model.microbatch_tokens is {module.microbatch_tokens}" in line) is is_cut
    assert trainer.memory_estimate in line


def test_an_engine_on_the_trainers_gpu_may_keep_what_is_left() -> None:
    module, trainer = made()
    use_estimate(module, trainer, Data(), 8e9, ())
    assert isinstance(trainer.engine, LocalEngine)
    memory = memory_of(module, trainer)
    others = memory.total - memory.device["KV cache"]
    assert trainer.engine.key_value_bytes == pytest.approx(USABLE_FRACTION * 8e9 - others)


@pytest.mark.parametrize("given", [{}, {"mem_fraction_static": 0.5}])
def test_servers_on_the_trainers_gpus_leave_room_for_its_weights_and_gradients(given: dict[str, Any]) -> None:
    engine = SGLangEngine(servers=1, placement="colocated", server_args=given)
    module, trainer = made(engine=engine)
    memory = memory_of(module, trainer)
    use_estimate(module, trainer, Data(), 1e8, ())
    kept = (memory.device["weights"] + memory.device["gradients"]) / 1e8
    assert 0.05 < kept < 0.5
    expected = given.get("mem_fraction_static", pytest.approx(USABLE_FRACTION - 0.1 - kept, abs=0.011))
    assert engine.source.args["mem_fraction_static"] == expected


@pytest.mark.parametrize(
    ("strategy", "policy", "is_compiled"),
    [
        pytest.param("auto", tiny_spec(config=CONFIG), True, id="one GPU"),
        pytest.param(FSDP2Strategy(), tiny_spec(config=CONFIG), True, id="FSDP2"),
        pytest.param(FSDP2Strategy(compile_layers=False), tiny_spec(config=CONFIG), False, id="compile_layers: false"),
        pytest.param("auto", moe_spec(max_position_embeddings=512), False, id="a mixture of experts"),
        pytest.param(Parallel3DStrategy(), tiny_spec(config=CONFIG), False, id="3D"),
    ],
)
def test_layers_that_a_gpu_compiles_keep_less(strategy: Any, policy: ModelSpec, is_compiled: bool) -> None:
    settings = TrainerSettings.of({"accelerator": "gpu", "devices": 1, "strategy": strategy})
    run = planned_run(module_of(policy), settings, Data())
    assert run.roles[0].is_compiled is is_compiled
    eager = replace(run, roles=(replace(run.roles[0], is_compiled=False),))
    before, after = (rank_memories(each)[0].device["activations"] for each in (eager, run))
    assert (0.5 * before < after < 0.7 * before) if is_compiled else after == before
