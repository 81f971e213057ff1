import copy
import errno
import functools
import os
import random
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_flatten

from lightrl.checks.files import publish
from lightrl.concurrency.owner import own_mark
from lightrl.strategies import AtomicCheckpointIO
from lightrl.strategies.checkpoint import one_file
from lightrl.strategies.checkpoint.atomic_write import BackgroundWrites, Progress, TrackedFile
from lightrl.strategies.checkpoint.folder import folder_writer, load_folder, optimizer_state
from lightrl.strategies.checkpoint.one_file import load_optimizers


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
    actual = [float(torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["weights"][0]) for step in (1, 2, 3)]
    assert actual == [1, 2, 3]


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
                thread.join(600)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_disk_that_takes_nothing_is_named_and_no_later_save_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_async: bool
) -> None:
    monkeypatch.setattr(one_file, "BackgroundWrites", functools.partial(BackgroundWrites, stall_s=0.5))
    writer = AtomicCheckpointIO(save_async=save_async)
    disk = HangingDisk(tmp_path / "1.ckpt")

    def save(name: str) -> None:
        writer.save_checkpoint({"step": 1}, tmp_path / name)
        writer.teardown()

    with pytest.raises(OSError, match=r"1.ckpt was not written: the disk has accepted no data for 0.5 s"):
        save("1.ckpt")
    with pytest.raises(OSError, match=r"2.ckpt was not written: an earlier write to .*1.ckpt is still hanging"):
        save("2.ckpt")
    disk.answer()


def test_ctrl_c_ends_the_wait_for_a_disk_and_saving_at_the_end_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_file, "BackgroundWrites", functools.partial(BackgroundWrites, stall_at_end_s=0.5))
    writer = AtomicCheckpointIO()
    disk = HangingDisk(tmp_path / "1.ckpt")
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        writer.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    except KeyboardInterrupt:
        with pytest.raises(
            OSError, match=r"the disk has accepted no data for 0\.5 s"
        ):  # as ModelCheckpoint.on_exception
            writer.save_checkpoint({"step": 1}, tmp_path / "2.ckpt")
    else:
        pytest.fail("Ctrl-C was not raised")
    finally:
        signal.signal(signal.SIGALRM, previous)
    disk.answer()


def test_a_disk_that_turns_read_only_is_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"one.ckpt could not be written: Read-only file system\. The disk needs"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "one.ckpt")


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"one.ckpt could not be written: Not a directory\. .*different default_root_dir"):
        AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "file" / "in it" / "one.ckpt")


def test_a_write_that_takes_long_but_continues_is_no_hang(tmp_path: Path) -> None:
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
        monkeypatch.setattr("lightrl.checks.files._swap", lambda left, right: False)
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


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saved_both_ways(place: Path) -> dict[str, Path]:
    """One checkpoint as a file and as a folder; returns each of their files, by what it is."""
    weights = {f"policy.{index}": torch.randn(64, 40) for index in range(3)}
    rest = {"pytorch-lightning_version": "2.6", "global_step": 3, "lengths": list(range(500))}
    AtomicCheckpointIO().save_checkpoint({**rest, "state_dict": weights}, place / "one.ckpt")
    optimizer = {"state.policy.0.exp_avg": torch.randn(64, 40), "param_groups.policy.0.lr": 0.1}
    checkpoint = {**rest, "state_dict": dict(weights), "optimizer_states": [optimizer]}
    folder = place / "many.ckpt"
    write = folder_writer(
        checkpoint,
        folder,
        writer_mark=f"{own_mark()}-{secrets.token_hex(8)}",
        group=dist.group.WORLD,
        is_main=True,
        copies=False,  # type: ignore[arg-type]
    )
    BackgroundWrites().run(folder, write)
    parts = {name: folder / name for name in ("__0_0.distcp", "meta.pt", ".metadata")}
    return {"a file": place / "one.ckpt", **parts}


def flipped(content: bytes, start: int, size: int, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[start] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def zeroed(content: bytes, start: int, size: int, rng: random.Random) -> bytes:
    end = min(start + size, len(content))
    return content[:start] + bytes(end - start) + content[end:]


def overwritten(content: bytes, start: int, size: int, rng: random.Random) -> bytes:
    end = min(start + size, len(content))
    return content[:start] + rng.randbytes(end - start) + content[end:]


def cut(content: bytes, start: int, size: int, rng: random.Random) -> bytes:
    return content[:-size] if size < len(content) else b""


def are_equal(left: Any, right: Any) -> bool:
    (values, structure), (others, other_structure) = tree_flatten(left), tree_flatten(right)
    same = all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(values, others, strict=True)
    )
    return structure == other_structure and same


