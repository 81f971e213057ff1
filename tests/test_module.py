import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, LETTERS, VOCABULARY, char_tokenizer, tiny_model, tiny_spec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lightrl import FakeEngine, Prompt, PromptDataModule, Role, Sampling, Trainer, Trajectory
from lightrl.algorithms import DPO, GRPO, IPO, PPO, SFT, Distillation, ReferenceKL, RewardModel
from lightrl.errors import RolloutError
from lightrl.experience import Experience
from lightrl.models import ModelSpec, Outputs, role
from lightrl.models.optimizer import with_schedule
from lightrl.module import RLModule
from lightrl.workflows import AgentWorkflow, MultiTurn

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reward_of(trajectory: Trajectory) -> float:
    return float(len(trajectory.completion_ids))


class Reinforce(RLModule):
    """The least that a user writes."""

    def reward(self, trajectory: Trajectory) -> float:
        return reward_of(trajectory)

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        return {"loss": -experience.advantages * outputs.logprobs}


def module(**settings: Any) -> Reinforce:
    return Reinforce(settings.pop("policy", tiny_spec()), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size must be >= 1, got 0"),
        ({"num_minibatches": 0}, "num_minibatches must be >= 1, got 0"),
        ({"microbatch_tokens": 0}, "microbatch_tokens must be >= 1, got 0"),
        ({"max_skipped_updates": 0}, "max_skipped_updates must be >= 1, got 0"),
        ({"lr": -1e-6}, "lr must be >= 0, got -1e-06"),
        ({"lr": "1e-3"}, "lr must be >= 0, got '1e-3'"),
        ({"group_size": "8"}, "group_size must be >= 1, got '8'"),
        ({"reward_timeout_s": "9"}, "reward_timeout_s must be a finite number above 0, got '9'"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0, got -0.1"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers >= 0 and < 1"),
        ({"warmup_iterations": -1}, "warmup_iterations must be >= 0, got -1"),
        ({"lr_decay": "sine"}, "lr_decay must be constant, linear or cosine, got 'sine'"),
        ({"min_lr_ratio": 2}, "min_lr_ratio must be between 0 and 1, got 2"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 has no effect with lr_decay='constant'"),
        ({"reward_model_coef": 0.5}, "reward_model_coef=0.5 has no effect without reward_model"),
        ({"sampling": Sampling(seed=3)}, "sampling.seed=3 has no effect in a run"),
        ({"validation_sampling": Sampling(seed=3)}, "sampling.seed=3 has no effect in a run"),
        ({"workflow": partial(MultiTurn, environment=int, max_turns=0)}, "max_turns must be >= 1, got 0"),
        ({"workflow": partial(MultiTurn, environment=int, discount=2.0)}, "discount must be above 0 and at most 1"),
        ({"workflow": partial(AgentWorkflow, agent="a.b", max_agents=0)}, "max_agents must be >= 1, got 0"),
        ({"max_failed_fraction": 5.0}, "max_failed_fraction must be between 0 and 1, got 5.0"),
        ({"update_epochs": -1}, "update_epochs must be >= 1, got -1"),
        ({"reward_recycle_after": 0}, "reward_recycle_after must be >= 1, got 0"),
        ({"reward_timeout_s": 0}, "reward_timeout_s must be a finite number above 0, got 0"),
        ({"max_failed_fraction": float("nan")}, "max_failed_fraction must be between 0 and 1, got nan"),
        ({"loss_reduction": "sum"}, "loss_reduction must be token, sequence or fixed, got 'sum'"),
        ({"group_size": 1}, "group_size must be at least 2 for group advantages, got 1"),
        ({"sampling": Sampling(temperature=0)}, "sampling.temperature must be above 0, got 0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: module(sampling={}), "sampling must be of type Sampling, got {}"),
        (lambda: module(validation_sampling={"top_p": 1}), "validation_sampling must be of type Sampling"),
        (lambda: GRPO(tiny_spec(), reward=len, reference="x"), "reference must be of type ReferenceKL, got 'x'"),
        (lambda: ModelSpec(torch.nn.Linear(1, 1)), "path must be of type str, got Linear"),
        (lambda: Trainer(engine="SGLangEngine"), "engine must be of type RolloutEngine, got 'SGLangEngine'"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_groups_that_cannot_be_cut_into_pairs_are_refused() -> None:
    class InPairs(Reinforce):
        loss_unit = "pair"

    with pytest.raises(ValueError, match="group_size must be even with loss_unit='pair', got 3"):
        InPairs(tiny_spec(), group_size=3)


def test_a_module_without_a_reward_and_a_frozen_policy_are_refused() -> None:
    with pytest.raises(TypeError, match=r"GRPO has no reward\. Write `def reward"):
        GRPO(tiny_spec())
    with pytest.raises(ValueError, match=r"policy must not be frozen: .* set its lr to 0"):
        module(policy=Role(tiny_spec(), frozen=True))


def test_validation_is_greedy_with_the_same_limits_by_default() -> None:
    sampling = Sampling(max_new_tokens=9, min_new_tokens=2)
    assert module(sampling=sampling).validation_sampling == Sampling(0.0, max_new_tokens=9, min_new_tokens=2)
    other = Sampling(temperature=0.5)
    assert module(sampling=sampling, validation_sampling=other).validation_sampling == other


@pytest.mark.parametrize(
    ("num_minibatches", "update_epochs", "expected"), [(1, 1, 0), (2, 1, 1), (1, 2, 1)], ids=["one", "two", "epochs"]
)
def test_proximal_logprobs_cost_a_forward_only_with_several_updates(num_minibatches, update_epochs, expected):
    several = module(num_minibatches=num_minibatches, update_epochs=update_epochs)
    assert len(several.model_calls()) == expected
    several.needs_proximal_logprobs = False
    assert several.model_calls() == []


def test_the_graph_is_built_again_only_if_the_calls_change() -> None:
    several = module(num_minibatches=2)
    graph = several.data_flow()
    assert several.data_flow() is graph
    several.needs_proximal_logprobs = False
    assert {call.name for call in graph.calls} - {call.name for call in several.data_flow().calls} == {
        "proximal_logprobs"
    }


def folder_with(tmp_path: Path, tokenizer: Any, **ids: Any) -> str:
    """A checkpoint whose generation config and model config name these end tokens."""
    model = tiny_model(vocab_size=32, eos_token_id=ids.get("model"))
    model.generation_config.eos_token_id = ids.get("generation")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_stop_tokens_are_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    path = folder_with(tmp_path, tokenizer, generation=[5, 6], model=7)
    made = module(policy=path, sampling=Sampling(stop_token_ids=(9,)))
    made.configure_model()
    assert made.stop_token_ids() == {
        "sampling": [9],
        "generation config": [5, 6],
        "model config": [7],
        "tokenizer": [1],
        "turn end": [tokenizer.convert_tokens_to_ids("<|im_end|>")],
    }


def test_a_turn_end_that_is_no_named_special_token_is_found_too(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.chat_template = CHATML
    made = module(policy=folder_with(tmp_path, tokenizer))
    made.configure_model()
    assert made.stop_token_ids()["turn end"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_without_a_chat_template_there_is_no_turn_end() -> None:
    made = module()
    made.configure_model()
    assert made.stop_token_ids() == {"generation config": [1], "model config": [1], "tokenizer": [1]}


def endless_tokenizer() -> Any:
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


def test_a_tokenizer_without_an_end_token_is_refused_unless_a_stop_token_is_given() -> None:
    spec = ModelSpec(config=FAMILIES["qwen3"], tokenizer="test_module.endless_tokenizer")
    with pytest.raises(ValueError, match=r"'test_module.endless_tokenizer' has no end token. Set eos_token"):
        module(policy=spec).tokenizer  # noqa: B018
    assert module(policy=spec, sampling=Sampling(stop_token_ids=(4,))).tokenizer.eos_token_id is None


# Each role but the policy that an algorithm loads, with a ModelSpec.
OTHER_ROLES = {
    "reference": lambda spec: GRPO(tiny_spec(), reward=reward_of, reference=ReferenceKL(0.1, spec)),
    "critic": lambda spec: PPO(tiny_spec(), reward=reward_of, critic=spec),
    "teacher": lambda spec: Distillation(tiny_spec(), teacher=spec),
    "reward_model": lambda spec: GRPO(tiny_spec(), reward_model=spec),
    "reference of DPO": lambda spec: DPO(tiny_spec(), reference=spec),
    "reference of IPO": lambda spec: IPO(tiny_spec(), reference=spec),
}


@pytest.mark.parametrize("role", [*OTHER_ROLES, "policy", "policy of SFT", "policy of DPO", "reward_model in training"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(role: str) -> None:
    spec = ModelSpec(config={**FAMILIES["qwen3"], "vocab_size": 11}, tokenizer="tiny.char_tokenizer")
    trained = {"policy": lambda one: module(policy=one), "policy of SFT": SFT, "policy of DPO": DPO}
    make: Any = {**OTHER_ROLES, **trained, "reward_model in training": RewardModel}[role]
    name = role.split(" ")[0]
    with pytest.raises(ValueError, match=f"has {VOCABULARY} tokens, but the vocabulary of the {name} has only 11"):
        make(spec).configure_model()


def tokenizer_of_another_family() -> Any:
    tokens = {token: index for index, token in enumerate(LETTERS)}
    tokens["3"], tokens["4"] = tokens["4"], tokens["3"]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(tokens, unk_token="<unk>")), unk_token="<unk>", eos_token="<eos>"
    )


@pytest.mark.parametrize("name", OTHER_ROLES)
def test_a_role_that_reads_other_tokens_is_refused(name: str) -> None:
    other = replace(tiny_spec(), tokenizer="test_module.tokenizer_of_another_family")
    message = rf"tokenizer of the {name.split(' ')[0]} .* different tokens at 2 of .* '4' at \d+ instead of"
    with pytest.raises(ValueError, match=message):
        OTHER_ROLES[name](other).configure_model()


def test_a_few_other_tokens_are_reported(monkeypatch, caplog):
    other = replace(tiny_spec(), tokenizer="test_module.tokenizer_of_another_family")
    monkeypatch.setattr(role, "MAX_OTHER_TOKENS", 0.2)  # as if these were two of many
    GRPO(tiny_spec(), reward=reward_of, reference=ReferenceKL(0.1, other)).configure_model()
    assert "tokenizer of the reference" in caplog.text


def test_a_role_whose_folder_has_no_tokenizer_reads_the_policys(tmp_path: Path) -> None:
    tiny_spec(seed=1).load_model().save_pretrained(tmp_path)
    made = GRPO(tiny_spec(), reward=reward_of, reference=ReferenceKL(0.1, str(tmp_path)))
    made.configure_model()
    assert made.reference is not None


def test_the_context_bounds_the_prompt() -> None:
    assert module(sampling=Sampling(max_new_tokens=24)).max_prompt_tokens == 64 - 24
    with pytest.raises(ValueError, match=r"sampling.max_new_tokens=64 leaves no room for a prompt: .* 64 tokens"):
        module(sampling=Sampling(max_new_tokens=64)).max_prompt_tokens  # noqa: B018


def with_reference() -> GRPO:
    made = GRPO(tiny_spec(), reward=reward_of, reference=ReferenceKL(0.1, tiny_spec(seed=1)))
    made.configure_model()
    return made


def test_only_the_policy_is_trained() -> None:
    made = with_reference()
    assert all(value.requires_grad for value in made.policy.parameters())
    assert not any(value.requires_grad for value in made.reference.parameters())
    optimizer = GRPO.configure_optimizers(made)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(made.policy.parameters()))


def lr_factors(num_iterations: float, *settings: Any) -> list[float]:
    """The factor on the learning rate in iterations 0 to 4."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = with_schedule(optimizer, num_iterations, *settings)["lr_scheduler"]["scheduler"]
    return [scheduler.lr_lambdas[0](iteration) for iteration in range(5)]


def test_the_learning_rate_warms_up_and_decays_to_its_smallest_part() -> None:
    assert lr_factors(4, 0, "linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert lr_factors(4, 0, "linear", 0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert lr_factors(4, 0, "cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert lr_factors(4, 0, "cosine", 0.5) == pytest.approx([1.0, 0.926777, 0.75, 0.573223, 0.5], abs=1e-6)
    assert lr_factors(8, 0.5, "constant") == lr_factors(8, 4, "constant") == [0.25, 0.5, 0.75, 1.0, 1.0]
    for settings in ((0, "cosine"), (0.5, "constant")):
        with pytest.raises(ValueError, match=r"(lr_decay='cosine'|warmup_iterations=0.5) needs to know when the run"):
            lr_factors(math.inf, *settings)


def test_a_roles_learning_rate_may_be_0() -> None:
    made = PPO(Role(tiny_spec(), lr=0.0), critic=Role(tiny_spec(), lr=0.5), reward=reward_of, lr=0.1)
    made.configure_model()
    assert [group["lr"] for group in made.parameter_groups()] == [0.0, 0.5]


def test_the_reference_is_not_saved_and_comes_back_from_its_source() -> None:
    made = with_reference()
    with torch.no_grad():
        made.policy.get_output_embeddings().weight.add_(1)
    checkpoint = {"state_dict": made.state_dict()}
    made.on_save_checkpoint(checkpoint)
    assert {name.partition(".")[0] for name in checkpoint["state_dict"]} == {"policy"}

    again = GRPO(tiny_spec(), reward=reward_of, reference=ReferenceKL(0.1, tiny_spec(seed=1)))
    again.on_load_checkpoint(checkpoint)  # `load_from_checkpoint` asks for nothing before
    again.load_state_dict(checkpoint["state_dict"])
    assert all(map(torch.equal, again.state_dict().values(), made.state_dict().values()))


class TwoPrompts(PromptDataModule):
    def __init__(self) -> None:
        super().__init__(train=None, batch_size=2, validation_batch_size=2)

    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{index}", token_ids=[3 + index, 4]) for index in range(2)]


def trainer(folder: Path, engine: FakeEngine | None = None, **settings: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(engine=engine or FakeEngine(), default_root_dir=folder, **{**quiet, **settings})


def test_the_data_modules_chat_template_is_the_whole_runs(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Chats(TwoPrompts):
        def __init__(self) -> None:
            PromptDataModule.__init__(self, None, batch_size=2, chat_template=CHATML)

    engine = FakeEngine(script=lambda prompt, sampling, sample: [5, turn_end])
    path = folder_with(tmp_path, tokenizer, generation=[6])
    made = module(policy=path, group_size=2, sampling=Sampling(max_new_tokens=4))
    completions: list[str] = []
    made.reward = lambda trajectory: completions.append(trajectory.completion) or float(len(completions) % 2)  # type: ignore
    trainer(tmp_path, engine, max_steps=1, enable_checkpointing=False).fit(made, Chats())
    assert made.stop_token_ids()["turn end"] == [turn_end]
    assert set(completions) == {str(tokenizer.decode([5]))}
    made.tokenizer.save_pretrained(tmp_path / "exported")
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == CHATML


def test_self_log_in_a_reward_is_refused_with_what_to_return_instead(tmp_path: Path) -> None:
    class Logs(GRPO):
        def reward(self, trajectory: Trajectory) -> float:
            self.log("words", 1.0)
            return 0.0

    made = Logs(tiny_spec(), group_size=2, sampling=Sampling(max_new_tokens=2))
    with pytest.raises(RolloutError) as caught:
        trainer(tmp_path, max_steps=1).fit(made, TwoPrompts())
    assert "self.log('words', ...) cannot be called in reward" in str(caught.value)
    assert "with the reward: {'reward': ..., 'words': ...}" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_validation_logs_reward_accuracy_and_further_numbers(tmp_path: Path) -> None:
    """Prompts [3, 4] and [4, 4], answered by [3, end] and by [4]; the reward wants a 3."""

    def reward(trajectory: Trajectory) -> dict[str, float]:
        right = float(trajectory.completion_ids[0] == 3)
        return {"reward": 2 * right - 1, "accuracy": right, "style": 0.25}

    engine = FakeEngine(script=lambda prompt, sampling, sample: [prompt[0], 1] if prompt[0] == 3 else [4, 4, 4])
    made = GRPO(tiny_spec(), reward=reward, sampling=Sampling(max_new_tokens=2))
    (found,) = trainer(tmp_path, engine).validate(made, TwoPrompts(), verbose=False)
    assert found == pytest.approx(
        {
            "val/reward": 0.0,
            "val/accuracy_fraction": 0.5,
            "val/style": 0.25,
            "val/length_tokens": 2.0,
            "val/truncated_fraction": 0.5,
            "val/prompts": 2.0,
            "val/failed_fraction": 0.0,
        }
    )


def test_equal_validation_completions_for_pass_at_k_are_refused() -> None:
    with pytest.raises(ValueError, match=r"validation_group_size=4 needs validation_sampling\.temperature above 0"):
        GRPO(tiny_spec(), reward=lambda trajectory: 0.0, validation_group_size=4)


def test_accuracy_is_the_rewards_own_or_a_reward_of_at_least_one() -> None:
    def with_reward(reward: float, **metrics: float) -> Trajectory:
        return Trajectory(
            Prompt("a", token_ids=[3]), 0, 0, [3], [False], [0.0], [-1], [], "", reward=reward, metrics=metrics
        )

    assert [with_reward(reward).accuracy for reward in (0.99, 1.0, 1.5)] == [0.0, 1.0, 1.0]
    assert with_reward(5.0, accuracy=0.5).accuracy == 0.5
