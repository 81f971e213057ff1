import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD, AdamW, Optimizer

from lightrl.checks.publish import publish
from lightrl.concurrency.owner import own_mark
from lightrl.strategies import AtomicCheckpointIO
from lightrl.strategies.atomic_write import BackgroundWrites, Progress, TrackedFile
from lightrl.strategies.checkpoint import load_optimizers
from lightrl.strategies.checkpoint_folder import optimizer_state


class DiesWhenWritten:
    """Stands for a process that is killed halfway through a write."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_a_write_that_dies_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(1)}, path)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"step": torch.tensor(2), "bad": DiesWhenWritten()}, path)
    assert torch.load(path, weights_only=True) == {"step": torch.tensor(1)}
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    weights, writer = torch.ones(3), AtomicCheckpointIO(save_async=True)
    for step in (1, 2, 3):
        writer.save_checkpoint({"weights": weights}, tmp_path / f"{step}.ckpt")
        weights += 1
    writer.teardown()
    found = [float(torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["weights"][0]) for step in (1, 2, 3)]
    assert found == [1, 2, 3]


def test_an_old_checkpoint_stays_until_the_new_one_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = AtomicCheckpointIO(save_async=True)
    writer.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    writer.save_checkpoint({"step": 2}, tmp_path / "file" / "2.ckpt")
    writer.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(OSError, match="file"):
        writer.teardown()
    assert torch.load(tmp_path / "1.ckpt", weights_only=True) == {"step": 1}


class HangingDisk:
    """A disk that takes nothing for the checkpoint `place`: its part is a pipe that nobody reads."""

    def __init__(self, place: Path) -> None:
        self.part = place.with_name(f"{place.name}.{own_mark()}.part")
        os.mkfifo(self.part)

    def answer(self) -> None:
        """Reads what the abandoned thread wants to write, and waits for its end."""
        with self.part.open("rb") as pipe:
            pipe.read()
        for thread in threading.enumerate():
            if thread.name == "lightrl-checkpoint":
                thread.join(60)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_disk_that_takes_nothing_is_named_and_no_later_save_waits_for_it(tmp_path: Path, save_async: bool) -> None:
    writer = AtomicCheckpointIO(save_async=save_async)
    writer._writes = BackgroundWrites(stall_s=0.5)
    disk = HangingDisk(tmp_path / "1.ckpt")

    def save(name: str) -> None:
        writer.save_checkpoint({"step": 1}, tmp_path / name)
        writer.teardown()

    with pytest.raises(OSError, match=r"1.ckpt was not written: its disk has taken nothing for 0.5 s"):
        save("1.ckpt")
    with pytest.raises(OSError, match=r"2.ckpt was not written: an earlier write to .*1.ckpt still hangs"):
        save("2.ckpt")
    disk.answer()


def test_ctrl_c_ends_the_wait_for_a_disk_and_saving_at_the_end_is_bounded(tmp_path: Path) -> None:
    writer = AtomicCheckpointIO()
    writer._writes = BackgroundWrites(stall_at_end_s=0.5)
    disk = HangingDisk(tmp_path / "1.ckpt")
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        writer.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    except KeyboardInterrupt:
        with pytest.raises(OSError, match=r"its disk has taken nothing for 0\.5 s"):  # as ModelCheckpoint.on_exception
            writer.save_checkpoint({"step": 1}, tmp_path / "2.ckpt")
    else:
        pytest.fail("Ctrl-C was not raised")
    finally:
        signal.signal(signal.SIGALRM, previous)
    disk.answer()


def test_a_write_that_takes_long_but_goes_on_is_no_hang(tmp_path: Path) -> None:
    writes, steps = BackgroundWrites(stall_s=0.5), []

    def write(progress: Progress) -> None:
        for _ in range(8):
            with progress.at_disk(), TrackedFile(tmp_path / "file", progress) as file:
                time.sleep(0.2)
                steps.append(file.write(b"1234"))
        time.sleep(1.0)  # waits for other ranks, not for its disk

    writes.run(tmp_path / "file", write)
    assert steps == [4] * 8


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize("old", ["folder", "file", "link", "nothing"])
def test_a_folder_takes_the_place_of_what_was_there(old, can_swap, tmp_path, monkeypatch):
    if not can_swap:
        monkeypatch.setattr("lightrl.checks.publish._swap", lambda left, right: False)
    part, place = tmp_path / "last.ckpt.part", tmp_path / "last.ckpt"
    (tmp_path / "elsewhere").mkdir()
    part.mkdir()
    (part / "new").touch()
    if old == "folder":
        place.mkdir()
        (place / "old").touch()
    elif old == "file":
        place.touch()
    elif old == "link":
        place.symlink_to("elsewhere")
    publish(part, place)
    assert [path.name for path in place.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "last.ckpt"]


LAYERS = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
FIRST, SECOND = LAYERS.parameters()


def resumed(saved: Optimizer, own: Optimizer) -> Optimizer:
    """`own` with the state that several processes would have saved of `saved`."""
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    strategy.model, strategy.optimizers = LAYERS, [own]
    by_position = strategy.load_optimizer_state_dict
    load_optimizers(strategy, by_position, {"optimizer_states": [optimizer_state(LAYERS, saved)]})
    return own


@pytest.mark.parametrize("own", [AdamW([FIRST, SECOND]), AdamW([{"params": [FIRST]}, {"params": [SECOND]}])])
def test_settings_come_by_parameter_name_into_other_groups(own: Optimizer) -> None:
    resumed(AdamW([FIRST, SECOND], lr=0.5), own)
    assert {group["lr"] for group in own.param_groups} == {0.5}


@pytest.mark.parametrize(
    ("saved", "own", "difference"),
    [
        pytest.param(
            AdamW([FIRST, SECOND]),
            SGD([FIRST, SECOND]),
            "its optimizer's state has no dampening, momentum, nesterov, which SGD has",
            id="another kind",
        ),
        pytest.param(
            AdamW([FIRST]), AdamW([FIRST, SECOND]), r"its optimizer lacks 1 of the parameters \(1.weight\)", id="more"
        ),
        pytest.param(
            AdamW([{"params": [FIRST], "lr": 0.1}, {"params": [SECOND], "lr": 0.2}]),
            AdamW([FIRST, SECOND]),
            "within one of this run's groups, its lr is 0.1 for 0.weight and 0.2 for 1.weight",
            id="other groups",
        ),
    ],
)
def test_another_optimizer_is_refused_with_what_differs(saved: Optimizer, own: Optimizer, difference: str) -> None:
    with pytest.raises(ValueError, match=rf"The checkpoint does not fit .*: {difference}\. Model, .* Resume with"):
        resumed(saved, own)
