"""AnswerCheck: before the policy trains on sampled tokens, checks them against the weights that sampled them.

In each iteration, the trainer takes a few trajectories and recomputes the logprobs of the tokens sampled by the oldest
and by the newest weight version; it keeps copies of both versions in host memory. The engine's logprobs must equal the
trainer's, up to rounding. The likelihood of the oldest tokens must also match their distribution; if it does not, the
server may ignore sampling settings. This check omits the newest tokens: they exist only if no end token came before.

For a function f of a token, exp(λ f) / E[exp(λ f)] has mean 1, whatever came before, so the product over all tokens
exceeds e^35 with probability at most e^-35. Here f is the logprob: λ > 0 accumulates evidence that tokens are too
likely (temperature 0, a smaller top-k), λ < 0 that they are too unlikely. The sum of the logarithms is reset to 0 when
it becomes negative. Source: Ville's inequality; Page, Continuous inspection schemes (CUSUM).

The probability that k of a group's G completions are equal, each with logprob -L, is at most 2^G e^-(k - 1)L. If it is
tiny, they are copies: a server may use one seed for all requests. Shapes: N tokens, K most likely alternatives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.callbacks.lag_probe import choose_rows
from lightrl.callbacks.probe import Rounding, check_mismatch, mismatch_bound_nats
from lightrl.columns import SUPPORTS
from lightrl.errors import EngineError
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import Microbatches, ShardedExperience, ranks_of
from lightrl.strategies.layouts.pieces import forward
from lightrl.strategies.ranks.processes import local
from lightrl.strategies.sharded_experience.placement import microbatch_rows
from lightrl.trajectory import Group, Sampling, Trajectory

TOP = 64  # K
LIMIT_NATS = 35.0
# Log-likelihood ratios of a token outside and of a token inside top-p or top-k: 5% outside against 1% outside.
OUTSIDE_NATS = math.log(5 / 1), math.log(95 / 99)
NUM_TOKENS = 256  # loss tokens to check


class AnswerCheck:
    """Checks the tokens of a few trajectories or, with `checks_all`, of all trajectories.

    It skips the first version that this run loads: after a failed iteration, other weights may have sampled its tokens.
    """

    def __init__(self, checks_all: bool) -> None:
        self.checks_all = checks_all
        self._copies_nats = -math.inf  # evidence for copies in a group; -inf if trajectories may share samples
        self._evidence_nats = torch.zeros(2)  # evidence that tokens are too likely, and too unlikely
        self._weights: dict[int, list[Tensor]] = {}  # version → the policy's trained parameters on this rank
        self._first_version: int | None = None  # the first version that this run has loaded

    def offer(self, trainer: RLTrainer, groups: Sequence[Group]) -> None:
        """Measures the evidence that completions in a group are copies, on rank 0, because only it has their tokens."""
        workflow = trainer.rollout.workflow
        if workflow is not None and workflow.samples_apart:
            self._copies_nats = max((copies_nats(group.trajectories) for group in groups), default=0.0)

    def save_version(self, trainer: RLTrainer, module: RLModule, weight_version: int, rounding: Rounding) -> None:
        """Saves a copy of the current weights as this version; deletes versions whose tokens are too old to train."""
        staleness = trainer.rollout.settings.max_staleness
        self._first_version = weight_version if self._first_version is None else self._first_version
        self._weights = {old: weights for old, weights in self._weights.items() if old >= weight_version - staleness}
        if staleness > 0 or self.checks_all:
            is_coarse = rounding.engine_eps >= torch.finfo(torch.bfloat16).eps  # the engine also rounds its weights
            values = _trained_weights(module) if ranks_of(trainer.strategy).of_role("policy").is_here else []
            dtype = torch.bfloat16 if is_coarse else None  # None keeps each parameter's dtype
            self._weights[weight_version] = [value.to("cpu", dtype, copy=True) for value in values]

    def has_sampled(self, version: int) -> bool:
        """Whether all tokens of this version were sampled by weights that this run loaded."""
        return version > (self._first_version or -1)

    def check(self, trainer: RLTrainer, module: RLModule, minibatch: ShardedExperience, rounding: Rounding) -> None:
        """Raises WeightSyncError for wrong logprobs, EngineError for wrong sampling. Collective; pass each row once."""
        ranks, current = ranks_of(trainer.strategy), trainer.weight_version
        num_rows, version_to_rows = len(minibatch), dict[int, list[int]]()
        chosen = range(num_rows) if self.checks_all else choose_rows(num_rows, minibatch.num_loss_tokens, NUM_TOKENS)
        bounds = torch.stack(minibatch.version_bounds, 1).tolist()
        for row in sorted((index + current) % num_rows for index in chosen):  # different rows in each version
            oldest, newest = bounds[row]
            for version in range(oldest, newest + 1) if self.checks_all else {oldest, newest}:
                if self.has_sampled(version) and (version == current or version in self._weights):
                    version_to_rows.setdefault(version, []).append(row)
        evidence = torch.zeros(2)
        for version, rows in version_to_rows.items():
            sums, largest = torch.zeros(6), torch.zeros(1)
            if ranks.of_role("policy").is_here:
                with torch.no_grad(), _set_weights(self._weights.get(version, []), _trained_weights(module)):
                    sums, largest = _measure(trainer, module, minibatch.select(rows), version, rounding)
            sums, largest = ranks.total(sums), ranks.total(largest, "max")
            evidence += sums[4:]
            if num := int(sums[0]):
                difference, bias, entropy = (sums[1:4] / num).tolist()
                name = "the current weights" if version == current else f"weight version {version}"
                check_mismatch(name + _at_servers(trainer), num, difference, float(largest), entropy, rounding, bias)
        copies = ranks.total(torch.tensor([self._copies_nats]), "max")
        if copies.isfinite() and _has_every_sample(trainer, module, minibatch):
            self._evidence_nats = (self._evidence_nats + evidence).clamp(min=0)
        nats, kind = torch.cat([self._evidence_nats, copies]).max(0)
        if float(nats) > LIMIT_NATS:
            problem, sampling = ("likely", "unlikely", "often equal in a group")[int(kind)], module.sampling
            raise EngineError(
                f"The tokens that the engine sampled{_at_servers(trainer)} are too {problem} for temperature="
                f"{sampling.temperature:g}, top_p={sampling.top_p:g} and top_k={sampling.top_k}: the probability is "
                f"e^-{float(nats):.0f}. Look for a proxy or a server argument that changes these settings or drops "
                "the requests' seeds, or a workflow that discards completions; or set WeightSync.verify to false."
            )


def copies_nats(trajectories: Sequence[Trajectory]) -> float:
    """Returns the evidence (nats) for copies among completions; skips trajectories with several versions or rows."""
    by_tokens: dict[bytes, list[Trajectory]] = {}
    for item in trajectories:
        by_tokens.setdefault(np.asarray(item.token_ids).tobytes(), []).append(item)
    nats: dict[tuple[int, int], list[float]] = {}
    for number, equal in enumerate(by_tokens.values()):
        for item in equal if len(equal) > 1 else []:
            if item.oldest_version == item.newest_version and item.first_branch == len(item.token_ids):
                logprobs = np.asarray(item.behavior_logprobs)
                nats.setdefault((number, item.newest_version), []).append(-float(logprobs.sum(dtype=float)))
    evidence = ((len(values) - 1) * min(values) for values in nats.values())  # (k - 1) L
    return max(evidence, default=0.0) - len(trajectories) * math.log(2)


def _has_every_sample(trainer: RLTrainer, module: RLModule, minibatch: ShardedExperience) -> bool:
    """Whether the minibatch has every token that was sampled for it; dropping some would bias the likelihood."""
    settings = trainer.rollout.settings
    num_rows = settings.groups_per_iteration * settings.group_size // module.num_minibatches
    selects = settings.num_oversampled or settings.group_filter or settings.incomplete_groups != "train"
    is_masked = minibatch.num_loss_tokens != int(minibatch.generated_token_counts.sum())
    return len(minibatch) == num_rows and not is_masked and not selects and not settings.group_sizes


def _measure(
    trainer: RLTrainer, module: RLModule, selected: ShardedExperience, version: int, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Returns sums over this rank's tokens, and the largest absolute difference between their logprobs.

    The sums: number of tokens, absolute and signed differences, entropy, evidence of too likely and unlikely tokens.
    """
    rollout, local_rows = selected.rollout_part(), set(selected.local_rows.tolist())
    oldest = selected.version_bounds[0].to(module.device)
    ranks, max_tokens = ranks_of(trainer.strategy).of_role("policy"), module.microbatch_tokens
    rows = microbatch_rows(rollout, ranks, max_tokens)
    topk = min(TOP, module.policy_config.get_text_config().vocab_size)
    without_supports = {name: values for name, values in rollout.tokens.items() if name != SUPPORTS.name}
    untruncated = replace(rollout, tokens=without_supports)
    is_truncated = SUPPORTS.name in rollout.tokens  # the top-k alternatives come from the untruncated distribution
    sums, largest = torch.zeros(6), torch.zeros(1)
    for experience, num in [(rollout, 0), (untruncated, topk)] if is_truncated else [(rollout, topk)]:
        batches = Microbatches(experience, rows, module.device)
        with trainer.precision_plugin.forward_context():
            policy = module.parallel_models["policy"]
            results: Any = list(forward(policy, batches, max_tokens=max_tokens, ranks=ranks, topk=num))
        for index, batch, outputs in zip(rows, batches, results, strict=True):
            is_local = torch.tensor([row in local_rows for row in index] or [False], device=module.device)
            mask = batch.loss_mask & (batch.weight_versions == version) & is_local[:, None]
            if not mask.any():
                continue
            if num == 0 or not is_truncated:
                differences = (outputs.logprobs - batch.behavior_logprobs)[mask].float()
                parts = [torch.ones_like(differences), differences.abs(), differences, outputs.entropy[mask]]
                sums[:4] += torch.stack([part.sum().float() for part in parts]).cpu()
                largest = largest.maximum(differences.abs().amax().cpu())
            mask &= (oldest[index] == version)[:, None]
            if num and mask.any():
                is_sampled = outputs.teacher_topk_ids[mask] == batch.token_ids[mask][:, None]
                margin_nats = mismatch_bound_nats(rounding, float(outputs.entropy[mask].mean()))
                top = outputs.teacher_topk[mask].float()
                sums[4:] += evidence_nats(top, is_sampled, module.sampling, margin_nats).sum(0).cpu()
    return sums, largest


