import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rank_scripts import finished
from tiny import random_trajectories

from lightrl.callbacks.weight_sync import _gathered
from lightrl.columns import as_columns
from lightrl.loops.shared_rollout import groups_of, set_remote_rewards, summaries_of
from lightrl.strategies import ShardedExperience
from lightrl.strategies.ranks import watch as rank_watch
from lightrl.strategies.ranks.processes import Ranks, _watch_store
from lightrl.strategies.ranks.watch import RankWatch
from lightrl.trajectory import Group
from lightrl.weights import Bucket


@pytest.mark.parametrize("main_address", ["127.0.0.1", "localhost"])
def test_the_watchs_store_listens_at_the_main_address_alone(main_address: str) -> None:
    store = _watch_store(main_address)
    addresses = {
        item.laddr.ip
        for item in psutil.Process().net_connections("tcp")
        if item.status == psutil.CONN_LISTEN and item.laddr.port == store.port
    }
    assert addresses == {"127.0.0.1"}
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_other_ranks_know_the_numbers_of_trajectories_and_say_where_the_rest_is() -> None:
    items = random_trajectories()[:3]
    for index, item in enumerate(items):
        item.sample, item.reward, item.metrics = index, None, {"accuracy": 0.1 * index} if index else {}
    items[1].columns = as_columns({"routes": [1, 2, 3] * len(items[1].token_ids)})
    groups = [Group(7, items[0].prompt, items)]
    experience = ShardedExperience.from_trajectories(items, has_rewards=False)
    (group,) = groups_of(json.loads(json.dumps(summaries_of(groups))))
    remote = ShardedExperience.elsewhere(experience.table, experience.token_dtypes)
    assert torch.equal(remote.lengths, experience.lengths)
    assert torch.equal(remote.loss_token_counts, experience.loss_token_counts)
    assert remote.tokens["loss_mask"].here == []
    assert remote.tokens["routes"].empty.shape == experience.tokens["routes"].empty.shape == (0, 3)
    with pytest.raises(ValueError, match=r"'token_ids' is per token, and this rank has the tokens of 0 of these 3"):
        remote.token_ids  # noqa: B018
    for actual, expected in zip(group.trajectories, items, strict=True):
        assert (actual.metrics, actual.reward, actual.group_id) == (expected.metrics, None, 7)
        assert (actual.oldest_version, actual.newest_version) == (4, 4)
        with pytest.raises(AttributeError, match=r"Only rank 0 has 'completion' of a trajectory of prompt 'prompt-0'"):
            actual.completion  # noqa: B018
    items[1].reward, items[2].reward = 0.1, 0.7
    items[2].rewards = [0.1] * len(items[2].token_ids)
    set_remote_rewards([group], summaries_of([Group(7, items[0].prompt, items[1:])]))
    assert [(item.sample, item.reward) for item in group.trajectories] == [(1, 0.1), (2, 0.7)]


