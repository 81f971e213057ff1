"""PPO's advantages against the definition, its settings, its critic on a bandit, its state over a resume."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import algorithm_cases
import lightning as L
import pytest
import torch
from algorithm_cases import make_module, minibatch_gradient
from tiny import random_experience, slow_outputs, tiny_spec
from torch import Tensor

from lightrl import Sampling
from lightrl.algorithms import PPO, AdaptiveKL, EarlyStop
from lightrl.experience import Experience
from lightrl.functional import RewardShaping
from lightrl.models import Role
from lightrl.models.lora import LoRA
from lightrl.rewards import OverlongPenalty

KL = AdaptiveKL(0.1, tiny_spec())


def ppo(**settings: Any) -> PPO:
    defaults: dict[str, Any] = {"reward": len, "whiten_advantages": False, "sampling": Sampling(max_new_tokens=8)}
    return PPO(settings.pop("policy", tiny_spec()), **{**defaults, **settings})


def experience_of(seed: int = 0, **changes: Any) -> Experience:
    return replace(random_experience(num_turns=2, seed=seed), **changes)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_are_those_of_a_loop_over_each_trajectory(seed: int) -> None:
    """KL in the reward, outcome on the last loss token, bootstrap where truncated; gamma 0.9, lam 0.8."""
    module = ppo(gamma=0.9, lam=0.8, reference=KL, reward_shaping=RewardShaping(bias=-0.25, scaling=2.0))
    experience = experience_of(seed)
    actual = module.advantages(experience)
    for row in range(len(experience)):
        steps = experience.loss_mask[row].nonzero()[:, 0].tolist()
        advantage, value = 0.0, float(experience.bootstrap_values[row])
        for t in reversed(steps):
            difference = float(experience.behavior_logprobs[row, t] - experience.reference_logprobs[row, t])
            reward = -0.1 * difference + (2 * (float(experience.rewards[row]) - 0.25) if t == steps[-1] else 0.0)
            now = float(experience.values[row, t])
            advantage = reward + 0.9 * value - now + 0.9 * 0.8 * advantage
            value = now
            assert float(actual["advantages"][row, t]) == pytest.approx(advantage, abs=1e-5)
            assert float(actual["returns"][row, t]) == pytest.approx(advantage + now, abs=1e-5)


def test_besides_rewards_of_tokens_bias_and_overlong_penalty_are_the_last_ones() -> None:
    """Limit 8, buffer 4: 4, 6 and 8 tokens lose 0, 1/2 and 1. The last of them gets 2 · (0.5 - 0.25 - that)."""
    experience = random_experience(num_groups=1, group_size=3)
    columns = torch.arange(experience.token_ids.shape[1])
    num_tokens = torch.tensor([4, 6, 8])[:, None]
    experience = replace(experience, loss_mask=(columns >= 1) & (columns <= num_tokens))
    given = torch.where(experience.loss_mask, 0.5, 0.0)
    module = ppo(reward_shaping=RewardShaping(bias=-0.25, scaling=2.0), overlong_penalty=OverlongPenalty(4))
    actual = module.token_rewards(experience.with_tensors({"token_rewards": given}))
    lost = torch.where(columns == num_tokens, torch.tensor([[0.25], [0.75], [1.25]]), 0.0)
    torch.testing.assert_close(actual, 2 * (given - lost))


def test_the_kl_weight_of_the_next_iteration_follows_the_kl_of_the_loss_tokens() -> None:
    """10 % above its target, 9 trajectories of a horizon of 90: 0.1 · (1 + 0.1 · 9/90)."""
    experience, fixed = experience_of(), AdaptiveKL(0.1, tiny_spec(), "k2")
    differences = (experience.behavior_logprobs - experience.reference_logprobs)[experience.loss_mask]
    target = float((differences**2 / 2).mean()) / 1.1
    module = ppo(reference=replace(fixed, target_nats=target, horizon=90))
    expected = ppo(reference=fixed).advantages(experience)["advantages"]
    torch.testing.assert_close(module.advantages(experience)["advantages"], expected)
    assert module.kl_coef == pytest.approx(0.101, rel=1e-5)
    expected = ppo(reference=replace(fixed, coef=0.101)).advantages(experience)["advantages"]
    torch.testing.assert_close(module.advantages(experience)["advantages"], expected)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_loss_tokens() -> None:
    experience = experience_of()
    actual = ppo(whiten_advantages=True).advantages(experience)["advantages"][experience.loss_mask]
    assert float(actual.mean()) == pytest.approx(0, abs=1e-5)
    assert float(actual.std()) == pytest.approx(1, abs=1e-3)


def test_normalized_values_are_taken_back_before_and_returns_normalized_after() -> None:
    experience = experience_of()
    plain, normalized = ppo(), ppo(value_normalization="running")
    normalized.normalizer.update(torch.tensor([-1.0, 3.0]))
    bootstrap = torch.where(experience.is_truncated, normalized.normalizer.normalize(experience.bootstrap_values), 0.0)
    scaled = replace(experience, values=normalized.normalizer.normalize(experience.values), bootstrap_values=bootstrap)
    expected, found = plain.advantages(experience), normalized.advantages(scaled)
    torch.testing.assert_close(found["advantages"], expected["advantages"])
    mask = experience.loss_mask
    torch.testing.assert_close(normalized.normalizer.denormalize(found["returns"])[mask], expected["returns"][mask])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": AdaptiveKL(0.1)}, "reference needs a model: the policy has no LoRA adapters"),
        ({"reference": replace(KL, in_reward=False, estimator="k1")}, "must be k2 or k3 if the KL is in the loss"),
        ({"value_coef": -0.1}, "value_coef must be >= 0, got -0.1"),
        ({"value_coef": 0.5}, "value_coef=0.5 has no effect unless critic is 'shared'"),
        ({"value_decay": 0.9}, "value_decay=0.9 has no effect unless value_normalization is 'exponential'"),
        ({"critic_warmup_iterations": -1}, "critic_warmup_iterations must be >= 0, got -1"),
        ({"gamma": 2}, "gamma must be between 0 and 1, got 2"),
        ({"value_clip": 0}, "^value_clip must be a finite number above 0, got 0"),
        ({"value_normalization": "all"}, "^value_normalization must be exponential or running, got 'all'"),
        ({"value_normalization": "exponential", "value_decay": 1}, "^value_decay must be at least 0 and below 1"),
        ({"huber_delta": -1}, "huber_delta must be a finite number above 0, got -1"),
        (
            {"policy": Role(tiny_spec(), lora=LoRA(rank=2)), "reference": replace(KL, decay=0.9)},
            "reference.decay=0.9 moves the reference towards the policy's weights, but lora does not train",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ppo(**settings)


def test_a_statistic_of_the_group_is_no_setting():
    with pytest.raises(TypeError, match="multiple values for keyword argument 'leave_one_out'"):
        ppo(leave_one_out=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardShaping(clip=0), "clip in reward_shaping must be above 0"),
        (lambda: RewardShaping(scaling=0), "scaling in reward_shaping must not be 0"),
        (lambda: replace(KL, decay=1.5), r"decay must be between 0 and 1, got 1\.5"),
        (lambda: replace(KL, target_nats=0), "target_nats must be a finite number above 0, got 0"),
        (lambda: EarlyStop(ratio=0.5), r"ratio of early_stop must be above 1"),
        (lambda: EarlyStop(kl_nats=-1), "kl_nats of early_stop must be above 0"),
    ],
    ids=["clip", "scaling", "decay", "target", "ratio", "kl"],
)
def test_objects_check_their_own_settings(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def names(module: PPO) -> list[str]:
    return [call.name for call in module.data_flow().calls]


def test_the_graph_has_what_the_settings_ask_for() -> None:
    assert names(ppo()) == ["generate", "reward", "values", "advantages", "policy_update", "critic_update"]
    full = ppo(reference=KL, decoupled=True, num_minibatches=2)
    assert set(names(full)) - set(names(ppo())) == {"reference_logprobs", "proximal_logprobs"}
    assert set(names(ppo(critic="shared"))) == set(names(ppo())) - {"critic_update"}
    assert {"values", "returns"} <= set(ppo(critic="shared").data_flow()["policy_update"].inputs)
    assert "generate" not in [call.name for call in ppo().data_flow(from_file=True).calls]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"value_clip": None}, 0.5), ({}, 0.845), ({"huber_delta": 0.4}, 0.44)],
    ids=["no clip", "a clip of 0.2", "Huber's beyond 0.4"],
)
def test_the_value_loss_is_the_one_of_the_settings(settings: dict[str, Any], expected: float) -> None:
    """From 0.5 to 1, where 2 came: ½·1². Clipped to 0.7: ½·1.3². Linear from 0.4: 0.4·(1.3 - 0.4/2)."""
    experience = experience_of()
    like = torch.ones_like(experience.values)
    experience = replace(experience, values=0.5 * like, returns=2 * like)
    assert ppo(**settings).value_loss(experience, like)["loss"][0, 0] == pytest.approx(expected)


def test_the_value_loss_of_a_shared_body_has_its_weight() -> None:
    experience = replace(random_experience(), advantages=torch.zeros(random_experience().token_ids.shape))
    one, three = (
        minibatch_gradient(make_module("PPO on one body", value_coef=coef), experience)[0] for coef in (0.1, 0.3)
    )
    assert one["value_head.weight"].abs().max() > 0
    for name, value in one.items():
        torch.testing.assert_close(three[name], 3 * value)


def test_a_warming_critic_learns_alone() -> None:
    module = make_module("PPO", critic_warmup_iterations=1)
    for weight_version, roles in ((0, {"critic"}), (1, {"policy", "critic"})):
        module.trainer = SimpleNamespace(weight_version=weight_version)
        gradient, _ = minibatch_gradient(module, random_experience())
        assert {name.split(".")[0] for name in gradient} == roles


def test_further_updates_are_left_out_where_the_policy_has_moved_too_far() -> None:
    module = ppo(early_stop=EarlyStop(kl_nats=0.1, ratio=1.5))
    assert not module.is_update_the_last({"kl_behavior_nats": 0.1, "ratio": 1.4})
    assert module.is_update_the_last({"kl_behavior_nats": 0.11, "ratio": 1.0})
    assert module.is_update_the_last({"kl_behavior_nats": 0.0, "ratio": 0.6})


def test_staleness_alone_stops_no_update() -> None:
    """The policy has not moved since the start of the iteration; what sampled the tokens is far away."""
    module = make_module("PPO", decoupled=True, early_stop=EarlyStop(kl_nats=0.01, ratio=1.01))
    experience = random_experience()
    logprobs = slow_outputs(module.policy, experience, temperature=0.9)[0].detach()
    experience = replace(experience, proximal_logprobs=logprobs, behavior_logprobs=logprobs - 1)
    metrics = minibatch_gradient(module, experience)[1]
    assert metrics["kl_behavior_nats"] > 0.3
    assert metrics["kl_update_nats"] == pytest.approx(0, abs=1e-6)
    assert not module.is_update_the_last(metrics)
    moved = minibatch_gradient(module, replace(experience, proximal_logprobs=logprobs - 1))[1]
    assert moved["kl_update_nats"] == pytest.approx(math.exp(1) - 2, rel=1e-4)  # d = -1 for every token
    assert module.is_update_the_last(moved)


fit = partial(algorithm_cases.fit, num_iterations=2, token_ids=[[3 + index % 4] * 2 for index in range(16)])


def to_fit(**settings: Any) -> PPO:
    defaults: dict[str, Any] = {
        # A bandit with four arms that no answer changes: 1, 2, 3 or 4 by the prompt.
        "reward": lambda trajectory: float(trajectory.prompt.token_ids[0] - 2),
        "sampling": Sampling(max_new_tokens=4),
        "lr": 0.01,
    }
    return PPO(tiny_spec(), **{**defaults, **settings})


def test_norms_and_their_bound_are_each_roles_whatever_the_optimizers_groups(tmp_path: Path) -> None:
    class Norms(L.Callback):
        def on_before_optimizer_step(self, *_: Any) -> None:
            norms.append([float(torch.nn.utils.get_total_norm([p.grad for p in one.parameters()])) for one in models()])

        on_train_batch_end = on_before_optimizer_step

    module, norms = to_fit(), list[list[float]]()
    models = lambda: (module.policy, module.critic)  # noqa: E731
    of_dim = lambda is_vector: [one for one in module.parameters() if (one.dim() < 2) == is_vector]  # noqa: E731
    module.configure_optimizers = lambda: torch.optim.SGD([{"params": of_dim(dim)} for dim in (True, False)], lr=1e-3)
    metrics = fit(tmp_path, module, Norms(), num_iterations=1, gradient_clip_val=1e-3).callback_metrics
    assert [float(metrics[f"{role}/grad_norm"]) for role in ("policy", "critic")] == pytest.approx(norms[0])
    assert min(norms[0]) > 2e-3
    assert norms[1] == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.parametrize(("critic", "warmup"), [(None, 99), ("shared", 0)], ids=["own, alone", "shared"])
def test_the_critic_learns_the_values_of_a_bandit(critic: str | None, warmup: int, tmp_path: Path) -> None:
    """The value of every state is its prompt's reward, whatever the policy does."""
    settings: dict[str, Any] = {"value_clip": None, "lam": 1.0, "bootstrap_truncated": False}
    settings |= {} if critic is None else {"value_coef": 1.0}
    module = to_fit(critic=critic, critic_warmup_iterations=warmup, update_epochs=6, **settings)
    seen: list[Experience] = []
    module.on_experience_ready = seen.append  # type: ignore[method-assign]
    fit(tmp_path, module, num_iterations=12)
    experience = seen[-1]
    wanted = experience.rewards[:, None].expand_as(experience.values)[experience.loss_mask]
    error = (experience.values[experience.loss_mask] - wanted).abs()
    assert float(error.mean()) < 0.25  # a constant, the best of which is 2.5, is off by 1
    assert float(module.trainer.callback_metrics["critic/explained_variance"]) > 0.85


