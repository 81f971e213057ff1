"""Silent faults with the real SGLang: a proxy in front of it drops, repeats or changes one request of a sync.

The server answers success and reports the version. As in test_sync_faults.py, the runs are at a learning rate of 1e-6
in bfloat16, with one server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_sglang import tiny_models
from sglang_proxy import SUCCESS, Answer, Body, Change, Proxy, proxy_of

from benchmarks.sync_faults import Watch, fit

pytestmark = [pytest.mark.real_sglang, pytest.mark.extra, pytest.mark.filterwarnings("ignore")]
DISK, TENSOR, BROADCAST = (f"/update_weights_from_{kind}" for kind in ("disk", "tensor", "distributed"))


@pytest.fixture
def proxy(real_server: dict[str, Any]) -> Iterator[Proxy]:
    with proxy_of(real_server) as made:
        yield made


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The folder of the server's model, with the weights of a run's start."""
    tiny_models(1)[0].save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


async def ignored(proxy: Proxy, body: Body) -> tuple[Body | None, Answer]:
    await proxy.post("/update_weight_version", {"new_version": body["weight_version"], "abort_all_requests": False})
    await proxy.post("/flush_cache?timeout=0", {})
    return None, SUCCESS


async def dropped_bucket(proxy: Proxy, body: Body) -> tuple[Body | None, Answer]:
    assert body.get("weight_version") is None, "the last bucket has the version"
    return None, SUCCESS


async def cache_kept(proxy: Proxy, body: Body) -> tuple[Body | None, Answer]:
    return body | {"flush_cache": False}, SUCCESS


async def names_swapped(proxy: Proxy, body: Body) -> tuple[Body | None, Answer]:
    names = [name.replace("q_norm", "?").replace("k_norm", "q_norm").replace("?", "k_norm") for name in body["names"]]
    if names == body["names"]:  # they come in a later bucket
        proxy.num_changed -= 1
        proxy.arm(BROADCAST, names_swapped)
    return body | {"names": names}, SUCCESS


@pytest.mark.parametrize(
    ("transport", "path", "change", "noticed_by"),
    [
        pytest.param("disk", DISK, ignored, "digests", id="acknowledged and ignored"),
        pytest.param("disk", DISK, cache_kept, "canary", id="the prefix cache not flushed"),
        pytest.param("tensor", TENSOR, dropped_bucket, "digests", id="a bucket dropped, shared memory"),
        pytest.param("distributed", BROADCAST, names_swapped, "digests", id="two names swapped, broadcast"),
    ],
)
def test_a_silent_fault_of_the_real_server_is_noticed_within_one_iteration(
    transport: str, path: str, change: Change, noticed_by: str, proxy: Proxy, policy: Path
) -> None:
    watch = Watch(lambda: proxy.arm(path, change))
    result = fit([proxy.url], policy, watch, token=proxy.server["token"], transport=transport)
    assert proxy.num_changed == 1
    assert result.noticed_by == noticed_by, result.notices
    assert result.iterations == 0


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
def test_healthy_syncs_with_the_real_server_give_no_alarm(transport: str, proxy: Proxy, policy: Path) -> None:
    result = fit([proxy.url], policy, Watch(), token=proxy.server["token"], transport=transport, num_iterations=8)
    assert result.num_syncs == 9
    assert result.notices == []
