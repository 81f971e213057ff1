"""LineBuffer: lines of a stream, however it is cut; Channel: what is no message; what an HTTP answer asks to wait."""

import asyncio
import contextlib
import socket
import time
from email.utils import formatdate

import pytest

from lightrl.concurrency.streams import BadMessage, Channel, LineBuffer, retry_after_s


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_are_the_same_however_the_stream_is_cut(size):
    stream, buffer = b"one\n\ntwo\nthree", LineBuffer()
    lines = [line for start in range(0, len(stream), size) for line in buffer.lines(stream[start : start + size])]
    assert lines == [b"one", b"", b"two"]
    assert buffer.lines(b"") == [b"three"]
    assert buffer.lines(b"") == []


def test_a_line_without_an_end_comes_in_bounded_pieces():
    buffer = LineBuffer()
    lines = [line for _ in range(1000) for line in buffer.lines(b"x" * 1000)] + buffer.lines(b"")
    assert b"".join(lines) == b"x" * 1_000_000
    assert max(map(len, lines)) <= 1 << 17


@pytest.mark.parametrize(
    "data",
    [b"x" * 9, b"\x01" + b"\xff" * 8, b"\x01\x03" + bytes(7) + b"abc", b"\x00\x03" + bytes(7) + b"abc"],
    ids=["text", "a negative length", "no pickle", "no numbers"],
)
def test_bytes_that_are_no_message_are_refused(data):
    async def receive() -> None:
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        with contextlib.closing(channel), theirs:
            theirs.sendall(data)
            with pytest.raises(BadMessage):
                await channel.receive()

    asyncio.run(asyncio.wait_for(receive(), 30))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("inf", 0.0), ("nan", 0.0), ("soon", 0.0), ("", 0.0), (formatdate(0), 0.0)],
)
def test_retry_after_is_seconds_or_a_date_and_anything_else_asks_for_no_wait(value, seconds):
    assert retry_after_s({"Retry-After": value}) == seconds
    in_an_hour = formatdate(time.time() + 3600, usegmt=True)
    assert retry_after_s({"Retry-After": in_an_hour}) == pytest.approx(3600, abs=60)
