"""What grows with the size of a run.

    python -m benchmarks.growth [--quick] [--prompts 10000,1000000,5000000] [--trajectories 1024x1000,8192x1000]
                                [--iterations 10,100,1000,10000] [--ranks 1,2,4,8] [--shared 256x512,1024x8192]

Axes (a list that is empty leaves its axis out):
    prompts    a fresh process opens this many rows, in a JSONL and in a Parquet file: seconds until the first prompt is
               rendered (`start_s`; for Parquet once more with the cache of `datasets` that the first start has made),
               until the fingerprint of the first checkpoint is there, milliseconds for each further prompt in shuffled
               order, alone and in a batch (in a run: in a thread, ahead of need), and the process's resident memory.
               Imports are not counted in the seconds, but in the memory: `imports_mib` is what they take.
    ranks      1, 2, 4 and 8 processes share an iteration's trajectories (`--shared 256x512`: how many, of up to so many
               tokens): bytes of the Experience on the rank that holds most, of its microbatches on a device, and bytes
               that come to a rank, beside the least that must (spread_rows.py)
    trajectories  a fresh process plays and holds this many trajectories, with so many new tokens each: bytes per token,
               and trajectories per second of its processor time (held_trajectories.py)
    iterations  one run with a tiny policy, FakeEngine, CSV, TensorBoard, TrajectoryLog and LearningCurve: seconds and
               processor seconds of an iteration (medians of the last 50), memory, bytes of a checkpoint (long_run.py)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import held_trajectories, long_run, spread_rows
from benchmarks.report import Report, peak_rss_mib

BATCH = 100_000  # rows written at once
NUM_READ = 1000  # prompts in shuffled order


def rows(first: int, num: int) -> Iterator[dict[str, str]]:
    draw = random.Random(first)
    for number in range(first, first + num):
        other = draw.randrange(10**6)
        yield {"question": f"What is {number} plus {other}? Write the number alone.", "answer": str(number + other)}


def write(path: Path, num: int) -> None:
    import pyarrow
    import pyarrow.parquet

    starts = range(0, num, BATCH)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for start in starts:
                file.writelines(json.dumps(row) + "\n" for row in rows(start, min(BATCH, num - start)))
        return
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in starts:
            writer.write_table(pyarrow.Table.from_pylist(list(rows(start, min(BATCH, num - start))), schema=schema))


def read(path: str) -> dict[str, float]:
    """Opens the data as a run does; in a process of its own."""
    import datasets  # noqa: F401  # imports are not measured
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lightrl.data import PromptDataModule

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    imports_mib = peak_rss_mib()
    start = time.perf_counter()
    data = PromptDataModule(path, batch_size=8, seed=0)
    data.attach(tokenizer)
    data.setup("fit")
    stream = data.prompt_stream
    assert stream[0] is not None
    started = time.perf_counter()
    assert stream.fingerprint
    fingerprinted = time.perf_counter()
    for position in range(1, NUM_READ + 1):
        assert stream[position] is not None
    ended = time.perf_counter()
    stream.prepare(NUM_READ + 1, NUM_READ)
    prepared = time.perf_counter()
    return {
        "start_s": round(started - start, 3),
        "fingerprint_s": round(fingerprinted - started, 3),
        "ms_per_prompt": round((ended - fingerprinted) / NUM_READ * 1e3, 3),
        "ms_per_prompt_in_a_batch": round((prepared - ended) / NUM_READ * 1e3, 3),
        "rss_mib": round(peak_rss_mib(), 1),
        "imports_mib": round(imports_mib, 1),
    }


def measured(path: Path, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.growth", "--read", str(path)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    values: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return values


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 prompts, no trajectories")
    parser.add_argument("--prompts", default="10000,1000000,5000000")
    parser.add_argument("--trajectories", default="1024x1000,8192x1000,256x30000", help="how many x new tokens")
    parser.add_argument("--ranks", default="1,2,4,8", help="how many processes share an iteration")
    parser.add_argument("--shared", default="256x512,1024x8192", help="its trajectories x most tokens of one")
    parser.add_argument("--iterations", default="10,100,1000,10000", help="of one run, where it is measured")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--hold", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.read:
        print(json.dumps(read(options.read)))
        return
    if options.hold:
        print(json.dumps(held_trajectories.hold(*options.hold)))
        return
    sizes = [20_000] if options.quick else [int(size) for size in options.prompts.split(",") if size]
    held = "" if options.quick else options.trajectories
    report = Report("growth")
    for size in sizes:
        for suffix in (".jsonl", ".parquet"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"train{suffix}"
                write(path, size)
                for is_cached in (False, True) if suffix == ".parquet" else (False,):
                    values = measured(path, Path(folder) / "cache")
                    report.add("prompts", axis="prompts", prompts=size, form=suffix[1:], is_cached=is_cached, **values)
    for shape in filter(None, held.split(",")):
        report.add("trajectories", axis="trajectories", **held_trajectories.measured(*map(int, shape.split("x"))))
    for shape in ["32x64"] if options.quick else filter(None, options.shared.split(",")):
        for ranks in "12" if options.quick else filter(None, options.ranks.split(",")):
            report.add("ranks", axis="ranks", **spread_rows.measured(int(ranks), *map(int, shape.split("x"))))
    for values in long_run.measured("2,10" if options.quick else options.iterations):
        report.add("iterations", axis="iterations", **values)
    report.finish()


if __name__ == "__main__":
    main()
