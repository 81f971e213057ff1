"""Minibatch losses, the guard against gradients that are not finite, and updates through Lightning's own trainer."""

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from algorithm_cases import ALGORITHMS, fit, make_module
from tiny import random_experience, tiny_spec
from torch import Tensor

from lightrl import Sampling
from lightrl.algorithms import GRPO, EarlyStop
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.dataflow import ModelCall
from lightrl.errors import TrainingError
from lightrl.experience import Experience
from lightrl.loops.update import (
    SQUARED_WEIGHT,
    WEIGHT,
    GradientGuard,
    MinibatchLoss,
    add_parts,
    over_ranks,
    parts_of,
    reduction_of,
    values_of,
)
from lightrl.models import Outputs
from lightrl.strategies import Ranks


def outputs_like(experience: Experience, *, requires_grad: bool = False) -> Outputs:
    logprobs = torch.where(experience.loss_mask, experience.behavior_logprobs - 0.1, 0.0)
    return Outputs(logprobs.requires_grad_(requires_grad), torch.full_like(experience.behavior_logprobs, 2.0))


class Named(GRPO):
    """What a user writes, with a mistake in its loss."""

    mistake: Any = None
    reward = lambda self, trajectory: 0.0  # noqa: E731

    def loss(self, experience: Experience, outputs: Outputs) -> Any:
        return type(self).mistake(self, experience, outputs)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda self, experience, outputs: outputs.logprobs,
         "Named.loss must return a dict, got Tensor. Return {'loss'"),
        (lambda self, experience, outputs: None, r"Named\.loss must return a dict, got NoneType"),
        (lambda self, experience, outputs: {"loss": outputs.logprobs.detach()},
         r"Named\.loss returns a loss that has no gradient\. Compute it from outputs\.logprobs"),
        (lambda self, experience, outputs: {"loss": experience.advantage},
         r"Named\.loss reads experience\.advantage, which does not exist\. Use advantages\."),
        (lambda self, experience, outputs: {"loss": outputs.logprobs - experience.proximal_logprobs},
         r"Named\.loss computes with None .*has no .*proximal_logprobs.*Set needs_proximal_logprobs = True"),
        (lambda self, experience, outputs: {"loss": outputs.logprobs + "x"}, "unsupported operand"),
    ],
    ids=["a bare tensor", "nothing", "a detached loss", "a misspelled field", "proximal logprobs not asked for",
         "any other is the user's own"],
)  # fmt: skip
def test_a_mistake_in_loss_is_a_sentence_with_class_hook_and_fix(
    mistake: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Named, "mistake", staticmethod(mistake))
    module = Named(tiny_spec(), group_size=2)
    module.needs_proximal_logprobs = False
    experience = random_experience(is_scored=False)
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        MinibatchLoss(module, experience)(experience, outputs_like(experience, requires_grad=True))


def returning(value: Any, **settings: Any) -> GRPO:
    """A module whose loss gives this, or what this gives for (experience, outputs)."""
    module = make_module(**settings)
    module.loss = value if callable(value) else lambda *_: value  # type: ignore[method-assign]
    return module