Damage = Callable[[bytes, int, int, random.Random], bytes]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("damage", [flipped, zeroed, overwritten, cut])
@pytest.mark.parametrize("what", ["a file", "__0_0.distcp", "meta.pt", ".metadata"])
def test_damaged_bytes_are_refused_with_the_files_name(what: str, damage: Damage, tmp_path: Path) -> None:
    file = saved_both_ways(tmp_path)[what]
    checkpoint = file if what == "a file" else file.parent
    honest, rng = file.read_bytes(), random.Random(what)
    whole = AtomicCheckpointIO().load_checkpoint(checkpoint)
    refusals = []
    for size in (1, 10, 100, 1000, 5000):
        for _ in range(4):
            file.write_bytes(damage(honest, rng.randrange(len(honest)), size, rng))
            try:
                loaded = AtomicCheckpointIO().load_checkpoint(checkpoint)
            except ValueError as error:
                refusals.append(str(error))
            else:  # it met bytes between two records, which say nothing
                assert are_equal(loaded, whole)
    assert len(refusals) >= 10
    assert all(str(file) in message for message in refusals)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("what", "record"), [("a file", "data/1 of the file"), ("__0_0.distcp", "data/0 of state_dict.policy.1")]
)
def test_one_bit_of_a_weight_is_refused_with_its_record(what: str, record: str, tmp_path: Path) -> None:
    file = saved_both_ways(tmp_path)[what]
    checkpoint = file if what == "a file" else file.parent
    weight = AtomicCheckpointIO().load_checkpoint(checkpoint)["state_dict"]["policy.1"]
    content = bytearray(file.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 3] ^= 0x40  # the largest bit of a float32's exponent
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file.name}' .* damaged \(record archive/{record} does not match its"):
        AtomicCheckpointIO().load_checkpoint(checkpoint)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("what", ["__0_0.distcp", "meta.pt", ".metadata", "sha256sums.txt", "__1_0.distcp", "renamed"])
def test_a_folder_mixed_from_two_saves_is_refused_with_the_files_name(what: str, tmp_path: Path) -> None:
    newer, older = (saved_both_ways(tmp_path / name)["meta.pt"].parent for name in ("newer", "older"))
    assert "save_id" not in AtomicCheckpointIO().load_checkpoint(newer)
    culprit = newer / what
    if what == "sha256sums.txt":
        culprit.unlink()
    elif what == "renamed":
        culprit = newer / "__1_0.distcp"
        culprit.write_bytes((newer / "__0_0.distcp").read_bytes())
    else:
        source = older / ("__0_0.distcp" if what == "__1_0.distcp" else what)
        culprit.write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=re.escape(str(culprit))):
        AtomicCheckpointIO().load_checkpoint(newer)


LAYERS = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
FIRST, SECOND = LAYERS.parameters()


def resumed(saved: Optimizer | dict[str, Any], own: Optimizer, layers: torch.nn.Module = LAYERS) -> Optimizer:
    """`own` with the state that several processes have saved, or would have saved of this optimizer."""
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    strategy.model, strategy.optimizers = layers, [own]
    by_position = strategy.load_optimizer_state_dict
    state = optimizer_state(layers, saved) if isinstance(saved, Optimizer) else saved
    load_optimizers(strategy, by_position, {"optimizer_states": [state]})
    return own


def step(layers: torch.nn.Module, optimizer: Optimizer, num: int) -> dict[str, torch.Tensor]:
    """The weights after an update of the first `num` of them."""
    for parameter in list(layers.parameters())[:num]:
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    return copy.deepcopy(layers.state_dict())


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("num_stepped", [0, 1, 2])
@pytest.mark.parametrize("make", [AdamW, functools.partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_a_parameter_without_a_gradient_so_far_continues_as_in_a_run_without_a_save(make, num_stepped, tmp_path):
    runs = [(one, make(one.parameters(), lr=0.1)) for one in (copy.deepcopy(LAYERS) for _ in range(4))]
    weights = [step(*run, num_stepped) for run in runs[:2]].pop()
    states = {"state_dict": weights, "optimizer_states": [optimizer_state(*runs[1])]}
    options: dict[str, Any] = {"writer_mark": own_mark(), "group": dist.group.WORLD, "is_main": True, "copies": True}
    write = folder_writer({"pytorch-lightning_version": "2.6", **states}, tmp_path / "a", **options)
    BackgroundWrites().run(tmp_path / "a", write)
    load_folder(tmp_path / "a", runs[2][0], [runs[2][1]])
    runs[3][0].load_state_dict(weights)
    resumed(AtomicCheckpointIO().load_checkpoint(tmp_path / "a")["optimizer_states"][0], *runs[3][::-1])
    expected, *others = (step(*run, 2) for run in runs)
    assert all(are_equal(other, expected) for other in others)


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
