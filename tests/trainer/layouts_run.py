"""Short runs on two, four and eight ranks in every layout, and of one process; test_layouts.py compares them.

    python tests/trainer/layouts_run.py FOLDER grpo | ppo | more

All ranks are forked from this process, which has imported everything once. Each leaves `FOLDER/<ranks>/rank-<rank>.pt`:
what `train` gives, by case, or, in one process, by module.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from moe_cases import moe_spec
from rank_scripts import fork_runs, gathered_tensors, leave
from resharded_run import weights_of
from second_device import second_device
from several_ranks_run import BySGD, Recorded
from tiny_run import BATCH_SIZE, CONFIG, POLICY, Digits, TinyGRPO, make_trainer
from torch import Tensor
from tree_workflow import Tree

from lightrl import (
    PPO,
    AdaptiveKL,
    Distillation,
    Experience,
    FSDP2Strategy,
    LocalEngine,
    LoRA,
    ModelCall,
    ModelSpec,
    Outputs,
    Parallel3DStrategy,
    ReferenceKL,
    RLCallback,
    Role,
    RoleMesh,
    Sampling,
    Trajectory,
)
from lightrl.models import scalar_head
from lightrl.strategies import whole

LAYERS_AND_HEADS = {**CONFIG, "num_hidden_layers": 4, "num_key_value_heads": 2}  # can be split both ways
TIED = replace(POLICY, config=LAYERS_AND_HEADS)
UNTIED = replace(POLICY, config={**LAYERS_AND_HEADS, "tie_word_embeddings": False})
REWARD_MODEL = replace(UNTIED, head="scalar", seed=5)
# With more tokens than the student has, as models of one tokenizer may be padded.
TEACHER = replace(TIED, seed=7, config={**LAYERS_AND_HEADS, "vocab_size": 12, "initializer_range": 0.4})
# More experts than the tokens of a minibatch are routed to, and shares of unequal size on four ranks.
MIXTURE = replace(moe_spec(vocab_size=8, num_experts=30), tokenizer="tiny_run.tokenizer", seed=3)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SEVERAL = {"num_minibatches": 2, "microbatch_tokens": 20}
MIXED = "bf16-mixed"


class TinyPPO(BySGD, TinyGRPO, PPO):
    """With what a user may add: a function of its own, whose calls here `num_calls` counts."""

    def __init__(self, policy: str | ModelSpec | Role = POLICY, **settings: Any) -> None:
        super().__init__(policy, **{"lr": 0.1, "microbatch_tokens": 20, **settings})
        self.num_calls = 0

    def configure_model(self) -> None:
        super().configure_model()
        if self.value_head is not None:
            with torch.no_grad():  # one that says 0 sends nothing back to its body
                self.value_head.weight.copy_(torch.linspace(-0.3, 0.3, self.value_head.weight.shape[1])[None])

    def model_calls(self) -> list[ModelCall]:
        return [*super().model_calls(), ModelCall("style", outputs=("style_rewards",), run=self.style)]

    def style(self, experience: Experience, trajectories: Sequence[Trajectory]) -> Tensor:
        self.num_calls += 1
        return torch.tensor([len(set(trajectory.token_ids)) / 10 for trajectory in trajectories])

    def shaped_rewards(self, experience: Experience) -> Tensor:
        return super().shaped_rewards(experience) + experience["style_rewards"]


class WithOwnParameters(Recorded):
    """Trains parameters of its own, of which `rare` has no gradient on most ranks, and of the policy the upper half."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        start = torch.full((1, 1), float(os.environ.get("RANK", "0")))  # rank 0's counts
        self.log_scale = torch.nn.Parameter(start)
        self.rare = torch.nn.ParameterDict({"weight": start.clone()})
        self.head = torch.nn.Linear(1, 1, bias=False)
        self.head.weight.data.copy_(start)

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.policy.named_parameters():
            parameter.requires_grad_(not any(part in name for part in ("embed_tokens", ".layers.0.", ".layers.1.")))

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Any]:
        result, lengths = super().loss(experience, outputs), experience.lengths[:, None].float() / 10
        loss = self.log_scale.exp() * result["loss"] + (self.head(lengths) - lengths) ** 2
        is_first = experience.group_ids[:, None] % BATCH_SIZE == 0
        return {**result, "loss": loss + self.rare["weight"] * lengths * is_first if is_first.any() else loss}


