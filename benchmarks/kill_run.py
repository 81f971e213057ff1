"""The run of `benchmarks.kill_matrix`: a tiny GRPO in which one actor is killed or stopped within one phase.

    servers (SGLangEngine starts two, fake) ── environment (a process per conversation) ── reward worker ── ranks

Code inside the phase sends the signal, and continues only when the kernel shows the target as dead or stopped.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from fake_sglang import python_of_fakes
from lightning.pytorch.callbacks import ModelCheckpoint

import lightrl
from benchmarks.faulty_reward import HELD, HOLD, LONGEST_S, PID
from lightrl import (
    GRPO,
    Environment,
    FSDP2Strategy,
    MultiTurn,
    Prompt,
    PromptDataModule,
    RLCallback,
    Sampling,
    SGLangEngine,
    StalenessControl,
    TrajectoryLog,
    WeightSync,
)
from lightrl.engines import Timeouts
from lightrl.loops import shared_rollout
from lightrl.rewards import RewardPart
from lightrl.rollout import RolloutSettings
from lightrl.testing import LETTERS, QUIET, tiny_policy
from lightrl.weights import Bucket

ITERATIONS, AT = 3, 1  # the iteration in which it happens, from 0
PROMPTS, GROUP_SIZE = 2, 4  # of an iteration
DEADLINE_S = 1.0  # of a reward, of an environment's step, and until a silent server is lost
HANG_S = 4.0  # without progress: a rank, a workflow worker, or the rollouts' event loop
WORKERS = 2  # for workflows, in the cells that hit one
STOPS = tuple(range(3, 13))  # so that few completions are cut off
SERVER = ["--delay-s", "0.3", "--vocab-size", str(len(LETTERS)), "--context-length", "64"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MOMENT, AFTER, NOTICES, WEIGHTS = "moment.json", "after", "notices.jsonl", "weights.pt"  # files of the run's folder
KILL, STOP, RAISE, BLOCK = "SIGKILL", "SIGSTOP", "exception", "blocked"
PHASES = ("rollout", "reward", "score", "update", "sync", "checkpoint", "idle")


@dataclass(frozen=True)
class Cell:
    """Who is killed or stopped, in which phase, and how."""

    actor: str
    phase: str
    signal: str

    @property
    def ranks(self) -> int:
        return 2 if self.actor == "rank" else 1


class Tool:
    """The environments' processes, each a `cat`, which echoes its input; idle ones serve the next conversation."""

    idle: ClassVar[deque[subprocess.Popen[str]]] = deque()

    @classmethod
    def take(cls) -> subprocess.Popen[str]:
        while cls.idle:
            process = cls.idle.popleft()
            if process.poll() is None:
                return process
            _close(process)
        pipe = subprocess.PIPE
        return subprocess.Popen(["cat"], stdin=pipe, stdout=pipe, text=True, bufsize=1)

    @classmethod
    def end(cls) -> None:
        while cls.idle:
            _close(cls.idle.pop())


