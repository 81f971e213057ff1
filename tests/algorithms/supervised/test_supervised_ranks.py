"""SFT, DPO and a reward model on two processes: each has a share of rows or model and learns what one does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, left_by, run
from supervised_ranks_run import CASES, FOUR, MORE, STAGES, save_reward_model, train
from transformers import AutoModelForCausalLM

from lightrl.data import ChatBatch, PairBatch

every_case = pytest.mark.parametrize("name", CASES)
more_cases = pytest.mark.parametrize("name", [*MORE, *FOUR])


def worked(folder: Path, *args: str) -> tuple[Path, list[dict[str, Any]]]:
    """The folder that the processes worked in, and what each of them found."""
    save_reward_model(folder)
    run(Path(__file__).with_name("supervised_ranks_run.py"), folder, *args)
    return folder, left_by(4 if "four" in args else 2, folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return worked(tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def more_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[dict[str, Any]]]]:
    return cache(lambda group: worked(tmp_path_factory.mktemp(group), group))


def of_ranks(name: str, two_ranks: Any, what: str) -> dict[str, torch.Tensor]:
    """Tensors by name; of a pipeline each rank has some."""
    return {key: value for found in reversed(two_ranks[1]) for key, value in found[name][what].items()}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one_process")
    save_reward_model(folder)
    return {name: train(name, folder, devices=1) for name in CASES}


@every_case
def test_the_first_gradients_are_those_of_one_process(name: str, two_ranks: Any, one_process: Any) -> None:
    actual, expected = of_ranks(name, two_ranks, "gradients"), one_process[name]["gradients"]
    assert len(actual) == len(expected) > 10
    for key, gradient in expected.items():
        assert gradient.abs().max() > 0 or ".lora_A." in key, key  # B starts as zero
        assert (actual[key] - gradient).abs().max() <= ROUNDING * gradient.abs().max(), key


@every_case
def test_two_ranks_learn_what_one_process_learns(name: str, two_ranks: Any, one_process: Any) -> None:
    expected, found = one_process[name], two_ranks[1][0][name]
    weights = of_ranks(name, two_ranks, "weights")
    assert found["steps"] == expected["steps"] >= 3
    for key, weight in expected["weights"].items():
        assert (weights[key] - weight).abs().max() <= ROUNDING * weight.abs().max(), key
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=ROUNDING, abs=ROUNDING)


@every_case
def test_every_rank_has_the_same_weights_and_metrics(name: str, two_ranks: Any) -> None:
    first, second = (actual[name] for actual in two_ranks[1][:2])
    assert first["metrics"] == second["metrics"]
    both = first["weights"].keys() & second["weights"].keys()
    assert STAGES in name or both == first["weights"].keys()
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in both)


@pytest.mark.extra
@more_cases
def test_more_layouts_learn_what_one_process_learns(name: str, more_ranks: Any, tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    ranks = more_ranks("four" if name in FOUR else "more")
    expected = train(name, tmp_path, devices=1)
    test_the_first_gradients_are_those_of_one_process(name, ranks, {name: expected})
    test_two_ranks_learn_what_one_process_learns(name, ranks, {name: expected})
    test_every_rank_has_the_same_weights_and_metrics(name, ranks)


def test_the_export_of_two_ranks_is_the_trained_model(two_ranks: Any) -> None:
    folder, (actual, _) = two_ranks
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "SFT" / "export").named_parameters())
    assert all(torch.equal(exported[key], weight) for key, weight in actual["SFT"]["weights"].items())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_have_each_row_once(size: int) -> None:
    lengths = torch.tensor([3, 5, 4, 2, 5])
    columns = torch.arange(6)
    token_ids = torch.arange(1, 6)[:, None] * (columns < lengths[:, None])
    chats = ChatBatch(token_ids, (columns >= 1) & (columns < lengths[:, None]))
    shares = [chats.share(rank, size) for rank in range(size)]
    assert sorted(int(row[0]) for share in shares if share for row in share.token_ids) == [1, 2, 3, 4, 5]
    assert sum(share.num_measured for share in shares if share) == chats.num_measured == 14


def test_a_share_of_pairs_keeps_the_two_of_a_pair_together() -> None:
    lengths = torch.tensor([2, 3, 4, 4, 3, 2])
    token_ids = torch.arange(6)[:, None].expand(6, 4)
    batch = PairBatch(token_ids, torch.arange(4) < lengths[:, None], lengths)
    first, second = (batch.share(rank, 2) for rank in range(2))
    assert (first.token_ids[:, 0].tolist(), first.token_ids.shape[1]) == ([0, 1, 4, 5], 3)
    assert (second.token_ids[:, 0].tolist(), second.lengths.tolist()) == ([2, 3], [4, 4])
    assert batch.share(3, 4) is None
