from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import make_module, minibatch_gradient
from tiny import FAMILIES, VOCABULARY, gradients, random_experience, slow_distributions, slow_outputs, tiny_spec

from lightrl.algorithms import Distillation
from lightrl.errors import TrainingError
from lightrl.functional import group_advantages
from lightrl.loops.score import score
from lightrl.models import ModelSpec
from lightrl.rewards import OverlongPenalty
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.testing import make_trajectory
from lightrl.trajectory import Sampling


def make(**settings: Any) -> Distillation:
    return Distillation(tiny_spec(), **{"teacher": tiny_spec(seed=1), **settings})


def test_the_advantage_of_a_token_is_what_the_teacher_thinks_of_it() -> None:
    """The policy gave the token 1/4 and the teacher 1/2, then 1/2 and 1/8: log 2 and -log 4."""
    experience = random_experience(num_groups=1, group_size=1, completion_tokens=(2, 2))
    behavior = torch.zeros(experience.token_ids.shape)
    behavior[0, -2:] = torch.tensor([0.25, 0.5]).log()
    teacher = torch.zeros(experience.token_ids.shape)
    teacher[0, -2:] = torch.tensor([0.5, 0.125]).log()
    actual = make().advantages(replace(experience, behavior_logprobs=behavior, teacher_logprobs=teacher))
    torch.testing.assert_close(actual[0, -2:], torch.tensor([2.0, 0.25]).log())


def test_a_reward_can_be_trained_on_too() -> None:
    experience = random_experience()
    plain, rewarded = make().advantages(experience), make(reward_coef=0.5, group_size=3).advantages(experience)
    expected = 0.5 * group_advantages(experience.rewards, experience.group_ids)[:, None].expand(plain.shape)
    torch.testing.assert_close(rewarded - plain, expected)


def test_on_policy_the_gradient_is_that_of_the_sampled_reverse_kl() -> None:
    """Σ over tokens of (log policy - log teacher), with the score function's weight held fixed."""
    module, experience = make_module("Distillation"), random_experience()
    logprobs, _ = slow_outputs(module.policy, experience, temperature=0.9)
    teacher = slow_outputs(module.teacher, experience, temperature=0.9)[0].detach()
    ((logprobs.detach() - teacher) * logprobs)[experience.loss_mask].mean().backward()
    expected = gradients(module)
    on_policy = replace(experience, behavior_logprobs=logprobs.detach(), teacher_logprobs=teacher)
    advantages = torch.where(experience.loss_mask, module.advantages(on_policy), 0.0)
    actual, metrics = minibatch_gradient(module, replace(on_policy, advantages=advantages))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    divergence = (logprobs.detach() - teacher)[experience.loss_mask].mean()
    assert metrics["kl_teacher_nats"] == pytest.approx(float(divergence), rel=1e-4)


def test_the_teacher_is_a_frozen_role_with_a_call_of_its_own() -> None:
    module = make(num_minibatches=2, decoupled=True)
    module.configure_model()
    assert [call.name for call in module.model_calls()] == ["proximal_logprobs", "teacher_logprobs"]
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())


def test_the_teachers_likeliest_tokens_are_outputs_of_its_call() -> None:
    for num, names in ((None, set()), (8, {"teacher_topk_ids", "teacher_topk_logprobs"})):
        (call,) = (call for call in make(teacher_topk=num).data_flow().calls if call.name == "teacher_logprobs")
        assert set(call.outputs) == {"teacher_logprobs"} | names


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_the_loss_of_the_top_k_tokens_is_the_divergence_from_the_teacher(divergence: str) -> None:
    """Of all V tokens: that of the whole distributions; the rewards train nothing."""
    settings: dict[str, Any] = {"teacher": tiny_spec(seed=1), "teacher_topk": VOCABULARY, "divergence": divergence}
    module = Distillation(tiny_spec(), sampling=Sampling(max_new_tokens=8, temperature=0.9), **settings)
    module.configure_model()
    rules = LogprobSettings(temperature=0.9)
    module.parallel_models = {
        "teacher": SingleModel(module.teacher, rules),
        "policy": SingleModel(module.policy, rules),
    }
    experience = score(module, random_experience(is_scored=False, num_turns=2)).local
    assert not experience.advantages.any()

    policy = slow_distributions(module.policy, experience, temperature=0.9)[experience.loss_mask]
    teacher = slow_distributions(module.teacher, experience, temperature=0.9)[experience.loss_mask].detach()
    mixture = ((policy.exp() + teacher.exp()) / 2).log()
    expected = {
        "reverse_kl": policy.exp() * (policy - teacher),
        "forward_kl": teacher.exp() * (teacher - policy),
        "jsd": (teacher.exp() * (teacher - mixture) + policy.exp() * (policy - mixture)) / 2,
    }[divergence].sum(-1)
    expected.mean().backward()
    gradient = gradients(module)
    actual, metrics = minibatch_gradient(module, experience)
    largest = max(float(value.abs().max()) for value in gradient.values())
    torch.testing.assert_close(actual, gradient, rtol=1e-3, atol=1e-4 * largest)
    assert metrics["loss"] == pytest.approx(float(expected.detach().mean()), rel=1e-4)
    assert metrics["teacher_divergence_nats"] == pytest.approx(float(expected.detach().mean()), rel=1e-4)
    assert metrics["teacher_rest_fraction"] == pytest.approx(0, abs=1e-5)


