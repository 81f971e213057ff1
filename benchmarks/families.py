"""Tests families of models: which ones train exactly, which are refused and why. Generates docs/models.md.

    python -m benchmarks.families [FAMILY …]
    python -m benchmarks.families --page
    python -m benchmarks.families --replay [FAMILY …]

A tiny random model of each family is saved with `save_pretrained` and trained from that folder. The first command
prints a JSON line per family and stores the lines in `benchmarks/families.jsonl`, from which the second writes the
tables of docs/models.md. The third prints the table rows of benchmarks/replay.md.

    outcome           exact; refused, with lightrl's reason in `why`; failed or wrong, a bug of lightrl
    max_abs_dlogp     largest logprob difference, in nats, engine − trainer, in two GRPO steps with LocalEngine
    packed            whether trajectories may share a row; packed logprobs then equal those of rectangles
    fsdp2_grad_error  relative error of the gradients of FSDP2Strategy on two ranks against one process. Each rank
                      reads the folder, and the weights sent to servers equal the folder's
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import lightrl
from benchmarks.trajectories import make_experience
from lightrl import GRPO, LocalEngine, LoRA, ModelSpec, Prompt, PromptDataModule, RLCallback, Sampling
from lightrl.columns import NATIVE
from lightrl.errors import LightRLError
from lightrl.experience import Experience
from lightrl.models import Outputs, Role
from lightrl.models.expert_parallel import expert_mesh
from lightrl.models.routes import Routes
from lightrl.models.tuning import held_tensors
from lightrl.strategies import FSDP2Strategy, LogprobSettings, ProcessRanks, SingleModel
from lightrl.strategies.empty_model import empty_model
from lightrl.strategies.fsdp2_model import FSDP2Model, whole
from lightrl.strategies.ranks.processes import watch_all
from lightrl.testing import QUIET, TINY_CONFIG

ROWS = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families -->", "<!-- end -->"
TOLERANCE = 1e-5  # nats; rounding of float32 over two layers
FSDP2_S = 120.0
TOKENIZER = "lightrl.testing.char_tokenizer"
# Rows of unlike lengths, longer than the windows, chunks and sparse selections below.
LENGTHS = (3, 24, 7, 1, 17, 12, 9, 21)

_PLAIN: dict[str, Any] = {name: value for name, value in TINY_CONFIG.items() if name not in ("model_type", "head_dim")}
_PLAIN |= {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_HEADS = {**_PLAIN, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    **_PLAIN, **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
}  # fmt: skip
_INDEXED = {**_LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
_LINEAR = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
_SHARED = {"shared_expert_intermediate_size": 24}
_WINDOW = {"sliding_window": 8}
_HYBRID_WINDOW = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_PLACED_TOWER = {**_QWEN_TOWER, "patch_size": 4, "num_position_embeddings": 16}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_IMAGE_IDS = {"image_token_id": 14, "video_token_id": 15, "vision_start_token_id": 13, "vision_end_token_id": 12}

# Kind → model_type → the config of a model of two layers.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "llama": _HEADS,
        "qwen2": _PLAIN,
        "qwen3": _HEADS,
        "mistral": _HEADS,
        "gemma": _HEADS,
        "gemma2": {**_HEADS, **_WINDOW},
        "gemma3_text": {**_HEADS, **_HYBRID_WINDOW},
        "gemma4_text": {**_HEADS, **_HYBRID_WINDOW, "global_head_dim": 8, "vocab_size_per_layer_input": 17},
        "phi3": _PLAIN,
        "olmo2": _PLAIN,
        "olmo3": {**_PLAIN, **_WINDOW},
        "smollm3": _PLAIN,
        "cohere2": {**_HEADS, **_WINDOW},
        "granite": _PLAIN,
        "glm4": _HEADS,
        "ernie4_5": _HEADS,
        "seed_oss": _HEADS,
        "ministral3": _HEADS,
        "nemotron": _HEADS,
        "exaone4": {**_HEADS, **_WINDOW},
        "apertus": _PLAIN,
        "hunyuan_v1_dense": _HEADS,
        "starcoder2": _PLAIN,
    },
    "mixture of experts": {
        "qwen3_moe": {**_HEADS, **_EXPERTS},
        "qwen2_moe": {**_PLAIN, **_EXPERTS, **_SHARED},
        "mixtral": {**_HEADS, **_LOCAL_EXPERTS},
        "deepseek_v3": _LATENT,
        "deepseek_v2": {**_LATENT, "topk_method": "greedy"},
        "deepseek_v32": _INDEXED,
        "glm_moe_dsa": _INDEXED,
        "glm4_moe": {**_HEADS, **_ROUTED},
        "glm4_moe_lite": _LATENT,
        "gpt_oss": {**_HEADS, **_LOCAL_EXPERTS, **_WINDOW},
        "olmoe": {**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2},
        "minimax_m2": {**_HEADS, **_LOCAL_EXPERTS},
        "granitemoe": {**_PLAIN, **_LOCAL_EXPERTS},
        "ernie4_5_moe": {**_HEADS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
        "llama4_text": {
            **_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
        "dots1": {**_HEADS, **_ROUTED},
        "hunyuan_v1_moe": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    },
    "with an image tower, on text": {
        "llava": {
            "text_config": {"model_type": "llama", **_HEADS},
            "image_token_id": 14,
            "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        },
        "gemma3": {
            "text_config": {**_HEADS, **_HYBRID_WINDOW},
            "mm_tokens_per_image": 4,
            "image_token_id": 14,
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        },
        "gemma4": {
            "text_config": {**_HEADS, **_HYBRID_WINDOW, "global_head_dim": 8, "vocab_size_per_layer_input": 17},
            "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8},
            "audio_config": None,
            "image_token_id": 14,
            "video_token_id": 15,
            "audio_token_id": 13,
        },
        "mistral3": {
            "text_config": {"model_type": "mistral", **_HEADS},
            "image_token_id": 14,
            "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 8},
        },
        "qwen2_5_vl": {
            "text_config": {**_HEADS, **_ROTARY},
            "vision_config": {**_QWEN_TOWER, "patch_size": 4},
            **_IMAGE_IDS,
        },
        "qwen3_vl": {
            "text_config": {**_HEADS, **_ROTARY},
            **_IMAGE_IDS,
            "vision_config": {**_PLACED_TOWER, "deepstack_visual_indexes": [0]},
        },
        "qwen3_vl_moe": {
            "text_config": {**_HEADS, **_EXPERTS, **_ROTARY},
            **_IMAGE_IDS,
            "vision_config": {**_PLACED_TOWER, "deepstack_visual_indexes": [0]},
        },
    },
    "hybrid": {
        "qwen3_next": {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED},
        "qwen3_5": {"text_config": {**_HEADS, **_LINEAR}, "vision_config": _PLACED_TOWER, **_IMAGE_IDS},
        "qwen3_5_moe": {
            "text_config": {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED},
            "vision_config": _PLACED_TOWER,
            **_IMAGE_IDS,
        },
        "qwen3_5_text": {**_HEADS, **_LINEAR},
        "qwen3_5_moe_text": {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED},
        "olmo_hybrid": {**_PLAIN, **_LINEAR},
        "lfm2": {**_PLAIN, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "lfm2_moe": {**_PLAIN, **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "falcon_h1": {
            **_HEADS,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
        },
        "nemotron_h": {
            **_HEADS,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
        },
        "jamba": {
            **_PLAIN,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
        "bamba": {**_PLAIN, **_MAMBA, "attn_layer_indices": [1]},
        "granitemoehybrid": {
            **_PLAIN,
            **_LOCAL_EXPERTS,
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 24,
        },
        "zamba2": {
            **_PLAIN,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
        },
        "minimax": {
            **_HEADS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "mamba2": {
            "vocab_size": 17,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "initializer_range": 0.2,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
    },
}


@dataclass(frozen=True)
class Row:
    """The measurements of one family; None for those that were not reached."""

    family: str
    outcome: str = "exact"
    max_abs_dlogp: float | None = None
    packed: bool | None = None
    fsdp2_grad_error: float | None = None
    why: str = ""


class _Prompts(PromptDataModule):
    def __init__(self) -> None:
        super().__init__(None, batch_size=2)

    def make_prompts(self, split: str) -> list[Prompt]:
        ids = [[3 + row * column % 10 for column in range(1, 3 + row % 4)] for row in range(4)]
        return [Prompt(f"{split}-{row}", token_ids=token_ids) for row, token_ids in enumerate(ids)]


class _Policy(GRPO):
    def reward(self, trajectory: lightrl.Trajectory) -> float:
        return float(sum(trajectory.completion_ids) % 3)


class _Differences(RLCallback):
    """Collects the largest logprob difference, and whether the engine has the trainer's weights."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.is_synced = True

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        (outputs,) = module.parallel_models["policy"].forward([experience])
        difference = (outputs.logprobs - experience.behavior_logprobs)[experience.loss_mask].abs()
        self.largest = max(self.largest, float(difference.max()))

    def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
        policy = module.policy.state_dict()
        served = trainer.engine.read_weights()
        self.is_synced &= all(torch.equal(value, policy[name]) for name, value in served.items())


