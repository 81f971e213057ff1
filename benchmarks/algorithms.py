"""Learning curves of every algorithm on one task: mean and spread over seeds, as CSV and PNG.

    python -m benchmarks.algorithms [--algorithms GRPO,DAPO] [--seeds 3] [--iterations 60] [--out benchmarks/algorithms]
                                    [--late-seeds 6] [--late-iterations 120]

The task is the quickstart's, the largest of four digits. All algorithms start from the same model of 0.8 M parameters,
trained to imitate answers of which 60 % name the first digit, and use the same number of trajectories per iteration, in
two updates. A curve is the mean reward of the sampled (not greedy) training completions. Algorithms named `… 8 versions
late` roll out up to 8 versions ahead: GRPO (naive), decoupled, with an approximated proximal policy, and M2PO; the
first two also at a third of the learning rate, in two and in four updates. They run longer and over more seeds, because
staleness takes effect late; the table's last lines compare them with naive, seed by seed.

Algorithms named `… with two tries` may answer again after a wrong answer; GiGPO assigns credit to each turn.

Distillation is not comparable: it trains on no reward, and its teachers, the final models of GRPO's runs with seeds 0
and 1, were trained with RL. Its curve, the reward of the student's samples, shows how fast the student approaches its
teacher, where the gray curve ends. With two teachers, one teaches prompts with an even first digit, the other the rest.

Runs are separate processes, one after another. A run whose file in `runs/` or lines in `curves.csv` exist is skipped,
so seeds or algorithms can be added, and a killed benchmark resumes; to repeat a run, remove both. `curves.csv` has a
line per algorithm, seed and iteration; `curves.png` a panel per algorithm, with GRPO (naive for the late ones) in gray.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import logging
import os
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report
from examples.quickstart.task import LargestDigit
from lightrl import Environment, ImportanceWeights, MultiTurn, Prompt, Sampling

if TYPE_CHECKING:
    import lightrl

TRAJECTORIES = 256  # per iteration
LATE = " 8 versions late"
SLOW = " at lr 1e-4" + LATE  # a third of the others'
SMALL_STEPS = " at lr 1e-4 in 4 updates" + LATE  # an iteration is cut into 4 instead of 2
TRIES = " with two tries"


class SecondTry(Environment):
    """Answers a wrong completion with `=`, once; a right one earns 1."""

    def reset(self, prompt: Prompt) -> None:
        self.answer, self.num_turns = max(prompt.id[:4]), 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.num_turns += 1
        is_right = completion == self.answer
        return "=", float(is_right), is_right or self.num_turns == 2


class Parities(LargestDigit):
    """Prompts with a column that names the parity of their first digit."""

    def make_prompts(self, split: str) -> list[Prompt]:
        prompts = super().make_prompts(split)
        for prompt in prompts:
            prompt.fields["parity"] = ("even", "odd")[int(prompt.id[0]) % 2]
        return prompts


IN_TURNS: dict[str, Any] = {
    "workflow": functools.partial(MultiTurn, environment=SecondTry, max_turns=2),
    "reward": "lightrl.rewards.environment_reward",
}
TEACHERS = {"teacher": 0, "teacher-1": 1}  # folder within the output folder → seed of GRPO's run

# Class and settings, besides the shared ones.
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", {}),
    "Dr. GRPO": ("DrGRPO", {}),
    "DAPO": ("DAPO", {}),
    "LitePPO": ("LitePPO", {}),
    "GDPO": ("GDPO", {"reward_weights": {"accuracy": 1.0}}),
    "Muon": ("GRPO", {"optimizer": "muon"}),
    "score centering": ("GRPO", {"score_centering": True, "sampling": Sampling(max_new_tokens=4, topk_logprobs=8)}),
    "RLOO": ("RLOO", {}),
    "GSPO": ("GSPO", {}),
    "CISPO": ("CISPO", {}),
    "SAPO": ("SAPO", {}),
    "REINFORCE with baseline": ("ReinforceBaseline", {"group_size": 1}),
    "REINFORCE++": ("ReinforcePlusPlus", {"group_size": 1}),
    "REINFORCE++ with baseline": ("ReinforcePlusPlus", {"advantage_mean": "group"}),
    "M2PO": ("M2PO", {}),
    "PPO": ("PPO", {"group_size": 1, "bootstrap_truncated": False}),  # a completion that reaches the limit is wrong
    "decoupled": ("GRPO", {"decoupled": True}),
    "decoupled PPO": ("PPO", {"group_size": 1, "bootstrap_truncated": False, "decoupled": True}),
    "MIS": ("GRPO", {"decoupled": ImportanceWeights(cap=2.0, mode="mask")}),
    "TIS": ("GRPO", {"decoupled": ImportanceWeights(cap=2.0, mode="clamp")}),
    "IcePop": ("GRPO", {"decoupled": ImportanceWeights(floor=0.5, cap=5.0)}),
    "naive" + LATE: ("GRPO", {}),
    "decoupled" + LATE: ("GRPO", {"decoupled": True}),
    "guessed proximal" + LATE: ("GRPO", {"decoupled": ImportanceWeights(approximate_proximal=True)}),
    "M2PO" + LATE: ("M2PO", {}),
    "naive" + SLOW: ("GRPO", {"lr": 1e-4}),
    "decoupled" + SLOW: ("GRPO", {"decoupled": True, "lr": 1e-4}),
    "naive" + SMALL_STEPS: ("GRPO", {"lr": 1e-4, "num_minibatches": 4}),
    "decoupled" + SMALL_STEPS: ("GRPO", {"decoupled": True, "lr": 1e-4, "num_minibatches": 4}),
    "distillation": ("Distillation", {"group_size": 1, "teacher": "teacher"}),
    "distillation by two teachers": (
        "Distillation",
        {"group_size": 1, "teachers": {"even": "teacher", "odd": "teacher-1"}, "teacher_column": "parity"},
    ),
    "GRPO" + TRIES: ("GRPO", IN_TURNS),
    "GiGPO" + TRIES: ("GiGPO", IN_TURNS),
    "distillation by 4 likeliest tokens": ("Distillation", {"group_size": 1, "teacher": "teacher", "teacher_topk": 4}),
}
COLUMNS = ("algorithm", "seed", "iteration", "reward", "staleness_versions", "seconds")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--late-seeds", type=int, default=6, help="of the algorithms that are 8 versions late")
    parser.add_argument("--late-iterations", type=int, default=120)
    parser.add_argument("--out", type=Path, help="benchmarks/algorithms; with --quick runs/algorithms_quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="takes seconds; the numbers mean nothing")
    parser.add_argument("--run", nargs=2, metavar=("ALGORITHM", "SEED"), help=argparse.SUPPRESS)  # one, in this process
    options = parser.parse_args(arguments)
    if options.quick:
        options.iterations = options.late_iterations = 2
        options.seeds = options.late_seeds = 1
    options.out = options.out or Path("runs/algorithms_quick" if options.quick else "benchmarks/algorithms")
    if options.run:
        train(options.run[0], int(options.run[1]), options)
        return
    names = options.algorithms.split(",")
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown:
        parser.error(f"unknown algorithm {unknown[0]!r}; choose from {', '.join(ALGORITHMS)}")
    report = Report(
        "algorithms",
        iterations=options.iterations,
        late_iterations=options.late_iterations,
        trajectories_per_iteration=TRAJECTORIES,
    )
    unpack_runs(options.out)
    start = make_start(options.out, steps=2 if options.quick else 100)
    for seed in range(max(options.seeds, options.late_seeds)):
        for name in names:
            if seed >= (options.late_seeds if name.endswith(LATE) else options.seeds):
                continue
            if run_file(options.out, name, seed).exists():
                continue
            for folder in teachers_of(name):
                make_teacher(folder, options)
            before = time.perf_counter()
            run_alone(name, seed, options)
            rewards = [float(row["reward"]) for row in read_runs(options.out, [name]) if int(row["seed"]) == seed]
            report.add(
                name,
                seed=seed,
                first_reward=round(rewards[0], 3),
                last_reward=round(last_reward(rewards), 3),
                seconds=round(time.perf_counter() - before, 1),
            )
    rows = read_runs(options.out, list(ALGORITHMS))
    with (options.out / "curves.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.out / "curves.png")
    for name in [name for name in names if name.endswith(LATE)]:
        compared = against(rows, name, yardstick_of(name))
        if compared:
            report.add(f"{name} less naive", **compared)
    report.finish(start=str(start), curves=str(options.out / "curves.csv"))


def make_start(out: Path, *, steps: int, lr: float = 5e-4, **sizes: int) -> Path:
    """Returns the model that all runs start from, made once; `sizes` override its config's."""
    folder = out / "start"
    if (folder / "config.json").exists():
        return folder
    import lightrl
    from examples.sft.demonstrations import Demonstrations

    quiet()
    lightrl_seed(0)
    config = {"model_type": "qwen3", "vocab_size": 14, "hidden_size": 128, "intermediate_size": 384}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config |= {"max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0}
    config |= sizes
    spec = lightrl.ModelSpec(config=config, tokenizer="examples.quickstart.task.tokenizer", seed=0)
    module = lightrl.SFT(spec, lr=lr, warmup_steps=10)
    export = lightrl.HuggingFaceExport(str(folder))
    trainer = lightrl.Trainer(**trainer_settings(out, steps), callbacks=[export], limit_val_batches=0)
    trainer.fit(module, Demonstrations(batch_size=128, hasty_fraction=0.6))
    return folder


def teachers_of(name: str) -> list[str]:
    settings = ALGORITHMS[name][1]
    return [*([settings["teacher"]] if "teacher" in settings else []), *settings.get("teachers", {}).values()]


def make_teacher(name: str, options: argparse.Namespace) -> None:
    """Makes the final model of one of GRPO's runs, once."""
    folder = options.out / name
    if (folder / "config.json").exists():
        return
    import lightrl

    fit("GRPO", TEACHERS[name], options, lightrl.HuggingFaceExport(str(folder)))


def run_alone(name: str, seed: int, options: argparse.Namespace) -> None:
    """Trains in a separate process."""
    command = [sys.executable, "-m", "benchmarks.algorithms", "--run", name, str(seed), "--out", str(options.out)]
    iterations = options.late_iterations if name.endswith(LATE) else options.iterations
    command += ["--iterations", str(iterations), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def train(name: str, seed: int, options: argparse.Namespace) -> None:
    """Trains and saves the run to its file."""
    curve = make_curve()
    fit(name, seed, options, curve)
    write_run(run_file(options.out, name, seed), ({"algorithm": name, "seed": seed, **row} for row in curve.rows))


def fit(name: str, seed: int, options: argparse.Namespace, callback: lightrl.RLCallback) -> None:
    import torch

    import lightrl
    from examples.quickstart.reward import exact

    quiet()
    torch.set_num_threads(options.threads)
    lightrl_seed(seed)
    kind, settings = ALGORITHMS[name]
    group_size = settings.get("group_size", 16)
    shared: dict[str, Any] = {
        "reward": exact,
        "group_size": group_size,
        "num_minibatches": 2,
        "sampling": lightrl.Sampling(max_new_tokens=4),
        "lr": 3e-4,
    }
    if "teacher" in settings:
        settings = {**settings, "teacher": str(options.out / settings["teacher"])}
    if "teachers" in settings:
        folders = {name: str(options.out / folder) for name, folder in settings["teachers"].items()}
        settings = {**settings, "teachers": folders}
    module = getattr(lightrl, kind)(str(options.out / "start"), **{**shared, **settings})
    callbacks = [callback, lightrl.StalenessControl(8 if name.endswith(LATE) else 0)]
    trainer = lightrl.Trainer(
        **trainer_settings(options.out, options.iterations), callbacks=callbacks, limit_val_batches=0
    )
    data = Parities if "teachers" in settings else LargestDigit
    trainer.fit(module, data(batch_size=TRAJECTORIES // group_size))


def make_curve() -> Any:
    """Returns a callback that collects a row for each iteration."""
    import lightrl

    class Curve(lightrl.RLCallback):
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self.start_s = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            metrics = trainer.callback_metrics
            self.rows.append(
                {
                    "iteration": trainer.global_step,
                    "reward": round(float(metrics["rollout/reward"]), 5),
                    "staleness_versions": round(float(metrics["staleness/mean_versions"]), 3),
                    "seconds": round(time.perf_counter() - self.start_s, 2),
                }
            )

    return Curve()


def trainer_settings(out: Path, steps: int) -> dict[str, Any]:
    return {
        "accelerator": "cpu",
        "max_steps": steps,
        "gradient_clip_val": 1.0,
        "default_root_dir": out,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def run_file(out: Path, name: str, seed: int) -> Path:
    return out / "runs" / f"{''.join(letter if letter.isalnum() else '_' for letter in name)}-{seed}.csv"


def read_runs(out: Path, names: Sequence[str]) -> list[dict[str, str]]:
    """Returns the rows of all finished runs of these algorithms."""
    rows: list[dict[str, str]] = []
    for path in sorted((out / "runs").glob("*.csv")):
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["algorithm"] in names]
    return sorted(rows, key=lambda row: (names.index(row["algorithm"]), int(row["seed"]), int(row["iteration"])))


def unpack_runs(out: Path) -> None:
    """Writes the files of runs in `curves.csv` that are missing, as in a fresh checkout."""
    if not (out / "curves.csv").exists():
        return
    with (out / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for (name, seed), run in itertools.groupby(rows, key=lambda row: (row["algorithm"], int(row["seed"]))):
        if not run_file(out, name, seed).exists():
            write_run(run_file(out, name, seed), run)


def write_run(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def mean_and_spread(rows: Sequence[dict[str, str]], name: str) -> tuple[list[int], list[float], list[float]]:
    """Returns iterations, mean reward over seeds, and its standard deviation (0 for one seed)."""
    rewards: dict[int, list[float]] = {}
    for row in rows:
        if row["algorithm"] == name:
            rewards.setdefault(int(row["iteration"]), []).append(float(row["reward"]))
    iterations = sorted(rewards)
    means = [statistics.mean(rewards[k]) for k in iterations]
    return iterations, means, [statistics.stdev(rewards[k]) if len(rewards[k]) > 1 else 0.0 for k in iterations]


def yardstick_of(name: str) -> str:
    """Returns the baseline of an algorithm: GRPO with as many tries, or the naive loss as late and in such steps."""
    if name.endswith(TRIES):
        return "GRPO" + TRIES
    ending = next((ending for ending in (SMALL_STEPS, SLOW, LATE) if name.endswith(ending)), None)
    return "GRPO" if ending is None else f"naive{ending}"


def last_reward(rewards: Sequence[float]) -> float:
    """Returns the mean reward of a run's last tenth."""
    return statistics.mean(rewards[-max(1, len(rewards) // 10) :])


def against(rows: Sequence[dict[str, str]], name: str, other: str) -> dict[str, float]:
    """Returns mean and standard error over seeds of the reward of `name` minus that of `other` with the same seed.

    Both at the end of the run and over all of it. Empty for fewer than two common seeds, and for `other` itself.
    """
    runs: dict[str, dict[str, list[float]]] = {name: {}, other: {}}
    for row in rows:
        if row["algorithm"] in runs:
            runs[row["algorithm"]].setdefault(row["seed"], []).append(float(row["reward"]))
    seeds = sorted(runs[name].keys() & runs[other].keys())
    if name == other or len(seeds) < 2:
        return {}
    comparison: dict[str, float] = {"pairs": len(seeds)}
    for where, measure in (("last", last_reward), ("whole", statistics.mean)):
        differences = [measure(runs[name][seed]) - measure(runs[other][seed]) for seed in seeds]
        comparison[f"{where}_difference"] = round(statistics.mean(differences), 4)
        comparison[f"{where}_error"] = round(statistics.stdev(differences) / len(seeds) ** 0.5, 4)
    return comparison


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    columns = min(4, len(names))
    num_rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        num_rows,
        columns,
        figsize=(3 * columns, 2.3 * num_rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        yardstick = yardstick_of(name)
        if name != yardstick and yardstick in names:
            iterations, means, _ = mean_and_spread(rows, yardstick)
            axis.plot(iterations, means, color="0.7", linewidth=1)
        iterations, means, spread = mean_and_spread(rows, name)
        axis.plot(iterations, means, color="tab:blue", linewidth=1.5)
        low = [mean - one for mean, one in zip(means, spread, strict=True)]
        high = [mean + one for mean, one in zip(means, spread, strict=True)]
        axis.fill_between(iterations, low, high, color="tab:blue", alpha=0.2, linewidth=0)
        num_seeds = len({row["seed"] for row in rows if row["algorithm"] == name})
        axis.set_title(textwrap.fill(f"{name} ({num_seeds})", 40), fontsize=8)
        axis.set_ylim(0, 1.02)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    for axis in axes[:, 0]:
        axis.set_ylabel("reward")
    figure.suptitle("mean reward of sampled answers: mean ± deviation over seeds (number in parentheses)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightrl"):
        logging.getLogger(name).setLevel(logging.ERROR)


def lightrl_seed(seed: int) -> None:
    from lightning.pytorch import seed_everything

    seed_everything(seed, verbose=False)


if __name__ == "__main__":
    main()
