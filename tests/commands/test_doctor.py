"""`lightrl doctor` from the outside."""

import json
from pathlib import Path

import pytest

from lightrl.commands.doctor.data import SplitReport, repeats
from lightrl.commands.doctor.rewards import format_blocks
from lightrl.commands.main import main
from lightrl.rewards import ReplayRow
from lightrl.trajectory import Prompt


def test_the_policy_writes_and_the_reward_is_shown_and_nothing_is_written(settings, config, capsys):
    name = config(settings)
    assert main(["doctor", "reward", "--config", name, "--n", "5"]) == 0
    assert [path.name for path in Path().iterdir()] == [name]
    said = capsys.readouterr().out
    names = [line.split()[0] for line in said.splitlines()[:6]]
    assert names == ["---", "prompt", "completion", "raw", "reward", "latency"]
    assert said.count("--- ") == 5
    assert "5 completions: 5 rewards, 0 failed" in said
    assert "The results of 2 calls are the same." in said


@pytest.mark.extra
def test_a_reward_that_fails_is_shown_with_its_reason_and_the_code_is_1(settings, config, capsys):
    settings["model"]["init_args"]["reward"] = "tiny_rewards.broken"
    assert main(["doctor", "reward", "--config", config(settings), "--n", "3", "--repeats", "1"]) == 1
    said = capsys.readouterr().out
    assert said.count("failed (raised): Reward function tiny_rewards.broken raised RuntimeError") == 3
    assert "3 completions: 0 rewards, 3 failed (raised 3)" in said


def test_references_need_no_model(settings, config, capsys):
    rows = [json.dumps({"question": f"{n} {n}", "answer": f"{n}"}) for n in range(4)]
    settings = data_settings(settings, rows)
    settings["model"]["init_args"]["reward"] = "lightrl.rewards.math_answer"
    settings["model"]["init_args"]["policy"]["config"]["vocab_size"] = 3  # too few: no model could be made
    assert main(["doctor", "reward", "--config", config(settings), "--completions", "reference"]) == 0
    said = capsys.readouterr().out
    assert "completion   3\nraw          3 <eos>\nreward       0  accuracy=0  lenient_accuracy=1" in said
    assert "4 completions: 4 rewards" in said
    assert "means: accuracy 0, format 0, lenient_accuracy 1" in said


def data_settings(settings: dict, lines: list[str], **more) -> dict:
    Path("rows.jsonl").write_text("\n".join(lines))
    arguments = {"train": "rows.jsonl", "batch_size": 1, **more}
    return settings | {"data": {"class_path": "PromptDataModule", "init_args": arguments}}


def test_every_row_of_the_data_is_read(settings, config, capsys):
    lines = [json.dumps({"question": str(n), "answer": "1"}) for n in range(4)]
    assert main(["doctor", "data", "--config", config(data_settings(settings, lines))]) == 0
    train, validation = capsys.readouterr().out.splitlines()
    assert train == "train: 4 prompts of 1 token, 0 rows dropped, 0 bad"
    assert validation == "validation: 0 prompts, 0 rows dropped, 0 bad"


def test_a_data_file_is_not_read_as_settings(settings, config, capsys):
    row = json.dumps({"source": "other.jsonl", "question": "1", "answer": "1"})
    assert main(["doctor", "data", "--config", config(data_settings(settings, [row]))]) == 0
    assert capsys.readouterr().out.startswith("train: 1 prompt of")


def test_rows_that_a_run_would_drop_are_counted(settings, config, capsys):
    name = config(data_settings(settings, ['{"question": "1", "answer": "1"}'] * 3, min_prompt_tokens=2))
    assert main(["doctor", "data", "--config", name]) == 0
    assert capsys.readouterr().out.startswith("train: 0 prompts, 3 rows dropped, 0 bad")