def family_spec(family: str) -> ModelSpec:
    """Returns the spec of a model of the family with random weights."""
    config = next(kind[family] for kind in FAMILIES.values() if family in kind)
    return ModelSpec(config={"model_type": family, **config}, tokenizer=TOKENIZER, seed=0)


def make_folder(family: str, folder: str) -> ModelSpec:
    """Saves a random model of the family; returns the spec that loads it."""
    model = family_spec(family).load_model()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in held_tensors(model).items():
        if "correction_bias" in name:  # zero in a new model, so that a lost one would not show
            tensor.data.normal_(std=0.3, generator=generator)
        elif name.endswith("dt_bias"):  # from states that keep everything to states that forget within some tokens
            tensor.data.copy_(torch.linspace(-8, 1, tensor.numel()))
    model.save_pretrained(folder)
    return ModelSpec(path=folder, tokenizer=TOKENIZER)


def measure(family: str, *, fsdp2: bool = True) -> Row:
    """Returns the family's row; `fsdp2=False` leaves out the two ranks."""
    row = Row(family)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spec = make_folder(family, folder)
            row = dataclasses.replace(row, max_abs_dlogp=_train(spec))
            row = dataclasses.replace(row, packed=_is_packed(spec))
            if fsdp2:
                row = dataclasses.replace(row, fsdp2_grad_error=_check("fsdp2_grad_error", measure_ranks(folder)))
        except Exception as error:  # noqa: BLE001
            is_refusal = isinstance(error, (ValueError, LightRLError)) and not isinstance(error, _Wrong)
            outcome = "wrong" if isinstance(error, _Wrong) else "refused" if is_refusal else "failed"
            if outcome == "failed":
                logging.getLogger(__name__).error("%s: %s", family, traceback.format_exc())
            return dataclasses.replace(row, outcome=outcome, why=f"{error}" if is_refusal else f"{error!r:.600}")
    return row