def test_fewer_tokens_leave_a_rest_and_less_of_the_divergence() -> None:
    actual = {}
    for num in (1, 4, VOCABULARY):
        module = make(teacher_topk=num)
        module.configure_model()
        module.parallel_models = {"teacher": SingleModel(module.teacher, LogprobSettings())}
        actual[num] = minibatch_gradient(module, score(module, random_experience()).local)[1]
    rests = [metrics["teacher_rest_fraction"] for metrics in actual.values()]
    assert 0.9 > rests[0] > rests[1] > rests[2]
    divergences = [metrics["teacher_divergence_nats"] for metrics in actual.values()]
    assert 0 < divergences[0] < divergences[1] < divergences[2]


def test_tokens_that_the_policy_does_not_have_are_refused() -> None:
    """A teacher behind a server may like them; one that is here is not asked about them."""
    module, experience = make(teacher_topk=3), random_experience(topk=3)
    module.configure_model()
    unknown = {"teacher_topk_ids": experience["teacher_topk_ids"] + VOCABULARY}
    with pytest.raises(ValueError, match=r"tokens include id \d\d, but the policy's vocabulary has"):
        module.advantages(experience.with_tensors(unknown))


@pytest.mark.parametrize("role", ["policy", "teacher"])
def test_more_tokens_than_a_model_has_are_refused(role: str) -> None:
    wider = replace(tiny_spec(), config={**FAMILIES["qwen3"], "vocab_size": 30})
    models = {"policy": wider, "teacher": wider, role: tiny_spec()}
    module = Distillation(**models, teacher_topk=20)
    with pytest.raises(
        ValueError, match=f"teacher_topk must be at most 17, the size of the {role}'s vocabulary, got 20"
    ):
        module.configure_model()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": None}, "Distillation needs a teacher: set teacher or teachers, or teacher_prompt"),
        ({"teacher_column": "who"}, "teacher_column='who' has no effect without teachers"),
        ({"teachers": {"a b": tiny_spec()}}, "Teacher names must consist of letters, digits and _, got 'a b'"),
        ({"teacher_topk": 0}, "teacher_topk must be at least 1, or null .* got 0"),
        ({"teacher_topk": 3, "sampling": Sampling(top_k=5)}, "teacher_topk=3 compares .* truncated sampling"),
        ({"teacher_topk": 4, "divergence": "kl"}, "divergence must be reverse_kl, forward_kl or jsd, got 'kl'"),
        ({"teacher_topk": 4, "divergence": "jsd", "jsd_beta": 0.0}, "jsd_beta must be above 0 and below 1, got 0.0"),
        ({"divergence": "jsd"}, "divergence='jsd' needs teacher_topk"),
        ({"jsd_beta": 0.1}, "jsd_beta=0.1 has no effect unless divergence is 'jsd'"),
        ({"advantage_std": "batch"}, "advantage_std='batch' has no effect with reward_coef=0"),
        ({"overlong_penalty": OverlongPenalty(4)}, "overlong_penalty=.* has no effect with reward_coef=0"),
        ({"reward_coef": -1.0}, "reward_coef must be >= 0 .* got -1.0"),
        ({"reward_coef": 1.0, "group_size": 1}, "group_size must be at least 2 for group statistics"),
    ],
    ids=str,
)
def test_distillation_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_each_row_is_read_by_its_teacher_and_served_teachers_come_first() -> None:
    others = {"a": tiny_spec(), "b": ModelSpec(url="http://127.0.0.1:1"), "c": tiny_spec()}
    module = make(teacher=None, teachers=others, teacher_column="who", sampling=Sampling(max_new_tokens=4))
    calls = [call for call in module.data_flow().calls if call.role is not None and "teacher" in call.role]
    assert [(call.role, call.after) for call in calls] == [
        ("teacher_b", ()),
        ("teacher_a", ("teacher_b_logprobs",)),
        ("teacher_c", ("teacher_b_logprobs", "teacher_a_logprobs")),
    ]
    rows = [make_trajectory(fields={"who": name}) for name in "acb"]
    assert module.prompts_of("teacher_a", rows) == [[], None, None]
    assert module.prompts_of("teacher_b", rows) == [None, None, []]
    with pytest.raises(ValueError, match=r"Prompt 'prompt-0' has no teacher: its column 'who' is 'd'"):
        module.prompts_of("teacher_a", [make_trajectory(fields={"who": "d"})])


def test_a_prompt_that_does_not_fit_or_fails_names_its_row() -> None:
    def fails(trajectory: Any) -> Any:
        raise KeyError("answer")

    rows = [make_trajectory(reward=1.0)]
    module = make(teacher=None, teacher_prompt=lambda trajectory: [5] * 4 if trajectory.reward else None)
    assert module.prompts_of("policy", rows) == [[5, 5, 5, 5]]
    assert [call.inputs for call in module.model_calls()] == [("token_ids", "rewards")]
    assert make(teacher_prompt=lambda trajectory: None).prompts_of("teacher", rows) == [[]]
    with pytest.raises(ValueError, match="'prompt-0' has 9999 tokens, 10001 with the policy's, but the policy's"):
        make(teacher=None, teacher_prompt=lambda trajectory: [5] * 9999).prompts_of("policy", rows)
    with pytest.raises(TrainingError, match="teacher_prompt on prompt 'prompt-0' raised KeyError"):
        make(teacher_prompt=fails).prompts_of("teacher", rows)
