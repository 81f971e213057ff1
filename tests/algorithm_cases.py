"""Every algorithm under every reduction, for the invariances; add a new algorithm to ALGORITHMS."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny import QUIET, gradients, random_experience, slow_outputs, tiny_spec
from torch import Tensor

from lightrl import FakeEngine, PromptDataModule, Trainer
from lightrl.algorithms import (
    CISPO,
    DAPO,
    DPPO,
    GDPO,
    GRPO,
    GSPO,
    M2PO,
    OAPL,
    PPO,
    RLOO,
    SAPO,
    TOPR,
    Distillation,
    DrGRPO,
    LitePPO,
    ReferenceKL,
    ReinforceBaseline,
    ReinforcePlusPlus,
)
from lightrl.experience import Experience
from lightrl.functional import ImportanceWeights
from lightrl.loops.update import MinibatchLoss, values_of
from lightrl.rewards import OverlongPenalty
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Prompt, Sampling

TOPK = 4
FOUR = [[3 + index] * (index + 1) for index in range(4)]  # prompts of 1 to 4 tokens
REFERENCE = ReferenceKL(0.1, tiny_spec(seed=1))
ALGORITHMS: dict[str, Callable[..., GRPO]] = {
    "GRPO": GRPO,
    "GRPO decoupled": partial(GRPO, decoupled=ImportanceWeights(cap=2.0)),
    "GRPO with KL and entropy": partial(GRPO, reference=REFERENCE, entropy_coef=0.02, dual_clip=3.0),
    "GRPO by sequence": partial(GRPO, decoupled=ImportanceWeights(level="sequence"), ratio_level="sequence"),
    "GRPO with score centering": lambda *args, **kwargs: GRPO(
        *args, **{**kwargs, "sampling": replace(kwargs["sampling"], topk_logprobs=TOPK)}, score_centering=True
    ),
    "GDPO": partial(GDPO, reward_weights={"right": 1.0, "short": 0.5}),
    "DrGRPO": DrGRPO,
    "DAPO": partial(DAPO, overlong_penalty=OverlongPenalty(4)),
    "RLOO": RLOO,
    "ReinforceBaseline": ReinforceBaseline,
    "GSPO": partial(GSPO, clip_low=0.1, clip_high=0.1),
    "CISPO": CISPO,
    "SAPO": SAPO,
    "LitePPO": LitePPO,
    "ReinforcePlusPlus": partial(ReinforcePlusPlus, reference=REFERENCE),
    "M2PO": partial(M2PO, second_moment_threshold=0.02),
    "OAPL": OAPL,
    "TOPR": TOPR,
    "DPPO": partial(DPPO, max_nats=0.01),
    "GRPO with a guessed proximal policy": partial(GRPO, decoupled=ImportanceWeights(approximate_proximal=True)),
    "IcePop": partial(GRPO, decoupled=ImportanceWeights(floor=0.8, cap=1.25)),
    "TIS": partial(GRPO, decoupled=ImportanceWeights(cap=1.2, mode="clamp")),
    "GRPO by the product of a trajectory's weights": partial(
        GRPO, decoupled=ImportanceWeights(cap=1.5, level="product")
    ),
    "GRPO with k2": partial(GRPO, reference=replace(REFERENCE, estimator="k2")),
    "PPO": partial(PPO, lam=0.9, huber_delta=0.5),
    "PPO decoupled": partial(PPO, decoupled=ImportanceWeights(cap=2.0)),
    "PPO on one body": partial(PPO, critic="shared", decoupled=True, value_clip=None),
    "Distillation": partial(Distillation, teacher=tiny_spec(seed=1)),
    "Distillation of the likeliest tokens": partial(
        Distillation, teacher=tiny_spec(seed=1), teacher_topk=TOPK, divergence="jsd", reward_coef=0.5, group_size=3
    ),
}
# Their baseline or deviation is the batch's: a constant that all rewards get changes no advantage, a group's own does.
BATCH_STATISTICS = {"ReinforceBaseline", "ReinforcePlusPlus", "LitePPO", "GDPO"}
CRITICS = {"PPO", "PPO decoupled", "PPO on one body"}  # their baseline is a critic's, which no constant moves
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_baseline_of_rewards = pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in CRITICS])
every_reduction = pytest.mark.parametrize("reduction", ["token", "sequence", "fixed"])


def make_module(algorithm: str = "GRPO", **settings: Any) -> GRPO:
    """With its models in place, one of two updates of an iteration, so that proximal logprobs are those given."""
    defaults: dict[str, Any] = {
        "reward": lambda trajectory: 0.0,
        "num_minibatches": 2,
        "sampling": Sampling(max_new_tokens=8, temperature=0.9),
    }
    module = ALGORITHMS[algorithm](tiny_spec(), **{**defaults, **settings})
    module.configure_model()
    for head in (module.value_head, getattr(getattr(module, "critic", None), "score", None)):
        if head is not None:  # a fresh critic says 0 and sends nothing back to its body
            torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    return module


def experience_for(algorithm: str, **settings: Any) -> Experience:
    """`random_experience`, with what the algorithm learns from: likeliest tokens, or rewards of two kinds."""
    has_topk = "likeliest" in algorithm or "centering" in algorithm
    experience = random_experience(topk=TOPK if has_topk else 0, **settings)
    if "centering" in algorithm:  # a sampler's
        given = {name: experience[f"teacher_{name}"] for name in ("topk_ids", "topk_logprobs")}
        of_sampler = {f"behavior_{name}": value for name, value in given.items()}
        return experience.without([f"teacher_{name}" for name in given]).with_tensors(of_sampler)
    parts = {"reward_part_right": experience.rewards, "reward_part_short": -experience.loss_token_counts.float()}
    return experience.with_tensors(parts) if algorithm == "GDPO" else experience


def advantages_of(module: GRPO, experience: Experience) -> Tensor:
    """[B] or [B, T]."""
    found: Any = module.advantages(experience)
    return found["advantages"] if isinstance(found, dict) else found


class EachBatch(PromptDataModule):
    """Prompts of these tokens, all of them in each batch."""

    def __init__(self, token_ids: list[list[int]]) -> None:
        super().__init__(train=None, batch_size=len(token_ids))
        self.token_ids = token_ids

    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{index}", token_ids=ids) for index, ids in enumerate(self.token_ids)]


def fit(
    folder: Path, module: GRPO, *callbacks: L.Callback, num_iterations: int = 1, token_ids: Any = FOUR, **settings: Any
) -> Trainer:
    """Rolls out with FakeEngine, whose completions depend on nothing but their seed, so every run learns the same."""
    path = settings.pop("ckpt_path", None)
    run = {"max_steps": num_iterations, "default_root_dir": folder, "callbacks": list(callbacks)}
    trainer = Trainer(engine=FakeEngine(), **(QUIET | run | settings))
    trainer.fit(module, EachBatch(token_ids), ckpt_path=path, weights_only=None if path is None else True)
    return trainer


@lru_cache(maxsize=2)  # a test's own; its probes take longer than a gradient
def single_model(module, role, form):
    settings = LogprobSettings(
        temperature=module.sampling.temperature, entropy_needs_gradient=module.needs_entropy_gradient
    )
    head = module.value_head if role == "policy" else None
    return SingleModel(getattr(module, role), settings, value_head=head, form=form)


def minibatch_gradient(module, minibatch, *, form=None, microbatch_tokens=10**6):
    """The gradient of one minibatch's losses by parameter, of all trained models, and its metrics."""
    metrics: dict[str, float] = {}
    microbatches = minibatch.microbatch_rows(microbatch_tokens)[1]
    for call in module.train_calls():
        model = single_model(module, call.role, form)
        losses = MinibatchLoss(module, minibatch, role=str(call.role))
        model.forward_backward(microbatches, losses, Tensor.backward)
        metrics |= values_of(losses.parts)
    return gradients(module), metrics


