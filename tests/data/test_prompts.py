import json
import logging
from pathlib import Path

import lightning as L
import pytest
import torch
from tiny import QUIET
from transformers import PreTrainedTokenizerFast

from lightrl.data import PromptDataModule
from lightrl.trajectory import Prompt


class CountingModule(L.LightningModule):
    """Notes what its loaders give."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None, max_prompt_tokens: int | None = None) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.iterations: list[int] = []
        self.validated: list[str] = []

    def training_step(self, batch: int, batch_idx: int) -> torch.Tensor:
        assert batch == batch_idx
        self.iterations.append(batch)
        return self.weight * 0

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> None:
        self.validated += [prompt.id for prompt in batch]

    test_step = validation_step

    def predict_step(self, batch: list[Prompt], batch_idx: int) -> list[str]:
        return [prompt.id for prompt in batch]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(tmp_path: Path, **settings) -> L.Trainer:
    return L.Trainer(**(QUIET | {"default_root_dir": tmp_path} | settings))


class Numbers(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        size = {"train": 7, "validation": 3, "test": 0}[split]
        return [Prompt(id=f"{split}-{index}", token_ids=[index]) for index in range(size)]


def test_a_row_becomes_a_prompt_with_id_messages_tokens_and_fields(train_file: str, chat_tokenizer, rows):
    data = PromptDataModule(train_file, batch_size=2, system_prompt="Add.")
    data.attach(chat_tokenizer)
    data.setup("fit")
    prompt = data.prompts["train"][3]
    assert prompt.id == "train-3"
    assert prompt.fields == rows[3]
    assert prompt.messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 1?"}]
    assert chat_tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_train_loader_is_a_clock_and_prompts_come_from_the_stream(train_file: str, plain_tokenizer):
    data = PromptDataModule(train_file, batch_size=3, shuffle=False)
    data.attach(plain_tokenizer)
    data.setup("fit")
    assert list(data.train_dataloader()) == [0, 1, 2]
    assert [data.prompt_stream[position].id for position in (0, 9, 10)] == ["train-0", "train-9", "train-0"]


def test_tokenizer_and_context_come_from_the_trainers_module(tmp_path: Path, train_file: str, plain_tokenizer):
    data = PromptDataModule(train_file, batch_size=2)
    with pytest.raises(ValueError, match=r"Row 1 of '.*train.jsonl' .* has 6 prompt tokens, but at most 5 fit"):
        make_trainer(tmp_path, max_steps=1).fit(CountingModule(plain_tokenizer, max_prompt_tokens=5), data)


def test_a_module_without_a_tokenizer_is_refused(tmp_path: Path, train_file: str):
    with pytest.raises(ValueError, match=r"PromptDataModule has no tokenizer \(tokenizer=None\)"):
        make_trainer(tmp_path, max_steps=1).fit(CountingModule(None), PromptDataModule(train_file, batch_size=2))


def test_epochs_and_validation_run_under_lightning(tmp_path: Path, plain_tokenizer):
    module = CountingModule(plain_tokenizer)
    trainer = make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0, val_check_interval=2)
    trainer.fit(module, Numbers(None, batch_size=2))
    assert module.iterations == [0, 1, 2, 0, 1, 2]
    assert module.validated == ["validation-0", "validation-1", "validation-2"] * 2


@pytest.mark.parametrize(
    ("settings", "iterations"),
    [
        pytest.param({"limit_train_batches": 2}, [0, 1, 0, 1], id="limit_train_batches as a number"),
        pytest.param({"limit_train_batches": 0.4}, [0, 0], id="limit_train_batches as a fraction"),
        pytest.param({"overfit_batches": 1}, [0, 0], id="overfit_batches"),
        pytest.param({"fast_dev_run": 2}, [0, 1], id="fast_dev_run"),
    ],
)
def test_lightnings_limits_apply_to_the_clock(tmp_path: Path, plain_tokenizer, settings, iterations):
    module = CountingModule(plain_tokenizer)
    trainer = make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0, **settings)
    trainer.fit(module, Numbers(None, batch_size=2))
    assert module.iterations == iterations


@pytest.mark.parametrize("limit", [1.0, 2], ids=["whole epochs", "with limit_train_batches"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_goes_on_at_the_next_iteration(tmp_path: Path, plain_tokenizer, stop: int, limit: float):
    plain = CountingModule(plain_tokenizer)
    settings = {"num_sanity_val_steps": 0, "limit_train_batches": limit}
    make_trainer(tmp_path, max_steps=7, **settings).fit(plain, Numbers(None, batch_size=2))
    first, second = CountingModule(plain_tokenizer), CountingModule(plain_tokenizer)
    trainer = make_trainer(tmp_path, max_steps=stop, **settings)
    trainer.fit(first, Numbers(None, batch_size=2))
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    trainer = make_trainer(tmp_path, max_steps=7, **settings)
    trainer.fit(second, Numbers(None, batch_size=2), ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    assert first.iterations + second.iterations == plain.iterations


def test_a_run_stopped_by_an_error_repeats_the_iteration_that_failed(tmp_path: Path, plain_tokenizer):
    class Failing(CountingModule):
        def training_step(self, batch: int, batch_idx: int) -> torch.Tensor:
            if batch == 1:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(tmp_path, max_steps=3, num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(Failing(plain_tokenizer), Numbers(None, batch_size=2))
    trainer.save_checkpoint(tmp_path / "failed.ckpt")
    module = CountingModule(plain_tokenizer)
    trainer = make_trainer(tmp_path, max_steps=3, num_sanity_val_steps=0)
    trainer.fit(module, Numbers(None, batch_size=2), ckpt_path=tmp_path / "failed.ckpt", weights_only=True)
    assert module.iterations == [1, 2]


def test_validate_test_and_predict_take_the_validation_prompts_where_there_are_no_others(
    tmp_path: Path, plain_tokenizer
):
    module = CountingModule(plain_tokenizer)
    expected = ["validation-0", "validation-1", "validation-2"]
    data = Numbers(None, batch_size=2, validation_batch_size=2)
    make_trainer(tmp_path).validate(module, data, verbose=False)
    make_trainer(tmp_path).test(module, data, verbose=False)
    assert module.validated == expected * 2
    assert make_trainer(tmp_path).predict(module, data) == [expected[:2], expected[2:]]


def test_training_without_validation_prompts_does_not_validate(tmp_path: Path, train_file: str, plain_tokenizer):
    module = CountingModule(plain_tokenizer)
    make_trainer(tmp_path, max_steps=2).fit(module, PromptDataModule(train_file, batch_size=2))
    assert module.iterations == [0, 1]
    assert module.validated == []


def test_the_order_of_prompts_follows_from_seed_everything(
    train_file: str, plain_tokenizer, monkeypatch: pytest.MonkeyPatch
):
    def order(seed: int | None) -> list[str]:
        data = PromptDataModule(train_file, batch_size=2, seed=seed)
        data.attach(plain_tokenizer)
        data.setup("fit")
        return [data.prompt_stream[position].id for position in range(10)]

    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert order(None) == order(5) != order(6)


def test_the_first_rows_are_taken_where_their_number_is_bounded(train_file: str, plain_tokenizer):
    data = PromptDataModule(train_file, train_file, batch_size=2, max_train_prompts=4, max_validation_prompts=3)
    data.attach(plain_tokenizer)
    data.setup("fit")
    assert [prompt.id for prompt in data.prompts["train"]] == [f"train-{index}" for index in range(4)]
    assert len(data.prompts["validation"]) == 3


def test_long_prompts_are_dropped_and_counted_on_request(
    tmp_path: Path, plain_tokenizer, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"question": "x" * size, "answer": "y"}) + "\n" for size in (3, 9, 4, 8)))
    data = PromptDataModule(str(path), batch_size=1, max_prompt_tokens=5, prompt_overflow="drop")
    data.attach(plain_tokenizer, max_prompt_tokens=100)
    with caplog.at_level(logging.WARNING):
        data.setup("fit")
    assert [prompt.id for prompt in data.prompts["train"]] == ["train-0", "train-2"]
    assert "Dropped 2 of 4 prompts with more than 5 tokens." in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"answer": "y"}, r"Row 2 of '.*' has no column 'question' \(its columns: 'answer'\)", id="prompt"),
        pytest.param({"question": "x"}, r"Row 2 of '.*' has no column 'answer'", id="answer"),
        pytest.param({"question": " ", "answer": "y"}, r"Row 2 of '.*' has an empty column 'question'", id="empty"),
        pytest.param({"question": "xxxxx", "answer": "y"}, r"Row 2 of '.*' has 5 prompt tokens", id="long"),
    ],
)
def test_a_bad_row_is_named_before_training(tmp_path: Path, plain_tokenizer, row: dict, message: str):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in ({"question": "x", "answer": "y"}, row)))
    data = PromptDataModule(str(path), batch_size=1, max_prompt_tokens=4)
    data.attach(plain_tokenizer)
    with pytest.raises(ValueError, match=message.replace("' has 5", "' .* has 5")):
        data.setup("fit")


def test_rows_need_no_answer_where_no_column_is_asked_for(tmp_path: Path, plain_tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "x"}\n')
    data = PromptDataModule(str(path), batch_size=1, answer_column=None)
    data.attach(plain_tokenizer)
    data.setup("fit")
    assert data.prompts["train"][0].fields == {"question": "x"}


def test_no_train_data_is_refused(plain_tokenizer):
    data = PromptDataModule(None, batch_size=1)
    data.attach(plain_tokenizer)
    with pytest.raises(ValueError, match=r"has no train prompts \(train=None\).*Set train to a file or a hub name"):
        data.setup("fit")


@pytest.mark.parametrize("setting", ["batch_size", "validation_batch_size", "max_prompt_tokens", "max_train_prompts"])
def test_sizes_below_one_are_refused(setting: str):
    with pytest.raises(ValueError, match=f"{setting} must be >= 1, got 0"):
        PromptDataModule(None, **{"batch_size": 1, setting: 0})