Watched = Callable[..., tuple[list[RankWatch], threading.Event]]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Makes the watches of some ranks, which look often, and the event of an end of the process."""
    monkeypatch.setattr(rank_watch, "POLL_S", 0.02)
    monkeypatch.setattr(rank_watch, "GRACE_S", 0.1)
    watches: list[RankWatch] = []

    def make(num: int = 2, **settings: float) -> tuple[list[RankWatch], threading.Event]:
        store, ended = torch.distributed.HashStore(), threading.Event()
        watches.extend(RankWatch(store, rank, num, **settings, end_process=ended.set) for rank in range(num))
        return watches, ended

    yield make
    for watch in watches:
        watch.close()


def test_a_collective_that_timed_out_is_named_with_the_rank_that_is_behind(watched: Watched) -> None:
    watches, _ = watched()
    error = torch.distributed.DistBackendError(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4096, "
        "NumelOut=4096, Timeout(ms)=600000) ran for 600061 milliseconds before timing out."
    )
    watches[0].enter("update")
    watches[0].fail(error, timeout_s=10)
    watches[1].fail(RuntimeError("stopped"), timeout_s=10)
    assert "Rank 0 failed in 'update'" in watches[1].failed_before
    assert "It waited 600 s in collective 12, ALLREDUCE of 4096 numbers" in watches[1].failed_before
    assert watches[1].failed_before.endswith("Furthest behind: rank 1.")


def test_of_two_ranks_that_fail_at_once_the_second_knows_of_the_first() -> None:
    store = torch.distributed.HashStore()
    first, second = (RankWatch(store, rank, 2, end_process=lambda: None) for rank in range(2))
    first.fail(ValueError("on purpose"), timeout_s=0.0)
    second.fail(ValueError("the same"), timeout_s=0.0)  # as a rule before its thread has looked
    assert second.failed_before == "Rank 0 failed in 'start': ValueError: on purpose"
    first.close()
    second.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_the_cause_of_what_the_others_raise(rank: int, watched: Watched) -> None:
    store, ended = torch.distributed.HashStore(), threading.Event()
    watch = RankWatch(store, 1 - rank, 2, hang_timeout_s=0.1, end_process=ended.set)
    assert ended.wait(600)
    assert str(watch.failed_before).startswith(f"Rank {rank} has not reported for hang_timeout_s=0.1")
    watch.close()


def test_a_rank_that_fails_since_rank_0_is_gone_raises_nothing_else() -> None:
    class Gone:
        """A store whose process has ended."""

        def compare_set(self, *args: str) -> bytes:
            raise torch.distributed.DistNetworkError("Broken pipe")

        check = set = get = multi_get = compare_set

    watch = RankWatch(Gone(), 1, 2, end_process=lambda: None)
    watch.fail(RuntimeError("connection closed by peer"))
    watch.close()


def test_a_rank_that_fails_first_does_not_call_rank_0_killed_which_ends_for_that_reason(watched: Watched) -> None:
    class Ending:
        """A store whose process ends as soon as it has read the failure."""

        def __init__(self) -> None:
            self.store, self.is_gone = torch.distributed.HashStore(), False

        def __getattr__(self, name: str) -> Any:
            if self.is_gone:
                raise torch.distributed.DistNetworkError("Broken pipe")
            return getattr(self.store, name)

        def compare_set(self, key: str, *values: str) -> bytes:
            value = self.store.compare_set(key, *values)
            self.is_gone = key == "failure"
            return value

    ended = threading.Event()
    watch = RankWatch(Ending(), 1, 2, end_process=ended.set)
    watch.fail(ValueError("lr must be >= 0"), timeout_s=10)
    assert watch.failed_before is None
    assert ended.wait(10), "a rank that hangs in its own clean-up is ended all the same"
    watch.close()


def test_a_phase_with_a_deadline_of_its_own_is_left_alone(watched: Watched) -> None:
    (watch,), ended = watched(1, hang_timeout_s=0.5)
    watch.begin()
    watch.enter("sync", has_own_deadline=True)
    assert not ended.wait(2)


def test_ranks_that_wait_for_the_engine_of_rank_0_are_left_alone(watched: Watched) -> None:
    watches, ended = watched(hang_timeout_s=0.5)
    for watch in watches:
        watch.begin()
        watch.enter("sync")
    watches[1].step()  # it has gathered the next parameter, and waits for rank 0 to do the same
    with watches[0].own_deadline(True):
        assert not ended.wait(2)


def test_a_rank_that_hangs_while_a_sync_gathers_is_named(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watches, ended = watched(hang_timeout_s=0.3)
    for watch in watches:
        watch.begin()
        watch.enter("sync")

    def gathering(rank: int) -> Iterator[Bucket]:
        watches[rank].step()
        yield Bucket({}, is_last=False)
        if rank == 0:  # rank 1 does not come
            watches[rank].step()
        ended.wait(600)

    class WatchedRanks(Ranks):
        def __init__(self, rank: int) -> None:
            self.own_deadline = watches[rank].own_deadline  # type: ignore[method-assign,assignment]

    def sync(rank: int) -> None:
        with watches[rank].own_deadline(True):
            for _ in _gathered(gathering(rank), WatchedRanks(rank)):
                pass

    threads = [threading.Thread(target=sync, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert "It waits for rank 1." in capsys.readouterr().err


def test_a_rank_that_waits_for_one_that_continues_is_left_alone(watched: Watched) -> None:
    watches, ended = watched(hang_timeout_s=1.0)
    for watch in watches:
        watch.begin()
    watches[1].enter("score: reference")  # it does not hold the reference
    for _ in range(30):
        watches[0].step()
        assert not ended.wait(0.05)


@pytest.mark.parametrize(
    ("how", "rank", "message"),
    [
        ("stop in sync", 1, "Rank 1 has not reported for hang_timeout_s=4, since it was in 'sync'"),
        pytest.param(
            "stop in update",
            0,
            "Rank 0 has not reported for hang_timeout_s=4, since it was in 'update'",
            marks=pytest.mark.extra,
        ),
        ("kill in update", 0, "Rank 0 was killed, or its machine or network failed"),
        pytest.param(
            "kill in update", 1, "Rank 1 was killed, or its machine or network failed", marks=pytest.mark.extra
        ),
        pytest.param(
            "kill in rollout",
            2,
            "Rank 2 has not reported for hang_timeout_s=4, since it was in 'rollout'",
            marks=pytest.mark.extra,
        ),
    ],
    ids=lambda value: str(value) if len(str(value)) < 20 else "",
)
def test_a_rank_that_is_stopped_or_killed_is_named_and_none_is_left(how, rank, message, tmp_path):
    done = finished(Path(__file__).with_name("watched_ranks_run.py"), tmp_path, how, str(rank))
    assert done.returncode == 1  # after the last rank, the one that was stopped too
    others = [other for other in range(3) if other != rank]
    assert all(f"[rank {other}, in {how.split()[-1]!r}] {message}" in done.stderr for other in others), done.stderr


@pytest.mark.extra
def test_a_rank_that_does_not_report_its_share_of_the_weights_is_named_at_the_deadline(tmp_path: Path) -> None:
    done = finished(Path(__file__).with_name("watched_ranks_run.py"), tmp_path, "late in share", "2")
    assert done.returncode == 1
    assert "engine.timeouts.sync_s=4" in done.stderr
    assert "Ranks 2" in done.stderr


@pytest.mark.extra
def test_processes_that_end_during_gloo_s_clean_up_end_well(tmp_path: Path) -> None:
    done = finished(Path(__file__).with_name("exits_run.py"), tmp_path, real=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
