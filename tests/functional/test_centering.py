"""Score centering: the expected gradient of a constant advantage, over all tokens of a small vocabulary."""

import math

import pytest
import torch
from tiny import tiny_spec
from torch import Tensor

from lightrl.algorithms import CISPO, DPPO, GRPO, GSPO, M2PO, OAPL, SAPO, TOPR, Distillation
from lightrl.columns import NO_TOKEN
from lightrl.experience import Experience
from lightrl.functional import ImportanceWeights, score_correction
from lightrl.models import Outputs
from lightrl.trajectory import Sampling

V = 9
SAMPLING = Sampling(topk_logprobs=V)
# Each kind of weights, and what it multiplies a token's score by, given p/q and the advantage.
WEIGHTS = {
    "none": (GRPO, {"decoupled": ImportanceWeights(1, 1, "clamp")}, lambda r, a: 1.0),
    "truncated": (GRPO, {"decoupled": ImportanceWeights(1.5, 0.6, "clamp")}, lambda r, a: min(max(r, 0.6), 1.5)),
    "masked": (GRPO, {"decoupled": ImportanceWeights(1.5, 0.6)}, lambda r, a: r if 0.6 <= r <= 1.5 else 0.0),
    "masked by k2": (
        GRPO,
        {"decoupled": ImportanceWeights(0.1, metric="k2")},
        lambda r, a: r if math.log(r) ** 2 / 2 <= 0.1 else 0.0,
    ),
    "clipped": (GRPO, {"clip_high": 0.3}, lambda r, a: r if (r <= 1.3 if a > 0 else r >= 0.8) else 0.0),
    "clipped twice": (GRPO, {"dual_clip": 1.4}, lambda r, a: r if (r <= 1.2 if a > 0 else 0.8 <= r <= 1.4) else 0.0),
    "CISPO": (CISPO, {"clip_low": 0.3, "clip_high": 0.4}, lambda r, a: min(max(r, 0.7), 1.4)),
    "TOPR": (TOPR, {}, lambda r, a: 1.0 if a > 0 else min(r, 1.0)),
}


def logits_of(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected_gradient(kind: str, k: int, advantage: float, *, is_centered: bool = True) -> Tensor:
    """The mean gradient of GRPO's loss by the policy's logits [V]: a row for each token that the sampler may sample."""
    algorithm, settings, _ = WEIGHTS[kind]
    sampling = SAMPLING if is_centered else Sampling()
    module = algorithm(tiny_spec(), reward=len, sampling=sampling, score_centering=is_centered, **settings)
    logits, behavior = logits_of(0).requires_grad_(), logits_of(1).log_softmax(0)
    logprobs = logits.log_softmax(0)

    def row(values: Tensor) -> Tensor:  # the prompt's token, then the sampled one
        return torch.stack([torch.zeros_like(values), values], 1)

    mask = row(torch.ones(V)) > 0
    rows = dict.fromkeys(("rewards", "is_truncated"), torch.zeros(V))
    ids = torch.arange(V)
    experience = Experience.of_tensors({
        **rows,
        "token_ids": row(ids),
        "loss_mask": mask,
        "behavior_logprobs": row(behavior),
        "weight_versions": row(ids),
        "group_ids": ids,
        "lengths": torch.full((V,), 2),
        "proximal_logprobs": row(logprobs.detach()),
        "advantages": row(torch.full((V,), advantage, dtype=torch.float64)),
        "behavior_topk_logprobs": behavior.topk(k).values.expand(V, 2, k),
    })  # fmt: skip
    likeliest = logprobs[behavior.topk(k).indices].expand(V, 2, k)
    outputs = Outputs(row(logprobs), row(torch.zeros(V)), teacher_topk=likeliest)
    (behavior.exp() * module.loss(experience, outputs)["loss"][:, 1]).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("advantage", [1.0, -0.7])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_constant_advantage_moves_nothing_once_scores_are_centered(kind: str, advantage: float) -> None:
    assert expected_gradient(kind, V, advantage).abs().max() < 1e-5  # 1e-6 is the least rest of p
    assert expected_gradient(kind, V, advantage, is_centered=False).abs().max() > 1e-2


@pytest.mark.parametrize("advantage", [1.0, -0.7])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_is_left_with_few_tokens_is_the_error_of_taking_all_others_for_one(kind: str, advantage: float) -> None:
    weight = WEIGHTS[kind][2]
    p, q = (logits_of(seed).softmax(0).tolist() for seed in (0, 1))
    others = sorted(range(V), key=lambda token: -q[token])[4:]
    rest_p, rest_q = (sum(values[token] for token in others) for values in (p, q))
    alpha = rest_q / rest_p * weight(rest_p / rest_q, advantage)
    left = [0.0] * V
    for token in others:
        error = advantage * (alpha * p[token] - q[token] * weight(p[token] / q[token], advantage))
        for other in range(V):  # of log p(token) by the logit of `other`
            left[other] += error * ((token == other) - p[other])
    assert expected_gradient(kind, 4, advantage).tolist() == pytest.approx(left, abs=1e-9)
    assert max(map(abs, left)) > 1e-3


def test_untruncated_weights_need_no_correction_and_missing_tokens_none() -> None:
    logprobs, behavior = (logits_of(seed).log_softmax(0)[:4] for seed in (0, 1))
    leaf = logprobs.clone().requires_grad_()
    score_correction(leaf, behavior, torch.exp).backward()
    assert leaf.grad.abs().max() < 1e-12
    padded = torch.nn.functional.pad(behavior, (0, 2), value=NO_TOKEN)
    impossible = torch.cat([logprobs, torch.tensor([-0.5, -math.inf])])
    few = score_correction(logprobs, behavior, torch.ones_like)
    assert score_correction(impossible, padded, torch.ones_like) == pytest.approx(float(few))


@pytest.mark.parametrize(
    ("algorithm", "settings", "problem"),
    [
        (GRPO, {"sampling": Sampling()}, "Set sampling.topk_logprobs"),
        (GRPO, {"score_centering": False}, "topk_logprobs=9 has no effect without score_centering"),
        (GRPO, {"decoupled": ImportanceWeights(2, approximate_proximal=True)}, "Remove decoupled.approximate_prox"),
        (GRPO, {"decoupled": True}, "no effect with unbounded importance weights"),
        (GRPO, {"decoupled": ImportanceWeights(2, level="sequence")}, "needs a weight that depends on each token"),
        (GRPO, {"decoupled": ImportanceWeights(2, aggregation="max")}, "needs a weight that depends on each token"),
        *((kind, {}, f"which {kind.__name__} with these settings does not") for kind in (GSPO, SAPO, OAPL, DPPO)),
        (M2PO, {}, "no effect with M2PO's mask"),
        (Distillation, {"teacher": tiny_spec(), "teacher_topk": 2}, "Remove one of them"),
    ],
)
def test_score_centering_is_refused_where_it_does_not_apply(algorithm, settings, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        algorithm(tiny_spec(), **{"reward": len, "sampling": SAMPLING, "score_centering": True, **settings})
