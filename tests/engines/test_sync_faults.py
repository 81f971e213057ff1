"""Weight syncs that go wrong in silence: each fault fires, leaves wrong values, and is noticed within one iteration.

The runs are those of `python -m benchmarks.sync_faults`, which writes the table in benchmarks/faults.md.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_sglang.faults import OF_LOADS, OF_SERVED_WEIGHTS

from benchmarks.sync_faults import FAULTS, HEALTHY, MARKERS, Servers, SyncFault, fake_servers, run_fault, run_healthy

pytestmark = pytest.mark.filterwarnings("ignore")
# The first of each kind, with as few servers as it needs, is in the default run.
FIRST = {(fault.fault.get("kind"), fault.adapters, fault.damage): fault for fault in reversed(FAULTS)}
DEFAULT = [(fault.name, min(fault.servers)) for fault in FIRST.values()]
CASES = [
    pytest.param(fault, num, id=f"{fault.name}-{num}", marks=[pytest.mark.extra] * ((fault.name, num) not in DEFAULT))
    for fault in FAULTS
    for num in fault.servers
]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with fake_servers() as shared:
        yield shared


@pytest.mark.parametrize(("fault", "num_servers"), CASES)
def test_a_fault_fires_and_is_noticed_within_one_iteration(
    fault: SyncFault, num_servers: int, servers: Servers
) -> None:
    result = run_fault(fault, num_servers, servers)
    assert result.num_fired == (num_servers if fault.on_all else 1)
    assert result.num_wrong_values > 0 or not fault.is_silent
    assert result.iterations <= 1


@pytest.mark.extra
def test_healthy_syncs_give_no_alarm(servers: Servers) -> None:
    found = run_healthy(3 * len(HEALTHY), servers)
    assert found["healthy_syncs"] == 3 * len(HEALTHY)
    assert found["alarms"] == []


def test_there_is_a_run_for_each_silent_kind_of_fault() -> None:
    kinds = {fault.fault["kind"] for fault in FAULTS if fault.is_silent and not fault.damage}
    assert kinds == {*OF_LOADS, *OF_SERVED_WEIGHTS, "keep_cache", "old_adapter"}


def test_the_table_of_faults_has_exactly_these_faults() -> None:
    text = (Path(__file__).parents[2] / "benchmarks/faults.md").read_text()
    table = text.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    names = [line.split("|")[1].strip().removesuffix(" (not silent)") for line in table.splitlines()[3:] if "|" in line]
    assert names == [fault.name for fault in FAULTS]
    assert re.search(r"1,0\d\d healthy syncs gave 0 false alarms", table)
