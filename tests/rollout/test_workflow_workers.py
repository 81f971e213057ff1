"""Workflows in workers: the numbers of one process, and what happens to the trajectories of a worker that fails.

Real workers and fake servers, whose tokens are a function of seed and place: one that is lost or sampled twice shows.
"""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
from fake_gateway import FakeGateway
from fake_sglang.process import FakeServerProcess
from local_rewards import LocalRewards
from test_controller import Numbers
from transformers import Qwen3Config
from waits import Deadlines, comes_true
from worker_workflows import BlockingOnce, Dropping, Dying, ForgingOnce, SlowToRead, Two, Unreadable, Words

from lightrl.engines import SGLangEngine
from lightrl.errors import RolloutError
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.trajectory import Group, Prompt, Sampling
from lightrl.weights import Bucket
from lightrl.workflows.workflow import SingleTurn, Workflow

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=12)
PACE_S = 0.02
Make = Callable[..., RolloutController]


def sums() -> LocalRewards:
    return LocalRewards(lambda trajectory: float(sum(trajectory.completion_ids)))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServerProcess]]:
    with FakeServerProcess() as first, FakeServerProcess() as second:
        yield [first, second]


ROUTERS = pytest.mark.parametrize(
    "router", [False, pytest.param(True, marks=pytest.mark.extra)], ids=["directly", "through a gateway"], indirect=True
)


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The address of a gateway, or None."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(FakeGateway().serving()).url if request.param else None