def test_metrics_are_means_over_the_loss_tokens_and_trajectories_of_the_whole_minibatch() -> None:
    minibatch = random_experience()
    torch.manual_seed(0)  # a mean near 0 would have none of the digits that are compared
    per_token, per_trajectory = torch.randn(minibatch.token_ids.shape), torch.randn(len(minibatch))
    rows, parts = minibatch.microbatch_rows(30)
    assert len(parts) > 2
    values = iter(
        [
            {"loss": per_token[r, : p.token_ids.shape[1]], "level": per_trajectory[r]}
            for r, p in zip(rows, parts, strict=True)
        ]
    )
    losses = MinibatchLoss(returning(lambda *_: next(values)), minibatch)
    total = sum(float(losses(part, outputs_like(part))) for part in parts)
    assert values_of(losses.parts)["loss"] == pytest.approx(float(per_token[minibatch.loss_mask].mean()), rel=1e-5)
    assert values_of(losses.parts)["level"] == pytest.approx(float(per_trajectory.mean()), rel=1e-5)
    assert values_of(losses.parts)["entropy_nats"] == pytest.approx(2.0)
    # d = 0.1 for every token: the policy's logprob is lower by that.
    assert values_of(losses.parts)["kl_behavior_nats"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-3)
    assert values_of(losses.parts)["ess_fraction"] == pytest.approx(1)  # all have lost as much
    assert values_of(losses.parts)["behavior_abs_dlogp_nats"] == pytest.approx(0.1, rel=1e-3)
    assert values_of(losses.parts)["max_behavior_abs_dlogp_nats"] == pytest.approx(0.1, rel=1e-3)
    assert total == pytest.approx(values_of(losses.parts)["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"policy_loss": torch.zeros(9, 1)}, r"loss must return a dict with the key 'loss', got .*\['policy_loss'\]"),
        ({"loss": torch.zeros(())}, r"loss must return 'loss' per token, \[B, T\] = \(9, .*got \(\)\."),
        ({"loss": torch.zeros(9, 1)}, r"'loss' per token, .* got \(9, 1\)"),
        ({"loss": torch.zeros(9), "level": torch.zeros(4)}, r"'level' per token, .* \[B\] = \(9,\), got \(4,\)"),
        ({"loss": torch.zeros(9), "level": 0.5}, "'level' per token, .* got float"),
        ({"loss": (torch.zeros(9), torch.ones(9))}, "'loss' per token, .* got tuple"),
        (
            {"loss": torch.zeros(9), "level": (random_experience().rewards, random_experience().behavior_logprobs)},
            r"Values and weights of 'level' from GRPO.loss must have the same shape, got \(9,\) and \(9, \d+\)",
        ),
        ({"loss": torch.zeros(9), "level": (torch.zeros(9),)}, "'level' per token, .* got tuple"),
        ({"loss": torch.zeros(9), "level": (torch.zeros(4), torch.ones(4))}, r"'level' per token, .* got \(4,\)"),
    ],
    ids=["no loss", "scalar", "would broadcast", "wrong metric", "number", "pair", "shapes", "no pair", "wrong pair"],
)
def test_what_loss_returns_is_checked(value: dict[str, Any], message: str) -> None:
    minibatch = random_experience()
    with pytest.raises(ValueError, match=message):
        MinibatchLoss(returning(value), minibatch)(minibatch, outputs_like(minibatch))


@pytest.mark.parametrize("microbatch_tokens", [1, 20, 10**6])
def test_a_metric_over_some_tokens_has_their_number_as_its_denominator(microbatch_tokens: int) -> None:
    """In some microbatches no advantage is above 0, and the metric is returned by those only that have one."""
    minibatch = random_experience()

    def loss(part: Experience, outputs: Outputs) -> dict[str, Any]:
        is_good = (part.advantages > 0).float()
        found = {"loss": outputs.logprobs, "good_nats": (part.behavior_logprobs, is_good)}
        return {**found, "max_good_nats": (part.behavior_logprobs, is_good)} if is_good.any() else found

    losses = MinibatchLoss(returning(loss), minibatch)
    for part in minibatch.microbatch_rows(microbatch_tokens)[1]:
        losses(part, outputs_like(part))
    losses.reduce()
    expected = minibatch.behavior_logprobs[minibatch.loss_mask & (minibatch.advantages > 0)]
    assert 0 < len(expected) < minibatch.num_loss_tokens
    assert values_of(losses.parts)["good_nats"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert values_of(losses.parts)["max_good_nats"] == pytest.approx(float(expected.max()))


def test_only_tokens_of_the_present_version_show_the_engines_mismatch() -> None:
    minibatch = random_experience()
    is_old = torch.arange(minibatch.token_ids.shape[1]) % 2 == 0
    versions = torch.where(minibatch.loss_mask, torch.where(is_old, 4, 5), -1).to(minibatch.weight_versions.dtype)
    outputs = outputs_like(minibatch)
    outputs = replace(outputs, logprobs=outputs.logprobs - 0.4 * (versions == 4))
    metrics: dict[int, dict[str, float]] = {}
    for version in (4, 5, 6):
        losses = MinibatchLoss(make_module(), replace(minibatch, weight_versions=versions), weight_version=version)
        losses(losses.minibatch, outputs)
        metrics[version] = values_of(losses.parts)
    for name in ("sync/mismatch_abs_dlogp_nats", "sync/max_mismatch_abs_dlogp_nats"):
        assert metrics[4][name] == pytest.approx(0.5, rel=1e-3)
        assert metrics[5][name] == pytest.approx(0.1, rel=1e-3)
        assert name not in metrics[6]
    assert metrics[5]["sync/mismatch_k3_nats"] == pytest.approx(math.exp(-0.1) - 1 + 0.1, rel=1e-3)
    assert 0.1 < metrics[5]["behavior_abs_dlogp_nats"] < 0.5  # of all tokens: mismatch and lag together


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
def test_the_logged_loss_is_the_one_that_is_minimized(mode: Any) -> None:
    minibatch = random_experience()
    losses = MinibatchLoss(
        returning(lambda part, _: {"loss": torch.ones(part.token_ids.shape)}, loss_reduction=mode), minibatch
    )
    minimized = sum(float(losses(part, outputs_like(part))) for part in minibatch.microbatch_rows(20)[1])
    assert values_of(losses.parts)["loss"] == pytest.approx(minimized)


def test_a_metric_that_carries_a_gradient_is_logged_without_it() -> None:
    minibatch = random_experience()
    losses = MinibatchLoss(
        returning(lambda _, outputs: {"loss": outputs.logprobs, "twice": 2 * outputs.logprobs}), minibatch
    )
    losses(minibatch, outputs_like(minibatch, requires_grad=True)).backward()
    assert losses.parts.keys() >= {"loss", "twice"}
    assert not [name for name, part in losses.parts.items() if part.requires_grad]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf], ids=str)
