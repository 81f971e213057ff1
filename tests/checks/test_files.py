from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError

from lightrl.checks.files import cause_to_show, is_disk_full, write_problem

FULL = "/dev/full"  # accepts nothing


def write_with_torch(folder: Path) -> None:
    with Path(FULL).open("wb") as file:
        torch.save({"weights": torch.zeros(1000)}, file)


def write_of_several_processes(folder: Path) -> None:
    (folder / "__0_0.distcp").symlink_to(FULL)
    dcp.state_dict_saver.save({"weights": torch.zeros(1000)}, checkpoint_id=folder, no_dist=True)


def write_with_safetensors(folder: Path) -> None:
    # Seen on a file system of 64 KiB; it replaces its target, so /dev/full cannot stand there.
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def write_plain(folder: Path) -> None:
    with Path(FULL).open("wb", buffering=0) as file:
        file.write(b"text")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [write_with_torch, write_of_several_processes, write_with_safetensors, write_plain])
def test_a_full_disk_is_known_whoever_wrote(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - each writer has its own
        write(tmp_path)
    assert is_disk_full(caught.value)
    assert cause_to_show(caught.value) is None
    said = write_problem(caught.value, tmp_path / "new" / "a.ckpt", num_bytes=3 * 2**20)
    assert said.startswith(f"the disk that holds '{tmp_path}' is full (")
    assert said.endswith(" MiB free, 3 MiB to write)")


def test_another_error_of_the_system_is_reported_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory") as caught:
        (tmp_path / "missing" / "a").write_text("text")
    wrapped = RuntimeError("unreadable")
    wrapped.__cause__ = caught.value
    assert not is_disk_full(wrapped)
    assert write_problem(wrapped, tmp_path) == "No such file or directory"
    assert cause_to_show(wrapped) is caught.value


def test_of_any_other_error_the_first_line_is_reported(tmp_path: Path) -> None:
    error = RuntimeError("Connection closed by peer\n  at line 7")
    assert write_problem(error, tmp_path) == "Connection closed by peer"
    assert cause_to_show(error) is error