def _close(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Echo(Environment):
    """An environment that asks its process once and ends."""

    moment: Moment | None = None

    def reset(self, prompt: Prompt) -> None:
        self.process = Tool.take()
        self.is_healthy = False

    def step(self, completion: str) -> tuple[None, float, bool]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.moment is not None:
            self.moment.in_step(self.process.pid)
        print("asked", file=self.process.stdin, flush=True)
        if not self.process.stdout.readline():
            raise RuntimeError(f"the environment's process ended with status {self.process.wait()}")
        self.is_healthy = True
        return None, 0.0, True

    def close(self) -> None:
        if self.is_healthy:
            Tool.idle.append(self.process)
        else:
            _close(self.process)


class Engine(SGLangEngine):
    """An engine that calls the moment when part of a version's weights has been sent."""

    moment: Moment | None = None

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        super().load_weights(self._watched(buckets, weight_version), weight_version=weight_version)

    def _watched(self, buckets: Iterable[Bucket], weight_version: int) -> Iterator[Bucket]:
        for index, bucket in enumerate(buckets):
            yield bucket
            if index == 0 and weight_version == AT + 1 and self.moment is not None:
                self.moment.reach("sync")


class Moment(RLCallback):
    """Kills or stops the cell's actor once, within the cell's phase of iteration AT, and records what happens next.

    Args:
        cell: None does nothing.
        folder: the run's folder, to which the record is written.
        rank: this process's rank.
    """

    def __init__(self, cell: Cell | None, folder: Path, rank: int) -> None:
        self.cell = cell
        self.folder = folder
        self.is_here = cell is not None and rank == (1 if cell.actor == "rank" else 0)
        self.rank = rank
        self.trainer: Any = None
        self.phase = ""  # that the main thread is in, at iteration AT
        self._has_happened = False

    def reach(self, phase: str) -> None:
        """Called while the main thread is inside this phase of iteration AT."""
        self.phase = phase
        if self._has_happened:
            self._note_after()
        elif self.is_here and self.cell is not None and self.cell.phase == phase and not self._is_for_step:
            if self._holds_reward:
                wait_until((self.folder / HELD).exists)
            self._act(self._target(self.cell.actor))

    def in_step(self, pid: int) -> None:
        """Called when an environment is about to ask its process."""
        if self.is_here and self._is_for_step and self.phase == "rollout" and not self._has_happened:
            self._act(pid)

    @property
    def _holds_reward(self) -> bool:
        """Whether a reward must be in progress at the signal; during the model calls a worker may be busy or idle."""
        return self.cell is not None and (
            self.cell.phase == "reward" or (self.cell.actor, self.cell.phase) == ("reward worker", "score")
        )

    @property
    def _is_for_step(self) -> bool:
        return self.cell is not None and (self.cell.actor, self.cell.phase) == ("environment", "rollout")

    def _target(self, actor: str) -> int:
        if actor == "server":
            guard = self.trainer.engine.fleet.in_state()[0].process.pid
            return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
        if actor == "reward worker":
            return int((self.folder / PID).read_text())
        if actor == "environment":
            return Tool.idle[0].pid
        if actor == "workflow worker":
            workers: list[Any] = self._controller._runner._workers
            wait_until(lambda: len(workers) == WORKERS)  # one may still be starting
            return max(workers, key=lambda worker: worker.num_running).pid
        return os.getpid()

    @property
    def _controller(self) -> Any:
        rollout = self.trainer.rollout
        return getattr(rollout, "controller", rollout)

    def _act(self, pid: int) -> None:
        assert self.cell is not None
        self._has_happened = True
        if pid == os.getpid() or self.cell.phase == "score":
            (self.folder / HOLD).unlink(missing_ok=True)  # nobody else would let the reward go on
        witness = {"actor": self.cell.actor, "phase": self.phase, "iteration": self.trainer.global_step, "pid": pid}
        part = self.folder / f"{MOMENT}.part"
        part.write_text(json.dumps(witness | {"at": time.monotonic(), "signal": self.cell.signal}))
        part.rename(self.folder / MOMENT)
        if self.cell.actor == "controller thread":
            self._hit_thread(self._controller._thread)
            return
        os.kill(pid, getattr(signal, self.cell.signal))
        if pid != os.getpid():
            wait_until(lambda: _state(pid) in ("Z", "T", ""))

    def _hit_thread(self, thread: Any) -> None:
        assert self.cell is not None
        if self.cell.signal == BLOCK:
            thread.loop.call_soon_threadsafe(time.sleep, 3 * HANG_S)
            return
        thread.loop._run_once = _raise  # the loop's own code: a task would catch it
        thread.loop.call_soon_threadsafe(lambda: None)
        thread.join(10)

    def _note_after(self) -> None:
        path = self.folder / AFTER
        if self.is_here and not path.exists():
            path.write_text(str(time.monotonic()))

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def configure_rollout(self, trainer: Any, module: Any, settings: RolloutSettings) -> RolloutSettings:
        return replace(settings, loop_timeout_s=HANG_S)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == AT:
            self.reach("idle")

    def on_rollout_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == AT and self._holds_reward:
            (self.folder / HOLD).touch()
        if trainer.global_step == AT:
            self.phase = "rollout"
            model = module.parallel_models["policy"]
            forward = model.forward

            def run(*args: Any, **kwargs: Any) -> Any:
                if trainer.global_step == AT:
                    self.reach("score")
                return forward(*args, **kwargs)

            model.forward = run

    def on_rollout_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        needs_idle = self.cell is not None and self.cell.actor == "reward worker"  # it computes rewards of what is done
        if trainer.global_step == AT and done < (1 if needs_idle else total):
            self.reach("rollout")

    def on_rewards_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        if trainer.global_step == AT and (self.folder / HELD).exists():
            self.reach("reward")
            if (self.folder / MOMENT).exists():  # a rank's may be yet to come
                (self.folder / HOLD).unlink(missing_ok=True)

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any, index: int, total: int) -> None:
        if trainer.global_step == AT and index == 1:
            self.reach("update")

    def on_policy_updated(self, trainer: Any, module: Any, weight_version: int) -> None:
        if trainer.global_step == AT and self.rank:  # rank 0 is inside a sync when the engine takes a bucket
            self.reach("sync")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_step == AT + 1 and self.rank:
            self.reach("checkpoint")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._has_happened:
            self._note_after()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        if self._has_happened:
            self._note_after()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)