class TinyDistillation(BySGD, TinyGRPO, Distillation):
    pass


def grpo(**settings: Any) -> Callable[..., Any]:
    return lambda meshes, folder: Recorded(**settings)


def from_folder(lora: LoRA | None = None, **settings: Any) -> Callable[..., Any]:
    """A checkpoint with a head of its own, whose weights no seed gives, read tensor by tensor."""
    spec = {"tokenizer": "tiny_run.tokenizer", **settings}
    return lambda meshes, folder: Recorded(policy=Role(ModelSpec(path=str(folder / "model"), **spec), lora=lora))


def distillation(meshes: dict[str, RoleMesh], folder: Path) -> Any:
    return TinyDistillation(
        Role(TIED, mesh=meshes.get("policy")),
        teacher=Role(TEACHER, mesh=meshes.get("teacher")),
        teacher_topk=5,  # more than a tensor rank's half of the student's tokens
        divergence="forward_kl",
        reward_coef=0.5,
        sampling=Sampling(max_new_tokens=6, temperature=0.8, min_new_tokens=1),
        lr=0.3,
        **SEVERAL,
    )


def ppo(**settings: Any) -> Callable[..., Any]:
    return lambda meshes, folder: TinyPPO(**settings)


def ppo_with_reward_model(meshes: dict[str, RoleMesh], folder: Path) -> Any:
    """A head that says something, in critic and reward model, from a folder."""
    reward_model = replace(REWARD_MODEL, config=None, path=str(folder / "reward_model"))
    critic, reference = Role(reward_model, lr=0.03, weight_decay=0.01), AdaptiveKL(0.1, replace(UNTIED, seed=4))
    return TinyPPO(UNTIED, critic=critic, reward_model=reward_model, reference=reference, num_minibatches=2)


def meshed_ppo(meshes: dict[str, RoleMesh], folder: Path, kind: Callable[..., Any] = TinyPPO) -> Any:
    policy, critic = (Role(TIED, mesh=meshes.get(name)) for name in ("policy", "critic"))
    reference = AdaptiveKL(0.1, Role(replace(TIED, seed=4), mesh=meshes.get("reference")))
    settings = {"num_minibatches": 2, "value_normalization": "running"}
    return kind(policy, critic=critic, reference=reference, **settings)


def ppo_on_body(meshes: dict[str, RoleMesh], folder: Path, **settings: Any) -> Any:
    role = Role(replace(TIED, seed=4), offload=True, mesh=meshes.get("reference"))
    reference = AdaptiveKL(0.1, role, decay=settings.pop("decay", None))
    settings = {"critic": "shared", "reference": reference, "num_minibatches": 2, **settings}
    return TinyPPO(Role(TIED, mesh=meshes.get("policy")), **settings)


