import hashlib
import io
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from reward_functions import trajectory_that
from test_every_example import fit
from test_make_model import make_folder
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.pretrained import calculator, calls, reviews
from examples.pretrained.download import download
from examples.pretrained.tasks import last_number, one_question, questions, sums
from lightrl.commands.main import main
from lightrl.workflows.tools import calculator as compute

RATINGS = "".join(f"{n}\t{2.5 if n % 3 else -1.0}\tMovie {n} is {'a joy' if n % 3 else 'dull'}.\r\n" for n in range(30))


@pytest.mark.parametrize("rows", [sums, questions])
def test_no_held_out_row_is_trained_on(rows):
    train, held_out = ({row["question"] for row in rows(split)} for split in ("train", "test"))
    assert len(train) > 3 * len(held_out) > 60
    assert not train & held_out


@pytest.mark.parametrize("completion", ["23", "14 + 9 = 23.", "The answer is 23!", "14 and 9 make 23"])
def test_the_last_number_is_the_answer(completion):
    assert last_number(trajectory_that(completion, answer="23"))["reward"] == 1


@pytest.mark.parametrize("completion", ["14 + 9", "230", "23 = 14 + 9", "twenty-three", "", "23.5"])
def test_another_last_number_is_wrong(completion):
    assert last_number(trajectory_that(completion, answer="23"))["reward"] == 0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[("What does a baker like most?", 1), ("How many bakers, and whose cats, are there?", 1)],
        *[("Why does the sky change?", 0), ("I am glad. What is a baker?", 0), ("What is a baker? Who knows?", 0)],
        *[("A baker bakes.", 0), ("What is a baker", 0)],
    ],
)
def test_one_question_about_the_thing(completion, reward):
    assert one_question(trajectory_that(completion, answer="baker"))["reward"] == reward


@pytest.mark.parametrize("reward", [last_number, one_question])
def test_a_completion_that_was_cut_off_is_wrong(reward):
    assert reward(trajectory_that("Is it 23?", answer="23", finish_reason="length"))["reward"] == 0
    assert reward(trajectory_that("Is it 23?", answer="23"))["reward"] == 1


@pytest.mark.parametrize("split", ["train", "test", "new_wordings"])
def test_the_calculator_computes_each_answer(split):
    for row in calculator.problems(split):
        a, b = re.findall(r"\d+", row["question"][-1]["content"])
        assert row["answer"] in {compute(f"{a} {sign} {b}") for sign in "+-*"} - {a, b}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("2880", 1), ("2,880.", 1), ("calculator(240 * 12)", 0), ("2880 or 2881", 0), ("It is 2880", 0), ("", 0)],
)
def test_the_answer_of_a_word_problem_is_a_number_alone(completion, reward):
    assert calculator.right_number(trajectory_that(completion, answer="2880"))["reward"] == reward
    cut_off = trajectory_that(completion, answer="2880", finish_reason="length")
    assert calculator.right_number(cut_off)["reward"] == 0


@pytest.mark.parametrize("label", ["positive", "negative"])
@pytest.mark.parametrize(
    ("completion", "is_label"),
    [
        *[("{}", True), ("{}.\n", True), ("It's {}.", True), ("I would say {}: warm", True), ("", False)],
        *[("{} {}", False), ("positive or negative", False), ("Movie review: {}\nIs it positive or negative?", False)],
        *[("It is not {}.", False), ("It isn't {}.", False), ("I would say it is a {} review", False)],
        *[("It is {}, negative", False), ("It is {}\npositive", False), ("{}ly", False)],
    ],
)
def test_a_reviews_label_once_in_few_words_is_right(completion: str, is_label: bool, label: str) -> None:
    for said in ("positive", "negative"):
        text = completion.format(said, said).capitalize()
        result = reviews.right_label(trajectory_that(text, answer=label))
        assert result["format"] == is_label
        assert result["reward"] == (is_label and said == label)
        assert reviews.right_label(trajectory_that(text, answer=label, finish_reason="length"))["reward"] == 0