def _raise() -> None:
    raise MemoryError


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


class Notices(logging.Handler):
    """Writes each warning and error with its time on the monotonic clock, which all processes share."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = folder / NOTICES

    def emit(self, record: logging.LogRecord) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([time.monotonic(), record.getMessage()]) + "\n")


class Letters(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{number}", token_ids=[3 + number, 4]) for number in range(PROMPTS * ITERATIONS)]


def play(folder: Path, cell: Cell | None, *, rank: int = 0, ranks: int = 1, resumes: bool = False) -> None:
    """Trains ITERATIONS on-policy iterations, each with a checkpoint, and saves the last weights in the folder."""
    moment = Moment(cell, folder, rank)
    Echo.moment = Engine.moment = moment
    _watch_checkpoints(moment)
    module = GRPO(
        tiny_policy(),
        reward=[RewardPart("benchmarks.faulty_reward.held", arguments={"folder": str(folder)})],
        workflow=lambda tokenizer: MultiTurn(tokenizer, Echo, step_timeout_s=DEADLINE_S),
        workflow_workers=WORKERS if cell is not None and cell.actor == "workflow worker" else 0,
        reward_timeout_s=DEADLINE_S, group_size=GROUP_SIZE, num_minibatches=2, lr=1e-2,
        decoupled=True,  # so that there is a call to score
        sampling=Sampling(max_new_tokens=8, stop_token_ids=STOPS),
    )  # fmt: skip
    checkpoints = ModelCheckpoint(
        folder / "checkpoints", save_last=True, every_n_train_steps=1, save_top_k=0, save_on_exception=True
    )
    timeouts = Timeouts(request_s=2 * DEADLINE_S, sync_s=10, startup_s=60)
    python = python_of_fakes(folder, *SERVER)
    spread = {"devices": ranks, "strategy": FSDP2Strategy(hang_timeout_s=HANG_S)} if ranks > 1 else {}
    letters = Letters(None, batch_size=PROMPTS, chat_template=TEMPLATE)
    trainer = lightrl.Trainer(
        **QUIET | {"enable_checkpointing": True}, default_root_dir=folder, max_steps=ITERATIONS, limit_val_batches=0,
        engine=Engine(servers=2, sglang_python=python, timeouts=timeouts), **spread,
        callbacks=[moment, checkpoints, TrajectoryLog(1, table_every_n_iterations=None), WeightSync(),
                   StalenessControl(0)],
    )  # fmt: skip
    logging.getLogger("lightrl").addHandler(Notices(folder))
    shared_rollout.HEARTBEAT_S = 0.1  # so that rank 1 hears of a rollout while it lasts
    try:
        trainer.fit(module, datamodule=letters, ckpt_path="last" if resumes else None)
    finally:
        Tool.end()
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in _weights(module).items()}
    if rank == 0:
        torch.save(state, folder / WEIGHTS)


def _weights(module: GRPO) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.policy.state_dict().items()}


def _watch_checkpoints(moment: Moment) -> None:
    """Patches `torch.save` so that rank 0 reaches its moment while the checkpoint's file is open and empty."""
    plain_save = torch.save

    def save(state: Any, *args: Any, **kwargs: Any) -> None:
        if moment.rank == 0 and isinstance(state, dict) and state.get("global_step") == AT + 1:
            moment.reach("checkpoint")
        plain_save(state, *args, **kwargs)

    torch.save = save  # type: ignore[assignment]
