"""Another process reads a bucket in shared memory, and the next one in the same block."""

import inspect
import multiprocessing

import torch
import torch.multiprocessing as mp
from fake_sglang.model import unpacked
from torch.multiprocessing import reductions
from weight_cases import SHAPES, buckets, parameters, read_shared

from lightrl.weights import ServerForm, SharedBucket
from lightrl.weights.shared_memory import payload_of, with_uuid

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightrl.weights"])


def test_another_process_reads_every_bucket_bit_for_bit():
    payloads, answers = CONTEXT.Queue(), CONTEXT.Queue()
    reader = CONTEXT.Process(target=read_shared, args=(payloads, answers), daemon=True)
    reader.start()
    before = mp.get_sharing_strategy()
    sent = {**parameters(), "odd": torch.tensor([1, 2, 3], dtype=torch.int8), "after": torch.tensor([4.0])}
    shared, received = SharedBucket(ServerForm(torch.bfloat16)), {}
    for bucket in buckets(sent):
        shared.fill(bucket)
        for _ in range(2):  # two receivers
            payloads.put(shared.payload())
            received |= answers.get(timeout=600)
    payloads.put(None)
    reader.join(600)
    assert received.keys() == {*SHAPES, "odd", "after"}
    for name, tensor in sent.items():
        wants = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert (received[name] == wants.double().numpy()).all()
    assert mp.get_sharing_strategy() == before


def test_a_cuda_tensor_names_its_device_by_uuid_where_torch_has_its_number():
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    changed = dict(zip(parameters, with_uuid(parameters, "GPU-7"), strict=True))
    assert {name for name in parameters if changed[name] != name} == {"storage_device"}
    assert changed["storage_device"] == "GPU-7"


def test_a_payload_by_value_holds_every_tensor_bit_for_bit():
    sent = parameters() | {"odd": torch.tensor([1, 2, 3], dtype=torch.int8), "half": torch.ones(3).bfloat16()}
    received = dict(unpacked(payload_of(sent)))
    assert all(torch.equal(received[name], tensor) for name, tensor in sent.items())
    assert received.keys() == sent.keys()
