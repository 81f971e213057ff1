"""A run's folder as the callbacks write it, made without a run; and completions that would do harm as HTML."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightrl.callbacks.trace.files import TraceFile
from lightrl.commands.inspect.answers import Answers
from lightrl.commands.inspect.run_folder import find_runs
from lightrl.commands.inspect.server import PageServer
from lightrl.trace import Event

HOSTILE = [
    "<script>window.harmed = 1</script>",
    "</script><script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "<svg onload='window.harmed = 1'>",
    "<svg><script>window.harmed = 1</script></svg>",
    "<iframe srcdoc='<script>parent.harmed = 1</script>'></iframe>",
    "<iframe src='javascript:parent.harmed=1'></iframe>",
    "<a href='javascript:window.harmed=1' autofocus onfocus='window.harmed=1'>x</a>",
    "<details open ontoggle='window.harmed = 1'>",
    "<input autofocus onfocus='window.harmed = 1'>",
    "<body onload='window.harmed = 1'>",
    "<style>@import 'http://127.0.0.1:1/x.css'; * { display: none !important }</style>",
    "<link rel=stylesheet href='http://127.0.0.1:1/x.css'>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:1/'>",
    "<base href='http://127.0.0.1:1/'>",
    "<form action='http://127.0.0.1:1/'><button id=main>x</button></form>",
    "<object data='data:text/html,<script>parent.harmed=1</script>'></object>",
    "<math><mtext></title><script>window.harmed = 1</script>",
    "--><script>window.harmed = 1</script><!--",
    "${window.harmed = 1} {{constructor.constructor('window.harmed=1')()}} \u2028\u202e\u0000 \ud800",
]


def head_and_trajectory(iteration: int, group: int, sample: int, text: str, **more: Any) -> dict[str, Any]:
    """A line as TrajectoryLog writes it; the completion has a token for each character."""
    codes = [ord(letter) % 60_000 for letter in text]
    reward = more.pop("reward", float(sample % 2))
    record = {
        "iteration": iteration, "weight_version": iteration, "advantage": reward - 0.5, "reward": reward,
        "length": len(codes), "staleness": sample % 3, "group": group, "sample": sample, "prompt": f"train-{group}",
        "finish": "length" if sample == 3 else "stop", "prompt_text": f"How much is 6 x {group}?", "excerpt": text,
    }  # fmt: skip
    num_prompt = 4
    trajectory = {
        "prompt": {"id": f"train-{group}", "messages": None, "token_ids": [1] * num_prompt, "fields": {"answer": "9"}},
        "group_id": group, "sample": sample, "token_ids": [1] * num_prompt + codes,
        "loss_mask": [False] * num_prompt + [True] * len(codes),
        "behavior_logprobs": [0.0] * num_prompt + [-0.1 * (index % 20) for index in range(len(codes))],
        "weight_versions": [-1] * num_prompt + [iteration] * len(codes), "completion_ids": codes, "completion": text,
        "finish_reason": record["finish"], "is_truncated": sample == 3, "reward": reward, "rewards": None,
        "turns": [{"start": num_prompt, "end": num_prompt + len(codes), "finish_reason": "stop"}],
        "metrics": {"accuracy": reward, "format": 1.0}, "call_outputs": {},
    }  # fmt: skip
    trajectory["prompt"].update(more.pop("prompt", {}))
    scored = [0.0] * num_prompt + [-0.1 * (index % 20) - 0.01 * (index % 7) for index in range(len(codes))]
    return {**record, "trajectory": trajectory, "trainer_logprobs": scored, **more}


def as_tree(record: dict[str, Any]) -> dict[str, Any]:
    """The record as a rollout of three rows: the last but one token follows the prompt, the last follows nothing."""
    gaps = [0] * len(record["trajectory"]["token_ids"])
    gaps[-2], gaps[-1] = len(gaps) - 6, len(gaps) - 1
    record["trajectory"]["gaps"] = gaps
    return record


def write_iteration(folder: Path, iteration: int, records: list[dict[str, Any]]) -> None:
    path = folder / "trajectories" / f"iteration-{iteration:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    texts = {id_ for record in records for id_ in record["trajectory"]["token_ids"]}
    with (path.parent / "tokens.jsonl").open("a") as file:
        file.writelines(json.dumps([id_, "<prompt>" if id_ == 1 else chr(id_)]) + "\n" for id_ in sorted(texts))


def write_metrics(folder: Path, num: int, *, seed: int = 0) -> None:
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["epoch,policy/kl_behavior_nats,rollout/reward,step,val/accuracy_fraction"]
    for step in range(num):
        reward = 1 - 0.9 * 0.97**step + 0.05 * draw.random()
        lines.append(f"0,{0.01 * draw.random():.6f},{reward:.6f},{step},{'' if step % 20 else f'{reward:.4f}'}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def write_trace(folder: Path, iterations: int) -> None:
    ms = 1_000_000
    for rank in (0, 1):
        file = TraceFile(folder / "trace", rank, f"rank {rank}", max_bytes=2**24)
        for iteration in range(iterations):
            start = iteration * 1000 * ms

            def at(name: str, category: str, track: str, begin: int, end: int, start: int = start) -> Event:
                return Event(name, category, track, start + begin * ms, start + end * ms, {"of": "<b>this</b>"})

            events = [at("rollout", "phase", "trainer", 5, 500), at("update", "phase", "trainer", 520, 900)]
            events += [at("sync", "phase", "trainer", 900, 960), at("forward", "update", "trainer", 530, 700)]
            if rank == 0:
                events += [at("generate", "generate", "generations", 10 + i, 100 + 25 * i) for i in range(16)]
                events += [at("reward", "reward", "rewards", 100 + 25 * i, 110 + 25 * i) for i in range(16)]
            file.add(iteration, start, events, {"host in update": 700 + iteration})


def make_run(folder: Path) -> Path:
    """A small run with everything in it, hostile completions too."""
    write_metrics(folder, 60)
    for iteration in range(3):
        texts = HOSTILE if iteration == 2 else [f"answer {number}" for number in range(8)]
        records = [head_and_trajectory(iteration, index // 4, index % 4, text) for index, text in enumerate(texts)]
        write_iteration(folder, iteration, records)
    write_trace(folder, 3)
    (folder / "problems").mkdir()
    line = {"at": 1.7e9, "iteration": 2, "rank": 0, "source": "reward", "kind": "dropped: reward_raised"}
    (folder / "problems" / "rank-00000.jsonl").write_text(json.dumps({**line, "message": HOSTILE[0]}) + "\n")
    server = {"url": "http://node2:30000", "state": "lost", "reason": HOSTILE[2]}
    (folder / "status.json").write_text(
        json.dumps({"phase": "update", "iteration": 3, "max_steps": 9, "servers": [server]})
    )
    return folder


@contextmanager
def page_of(runs: list[Path], cache: Path) -> Iterator[PageServer]:
    """The page of these runs, served while it lasts."""
    answers = Answers(find_runs(runs), cache)
    answers.start()
    server = PageServer(answers)
    server.start()
    try:
        yield server
    finally:
        server.close()
