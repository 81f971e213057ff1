"""The answers for the page: runs, curves, the table, a trajectory, time lines, images; and what the server lets in."""

import base64
import contextlib
import http.client
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_run import HOSTILE, as_tree, head_and_trajectory, make_run, write_iteration, write_metrics, write_trace
from waits import comes_true

from lightrl.commands.inspect import export
from lightrl.commands.inspect.answers import MAX_POINTS, Answers, Curves, Timeline
from lightrl.commands.inspect.index import TrajectoryIndex, condition
from lightrl.commands.inspect.run_folder import find_runs
from lightrl.commands.inspect.server import PageServer

FILTERS = ("iteration", "group", "sample", "reward", "advantage", "length", "staleness", "finish")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "lightning_logs" / "version_0")


@pytest.fixture
def answers(folder: Path, tmp_path: Path) -> Answers:
    made = Answers(find_runs([folder]), tmp_path / "cache")
    made.runs[0].index.update()
    return made


def table(answers: Answers, query: str = "", **values: str) -> dict[str, Any]:
    return answers.answer("table", {"run": "0", "query": query, **values})


def test_runs_are_found_below_their_root(folder: Path, tmp_path: Path) -> None:
    write_metrics(folder.parent / "version_1", 3)
    runs = find_runs([tmp_path / "runs"])
    assert [run.name for run in runs] == ["runs/version_0", "runs/version_1"]
    assert find_runs([folder, folder])[0].folder == folder
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="is not a run folder and contains none"):
        find_runs([tmp_path / "nothing"])


def test_a_failed_agent_is_one_row_with_its_tokens_output_and_reason(folder: Path, answers: Answers) -> None:
    """Its file of failures and the problems both name it; a line of an earlier release has no columns."""
    message, before = "The agent ask.py exited: 1. It printed 'no key'.", table(answers)["total"]
    record = head_and_trajectory(2, 9, 1, "hello")
    trajectory = {**record.pop("trajectory"), "agent_output": "no key", "reward": None}
    columns = {name: record[name] for name in ("iteration", "group", "sample", "length", "prompt", "prompt_text")}
    columns |= {"finish": "dropped: rollout", "excerpt": message, "reason": "rollout", "message": message}
    texts = {str(id_): chr(id_) for id_ in trajectory["token_ids"]}
    failed = {**columns, "trajectory": trajectory, "texts": texts}
    earlier = {"reason": "raised", "message": "x", "trajectory": trajectory}
    (folder / "failed_rollouts.jsonl").write_text(json.dumps(failed) + "\n")
    (folder / "failed_rewards.jsonl").write_text(json.dumps(earlier) + "\n")
    problem = {"at": 1.8e9, "iteration": 2, "rank": 0, "source": "rollout", "kind": "dropped: rollout"}
    with (folder / "problems" / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps({**problem, "message": message}) + "\n")
    for _ in range(2):
        answers.runs[0].index.update()
        assert table(answers)["total"] == before + 1
    with (folder / "problems" / "rank-00000.jsonl").open("a") as file:  # one that left no trajectory fails alike
        file.write(json.dumps({**problem, "message": message}) + "\n")
    answers.runs[0].index.update()
    assert table(answers)["total"] == before + 2
    (row,) = table(answers, "dropped group=9")["rows"]
    shown = answers.answer("trajectory", {"run": "0", "id": str(row["id"])})
    assert (shown["finish"], shown["message"], shown["agent_output"]) == ("dropped: rollout", message, "no key")
    assert "".join(shown["texts"][id_] for id_ in shown["tokens"]["id"][-5:]) == "hello"
    assert shown["prompt"]["fields"] == {"answer": "9"}


def test_a_curve_grows_with_the_file_and_survives_a_new_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,rollout/reward,step\n0,0.5,0\n0,nan,1\n0,0.7,2\n0,0.")
    curves = Curves(tmp_path)
    assert curves.to_json() == {"rollout/reward": {"x": [0, 2], "y": [0.5, 0.7]}}
    with path.open("a") as file:
        file.write("9,3\n")
    assert curves.to_json()["rollout/reward"]["y"] == [0.5, 0.7, 0.9]
    path.write_text("epoch,rollout/reward,step,val/reward\n0,0.5,0,\n0,,1,0.25\n")
    assert curves.to_json() == {"rollout/reward": {"x": [0], "y": [0.5]}, "val/reward": {"x": [1], "y": [0.25]}}


