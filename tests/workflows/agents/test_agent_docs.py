"""The agent on the page docs/train-an-agent.md runs as it stands there."""

import gc
import re
import warnings
from pathlib import Path
from typing import Any

from agent_cases import decode, play, scripted

from lightrl.trajectory import Prompt

PAGE = Path(__file__).parents[3] / "docs" / "train-an-agent.md"


def test_the_agent_of_the_page_is_trained_on_both_of_its_turns() -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    task = Prompt("a", token_ids=[5], fields={"question": "6*7?", "answer": "42"})
    trajectory = play(names["run"], scripted("41", "42"), task)
    assert [decode(trajectory.token_ids[turn.start : turn.end]) for turn in trajectory.turns] == [
        "41<|im_end|>",
        "42<|im_end|>",
    ]
    assert trajectory.rewards[-1] == 1.0
    names.clear()
    with warnings.catch_warnings():  # the page's client keeps its connections until the process ends
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
