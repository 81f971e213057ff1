"""BucketFeed between a thread and a loop: buckets in order, and an end where the loop is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from lightrl.engines.sglang.sync import server_sync
from lightrl.engines.sglang.sync.server_sync import BucketFeed
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, bucketed


@pytest.fixture
def buckets() -> list[Bucket]:
    weights = [(name, torch.zeros(4)) for name in ("a", "b", "c")]
    return list(bucketed(iter(weights), bucket_bytes=16))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    if made.is_running():
        made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_the_coroutine_takes_the_buckets_in_order(loop: asyncio.AbstractEventLoop, buckets: list[Bucket]) -> None:
    feed = BucketFeed(loop)

    async def take() -> list[str]:
        return [name async for bucket in feed for name in bucket.tensors]

    taken = asyncio.run_coroutine_threadsafe(take(), loop)
    with feed:
        assert all(feed.put(bucket) for bucket in buckets)
    assert taken.result(60) == ["a", "b", "c"]


@pytest.mark.parametrize("is_closed", [False, True], ids=["stopped", "closed"])
def test_a_loop_that_has_ended_is_an_error_not_a_wait(
    is_closed: bool, buckets: list[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sync, "LOOK_S", 0.01)
    loop = asyncio.new_event_loop()
    feed = BucketFeed(loop)
    if is_closed:
        loop.close()
    with pytest.raises(WeightSyncError, match="event loop of the engine's requests ended during a weight sync"), feed:
        feed.put(buckets[0])
    loop.close()


def test_a_blocked_loop_is_an_error_that_says_so(
    loop: asyncio.AbstractEventLoop, buckets: list[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_sync, "LOOK_S", 0.01)
    monkeypatch.setattr(server_sync, "BLOCKED_S", 0.1)
    unblocked = threading.Event()
    loop.call_soon_threadsafe(unblocked.wait, 30)
    feed = BucketFeed(loop)
    with pytest.raises(WeightSyncError, match=r"did not answer for 0\.1 s during a weight sync"), feed:
        feed.put(buckets[0])
    unblocked.set()
