"""What scripts/ build for a CPU: which environment counts as built, and SGLang's seeded hash in plain torch."""

import importlib.util
import sys

import pytest
import torch
from real_servers import PROCESSES, build_file, build_script


@pytest.mark.parametrize(("kind", "process"), PROCESSES.items(), ids=PROCESSES)
def test_a_half_built_environment_does_not_count(kind, process, tmp_path, monkeypatch):
    monkeypatch.setenv(f"LIGHTRL_{kind.upper()}_CACHE", str(tmp_path))
    monkeypatch.delenv(f"LIGHTRL_{kind.upper()}_PYTHON", raising=False)
    build, link = build_script(kind), tmp_path / f"{kind}-cpu"
    folder = build.FOLDER.path()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    link.symlink_to(folder)
    assert build.FOLDER.find() is None
    with pytest.raises(ValueError, match=rf"pip install {kind}.*scripts/{kind}_cpu/build.py"):
        process.find_python()
    (folder / build.FOLDER.ready).touch()
    assert build.FOLDER.find() == folder / "bin/python"
    assert build.build() == folder / "bin/python"  # found, not built again
    assert link.resolve() == folder
    assert process.find_python() == (str(link / "bin/python"), True)


def slow_murmur3(data: bytes) -> int:
    """As on Wikipedia, for whole blocks of 4 bytes."""
    low = 0xFFFFFFFF
    hashed = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & low
        block = (block << 15 | block >> 17) & low
        hashed ^= block * 0x1B873593 & low
        hashed = (hashed << 13 | hashed >> 19) & low
        hashed = (hashed * 5 + 0xE6546B64) & low
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & low
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & low
    return hashed ^ hashed >> 16


def test_the_hash_behind_seeds_is_murmur3_of_seed_position_and_column():
    path = build_file("sglang").parent / "lightrl_sglang_cpu/seeded_sampling.py"
    spec = importlib.util.spec_from_file_location("seeded_sampling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seeds, positions = [0, 7, 2**62 + 12345, 2**32 - 1], [0, 3, 70_000, 5]
    found = module.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.arange(9)).tolist()
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        data = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        assert found[row] == [slow_murmur3(data + column.to_bytes(4, "little")) for column in range(9)]