def sequence_loss_by_hand(module: GRPO, minibatch: Experience, loss_of: Callable[[float, float], float]) -> float:
    """Token by token, the mean over each trajectory's tokens and then over the trajectories.

    Args:
        module: its sampling temperature is 0.9.
        minibatch: with advantages.
        loss_of: of a token, from its ratio to the behavior policy and its advantage.
    """
    logprobs = slow_outputs(module.policy, minibatch, temperature=0.9)[0].detach()
    total = 0.0
    for row in range(len(minibatch)):
        terms = []
        for t in minibatch.loss_mask[row].nonzero()[:, 0].tolist():
            ratio = float((logprobs[row, t] - minibatch.behavior_logprobs[row, t]).exp())
            terms.append(loss_of(ratio, float(minibatch.advantages[row, t])))
        total += sum(terms) / len(terms) / len(minibatch)
    return total


def assert_same(found, expected):
    """Gradients up to float32's rounding of sums, which is relative to the largest; metrics likewise."""
    largest = max(float(value.abs().max()) for value in expected[0].values())
    assert largest > 0
    assert found[0].keys() == expected[0].keys()
    for name, value in found[0].items():
        error = float((value - expected[0][name]).abs().max())
        assert error <= 2e-5 * largest, f"{name}: {error} beside {largest}"
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
