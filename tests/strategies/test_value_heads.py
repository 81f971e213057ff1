"""Values of a critic of its own, of a head on the policy's body, and of the states after trajectories."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_experience, tiny_model, tiny_spec
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightrl.algorithms import GRPO
from lightrl.dataflow import ModelCall
from lightrl.errors import TrainingError
from lightrl.experience import Experience
from lightrl.loops.score import score
from lightrl.models import ModelSpec, Role, models_made_by, scalar_head
from lightrl.module import RLModule
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.empty_model import empty_model


def critic_spec(family: str = "qwen3") -> ModelSpec:
    return replace(tiny_spec(family), head="scalar")


def critic_that_says_something(family: str = "qwen3") -> PreTrainedModel:
    model = critic_spec(family).load_model()
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    return model


def slow_values(model: PreTrainedModel, experience: Experience) -> tuple[Tensor, Tensor]:
    """The head's number before each loss token [B, T] and after the last token [B], a trajectory at a time."""
    values, ends = torch.zeros(experience.token_ids.shape), torch.zeros(len(experience))
    for row, length in enumerate(experience.lengths.tolist()):
        hidden = model.base_model(input_ids=experience.token_ids[row, :length][None]).last_hidden_state[0]
        numbers = model.score(hidden)[:, 0].detach()
        ends[row] = numbers[-1]
        for t in range(1, length):
            values[row, t] = numbers[t - 1] if experience.loss_mask[row, t] else 0.0
    return values, ends


def test_a_head_on_the_policys_body_gives_values_next_to_unchanged_logprobs() -> None:
    policy, experience = tiny_model(), random_experience()
    head = torch.nn.Linear(16, 1)
    (plain,) = SingleModel(policy, LogprobSettings()).forward([experience])
    (both,) = SingleModel(policy, LogprobSettings(), value_head=head).forward([experience])
    assert torch.equal(both.logprobs, plain.logprobs)
    hidden = policy.base_model(input_ids=experience.token_ids).last_hidden_state
    expected = torch.nn.functional.pad(head(hidden)[:, :-1, 0], (1, 0))
    expected = torch.where(experience.loss_mask, expected, 0.0).detach()
    torch.testing.assert_close(both.values, expected, rtol=1e-4, atol=1e-5)


def test_a_head_that_caps_its_logits_is_not_shared() -> None:
    with pytest.raises(ValueError, match="cannot share the body of Gemma2ForCausalLM"):
        SingleModel(tiny_model("gemma2 with capped logits"), LogprobSettings(), value_head=torch.nn.Linear(16, 1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_fresh_critic_has_the_language_models_body_and_says_zero(family: str) -> None:
    model = critic_spec(family).load_model()
    expected = tiny_spec(family).load_model().base_model.state_dict()
    actual = model.base_model.state_dict()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
    assert scalar_head(model).weight.eq(0).all()


def test_a_critic_is_loaded_from_a_language_model_or_from_a_reward_model(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "policy")
    fresh = ModelSpec(str(tmp_path / "policy"), head="scalar").load_model()
    assert not fresh.score.weight.any()
    assert torch.equal(fresh.base_model.embed_tokens.weight, tiny_model().base_model.embed_tokens.weight)
    critic_that_says_something().save_pretrained(tmp_path / "reward")
    again = ModelSpec(str(tmp_path / "reward"), head="scalar").load_model()
    assert torch.equal(again.score.weight, critic_that_says_something().score.weight)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert torch.equal(other.score.weight, again.score.weight)


class WithJudge(RLModule):
    """A policy, a critic and a reward model."""

    def models(self) -> dict[str, Role]:
        return {**super().models(), "critic": Role(critic_spec()), "judge": Role(critic_spec())}

    def model_calls(self) -> list[ModelCall]:
        return [
            ModelCall("values", "critic", "infer", ("token_ids",), ("values", "bootstrap_values")),
            ModelCall("judge", "judge", "infer", ("token_ids",), ("judge_scores",)),
        ]


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 10**6])
def test_values_bootstrap_truncated_ends_and_scores_read_all_ends(microbatch_tokens: int) -> None:
    module: Any = WithJudge(tiny_spec(), reward=len, microbatch_tokens=microbatch_tokens)
    module.configure_model()
    module.critic = module.judge = critic_that_says_something()
    module.parallel_models = {role: SingleModel(getattr(module, role), LogprobSettings()) for role in module.models()}
    experience = random_experience(is_scored=False, num_turns=2)
    experience = replace(experience, is_truncated=torch.arange(len(experience)) % 2 == 0)
    values, ends = slow_values(module.critic, experience)
    actual = score(module, experience)
    torch.testing.assert_close(actual.values, values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual["judge_scores"], ends, rtol=1e-4, atol=1e-4)
    expected = torch.where(experience.is_truncated, ends, 0.0)
    torch.testing.assert_close(actual.bootstrap_values, expected, rtol=1e-4, atol=1e-4)


def test_a_reward_models_number_is_added_to_the_reward(tmp_path: Path) -> None:
    critic_that_says_something().save_pretrained(tmp_path)
    module = GRPO(tiny_spec(), reward_model=str(tmp_path), reward_model_coef=0.5, group_size=3)
    module.configure_model()
    module.parallel_models = {role: SingleModel(getattr(module, role), LogprobSettings()) for role in module.models()}
    experience = random_experience(is_scored=False)
    actual = score(module, experience)
    given = 0.5 * slow_values(module.reward_model, experience)[1]
    torch.testing.assert_close(actual.rewards, experience.rewards + given, rtol=1e-4, atol=1e-4)
    token_rewards = torch.where(experience.loss_mask, 0.25, 0.0)
    actual = score(module, experience.with_tensors({"token_rewards": token_rewards}))
    earned = torch.where(actual.loss_mask & (actual.loss_mask.flip(1).cumsum(1).flip(1) == 1), given[:, None], 0.0)
    torch.testing.assert_close(actual.token_rewards, token_rewards + earned, rtol=1e-4, atol=1e-4)
    assert module.trained_roles() == ["policy"]
    module.reward_model.score.weight.data[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="reward_model returned NaN or infinity for"):
        score(module, experience)


def test_a_language_model_is_no_reward_model() -> None:
    module = GRPO(tiny_spec(), reward_model=tiny_spec(seed=1), group_size=3)
    with pytest.raises(ValueError, match=r"a language model without a trained head\. Train a"):
        module.configure_model()
    with models_made_by(empty_model):  # whose weights nobody has seen yet
        module.configure_model()
    module.parallel_models = {"reward_model": SingleModel(critic_spec().load_model(), LogprobSettings())}
    with pytest.raises(ValueError, match=r"a language model without a trained head\. Train a"):
        score(module, random_experience(is_scored=False))