def test_ratings_become_rows_without_long_unclear_and_repeated_sentences(tmp_path: Path) -> None:
    odd = f"30\t0.9\tFine.\r\n31\t-3.0\t{'long ' * 25}\r\n32\t2.5\tMovie 1 is a joy.\r\n33\t1\tÉté.\r\n"
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as outer:
        inner = io.BytesIO()
        with tarfile.open(fileobj=inner, mode="w:gz") as archive:
            _add(archive, reviews.RATINGS, (RATINGS + odd).encode())
        _add(outer, reviews.ARCHIVE, inner.getvalue())
    reviews.write_rows(reviews.ratings_of(tmp_path / "sdist.tar.gz"), tmp_path, num_held_out=8)
    train, held_out, shots = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "test", "two_shots")
    )
    assert (len(train), len(held_out)) == (23, 8)
    labels = {row["question"]: row["answer"] for row in [*train, *held_out]}
    assert len(labels) == 31
    expected = {"Movie 1 is a joy.": "positive", "Movie 3 is dull.": "negative", "Été.": "positive"}
    assert expected.items() <= labels.items()
    assert [{**row, "question": row["question"][-1]["content"]} for row in shots] == held_out


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_an_archive_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "made_up-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        archive.writestr(
            "made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folders = [tmp_path / "right", tmp_path / "wrong"]
    for folder in folders:
        folder.mkdir()
    assert download(f"made-up==1.0 --hash=sha256:{digest}", folders[0]).read_bytes() == wheel.read_bytes()
    with pytest.raises(SystemExit, match="could not download made-up"):
        download(f"made-up==1.0 --hash=sha256:{'0' * 64}", folders[1])


CALL = "shop.find(city='New York', size=[2.0, 3.5], near={'km': 5}, open=True)"
POSSIBLE = {"city": ["New York", "NYC"], "size": [[2.0, 3.5]], "near": [{"km": [5, ""]}], "kg": [7.0, ""],
            "open": ["", True]}  # fmt: skip
ALL = "shop.find(size=[2.0, 3.5], near={}, city='n.y.c'"
TWO_KEYS = ALL.replace("{}", "{'km': 4, 'km': 5}") + ")"
NO_CALLS = [
    *["", "NYC", "shop.find(city: str, size: list[float], near: dict, open: bool = ...)", "shop.find(city=str)"],
    *["CALL\nCALL", "CALL; CALL", "CALL, CALL", "[CALL]", "(CALL)", "CALL()", "print(CALL)", "CALL or CALL", "x=CALL"],
    *["Sure: CALL", "CALL.", "CALL # or", "```python\nCALL\n```", "`CALL`", "<think>\n</think>\n\nCALL", "await CALL"],
    *["(shop.find)(city='NYC')", "shop.find(# NYC\rcity='NYC')", "shop.find(city=f'NYC')", "shop.find('NYC')", "\0"],
    *["shop.find(**{'city': 'NYC'})", "shop.find(city='NYC', **{})", "shop.find(city='Rome', city='NYC')", TWO_KEYS],
    *[f"shop.find(city={'(' * 9999}", f"shop.find(kg={'9' * 9999})", "shop.find(near={[]: 5})", "shop.find(city=NYC)"],
]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[(CALL, 1.0), (f"\n{CALL}\n", 1.0), (f"{ALL})", 1.0), (f"{ALL}, kg=7)", 1.0), ("shop.find(city='NYC')", 0.1)],
        *[("shop.find()", 0.0), ("find(city='NYC')", 0.0), ("shop.find(city=['NYC'], near=[])", 0.0)],
        *[(f"{ALL}, {wrong})", 0.225) for wrong in ("open=1", "open=''", "open='True'", "kg=1" + "0" * 999, "color=1")],
        *[(ALL.replace(*change) + ")", 0.2) for change in (("2.0", "2"), (", 3.5", ""), ("{}", r"{'\d': 5}"))],
        *[(text.replace("CALL", CALL), None) for text in NO_CALLS],
    ],
)
def test_only_one_call_with_right_arguments_has_the_full_reward(completion: str, reward: float | None) -> None:
    row = {"possible_answer": json.dumps({"shop.find": POSSIBLE})}
    expected = {"reward": pytest.approx(reward or 0.0), "accuracy": reward == 1, "format": reward is not None}
    assert calls.right_call(trajectory_that(completion, **row)) == expected
    assert not any(calls.right_call(trajectory_that(completion, finish_reason="length", **row)).values())