def test_a_warming_head_leaves_the_body_it_shares_to_the_bit(tmp_path: Path) -> None:
    """No gradient, no decay, no moments; after the warm-up the body moves as in a run without one."""
    module = to_fit(critic="shared", critic_warmup_iterations=2, weight_decay=0.5, num_minibatches=2)
    module.configure_model()
    torch.nn.init.normal_(module.value_head.weight)  # a fresh head says 0 and sends nothing back
    head = module.value_head.weight.detach().clone()
    trainer = fit(tmp_path, module)
    start = dict(tiny_spec().load_model().named_parameters())
    assert all(torch.equal(value, start[name]) for name, value in module.policy.named_parameters())
    assert not torch.equal(module.value_head.weight, head)
    assert set(trainer.optimizers[0].state) == {module.value_head.weight}
    module.critic_warmup_iterations = 0
    assert len(fit(tmp_path, module).optimizers[0].state) == len(start) + 1


def test_a_moving_reference_has_the_policys_shape() -> None:
    module = ppo(reference=AdaptiveKL(0.1, tiny_spec("llama"), decay=0.9))
    with pytest.raises(ValueError, match=r"reference.decay=0\.9 moves .* but '.*' has shape .* in the reference and"):
        module.configure_model()


def test_a_kl_coef_that_a_callback_sets_stays(tmp_path: Path) -> None:
    module = to_fit(reference=KL)
    module.on_experience_ready = lambda _: setattr(module, "kl_coef", 0.7)  # type: ignore[method-assign]
    fit(tmp_path, module)
    assert module.kl_coef == 0.7


