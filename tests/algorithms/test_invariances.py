"""What must hold for every algorithm, since a rising reward is no evidence: see STYLE.md, "Tests"."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import (
    BATCH_STATISTICS,
    advantages_of,
    assert_same,
    every_algorithm,
    every_baseline_of_rewards,
    every_reduction,
    experience_for,
    make_module,
    minibatch_gradient,
)
from tiny import VOCABULARY, float_fields, widened

from lightrl.experience import Experience
from lightrl.strategies.single import Form

FORMS: list[Form] = ["rectangles", "shared_rows", "packed"]


def with_rows_that_train_nothing(algorithm: str) -> Experience:
    """Two turns; the second and the last trajectory have no loss token."""
    experience = experience_for(algorithm, num_turns=2, completion_tokens=(1, 5))
    loss_mask = experience.loss_mask.clone()
    loss_mask[[1, -1]] = False
    return replace(experience, loss_mask=loss_mask)


@every_reduction
@every_algorithm
def test_the_gradient_does_not_depend_on_how_the_minibatch_is_cut_ordered_or_padded(
    algorithm: str, reduction: str
) -> None:
    module, minibatch = make_module(algorithm, loss_reduction=reduction), with_rows_that_train_nothing(algorithm)
    expected = minibatch_gradient(module, minibatch)
    for microbatch_tokens in (1, 40):
        assert_same(minibatch_gradient(module, minibatch, microbatch_tokens=microbatch_tokens), expected)
    assert_same(minibatch_gradient(module, minibatch.select([4, 0, 8, 3, 1, 7, 2, 6, 5])), expected)
    assert_same(minibatch_gradient(module, widened(minibatch, 4, fill=math.nan)), expected)


@pytest.mark.parametrize("form", FORMS)
@every_algorithm
def test_the_gradient_does_not_depend_on_how_padding_is_removed(algorithm: str, form: Form) -> None:
    module, minibatch = make_module(algorithm), with_rows_that_train_nothing(algorithm)
    expected = minibatch_gradient(module, minibatch, form="rectangles")
    assert_same(minibatch_gradient(module, minibatch, form=form, microbatch_tokens=50), expected)


@every_algorithm
def test_masked_positions_have_no_effect_even_when_not_finite(algorithm: str) -> None:
    module, minibatch = make_module(algorithm), with_rows_that_train_nothing(algorithm)
    expected = minibatch_gradient(module, minibatch)
    for name, value in float_fields(minibatch):
        mask = minibatch.loss_mask.view(*minibatch.loss_mask.shape, *[1] * (value.dim() - 2))
        junk = torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(value.numel()) % 3].view_as(value)
        spoiled = minibatch.with_tensors({name: torch.where(mask, value, junk.to(value.dtype))})
        assert_same(minibatch_gradient(module, spoiled), expected)


@pytest.mark.parametrize("constant", [3.0, -0.5])
@every_baseline_of_rewards
def test_a_constant_added_to_a_groups_rewards_changes_no_advantage(algorithm: str, constant: float) -> None:
    module, experience = make_module(algorithm, group_size=3), experience_for(algorithm)
    is_added = (experience.group_ids == 1) | (algorithm in BATCH_STATISTICS)
    raised = replace(experience, rewards=experience.rewards + constant * is_added)
    torch.testing.assert_close(advantages_of(module, raised), advantages_of(module, experience), rtol=1e-4, atol=1e-5)
    assert advantages_of(module, experience).abs().max() > 0.1


@every_algorithm
def test_permuting_groups_permutes_advantages_and_keeps_the_loss(algorithm: str) -> None:
    module, experience = make_module(algorithm, group_size=3), experience_for(algorithm)
    rows = torch.tensor([8, 1, 4, 0, 6, 2, 3, 7, 5])
    shuffled = experience.select(rows)
    shuffled = replace(shuffled, group_ids=torch.tensor([70, -2, 5])[shuffled.group_ids])
    advantages = advantages_of(module, experience)
    torch.testing.assert_close(advantages_of(module, shuffled), advantages[rows])

    def with_advantages(part: Experience, values: torch.Tensor) -> Experience:
        spread = values if values.dim() == 2 else values[:, None]
        return replace(part, advantages=torch.where(part.loss_mask, spread, 0.0))

    expected = minibatch_gradient(module, with_advantages(experience, advantages))
    assert_same(minibatch_gradient(module, with_advantages(shuffled, advantages[rows])), expected)


@every_algorithm
def test_a_uniform_policy_has_entropy_log_v_and_stays_where_it_was(algorithm: str) -> None:
    module = make_module(algorithm)
    module.policy.get_output_embeddings().weight.data.zero_()
    uniform = torch.full_like(experience_for(algorithm).behavior_logprobs, -math.log(VOCABULARY))
    fields = dict.fromkeys(("behavior_logprobs", "proximal_logprobs", "reference_logprobs"), uniform)
    _, metrics = minibatch_gradient(module, replace(experience_for(algorithm), **fields))
    assert metrics["entropy_nats"] == pytest.approx(math.log(VOCABULARY), rel=1e-5)
    assert metrics["kl_behavior_nats"] == pytest.approx(0, abs=1e-6)
    assert metrics["ratio"] == pytest.approx(1, rel=1e-5)
    assert metrics["clipped_fraction"] == 0
    assert metrics.get("kl_reference_nats", 0.0) == pytest.approx(0, abs=1e-6)
    assert metrics.get("importance_weights", 1.0) == pytest.approx(1, rel=1e-5)


@every_algorithm
def test_metrics_carry_no_gradient_and_have_the_shape_of_the_loss(algorithm: str) -> None:
    module, minibatch = make_module(algorithm), experience_for(algorithm)
    results = []
    module.loss, loss = lambda *args: results.append(loss(*args)) or results[-1], module.loss
    minibatch_gradient(module, minibatch)
    (result,) = results
    assert result.pop("loss").requires_grad
    assert not [name for name, value in result.items() if value.requires_grad]
    assert {value.shape for value in result.values()} == {minibatch.token_ids.shape}
