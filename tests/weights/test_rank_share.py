"""One rank's files, and what rank 0 makes of the files of all."""

from pathlib import Path

import pytest
import torch
from checkpoint_cases import tensors_in
from transformers import Qwen3Config

from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, SharedFolder, WeightFolder
from lightrl.weights.disk import ShareWriter, files_of, read_back


def folder_of(root: Path) -> SharedFolder:
    return SharedFolder(str(root), "bfloat16", ["lm_head.weight"], timeout_s=5.0)


def share(root: Path, rank: int, *tensors: dict[str, torch.Tensor]) -> ShareWriter:
    writer = ShareWriter(folder_of(root), rank)
    for part in tensors:
        writer.add(Bucket(part))
    return writer


def test_rank_0_makes_one_version_of_all_files_in_the_servers_form(tmp_path):
    other = share(tmp_path, 1, {"b": torch.ones(2, 3), "lm_head.weight": torch.ones(4)}, {"c": torch.full((5,), 2.0)})
    weights = WeightFolder(tmp_path, Qwen3Config(), form=folder_of(tmp_path).form)
    own = Bucket({"a": torch.zeros(3)}, is_last=True, files=files_of([{"problem": None, "files": []}, other.record()]))
    place = weights.write([own], 7)
    assert weights.versions() == [7]
    tensors = tensors_in(place)
    assert {name: value.float().sum().item() for name, value in tensors.items()} == {"a": 0.0, "b": 6.0, "c": 10.0}
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert not list((tmp_path / ".share-1").iterdir())


def test_what_a_rank_wrote_can_be_read_back_before_rank_0_takes_it_over(tmp_path):
    other = share(tmp_path, 1, {"b": torch.ones(2, 3)}, {"c": torch.full((5,), 2.0)})
    read = [bucket.tensors for bucket in read_back(files_of([other.record()]))]
    assert [list(tensors) for tensors in read] == [["b"], ["c"]]
    assert torch.equal(read[1]["c"], torch.full((5,), 2.0).bfloat16())


def test_values_that_are_not_finite_stop_the_version_and_name_the_parameter(tmp_path):
    other = share(tmp_path, 1, {"b": torch.tensor([1.0, float("nan")])}, {"c": torch.ones(2)})
    with pytest.raises(WeightSyncError, match="'b' has values that are not finite"):
        files_of([other.record()])


def test_a_rank_without_space_on_its_disk_is_named(tmp_path):
    (tmp_path / ".share-3").write_text("no folder")
    with pytest.raises(WeightSyncError, match="Rank 3 could not write its share"):
        files_of([share(tmp_path, 3, {"b": torch.ones(2)}).record()])


@pytest.mark.parametrize("damage", ["shortened", "absent"])
def test_a_file_that_rank_0_does_not_see_as_it_was_written_stops_the_version(damage, tmp_path):
    record = share(tmp_path, 1, {"b": torch.ones(20)}).record()
    path = Path(record["files"][0]["path"])
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4])
    weights = WeightFolder(tmp_path, Qwen3Config())
    with pytest.raises(WeightSyncError, match=r"bytes, but the rank|failed after"):
        weights.write([Bucket({}, is_last=True, files=files_of([record]))], 1)
    assert weights.versions() == []


def test_a_parameter_from_two_ranks_is_refused(tmp_path):
    record = share(tmp_path, 1, {"a": torch.ones(2)}).record()
    with pytest.raises(WeightSyncError, match="'a' arrived twice"):
        WeightFolder(tmp_path, Qwen3Config()).write([Bucket({"a": torch.ones(2)}, True, files_of([record, record]))], 1)


def test_what_an_earlier_version_left_of_a_rank_is_removed(tmp_path):
    share(tmp_path, 1, {"a": torch.ones(2)}, {"b": torch.ones(2)})
    record = share(tmp_path, 1, {"c": torch.ones(2)}).record()
    assert [path.name for path in (tmp_path / ".share-1").iterdir()] == [Path(record["files"][0]["path"]).name]
