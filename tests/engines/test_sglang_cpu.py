"""scripts/sglang_cpu: which environment counts as built, and SGLang's seeded hash in plain torch."""

from __future__ import annotations

import importlib.util
import sys

import torch
from real_servers import build_file, build_script


def test_a_half_built_environment_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRL_SGLANG_CACHE", str(tmp_path))
    build = build_script()
    folder = build.FOLDER.path()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    assert build.FOLDER.find() is None
    (folder / build.FOLDER.ready).touch()
    assert build.FOLDER.find() == folder / "bin/python"
    assert build.build() == folder / "bin/python"  # found, not built again
    assert (tmp_path / "sglang-cpu").resolve() == folder


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
