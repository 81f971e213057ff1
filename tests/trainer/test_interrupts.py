"""Ctrl-C, SIGTERM and `kill -9` against real processes: what they leave behind, and how one goes on from there."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import interrupted_run
import psutil
import pytest
import torch
from tiny_run import Digits, TinyGRPO, make_trainer, train, weights

DEADLINE_S = 600.0  # of everything here, on a loaded machine
# One process imports everything and the runs are forked off it: an import takes seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["interrupted_run"])


class Run:
    """A run in a process of its own that stops at a place; then it gets a signal there."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.process = FORKS.Process(target=interrupted_run.main, args=(folder, place))
        self.process.start()
        self.children: list[psutil.Process] = []

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists():
            assert self.process.is_alive(), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def exit_code(self) -> int | None:
        self.process.join(DEADLINE_S)
        _, alive = psutil.wait_procs(self.children, DEADLINE_S)
        assert not alive
        return self.process.exitcode

    def text(self) -> str:
        file = self.folder / "output.txt"
        return file.read_text() if file.exists() else ""


@pytest.fixture(scope="module", autouse=True)
def _forks() -> None:
    """The process that others are forked off gets `sys.path` by itself from Python 3.13 on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Run] = []

    def make(place: str) -> Run:
        started.append(Run(tmp_path / place, place))
        return started[-1]

    yield make
    for run in started:
        run.process.kill()
        run.process.join()
        run.process.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the run that nobody interrupts."""
    module = TinyGRPO(num_minibatches=2)
    make_trainer(tmp_path_factory.mktemp("whole"), max_steps=4).fit(module, datamodule=Digits())
    return weights(module)


def assert_continues_from(folder: Path, whole: dict[str, torch.Tensor], num_done: int) -> None:
    checkpoint = folder / "last.ckpt"
    assert torch.load(checkpoint)["global_step"] == num_done
    module = TinyGRPO(num_minibatches=2)
    train(folder, module, ckpt_path=checkpoint, max_steps=4)
    assert len(module.trained) == 4 - num_done
    resumed = weights(module)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


CTRL_C = (signal.SIGINT, 130, "Detected KeyboardInterrupt, attempting graceful shutdown")
SIGTERM = (signal.SIGTERM, 143, "Received SIGTERM")


@pytest.mark.parametrize(
    ("place", "sent", "num_done"),
    [
        pytest.param("update", CTRL_C, 3, id="Ctrl-C in an update, which is done first"),
        pytest.param("rollout", SIGTERM, 2, id="SIGTERM in a rollout"),
        pytest.param("update", SIGTERM, 3, id="SIGTERM in an update", marks=pytest.mark.extra),
        pytest.param("rollout", CTRL_C, 2, id="Ctrl-C in a rollout", marks=pytest.mark.extra),
        pytest.param("validation", CTRL_C, 2, id="Ctrl-C in a validation", marks=pytest.mark.extra),
    ],
)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_continues(place, sent, num_done, start, whole):
    number, code, text = sent
    run = start(place)
    run.wait_for("reached")
    assert run.children  # the reward worker
    run.send(number)
    assert run.exit_code() == code, run.text()
    assert text in run.text()
    assert ("at the latest after this iteration" in run.text()) is (place == "update")  # said while it lasts
    assert "threads left: []" in run.text()
    assert_continues_from(run.folder, whole, num_done)


def test_a_second_ctrl_c_ends_an_update_at_once_without_a_checkpoint_of_it(start, whole):
    run = start("endless_update")
    run.wait_for("reached")
    run.send(signal.SIGINT)
    run.wait_for("held")
    run.send(signal.SIGINT)
    assert run.exit_code() == 130, run.text()
    assert_continues_from(run.folder, whole, 2)


def test_kill_9_while_a_checkpoint_is_written_leaves_the_one_before_and_no_worker(start, whole):
    run = start("write")
    run.wait_for("reached")
    assert run.children
    run.send(signal.SIGKILL)
    assert run.exit_code() == -signal.SIGKILL
    (part,) = run.folder.glob("*.part")
    assert part.name.startswith(f"last.ckpt.{run.process.pid}-")
    assert_continues_from(run.folder, whole, 2)
    assert not part.exists()
