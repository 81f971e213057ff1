"""Parameters of a model sharded over four gloo processes, gathered on one rank or spread over all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import forked
import pytest

SCRIPT = Path(__file__).with_name("gather_world.py")


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    """What the script found, by case."""
    done = forked.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {case["case"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("part", ["merged", "base", "adapters"])
@pytest.mark.parametrize("case", ["plain", "lora", "replicas"])
def test_rank_0_gets_every_parameter_and_the_others_nothing(case: str, part: str, world: dict[str, Any]) -> None:
    found = world[f"{case} {part} first"]
    assert found["equal"]
    assert [num for num, _ in found["ranks"]][1:] == [0, 0, 0]
    assert [received for _, received in found["ranks"]][1:] == [0, 0, 0]


@pytest.mark.parametrize("part", ["merged", "base", "adapters"])
@pytest.mark.parametrize("case", ["plain", "lora", "replicas"])
def test_spread_over_the_ranks_each_parameter_is_on_one_of_them(case: str, part: str, world: dict[str, Any]) -> None:
    found = world[f"{case} {part} spread"]
    assert found["equal"]
    assert sum(num for num, _ in found["ranks"]) == found["total"]
    assert part == "adapters" or all(num for num, _ in found["ranks"])  # adapters of rank 2 lie on two ranks


def test_the_bytes_on_the_wire_are_those_of_the_plan(world: dict[str, Any]) -> None:
    gathered = [found for found in world.values() if "ranks" in found]
    assert len(gathered) == 18  # 3 cases, 3 parts, on rank 0 or spread
    for found in gathered:
        assert [received for _, received in found["ranks"]] == found["planned"]


def test_a_rank_that_does_not_report_its_share_is_named_at_the_deadline(world: dict[str, Any]) -> None:
    assert "engine.timeouts.sync_s=1" in world["late"]["error"]
    assert "Ranks 3" in world["late"]["error"]