def test_a_long_curve_has_the_means_of_its_parts(tmp_path: Path) -> None:
    rows = "".join(f"{step},{step}\n" for step in range(3 * MAX_POINTS))
    (tmp_path / "metrics.csv").write_text("step,value\n" + rows)
    points = Curves(tmp_path).to_json()["value"]
    assert points["x"] == points["y"] == [3 * index + 1 for index in range(MAX_POINTS)]


def test_the_table_is_sorted_searched_and_paged(answers: Answers) -> None:
    assert table(answers)["total"] == 8 + 8 + len(HOSTILE) + 1  # and one that was dropped
    rewards = [row["reward"] for row in table(answers, "finish=stop", sort="reward", order="asc")["rows"]]
    assert rewards == sorted(rewards)
    assert {row["iteration"] for row in table(answers, "iteration<1")["rows"]} == {0}
    assert [row["excerpt"] for row in table(answers, "ANSWER 7 iteration=1")["rows"]] == ["answer 7"]
    assert {row["sample"] for row in table(answers, "finish=length reward>0.5")["rows"]} == {3}
    assert len(table(answers, limit="5", offset="34")["rows"]) == 3
    (dropped,) = table(answers, "dropped")["rows"]
    assert (dropped["finish"], dropped["excerpt"]) == ("dropped: reward_raised", HOSTILE[0])
    with pytest.raises(ValueError, match="sort must be one of"):
        table(answers, sort="reward; DROP TABLE rows")
    assert condition("x' OR 1=1 --")[1] == [word for word in ("x'", "or", "1=1", "--") for _ in range(3)]


def test_words_are_found_in_the_prompts_text_and_far_behind_in_the_completion(folder: Path, tmp_path: Path) -> None:
    write_iteration(folder, 5, [head_and_trajectory(5, 7, 0, "so " * 500 + "Ärger with FORTY-two")])
    index = TrajectoryIndex(folder, tmp_path / "cache")
    index.update()
    (row,) = index.page("Ärger forty-two 6 x 7?")["rows"]
    assert (row["iteration"], row["prompt_text"]) == (5, "How much is 6 x 7?")
    assert index.page("x 7? fifty")["total"] == 0


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("rewrd<0.5", "There is no column rewrd. Did you mean reward?"),
        ("Length>9", "There is no column Length. Did you mean length?"),
        ("x=5", f"There is no column x. Columns: {', '.join(FILTERS)}."),
        ("reward<high", "high is not a number."),
        ("finish<stop", "finish takes = or !=."),
    ],
    ids=["misspelled", "uppercase", "unlike any", "no number", "no order"],
)
def test_a_condition_that_is_none_is_named(query: str, reason: str, answers: Answers) -> None:
    assert table(answers, f"iteration=1 {query}")["notes"] == [f"{query} is searched as text. {reason}"]


def test_a_condition_that_is_still_being_typed_finds_everything(answers: Answers) -> None:
    for query in ("reward", "reward<", "finish=", "finish!=length reward<="):
        page = table(answers, query)
        assert page["notes"] == []
        assert (page["total"] > 0) == (query != "reward")


def test_the_index_follows_a_run_that_continues_and_repeats(folder: Path, tmp_path: Path) -> None:
    index = TrajectoryIndex(folder, tmp_path / "cache")
    assert index.update(max_files=1) == 3  # two iterations and the problems
    assert {row["iteration"] for row in index.page()["rows"]} == {2}  # the newest first
    assert index.update() == 0
    write_iteration(folder, 3, [head_and_trajectory(3, 0, 0, "new")])
    write_iteration(folder, 1, [head_and_trajectory(1, 0, 0, "repeated after a resume")])
    (folder / "trajectories" / "iteration-000000.jsonl").unlink()
    index.update()
    assert [row["excerpt"] for row in index.page("iteration<2")["rows"]] == ["repeated after a resume"]
    assert index.page("iteration=3")["total"] == 1
    again = TrajectoryIndex(folder, tmp_path / "cache")
    assert again.page()["total"] == index.page()["total"]  # before it has read anything


