"""Compares the learning curves of GRPO in lightrl and in TRL's GRPOTrainer: SmolLM2 learns sums or movie reviews.

    python -m examples.pretrained.smollm2 --to runs/pretrained/smollm2
    python -m examples.pretrained.reviews --to runs/pretrained/reviews
    python -m benchmarks.learning_vs_trl --task sums --seeds 0,1,2 --iterations 40
    python -m benchmarks.learning_vs_trl --task sums --seeds 3,4,5,6,7,8,9 --iterations 10
    python -m benchmarks.learning_vs_trl

Needs TRL: `pip install -c constraints.txt -e ".[bench]"`.

Each seed adds a line for each contender to `--out`. Without a task, the command prints the tables and draws the figure
of all lines. The top of grpo_vs_trl.py says what is equal on both sides. Here it is also the prompts of each iteration,
which the command checks, the reward function, and mixed precision in bfloat16. Sampled tokens differ. The contenders
take turns of two iterations; the first turn of each is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.grpo_vs_trl import Task, by_turns, prepare, versions
from benchmarks.learned import LEARNED, held_out_accuracy
from benchmarks.report import Report

OUT = Path(__file__).with_suffix(".jsonl")
PLOT = Path(__file__).with_suffix(".png")
NAMES = ("trl", "lightrl")
ITERATIONS = 2  # in a turn
FIRST = 10  # iterations that all seeds run


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=LEARNED, help="what is learned; without it, tables and figure are made")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--iterations", type=int, default=FIRST, help="an even number; one more ends the training")
    parser.add_argument("--model", type=Path, default=Path("runs/pretrained/smollm2"), help="the model's folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT, help="the file of results")
    parser.add_argument("--plot", type=Path, default=PLOT, help="the figure")
    arguments = parser.parse_args(argv)
    if arguments.task is None:
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        print("\n\n".join(table(rows, task) for task in LEARNED if any(row["task"] == task for row in rows)))
        draw(rows, arguments.plot)
        return
    if arguments.iterations % ITERATIONS or arguments.iterations < 2 * ITERATIONS:
        parser.error(f"--iterations must be even and at least {2 * ITERATIONS}, got {arguments.iterations}")
    prepare(NAMES, passive_waiting=True)
    report = Report("learning_vs_trl", dtype="bfloat16, mixed", threads=arguments.threads, **versions())
    for seed in arguments.seeds.split(","):
        for row in run(report, arguments, int(seed)):
            with arguments.out.open("a") as out:
                out.write(f"{json.dumps(row)}\n")


def run(report: Report, arguments: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Trains both with one seed; returns a row for each."""
    learned = LEARNED[arguments.task]
    task = Task(arguments.task, 8, 8, cap=learned.cap, trl_batch=32, learned=learned, is_bf16=True, seed=seed)
    with tempfile.TemporaryDirectory(prefix="learning_vs_trl_") as name:
        folder = Path(name)
        (folder / "model").symlink_to(arguments.model.absolute())
        pairs = arguments.iterations // ITERATIONS - 1
        measured = by_turns(task, NAMES, folder, pairs=pairs, iterations=ITERATIONS, threads=arguments.threads)
        held_out = {name: held_out_accuracy(learned, folder / name / "learned") for name in NAMES}
    trl, lightrl = (
        [questions for block in measured.blocks[name] for questions in block.questions][: arguments.iterations]
        for name in NAMES
    )
    assert trl == lightrl, "the two trainers did not train on the same prompts in the same order"
    return [
        report.add(
            "learning",
            task=arguments.task,
            **measured.row(name),
            rewards=[round(reward, 4) for block in measured.blocks[name] for reward in block.rewards],
            held_out=round(held_out[name], 4),
        )
        for name in NAMES
    ]


def difference(rows: Sequence[dict[str, Any]], value: Any) -> tuple[float, float, int]:
    """Returns the mean over seeds of lightrl's value minus TRL's, its standard error, and the number of seeds."""
    ours, theirs = ({row["seed"]: value(row) for row in rows if row["contender"] == name} for name in NAMES[::-1])
    differences = [ours[seed] - theirs[seed] for seed in ours]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return statistics.mean(differences), error, len(differences)


def table(rows: Sequence[dict[str, Any]], task: str) -> str:
    """Returns a task's results in points, as a Markdown table: means of both, and the difference in pairs of seeds."""
    rows = [row for row in rows if row["task"] == task]
    most = max(len(row["rewards"]) for row in rows)
    long = [row for row in rows if len(row["rewards"]) == most]

    def mean(begin: int, end: int) -> Any:
        return lambda row: 100 * statistics.mean(row["rewards"][begin:end])

    measures = [(f"sampled, iterations 1 to {FIRST}", rows, mean(0, FIRST))]
    each = [(index, *difference(rows, mean(index, index + 1))[:2]) for index in range(FIRST)]
    worst, *_ = min(each, key=lambda item: item[1] / item[2] if item[2] else item[1])
    measures.append((f"sampled, iteration {worst + 1}, lightrl's worst", rows, mean(worst, worst + 1)))
    if most > FIRST:
        measures.append((f"sampled, iterations {most - 9} to {most}", long, mean(most - 10, most)))
    for part in (long, *([[row for row in rows if row not in long]] if len(long) < len(rows) else [])):
        num = len(part[0]["rewards"]) + 1
        measures.append((f"held out, greedy, after {num}", part, lambda row: 100 * row["held_out"]))
    lines = [f"| {task} | TRL | lightrl | difference ± standard error | seeds |", "|---|--:|--:|--:|--:|"]
    for name, part, value in measures:
        means = [statistics.mean(value(row) for row in part if row["contender"] == other) for other in NAMES]
        mid, error, num = difference(part, value)
        lines.append(f"| {name} | {means[0]:.1f} | {means[1]:.1f} | {mid:+.1f} ± {error:.1f} | {num} |")
    ours = [row for row in rows if row["contender"] == "lightrl"]
    for name, key in (("seconds", "ratio"), ("processor time", "cpu_ratio")):
        ratios = ", ".join(f"{row[key]:.2f}" for row in sorted(ours, key=lambda row: row["seed"]))
        lines.append(f"\n{name}, TRL over lightrl, by seed: {ratios}")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the mean over seeds of the sampled rewards for each task, with two standard errors as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in LEARNED if any(row["task"] == task for row in rows)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4.5 * len(tasks), 3), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for name, color in zip(NAMES, ("tab:orange", "tab:blue"), strict=True):
            curves = [row["rewards"] for row in rows if row["task"] == task and row["contender"] == name]
            columns = [
                [curve[index] for curve in curves if index < len(curve)] for index in range(max(map(len, curves)))
            ]
            means = [statistics.mean(column) for column in columns]
            errors = [statistics.stdev(column) / len(column) ** 0.5 if len(column) > 1 else 0 for column in columns]
            iterations = range(1, len(means) + 1)
            axis.plot(iterations, means, color=color, label=name)
            low, high = ([mean + side * error for mean, error in zip(means, errors, strict=True)] for side in (-2, 2))
            axis.fill_between(iterations, low, high, color=color, alpha=0.2, linewidth=0)
        then = f", {len(columns[-1])} after {FIRST}" if len(columns) > FIRST else ""
        axis.set(title=f"{task}: {len(curves)} seeds{then}", xlabel="iteration", ylim=(0, 1.02))
        axis.set_ylabel("sampled answers right")
        axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