@pytest.mark.parametrize("precision", ["bf16-true", None])
def test_a_moving_reference_is_a_float32_average_of_a_bfloat16_policy(precision: Any, tmp_path: Path) -> None:
    module = to_fit(reference=AdaptiveKL(0.1, tiny_spec(dtype="bfloat16"), decay=0.999), critic="shared", lr=1e-3)
    fit(tmp_path, module, num_iterations=1, precision=precision)
    assert module.policy.dtype == (torch.float32 if precision is None else torch.bfloat16)
    start, policy = dict(tiny_spec().load_model().named_parameters()), dict(module.policy.named_parameters())
    for name, value in module.reference.named_parameters():
        expected = start[name] + 0.001 * (policy[name].float() - start[name])
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    assert module.value_head.weight.dtype == torch.float32


def test_the_reference_follows_the_policy(tmp_path: Path) -> None:
    module = to_fit(reference=replace(KL, decay=0.9))
    fit(tmp_path, module, num_iterations=1)
    start, policy = dict(tiny_spec().load_model().named_parameters()), dict(module.policy.named_parameters())
    for name, value in module.reference.named_parameters():
        torch.testing.assert_close(value, 0.9 * start[name] + 0.1 * policy[name], rtol=1e-6, atol=1e-7)


def weights_of(module: PPO) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("critic", [None, "shared"], ids=["own", "shared"])
def test_a_resumed_run_ends_with_the_same_weights_and_state_bit_for_bit(critic: str | None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "critic": critic,
        "reference": AdaptiveKL(0.05, tiny_spec(seed=2), decay=0.9, target_nats=0.01, horizon=32),
        "value_normalization": "exponential",
        "num_minibatches": 2,
    }
    whole = to_fit(**settings)
    fit(tmp_path, whole, num_iterations=4)
    fit(tmp_path, to_fit(**settings), num_iterations=2).save_checkpoint(tmp_path / "half.ckpt")
    again = to_fit(**settings)
    fit(tmp_path, again, num_iterations=4, ckpt_path=tmp_path / "half.ckpt")
    expected, found = weights_of(whole), weights_of(again)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert again.kl_coef == whole.kl_coef != 0.05
    assert again.normalizer == whole.normalizer


@pytest.mark.parametrize(
    ("reference", "expected"),
    [(None, 0.0), (AdaptiveKL(0.2, tiny_spec()), 0.2), (AdaptiveKL(0.2, tiny_spec(), target_nats=0.1), 0.05)],
    ids=["none", "fixed", "adaptive"],
)
def test_a_checkpoint_brings_the_kl_weight_only_where_it_adapts(reference: AdaptiveKL | None, expected: float) -> None:
    """So a run that has no KL term, and no reference, gets none by a resume."""
    module = ppo(reference=reference)
    roles = set(module.models())
    module.on_load_checkpoint({"ppo": {"kl_coef": 0.05, "value_normalizer": None}, "models": {}})
    assert module.kl_coef == expected
    assert set(module.models()) == roles
