"""Broadcast between real processes on gloo: the same tensors arrive, and a lost member is an error, not a hang."""

import multiprocessing

import pytest
import torch
from weight_cases import die_in_broadcast, parameters, receive_broadcast

from lightrl.errors import WeightSyncError
from lightrl.weights import BroadcastGroup, ServerForm, bucketed
from lightrl.weights.broadcast import flattened, free_port

SPAWN = multiprocessing.get_context("spawn")


def test_two_receivers_get_two_rounds_bit_for_bit_while_another_group_is_open():
    port, answers = free_port(), SPAWN.Queue()
    arguments = [(port, rank, 3, torch.bfloat16, answers) for rank in (1, 2)]
    receivers = [SPAWN.Process(target=receive_broadcast, args=a, daemon=True) for a in arguments]
    for receiver in receivers:
        receiver.start()
    group = BroadcastGroup("127.0.0.1", port, rank=0, world_size=3, name="test", timeout_s=60)
    alone = BroadcastGroup("127.0.0.1", free_port(), rank=0, world_size=1, name="alone", timeout_s=60)
    form = ServerForm(torch.bfloat16)
    for round_ in range(2):
        sent = parameters(seed=round_)
        for bucket in bucketed(sent.items(), 160):
            group.broadcast(tensor for _, tensor in form.tensors(bucket))
        for _ in receivers:
            _, received = answers.get(timeout=60)
            assert received.keys() == sent.keys()
            assert all((received[name] == sent[name].bfloat16().double().numpy()).all() for name in sent)
    alone.close()
    group.close()
    group.close()
    for receiver in receivers:
        receiver.join(30)


def test_a_member_that_dies_ends_the_broadcast_with_an_error():
    port = free_port()
    receiver = SPAWN.Process(target=die_in_broadcast, args=(port,), daemon=True)
    receiver.start()
    group = BroadcastGroup("127.0.0.1", port, rank=0, world_size=2, name="test", timeout_s=30)
    receiver.join(30)
    with pytest.raises(WeightSyncError, match=r"group 'test' .* with 2 members"):
        group.broadcast([torch.zeros(2**22)])
    group.close()


def test_members_that_do_not_come_are_an_error_at_the_deadline():
    with pytest.raises(WeightSyncError, match="did not come together within 1 s"):
        BroadcastGroup("127.0.0.1", free_port(), rank=0, world_size=2, name="test", timeout_s=1)


def test_flattened_bytes_are_those_of_the_tensors_in_order():
    named = parameters(torch.bfloat16)
    flat = flattened(named.values())
    assert flat.numel() == sum(tensor.numel() * 2 for tensor in named.values())
    first = named["a.weight"]
    assert torch.equal(flat[: first.numel() * 2].view(torch.bfloat16).view(first.shape), first)
