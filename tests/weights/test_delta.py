"""A delta leads from one version to the next and back, bit for bit, and is small when little changed."""

import numpy as np
import pytest
import torch

from lightrl.weights.delta import CHUNK, DeltaError, apply, bits_of, pack, parts, read_part, replace_chunk, unpack

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn]


def two_versions(dtype, fraction, num_elements=50_000):
    """The bits of random numbers, and the same with a fraction of them replaced by any others."""
    random = np.random.default_rng(0)
    old = bits_of((torch.randn(num_elements, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)).copy()
    is_changed = random.random(num_elements) < fraction
    new = np.where(is_changed, random.integers(0, 2**8 - 1, num_elements).astype(old.dtype), old)
    return old, new


def part_of(*changes):
    (part,) = parts([pack(changes)])
    return part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [1e-4, 0.01, 0.2, 0.3, 1.0])
def test_a_delta_leads_to_the_new_version_and_back(dtype, fraction):
    old, new = two_versions(dtype, fraction)
    kept = old.copy()
    (block,) = read_part(part_of(replace_chunk("name", 3, kept, new)))
    assert np.array_equal(kept, new)
    (change,) = unpack(block)
    assert change[:2] == ("name", 3)
    apply(change, old)
    assert np.array_equal(old, new)
    apply(change, old, backward=True)
    assert np.array_equal(old, two_versions(dtype, fraction)[0])


def test_sparse_and_dense_chunks_share_a_block():
    versions = [two_versions(torch.bfloat16, fraction) for fraction in (0.01, 0.5, 1e-4, 0.01)]
    changes = [replace_chunk("name", number, old.copy(), new) for number, (old, new) in enumerate(versions)]
    assert [change.positions is None for change in changes] == [False, True, False, False]
    for change, (old, new) in zip(unpack(pack(changes)), versions, strict=True):
        apply(change, old)
        assert np.array_equal(old, new)


def test_what_did_not_change_does_not_travel():
    old, _ = two_versions(torch.bfloat16, 0)
    assert replace_chunk("name", 0, old, old.copy()) is None
    assert list(parts([None, None])) == []


def test_a_hundredth_of_neighboring_values_travels_in_less_than_a_hundredth_of_the_bytes():
    old = bits_of(torch.randn(CHUNK, generator=torch.Generator().manual_seed(0)).bfloat16()).copy()
    random = np.random.default_rng(0)
    new = old + (random.random(CHUNK) < 0.01) * random.choice(np.array([1, -1]).astype(old.dtype), CHUNK)
    part = part_of(replace_chunk("name", 0, old.copy(), new.astype(old.dtype)))
    assert len(part) < 0.01 * old.nbytes


def test_a_changed_sign_of_zero_and_another_nan_are_changes():
    old = bits_of(torch.tensor([0.0, 1.0]).bfloat16()).copy()
    new = bits_of(torch.tensor([-0.0, float("nan")]).bfloat16())
    apply(replace_chunk("name", 0, old.copy(), new), old)
    assert np.array_equal(old, new)


def test_parts_are_cut_at_their_size():
    blocks = [pack([replace_chunk("name", number, *two_versions(torch.bfloat16, 0.1))]) for number in range(5)]
    cut = list(parts(blocks, len(blocks[0].body) + 1))
    assert [len(read_part(part)) for part in cut] == [2, 2, 1]
    assert [block for part in cut for block in read_part(part)] == blocks


@pytest.mark.parametrize("torn", [lambda part: part[:-1], lambda part: part[:3], lambda part: part + b"x"])
def test_a_torn_part_is_refused(torn):
    part = part_of(replace_chunk("name", 0, *two_versions(torch.bfloat16, 0.1)))
    with pytest.raises(DeltaError, match=r"corrupt|bytes instead of"):
        read_part(torn(part))


def test_a_delta_of_a_longer_tensor_is_refused_and_changes_nothing():
    old, new = two_versions(torch.bfloat16, 0.1)
    change = replace_chunk("name", 0, old.copy(), new)
    short = old[:1000].copy()
    with pytest.raises(DeltaError, match="beyond"):
        apply(change, short)
    assert np.array_equal(short, old[:1000])


@pytest.mark.parametrize("fraction", [0.01, 0.9], ids=["sparse", "dense"])
def test_a_torn_body_is_refused(fraction):
    block = pack([replace_chunk("name", 0, *two_versions(torch.bfloat16, fraction))])
    for body in (block.body[:-1], block.body[1:], block.body[: len(block.body) // 2]):
        with pytest.raises(DeltaError, match="corrupt"):
            unpack(block._replace(body=body))
