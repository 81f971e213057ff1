"""`lightrl doctor reward` attacks a reward: our own families hold, and weak ones are found."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from weak_rewards import by_last_key, crashes_on_nothing, last_number, says_the_answer

from lightrl.commands.doctor.attacks import attack, references_of
from lightrl.commands.main import main
from lightrl.rewards import ReplayRow, json_schema, math_answer, reasoning_gym, replay
from lightrl.testing import make_trajectory
from lightrl.trajectory import Prompt, Trajectory

SUMS = [("7 + 5", "12"), ("9 - 13", "-4"), ("6 * 40", "240"), ("1 + 1", "2")]


def counts(table: str) -> dict[str, str]:
    """What each line of the table says: completion → "hits of tried"."""
    lines = [re.split(r"\s{2,}", line) for line in table.splitlines()[1:-1]]
    return {parts[0]: parts[1] for parts in lines}


def tried(
    reward: Any, rows: list[tuple[str, Any]], fields: Callable[[str], dict[str, Any]] = lambda question: {}
) -> tuple[dict[str, str], int]:
    """The table of a reward and its number of wrong lines; `fields` gives more columns of a question's row."""
    prompts = [
        Prompt(
            f"row-{number}",
            messages=[{"role": "user", "content": question}],
            fields={**fields(question), "answer": answer},
        )
        for number, (question, answer) in enumerate(rows)
    ]

    def write(prompt: Prompt, text: str) -> Trajectory:
        made = make_trajectory(text)
        made.prompt = prompt
        return made

    def compute(trajectories: list[Trajectory]) -> list[ReplayRow]:
        return replay(trajectories, reward, repeats=1, search_paths=[str(Path(__file__).parent)])

    table, num_wrong = attack(prompts, [references_of(prompt, "answer") for prompt in prompts], write, compute)
    return counts(table), num_wrong


def test_math_answers_score_and_no_attack_does():
    found, num_wrong = tried(math_answer, SUMS)
    assert num_wrong == 0, found
    assert found["the data's answer"] == "4 of 4"
    assert found["every answer in turn"] == found["two answers with a hedge"] == "0 of 4"
    assert found["the answer cut off"] == "0 of 3"  # one digit cannot be cut
    assert found["the answer with another sign"] == found["the answer with one more digit"] == "0 of 4"


def test_programs_score_and_no_attack_does():
    tests = [{"input": "", "output": "3"}]
    found, num_wrong = tried("lightrl.rewards.code_tests", [("Print 3.", "print(3)")], lambda _: {"tests": tests})
    assert num_wrong == 0, found
    assert found["the data's answer"] == "1 of 1"
    assert found["a program that exits"] == found["the prompt again"] == "0 of 1"


def test_json_scores_and_a_repeated_key_does_not():
    schema = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
    found, num_wrong = tried(json_schema, [("Capital of France?", {"city": "Paris"})], lambda _: {"schema": schema})
    assert num_wrong == 0, found
    assert found["a key given twice"] == "0 of 1"


def test_reasoning_gym_scores_and_no_attack_does():
    pytest.importorskip("reasoning_gym")
    rows = list(reasoning_gym.rows(datasets=["leg_counting"], size=3))
    fields = {row["question"]: row for row in rows}
    found, num_wrong = tried(
        reasoning_gym.reward, [(row["question"], row["answer"]) for row in rows], fields.__getitem__
    )
    assert num_wrong == 0, found


@pytest.mark.parametrize(
    ("reward", "rows", "caught"),
    [
        (says_the_answer, SUMS, {"all answers at once", "two answers with a hedge", "the answer only in the thinking"}),
        (last_number, SUMS, {"the answer with another sign", "the answer only in the thinking"}),
        (by_last_key, [("Capital of France?", {"city": "Paris"})], {"a key given twice"}),
    ],
)
def test_a_weak_reward_is_caught(reward: Callable[..., Any], rows: list[tuple[str, Any]], caught: set[str]):
    found, num_wrong = tried(reward, rows)
    assert num_wrong > 0
    assert caught <= {name for name, count in found.items() if not count.startswith("0 ")}
    assert found["an empty completion"].startswith("0 ")