def sampled(folder: Path, cache: Path, num: int) -> list[tuple[int, int, int]]:
    index = TrajectoryIndex(folder, cache)
    index.update()
    return sorted((row["iteration"], row["group"], row["sample"]) for row in index.sample(num))


def test_a_sample_has_whole_groups_of_all_iterations_or_one_row_of_many(tmp_path: Path) -> None:
    places = [(group, sample) for group in range(4) for sample in range(4)]
    for iteration in (0, 10, 20, 30):
        write_iteration(tmp_path, iteration, [head_and_trajectory(iteration, *place, "x") for place in places])
    assert len(sampled(tmp_path, tmp_path / "cache", 64)) == 64
    some = sampled(tmp_path, tmp_path / "cache", 46)  # of 11 an iteration, 8 are whole groups
    assert some == [(iteration, *place) for iteration in (0, 10, 20, 30) for place in places[:8]]
    assert [row[2] for row in sampled(tmp_path, tmp_path / "cache", 11)] == [0, 1] * 4
    assert [row[0] for row in sampled(tmp_path, tmp_path / "cache", 3)] == [0, 10, 30]
    assert sampled(tmp_path / "nothing", tmp_path / "cache", 3) == []


def test_an_exported_page_has_a_sample_of_each_iteration_and_says_so(tmp_path: Path) -> None:
    for iteration in range(60):
        write_iteration(tmp_path, iteration, [head_and_trajectory(iteration, 0, sample, "x") for sample in range(8)])
    assert export(Answers(find_runs([tmp_path]), tmp_path / "cache"), tmp_path / "page.html") == (180, 480)
    text = (tmp_path / "page.html").read_text()
    saved = json.loads(text.partition('id="answers">')[2].partition("</script>")[0])
    table = saved["table?run=0"]
    assert ({row["iteration"] for row in table["rows"]}, table["sampled_from"]) == (set(range(60)), 480)
    for row in table["rows"]:
        shown = saved[f"trajectory?run=0&id={row['id']}"]
        assert [other["sample"] for other in shown["group_rows"]] == [0, 1, 2]


def test_a_trajectory_has_every_token_with_what_is_known_of_it(answers: Answers) -> None:
    row = table(answers, "iteration=2 group=0 sample=1")["rows"][0]
    shown = answers.answer("trajectory", {"id": str(row["id"])})
    tokens = shown["tokens"]
    assert "".join(shown["texts"][id_] for id_ in tokens["id"][4:]) == HOSTILE[1]
    assert {len(values) for values in tokens.values() if values} == {len(tokens["id"])}
    assert tokens["advantage"][:5] == [0, 0, 0, 0, 0.5]  # the mean, where all tokens have the same
    assert tokens["trainer_logprob"][6] - tokens["logprob"][6] == pytest.approx(-0.02)
    assert [other["sample"] for other in shown["group_rows"]] == [0, 1, 2, 3]
    assert shown["metrics"] == {"accuracy": 1.0, "format": 1.0}
    with pytest.raises(LookupError, match="There is no trajectory 999"):
        answers.answer("trajectory", {"id": "999"})


def test_a_tree_has_its_rows_and_where_its_branches_begin(folder: Path, answers: Answers) -> None:
    write_iteration(folder, 6, [as_tree(head_and_trajectory(6, 0, 0, "abcdef"))])
    answers.runs[0].index.update()
    row = answers.answer("table", {"query": "iteration=6"})["rows"][0]
    one = answers.answer("trajectory", {"id": str(row["id"])})
    assert one["branches"] == [(8, 4), (9, 9)]
    assert one["rows"] == [[(0, 8)], [(0, 4), (8, 9)], [(9, 10)]]


