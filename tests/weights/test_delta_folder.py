"""A DeltaFolder has a whole version of the trainer or none, whatever arrives and whoever is killed."""

import errno
import os
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from checkpoint_cases import tensors_in
from delta_cases import DeltaTrainer, is_equal, send

from lightrl.weights import delta_folder
from lightrl.weights.delta import DeltaError, checksum
from lightrl.weights.delta_folder import NOTHING, DeltaFolder, NotTheBase


@pytest.fixture
def trainer():
    with closing(DeltaTrainer()) as trainer:
        trainer.step()
        yield trainer


@pytest.fixture
def folder(tmp_path, trainer):
    """Has version 0."""
    with closing(DeltaFolder(tmp_path / "weights")) as folder:
        trainer.send_full(folder)
        yield folder


def versions(folder):
    return sorted(path.name for path in folder.root.glob("version-*"))


def test_a_full_version_and_deltas_give_the_trainers_weights(folder, trainer):
    assert is_equal(tensors_in(folder.path), trainer.expected())
    for number in (1, 2, 3):
        trainer.step()
        place = trainer.send_delta(folder)
        assert place == folder.path
        assert place.name == f"version-{number:08d}"
        assert is_equal(tensors_in(place), trainer.expected())
        assert versions(folder) == [place.name]
    assert (place / "config.json").is_file()


def test_a_delta_is_undone_bit_for_bit(folder, trainer):
    before = trainer.expected()
    trainer.step()
    trainer.send_delta(folder)
    folder.revert(trainer.base.digest)
    assert is_equal(tensors_in(folder.path), before)
    assert folder.version == trainer.base
    with pytest.raises(NotTheBase):
        folder.revert(trainer.base.digest)
    trainer.send_delta(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_the_same_delta_is_not_applied_twice(folder, trainer):
    trainer.step()
    trainer.send_delta(folder)
    with pytest.raises(NotTheBase, match="starts from version"):
        trainer.send_delta(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_a_delta_for_another_base_is_refused(folder, trainer):
    before = trainer.expected()
    trainer.step()
    trainer.step()
    with pytest.raises(NotTheBase):
        trainer.send_delta(folder)  # a version was skipped
    with closing(DeltaTrainer(run="another run")) as other:  # of the same content and number
        other.step()
        other.step()
        with pytest.raises(NotTheBase):
            other.send_delta(folder)
    assert is_equal(tensors_in(folder.path), before)
    trainer.send_full(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_a_torn_missing_or_late_part_is_refused_and_changes_nothing(folder, trainer):
    before = trainer.expected()
    trainer.step(1e-3)
    part = trainer.parts[0]
    folder.begin("session", trainer.base.digest)
    with pytest.raises(DeltaError, match="corrupt"):
        folder.write("session", 0, part[:-1], checksum(part))
    with pytest.raises(NotTheBase):
        folder.write("an older session", 0, part, checksum(part))
    with pytest.raises(DeltaError, match="lost or corrupt"):
        folder.finish("session", trainer.version, len(trainer.parts), {})
    folder.begin("session", trainer.base.digest)
    for index, part in enumerate(trainer.parts):
        folder.write("session", index, part, checksum(part))
    file = next((folder.root / "incoming").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DeltaError, match="lost or corrupt"):
        folder.finish("session", trainer.version, len(trainer.parts), {})
    assert is_equal(tensors_in(folder.path), before)
    trainer.send_delta(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_a_delta_with_a_chunk_twice_is_refused(folder, trainer):
    trainer.step()
    with pytest.raises(DeltaError, match="chunk twice"):
        send(folder, trainer.version, [*trainer.parts, trainer.parts[0]], trainer.base.digest)
    trainer.send_full(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_parts_may_arrive_in_any_order(folder, trainer):
    trainer.step()
    assert len(trainer.parts) > 1
    folder.begin("session", trainer.base.digest)
    for index, part in reversed(list(enumerate(trainer.parts))):
        folder.write("session", index, part, checksum(part))
    folder.finish("session", trainer.version, len(trainer.parts), {})
    assert is_equal(tensors_in(folder.path), trainer.expected())


@pytest.mark.parametrize("damage", ["cut", "removed", "a bit"])
def test_a_damaged_file_is_noticed_before_a_server_loads_it(folder, trainer, damage):
    file = max(folder.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if damage == "cut":
        os.truncate(file, 100)
    elif damage == "removed":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.seek(-1000, os.SEEK_END)
            opened.write(bytes([opened.read(1)[0] ^ 1]))
    trainer.step()
    with pytest.raises(DeltaError, match=r"files of .* have changed|digest differs"):
        trainer.send_delta(folder)
    assert folder.version == NOTHING
    assert versions(folder) == []
    trainer.send_full(folder)
    assert is_equal(tensors_in(folder.path), trainer.expected())


def test_a_result_with_another_digest_gets_no_name(folder, trainer):
    trainer.step()
    with pytest.raises(DeltaError, match="digest differs"):
        send(folder, replace(trainer.version, digest="0" * 64), trainer.parts, trainer.base.digest)
    assert versions(folder) == []


def test_the_next_process_takes_a_whole_version_over(folder, trainer):
    assert DeltaFolder(folder.root).version == trainer.version
    trainer.step()
    with closing(DeltaFolder(folder.root)) as taken:
        trainer.send_delta(taken)
        assert is_equal(tensors_in(taken.path), trainer.expected())
    assert DeltaFolder(folder.root).undo == trainer.base


@pytest.mark.parametrize("left", ["half a change", "half a version", "two versions", "a torn file"])
def test_the_next_process_removes_what_a_killed_one_left(folder, left):
    if left == "half a change":
        folder.path.rename(folder.root / ".changing")
    elif left == "half a version":
        folder.path.rename(folder.root / "incoming")
    elif left == "two versions":
        (folder.root / "version-00000009").mkdir()
    else:
        os.truncate(next(folder.path.glob("*.safetensors")), 9)
    assert DeltaFolder(folder.root).version == NOTHING
    assert list(folder.root.iterdir()) == []


def test_a_full_disk_is_said_before_it_is_full(folder, trainer, monkeypatch):
    monkeypatch.setattr(delta_folder.shutil, "disk_usage", lambda root: SimpleNamespace(free=10))
    with pytest.raises(OSError, match="are needed") as caught:
        trainer.send_full(folder)
    assert caught.value.errno == errno.ENOSPC
