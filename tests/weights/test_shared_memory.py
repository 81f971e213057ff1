"""Another process reads a bucket in shared memory, and the next one in the same block."""

import multiprocessing

import torch
import torch.multiprocessing as mp
from weight_cases import SHAPES, buckets, parameters, read_shared

from lightrl.weights import ServerForm, SharedBucket

SPAWN = multiprocessing.get_context("spawn")


def test_another_process_reads_every_bucket_bit_for_bit():
    payloads, answers = SPAWN.Queue(), SPAWN.Queue()
    reader = SPAWN.Process(target=read_shared, args=(payloads, answers), daemon=True)
    reader.start()
    before = mp.get_sharing_strategy()
    sent = {**parameters(), "odd": torch.tensor([1, 2, 3], dtype=torch.int8), "after": torch.tensor([4.0])}
    shared, received = SharedBucket(ServerForm(torch.bfloat16)), {}
    for bucket in buckets(sent):
        shared.fill(bucket)
        for _ in range(2):  # two receivers
            payloads.put(shared.payload())
            received |= answers.get(timeout=60)
    payloads.put(None)
    reader.join(30)
    assert received.keys() == {*SHAPES, "odd", "after"}
    for name, tensor in sent.items():
        wants = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert (received[name] == wants.double().numpy()).all()
    assert mp.get_sharing_strategy() == before
