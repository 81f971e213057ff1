"""A tool with side effects acts once, wherever the process is killed; what was written before is not written again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import TESTS, finished

from lightrl.workflows.turn_log import Journal

SCRIPT = Path(__file__).with_name("journal_run.py")
NUM_CALLS = 6  # 3 turns in each of 2 iterations


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By when it was killed: what a run left after its resume."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS / "workflows"), prepend=":")
        done = finished(SCRIPT, folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return {path.stem.removeprefix("killed-"): torch.load(path) for path in folder.glob("killed-*.pt")}


@pytest.mark.parametrize("number", range(1, NUM_CALLS + 1))
def test_a_kill_at_a_turn_boundary_repeats_no_effect_and_no_token(number: int, killed: Any) -> None:
    whole, resumed = killed["never"], killed[f"{number}"]
    assert len(set(whole["effects"])) == NUM_CALLS
    assert resumed["effects"] == whole["effects"]
    assert resumed["tokens"] == whole["tokens"]
    assert resumed["metrics"] == whole["metrics"] == [3, 3]
    assert resumed["requests"] == NUM_CALLS - (number - 1)  # those before the kill are in the journal
    assert not resumed["drops"]


def test_a_kill_during_a_call_drops_the_conversation_and_does_not_call_again(killed: Any) -> None:
    resumed = killed["amid"]
    assert len(set(resumed["effects"])) == len(resumed["effects"])
    assert resumed["drops"] == [
        "The earlier run was killed in ToolEnvironment.step, which may have acted; it is not called again."
    ]
    assert len(resumed["tokens"]) == 2  # another prompt took its place


def test_a_resumed_run_keeps_of_its_journal_what_it_may_run_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for position in range(9, 12):  # as numbers, not as text: 10 comes after 9
        for sample in range(2):
            session = f'{position}:a "prompt"/with: signs/{sample}'
            asyncio.run(journal.add(session, begin="step"))
            if position > 9 or sample == 0:
                asyncio.run(journal.add(session, end="step", answer=position, state={"calls": sample}))
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps({"session": "11:a", "begin": "step"})[:20].encode())

    read = Journal(path, first=10)
    assert path.read_bytes() == whole  # without the half line, and with all that older checkpoints need
    assert {name: (log.answers, log.is_in_doubt) for name, log in read.logs.items()} == {
        f'{position}:a "prompt"/with: signs/{sample}': ([("step", position, {"calls": sample})], False)
        for position in (10, 11)
        for sample in range(2)
    }
    assert {name[:2] for name, log in Journal(path, first=0).logs.items() if log.is_in_doubt} == {"9:"}
