"""Benchmarks: how fast, how much memory, against whom. Each is `python -m benchmarks.<name>`; none is a test.

Each prints a line for the machine, one JSON line per measurement and a table at the end, all by report.py. Figures with
command, machine and targets are in README.md beside this file.

Reading order:
    report.py           what every benchmark prints: machine, measurements, peak memory, table
    lengths.py          lists of completion lengths, and how both sides of a comparison keep to them
    grpo_vs_trl.py      iterations per second against TRL's GRPOTrainer, short and skewed completions
    local_engine.py     tokens per second against `model.generate`
    packing.py          forward and backward, without padding against padded, with the same gradients
    algorithms.py       learning curves of every algorithm on one task, over seeds, as CSV and PNG
    weight_sync.py      MiB/s of weights from trainers to a receiver, by transport
    parallel.py         updates by topology on this machine: tokens/s, memory, bytes sent, idle time of the pipeline
    gpu_update.py       MFU, tokens/s and memory of update and logprobs on one GPU, against a plain training loop
    plan.py             what FSDP2 and 3D parallelism would cost, on paper, up to 1,024 GPUs
    async_overlap.py    iterations per second with max_staleness 0, 1, 2, 4, 8 under a long tail of latencies

May import: everything of lightrl, and the extra [bench]. To add one: a file named for what it measures, with
`if __name__ == "__main__"`, that interleaves its contenders (`report.interleaved`) and names units in its keys.
"""
