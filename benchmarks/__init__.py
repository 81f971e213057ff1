"""Benchmarks: speed and memory, against named baselines. Each is `python -m benchmarks.<name>`; none is a test.

Each prints a line for the machine, a JSON line per measurement and a table at the end, with report.py. README.md has
commands, machine, targets and figures.

Reading order:
    report.py           what every benchmark prints: machine, measurements, peak memory, table
    lengths.py          lists of completion lengths, and how both sides of a comparison keep to them
    trajectories.py     random trajectories of these lengths, and the padded update that is compared with
    grpo_vs_trl.py      iterations per second against TRL's GRPOTrainer, short and skewed completions
    local_engine.py     tokens per second against `model.generate`
    orchestrator.py     processor time of the controller per request
    algorithms.py       learning curves of every algorithm on one task, over seeds, as CSV and PNG
    weight_sync.py      MiB/s of weights from trainers to a receiver, by transport
    sync_faults.py      silent faults of a weight sync: what notices each; false alarms of healthy syncs
    kill_matrix.py      who dies when: each actor killed and stopped in each phase of a run; kill_run.py is the run
    soak.py             thousands of iterations with faults: slopes of memory, threads, files; size of checkpoints
      faulty_reward.py, in_fork.py  rewards that fail, and runs without the seconds of their imports, of these two
    delta_sync.py       its rows of syncs that send what changed: bytes, pause, speed on a link
    gpu_update.py       MFU, tokens/s and memory of the update on one GPU, against a plain training loop
    roofline.py         the same MFU on paper, part by part, without a GPU
    plan.py             what FSDP2 and 3D parallelism cost, on paper, up to 1,024 GPUs
    async_overlap.py    iterations per second with max_staleness 0, 1, 2, 4, 8 and a long tail of latencies
      stream_order.py   simulated: are the lengths trained on those sampled? the same for other rules

May import: everything of lightrl, and the extra [bench]. To add one: a file named for what it measures, with
`if __name__ == "__main__"`, whose contenders take turns (`report.interleaved`) and whose keys name units.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the fake SGLang server, fake_sglang