@pytest.fixture
def make(servers: list[FakeServerProcess], caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Makes a controller with version 0 loaded, and closes the one before; in the end none has left a process."""
    made: list[RolloutController] = []

    def close() -> None:
        while made:
            controller = made.pop()
            controller.close()
            controller.engine.close()

    def factory(workers: int, workflow: Workflow | None = None, router: str | None = None, **settings: Any) -> Any:
        close()
        timeouts = Deadlines(hang_s=10.0, request_s=60.0, probe_interval_s=0.2)
        urls = [server.url for server in servers]
        engine = SGLangEngine(urls=urls, timeouts=timeouts, router=router)
        engine.start(Qwen3Config(vocab_size=1000, max_position_embeddings=1000))
        sizes = {"group_size": 2, "groups_per_iteration": 4, "workflow_workers": workers}
        arguments: Any = [engine, workflow or SingleTurn(Words()), sums(), RolloutSettings(**{**sizes, **settings})]
        try:
            controller = RolloutController(*arguments, sampling=SAMPLING, prompts=Numbers())
        except ValueError:
            engine.close()
            raise
        made.append(controller)
        load(controller, 0)
        return controller

    for server in servers:
        server.reset()
        server.pace(PACE_S)
    yield factory
    close()
    assert not workers_of()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def load(controller: RolloutController, version: int) -> None:
    controller.load_weights(
        [Bucket({"weight": torch.full((4,), float(version))}, is_last=True)], weight_version=version
    )


def iterations(controller: RolloutController, num: int) -> list[Group]:
    groups = []
    for version in range(num):
        groups += controller.take(version)
        controller.commit()
        load(controller, version + 1)
    return groups


def validation(controller: RolloutController) -> list[Group]:
    return controller.evaluate([Prompt("v", token_ids=[5])], sampling=SAMPLING, num_samples=3)


def workers_of(pid: int | None = None) -> list[psutil.Process]:
    """The workers of a process, this one if None; without their guards."""
    words = "lightrl.rollout.workflow_worker"
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, perhaps without having been waited for
            if words in "".join(child.cmdline()[2:3]):  # of a guard it is its file
                found.append(child)
    return found


def tokens(groups: list[Group]) -> list[Any]:
    return [(group.id, [list(item.token_ids) for item in group.trajectories]) for group in groups]


def wait_until_ready(controller: RolloutController) -> None:
    num = controller.settings.workflow_workers
    assert comes_true(lambda: len(controller._runner._workers) == num)  # type: ignore[attr-defined]


def num_running(servers: list[FakeServerProcess]) -> int:
    return sum(len(server.stats()["written"]) for server in servers)


def taken_while(controller: RolloutController, fault: Callable[[], object]) -> list[Group]:
    """The groups of one iteration, in whose midst the fault comes, once for all."""
    faults = [fault]

    def on_wait(done: int, total: int) -> None:
        if faults and num_running_now():
            faults.pop()()

    servers = [FakeServerProcess() for _ in controller.engine.fleet.servers]  # type: ignore[attr-defined]
    for server, url in zip(servers, controller.engine.fleet.servers, strict=True):  # type: ignore[attr-defined]
        server.port = int(url.rpartition(":")[2])

    def num_running_now() -> bool:
        return num_running(servers) >= 8  # all of the iteration

    wait_until_ready(controller)
    groups = controller.take(0, on_wait=on_wait)
    assert not faults
    return groups


@pytest.mark.extra
@ROUTERS
@pytest.mark.parametrize("defers_rewards", [False, True], ids=["rewards before", "rewards deferred"])
def test_two_workers_give_the_trajectories_of_none(make: Make, router: str | None, defers_rewards: bool) -> None:
    results = []
    for num in (0, 2):
        controller = make(num, router=router if num else None, defers_rewards=defers_rewards)
        groups = controller.take(0)
        if defers_rewards:
            controller.wait_for_rewards(groups)
        controller.commit()
        load(controller, 1)
        validated = validation(controller)
        results.append([groups, controller.take(1), validated])
        if defers_rewards:
            controller.wait_for_rewards(results[-1][1])
    assert results[0] == results[1]
    assert [group.id for group in results[1][0] + results[1][1]] == list(range(8))
    assert all(item.reward is not None for group in results[1][0] for item in group.trajectories)


@pytest.mark.extra
def test_all_workers_run_and_a_drop_keeps_its_reason(make: Make) -> None:
    controller = make(2, Two())
    wait_until_ready(controller)
    groups = iterations(controller, 2)
    processes = {item.metrics["process"] for group in groups for item in group.trajectories}
    assert processes == {worker.pid for worker in workers_of()}
    assert [len(item.turns) for group in groups for item in group.trajectories] == [1] * 16

    results = []
    for num in (0, 2):
        controller = make(num, Dropping(Words()), max_failed_fraction=1.0)  # type: ignore[arg-type]
        results.append((controller.take(0), controller.drain_drops()))
    assert results[0] == results[1]
    assert {(drop.reason, drop.message) for drop in results[1][1]} == {("rollout", "prompt 1 is not for us")}


@ROUTERS
@pytest.mark.parametrize(
    "is_killed", [pytest.param(False, marks=pytest.mark.extra), True], ids=["all live", "one is killed during syncs"]
)
def test_a_sync_stops_them_at_a_token_and_no_token_is_too_old(make, servers, router, is_killed):
    controller = make(2, router=router, max_staleness=1)
    servers[0].pace(5 * PACE_S)  # so that a sync finds something to stop on a slow machine too
    groups = controller.take(0)
    controller.commit()
    for version in (1, 2, 3, 4):
        if is_killed and version == 2:
            wait_until_ready(controller)
            killing = threading.Timer(0.01, workers_of()[0].kill)
            killing.start()
        load(controller, version)  # during what the window has admitted
        groups += controller.take(version)
        taken = groups[-4:]
        controller.commit()
        assert all(version - 1 <= group.oldest_version for group in taken)
    items = [item for group in groups for item in group.trajectories]
    assert any(item.oldest_version < item.newest_version for item in items)  # it went on under newer weights
    for server in servers:
        server.pace(0)
    assert tokens(iterations(make(0), 5)) == tokens(groups)


@pytest.mark.extra
def test_what_is_given_up_ends_on_the_servers(make: Make, servers: list[FakeServerProcess]) -> None:
    controller = make(2, group_size=1, oversample_fraction=1.0)
    servers[1].pace(60.0)  # its half would take twelve minutes
    assert len(controller.take(0)) == 4
    assert controller.drain_group_drops()["oversampled"] == 4
    assert comes_true(lambda: num_running(servers) == 0)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.extra)], ids=["kill -9", "SIGSTOP"]
)
def test_a_worker_that_is_gone_is_named_and_its_trajectories_are_run_again(make, number, caplog):
    alone = make(0)
    expected, validated = iterations(alone, 2), validation(alone)
    controller = make(2, loop_timeout_s=3.0 if number == signal.SIGSTOP else 600.0)
    groups = taken_while(controller, lambda: os.kill(workers_of()[0].pid, number))
    controller.commit()
    load(controller, 1)
    groups += controller.take(1)
    assert groups == expected
    controller.commit()
    load(controller, 2)
    assert validation(controller) == validated
    assert "ended with signal SIGKILL. Trajectories to run again: 4" in caplog.text
    assert ("did not answer for loop_timeout_s=3" in caplog.text) == (number == signal.SIGSTOP)
    assert comes_true(lambda: len(workers_of()) == 2)  # another one in its place


@pytest.mark.extra
def test_a_workflow_that_blocks_its_worker_is_shown_and_run_again(make, tmp_path, caplog, capfd):
    groups = make(2, BlockingOnce(tmp_path / "mark"), loop_timeout_s=10.0).take(0)
    assert tokens(groups) == tokens(make(0).take(0))
    assert "blocks its event loop" in caplog.text
    assert "worker_workflows.py" in capfd.readouterr().err  # the line


@pytest.mark.parametrize(
    "messages",
    [
        [(number, sample, nothing) for number in range(50) for sample in (0, 1) for nothing in (b"", b"{}")],
        *[pytest.param([message], marks=pytest.mark.extra) for message in ((None, 3), (), (10**9, {"state": 1}))],
    ],
    ids=["trajectories", "report", "empty", "unasked answer"],
)
def test_a_worker_that_sends_what_is_no_message_is_named_and_replaced(messages, make, tmp_path, caplog):
    honest = tokens(iterations(make(0), 1))
    controller = make(1, ForgingOnce(tmp_path / "once", *messages))
    wait_until_ready(controller)
    assert tokens(iterations(controller, 1)) == honest
    assert re.search(r"Ending the workflow worker \d, which sent an invalid message: ", caplog.text)


@pytest.mark.extra
def test_a_prompt_that_kills_its_workers_is_dropped(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    controller = make(2, Dying(Words()), max_failed_fraction=1.0, groups_per_iteration=2)  # type: ignore[arg-type]
    groups = controller.take(0)
    assert len(groups) == 2
    assert not [item for group in groups for item in group.trajectories if item.prompt.id == "p1"]
    drops = {drop.prompt_id: drop for drop in controller.drain_drops()}  # perhaps also what ran with it
    assert "3 workflow workers died while they ran prompt 'p1'" in drops["p1"].message
    assert "ended with exit code 7" in caplog.text


def test_a_worker_that_is_starting_ends_with_its_controller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightrl.concurrency.abandon._CANCEL_AGAIN_S", 0.01
    )  # cancels again before the worker has ended
    controller = make(1, SlowToRead(Words()))  # type: ignore[arg-type]
    assert comes_true(workers_of)
    controller.close()
    assert not workers_of()
    gc.collect()  # warns if nobody has waited for the worker


@pytest.mark.extra
def test_a_workflow_that_no_worker_can_read_ends_the_run(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    controller = make(1, Unreadable(Words()))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="workflow worker 0 ended with exit code 1 before it had finished"):
        controller.take(0)
    assert "no copy of me works" in capfd.readouterr().err


@pytest.mark.extra
@ROUTERS
def test_a_server_that_dies_is_left_and_comes_back(make, router, servers):
    expected = iterations(make(0), 2)
    controller = make(2, router=router)
    port = servers[1].port
    groups = taken_while(controller, servers[1].kill)
    states = controller.engine.fleet.servers  # type: ignore[attr-defined]
    assert states[servers[1].url].state == "lost"
    servers[1].start(port)
    assert comes_true(lambda: states[f"http://127.0.0.1:{port}"].state == "routable")
    router = controller.engine.loader.members.router  # type: ignore[attr-defined]
    assert comes_true(lambda: router.state is None or servers[1].url in router.state.serving)
    controller.commit()
    load(controller, 1)
    assert groups + controller.take(1) == expected
    assert servers[1].stats()["requests"]["/generate"] > 0


@pytest.mark.extra
@pytest.mark.parametrize("router", [True], indirect=True)
def test_requests_at_a_server_that_hangs_continue_though_the_gateway_does_not_say_which(make, router, servers):
    expected = make(0).take(0)
    controller = make(2, router=router)
    try:
        assert tokens(taken_while(controller, servers[1].freeze)) == tokens(expected)
    finally:
        servers[1].thaw()


@ROUTERS
@pytest.mark.extra
def test_a_server_that_leaves_during_an_iteration_is_drained(make, router, servers):
    expected = make(0).take(0)
    controller = make(2, router=router)
    engine: Any = controller.engine
    num_before = [server.stats()["requests"]["/generate"] for server in servers]
    groups = taken_while(controller, lambda: engine.loader.remove(engine.fleet.servers[servers[1].url]))
    assert groups == expected
    assert list(engine.fleet.servers) == [servers[0].url]
    num_moved = [server.stats()["requests"]["/generate"] - num for server, num in zip(servers, num_before, strict=True)]
    assert num_moved[0] > 4  # those of the other one went on here
    assert num_running(servers) == 0


@pytest.mark.parametrize("resumed_with", [pytest.param(0, marks=pytest.mark.extra), 1])
@pytest.mark.parametrize(
    "workflow",
    [pytest.param(SingleTurn(Words()), marks=pytest.mark.extra), Two()],  # type: ignore[arg-type]
    ids=["one turn", "two turns"],
)
def test_what_is_in_flight_continues_from_its_token(make: Make, resumed_with: int, workflow: Workflow) -> None:
    states: list[dict[str, Any]] = []
    controller = make(2, workflow)
    expected = taken_while(controller, lambda: states.append(controller.state_dict()))
    assert len(states[0]["written"]) >= 8

    resumed = make(resumed_with, workflow)
    resumed.load_state_dict(states[0])
    again = resumed.state_dict()
    assert again["written"] == states[0]["written"]  # nothing is lost if it ends before it has started
    assert tokens(resumed.take(0)) == tokens(expected)


TRAINER = """
import sys, time
sys.path[:0] = {paths}
from test_workflow_workers import *
engine = SGLangEngine(urls={urls})
engine.start(Qwen3Config(vocab_size=1000, max_position_embeddings=1000))
settings = RolloutSettings(groups_per_iteration=4, workflow_workers=2)
controller = RolloutController(engine, SingleTurn(Words()), sums(), settings, sampling=SAMPLING, prompts=Numbers())
load(controller, 0)
controller.take(0)
print("taken", flush=True)
time.sleep(1000)
"""


@pytest.mark.extra
def test_workers_end_with_a_killed_trainer(servers: list[FakeServerProcess], tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    paths = [str(Path(__file__).parent), *sys.path]
    script.write_text(TRAINER.format(paths=paths, urls=[server.url for server in servers]))
    with forked.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"taken\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        workers = workers_of(trainer.pid)
        trainer.kill()
    assert workers
    _, alive = psutil.wait_procs(children, 600)
    assert not alive


class OfTheTest(SingleTurn):
    """Has an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(Words())  # type: ignore[arg-type]
        self.lock = __import__("threading").Lock()


def test_a_workflow_that_cannot_travel_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="OfTheTest cannot be pickled for other processes: cannot pickle"):
        make(1, OfTheTest())
    monkeypatch.setattr(sys.modules["__main__"], "Two", Two, raising=False)
    monkeypatch.setattr(Two, "__module__", "__main__")
    with pytest.raises(ValueError, match="Two uses a class or function in the main script"):
        make(1, Two())
