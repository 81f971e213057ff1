"""The table of all waits, compared with the code: no call or lock that can block is missing, and no row is of the past.

`waits.txt` has each row's places. A place that moved, or is new, is put there by hand: say which row ends it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from wait_places import PACKAGE, names_of_locks, places, waits, waits_under_locks

from lightrl.commands.deadlines import MARKS, SHORT_LOCKS, WAITS, table

PAGE = PACKAGE.parent / "docs" / "deadlines.md"
ROWS = {wait.what for wait in WAITS}
OUTSIDE = {"a workflow, outside of generate"}  # counted in the controller: it has no call of its own


def listed() -> dict[str, str]:
    """The row of each place in waits.txt."""
    found, row = {}, ""
    for line in Path(__file__).with_name("waits.txt").read_text().splitlines():
        if not line.startswith(" "):
            row = line
            continue
        owner, _, calls = line.strip().partition(": ")
        found |= {f"{owner}: {call}": row for call in calls.split("; ")}
    return found


def test_every_call_that_can_block_and_every_lock_has_a_row() -> None:
    assert set(places()) - listed().keys() == set(), "add each to tests/commands/waits.txt, below the row that ends it"


def test_every_place_is_in_the_code() -> None:
    assert listed().keys() - set(places()) == set(), "remove each from tests/commands/waits.txt"


def test_the_rows_of_the_places_are_those_of_the_table() -> None:
    assert set(listed().values()) | OUTSIDE == ROWS


def test_who_holds_a_short_lock_waits_for_nothing() -> None:
    short = {place for place, row in listed().items() if row == SHORT_LOCKS}
    assert short
    assert {wait: lock for wait, lock in waits_under_locks().items() if lock in short} == {}


def test_every_row_ends() -> None:
    assert [wait.what for wait in WAITS if not wait.limits and not wait.ends] == []


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text().partition(f"{MARKS[0]}\n")[2].partition(MARKS[1])[0] == table()


CODE = """
class Shop:
    lock = threading.Lock()
    def serve(self):
        queue.get()
        thread.join(2.0)
        ', '.join(names)
        asyncio.sleep(0)
        os.waitpid(child, os.WNOHANG)
        self.settings.get("a")
        with self.lock, open("file") as file:
            def later():
                dist.all_reduce(tensor)
async def ask():
    await asyncio.wait_for(queue.get(), 3)
    await future
"""


def test_a_wait_a_lock_and_a_collective_in_new_code_are_found() -> None:
    tree = ast.parse(CODE)
    assert list(waits(tree, names_of_locks([tree]))) == [
        "Shop.serve: queue.get", "Shop.serve: thread.join", "Shop: with self.lock",
        "Shop.serve.later: dist.all_reduce", "ask: asyncio.wait_for", "ask: queue.get", "ask: await future",
    ]  # fmt: skip