class _Wrong(ArithmeticError):
    """Raised if numbers differ."""


def _check(name: str, value: float) -> float:
    if not value <= TOLERANCE:
        raise _Wrong(f"{name} is {value:.2g}")
    return value


def _train(spec: ModelSpec) -> float:
    """Trains two steps; returns the largest logprob difference."""
    watch = _Differences()
    trainer = lightrl.Trainer(
        max_steps=2,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        engine=LocalEngine(),
        callbacks=[watch],
        **QUIET,
    )
    trainer.fit(
        _Policy(spec, group_size=4, sampling=Sampling(max_new_tokens=14), lr=1e-3, microbatch_tokens=256),
        datamodule=_Prompts(),
    )
    if not watch.is_synced:
        raise _Wrong("the engine's weights differ from the trainer's")
    return _check("max_abs_dlogp", watch.largest)


class _ReplayDifferences(RLCallback):
    """Compares a policy in float32 with the engine that sampled in another precision, with and without its routes."""

    def __init__(self) -> None:
        self.routed_otherwise = 0.0  # share of tokens with other experts in some layer
        self.native = self.replayed = 0.0  # largest logprob difference, nats

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        def largest(experience: Experience) -> float:
            (outputs,) = module.parallel_models["policy"].forward([experience])
            return float((outputs.logprobs - experience.behavior_logprobs)[experience.loss_mask].abs().max())

        self.native, self.replayed = largest(experience.without(["routes"])), largest(experience)
        routes = Routes(module.policy)
        with torch.no_grad(), routes.recording() as recorded:
            module.policy(input_ids=experience.token_ids[:, :-1], use_cache=False)
        assert experience.routes is not None
        theirs = experience.routes[:, :-1].reshape(recorded().shape)
        pairs = (ids.unflatten(1, (len(routes.blocks), -1)).sort(-1).values for ids in (recorded(), theirs))
        is_other = torch.ne(*pairs).any(-1).any(-1)
        self.routed_otherwise = float(is_other[(theirs != NATIVE).any(-1)].float().mean())


