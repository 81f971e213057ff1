"""Memory on paper against real models, optimizers, caches and experience; its advice against its own formulas."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_cases import moe_spec
from tiny import random_trajectories, tiny_spec
from transformers import DynamicCache

from benchmarks.families import family_spec
from lightrl import DPO, GRPO, PPO, SFT, RewardModel, Trainer
from lightrl.algorithms import AdaptiveKL, ReferenceKL
from lightrl.algorithms.supervised import SupervisedModule
from lightrl.callbacks.self_play import SelfPlay
from lightrl.engines import LocalEngine
from lightrl.engines.engine import PlannedEngine
from lightrl.models import LoRA, ModelSpec, Role, RoleMesh
from lightrl.models.model_spec import cache_argument
from lightrl.models.muon import MuonWithAdamW
from lightrl.module import RLModule
from lightrl.plan.advice import Misfit, misfits
from lightrl.plan.costs import TRAJECTORY_BYTES, USABLE_FRACTION, experience_bytes
from lightrl.plan.memory import PlannedRun, decoding_rows, engine_memory, rank_memories, role_cost
from lightrl.plan.planned_run import planned_run, planned_training
from lightrl.plan.sizes import ModelSize
from lightrl.strategies import FSDP2Strategy, Parallel3DStrategy, ShardedExperience
from lightrl.strategies.sharded_experience import TokenRows
from lightrl.testing import TINY_CONFIG
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, ServerForm, block_fp8

CONFIG = {**TINY_CONFIG, "max_position_embeddings": 256}  # tokens: prompts and 128 new ones
LARGE_CONFIG = {**CONFIG, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 2000}


class Data:
    batch_size = 6
    max_prompt_tokens = 20


def plan_of(module: RLModule, **settings: Any) -> PlannedRun:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)
    return planned_run(module, trainer, Data())


@pytest.fixture(scope="module")
def ppo() -> PlannedRun:
    sampling = Sampling(max_new_tokens=30)
    return plan_of(PPO(tiny_spec(config=CONFIG), reward=len, group_size=2, microbatch_tokens=64, sampling=sampling))


def large(**settings: Any) -> PlannedRun:
    """A run whose activations, whole gradients and state are all worth counting."""
    module = GRPO(tiny_spec(config=LARGE_CONFIG), reward=len, group_size=32, microbatch_tokens=4096)
    return replace(plan_of(module), engine=None, **settings)


def spread(planned: PlannedRun, world: int) -> PlannedRun:
    role = replace(planned.roles[0], ranks=range(world))
    return replace(planned, world=world, layout="FSDP2", roles=(role,))


def misfits_of(planned: PlannedRun, available_bytes: float) -> list[Misfit]:
    return list(misfits(planned, available_bytes / USABLE_FRACTION))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_state_is_that_of_real_models_and_their_optimizer(ppo: PlannedRun, kind: Any) -> None:
    module = PPO(tiny_spec(config=CONFIG), reward=len, optimizer=kind)
    ppo = ppo if kind == "adamw" else plan_of(module)
    for planned, role in zip(ppo.roles, module.models().values(), strict=True):
        model: Any = role.load_model()
        parameters = list(model.parameters())
        group = {"params": parameters, "lr": 0.1, "weight_decay": 0.0}
        optimizer: Any = MuonWithAdamW(model, [group]) if kind == "muon" else torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        states = optimizer.state.values()
        moments = [value for state in states for value in state.values() if value.dim()]
        cost = role_cost(ppo, planned)
        assert planned.parameters == planned.trained == sum(value.numel() for value in parameters)
        assert cost.weights == sum(value.nbytes for value in parameters)
        assert cost.gradients == sum(value.grad.nbytes for value in parameters)
        assert cost.moments == sum(value.nbytes for value in moments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_have_gradients_and_moments(dtype: str) -> None:
    pytest.importorskip("peft")
    role = Role(tiny_spec(config=CONFIG, dtype=dtype), lora=LoRA(rank=2))
    run = plan_of(GRPO(role, reward=len))
    (planned,) = run.roles
    model: Any = role.load_model()
    trained = [value for value in model.parameters() if value.requires_grad]
    assert planned.parameters == sum(value.numel() for value in model.parameters())
    assert 0 < planned.trained == sum(value.numel() for value in trained)
    cost = role_cost(run, planned)
    assert cost.weights == sum(value.nbytes for value in model.parameters())
    assert cost.gradients == cost.moments / 2 == sum(value.nbytes for value in trained)


def test_a_base_in_4_bits_takes_what_the_real_one_does(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    tiny_spec(config=LARGE_CONFIG).load_model().save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), tokenizer="lightrl.testing.char_tokenizer", quantization="nf4")
    planned, model = plan_of(GRPO(role := Role(spec, lora=LoRA(rank=2)), reward=len)), role.load_model()
    real = sum(item.nbytes for items in (model.parameters(), model.buffers()) for item in items)
    assert role_cost(planned, planned.roles[0]).weights == pytest.approx(real, rel=0.01)


def test_a_frozen_reference_has_weights_only() -> None:
    planned = plan_of(GRPO(tiny_spec(config=CONFIG), reward=len, reference=ReferenceKL(0.1, tiny_spec(config=CONFIG))))
    cost = role_cost(planned, planned.roles[1])
    assert planned.roles[1].name == "reference"
    assert cost.weights == 4 * planned.roles[1].parameters
    assert cost.gradients == cost.moments == cost.sent == 0


def test_only_a_moving_reference_stays_float32_in_a_bfloat16_run() -> None:
    def width(decay: float | None) -> int:
        reference = AdaptiveKL(0.1, tiny_spec(config=CONFIG, dtype="bfloat16"), decay=decay)
        planned = plan_of(PPO(tiny_spec(config=CONFIG), reward=len, reference=reference), precision="bf16-true")
        return next(role.width for role in planned.roles if role.name == "reference")

    assert (width(None), width(0.9)) == (2, 4)


def test_experience_is_that_of_an_iteration() -> None:
    trajectories = random_trajectories(32, 4, prompt_tokens=(20, 20), completion_tokens=(30, 30))
    shape = (len(trajectories), 50)
    made = ShardedExperience.from_trajectories(trajectories)
    scores = TokenRows.of_padded(torch.zeros(shape), made.rows["lengths"])
    made = made.with_tensors(dict.fromkeys(("values", "advantages", "returns"), scores))
    real = sum(rows.nbytes for values in made.tokens.values() for rows in values.rows)
    numbers = sum(value.nbytes for value in made.rows.values())
    planned = experience_bytes(3) * shape[0] * shape[1]
    assert planned == real
    assert planned <= real + numbers <= 1.1 * planned  # the numbers of each row, of which the plan has none
    fields = ("token_ids", "behavior_logprobs", "loss_mask", "weight_versions")
    held = sum(getattr(item, name).nbytes for item in trajectories for name in fields)
    kept = TRAJECTORY_BYTES * shape[0] * shape[1]
    assert kept <= held <= 1.1 * kept  # masks and versions are kept as runs


def test_an_asynchronous_run_keeps_the_weights_that_sampled(ppo: PlannedRun) -> None:
    (on_policy,), (late,) = rank_memories(ppo), rank_memories(replace(ppo, max_staleness=2))
    assert sum(late.host.values()) - sum(on_policy.host.values()) == 3 * role_cost(ppo, ppo.roles[0]).gradients
    assert ppo.roles[0].name == "policy"


def test_the_scores_of_an_iteration_are_counted(ppo: PlannedRun) -> None:
    assert ppo.num_scores == 3  # values, advantages, returns
    assert plan_of(PPO(tiny_spec(config=CONFIG), reward=len, num_minibatches=2, decoupled=True)).num_scores == 4


def test_key_values_are_those_of_a_real_cache(ppo: PlannedRun) -> None:
    model: Any = tiny_spec(config=CONFIG).load_model()
    cache = DynamicCache()
    model(torch.ones(3, ppo.longest, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert ppo.engine is not None
    weights, key_values = engine_memory(ppo, ppo.engine, rows=3)
    assert key_values == real
    assert weights == sum(value.nbytes for value in model.parameters())


def test_block_fp8_takes_what_a_servers_folder_does(ppo: PlannedRun) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_attention_heads": 2}
    model: Any = tiny_spec(config={**CONFIG, **sizes, "num_key_value_heads": 2}).load_model()
    config = block_fp8.quantized_config(model.config)
    form = ServerForm.of(config, torch.bfloat16)
    tensors = dict(form.tensors(form.quantized(Bucket(dict(model.named_parameters())))))
    role = replace(ppo.roles[0], size=ModelSize.of(model))
    engine = PlannedEngine("SGLangEngine", "servers", is_block_fp8=True)
    weights, _ = engine_memory(replace(ppo, roles=(role,)), engine)
    assert weights == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()), rel=0.01)  # norms, scales


def test_what_is_offloaded_waits_in_the_host() -> None:
    def memory(*offloads: str, **settings: Any) -> Any:
        (found,) = rank_memories(replace(spread(large(), 2), offloads=offloads, **settings))
        return found

    kept, everything = memory(), memory("parameters")
    assert "activations" not in kept.host
    assert everything.host["moments"] == kept.device["moments"]
    assert "moments" not in everything.device
    moments = memory("optimizer")
    working = kept.device["activations"] + kept.device["logits"]
    assert moments.host["moments"] == kept.device["moments"]
    waiting = kept.device["moments"] - moments.device["moments"]  # until activations, except one layer's, make room
    assert 0 < waiting < working
    for recomputes in (False, True):
        before, after = (memory(*each, checkpoint_activations=recomputes) for each in ((), ("activations",)))
        assert after.device["activations"] < before.device["activations"]
        assert after.host["activations"] > 0.9 * (before.device["activations"] - after.device["activations"])
        assert after.device["logits"] == before.device["logits"]


def test_cp_exchanges_once_more_only_if_layers_are_recomputed() -> None:
    planned = spread(large(), 2)
    planned = replace(planned, roles=(replace(planned.roles[0], cp=2),))

    def sent(*offloads: str, recomputes: bool) -> float:
        run = replace(planned, offloads=offloads, checkpoint_activations=recomputes)
        return role_cost(run, run.roles[0]).sent

    assert sent("activations", recomputes=False) == sent(recomputes=False)
    assert sent("activations", recomputes=True) == sent(recomputes=True) > sent(recomputes=False)


def test_fsdp2_divides_the_state_and_a_mesh_keeps_it_from_other_ranks() -> None:
    whole = plan_of(PPO(tiny_spec(config=CONFIG), reward=len))
    split = plan_of(PPO(tiny_spec(config=CONFIG), reward=len), devices=4, strategy=FSDP2Strategy())
    later, one = rank_memories(split)[-1], rank_memories(whole)[0]
    assert 4 * later.device["moments"] == one.device["moments"]
    roles = Role(tiny_spec(config=CONFIG), mesh=RoleMesh(0, 1)), Role(tiny_spec(config=CONFIG), mesh=RoleMesh(1, 2))
    meshes = plan_of(PPO(roles[0], critic=roles[1], reward=len), devices=3, strategy=FSDP2Strategy())
    first, others = rank_memories(meshes)
    assert others.ranks == range(1, 3)
    assert first.device["weights"] == role_cost(meshes, meshes.roles[0]).weights == 4 * meshes.roles[0].parameters
    assert others.device["weights"] == 2 * meshes.roles[1].parameters
    assert "KV cache" in first.device
    assert "KV cache" not in others.device


def test_parameters_that_stay_gathered_are_counted_whole() -> None:
    module = GRPO(tiny_spec(config=CONFIG), reward=len)
    freed, kept = (
        plan_of(module, devices=2, strategy=FSDP2Strategy(reshard_after_forward=frees, reduce_every_microbatch=True))
        for frees in (True, False)
    )
    size = kept.roles[0].size
    reduced = (4 + 4) * size.layers[0].parameters  # a layer's gradient, and what is sent of it
    assert role_cost(kept, kept.roles[0]).gathered == 4 * size.parameters + reduced
    two_layers = 4 * (2 * size.layers[0].parameters + size.outside_layers)
    assert role_cost(freed, freed.roles[0]).gathered == two_layers + reduced


def test_divided_experts_are_gathered_by_their_own_ranks_alone() -> None:
    """Two layers of four experts, gates and ups of which are [48, 32] and downs [32, 24]."""
    module = GRPO(moe_spec(max_position_embeddings=256), reward=len, group_size=8, microbatch_tokens=64)
    costs = {}
    for ep in (1, 2):
        planned = plan_of(module, devices=4, strategy=FSDP2Strategy(ep=ep))
        costs[ep] = role_cost(planned, planned.roles[0])
    experts = 2 * 4 * (48 * 32 + 32 * 24)
    assert planned.roles[0].size.expert_parameters == experts
    # Half of the experts: in the gradients of all layers, in two gathered ones (here all), twice in a layer's gradient.
    assert costs[1].gathered - costs[2].gathered == pytest.approx(4 * (experts / 2) * (1 + 1 + 2 / 2))
    assert costs[1].gathered >= 4 * experts * 3
    assert costs[1].weights == costs[2].weights


def test_merged_experts_are_kept_for_the_backward_pass() -> None:
    """Two layers of four experts, whose gates and ups are [48, 32]; a checkpointed layer keeps only its own."""
    kept = {}
    for targets in ((), ("mlp.experts.gate_up_proj",)):
        lora = LoRA(rank=2, target_modules=("q_proj",), target_parameters=targets)
        policy = Role(moe_spec(max_position_embeddings=256), lora=lora)
        run = plan_of(GRPO(policy, reward=len, group_size=8, microbatch_tokens=64))
        for checkpoints in (False, True):
            run = replace(run, checkpoint_activations=checkpoints)
            kept[bool(targets), checkpoints] = role_cost(run, run.roles[0]).activations
    for checkpoints, num_layers in ((False, 2), (True, 1)):
        more = kept[True, checkpoints] - kept[False, checkpoints]
        assert 2 * num_layers * 4 * 4 * (48 * 32 + 32 * 24) >= more >= num_layers * 4 * 4 * 48 * 32


@pytest.mark.parametrize("ep", [2, 4])
def test_the_advised_ep_is_enough_and_a_smaller_one_is_not(ep: int) -> None:
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # which tp cannot divide
    spec = moe_spec(max_position_embeddings=256, **heads)
    module = GRPO(spec, reward=len, group_size=8, microbatch_tokens=1)
    settings = {"activation_checkpointing": True, "reduce_every_microbatch": True}
    planned = replace(plan_of(module, devices=4, strategy=FSDP2Strategy(**settings)), engine=None)
    planned = replace(planned, offloads=["optimizer", "activations"])  # everything that saves memory
    (memory,), (half,) = (rank_memories(replace(planned, ep=size)) for size in (ep, ep // 2))
    assert memory.total < half.total
    advised = misfits_of(planned, 1.001 * memory.total)[0].fix
    assert re.search(r"trainer.strategy's ep to (\d)", advised)[1] in ("2", "4")[ep // 4 :]  # type: ignore[index]


def test_ranks_that_share_rows_keep_their_own_tokens_alone() -> None:
    module = GRPO(tiny_spec(config=CONFIG), reward=len, microbatch_tokens=200)
    planned = plan_of(module, devices=4, strategy=FSDP2Strategy(cp=2))
    assert planned.roles[0].dp == 2
    whole, shared = (
        role_cost(run, run.roles[0])
        for run in (plan_of(module, devices=4, strategy=FSDP2Strategy(num_replicas=2)), planned)
    )
    assert shared.weights == whole.weights / 2
    assert 0.5 < shared.activations / whole.activations < 0.6  # and the attention's output before it is exchanged


def test_cp_is_advised_if_nothing_else_helps() -> None:
    planned = spread(large(checkpoint_activations=True, reduce_every_microbatch=True), 4)
    planned = replace(planned, refusal=lambda run: "not in this test" if run.layout == "3D" else None)
    planned = replace(planned, microbatch_tokens=1)  # the longest trajectory is what is left
    one, two = (rank_memories(replace(planned, roles=(replace(planned.roles[0], cp=cp),)))[0].device for cp in (1, 2))
    assert two["activations"] < 0.6 * one["activations"]
    planned = replace(planned, longest=10_000, offloads=["optimizer", "activations"])  # everything that saves memory
    (two_offloaded,) = rank_memories(replace(planned, roles=(replace(planned.roles[0], cp=2),)))
    assert re.search("trainer.strategy's cp to [24]", misfits_of(planned, 1.001 * two_offloaded.total)[0].fix)


@pytest.mark.parametrize(("family", "is_advised"), [("llama", True), ("qwen3_5_text", False)])
def test_cp_is_advised_only_where_attention_alone_mixes_tokens(family: str, is_advised: bool) -> None:
    module = GRPO(family_spec(family), reward=len, microbatch_tokens=1, sampling=Sampling(max_new_tokens=32))
    planned = replace(plan_of(module), engine=None, longest=10_000, checkpoint_activations=True)
    planned = replace(spread(planned, 4), reduce_every_microbatch=True)
    (two,) = rank_memories(replace(planned, roles=(replace(planned.roles[0], cp=2),)))
    assert misfits_of(planned, 1.001 * two.total)[0].fix.count(" cp to ") == is_advised


def test_3d_divides_the_state_over_pp_and_tp() -> None:
    strategy = Parallel3DStrategy(tp=2)
    planned = plan_of(GRPO(tiny_spec(config=CONFIG), reward=len), devices=2, strategy=strategy)
    assert role_cost(planned, planned.roles[0]).weights == pytest.approx(2 * planned.roles[0].parameters, rel=0.01)


def test_the_advised_microbatch_fits_and_a_larger_one_does_not() -> None:
    planned = large()
    memory = rank_memories(planned)[0]
    available_bytes = memory.total - 0.7 * memory.device["activations"]
    found = misfits_of(planned, available_bytes)[0]
    assert found.cause == "activations"
    assert sum(found.device.values()) == memory.total
    advised = int(found.fix.removeprefix("set model.microbatch_tokens to at most "))
    assert rank_memories(replace(planned, microbatch_tokens=advised))[0].total <= available_bytes
    assert rank_memories(replace(planned, microbatch_tokens=advised + 1))[0].total > available_bytes


def test_a_smaller_microbatch_that_keeps_whole_gradients_is_counted_with_them() -> None:
    planned = replace(spread(large(), 2), microbatch_tokens=10**6)
    total = rank_memories(planned)[0].total
    available_bytes = 0.97 * total
    found = misfits_of(planned, available_bytes)[0]
    advised = int(found.fix.removeprefix("set model.microbatch_tokens to at most "))
    memory = rank_memories(replace(planned, microbatch_tokens=advised))[0]
    assert memory.device["gathered"] > rank_memories(planned)[0].device["gathered"]
    assert memory.total <= available_bytes < rank_memories(replace(planned, microbatch_tokens=advised + 1))[0].total


def test_the_advised_number_of_ranks_fits_with_all_settings_and_half_of_it_does_not() -> None:
    def rows_alone(run: PlannedRun) -> str | None:
        return "not in this test" if run.layout == "3D" or run.roles[0].cp > 1 else None

    planned = replace(large(), microbatch_tokens=64, refusal=rows_alone)  # whole gradients wait
    changed = replace(planned, checkpoint_activations=True, reduce_every_microbatch=True)
    changed = replace(changed, offloads=["optimizer", "activations"])
    half, enough = (rank_memories(spread(changed, num))[0].total for num in (2, 4))
    assert enough < half
    fix = misfits_of(planned, 1.0001 * enough)[0].fix
    assert fix.startswith("set trainer.strategy to FSDP2Strategy and ")
    assert fix.endswith(" and trainer.devices · trainer.num_nodes to 4")


def test_too_many_key_values_lower_the_engines_batch() -> None:
    engine = PlannedEngine("LocalEngine", "rank 0", width=4, max_rows=256)
    planned = replace(large(), engine=engine, microbatch_tokens=64)
    memory = rank_memories(planned)[0]
    available_bytes = memory.total - memory.device["KV cache"] / 2
    number = int(misfits_of(planned, available_bytes)[0].fix.removeprefix("set trainer.engine's max_batch to at most "))
    assert rank_memories(replace(planned, engine=replace(engine, max_rows=number)))[0].total <= available_bytes
    assert rank_memories(replace(planned, engine=replace(engine, max_rows=number + 1)))[0].total > available_bytes


def test_the_opponent_of_self_play_is_counted_with_the_pool_on_rank_0() -> None:
    module = GRPO(tiny_spec(config=CONFIG), reward=len, group_size=4)

    def planned_with(*callbacks: Any) -> PlannedRun:
        engine = LocalEngine(dtype="bfloat16")
        return plan_of(module, devices=2, strategy=FSDP2Strategy(), engine=engine, callbacks=[*callbacks])

    alone, planned = rank_memories(planned_with()), planned_with(SelfPlay(fraction=0.5, pool_size=3))
    first, other = rank_memories(planned)
    assert alone[0].device.items() <= first.device.items()
    assert first.device["opponent's weights"] == first.device["engine weights"] == 2 * planned.roles[0].parameters
    assert first.device["opponent's KV cache"] == first.device["KV cache"] / 2
    assert first.host["older versions, only on rank 0"] == 3 * 4 * planned.roles[0].parameters
    assert (other.device, other.host) == (alone[1].device, alone[1].host)


def test_a_server_runs_as_many_trajectories_as_its_memory_holds() -> None:
    engine = PlannedEngine("SGLangEngine", "servers", servers=2)
    planned = replace(large(max_staleness=1), engine=engine)
    weights, each = engine_memory(planned, engine, rows=1)
    device_bytes = (weights + 40.5 * each) / USABLE_FRACTION
    assert decoding_rows(planned, engine, device_bytes) == 40
    assert decoding_rows(planned, engine, 100 * device_bytes) == 6 * 32 * 2 / 2  # all of a server's
    shared = replace(planned, shares_gpus=True)  # the ranks' weights and gradients stay
    assert 1 <= decoding_rows(shared, engine, device_bytes) < 40


def test_a_server_that_is_too_small_needs_more_gpus() -> None:
    planned = replace(large(), engine=PlannedEngine("SGLangEngine", "servers"))
    assert planned.engine is not None
    available_bytes = 0.6 * sum(engine_memory(planned, planned.engine, rows=1))
    found = misfits_of(planned, available_bytes)[-1]
    assert found.where == "a server's GPU"
    assert found.fix == "set trainer.engine's tp to 2"
    (running,) = misfits_of(
        replace(planned, engine=PlannedEngine("SGLangEngine", "servers", starts_servers=False)), available_bytes
    )[-1:]
    assert running.fix == "use servers with more GPUs each (tp)"


@pytest.mark.parametrize("kind", [SFT, DPO, RewardModel])
def test_a_module_that_trains_on_data_has_the_state_of_its_real_models(kind: type[SupervisedModule]) -> None:
    module = kind(tiny_spec(config=CONFIG), **({"reference": tiny_spec(seed=1)} if kind is DPO else {}))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=3)
    planned = planned_training(module, trainer, Data())
    module.configure_model()
    for role, (model, _) in zip(planned.roles, module.loaded_models().values(), strict=True):
        assert role.parameters == sum(value.numel() for value in model.parameters())
        assert role.trained == sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert planned.trajectories == (6 if kind is SFT else 12)
    assert planned.batches_per_update == 3
    shares = {4: 2, 6: 1, 8: 1}  # rows, or pairs, of a batch of 6 on each rank
    rows = 1 if kind is SFT else 2
    assert {num: planned.over(num).microbatch for num in shares} == {
        num: share * rows * planned.longest for num, share in shares.items()
    }
    (memory,) = rank_memories(planned)
    assert not memory.host
    cost = role_cost(planned, planned.roles[0])
    assert memory.device["weights"] == 4 * sum(role.parameters for role in planned.roles)
    assert memory.device["moments"] == cost.moments == 8 * planned.roles[0].trained


def test_the_batch_that_fits_is_a_number_of_rows() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    planned = planned_training(SFT(tiny_spec(config=LARGE_CONFIG)), trainer, Data())
    planned = replace(planned, prompts=512)
    (memory,) = rank_memories(planned)
    available_bytes = memory.total - memory.device["activations"] / 2
    (misfit,) = misfits_of(planned, available_bytes)
    (number,) = re.findall(r"set data.batch_size to at most (\d+)", misfit.fix)
    fitting, larger = (replace(planned, prompts=size) for size in (int(number), int(number) + 1))
    assert rank_memories(fitting)[0].total <= available_bytes < rank_memories(larger)[0].total