# Each made of the meshes of its roles, and of the folder with "model" and "reward_model".
MODULES: dict[str, Callable[[dict[str, RoleMesh], Path], Any]] = {
    "microbatches and minibatches": grpo(**SEVERAL),
    "a reference policy, truncated draws": grpo(
        microbatch_tokens=20,
        loss_reduction="sequence",
        reference=ReferenceKL(0.1, POLICY),
        sampling=Sampling(max_new_tokens=6, top_p=0.9, top_k=6),  # of 8 tokens
    ),
    "score centering": grpo(
        policy=TIED, score_centering=True, sampling=Sampling(max_new_tokens=6, top_p=0.9, topk_logprobs=4),
        update_epochs=2, **SEVERAL,
    ),
    "score centering of trees": grpo(
        policy=TIED, score_centering=True, sampling=Sampling(max_new_tokens=6, topk_logprobs=3), workflow=Tree,
        update_epochs=2, **SEVERAL,
    ),
    "batch statistics": grpo(num_minibatches=2, update_epochs=2, is_batch_wide=True),
    "awaited rewards": grpo(num_minibatches=2, decoupled=True, loses_some=True),
    "awaited rewards by group": grpo(num_minibatches=2, decoupled=True, loses_some=True, loss_unit="group"),
    "a smaller mask": grpo(max_loss_tokens=2, **SEVERAL),
    "trees": grpo(workflow=Tree, loss_reduction="sequence", decoupled=True, **SEVERAL),
    "trees in pieces": grpo(
        policy=TIED, workflow=partial(Tree, num_subagents=(5, 0)), reference=ReferenceKL(0.1, UNTIED), decoupled=True,
        loss_reduction="sequence", num_minibatches=4, microbatch_tokens=12,
    ),
    "a mixture of trees": grpo(policy=MIXTURE, workflow=partial(Tree, num_subagents=(5, 0)), **SEVERAL),
    "PPO of trees": ppo(workflow=Tree, critic="shared", num_minibatches=2),
    "trees in stages": grpo(policy=TIED, workflow=Tree, reference=ReferenceKL(0.1, UNTIED), **SEVERAL),
    "a checkpoint": from_folder(),
    "LoRA on a checkpoint": from_folder(LoRA(rank=2)),
    "LoRA on a base in 4 bits": from_folder(LoRA(rank=2), quantization="nf4"),
    "LoRA": grpo(policy=Role(POLICY, lora=LoRA(rank=2)), reference=ReferenceKL(0.1), **SEVERAL),
    "LoRA on a split policy": grpo(policy=Role(TIED, lora=LoRA(rank=2)), reference=ReferenceKL(0.1), **SEVERAL),
    MIXED: grpo(**SEVERAL),
    "a mixture": grpo(policy=MIXTURE, reference=ReferenceKL(0.1, replace(MIXTURE, seed=4)), **SEVERAL),
    "LoRA on a mixture": grpo(policy=Role(MIXTURE, lora=LoRA(rank=2)), **SEVERAL),
    "LoRA on experts": grpo(
        policy=Role(MIXTURE, lora=LoRA(rank=2, target_parameters=EXPERTS)), reference=ReferenceKL(0.1), **SEVERAL
    ),
    "distillation": distillation,
    "PPO": ppo(
        num_minibatches=2, update_epochs=2, value_normalization="running",
        reference=AdaptiveKL(0.1, POLICY, target_nats=0.01, decay=0.5),
    ),
    "PPO with a shared critic": ppo(critic="shared", num_minibatches=2),
    "PPO with a frozen critic": ppo(
        critic=Role(replace(POLICY, head="scalar"), frozen=True),
        reference=AdaptiveKL(0.1, Role(replace(POLICY, seed=4), offload=True), in_reward=False),
        value_normalization="exponential",
    ),
    "PPO with a reward model": ppo_with_reward_model,
    "PPO on the body of a mixture": ppo(policy=MIXTURE, critic="shared", num_minibatches=2),
    "PPO of mixtures": ppo(
        policy=MIXTURE, reference=AdaptiveKL(0.1, replace(MIXTURE, seed=4), decay=0.5), num_minibatches=2
    ),
    "PPO by roles": meshed_ppo,
    "PPO on one body": partial(ppo_on_body, decay=0.5),
    "PPO on one body, a fixed reference": ppo_on_body,
    "PPO on one body by Adam": partial(ppo_on_body, is_adam=True, lr=1e-3),
    "own parameters": lambda meshes, folder: WithOwnParameters(policy=UNTIED, **SEVERAL),
    "a split policy": grpo(policy=TIED, **SEVERAL),
    "a split policy, batch statistics": grpo(policy=UNTIED, num_minibatches=2, update_epochs=2, is_batch_wide=True),
    "a split policy, a reference": grpo(
        policy=TIED, microbatch_tokens=20, loss_reduction="sequence", reference=ReferenceKL(0.1, UNTIED)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    module: str
    strategy: Callable[[], Any]
    num_ranks: int = 2
    meshes: dict[str, RoleMesh] = field(default_factory=dict)
    is_extra: bool = False  # on two ranks: next to a case of its kind

    @property
    def group(self) -> str:
        """The cases of a group are started together."""
        return "more" if self.is_extra or self.num_ranks > 2 else "ppo" if "PPO" in self.module else "grpo"


SHARDED, SPLIT = FSDP2Strategy, Parallel3DStrategy
INTERLEAVED = {"schedule": "Interleaved1F1B"}
ALONE = {"policy": RoleMesh(0, 1), "teacher": RoleMesh(1, 1)}
ONE_EACH = {"policy": RoleMesh(0, 1), "critic": RoleMesh(1), "reference": RoleMesh(0, 1)}
BESIDE = {"policy": RoleMesh(0, 2, pp=2), "critic": RoleMesh(2, 2, tp=2)}
BY_ROLES = "PPO by roles: each rank has a role"
CASES: dict[str, Case] = {
    "sharded": Case("microbatches and minibatches", SHARDED),
    "sharded, recomputed, reduced for each microbatch": Case(
        "microbatches and minibatches",
        lambda: SHARDED(activation_checkpointing=True, reduce_every_microbatch=True),
        is_extra=True,
    ),
    "two replicas, parameters kept": Case(
        "a reference policy, truncated draws", lambda: SHARDED(num_replicas=2, reshard_after_forward=False)
    ),
    "sharded batch statistics": Case("batch statistics", SHARDED),
    "sharded, awaited rewards": Case("awaited rewards", SHARDED),
    "sharded, awaited rewards by group": Case("awaited rewards by group", SHARDED),
    "sharded, a smaller mask": Case("a smaller mask", SHARDED, is_extra=True),
    "sharded score centering": Case("score centering", SHARDED, is_extra=True),
    "score centering on two tensor ranks": Case("score centering", lambda: SPLIT(tp=2), is_extra=True),
    "score centering, rows of two ranks": Case("score centering", lambda: SHARDED(cp=2)),
    "score centering in two stages": Case("score centering", lambda: SPLIT(pp=2), is_extra=True),
    "sharded score centering of trees": Case("score centering of trees", SHARDED, is_extra=True),
    "sharded, own parameters": Case("own parameters", SHARDED, is_extra=True),
    "two stages, the first frozen, own parameters": Case("own parameters", lambda: SPLIT(pp=2)),
    "two tensor ranks, own parameters": Case("own parameters", lambda: SPLIT(tp=2), is_extra=True),
    "stages and data, own parameters": Case("own parameters", lambda: SPLIT(pp=2), 4),
    "sharded trees": Case("trees", SHARDED),
    "sharded trees in pieces": Case("trees in pieces", SHARDED),
    "pieces, rows of two ranks": Case("trees in pieces", lambda: SHARDED(cp=2), is_extra=True),
    "pieces in two stages": Case("trees in pieces", lambda: SPLIT(pp=2), is_extra=True),
    "pieces on two tensor ranks": Case("trees in pieces", lambda: SPLIT(tp=2), is_extra=True),
    "pieces, divided experts": Case("a mixture of trees", lambda: SHARDED(ep=2), is_extra=True),
    "sharded PPO of trees": Case("PPO of trees", SHARDED, is_extra=True),
    "trees in two stages": Case("trees in stages", lambda: SPLIT(pp=2), is_extra=True),
    "a sharded checkpoint": Case("a checkpoint", SHARDED, is_extra=True),
    "LoRA on a sharded checkpoint": Case("LoRA on a checkpoint", SHARDED, is_extra=True),
    "sharded LoRA": Case("LoRA", lambda: SHARDED(activation_checkpointing=True)),
    "LoRA on two tensor ranks": Case("LoRA on a split policy", lambda: SPLIT(tp=2), is_extra=True),
    "LoRA in two stages": Case("LoRA on a split policy", lambda: SPLIT(pp=2), is_extra=True),
    MIXED: Case(MIXED, lambda: SHARDED(activation_checkpointing=True)),
    "divided experts": Case("a mixture", lambda: SHARDED(ep=2, activation_checkpointing=True)),
    "divided experts on four ranks": Case("a mixture", lambda: SHARDED(ep=2), 4),
    "divided experts in two replicas": Case("a mixture", lambda: SHARDED(ep=2, num_replicas=2), 4),
    "PPO of divided experts": Case("PPO of mixtures", lambda: SHARDED(ep=2), is_extra=True),
    "PPO with a shared critic on divided experts": Case(
        "PPO on the body of a mixture", lambda: SHARDED(ep=2), is_extra=True
    ),
    "LoRA on sharded experts": Case("LoRA on experts", lambda: SHARDED(activation_checkpointing=True)),
    "LoRA on divided experts": Case("LoRA on experts", lambda: SHARDED(ep=2)),
    "experts on two tensor ranks": Case("a mixture", lambda: SPLIT(tp=2, ep=2, activation_checkpointing=True)),
    "a mixture in two stages": Case("a mixture", lambda: SPLIT(pp=2), is_extra=True),
    "a mixture on two tensor ranks": Case("LoRA on a mixture", lambda: SPLIT(tp=2), is_extra=True),
    "stages and experts": Case("a mixture", lambda: SPLIT(pp=2, ep=2), 4),
    "stages and experts, LoRA": Case("LoRA on a mixture", lambda: SPLIT(pp=2, ep=2), 4),
    "stages and experts, PPO": Case("PPO of mixtures", lambda: SPLIT(pp=2, ep=2), 4),
    "stages and experts, PPO on one body": Case("PPO on the body of a mixture", lambda: SPLIT(pp=2, ep=2), 4),
    "tensor slices and experts": Case("a mixture", lambda: SPLIT(tp=2, ep=2), 4),
    "tensor slices and experts, LoRA": Case("LoRA on a mixture", lambda: SPLIT(tp=2, ep=2), 4),
    "tensor slices and experts, PPO": Case("PPO of mixtures", lambda: SPLIT(tp=2, ep=2), 4),
    "stages and rows of two ranks": Case("a mixture", lambda: SPLIT(pp=2, cp=2), 4),
    "stages and rows of two ranks, LoRA": Case("LoRA on a mixture", lambda: SPLIT(pp=2, cp=2), 4),
    "stages and rows of two ranks, PPO": Case("PPO on the body of a mixture", lambda: SPLIT(pp=2, cp=2), 4),
    "tensor slices and rows of two ranks": Case("a mixture", lambda: SPLIT(tp=2, cp=2), 4),
    "stages, experts and rows of two ranks": Case("a mixture", lambda: SPLIT(pp=2, ep=2, cp=2), 8),
    "stages, experts and rows of two ranks, PPO": Case("PPO of mixtures", lambda: SPLIT(pp=2, ep=2, cp=2), 8),
    "stages, tensor slices and experts": Case("LoRA on a mixture", lambda: SPLIT(pp=2, tp=2, ep=2), 8),
    "rows of two ranks": Case("a reference policy, truncated draws", lambda: SHARDED(cp=2), is_extra=True),
    "rows of two ranks, in one stage": Case("a mixture", lambda: SPLIT(cp=2)),
    "rows of two ranks, recomputed LoRA": Case(
        "LoRA", lambda: SHARDED(cp=2, activation_checkpointing=True), is_extra=True
    ),
    "trees of two ranks": Case("trees", lambda: SHARDED(cp=2), is_extra=True),
    "distillation, rows of two ranks": Case("distillation", lambda: SHARDED(cp=2), is_extra=True),
    "PPO, rows of two ranks": Case("PPO", lambda: SHARDED(cp=2), is_extra=True),
    "PPO on one body, rows of two ranks": Case("PPO on one body", lambda: SHARDED(cp=2), is_extra=True),
    "rows of two ranks, awaited rewards": Case(
        "awaited rewards", lambda: SHARDED(cp=2, reduce_every_microbatch=True), 4
    ),
    "rows of two ranks in two replicas": Case("batch statistics", lambda: SHARDED(cp=2, num_replicas=2), 4),
    "rows of two ranks, divided experts": Case("a mixture", lambda: SHARDED(cp=2, ep=2), 4),
    "rows of four ranks, a mixture": Case("a mixture", lambda: SHARDED(cp=4, activation_checkpointing=True), 4),
    "sharded distillation": Case("distillation", SHARDED),
    "distillation, a rank for each role": Case("distillation", SHARDED, meshes=ALONE, is_extra=True),
    "distillation on two tensor ranks": Case("distillation", lambda: SPLIT(tp=2)),
    "distillation in two stages": Case("distillation", lambda: SPLIT(pp=2), is_extra=True),
    "sharded PPO, parameters kept": Case("PPO", lambda: SHARDED(reshard_after_forward=False)),
    "sharded PPO with a shared critic": Case("PPO with a shared critic", SHARDED, is_extra=True),
    "PPO, two replicas": Case("PPO with a frozen critic", lambda: SHARDED(num_replicas=2), is_extra=True),
    "PPO with a reward model on two tensor ranks": Case("PPO with a reward model", lambda: SPLIT(tp=2)),
    "PPO with a reward model in two stages": Case("PPO with a reward model", lambda: SPLIT(pp=2), is_extra=True),
    "PPO on one body on two tensor ranks": Case("PPO on one body", lambda: SPLIT(tp=2), is_extra=True),
    "PPO on one body in two stages": Case("PPO on one body", lambda: SPLIT(pp=2)),
    "PPO on one body on two data ranks": Case("PPO on one body", lambda: SPLIT(dp=2), is_extra=True),
    BY_ROLES: Case("PPO by roles", SHARDED, meshes=ONE_EACH),
    "data and tensor": Case("a split policy", lambda: SPLIT(tp=2), 4),
    "stages and tensor, interleaved": Case(
        "a split policy, batch statistics", lambda: SPLIT(pp=2, tp=2, **INTERLEAVED), 4
    ),
    "stages and data, recomputed": Case(
        "a split policy, a reference", lambda: SPLIT(pp=2, activation_checkpointing=True), 4
    ),
    "PPO in stages and tensor": Case("PPO with a reward model", lambda: SPLIT(pp=2, tp=2), 4),
    "PPO on one body, data and tensor": Case("PPO on one body by Adam", lambda: SPLIT(dp=2, tp=2), 4),
    "PPO on one body, stages and data": Case("PPO on one body by Adam", lambda: SPLIT(pp=2, dp=2), 4),
    "PPO by roles: a pipeline beside tensor slices": Case("PPO by roles", lambda: SPLIT(tp=2), 4, BESIDE),
    "PPO by roles: the same ranks in another way": Case(
        "PPO by roles", lambda: SPLIT(pp=2, tp=2), 4, {"critic": RoleMesh(), "reference": RoleMesh(pp=2)}
    ),
    "PPO on one body beside its reference": Case(
        "PPO on one body, a fixed reference",
        lambda: SPLIT(tp=2),
        4,
        {"policy": BESIDE["policy"], "reference": BESIDE["critic"]},
    ),
    "all three": Case("a split policy", lambda: SPLIT(pp=2, tp=2), 8),
}
if find_spec("bitsandbytes") is not None:  # of the extra `qlora`
    in_4_bits = Case("LoRA on a base in 4 bits", lambda: SHARDED(activation_checkpointing=True))
    CASES["sharded LoRA in 4 bits"] = in_4_bits
SIZES = {"grpo": (2, 1), "ppo": (2, 1), "more": (2, 4, 8, 1)}
RESUMED, AT_ONCE = "resumed on other ranks", "calls wait for each other"


class Watch(RLCallback):
    """Keeps each update's metrics, the engine's weights, and the first update's gradients before and after the clip."""

    def __init__(self) -> None:
        self.updates: list[dict[str, float]] = []
        self.gradients: dict[str, Tensor] = {}
        self.clipped: dict[str, Tensor] = {}
        self.engine: dict[str, Tensor] = {}

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients = self.gradients or whole_gradients(module)

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.clipped = self.clipped or whole_gradients(module)

    def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
        if trainer.is_global_zero:
            self.engine = {name: value.clone() for name, value in trainer.engine.read_weights().items()}


def whole_gradients(module: Any) -> dict[str, Tensor]:
    found = ((key, value.grad) for key, value in module.named_parameters())
    return {key: whole(grad).clone() for key, grad in found if grad is not None}


def fit(module: Any, folder: Path, **settings: Any) -> dict[str, Any]:
    """Trains; gives what is compared. Of a split model this rank's part, each parameter whole."""
    watch, ckpt_path = Watch(), settings.pop("ckpt_path", None)
    run = {"max_steps": 2, "gradient_clip_val": 0.5, "callbacks": [watch], "engine": LocalEngine(), **settings}
    trainer = make_trainer(folder, **run)
    with second_device() as moved:
        trainer.fit(module, datamodule=Digits(), ckpt_path=ckpt_path)
    sent: dict[str, Tensor] = {}
    if any(role.mesh is not None for role in module.models().values()):
        pass  # not every rank has the policy
    elif isinstance(trainer.strategy, Parallel3DStrategy):
        parts = module.parallel_models["policy"].full_parameters(1000)
        sent = {key: value.clone() for part in parts for key, value in part.tensors.items()}
    else:
        sent = weights_of(module)
    normalizer = getattr(module, "normalizer", None)
    return {
        "updates": watch.updates,
        "gradients": watch.gradients,
        "clipped": watch.clipped,
        "engine": watch.engine,
        "sent": sent,
        "weights": {key: whole(value).detach().clone() for key, value in module.named_parameters()},
        "trained": {key for key, value in module.named_parameters() if value.requires_grad},
        "experiences": [gathered_tensors(experience) for experience in module.experiences],
        "state": [
            getattr(module, "kl_coef", 0.0),
            *([] if normalizer is None else map(float, normalizer.state_dict().values())),
        ],
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "num_calls": getattr(module, "num_calls", 0),
        "num_moves": len(moved),
    }


def train(name: str, folder: Path) -> dict[str, Any]:
    case = CASES[name]
    module = MODULES[case.module](case.meshes, folder)
    precision: Any = MIXED if case.module == MIXED else "32-true"
    settings: dict[str, Any] = {"devices": case.num_ranks, "strategy": case.strategy(), "precision": precision}
    return fit(module, folder, engine=engine_of(case.module), **settings)


def train_alone(name: str, folder: Path) -> dict[str, Any]:
    """The module in one process."""
    precision: Any = MIXED if name == MIXED else "32-true"
    return fit(MODULES[name]({}, folder), folder, engine=engine_of(name), precision=precision)


def engine_of(module: str) -> LocalEngine:
    """Without the experts of trees, which their workflow does not join."""
    return LocalEngine(record_routes=False if "trees" in module else None)


class AtOnce(TinyPPO):
    """The judge, the reference and the critic each end only when all three have begun, and so do the two updates."""

    folder: Path

    def style(self, experience: Experience, trajectories: Sequence[Trajectory]) -> Tensor:
        self.meet("judge", ["judge", "reference", "critic"])
        return super().style(experience, trajectories)

    def on_rollout_end(self, groups: Any) -> None:
        scores, updates = ["judge", "reference", "critic"], ["policy", "critic update"]
        for role, method, name, others in (
            ("reference", "forward", "reference", scores),
            ("critic", "forward", "critic", scores),
            ("policy", "forward_backward", "policy", updates),
            ("critic", "forward_backward", "critic update", updates),
        ):
            if self.trainer.strategy.ranks.of_role(role).is_here:  # type: ignore[attr-defined]
                self.wrap(self.parallel_models[role], method, name, others)

    def wrap(self, model: Any, method: str, name: str, others: list[str]) -> None:
        plain = getattr(model, method)

        def meeting(*args: Any, **kwargs: Any) -> Any:
            self.meet(name, others)
            return plain(*args, **kwargs)

        setattr(model, method, meeting)

    def meet(self, name: str, names: list[str]) -> None:
        (self.folder / name).touch()
        deadline = time.monotonic() + 600
        while not all((self.folder / other).exists() for other in names):
            assert time.monotonic() < deadline, f"{name} waits for {names} in vain"
            time.sleep(0.01)


def train_resumed(folder: Path) -> dict[str, Any]:
    """One iteration with roles on ranks of their own, a checkpoint, and the second one elsewhere."""
    run: dict[str, Any] = {"devices": 2, "gradient_clip_val": 0.5}
    first = make_trainer(folder, max_steps=1, strategy=FSDP2Strategy(), **run)
    first.fit(meshed_ppo(ONE_EACH, folder), datamodule=Digits())
    first.save_checkpoint(folder / "checkpoint")
    meshes = {"policy": RoleMesh(0, 1), "critic": RoleMesh(0, 1), "reference": RoleMesh(1, 1)}
    return fit(meshed_ppo(meshes, folder), folder, strategy=FSDP2Strategy(), ckpt_path=folder / "checkpoint", **run)


def train_at_once(folder: Path) -> dict[str, Any]:
    module = meshed_ppo(ONE_EACH, folder, AtOnce)
    module.folder, module.num_minibatches = folder, 1
    return fit(module, folder, devices=2, strategy=FSDP2Strategy(), max_steps=1)


def save_models(folder: Path) -> None:
    spec = ModelSpec(config={**CONFIG, "tie_word_embeddings": False}, tokenizer="tiny_run.tokenizer", seed=11)
    spec.load_model().save_pretrained(folder / "model")
    model = REWARD_MODEL.load_model()
    head = scalar_head(model)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(6))
    model.save_pretrained(folder / "reward_model")


def main() -> int:
    torch.set_num_threads(1)
    folder, group = Path(sys.argv[1]), sys.argv[2]
    save_models(folder)
    cases = {name: case for name, case in CASES.items() if case.group == group}

    def train_all(size: int) -> None:
        if size == 1:
            found = {name: train_alone(name, folder) for name in {case.module for case in cases.values()}}
        else:
            found = {name: train(name, folder) for name, case in cases.items() if case.num_ranks == size}
        if (group, size) == ("ppo", 2):
            found |= {RESUMED: train_resumed(folder), AT_ONCE: train_at_once(folder)}
        leave(found, folder / str(size))

    return fork_runs(SIZES[group], train_all)


if __name__ == "__main__":
    sys.exit(main())