def test_only_images_are_shown_whatever_path_a_prompt_names(folder: Path, answers: Answers, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "image.png").write_bytes(PNG)
    script = "data:image/svg+xml;base64," + base64.b64encode(b"<svg onload='1'/>").decode()
    images = [str(tmp_path / "image.png"), str(tmp_path / "secret.txt"), script, "data:image/png;base64,!"]
    write_iteration(folder, 4, [head_and_trajectory(4, 0, 0, "seen", prompt={"images": images})])
    answers.runs[0].index.update()
    row = str(table(answers, "iteration=4")["rows"][0]["id"])
    assert answers.image({"id": row, "number": "0"}) == ("image/png", PNG)
    for number in ("1", "2", "3", "9"):
        with pytest.raises(LookupError):
            answers.image({"id": row, "number": number})


def test_the_time_line_of_an_iteration_has_all_ranks(folder: Path) -> None:
    timeline = Timeline(folder)
    assert timeline.iterations() == [0, 1, 2]
    line = timeline.events(1)
    assert {row["rank"] for row in line["rows"]} == {0, 1}
    assert len([event for event in line["events"] if event[1] == "generate"]) == 16
    update = next(event for event in line["events"] if event[1] == "update")
    assert update[2:5] == ["phase", 515.0, 380.0]  # ms after the first event
    write_trace(folder, 5)  # the run started again
    assert timeline.iterations() == [0, 1, 2, 3, 4]
    with (folder / "trace" / "rank-00000.json").open("a") as file:
        file.write('{"name":"iteration 5","ph"')  # in the making
    assert len(timeline.events(4)["events"]) == 40


def test_lost_servers_and_drops_are_problems(answers: Answers) -> None:
    found = answers.answer("problems", {})
    assert [(one["source"], one["kind"]) for one in found] == [("server", "lost"), ("reward", "dropped: reward_raised")]


def test_the_settings_of_runs_stand_next_to_each_other(tmp_path: Path) -> None:
    config = """
        model: {class_path: lightrl.GRPO, init_args: {lr: %s, sampling: {top_k: -1}, betas: [0.9, 0.95], note: null}}
        trainer:
          callbacks:
          - {class_path: lightrl.TrajectoryLog, init_args: {every_n_iterations: %s}}
          - {class_path: lightrl.Trace, init_args: {}}
    """
    for name, values in {"a": ("1.0e-3", 1), "b": ("0.002", 10)}.items():
        write_metrics(tmp_path / name, 1)
        (tmp_path / name / "config.yaml").write_text(config % values)
    write_metrics(tmp_path / "c", 1)
    one, other, nothing = Answers(find_runs([tmp_path / name for name in "abc"]), tmp_path).answer("settings", {})
    assert one == {
        "model": "lightrl.GRPO",
        "model.lr": "0.001",
        "model.sampling.top_k": "-1",
        "model.betas": "[0.9, 0.95]",
        "model.note": "null",
        "trainer.callbacks.TrajectoryLog": "lightrl.TrajectoryLog",
        "trainer.callbacks.TrajectoryLog.every_n_iterations": "1",
        "trainer.callbacks.Trace": "lightrl.Trace",
    }
    different = {name for name in one if one[name] != other[name]}
    assert different == {"model.lr", "trainer.callbacks.TrajectoryLog.every_n_iterations"}
    assert nothing == {}


@pytest.fixture
def server(answers: Answers) -> Iterator[PageServer]:
    made = PageServer(answers)
    made.start()
    yield made
    made.close()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.port}"})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.headers), content


def test_the_page_needs_its_token_and_its_host(server: PageServer) -> None:
    status, headers, content = get(server, f"/{server.token}/")
    assert status == 200
    assert b"<title>lightrl inspect</title>" in content
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert get(server, f"/{server.token}/runs", "evil.example")[0] == 403
    assert get(server, f"/{server.token}/runs", f"localhost:{server.port}")[0] == 200
    for path in ("/", "/runs", f"/{server.token[:-1]}/runs", f"/{server.token}x/", "/%00/"):
        assert get(server, path)[0] == 404
    assert get(server, f"/{server.token}/../../etc/passwd")[0] == 404
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == server.port} == {"127.0.0.1"}


def test_answers_and_their_errors_are_json(server: PageServer) -> None:
    status, headers, content = get(server, f"/{server.token}/table?run=0&query=iteration%3D1")
    assert (status, headers["Content-Type"], json.loads(content)["total"]) == (200, "application/json", 8)
    for question in ("table?run=7", "table?run=x", "trajectory?id=999", "nothing", "image?id=1&number=0"):
        status, _, content = get(server, f"/{server.token}/{question}")
        assert (status, "error" in json.loads(content)) == (404, True)