def measure_replay(family: str) -> _ReplayDifferences:
    """Samples 896 tokens in bfloat16 with a larger model of the family, and computes their logprobs in float32."""
    spec = family_spec(family)
    config = {**(spec.config or {}), "hidden_size": 128, "num_hidden_layers": 8, "initializer_range": 0.06}
    for name, value in config.items():
        if name.endswith("intermediate_size"):
            config[name] = 64
        elif value == _EXPERTS["num_experts"] and "experts" in name:
            config[name] = 32
        elif value == 2 and name in ("num_experts_per_tok", "moe_k", "moe_topk"):
            config[name] = 4
    watch = _ReplayDifferences()
    trainer = lightrl.Trainer(
        max_steps=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        engine=LocalEngine(dtype="bfloat16"),
        callbacks=[watch],
        **QUIET,
    )
    sampling = Sampling(max_new_tokens=56, min_new_tokens=56)
    policy = _Policy(dataclasses.replace(spec, config=config), group_size=8, sampling=sampling)
    trainer.fit(policy, datamodule=_Prompts())
    return watch


def _experience() -> Experience:
    return make_experience(4, LENGTHS, 17)


def _is_packed(spec: ModelSpec) -> bool:
    """Whether the family may be packed; if so, checks that its logprobs equal those of rows computed one by one."""
    model = spec.load_model()
    alone = SingleModel(model, LogprobSettings(), form="rectangles")
    try:
        packed = SingleModel(model, LogprobSettings(), form="packed")
    except ValueError:
        return False
    experience = _experience()
    one_by_one = [experience.select([row]) for row in range(len(experience))]
    (outputs,) = packed.forward([experience])
    for row, expected in enumerate(alone.forward(one_by_one)):
        width = expected.logprobs.shape[1]
        _check("packed", float((outputs.logprobs[row, :width] - expected.logprobs[0]).abs().max()))
    return True


def _loss(experience: Experience, outputs: Outputs) -> Tensor:
    return -(outputs.logprobs * experience.loss_mask * experience.rewards[:, None]).sum()


def measure_ranks(
    folder: str, num_ranks: int = 2, *, is_mixed: bool = False, lora: LoRA | None = None, **settings: Any
) -> float:
    """Compares ranks of FSDP2Strategy with one process; returns the relative error of the gradients.

    Args:
        folder: the model's folder, which the ranks read.
        is_mixed: whether to use `bf16-mixed` precision.
        lora: the adapters to train instead of the model's weights.
        settings: arguments of FSDP2Strategy.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.families"])
    here, there = context.Pipe()
    run = (num_ranks, folder, is_mixed, lora, settings)
    ranks = [
        context.Process(target=_run_rank, args=(there if rank == 0 else None, rank, *run)) for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    there.close()
    try:
        result = here.recv() if here.poll(FSDP2_S) else TimeoutError(f"the ranks took longer than {FSDP2_S:g} s")
    except EOFError:
        result = RuntimeError("a rank ended without an answer")
    for rank in ranks:
        rank.kill()
        rank.join()
    if isinstance(result, Exception):
        raise result
    return result


def _run_rank(results: Connection | None, *run: Any) -> None:
    quiet()
    try:
        result: float | Exception = _compare_ranks(*run)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        result = error
    if results is not None:
        results.send(result)
        results.close()
    os._exit(0)  # skips the shutdown of gloo's threads


def _compare_ranks(
    rank: int, num_ranks: int, folder: str, is_mixed: bool, lora: LoRA | None, settings: dict[str, Any]
) -> float:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    role = Role(ModelSpec(path=folder, tokenizer=TOKENIZER), lora=lora)
    strategy = FSDP2Strategy(**settings)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    axes = init_device_mesh("cpu", (num_ranks // strategy.cp, strategy.cp), mesh_dim_names=("dp", "cp"))
    control_group = dist.new_group(backend="gloo")
    watch = watch_all(control_group, main_address="127.0.0.1", hang_timeout_s=FSDP2_S)
    ranks = ProcessRanks(
        dp_group=axes["dp"].get_group(), control_group=control_group, device=torch.device("cpu"), watch=watch
    )
    if strategy.ep > 1:
        strategy._expert_mesh = expert_mesh("cpu", num_replicas=1, ep=strategy.ep)
    strategy._mesh, strategy.ranks, strategy.parallel_devices = mesh, ranks, [torch.device("cpu")]
    if is_mixed:
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_mixed)
    model = empty_model(role)
    strategy.shard(model)
    context_group = axes["cp"].get_group() if strategy.cp > 1 else None
    sharded = FSDP2Model(model, LogprobSettings(), ranks=ranks, context_group=context_group)
    experience = _experience()
    mine = [experience.select(range(ranks.dp_rank, len(experience), ranks.dp_size))]
    with autocast:
        sharded.forward_backward(mine, _loss, Tensor.backward)
    one = role.load_model()
    with autocast:
        SingleModel(one, LogprobSettings(), form="rectangles").forward_backward([experience], _loss, Tensor.backward)
    pairs = list(_gradients(model, one, ranks.dp_size))
    error = sum(float((left - right).square().sum()) for left, right in pairs)
    size = sum(float(right.square().sum()) for _, right in pairs)
    sent: dict[str, Tensor] = {}
    for bucket in sharded.full_parameters(2**14, names="checkpoint"):
        sent |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    if rank == 0 and lora is None:
        _compare_names(sent, folder)
    return float((error / size) ** 0.5)


def _gradients(model: torch.nn.Module, one: torch.nn.Module, dp_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns pairs of gradients: the ranks' averaged one, and that of one process."""
    expected = {name: parameter.grad for name, parameter in one.named_parameters()}
    for name, parameter in model.named_parameters():
        if (gradient := expected[name]) is None:
            continue
        assert parameter.grad is not None, name
        yield whole(parameter.grad) * dp_size, gradient


