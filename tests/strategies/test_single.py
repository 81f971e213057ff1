"""SingleModel against a loop over Hugging Face's logits: outputs, gradients, forms, and how much it allocates."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import (
    FAMILIES,
    LargestTensor,
    gradients,
    random_experience,
    slow_distributions,
    slow_outputs,
    tiny_model,
    with_supports,
    with_teacher_topk,
)
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.single import Form
from lightrl.trajectory import Prompt, Trajectory

FORMS: list[Form] = ["rectangles", "shared_rows", "packed"]
FORMS_OF: dict[str, list[Form]] = {  # of the families whose attention does not allow all of them
    "mistral with a window": ["rectangles", "packed"],
    "gemma2 with capped logits": ["rectangles"],
    "gemma3 hybrid": ["rectangles", "packed"],
}


def every_form(*families: str) -> pytest.MarkDecorator:
    """Each family in each form that its attention allows."""
    pairs = [(family, form) for family in families for form in FORMS_OF.get(family, FORMS)]
    return pytest.mark.parametrize(("family", "form"), pairs)


def weighted(outputs: Outputs) -> Tensor:
    """A number whose gradient is different for each token's logprob and entropy."""
    num, width = outputs.logprobs.shape
    weights = torch.linspace(-1, 2, num * 40).view(num, 40)
    return (weights[:, :width] * outputs.logprobs + weights.flip(1)[:, :width] * outputs.entropy).sum()


def gradient_of(parallel: SingleModel, experience: Experience) -> dict[str, Tensor]:
    parallel.forward_backward([experience], lambda _, outputs: weighted(outputs), Tensor.backward)
    return gradients(parallel.model)


def slow_gradient(model: PreTrainedModel, experience: Experience, **settings: Any) -> dict[str, Tensor]:
    weighted(Outputs(*slow_outputs(model, experience, **settings))).backward()
    return gradients(model)


