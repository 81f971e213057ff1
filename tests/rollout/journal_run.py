"""What test_journal.py runs: a conversation with a tool that acts, killed at each of its turns and resumed.

journal_run.py FOLDER        leaves `killed-N.pt` for each N: effects, tokens and requests after the resume
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from chat_texts import CONFIG, END, SAMPLING, WITH_TOOLS, chat_prompt, chat_tokenizer, letters
from local_rewards import LocalRewards

from lightrl.engines import FakeEngine
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.trajectory import Prompt
from lightrl.weights import bucketed
from lightrl.workflows import MultiTurn, ToolEnvironment
from lightrl.workflows.tools import ToolCall

TURNS = 3
ITERATIONS = 2
AMID = 2  # the tool's call in which one run is killed


class Prompts:
    def __getitem__(self, position: int) -> Prompt:
        return chat_prompt(name=f"p{position}")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def play(folder, *, kill_before=None, kill_during=None, resumes):
    """Two iterations of one conversation; dies before the completion of this number, or amid this call of the tool."""
    effects = folder / "effects"
    num_calls = 0

    def pay(note: str) -> str:
        """Pays.

        Args:
            note: for the books
        """
        nonlocal num_calls
        num_calls += 1
        with effects.open("a") as file:
            file.write(f"{note}\n")
        if num_calls == kill_during:
            kill()
        return f"paid {note}"

    def environment() -> ToolEnvironment:
        return ToolEnvironment(
            [pay], parser=lambda completion: [ToolCall("pay", {"note": completion})], has_side_effects=True
        )

    engine = FakeEngine()

    def write(prompt: list[int], sampling: Any, sample: int) -> list[int]:
        if len(engine.requests) == kill_before:
            kill()
        return [*letters(str(sampling.seed % 10**9)), END]

    engine.script = write
    engine.start(CONFIG)
    workflow = MultiTurn(chat_tokenizer(WITH_TOOLS), environment, max_turns=TURNS)
    settings = RolloutSettings(max_failed_fraction=1.0)
    controller = RolloutController(
        engine, workflow, LocalRewards(), settings, sampling=SAMPLING, prompts=Prompts(), folder=folder
    )
    if resumes:
        controller.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    else:
        torch.save(controller.state_dict(), folder / "state.pt")
    trained = []
    for version in range(ITERATIONS):
        controller.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=version)
        trained += [item for group in controller.take(version) for item in group.trajectories]
        controller.commit()
    drops = [drop.message for drop in controller.drain_drops()]
    controller.close()
    return {
        "effects": effects.read_text().split(), "tokens": [list(item.token_ids) for item in trained],
        "metrics": [item.metrics["tool_calls"] for item in trained], "requests": len(engine.requests), "drops": drops,
    }  # fmt: skip


def in_child(work: Callable[[], Any]) -> int:
    """The exit status of a child process that does this work."""
    child = os.fork()
    if child == 0:
        work()
        sys.stderr.flush()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main() -> None:
    root = Path(sys.argv[1])
    cases = {f"{number}": {"kill_before": number} for number in range(1, TURNS * ITERATIONS + 1)}
    cases |= {"amid": {"kill_during": AMID}, "never": {}}
    for name, when in cases.items():
        folder = root / name
        folder.mkdir()
        if when:
            status = in_child(lambda folder=folder, when=when: play(folder, resumes=False, **when))
            assert os.WIFSIGNALED(status), status
        save = root / f"killed-{name}.pt"
        status = in_child(
            lambda folder=folder, save=save, again=bool(when): torch.save(play(folder, resumes=again), save)
        )
        assert status == 0, status


if __name__ == "__main__":
    main()