def evidence_nats(top: Tensor, is_sampled: Tensor, sampling: Sampling, margin_nats: float) -> Tensor:
    """Returns log(exp(λ f) / E[exp(λ f)]) of each token, for a λ > 0 and for -λ, [N, 2].

    Args:
        top: [N, K], descending logprobs of the K most likely tokens before truncation; all others count as one outcome.
        is_sampled: bool [N, K], True for the sampled token, if it is among them.
        margin_nats: maximum rounding error of a logprob.
    """
    chances = top.exp()
    is_kept = chances.cumsum(1) - chances < sampling.top_p  # tokens that the truncation keeps
    if sampling.top_k > 0:
        is_kept[:, sampling.top_k :] = False
    mass = (chances * is_kept).sum(1, keepdim=True)
    # For λ > 0, E omits the outcome "any other token", which would make E too small if no such token is ever sampled.
    other = torch.stack([0 * mass, 0 * mass if sampling.is_truncated else (1 - mass).clamp(min=1e-6)], 2)
    chances = torch.cat([(chances * is_kept / mass)[:, :, None] * (1 - other), other], 1)
    border = torch.where(is_kept, top, 0.0).amin(1, keepdim=True)  # logprob of the least likely kept token
    lowest = border - 1  # used as the logprob of all other tokens
    values = torch.cat([torch.where(is_kept, top, lowest), lowest], 1).clamp(min=-20)
    mean = (chances[:, :, 1] * values).sum(1, keepdim=True)
    spread = (chances[:, :, 1] * (values - mean) ** 2).sum(1, keepdim=True).sqrt().clamp(min=0.05)
    values = values.maximum(mean - 4 * spread)  # very rare tokens must not dominate E
    is_outcome = torch.cat([is_sampled & is_kept, ~(is_sampled & is_kept).any(1, keepdim=True)], 1)
    tilts = torch.tensor([0.5, -0.5], device=top.device) / spread  # λ and -λ
    expected = (chances.log() + tilts[:, None] * values[:, :, None]).logsumexp(1)  # log E
    evidence = tilts * values[is_outcome][:, None] - expected
    if sampling.is_truncated:  # a token beyond the border is stronger evidence
        sampled = torch.where(is_sampled.any(1), torch.where(is_sampled, top, 0.0).sum(1), top[:, -1])
        evidence[:, 1] = torch.where(sampled < border[:, 0] - margin_nats, *OUTSIDE_NATS)
    is_known = ~is_kept[:, -1:] | (not sampling.is_truncated)  # False if the truncation keeps tokens beyond K
    return torch.where(is_known, evidence, 0.0)


def _trained_weights(module: RLModule) -> list[Tensor]:
    policy: Any = module.policy
    return [local(parameter.detach()) for parameter in policy.parameters() if parameter.requires_grad]


@contextlib.contextmanager
def _set_weights(weights: Sequence[Tensor], parameters: Sequence[Tensor]) -> Iterator[None]:
    """Sets the parameters to these weights inside the context; without weights, leaves them unchanged."""
    changed = parameters[: len(weights)]
    originals = [parameter.to("cpu", copy=True) for parameter in changed]
    try:
        for parameter, value in zip(changed, weights, strict=True):
            parameter.copy_(value)
        yield
    finally:
        for parameter, value in zip(changed, originals, strict=True):
            parameter.copy_(value)


def _at_servers(trainer: RLTrainer) -> str:
    """Returns ` at <servers>` for an error message; "" without servers and on ranks other than 0."""
    engine = trainer.rollout.engine
    servers = {} if engine is None else engine.verified_by()
    return f" at {', '.join(servers)}" if servers else ""