def test_no_held_out_call_is_of_a_function_or_a_request_of_the_train_rows(tmp_path: Path) -> None:
    write_calls(tmp_path)
    files = {path.stem: list(map(json.loads, path.read_text().splitlines())) for path in tmp_path.glob("*.jsonl")}
    functions = {name: [row["function"] for row in rows] for name, rows in files.items()}
    assert (len(functions["test"]), functions["train"].count("buy.f0"), functions["live_simple"]) == (4, 2, ["buy.f20"])
    assert set(functions["multiple"]) == {*functions["test"], "buy.f12"}
    row = next(row for row in files["multiple"] if row["function"] == "buy.f12")
    assert row["question"] == (
        "Function: buy.f12(num: int, sizes: list[float], kind: Literal['a', 'b'] = ...)\nBuys.\nRequest: Buy 12 of f12."
    )
    assert row["answer"] == "buy.f12(num=12, sizes=[0.5])"
    assert json.loads(row["possible_answer"]) == {"buy.f12": {"num": [12], "sizes": [[0.5]], "kind": ["a", ""]}}


def write_calls(folder: Path) -> None:
    """Writes rows from an archive like bfcl-eval's, where question 22 repeats a request of another function."""
    kinds = {"type": "string", "enum": ["a", "b"]}
    schema = {"num": {"type": "integer"}, "sizes": {"type": "array", "items": {"type": "float"}}, "kind": kinds}
    with zipfile.ZipFile(folder / "bfcl.whl", "w") as wheel:
        sets = {"simple_python": [0, *range(12)], "multiple": range(13), "live_simple": [20, 21, 22]}
        for name, numbers in sets.items():
            questions, answers = [], []
            for n in numbers:
                parameters = {"type": "dict", "properties": schema, "required": ["num", "sizes"]}
                chat = [{"role": "system", "content": ""}] * (n == 21) + [{"content": f"Buy {n % 22} of f{n % 22}."}]
                function = {"name": f"buy.f{n}", "description": "Buys.", "parameters": parameters}
                questions.append(json.dumps({"id": n, "question": [chat], "function": [function]}))
                values = {"num": ["", n], "sizes": [[0.5]], "kind": ["a", ""]}
                answers.append(json.dumps({"id": n, "ground_truth": [{f"buy.f{n}": values}]}))
            wheel.writestr(f"{calls.DATA}/BFCL_v4_{name}.json", "\n".join(questions))
            wheel.writestr(f"{calls.DATA}/possible_answer/BFCL_v4_{name}.json", "\n".join(answers))
    calls.write_rows(folder / "bfcl.whl", folder, num_held_out=4)


def write_task(name: str, folder: Path) -> list[str]:
    """Writes rows for an example; returns the options that name them."""
    if name.startswith("calls"):
        write_calls(folder)
    elif name == "reviews":
        reviews.write_rows(RATINGS, folder, num_held_out=8)
    else:
        return []
    return [f"--data.train={folder}/train.jsonl", f"--data.validation={folder}/test.jsonl"]


@pytest.mark.usefixtures("as_a_command")
@pytest.mark.parametrize("name", ["reviews", "calls_grpo"])
def test_no_attack_on_the_reward_succeeds(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--model.policy={make_folder(tmp_path)}", *write_task(name, tmp_path)]
    capsys.readouterr()
    config = f"examples/pretrained/{name}.yaml"
    assert main(["doctor", "reward", "--config", config, "--completions", "attacks", *options]) == 0
    table = capsys.readouterr().out
    assert "two answers with a hedge" in table
    assert "0 answers earned nothing, 0 attacks succeeded" in table


@pytest.mark.usefixtures("as_a_command")
@pytest.mark.parametrize("name", ["sums", "question", "reviews", "calls_sft", "calls_grpo", "calculator"])
def test_the_examples_start_on_a_model_of_the_family(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_folder(tmp_path))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=72, intermediate_size=96, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    options = [f"--model.policy={tmp_path / 'llama'}", *write_task(name, tmp_path)]
    fit(tmp_path / "run", ["--config", f"examples/pretrained/{name}.yaml"], *options)