def test_the_command_starts_without_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, lightrl.commands.inspect; lightrl.commands.inspect.run(sys.argv[1:]);"
        "print(sorted({'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), "--export", str(page)],
        capture_output=True, text=True, env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert page.exists()


def test_the_newest_trajectories_are_there_before_the_index_is_whole(tmp_path: Path) -> None:
    """An iteration is read by its heads: a trajectory that is no JSON costs nothing and breaks nothing."""
    path = tmp_path / "trajectories"
    path.mkdir()
    head = json.dumps(
        {name: value for name, value in head_and_trajectory(0, 1, 2, "x").items() if name != "trajectory"}
    )
    for iteration in range(200):
        line = head.replace('"iteration": 0', f'"iteration": {iteration}')[:-1].partition(', "trainer_logprobs"')[0]
        (path / f"iteration-{iteration:06d}.jsonl").write_text(f'{line}, "trajectory": {{' + "x" * 10_000 + "\n")
    answers = Answers(find_runs([tmp_path]), tmp_path / "cache")
    answers.start()
    assert answers.answer("table", {})["rows"][0]["iteration"] == 199
    assert comes_true(lambda: answers.runs[0].index.page()["total"] == 200)
    answers.close()


DEEP = "[" * 100_000


@pytest.mark.parametrize("image", ["/dev/zero", "pipe", "/etc/shadow", "/proc/self/mem", "x" * 5000, "a\0b"])
def test_an_image_that_is_no_file_is_neither_waited_for_nor_read(image: str, folder: Path, answers: Answers) -> None:
    if image == "pipe":
        os.mkfifo(folder / "pipe")
        image = str(folder / "pipe")
    write_iteration(folder, 7, [head_and_trajectory(7, 0, 0, "x", prompt={"images": [image]})])
    answers.runs[0].index.update()
    row = table(answers, "iteration=7")["rows"][0]
    with pytest.raises(LookupError, match="Image 0"):
        answers.image({"id": str(row["id"]), "number": "0"})


FILES = ["status.json", "config.yaml", "metrics.csv", "traceback.txt", "trace/rank-00009.json", "trace/summary.json"]
FILES += ["problems/rank-00009.jsonl", "trajectories/iteration-000009.jsonl", "trajectories/tokens.jsonl"]
FILES += ["trajectories/iteration-\udcff.jsonl"]  # not UTF-8


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling", "device", "deep", "huge", "other"])
def test_a_strangers_file_is_an_error_at_most(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("MY-SECRET: 1\n")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind in ("link", "dangling", "device"):
        file.symlink_to({"link": tmp_path / "secret", "dangling": "nowhere", "device": "/dev/zero"}[kind])
    else:
        file.write_text({"deep": DEEP + "\n", "huge": "", "other": '[1]\n{"iteration": 1e99, "ts": {}}\n'}[kind])
        if kind == "huge":
            os.truncate(file, 2**30)
    answers = Answers(find_runs([folder]), tmp_path / "cache")
    answers.runs[0].index.update(max_files=1)
    rows = table(answers)["rows"]
    for question in ("runs", "settings", "curves", "problems", "timeline", "trajectory"):
        values = {"iteration": "1", "id": str(rows[0]["id"]) if rows else "1"}
        with contextlib.suppress(LookupError, ValueError):
            assert "MY-SECRET" not in json.dumps(answers.answer(question, values))


def test_a_query_has_at_most_a_hundred_words(answers: Answers) -> None:
    with pytest.raises(ValueError, match="at most 100 words, got 5000"):
        table(answers, "a " * 5000)
    assert table(answers, limit="-1")["rows"] == []


def test_settings_that_unfold_without_end_are_not_shown(folder: Path) -> None:
    names = "abcdefghijklmnopqrst"
    lines = [f"{own}: &{own} [{', '.join([f'*{before}'] * 9)}]" for before, own in itertools.pairwise(names)]
    (folder / "config.yaml").write_text("\n".join(["a: &a [x]", *lines]))
    assert find_runs([folder])[0].settings() == {}
