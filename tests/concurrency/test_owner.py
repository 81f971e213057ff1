import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, why_not

from lightrl.concurrency.owner import kill_owner, may_run, own_mark, remove_left_behind


def test_this_process_runs_and_one_that_ended_does_not() -> None:
    assert may_run(own_mark())
    script = "from lightrl.concurrency.owner import own_mark; print(own_mark())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert not may_run(ended)


def test_a_process_that_got_the_id_of_another_is_not_taken_for_it() -> None:
    process, _, host = own_mark().split("-")
    assert not may_run(f"{process}-1-{host}")
    kill_owner(f"{process}-1-{host}")  # this process goes on


def test_a_process_of_another_host_and_a_name_that_is_no_mark_may_run() -> None:
    assert may_run("1-1-00000000")
    assert may_run("yours")
    kill_owner(f"{os.getpid()}-0-00000000")  # this process goes on


@pytest.mark.skipif(why_not() is not None, reason=f"hosts in a box: {why_not()}")
def test_containers_of_one_name_that_share_a_folder_leave_each_other_s_files(tmp_path: Path) -> None:
    script = "from lightrl.concurrency.owner import own_mark; print(own_mark())"
    with Hosts(1) as hosts:
        inside = hosts.popen(1, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        file = tmp_path / f"x-{inside.communicate()[0].strip()}"
    file.touch()
    remove_left_behind(tmp_path, "x-*")  # its process id means nothing here
    assert file.exists()


def test_only_what_gone_processes_of_this_host_left_behind_is_removed(tmp_path: Path) -> None:
    _, _, host = own_mark().split("-")
    left, mine, foreign, other = (f"x-{mark}" for mark in (f"1-1-{host}", own_mark(), "1-1-00000000", "notes"))
    for name in (left, mine, foreign, other):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    deep = "import os\nfor _ in range(1100):\n    os.mkdir('x' * 50)\n    os.chdir('x' * 50)"
    subprocess.run([sys.executable, "-c", deep], cwd=tmp_path / left, check=True)
    os.utime(tmp_path / left)
    (tmp_path / f"{left}.part").touch()
    remove_left_behind(tmp_path, "x-*", kept_s=3600)  # logs, to be read after a crash
    assert (tmp_path / left).exists()
    os.utime(tmp_path / left, (0, 0))
    remove_left_behind(tmp_path, "x-*", kept_s=3600)
    assert not (tmp_path / left).exists()
    remove_left_behind(tmp_path, "x-*")
    assert {path.name for path in tmp_path.iterdir()} == {mine, foreign, other}
