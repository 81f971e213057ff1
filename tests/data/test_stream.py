import pytest

from lightrl.data import EpochLoader, HostBatch, PromptStream
from lightrl.data.batches import batches_in_order
from lightrl.data.stream import RowPrompts
from lightrl.trajectory import Prompt


def make_stream(num_prompts: int = 7, batch_size: int = 2, shuffle: bool = True) -> PromptStream:
    prompts = [Prompt(id=f"train-{index}", token_ids=[index]) for index in range(num_prompts)]
    return PromptStream(RowPrompts.of(prompts, seed=3, shuffle=shuffle), batch_size=batch_size)


def ids(stream: PromptStream, start: int, end: int) -> list[str]:
    return [stream[position].id for position in range(start, end)]


def test_each_epoch_holds_each_prompt_once_in_an_order_of_its_own():
    stream = make_stream()
    epochs = [ids(stream, epoch * 7, (epoch + 1) * 7) for epoch in range(5)]
    assert all(set(epoch) == {f"train-{index}" for index in range(7)} for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_positions_may_be_read_in_any_order_and_by_any_process():
    positions = [40, 0, 13, 41, 6, 7, 0]
    expected = ids(make_stream(), 0, 42)
    stream = make_stream()
    assert [stream[position].id for position in positions] == [expected[position] for position in positions]


def test_without_shuffling_the_order_is_that_of_the_data():
    assert ids(make_stream(3, shuffle=False), 0, 5) == ["train-0", "train-1", "train-2", "train-0", "train-1"]


def test_an_epoch_of_iterations_rounds_down_and_the_stream_skips_no_prompt():
    stream = make_stream(7, batch_size=2)
    assert stream.num_iterations == 3
    assert len(stream) == 7
    assert len(set(ids(stream, 0, 7))) == 7


def test_the_first_prompts_repeat_in_the_order_of_the_data():
    stream = make_stream().first(2)
    assert ids(stream, 0, 5) == ["train-0", "train-1", "train-0", "train-1", "train-0"]


def test_fewer_prompts_than_an_iteration_takes_equal_ids_and_negative_positions_are_refused():
    with pytest.raises(ValueError, match=r"batch_size=4 exceeds the 3 train prompts.*Lower it"):
        make_stream(3, batch_size=4)
    with pytest.raises(ValueError, match=r"1 train prompts have duplicate ids"):
        PromptStream(RowPrompts.of([Prompt(id="a", token_ids=[1]), Prompt(id="a", token_ids=[2])]), batch_size=1)
    with pytest.raises(IndexError, match=r"position must be >= 0, got -1"):
        make_stream()[-1]


def test_a_loader_without_a_trainer_starts_again_each_time():
    loader = EpochLoader(3, lambda epoch, index: (epoch, index))
    assert list(loader) == list(loader) == [(0, 0), (0, 1), (0, 2)]
    assert len(loader) == 3


def test_validation_batches_hold_each_prompt_once():
    prompts = [Prompt(id=str(index), token_ids=[index]) for index in range(5)]
    batches = list(batches_in_order(RowPrompts.of(prompts), 2, HostBatch))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [prompt for batch in batches for prompt in batch] == prompts


class RemovedInAThread(dict):
    """Prepared prompts of which another thread removes each as soon as it was looked for."""

    def __contains__(self, key):
        return self.pop(key, None) is not None


def test_a_prompt_that_is_removed_while_it_is_read_is_made_again(monkeypatch):
    prompts = make_stream()
    expected = prompts[0]
    prompts.prepare(0, 1)
    monkeypatch.setattr(prompts, "_made", RemovedInAThread({0: expected}))
    assert prompts[0] == expected
