import json
import logging
import re
from pathlib import Path

import pytest
from scripted_run import ScriptedModule, run

from lightrl.callbacks.trajectory_log import TrajectoryLog, format_table, pick_rows
from lightrl.testing import make_groups, make_trajectory
from lightrl.trajectory import Group, Turn, read_trajectories


class LetterTokenizer:
    """Token 1 is A, 2 is B, …"""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(64 + token_id) for token_id in token_ids)


def log_of(folder: Path, iteration: int = 1) -> Path:
    return folder / "trajectories" / f"iteration-{iteration:06d}.jsonl"


def test_what_is_read_back_equals_what_was_trained_on(tmp_path: Path) -> None:
    odd = make_trajectory(
        'a "quote", a\nbreak, \u2028, é, 数学, \x00 and a lone \ud800', reward=1.0, completion_ids=[5, 6],
        versions=[0, 1], metrics={"accuracy": 1.0}, columns={"rewards": [0.0, 0.0, 0.0, 0.1, 0.9]},
        turns=[Turn(3, 5, "length")], is_truncated=True, finish_reason="length",
    )  # fmt: skip
    odd.behavior_logprobs = [0.0, 0.0, 0.0, -1 / 3, -1e-17]
    odd.pack()
    groups = [Group(0, odd.prompt, [odd])]
    run(lambda _: groups, TrajectoryLog(), default_root_dir=tmp_path)
    assert list(read_trajectories(log_of(tmp_path))) == [odd]
    assert len(log_of(tmp_path).read_bytes().splitlines()) == 1


def test_each_line_has_iteration_weight_version_and_advantage(tmp_path: Path) -> None:
    run(lambda _: make_groups([[1.0, 0.0]]), TrajectoryLog(), default_root_dir=tmp_path)
    first, second = map(json.loads, log_of(tmp_path).read_text().splitlines())
    assert (first["iteration"], first["weight_version"], first["advantage"]) == (1, 0, 0.5)
    assert second["advantage"] == -0.5


def test_the_texts_that_are_searched_have_the_prompt_and_all_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedModule, "tokenizer", LetterTokenizer(), raising=False)
    talk = make_trajectory(reward=1.0, completion_ids=[1, 2, 3, 4, 5], turns=[Turn(3, 5), Turn(7, 8)])
    long = make_trajectory("A" * 3000 + "B" * 3000, reward=0.0, sample=1)
    run(lambda _: [Group(0, talk.prompt, [talk, long])], TrajectoryLog(), default_root_dir=tmp_path)
    first, second = map(json.loads, log_of(tmp_path).read_text().splitlines())
    assert (first["prompt_text"], first["excerpt"]) == ("CGJ", "AB\nCD\nE")
    assert second["excerpt"] == "A" * 1000 + " … " + "B" * 1000


def test_only_every_nth_iteration_and_so_many_trajectories_are_written(tmp_path: Path) -> None:
    log = TrajectoryLog(every_n_iterations=2, max_per_iteration=3, table_every_n_iterations=None)
    run(lambda _: make_groups([[1.0, 0.0], [0.0, 1.0]]), log, num_iterations=4, default_root_dir=tmp_path)
    files = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert files == ["iteration-000001.jsonl", "iteration-000003.jsonl"]
    assert len(list(read_trajectories(log_of(tmp_path)))) == 3


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    run(lambda _: make_groups([[1.0, 0.0]]), TrajectoryLog(), default_root_dir=tmp_path, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_in_words_and_half_a_file_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "trajectories"
    folder.mkdir()
    (folder / "iteration-000001.jsonl.tmp").symlink_to("/dev/full")  # which accepts nothing
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        run(lambda _: make_groups([[1.0, 0.0]]), TrajectoryLog(), default_root_dir=tmp_path)
    said = rf"iteration-000001\.jsonl: the disk that holds '{folder}' is full \(.* free, \d KiB to write\)\. The log"
    assert re.search(said, caplog.messages[0])
    assert list(folder.iterdir()) == []


def test_a_prompt_that_json_cannot_hold_ends_the_log_not_the_run(tmp_path, caplog):
    groups = make_groups([[1.0, 0.0]])
    groups[0].trajectories[0].prompt.fields["answer"] = {1, 2}
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        run(lambda _: groups, TrajectoryLog(), default_root_dir=tmp_path)
    assert "it contains {1, 2} (set)" in caplog.messages[0]


def test_a_table_is_printed_now_and_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = TrajectoryLog(every_n_iterations=100, table_every_n_iterations=2, table_rows=2)
    run(lambda _: make_groups([[1.0, 0.0]]), log, num_iterations=3, default_root_dir=tmp_path)
    output = capsys.readouterr().out
    assert re.findall(r"iteration \d+$", output, re.M) == ["iteration 1", "iteration 3"]
    assert "advantage" in output


def test_table_worked_by_hand() -> None:
    right, wrong = make_trajectory(reward=1.0, completion_ids=[1, 2]), make_trajectory(reward=0.0, completion_ids=[26])
    assert format_table([(right, 0.5), (wrong, None)], LetterTokenizer(), width=80).splitlines() == [
        "prompt  completion  reward  advantage",
        "CGJ     AB               1       +0.5",
        "CGJ     Z                0           ",
    ]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_row_is_wider_than_the_terminal(width: int) -> None:
    rows = [(make_trajectory("数学" * 100), 0.5), (make_trajectory("ABC" * 9), -0.5)]
    lines = format_table(rows, width=width).splitlines()
    wide = lines[1].count("数") + lines[1].count("学")
    assert len(lines[1]) + wide <= width
    assert all(len(line) <= width for line in lines[2:])


def test_rows_run_from_the_highest_advantage_to_the_lowest() -> None:
    items = [make_trajectory(reward=float(index)) for index in range(5)]
    rows = pick_rows(items, [0.0, 1.0, 2.0, 3.0, 4.0], 3)
    assert [advantage for _, advantage in rows] == [4.0, 2.0, 0.0]
    assert len(pick_rows(items, [None] * 5, 9)) == 5


def test_settings_below_one_and_rows_of_a_table_that_is_not_written_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_iterations must be >= 1, got 0"):
        TrajectoryLog(every_n_iterations=0)
    with pytest.raises(ValueError, match="table_rows=8 has no effect without table_every_n_iterations"):
        TrajectoryLog(table_every_n_iterations=None, table_rows=8)