def test_all_bad_rows_are_named_not_only_the_first(settings, config, capsys):
    lines = ['{"question": "1"}', '{"question": "1", "answer": "1"}', "{", '{"question": "", "answer": "2"}']
    assert main(["doctor", "data", "--config", config(data_settings(settings, lines))]) == 1
    said = capsys.readouterr().out
    assert "1 prompt of " in said
    assert "3 bad" in said
    assert "Line 1 of 'rows.jsonl' has no column 'answer'" in said
    assert "Line 3 of 'rows.jsonl' is not valid JSON" in said
    assert "Line 4 of 'rows.jsonl' has an empty column 'question'" in said
    assert "A run drops" not in said
    for fraction, code in ((0.75, 0), (0.7, 1)):  # of the four rows
        name = config(data_settings(settings, lines, bad_rows="drop", max_bad_fraction=fraction))
        assert main(["doctor", "data", "--config", name]) == code
        assert ("A run drops the bad rows (bad_rows: drop)." in capsys.readouterr().out) is (code == 0)


def test_prompts_with_other_images_are_no_repetitions():
    train, validation = SplitReport("train"), SplitReport("validation")
    train.add([Prompt(str(image), token_ids=[1], images=(f"{image}.png",)) for image in (1, 2, 2)])
    validation.add([Prompt(str(image), token_ids=[1], images=(f"{image}.png",)) for image in (2, 3)])
    assert repeats(train, validation) == [
        "train prompts that repeat another one: 1",
        "validation prompts that are also train prompts: 1 of 2",
    ]


def test_streamed_rows_and_chats_for_sft_are_read_too(settings, config, capsys):
    rows = [json.dumps({"question": str(n), "answer": "1"}) for n in range(4)] + ['{"question": "1", "answer": " "}']
    streamed = data_settings(settings, rows, train={"source": "rows.jsonl", "streaming": True})
    assert main(["doctor", "data", "--config", config(streamed)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("train: 4 prompts of 1 token, 0 rows dropped, 1 bad")
    assert "Line 5 of 'rows.jsonl' has an empty column 'answer'" in said
    model = {"class_path": "SFT", "init_args": {"policy": settings["model"]["init_args"]["policy"]}}
    chats = {"class_path": "SFTDataModule", "init_args": streamed["data"]["init_args"]}
    assert main(["doctor", "data", "--config", config({**settings, "model": model, "data": chats})]) == 1
    assert capsys.readouterr().out.startswith("train: 4 prompts of 3 tokens, 0 rows dropped, 1 bad")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "usage: lightrl doctor", id="nothing"),
        pytest.param(["rewards"], "invalid choice: 'rewards' (choose from", id="another command"),
        pytest.param(["reward", "--n", "0"], "must be an integer >= 1, got 0", id="no prompts"),
        pytest.param(["replay", "no.jsonl", "--reward", "tiny_rewards.exact"], "no.jsonl does not exist", id="no file"),
        pytest.param(["reward", "--config", "no.yaml"], "no.yaml", id="no config"),
        pytest.param(
            ["reward", "--config", "run.yaml", "--completions", "none.jsonl"],
            "invalid choice: 'none.jsonl' (choose from",
            id="completions",
        ),
        pytest.param(
            ["reward", "--config", "run.yaml", "--completions", "reference"], "no column 'answer'", id="answer"
        ),
        pytest.param(["reward", "--config", "run.yaml", "--model.lrr", "1"], "lrr", id="setting"),
    ],
)
def test_a_wrong_call_is_told_in_a_line_and_the_code_is_2(settings, config, capsys, arguments, message):
    config(settings)
    try:
        code = main(["doctor", *arguments])
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_failed_rewards_of_a_run_are_computed_again(settings, config, capsys):
    settings["model"]["init_args"].update(reward="tiny_rewards.broken", max_failed_fraction=1.0)
    name = config(settings)
    assert main(["fit", "--config", name]) == 1
    (file,) = Path().rglob("failed_rewards.jsonl")
    capsys.readouterr()
    assert main(["doctor", "replay", str(file), "--config", name, "--n", "2"]) == 1
    assert "failed (raised 2)" in capsys.readouterr().out
    assert main(["doctor", "replay", str(file), "--config", name, "--model.reward", "tiny_rewards.exact"]) == 0
    assert main(["doctor", "replay", str(file), "--reward", "tiny_rewards.exact"]) == 0


def test_a_long_completion_keeps_its_start_and_its_end():
    row = ReplayRow("a question", "start\n" + "日本" * 4000 + " the end", None, 0.5, is_deterministic=False)
    text = format_blocks([row])
    assert "completion   start\n日本" in text
    assert "日本 the end\nreward       0.5\n" in text
    assert text.endswith("repeatable   no")
    assert len(text) < 1000