def assert_same_gradient(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to float32's rounding of sums; a parameter without gradient counts as zero."""
    largest = max(float(value.abs().max()) for value in expected.values())
    for name in found.keys() | expected.keys():
        left = found.get(name, torch.zeros(()))
        right = expected.get(name, torch.zeros(()))
        torch.testing.assert_close(left, right.expand_as(left), rtol=1e-4, atol=1e-5 * largest, msg=name)


@every_form("llama", "qwen3", "gpt2", "gemma2 with capped logits")
def test_the_top_k_tokens_are_those_of_the_whole_distribution(family: str, form: Form) -> None:
    model, experience = tiny_model(family), random_experience(num_turns=2, completion_tokens=(3, 6))
    rules: dict[str, Any] = {"temperature": 0.8, "min_new_tokens": 1, "stop_token_ids": (1, 5)}
    (outputs,) = SingleModel(model, LogprobSettings(**rules, num_ids=12), form=form).forward([experience], topk=4)
    expected = slow_distributions(model, experience, **rules)
    likeliest = expected[..., :12].topk(4, -1)
    mask = experience.loss_mask
    actual = outputs.teacher_topk_ids[mask]  # of equally likely tokens, rounding puts either first
    assert all(len(set(row)) == len(row) and max(row) < 12 for row in actual.tolist())
    torch.testing.assert_close(expected[mask].gather(-1, actual), likeliest.values[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.teacher_topk[mask], likeliest.values[mask], rtol=1e-4, atol=1e-4)
    assert outputs.teacher_topk[~mask].eq(0).all()
    assert outputs.teacher_topk_ids[~mask].eq(0).all()
    (plain,) = SingleModel(model, LogprobSettings(**rules), form=form).forward([experience])
    torch.testing.assert_close(outputs.logprobs, plain.logprobs)
    assert plain.teacher_topk is None
    assert plain.teacher_topk_ids is None


@every_form("llama", "qwen3", "gpt2", "gemma2 with capped logits")
def test_the_teachers_tokens_have_the_logprobs_and_the_gradient_of_a_slow_loop(family: str, form: Form) -> None:
    model, experience = tiny_model(family), random_experience(num_turns=2, topk=3)
    seen: list[Outputs] = []

    def loss(_: Experience, outputs: Outputs) -> Tensor:
        seen.append(outputs)
        return weighted(outputs) + (outputs.teacher_topk.square() * torch.tensor([1.0, -2.0, 0.5])).sum()

    parallel = SingleModel(model, LogprobSettings(temperature=0.7), form=form)
    parallel.forward_backward([experience], loss, Tensor.backward)
    actual = gradients(model)
    distributions = slow_distributions(model, experience, temperature=0.7)
    topk = distributions.gather(-1, experience["teacher_topk_ids"])
    torch.testing.assert_close(seen[0].teacher_topk, topk, rtol=1e-4, atol=1e-4)
    loss(experience, Outputs(*slow_outputs(model, experience, temperature=0.7), teacher_topk=topk)).backward()
    assert_same_gradient(actual, gradients(model))


@pytest.mark.parametrize("num_turns", [1, 3], ids=["one turn", "three turns"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_equal_a_slow_loop(family: str, temperature: float, num_turns: int) -> None:
    model, experience = tiny_model(family), random_experience(num_turns=num_turns)
    (outputs,) = SingleModel(model, LogprobSettings(temperature=temperature)).forward([experience])
    logprobs, entropy = slow_outputs(model, experience, temperature=temperature)
    torch.testing.assert_close(outputs.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.entropy, entropy, rtol=1e-4, atol=1e-4)


@every_form("llama", "gpt2", "gemma2 with capped logits")
def test_truncated_samples_have_logprobs_within_their_supports(family: str, form: Form) -> None:
    """Whichever rows a microbatch has, logprobs, entropies and gradient are those of a softmax over the supports."""
    model = tiny_model(family)
    experience, allowed = with_supports(random_experience(num_turns=2, completion_tokens=(3, 6)))
    rows = [4, 0, 3, 7, 1]
    minibatch, allowed = experience.select(rows), allowed[rows][:, : int(experience.lengths[rows].max())]
    assert allowed[minibatch.loss_mask].float().mean() < 0.9
    parallel = SingleModel(model, LogprobSettings(temperature=0.7), form=form)
    (outputs,) = parallel.forward([minibatch])
    logprobs, entropy = slow_outputs(model, minibatch, temperature=0.7, allowed=allowed)
    torch.testing.assert_close(outputs.logprobs, logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.entropy, entropy, rtol=1e-4, atol=1e-5)
    actual = gradient_of(parallel, minibatch)
    assert_same_gradient(actual, slow_gradient(model, minibatch, temperature=0.7, allowed=allowed))


@every_form(*FAMILIES)
def test_each_form_gives_the_gradient_of_a_slow_loop(family: str, form: Form) -> None:
    model, experience = tiny_model(family), random_experience()
    parallel = SingleModel(model, LogprobSettings(temperature=0.8), form=form)
    expected = slow_gradient(model, experience, temperature=0.8)
    assert_same_gradient(gradient_of(parallel, experience), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_turns", [1, 3], ids=["one turn", "three turns"])
def test_stop_tokens_are_masked_at_the_first_tokens_of_each_turn(form: Form, num_turns: int) -> None:
    model, experience = tiny_model(), random_experience(num_turns=num_turns, completion_tokens=(3, 6))
    rules = {"min_new_tokens": 2, "stop_token_ids": (1, 5)}
    # The engine cannot have sampled a stop token there.
    is_stop = (experience.token_ids == 1) | (experience.token_ids == 5)
    experience = replace(experience, token_ids=torch.where(is_stop, 6, experience.token_ids))
    parallel = SingleModel(model, LogprobSettings(**rules), form=form)
    (outputs,) = parallel.forward([experience])
    logprobs, entropy = slow_outputs(model, experience, **rules)
    torch.testing.assert_close(outputs.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs.entropy, entropy, rtol=1e-4, atol=1e-4)
    assert_same_gradient(gradient_of(parallel, experience), slow_gradient(model, experience, **rules))


def test_a_token_taken_out_of_the_loss_mask_still_counts_as_written() -> None:
    rules = {"min_new_tokens": 2, "stop_token_ids": (5,)}
    parallel = SingleModel(tiny_model(), LogprobSettings(**rules))
    experience = random_experience(completion_tokens=(4, 6))
    (whole,) = parallel.forward([experience])
    first = experience.loss_mask & (experience.loss_mask.cumsum(1) == 1)
    fewer = replace(experience, loss_mask=experience.loss_mask & ~first)
    (outputs,) = parallel.forward([fewer])
    torch.testing.assert_close(outputs.logprobs, torch.where(fewer.loss_mask, whole.logprobs, 0.0))


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_train_nothing_give_zeros_and_a_gradient_of_zeros(form: Form) -> None:
    trajectories = [
        Trajectory(
            Prompt(id="a", token_ids=[3]), 0, 0, ids, [False] * len(ids), [0.0] * len(ids), [-1] * len(ids), [], ""
        )
        for ids in ([3], [3, 4, 5])
    ]
    experience = Experience.from_trajectories([replace(item, reward=0.0) for item in trajectories])
    parallel = SingleModel(tiny_model(), LogprobSettings(), form=form)
    (outputs,) = parallel.forward([experience])
    assert outputs.logprobs.eq(0).all()
    assert all(value.eq(0).all() for value in gradient_of(parallel, experience).values())


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_stays_near_float32(form: Form) -> None:
    """A bfloat16 has 8 bits: with logits of up to 8, logprobs differ by a few hundredths."""
    experience = random_experience()
    low, full = tiny_model(dtype=torch.bfloat16), tiny_model()
    full.load_state_dict(low.state_dict())
    (outputs,) = SingleModel(low, LogprobSettings(), form=form).forward([experience])
    assert outputs.logprobs.dtype == torch.float32
    torch.testing.assert_close(outputs.logprobs, slow_outputs(full, experience)[0], rtol=0, atol=0.15)


@pytest.mark.parametrize("family", ["qwen3", "gemma2 with capped logits"])
def test_calls_that_other_ranks_need_change_nothing(family: str) -> None:
    parallel, experience = SingleModel(tiny_model(family), LogprobSettings(), form="rectangles"), random_experience()
    expected = gradient_of(parallel, experience)
    parallel.num_calls = 9
    found = gradient_of(parallel, experience)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_forward_leaves_no_graph() -> None:
    (outputs,) = SingleModel(tiny_model(), LogprobSettings()).forward([random_experience()])
    assert not outputs.logprobs.requires_grad
    assert not outputs.entropy.requires_grad


def test_the_entropy_carries_no_gradient_where_the_loss_needs_none() -> None:
    parallel = SingleModel(tiny_model(), LogprobSettings(entropy_needs_gradient=False))
    seen = []
    parallel.forward_backward(
        [random_experience()], lambda _, outputs: seen.append(outputs) or outputs.logprobs.sum(), Tensor.backward
    )
    assert seen[0].logprobs.requires_grad
    assert not seen[0].entropy.requires_grad


def test_no_tensor_as_large_as_all_logits_is_made() -> None:
    vocabulary, experience = 60_000, random_experience(num_groups=40, group_size=8, completion_tokens=(2, 6))
    parallel = SingleModel(tiny_model("llama", vocab_size=vocabulary), LogprobSettings(entropy_needs_gradient=False))
    with LargestTensor() as largest:
        parallel.forward_backward([experience], lambda _, outputs: outputs.logprobs.sum(), Tensor.backward)
        parallel.forward_backward(
            [with_teacher_topk(experience, 4)], lambda _, outputs: outputs.teacher_topk.sum(), Tensor.backward
        )
        parallel.forward([experience], topk=4)
    all_logits = experience.num_loss_tokens * vocabulary
    assert all_logits > 60e6
    assert largest.num <= 2**22  # a chunk of logits; the head itself has 1e6


@pytest.mark.parametrize("family", FORMS_OF)
def test_a_form_that_is_not_exact_is_refused_by_name(family: str) -> None:
    model = tiny_model(family)
    for form in set(FORMS) - set(FORMS_OF[family]):
        with pytest.raises(ValueError, match=f"form='{form}' is not exact for {type(model).__name__}"):
            SingleModel(model, LogprobSettings(), form=form)


def test_full_parameters_are_all_parameters_in_buckets() -> None:
    model = tiny_model()
    buckets, found = [], {}
    for bucket in SingleModel(model, LogprobSettings()).full_parameters(2_000):
        buckets.append(bucket)
        found |= bucket.tensors
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert not any(bucket.tensors for bucket in buckets[:-1])  # one at a time is in memory
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())
