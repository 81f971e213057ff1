import os
import subprocess
import sys

from lightrl.concurrency.owner import kill_owner, may_run, own_mark


def test_this_process_runs_and_one_that_ended_does_not() -> None:
    assert may_run(own_mark())
    script = "from lightrl.concurrency.owner import own_mark; print(own_mark())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert not may_run(ended)


def test_a_process_that_got_the_id_of_another_is_not_taken_for_it() -> None:
    assert not may_run(f"{os.getpid()}-1")
    kill_owner(f"{os.getpid()}-1")  # this process goes on


def test_a_name_that_is_no_mark_may_be_anybodys() -> None:
    assert may_run("yours")
    assert may_run("12-b")