def test_answers_that_earn_nothing_and_attacks_that_raise_are_counted():
    found, num_wrong = tried(crashes_on_nothing, [("1 + 1", "2"), ("2 + 2", "four or 4")])
    assert found["the data's answer"] == "1 of 2"
    assert found["an empty completion"] == "0 of 1, 2 failed"
    assert num_wrong == 1 + 1  # the answer of two words, and "2 or …", which begins with the right one


def test_forms_of_the_right_answer_are_no_attack():
    found, num_wrong = tried("weak_rewards.by_value", [("1 / 2", ["0.50", "1/2"]), ("2 / 4", ["1/2", "0.50"])])
    assert num_wrong == 0, found
    assert "the answer cut off" not in found or found["the answer cut off"] == "0 of 1"  # 0.5 is right, 1/ is not
    assert "another row's answer" not in found


def test_an_answer_that_fails_is_not_right_where_nothing_costs_more():
    found, num_wrong = tried("weak_rewards.fails_on_answers", SUMS[:1])
    assert found["the data's answer"] == "0 of 1"
    assert num_wrong == 1


def test_attacks_on_the_reward_of_an_environment_are_refused(settings, config, capsys):
    retry = {"class_path": "RetryWithFeedback", "init_args": {"reward": "weak_rewards.says_the_answer"}}
    workflow = {"class_path": "MultiTurn", "init_args": {"environment": retry}}
    settings["model"]["init_args"].update(workflow=workflow, reward="weak_rewards.says_the_answer")
    assert main(["doctor", "reward", "--config", config(settings), "--completions", "attacks"]) == 2
    assert "Attacks need the SingleTurn workflow" in capsys.readouterr().err


def test_without_answers_whatever_earns_more_than_nothing_is_shown():
    found, _ = tried(lambda trajectory: float("python" in trajectory.completion), [("Write.", None)])
    assert found == {"an empty completion": "0 of 1", "the prompt again": "0 of 1", "a program that exits": "1 of 1"}


OWN = {"path": ".", "trust_remote_code": True, "tokenizer": "lightrl.commands.doctor.command.byte_tokenizer"}


@pytest.mark.parametrize("policy", [None, "runs/sft/export", {"model": "nobody/a-model", "lr": 0.1}, OWN])
def test_the_command_attacks_the_reward_of_a_config_without_a_model(policy, settings, config, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", "cache")
    Path("rows.jsonl").write_text("\n".join(json.dumps({"question": f"{n}", "answer": f"{n}"}) for n in range(2, 5)))
    Path("code_of_policy.py").write_text("import transformers\nclass Config(transformers.Qwen3Config): ...")
    Path("config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code_of_policy.Config"}}')
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "rows.jsonl", "batch_size": 1}}
    settings["model"]["init_args"]["reward"] = "weak_rewards.says_the_answer"
    settings["model"]["init_args"]["policy"]["config"]["vocab_size"] = 3  # too few: no model could be made
    if policy is not None:
        settings["model"]["init_args"]["policy"] = policy
    if is_missing := policy not in (None, OWN):  # texts are written as bytes, to which limits on tokens do not apply
        settings["model"]["init_args"]["sampling"] = {"max_new_tokens": 40_000}
        settings["data"]["init_args"].update(min_prompt_tokens=2, chat_template_kwargs={"enable_thinking": False})
    assert main(["doctor", "reward", "--config", config(settings), "--completions", "attacks"]) == 1
    said, errors = capsys.readouterr()
    assert ("The policy cannot be loaded" in errors) == is_missing
    assert said.startswith("\ncompletion")
    assert re.search(r"^the data's answer +3 of 3$", said, re.MULTILINE)
    assert re.search(r"^the prompt again +3 of 3 ", said, re.MULTILINE)
