"""A host copy does not change with the trainer's parameters, and uses its storage again."""

import torch
from weight_cases import buckets, parameters

from lightrl.weights import HostCopy


def taken(copy, buckets, weight_version):
    copy.begin(weight_version)
    for bucket in buckets:
        copy.add(bucket)
    return list(copy.buckets())


def test_a_copy_keeps_its_values_when_the_parameters_change():
    named, copy = parameters(), HostCopy()
    copied = taken(copy, buckets(named), 4)
    expected = {name: tensor.clone() for name, tensor in named.items()}
    for tensor in named.values():
        tensor.add_(1)
    assert copy.weight_version == 4
    assert [bucket.is_last for bucket in copied] == [False] * (len(copied) - 1) + [True]
    found = {name: tensor for bucket in copied for name, tensor in bucket.tensors.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_next_copy_uses_the_storage_of_the_one_before():
    copy = HostCopy()
    first = [t.data_ptr() for bucket in taken(copy, buckets(parameters()), 0) for t in bucket.tensors.values()]
    second = [t.data_ptr() for bucket in taken(copy, buckets(parameters(seed=1)), 1) for t in bucket.tensors.values()]
    assert first == second


def test_a_copy_without_its_last_bucket_has_no_version():
    copy = HostCopy()
    taken(copy, buckets(parameters()), 0)
    copy.begin(1)
    copy.add(next(buckets(parameters())))
    assert copy.weight_version == -1
