from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import set_up, write_rows
from tiny import char_tokenizer

from lightrl.data import PreferenceDataModule


def make(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> PreferenceDataModule:
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    data = PreferenceDataModule(path, path, **{"batch_size": 2, "shuffle": False, **settings})
    return set_up(data, char_tokenizer())


def row(prompt: str = "1+1=", chosen: Any = "2", rejected: Any = "11") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_a_pair_is_two_rows_with_the_loss_on_completion_and_end(tmp_path: Path) -> None:
    """The vocabulary begins <pad>, <eos>, <unk>, 0 to 9, =, +; so 1 is token 4."""
    batch = next(iter(make(tmp_path, [row()], batch_size=1).train_dataloader()))
    assert batch.token_ids.tolist() == [[4, 14, 4, 13, 5, 1, 0], [4, 14, 4, 13, 4, 4, 1]]
    assert batch.loss_mask.tolist() == [[False] * 4 + [True] * 2 + [False], [False] * 4 + [True] * 3]
    assert batch.lengths.tolist() == [6, 7]
    assert batch.num_measured == 1


def test_as_experience_a_pair_is_a_group_and_a_unit(tmp_path: Path) -> None:
    (batch,) = make(tmp_path, [row(), row("3=", "3", "4")]).train_dataloader()
    experience = batch.experience()
    assert experience.units("pair") == [[0, 1], [2, 3]]
    assert experience.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert torch.equal(experience.weight_versions >= 0, batch.loss_mask)


def test_chats_as_the_hub_has_them_give_the_same_pair(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}]
    said = {name: [*chat, {"role": "assistant", "content": text}] for name, text in (("2", "2"), ("11", "11"))}
    (plain,) = make(tmp_path, [row()], batch_size=1).train_dataloader()
    (found,) = make(tmp_path, [row(chat, said["2"], said["11"])], batch_size=1).train_dataloader()
    assert torch.equal(found.token_ids, plain.token_ids)


def test_an_epoch_has_each_pair_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = make(tmp_path, [row(f"{index}=", str(index), "11") for index in range(5)], shuffle=True, seed=1)
    loader = data.train_dataloader()
    epochs = [[loader.batch_at(epoch, index).token_ids[::2, 0].tolist() for index in range(3)] for epoch in (0, 1)]
    assert len(loader) == 3
    assert [sorted(number for batch in epoch for number in batch) for epoch in epochs] == [[3, 4, 5, 6, 7]] * 2
    assert epochs[0] != epochs[1]


def test_pairs_that_are_too_long_are_dropped_or_refused(tmp_path: Path) -> None:
    rows = [row(), row("5=", "5", "6")]
    data = make(tmp_path, rows, max_tokens=5, batch_size=1, prompt_overflow="drop")
    assert len(data.prompts["train"]) == 1
    with pytest.raises(ValueError, match=r"prompt 'train-0' has 7 tokens, more than 5"):
        make(tmp_path, rows, max_tokens=5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(rejected="2"), "the same text in 'chosen' and 'rejected'"),
        ({"prompt": "1=", "chosen": "1"}, "no column 'rejected'"),
        (row(chosen=[{"role": "user", "content": "1"}]), "must end with an assistant message"),
    ],
    ids=["equal", "missing", "no assistant"],
)
def test_rows_that_are_no_pair_are_refused(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, [bad], batch_size=1)