def test_outputs_that_are_not_finite_at_masked_positions_leave_loss_and_gradient_as_they_are(junk: float) -> None:
    module, minibatch = make_module(), random_experience()
    results = []
    for fill in (0.0, junk):
        logprobs = torch.where(minibatch.loss_mask, minibatch.behavior_logprobs - 0.1, fill).requires_grad_()
        entropy = torch.where(minibatch.loss_mask, torch.tensor(2.0), torch.tensor(fill))
        losses = MinibatchLoss(module, minibatch)
        losses(minibatch, Outputs(logprobs, entropy)).backward()
        results.append((logprobs.grad, values_of(losses.parts)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_minibatch_that_trains_nothing_has_loss_zero() -> None:
    minibatch = random_experience()
    minibatch = replace(minibatch, loss_mask=torch.zeros_like(minibatch.loss_mask))
    losses = MinibatchLoss(make_module(), minibatch)
    assert float(losses(minibatch, outputs_like(minibatch))) == 0
    losses.reduce()
    assert values_of(losses.parts) == {}  # no mean of nothing, and no -inf


def trained_once() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_the_norm_is_that_of_all_gradients_together() -> None:
    layer, optimizer = trained_once()
    layer.weight.grad, layer.bias.grad = torch.full((2, 3), 2.0), torch.tensor([5.0, 0.0])
    # sqrt(6·4 + 25) = 7
    assert GradientGuard().check(list(layer.parameters()), optimizer.zero_grad, max_in_a_row=2) == pytest.approx(7)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_an_update_without_finite_gradients_changes_neither_parameters_nor_optimizer(bad: float) -> None:
    layer, optimizer = trained_once()
    before = [value.detach().clone() for value in layer.parameters()]
    moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
    layer.weight.grad[0, 0] = bad
    guard = GradientGuard()

    def zero_grad() -> None:  # as a module may override it
        optimizer.zero_grad(set_to_none=False)

    guard.check(list(layer.parameters()), zero_grad, max_in_a_row=2)
    optimizer.step()
    assert guard.num_skipped == 1
    assert all(map(torch.equal, before, layer.parameters()))
    assert all(map(torch.equal, moments, [value for state in optimizer.state.values() for value in state.values()]))


class Counts(RLCallback):
    """What Lightning does to the optimizer, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gradient_dtypes: set[torch.dtype] = set()
        self.metrics: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.events.append("zero")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.events.append("backward")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.events.append("step")
        gradients: list[Tensor | None] = [value.grad for value in pl_module.parameters()]
        self.gradient_dtypes.update(value.dtype for value in gradients if value is not None)

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: dict[str, float], index: int, total: int) -> None:
        self.metrics.append(metrics)


def module_to_fit(algorithm: str = "GRPO", **settings: Any) -> GRPO:
    defaults: dict[str, Any] = {
        # A lambda runs in this process; a function would cost each test the start of a worker.
        "reward": lambda trajectory: float(trajectory.completion_ids[0] % 3),
        "group_size": 3,
        "sampling": Sampling(max_new_tokens=6),
        "lr": 0.01,
    }
    return ALGORITHMS[algorithm](tiny_spec(), **{**defaults, **settings})


def test_gradients_are_zeroed_once_and_applied_once_for_each_minibatch(tmp_path: Path) -> None:
    counts = Counts()
    module = module_to_fit(num_minibatches=2, update_epochs=2, microbatch_tokens=1)
    trainer = fit(tmp_path, module, counts)
    one_minibatch = ["zero", *["backward"] * 6, "step"]
    assert counts.events == one_minibatch * 4
    assert trainer.rollout_loop.num_updates == 4
    assert trainer.global_step == trainer.weight_version == 1


@pytest.mark.parametrize("algorithm", ["GRPO", "GRPO decoupled", "GSPO"])
def test_the_trained_weights_do_not_depend_on_microbatches(algorithm: str, tmp_path: Path) -> None:
    """Plain gradient descent, whose step is the gradient: Adam's would hide a factor."""
    weights = []
    for microbatch_tokens in (1, 20, 10**6):
        module = module_to_fit(algorithm, num_minibatches=2, microbatch_tokens=microbatch_tokens)
        start = module.policy_spec.load_model().state_dict()
        module.configure_optimizers = lambda: torch.optim.SGD(module.policy.parameters(), lr=0.05)  # noqa: B023
        fit(tmp_path, module)
        weights.append({name: value - start[name] for name, value in module.policy.state_dict().items()})
    for other in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-6)
    assert max(float(value.abs().max()) for value in weights[0].values()) > 1e-3


def test_an_iterations_metrics_weigh_its_minibatches_by_their_tokens(tmp_path: Path) -> None:
    class Uneven(RLCallback):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> Experience:
            most = torch.arange(len(experience))[:, None] // 2
            return replace(experience, loss_mask=experience.loss_mask & (experience.loss_mask.cumsum(1) <= 1 + most))

    counts, num_tokens = Counts(), []
    module = module_to_fit(num_minibatches=4)
    module.on_minibatch_start = lambda minibatch, *_: num_tokens.append(minibatch.num_loss_tokens)
    trainer = fit(tmp_path, module, Uneven(), counts)
    found = [metrics["entropy_nats"] for metrics in counts.metrics]
    weighted = sum(map(math.prod, zip(found, num_tokens, strict=True))) / sum(num_tokens)
    assert weighted != pytest.approx(sum(found) / 4, rel=1e-4)
    assert float(trainer.callback_metrics["policy/entropy_nats"]) == pytest.approx(weighted, rel=1e-6)


def test_an_update_that_went_too_far_is_the_iterations_last(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_minibatches": 2, "update_epochs": 3, "group_size": 2}
    assert fit(tmp_path, module_to_fit("PPO", **settings)).rollout_loop.num_updates == 6
    module, counts = module_to_fit("PPO", early_stop=EarlyStop(kl_nats=1e-12), **settings), Counts()
    trainer = fit(tmp_path, module, counts, num_iterations=2)
    assert len(counts.metrics) == trainer.rollout_loop.num_updates <= 4
    assert trainer.weight_version == 2


def test_neither_minibatch_nor_microbatch_parts_what_the_loss_reads_as_a_whole(tmp_path: Path) -> None:
    cuts: dict[str, list[list[int]]] = {"minibatch": [], "microbatch": []}

    class ByGroup(GRPO):
        loss_unit = "group"

        def on_minibatch_start(self, minibatch: Experience, index: int, total: int) -> None:
            cuts["minibatch"].append(minibatch.group_ids.tolist())

        def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
            cuts["microbatch"].append(experience.group_ids.tolist())
            return super().loss(experience, outputs)

    settings: dict[str, Any] = {"group_size": 3, "sampling": Sampling(max_new_tokens=6)}
    fit(tmp_path, ByGroup(tiny_spec(), reward=lambda _: 0.5, num_minibatches=2, microbatch_tokens=1, **settings))
    assert sorted(cuts["minibatch"][0] + cuts["minibatch"][1]) == sorted([0, 1, 2, 3] * 3)
    assert sorted(cuts["microbatch"]) == [[group] * 3 for group in range(4)]


def test_a_call_has_its_own_bound_on_a_microbatch(tmp_path: Path) -> None:
    class OneByOne(GRPO):
        def train_calls(self) -> list[ModelCall]:
            return [replace(call, microbatch_tokens=1) for call in super().train_calls()]

    counts = Counts()
    settings: dict[str, Any] = {"group_size": 3, "sampling": Sampling(max_new_tokens=6)}
    fit(tmp_path, OneByOne(tiny_spec(), reward=lambda _: 0.5, num_minibatches=2, **settings), counts)
    assert counts.events == ["zero", *["backward"] * 6, "step"] * 2


class SpoilsGradients(RLCallback):
    """Makes the gradients of the given updates NaN."""

    def __init__(self, *updates: int) -> None:
        self.updates = updates

    def on_after_backward(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.rollout_loop.num_updates in self.updates:
            next(pl_module.parameters()).grad.fill_(math.nan)


def test_a_skipped_update_leaves_the_policy_and_the_run_continues(tmp_path: Path) -> None:
    module, counts = module_to_fit(), Counts()
    trainer = fit(tmp_path, module, counts, SpoilsGradients(0), gradient_clip_val=1.0)
    start = module.policy_spec.load_model()
    assert all(map(torch.equal, start.parameters(), module.policy.parameters()))
    assert not trainer.optimizers[0].state
    assert trainer.callback_metrics["policy/skipped_updates"] == 1
    assert "grad_norm" not in counts.metrics[0]
    assert trainer.weight_version == 1


def test_the_logged_norm_is_that_of_the_updates_that_were_made(tmp_path: Path) -> None:
    counts = Counts()
    trainer = fit(tmp_path, module_to_fit(num_minibatches=3), counts, SpoilsGradients(1))
    made = [metrics["grad_norm"] for metrics in counts.metrics if "grad_norm" in metrics]
    assert len(made) == 2
    assert float(trainer.callback_metrics["policy/grad_norm"]) == pytest.approx(sum(made) / 2, rel=1e-5)


def test_fewer_trajectories_than_minibatches_make_fewer_updates(tmp_path: Path) -> None:
    """Two of three rewards fail: four trajectories are left for six minibatches, and none of these is empty."""

    def reward(trajectory: Any) -> float:
        return 1.0 if trajectory.sample == 0 else math.nan

    counts = Counts()
    module = module_to_fit(num_minibatches=6, max_failed_fraction=1.0, reward=reward)
    trainer = fit(tmp_path, module, counts)
    assert counts.events == ["zero", "backward", "step"] * 4
    assert trainer.rollout_loop.num_updates == 4


def test_the_run_ends_after_the_stated_number_in_a_row_and_a_good_update_starts_again(tmp_path: Path) -> None:
    module, counts = module_to_fit(max_skipped_updates=3, num_minibatches=12), Counts()
    with pytest.raises(TrainingError, match=r"3 updates in a row .*max_skipped_updates=3\)\. Lower the learning rate"):
        fit(tmp_path, module, counts, SpoilsGradients(0, 1, 3, 4, 6, 7, 8))
    assert counts.events.count("backward") == 9  # one for each update


def test_bfloat16_mixed_precision_stays_near_float32(tmp_path: Path) -> None:
    """Weights are float32, products bfloat16: the norms agree within 5 %, the logprobs' divergence within 0.01 nats."""
    found = []
    for precision in ("32-true", "bf16-mixed"):
        counts = Counts()
        module = module_to_fit("GRPO decoupled", num_minibatches=2, microbatch_tokens=20)
        fit(tmp_path, module, counts, precision=precision)
        assert module.policy.dtype == torch.float32
        assert counts.gradient_dtypes == {torch.float32}
        found.append(counts.metrics)
    assert len(found[0]) == 2
    for full, mixed in zip(*found, strict=True):
        assert mixed["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.05)
        assert mixed["entropy_nats"] == pytest.approx(full["entropy_nats"], abs=0.01)


def test_bfloat16_weights_train_with_float32_logprobs(tmp_path: Path) -> None:
    seen: list[Experience] = []

    class Keep(RLCallback):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
            seen.append(experience)

    module = module_to_fit("GRPO decoupled", num_minibatches=2)
    fit(tmp_path, module, Keep(), precision="bf16-true")
    assert module.policy.dtype == torch.bfloat16
    assert {value.dtype for value in seen[0].tensors().values() if value.is_floating_point()} == {torch.float32}


def test_a_hook_that_masks_tokens_is_obeyed_by_the_update(tmp_path: Path) -> None:
    class OnlyFirstTokens(RLCallback):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> Experience:
            first = experience.loss_mask & (experience.loss_mask.cumsum(1) == 1)
            return replace(experience, loss_mask=first)

    seen: list[int] = []

    class Count(RLCallback):
        def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Experience, index: int, total: int) -> None:
            seen.append(minibatch.num_loss_tokens)
            assert minibatch.advantages[~minibatch.loss_mask].eq(0).all()

    fit(tmp_path, module_to_fit(), OnlyFirstTokens(), Count())
    assert seen == [12]


MASK = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])
NAMES = ["ratio", "max_ratio", "critic/min_value", "num_clipped"]


def value(name: str, metric: Any, mask: Tensor = MASK) -> float | None:
    """Of a minibatch that is one microbatch on one rank; None where it is left out."""
    return values_of(parts_of({name: metric}, mask)).get(name)


def test_the_name_says_how_values_are_put_together() -> None:
    assert [reduction_of(name) for name in NAMES] == ["mean", "max", "min", "sum"]
    assert reduction_of("minibatch_loss") == reduction_of("maximum") == reduction_of("number") == "mean"


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 5.0, 1.0, 9.0], strict=True)), ids=NAMES)
def test_masked_tokens_count_nowhere(name: str, expected: float) -> None:
    values = torch.tensor([[math.nan, 1.0, 3.0, math.inf], [9.0, 5.0, -9.0, 9.0], [99.0] * 4])
    assert value(name, values) == expected


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 4.0, 2.0, 6.0], strict=True)), ids=NAMES)
def test_a_number_per_trajectory_counts_where_a_token_trains(name: str, expected: float) -> None:
    assert value(name, torch.tensor([2.0, 4.0, 99.0])) == expected


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [2.5, 5.0, 1.0, 10.0], strict=True)), ids=NAMES)
def test_a_pair_is_weighed_by_its_weights(name: str, expected: float) -> None:
    """Of the values 1, 3 and 5 with the weights 3, 0 and 1: Σ w·v = 8 with the first two, whose sum is 4."""
    values = torch.tensor([[math.nan, 1.0, math.inf, 9.0], [9.0, 5.0, -9.0, 9.0], [99.0] * 4])
    weights = torch.tensor([[7.0, 2.5, 0.0, 7.0], [7.0, 1.5, 7.0, 7.0], [7.0] * 4])
    assert value(name, (values, weights)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_without_weight_is_left_out(name: str) -> None:
    """Neither 0 nor -inf reaches a logger."""
    ones = torch.ones(3, 4)
    assert value(name, ones, torch.zeros_like(MASK)) is None
    assert value(name, torch.ones(3), torch.zeros_like(MASK)) is None
    assert value(name, (ones, 0 * ones)) is None
    parts: dict[str, Tensor] = {}
    add_parts(parts, parts_of({name: ones}, torch.zeros_like(MASK)))
    assert values_of(parts) == {}
    add_parts(parts, parts_of({name: 2 * ones}, MASK))
    assert values_of(parts) == {name: 6.0 if name == "num_clipped" else 2.0}


def test_metrics_that_are_made_together_are_those_made_alone() -> None:
    values, others = torch.randn(3, 4), torch.randn(3)
    present, weights, of_rows = torch.rand(3, 4) < 0.7, torch.rand(3, 4), torch.tensor([0.5, 2.0, 1.0])
    metrics: dict[str, Any] = {
        "plain": values, "max_plain": values, "rows": others, "min_rows": others, "num_present": (values, present),
        "mean": (values, weights), "max_mean": (values, weights), "of_rows": (others, of_rows),
        "same_weights": (values.square(), weights), "present": (values, present),
    }  # fmt: skip
    for name, part in parts_of(metrics, MASK).items():
        assert torch.equal(part, parts_of({name: metrics[name]}, MASK)[name]), name


def cut_metrics(name: str, cuts: list[int]) -> tuple[list[Tensor], float]:
    """The parts of a pair's microbatches, of which some have no weight, and the whole's value by a plain loop."""
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(7, 5, generator=generator), torch.rand(7, 5, generator=generator) < 0.5
    weights = torch.rand(7, 5, generator=generator) * (torch.rand(7, 5, generator=generator) < 0.5)
    cells = [(float(values[at]), float(weights[at])) for at in map(tuple, mask.nonzero().tolist()) if weights[at] > 0]
    mean = sum(v * w for v, w in cells) / sum(w for _, w in cells)
    bounds = {"max_ratio": max(v for v, _ in cells), "critic/min_value": min(v for v, _ in cells)}
    expected = sum(v * w for v, w in cells) if name == "num_clipped" else bounds.get(name, mean)
    triples = zip(values.split(cuts), weights.split(cuts), mask.split(cuts), strict=True)
    return [parts_of({name: (part, its_weights)}, its_mask)[name] for part, its_weights, its_mask in triples], expected


CUTS = [[7], [1, 6], [3, 2, 2], [1] * 7]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_metrics_do_not_depend_on_how_many_microbatches_minibatches_or_ranks_there_are(
    name: str, cuts: list[int]
) -> None:
    parts, expected = cut_metrics(name, cuts)
    minibatches = dict[str, Tensor]()
    for part in parts:
        add_parts(minibatches, {name: part})
    by_rank = on_ranks(*({name: part} for part in parts))
    assert len(by_rank) == len(cuts)
    for found in (values_of(minibatches), *by_rank):
        assert found == pytest.approx({name: expected}, rel=1e-5)


def part(number: float, weight: float) -> Tensor:
    return torch.tensor([number, weight])


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: a sum waits until every rank has brought its part."""

    def __init__(self, dp_rank: int, dp_size: int, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.dp_rank, self.dp_size, self.barrier, self.parts = dp_rank, dp_size, barrier, parts

    def sum_(self, tensor: Tensor) -> Tensor:
        self.parts[self.dp_rank] = tensor
        self.barrier.wait(timeout=600)
        total = torch.stack(list(self.parts)).sum(0)
        self.barrier.wait(timeout=600)
        return total


def on_ranks(*parts: dict[str, Tensor]) -> list[dict[str, float]]:
    """What each rank, which has these parts, reports."""
    num = len(parts)
    barrier, columns, found = threading.Barrier(num), [None] * num, [{}] * num

    def run(rank: int) -> None:
        found[rank] = values_of(over_ranks(parts[rank], ThreadRanks(rank, num, barrier, columns)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_metric_of_one_rank_alone_reaches_all_and_nobody_waits() -> None:
    found = on_ranks(
        {"ratio": part(2.0, 8)}, {"ratio": part(4.0, 4), "tool_calls": part(8.0, 2)}, {"min_value": part(2.0, 5)}
    )
    assert found == [{"ratio": 0.5, "min_value": 2.0, "tool_calls": 4.0}] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_weight_changes_nothing_and_where_no_rank_has_any_the_name_is_left_out(name: str) -> None:
    empty = parts_of({name: torch.ones(3, 4)}, torch.zeros_like(MASK))[name]
    whole = parts_of({name: torch.full((3, 4), 2.0)}, MASK)[name]
    assert on_ranks({name: empty}, {name: whole}) == [{name: 6.0 if name == "num_clipped" else 2.0}] * 2
    assert on_ranks({name: empty}, {name: empty}) == [{}, {}]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([3.0, 3.0], 1.0), ([8.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 3.0], 16 / 20)],
    ids=["on-policy", "of any size", "one has all the weight", "uneven"],
)
def test_the_effective_sample_size_worked_by_hand(ratios: list[float], expected: float) -> None:
    assert values_of(ess_parts(torch.tensor([ratios]))) == pytest.approx({"ess_fraction": expected})


def ess_parts(ratios: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(ratios, dtype=torch.bool)
    return parts_of({WEIGHT: ratios, SQUARED_WEIGHT: ratios.square()}, mask)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_effective_sample_size_is_that_of_all_minibatches_and_ranks(cuts: list[int]) -> None:
    """Not the mean of their own ones: a rank with even ratios far below another's has a part in it."""
    ratios = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).exp()
    expected = float(ratios.sum() ** 2 / (35 * ratios.square().sum()))
    parts = [ess_parts(part) for part in ratios.split(cuts)]
    metrics: dict[str, Tensor] = {}
    for part in parts:
        add_parts(metrics, part)
    for found in [values_of(metrics), *on_ranks(*parts)]:
        assert found == pytest.approx({"ess_fraction": expected}, rel=1e-5)
