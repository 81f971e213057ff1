"""Records the results of the examples, and generates every sentence and table about them from the records.

    python -m benchmarks.records --run quickstart/grpo --seeds 0,1,2,3,4 [--threads 1] [--work runs/records]
    python -m benchmarks.records

The first command runs the command at the top of examples/quickstart/grpo.yaml in a process per seed, and writes
`benchmarks/records/quickstart-grpo-0.json` and so on: command, commit, settings, machine, load, seed, seconds, memory
and the curve. Examples that it builds on run first, in the same folder, unless their exports exist, and so do the
commands at their tops that write a model or data (`python -m examples… --to runs/…`). A checkout with changed code is
refused.

The second command writes all statements about results from the records: the lines `# Takes:` and `# Reaches:` at the
top of each example, and the text between `<!-- records: … -->` and `<!-- end -->` in README.md, examples/README.md and
benchmarks/lag.md. An example without a record says `not measured`. A record counts only while its example has the same
settings: after a change, run the example again. The table of `benchmarks.lag` comes from `benchmarks/lag/runs.jsonl`.
`tests/test_records.py` checks that all claims match the records, and that none lacks a record.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import yaml

from benchmarks import lag
from benchmarks.report import machine

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
PAGES = ("README.md", "examples/README.md", "benchmarks/lag.md")
# Runs of an example with further options, by the name of their records.
STALE = "--model.decoupled true --trainer.callbacks+=StalenessControl --trainer.callbacks.max_staleness=2"
LORA = "--model.policy '{model: runs/pretrained/smollm2, lora: {rank: 16, alpha: 32}}' --model.lr "
SGLANG = "--config examples/quickstart/sglang_cpu.yaml"
VARIANTS = {
    "quickstart/async": ("quickstart/grpo", STALE),
    "pretrained/sums_async": ("pretrained/sums", STALE),
    "pretrained/sums_lora": ("pretrained/sums", f"{LORA}1e-4"),
    "pretrained/sums_sglang": ("pretrained/sums", SGLANG),
    "pretrained/reviews_async": ("pretrained/reviews", STALE),
    "pretrained/reviews_lora": ("pretrained/reviews", f"{LORA}2e-4"),
    "pretrained/reviews_sglang": ("pretrained/reviews", SGLANG),
}
CODE = ("lightrl", ":(glob)examples/**/*.py")  # what a run's commit is about
# What a record keeps, and how it is told; the first that a run logs is its result.
HELD_OUT = {
    "val/accuracy_fraction": "of held-out prompts",
    "val/token_accuracy_fraction": "of the tokens of held-out answers",
    "val/exploitability": "as exploitability",
    "val/reward": "as held-out reward",
}
SAMPLED = ("rollout/accuracy_fraction", "rollout/reward")
LAST = 10  # iterations
QUICK = "--trainer.max_steps=2 --trainer.val_check_interval=2 --trainer.limit_val_batches=1"
NOT_MEASURED = "not measured"


class Recorder(L.Callback):
    """Keeps the curve of a run, and writes it as JSON when the run ends: metric → [[iteration, value], …].

    A value at iteration i is for the weights after i iterations; 0 exists if all held-out data is evaluated before.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.curve: dict[str, list[list[float]]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._add(trainer, SAMPLED, trainer.global_step - 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf"):
            self._add(trainer, HELD_OUT, trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(self.curve))

    def _add(self, trainer: L.Trainer, names: Sequence[str] | dict[str, str], iteration: int) -> None:
        for name, value in trainer.callback_metrics.items():
            if name.startswith(tuple(f"{other}/" for other in names)) or name in names:  # also of each validation set
                self.curve.setdefault(name, []).append([iteration, round(float(value), 5)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default="", help="examples without .yaml, or variants, separated by commas")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--threads", type=int, help="of torch; all cores if not given")
    parser.add_argument("--work", type=Path, default=Path("runs/records"), help="for the runs' own files")
    parser.add_argument("--out", type=Path, default=RECORDS)
    parser.add_argument("--quick", action="store_true", help="two iterations; the numbers mean nothing")
    options = parser.parse_args(arguments)
    names = [name for name in options.run.split(",") if name]
    unknown = [name for name in names if name not in (*examples(), *VARIANTS)]
    if unknown:
        parser.error(f"unknown example {unknown[0]!r}; choose from {', '.join((*examples(), *VARIANTS))}")
    if names and not options.quick and git("status", "--porcelain", "--", *CODE):
        parser.error("The code has changes that are not committed. Commit them first: a record names its commit.")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for seed in options.seeds.split(","):
            record = run(name, int(seed), options)
            path = options.out / f"{name.replace('/', '-')}-{seed}.json"
            lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
            path.write_text(f"{{\n{lines}\n}}\n")
            print(f"{path}: {reaches([record])}", flush=True)
    if options.out == RECORDS:
        for path, text in rewritten().items():
            path.write_text(text)


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Runs an example, after the examples that it builds on, and returns its record."""
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "examples").exists():
        (work / "examples").symlink_to(ROOT / "examples")  # so that the command is what a reader types
    before = [command_of(stage) for stage in stages_before(name)]
    for command, folder in dict.fromkeys(pair for stage in (*stages_before(name), name) for pair in writers_of(stage)):
        if not (work / folder).exists():
            started(command, work, options)
    exports = exports_of(name) if options.quick else set()
    command = f"{command_of(name)} --seed_everything {seed}"
    curve = work / "curve.json"
    curve.unlink(missing_ok=True)
    recorder = f"--trainer.callbacks+=benchmarks.records.Recorder --trainer.callbacks.path={curve}"
    try:
        for stage, earlier in zip(stages_before(name), before, strict=True):
            if not all((work / folder / "config.json").exists() for folder in exports_of(stage)):
                exports |= exports_of(stage) if options.quick else set()
                started(f"{earlier} {QUICK}" if options.quick else earlier, work, options)
        begun = {"date": datetime.date.today().isoformat(), "machine": machine(), "threads": options.threads}
        used = started(f"{command} {recorder} {QUICK}" if options.quick else f"{command} {recorder}", work, options)
    finally:
        for folder in exports:  # of two iterations; a later run must not build on them, even if this one failed
            shutil.rmtree(work / folder, ignore_errors=True)
    return {
        "example": name,
        "seed": seed,
        "command": command,
        "after": before,
        "commit": git("log", "-1", "--format=%H", "--", *CODE),
        "settings": settings_digest(name),
        **begun,
        **used,
        "curve": json.loads(curve.read_text()),
    }


def started(command: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a command to its end; returns the time and memory that it took."""
    words = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
    begun_s = time.perf_counter()
    with (work / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _, status, used = os.wait4(process.pid, 0)  # with the processor time of the processes that it started
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}: {(work / 'output.txt').read_text()[-3000:]}")
    return {
        "seconds": round(time.perf_counter() - begun_s, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_rss_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def examples() -> list[str]:
    folder = ROOT / "examples"
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def example_file(name: str) -> Path:
    return ROOT / "examples" / f"{VARIANTS.get(name, (name,))[0]}.yaml"


def header_of(name: str) -> list[str]:
    """Returns the comment at the top of an example."""
    lines = example_file(name).read_text().splitlines()
    return lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))]


def command_of(name: str) -> str:
    """Returns the command at the top of the example, with the options of a variant."""
    path = example_file(name).relative_to(ROOT)
    found = re.search(rf"lightrl \w+ (--config \S+ )*--config {path}$", "\n".join(header_of(name)), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} must have a line at its top that ends in `lightrl fit … --config {path}`.")
    return " ".join([found[0], *VARIANTS.get(name, ())[1:]])


def configs_of(name: str) -> list[Path]:
    return [ROOT / path for path in re.findall(r"--config (\S+)", command_of(name))]


def writers_of(name: str) -> list[tuple[str, str]]:
    """Returns the commands at the top of an example that write a model or data, each with its folder."""
    return re.findall(r"python -m (examples\.[\w.]+ --to (runs/[\w/]+))", "\n".join(header_of(name)))


def exports_of(name: str) -> set[str]:
    """Returns the folders that an example exports models to."""
    return set(re.findall(r"\bto: (runs/[\w/]+)", example_file(name).read_text()))


def stages_before(name: str) -> list[str]:
    """Returns the examples that must run before, in order."""
    folders = {folder for path in configs_of(name) for folder in re.findall(r": (runs/[\w/]+)", path.read_text())}
    makers = [other for other in examples() if other != name and exports_of(other) & folders]
    return list(dict.fromkeys(stage for maker in makers for stage in (*stages_before(maker), maker)))


def settings_digest(name: str) -> str:
    """Returns a digest of all settings of the command and of the stages before it, without comments."""
    trees = [yaml.safe_load(path.read_text()) for one in (*stages_before(name), name) for path in configs_of(one)]
    text = json.dumps([trees, VARIANTS.get(name, ())[1:]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def records_of(name: str) -> list[dict[str, Any]]:
    """Returns the records of an example with its current settings, by seed."""
    records = [json.loads(path.read_text()) for path in RECORDS.glob(f"{name.replace('/', '-')}-*.json")]
    now = settings_digest(name)
    valid = [record for record in records if record["example"] == name and record["settings"] == now]
    return sorted(valid, key=lambda record: int(record["seed"]))


def result_of(record: dict[str, Any]) -> str:
    """Returns the metric that is an example's result."""
    return next((metric for metric in (*HELD_OUT, *SAMPLED) if metric in record["curve"]), "")


def number_text(metric: str, value: float) -> str:
    return f"{value:.1%}"[:-1] if metric.endswith("_fraction") else f"{value:.2f}"


def last_samples(record: dict[str, Any], metric: str, place: slice = slice(-LAST, None)) -> float | None:
    values = [value for _, value in record["curve"].get(metric, [])][place]
    return statistics.fmean(values) if values else None


def label_of(name: str, metric: str) -> str:
    """Returns the label of a result: what it counts."""
    has_pairs = re.search(r"class_path: (DPO|RewardModel)\b", example_file(name).read_text())
    return "of held-out pairs" if has_pairs else HELD_OUT[metric]


def reaches(records: Sequence[dict[str, Any]], label: str = "") -> str:
    """Describes the held-out result of each seed at the end, and at the start if it was measured.

    Args:
        label: one of several validation sets; empty for all together.
    """
    if not records:
        return NOT_MEASURED
    name, metric = records[0]["example"], result_of(records[0])
    if metric not in HELD_OUT:
        values = [(last_samples(one, metric, slice(0, LAST)), last_samples(one, metric)) for one in records if metric]
        texts = [f"{number_text(metric, first or 0)} to {number_text(metric, last or 0)}" for first, last in values]
        is_share = metric.endswith("_fraction")
        what = f"samples {', '.join(texts)} % right" if is_share else f"reward of the samples {', '.join(texts)}"
        return f"{what}, {seeds_text(records)}" if values else "no curve"
    unit = " %" if metric.endswith("_fraction") else ""
    curves = [record["curve"][f"{metric}/{label}" if label else metric] for record in records]
    ends = [curve[-1] for curve in curves]
    text = f"{', '.join(number_text(metric, value) for _, value in ends)}{unit} {label_of(name, metric)}"
    text += f" after {ends[0][0]} iterations, {seeds_text(records)}"
    firsts = [curve[0] for curve in curves]
    if all(iteration == 0 for iteration, _ in firsts):
        texts = sorted({number_text(metric, value) for _, value in firsts}, key=float)
        text += f" ({' to '.join(dict.fromkeys([texts[0], texts[-1]]))}{unit} before)"
    return text


def seeds_text(records: Sequence[dict[str, Any]]) -> str:
    seeds = [record["seed"] for record in records]
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def takes(records: Sequence[dict[str, Any]]) -> str:
    """Describes processor time and memory, as medians over seeds."""
    if not records:
        return NOT_MEASURED
    seconds, memory = (statistics.median(one[key] for one in records) for key in ("cpu_seconds", "peak_rss_gb"))
    return f"{seconds:.0f} CPU-seconds and {memory:.1f} GB of memory, on {machine_text(records[0])}"


def machine_text(record: dict[str, Any]) -> str:
    threads = record["threads"]
    on = record["machine"]["gpu"] or " ".join(record["machine"]["processor"].replace("(R)", "").split()[:2])
    return f"an {on}" + ("" if threads is None else f" with {threads} thread{'s' if threads > 1 else ''}")


def rewritten() -> dict[Path, str]:
    """Returns each file that states results, with its text regenerated from the records."""
    texts = {path: (ROOT / path).read_text() for path in PAGES}
    result = {ROOT / path: page_text(text) for path, text in texts.items()}
    for name in examples():
        records = records_of(name)
        text = example_file(name).read_text()
        for word, value in (("Takes", takes(records)), ("Reaches", reaches(records))):
            text = re.sub(rf"^# {word}: .*$", f"# {word}: {value}.", text, count=1, flags=re.MULTILINE)
        result[example_file(name)] = text
    return result


def page_text(text: str) -> str:
    kinds = {"table": seeds_table, "rows": example_rows, "line": line, "lag": lag_table, "warnings": warnings_table}

    def written(found: re.Match[str]) -> str:
        kind, _, name = found[1].partition(" ")
        return f"<!-- records: {found[1]} -->{kinds[kind](name.strip(), found[2])}<!-- end -->"

    return re.sub(r"<!-- records: ([\w/ ]+?) -->(.*?)<!-- end -->", written, text, flags=re.DOTALL)


def line(name: str, _: str) -> str:
    """Describes the results of an example; after a space, `name` may have the label of a validation set."""
    name, _, label = name.partition(" ")
    records = records_of(name)
    return reaches(records, label) if records else "no record yet"


def seeds_table(name: str, _: str) -> str:
    """Makes a table with a column per seed: results, time and memory of the runs."""
    records = records_of(name)
    if not records:
        return f"\n{NOT_MEASURED}\n"
    metric = result_of(records[0])
    count, num = label_of(name, metric), records[0]["curve"][metric][-1][0]
    percent = " %" if metric.endswith("_fraction") else ""
    rows = [("`--seed_everything`", [str(record["seed"]) for record in records])]
    for title, place in (("before training", 0), (f"after {num} iterations", -1)):
        values = [number_text(metric, record["curve"][metric][place][1]) + percent for record in records]
        rows.append((f"right {count}, greedy, {title}", values))
    sampled = [last_samples(record, SAMPLED[0]) or 0.0 for record in records]
    values = [f"{number_text(SAMPLED[0], value)} %" for value in sampled]
    rows.append((f"right of the last {LAST} iterations' samples", values))
    rows.append((f"CPU seconds, on {machine_text(records[0])}", [f"{one['cpu_seconds']:.0f}" for one in records]))
    loads = [max(one["machine"]["load_1min"], one["load_at_end"]) for one in records]
    seconds = [f"{one['seconds']:.0f} ({load:.1f})" for one, load in zip(records, loads, strict=True)]
    rows.append((f"wall seconds, start to end (load of the {records[0]['machine']['cores']} cores)", seconds))
    rows.append(("GB of memory at the peak", [f"{one['peak_rss_gb']:.1f}" for one in records]))
    first, *others = (f"| {title} | {' | '.join(cells)} |" for title, cells in rows)
    return "\n" + "\n".join([first, "|---|" + "--:|" * len(records), *others]) + "\n"


def example_rows(_: str, text: str) -> str:
    """Rewrites the third and fourth cells of table rows whose second cell is an example's file."""
    lines = text.splitlines()
    for index, row in enumerate(lines):
        files = re.findall(r"([\w/]+)\.yaml", row.split("|")[2]) if row.count("|") > 4 else []
        if files:
            name = next(one for one in (files[-1], files[-1].removeprefix("examples/")) if one in examples())
            cells, records = row.split("|"), records_of(name)
            minutes = statistics.median(one["cpu_seconds"] for one in records) / 60 if records else None
            cells[3] = f" {minutes:.1f} " if minutes is not None else " "
            cells[4] = f" {reaches(records)} "
            lines[index] = "|".join(cells)
    return "\n".join(lines) + "\n"


def lag_table(_: str, __: str) -> str:
    """Makes a row for each loss, lag and learning rate of benchmarks/lag/runs.jsonl."""
    records = lag.read_records(ROOT / "benchmarks" / "lag" / "runs.jsonl")
    order = {name: index for index, name in enumerate(lag.LOSSES)}
    settings = sorted({key[:3] for key in records}, key=lambda key: (key[2], key[1], order[key[0]]))
    lines = []
    for loss, eta, lr in settings:
        seeds = sorted(key[3] for key in records if key[:3] == (loss, eta, lr))
        row = lag.row_of(records, loss, eta, lr, seeds)
        lead = row["ess_warning_lead_iterations"]
        cells = [loss_name(loss), eta, f"{lr:g}", row["seeds"], f"{row['fraction_of_on_policy']:.3f}"]
        cells += [" – ".join(f"{limit(row['last_rewards']):.2f}" for limit in (min, max)), row["collapsed"]]
        cells += ["" if lead is None else lead, row["warned_without_collapse"]]
        cells += [f"{row['lowest_ess_fraction']:.2f}", f"{row['highest_kl_nats']:.2f}"]
        cells += [f"{row['largest_step_by_root_gradient']:.4f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    head = "| loss | η | lr | seeds | of on-policy | last rewards | collapsed | lead | warned without collapse |"
    head += " lowest `ess_fraction` | highest `kl_behavior_nats` | largest `step_k3_nats` ÷ √`grad_norm` |"
    return "\n".join(["", head, "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|", *lines, ""])


def warnings_table(_: str, __: str) -> str:
    """Makes rows for each loss of benchmarks/lag/runs.jsonl: seeds that chose the rule, held-out ones, and all."""
    records = lag.read_records(ROOT / "benchmarks" / "lag" / "runs.jsonl")
    heads = {
        "runs": "runs",
        "provoked_collapses": "provoked collapses",
        "warned_in_time": "warned of",
        "least_lead_iterations": "least lead",
        "on_the_edge": "runs on the edge",
        "edge_collapses": "of these collapsed",
        "edge_warned_in_time": "warned of",
        "edge_warned_without_collapse": "warned, no collapse",
        "healthy": "healthy runs",
        "healthy_with_a_warning": "with a warning",
    }
    lines = []
    for name, row in lag.warnings_of(list(records.values())).items():
        cells = ["" if row[key] is None else row[key] for key in heads]
        lines.append(f"| {' | '.join(map(str, [loss_name(name) if name in lag.LOSSES else name, *cells]))} |")
    return "\n".join(["", f"| loss | {' | '.join(heads.values())} |", f"|---|{'--:|' * len(heads)}", *lines, ""])


def loss_name(loss: str) -> str:
    """Returns the loss's name in YAML for its name in `lag.LOSSES`."""
    kind, arguments = lag.LOSSES[loss]

    def in_yaml(value: Any) -> Any:
        if not dataclasses.is_dataclass(value):
            return list(value) if isinstance(value, tuple) else value
        values = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: value for name, (value, default) in values.items() if value != default}

    settings = [yaml.safe_dump({key: in_yaml(value)}, default_flow_style=True) for key, value in arguments.items()]
    return ", ".join([f"`{kind}`", *(f"`{setting.strip()[1:-1]}`" for setting in settings)])


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
