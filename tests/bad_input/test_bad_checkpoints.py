"""Checkpoints with an error: one message with the path, before a run trains."""

import io
import pickle
from pathlib import Path

import pytest
import torch
from bad_input_rows import each, row

from lightrl.strategies.checkpoint.folder import load_folder
from lightrl.strategies.checkpoint.one_file import AtomicCheckpointIO

pytestmark = pytest.mark.bad_input


def written(content, name="a.ckpt"):
    return lambda: Path(name).write_bytes(content)


def saved(value):
    return lambda: torch.save(value, "a.ckpt")


def folder(meta=b"", metadata=b""):
    def make():
        Path("a.ckpt").mkdir()
        for name, content in (("meta.pt", meta), (".metadata", metadata)):
            if content is not None:
                (Path("a.ckpt") / name).write_bytes(content)

    return make


def folder_with(meta):
    file = io.BytesIO()
    torch.save(meta, file)
    return folder(file.getvalue())


def cut():
    torch.save({"state_dict": {"policy.weight": torch.ones(1000)}}, "a.ckpt")
    Path("a.ckpt").write_bytes(Path("a.ckpt").read_bytes()[:-1000])


def link():
    Path("a.ckpt").symlink_to("gone.ckpt")


NONE = "'a.ckpt' is not a lightrl checkpoint, or it is damaged"

CHECKPOINTS = [
    row("checkpoint: an empty file", written(b""), NONE, "Use an earlier one"),
    row("checkpoint: a pointer of Git LFS", written(b"version https://git-lfs.github.com/spec/v1\n"), NONE),
    row("checkpoint: cut short", cut, NONE, "Use an earlier one"),
    row("checkpoint: a pickle that names a function", written(pickle.dumps(print, protocol=2)), NONE),
    row("checkpoint: a list", saved([1]), "'a.ckpt' is not a run's checkpoint", "set model.policy"),
    row("checkpoint: weights alone", saved({"policy.weight": torch.ones(3)}), "'a.ckpt' is not a run's checkpoint", "set model.policy"),
    row("checkpoint: an empty folder", folder(None, None), "a.ckpt lacks meta.pt or .metadata"),
    row("checkpoint: a folder with an empty meta.pt", folder(b"", b""), "'a.ckpt/meta.pt' is not a lightrl checkpoint"),
    row("checkpoint: a folder of another program", folder_with({"step": 1}), "a.ckpt/meta.pt' is not a run's checkpoint"),
    row("checkpoint: a folder without .metadata", folder(b"", None), "a.ckpt lacks meta.pt or .metadata"),
    row("checkpoint: a link to nothing", link, "Checkpoint file not found: a.ckpt"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@each(CHECKPOINTS)
def test_a_checkpoint_is_refused(case):
    case.given()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        AtomicCheckpointIO().load_checkpoint("a.ckpt")
    case.check(str(caught.value))


@each([case for case in CHECKPOINTS if "folder" in case.what])
def test_a_folder_is_refused_before_a_weight_changes(case):
    case.given()
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"not a|lacks") as caught:
        load_folder(Path("a.ckpt"), model, [])
    case.check(str(caught.value))
    assert torch.equal(model.weight, before)