def _compare_names(sent: dict[str, Tensor], folder: str) -> None:
    """Raises if the parameters differ from the folder's in name, shape or value."""
    saved: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        saved |= load_file(file)
    if odd := sorted(sent.keys() ^ saved.keys()):
        raise _Wrong(f"the names {odd[:3]} are in the folder or in what is sent, but not in both")
    if odd := [name for name, value in sent.items() if not torch.equal(saved[name], value)]:
        raise _Wrong(f"{odd[:3]} are sent with other values than the folder's")


def with_tables(page: str, rows: Sequence[Row]) -> str:
    """Returns the page with the tables of these rows between its marks; figures are the largest of a kind."""
    row_of = {row.family: row for row in rows}
    text = "\n| | packed | not packed | largest logprob difference, nats | FSDP2: largest gradient error |\n"
    text += "|---|---|---|---:|---:|\n"
    for kind, configs in FAMILIES.items():
        exact = [row_of[family] for family in configs if family in row_of and row_of[family].outcome == "exact"]
        if exact:
            packed = ", ".join(f"`{row.family}`" for row in exact if row.packed)
            others = ", ".join(f"`{row.family}`" for row in exact if not row.packed)
            dlogp = max(row.max_abs_dlogp or 0.0 for row in exact)
            error = max(row.fsdp2_grad_error or 0.0 for row in exact)
            text += f"| {kind} | {packed} | {others} | {dlogp:.1e} | {error:.1e} |\n"
    why: dict[str, list[str]] = {}
    for row in rows:
        if row.outcome != "exact":
            why.setdefault(row.why.replace(repr(row.family), "…"), []).append(f"`{row.family}`")
    text += "\n| refused | with the message |\n|---|---|\n"
    text += "".join(f"| {', '.join(families)} | {message} |\n" for message, families in why.items())
    start, rest = page.split(BEGIN)
    return f"{start}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def quiet() -> None:
    import transformers

    os.environ.setdefault("PL_GLOBAL_SEED", "0")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightrl", "lightning"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [family for kind in FAMILIES.values() for family in kind]
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model_type; all if none is given")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the rows of the last full run")
    parser.add_argument("--replay", action="store_true", help="print what router replay changes, a row for each family")
    options = parser.parse_args(arguments)
    if options.page:
        rows = [Row(**json.loads(line)) for line in ROWS.read_text().splitlines()]
        PAGE.write_text(with_tables(PAGE.read_text(), rows))
        return
    quiet()
    if options.replay:
        routed = [name for name, config in FAMILIES["mixture of experts"].items() if "index_topk" not in config]
        for family in options.families or routed:
            row = measure_replay(family)
            print(f"| `{family}` | {row.routed_otherwise:.0%} | {row.native:.3f} | {row.replayed:.3f} |", flush=True)
        return
    lines = []
    for family in options.families or names:
        lines.append(json.dumps(dataclasses.asdict(measure(family))))
        print(lines[-1], flush=True)
    if not options.families:
        ROWS.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
