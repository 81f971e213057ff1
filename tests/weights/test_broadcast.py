"""Broadcast between real processes on gloo: the same tensors arrive, and a lost member is an error, not a hang."""

import multiprocessing
import socket

import pytest
import torch
from weight_cases import die_in_broadcast, parameters, receive_broadcast

from lightrl.errors import WeightSyncError
from lightrl.weights import BroadcastGroup, ServerForm, bucketed
from lightrl.weights.broadcast import listen

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightrl.weights"])


def leading(listener: socket.socket, *, world_size: int, name: str = "test", timeout_s: float = 60) -> BroadcastGroup:
    """Of rank 0."""
    arguments = {"rank": 0, "world_size": world_size, "name": name, "timeout_s": timeout_s, "listener": listener}
    return BroadcastGroup(*listener.getsockname(), **arguments)


def test_two_receivers_get_two_rounds_bit_for_bit_while_another_group_is_open():
    listener, answers = listen(), CONTEXT.Queue()
    port = listener.getsockname()[1]
    arguments = [(port, rank, 3, torch.bfloat16, answers) for rank in (1, 2)]
    receivers = [CONTEXT.Process(target=receive_broadcast, args=a, daemon=True) for a in arguments]
    for receiver in receivers:
        receiver.start()
    group = leading(listener, world_size=3)
    alone = leading(listen(), world_size=1, name="alone")
    form = ServerForm(torch.bfloat16)
    for round_ in range(2):
        sent = parameters(seed=round_)
        for bucket in bucketed(sent.items(), 160):
            group.broadcast(tensor for _, tensor in form.tensors(bucket))
        for _ in receivers:
            _, received = answers.get(timeout=600)
            assert received.keys() == sent.keys()
            assert all((received[name] == sent[name].bfloat16().double().numpy()).all() for name in sent)
    alone.close()
    group.close()
    group.close()
    for receiver in receivers:
        receiver.join(600)


def test_a_member_that_dies_ends_the_broadcast_with_an_error():
    listener = listen()
    receiver = CONTEXT.Process(target=die_in_broadcast, args=(listener.getsockname()[1],), daemon=True)
    receiver.start()
    group = leading(listener, world_size=2, timeout_s=30)
    receiver.join(600)
    with pytest.raises(WeightSyncError, match=r"weight group at 127\.0\.0\.1:\d+ with 2 members"):
        group.broadcast([torch.zeros(2**22)])
    group.close()


def test_members_that_do_not_come_are_an_error_at_the_deadline():
    with pytest.raises(WeightSyncError, match="did not form within 1 s"):
        leading(listen(), world_size=2, timeout_s=1)


@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "127.0.0.3"), ("127.0.0.2", "127.0.0.1")])
def test_a_group_listens_at_one_address_alone_from_before_it_is_made(address, other):
    listener = listen(address)
    host, port = listener.getsockname()
    assert host == address
    with pytest.raises(OSError, match="in use"):
        socket.create_server((host, port))
    group = leading(listener, world_size=1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, port))
    group.close()
