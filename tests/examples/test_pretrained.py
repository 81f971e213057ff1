from pathlib import Path

import pytest
from reward_functions import trajectory_that
from test_every_example import fit
from test_make_model import make_folder
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.pretrained.tasks import last_number, one_question, questions, sums


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
        ("What does a baker like most?", 1),
        ("How many bakers, and whose cats, are there?", 1),
        ("Why does the sky change?", 0),
        ("I am glad. What is a baker?", 0),
        ("What is a baker? Who knows?", 0),
        ("A baker bakes.", 0),
        ("What is a baker", 0),
    ],
)
def test_one_question_about_the_thing(completion, reward):
    assert one_question(trajectory_that(completion, answer="baker"))["reward"] == reward


@pytest.mark.parametrize("reward", [last_number, one_question])
def test_a_completion_that_was_cut_off_is_wrong(reward):
    assert reward(trajectory_that("Is it 23?", answer="23", finish_reason="length"))["reward"] == 0
    assert reward(trajectory_that("Is it 23?", answer="23"))["reward"] == 1


@pytest.mark.usefixtures("as_a_command")
@pytest.mark.parametrize("name", ["sums", "question"])
def test_the_examples_start_on_a_model_of_the_family(name: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_folder(tmp_path))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    fit(tmp_path / "run", ["--config", f"examples/pretrained/{name}.yaml"], f"--model.policy={tmp_path / 'llama'}")
