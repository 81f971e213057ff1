"""Benchmarks: speed and memory, against named baselines. Run one with `python -m benchmarks.<name>`; none is a test.

Each prints a line for the machine, a JSON line per measurement and a table. README.md has commands and figures.

Reading order:
    report.py           what every benchmark prints: machine, measurements, peak memory, table
    lengths.py          lists of completion lengths, and how both sides of a comparison enforce them
    trajectories.py     random trajectories of these lengths, and a padded update as a baseline
    grpo_vs_trl.py      iterations per second against TRL's GRPOTrainer, short and skewed completions
      learning_vs_trl.py  learning curves of both, on the tasks of learned.py
    local_engine.py     tokens per second against `model.generate`
    orchestrator.py     processor time of the controller per request
    algorithms.py       learning curves of every algorithm on one task, over seeds, as CSV and PNG
    weight_sync.py      MiB/s of weights from trainers to a receiver, by transport
    sync_faults.py      which check detects each silent fault of a weight sync; false alarms in healthy syncs
    kill_matrix.py      kills and stops each actor in each phase of a run; kill_run.py is the run
    soak.py             thousands of iterations with faults: slopes of memory, threads, files; size of checkpoints
      faulty_reward.py, in_fork.py  for the last two: rewards that fail, and runs without import time
    delta_sync.py       weight_sync for syncs that send only changes: bytes, pause, speed on a link
    gpu_update.py       MFU, tokens/s and memory of the update on one GPU, against a plain training loop
    roofline.py         an estimate of that MFU for each part of the update, without a GPU
    plan.py             estimated costs of FSDP2 and 3D parallelism, up to 1,024 GPUs
    async_overlap.py    iterations per second with max_staleness 0, 1, 2, 4, 8 and a long tail of latencies
      stream_order.py   simulated: whether training sees the sampled lengths, for several scheduling rules

May import: everything of lightrl, and the extra [bench]. To add one: write a file named for what it measures, with `if
__name__ == "__main__"`; let contenders take turns (`report.interleaved`), and put units into key names.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the fake SGLang server, fake_sglang
