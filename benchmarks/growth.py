"""Measures how long a run takes to start on many prompts, and how much memory it needs.

    python -m benchmarks.growth [--quick] [--prompts 10000,1000000,5000000]

A fresh process opens this many rows of a JSONL or a Parquet file. It measures the seconds until the first prompt is
rendered (`start_s`; for Parquet, again with the cache that `datasets` wrote at the first start) and until the
fingerprint for the first checkpoint is ready, the milliseconds for each further prompt in shuffled order, singly and in
a batch (a run prefetches in a thread), and the resident memory. Only the memory includes the imports (`imports_mib`).
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
    """Opens the data as a run does; runs in a separate process."""
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
    parser.add_argument("--quick", action="store_true", help="20,000 prompts")
    parser.add_argument("--prompts", default="10000,1000000,5000000")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.read:
        print(json.dumps(read(options.read)))
        return
    report = Report("growth")
    for size in [20_000] if options.quick else map(int, options.prompts.split(",")):
        for suffix in (".jsonl", ".parquet"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"train{suffix}"
                write(path, size)
                for is_cached in (False, True) if suffix == ".parquet" else (False,):
                    values = measured(path, Path(folder) / "cache")
                    report.add("prompts", prompts=size, form=suffix[1:], is_cached=is_cached, **values)
    report.finish()


if __name__ == "__main__":
    main()
