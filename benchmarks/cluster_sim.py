"""A run on 64 to 4,096 GPUs, simulated: iterations per hour, who waits for what, what asynchrony gains.

    python -m benchmarks.cluster_sim [--quick] [--workloads math-1.5b,code-14b]

The decisions are lightrl's own: GroupScheduler says which groups start and are trained on, ServerFleet which server a
request goes to and which may serve, the launch planner which GPUs are whose, and costs.py what an update takes. Time is
a number; nobody sleeps. What takes time comes from the tables here: data sheets, published speeds of single requests,
and published workloads. Constants that nobody has published are marked as assumed, and printed; none is fitted to what
the command is compared with.

    synchronous     η = 0, ranks and servers on the same GPUs: all of them decode, then all of them train
    asynchronous    a quarter of the GPUs train, the others decode, as in AReaL's experiments

Columns: `async_over_sync` is the time of a synchronous iteration over that of this one; `published` the same of the
source. `idle_fraction` is that of all GPU seconds in which a GPU neither decodes nor trains: `idle_rollout` of trainers
that wait for trajectories, `idle_tail` of servers without requests, `idle_sync` around weight loads, `idle_lost` after
failures. A failure costs a host: its servers' requests are decoded again elsewhere; if it had ranks, all starts again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from benchmarks.plan import Machine, Times, best_3d_cost, best_fsdp2_cost
from benchmarks.report import Report
from benchmarks.simulated_cluster import Hardware, Lengths, Outcome, SimulatedCluster
from lightrl.launch.plan import place
from lightrl.launch.settings import Layout
from lightrl.strategies.costs import Work, num_parameters

GPUS_PER_HOST = 8
UNLIMITED = 16  # of η in the tables: more changes nothing
# https://arxiv.org/abs/2407.21783, table 5: 419 unexpected interruptions of 16,384 GPUs in 54 days.
FAILURES_PER_GPU_S = 419 / 16_384 / (54 * 86_400)
PREFILL_MFU = 0.45  # assumed
SCORE_OF_UPDATE = 0.25  # a forward for the proximal logprobs; an update has four times its work with recomputed layers


@dataclass(frozen=True)
class Workload:
    """A published run. Source: AReaL, https://arxiv.org/abs/2505.24298, table 1, and the blog of its release v0.3."""

    model: dict[str, Any]
    gpus: int  # 8 H800 in each node
    server_tp: int  # assumed
    lengths: Lengths  # the cap is published, the distribution is assumed
    prompts: int = 512
    group_size: int = 16
    num_minibatches: int = 4
    sync_hours: float = 0.0
    async_hours: float = 0.0

    @property
    def published(self) -> float:
        return round(self.sync_hours / self.async_hours, 2)

    def config(self) -> PretrainedConfig:
        values = dict(self.model)
        return AutoConfig.for_model(values.pop("model_type"), **values)


def qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, is_tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "tie_word_embeddings": is_tied,
    }  # fmt: skip


LONG = Lengths(median=6_000, sigma=0.8, cap=27_648, prompt=1_000)
WORKLOADS = {
    "math-1.5b": Workload(qwen2(1536, 8960, 28, 12, 2, is_tied=True), 128, 1, LONG, sync_hours=41.0, async_hours=14.8),
    "math-7b": Workload(qwen2(3584, 18944, 28, 28, 4), 192, 1, LONG, sync_hours=57.7, async_hours=25.4),
    "code-14b": Workload(qwen2(5120, 13824, 48, 40, 8), 256, 2, LONG, sync_hours=48.8, async_hours=21.9),
    "code-32b": Workload(qwen2(5120, 27648, 64, 40, 8), 384, 4, LONG, sync_hours=51.1, async_hours=31.1),
}


def hardware(workload: Workload, machine: Machine) -> Hardware:
    config = workload.config()
    head = config.hidden_size // config.num_attention_heads
    return Hardware(
        weight_bytes=2.0 * num_parameters(config),
        kv_bytes=4.0 * config.num_hidden_layers * config.num_key_value_heads * head,
        tp=workload.server_tp,
        memory_bytes=machine.memory_bytes,
        flops=machine.flops,
        prefill_mfu=PREFILL_MFU,
        link_bytes_per_s=machine.remote_bytes_per_s,
    )


@functools.lru_cache(maxsize=256)
def update_s(name: str, gpus: int, tokens: int, context: float = 0.0) -> float:
    """An iteration's score and update of so many tokens, by the formulas of `benchmarks.plan` and attention's scores.

    Args:
        context: length of the sequence that a token is in, on average over tokens.
    """
    workload, machine = WORKLOADS[name], Machine()
    config = workload.config()
    work = Work(tokens // workload.num_minibatches)
    costs = [best_fsdp2_cost(config, gpus, work, machine), best_3d_cost(config, gpus, work, machine)]
    fitting = [cost for cost in costs if cost.memory_bytes <= machine.memory_bytes] or costs
    best = min(Times.of(cost, config, work, machine).step_s for cost in fitting)
    # Two products with half of the sequence, for two directions of backward and two forwards: layers are recomputed.
    scores = 4 * 2 * context * config.hidden_size * config.num_hidden_layers * work.tokens
    best += scores / (gpus * machine.flops * machine.mfu)
    return best * workload.num_minibatches * (1 + SCORE_OF_UPDATE)


def layout(workload: Workload, gpus: int, staleness: int) -> Layout:
    if staleness == 0:
        return Layout(gpus, gpus // workload.server_tp, workload.server_tp, "colocated")
    ranks = gpus // 4
    return Layout(ranks, (gpus - ranks) // workload.server_tp, workload.server_tp)


@functools.lru_cache(maxsize=64)
def simulate(
    name: str,
    gpus: int,
    staleness: int,
    iterations: int,
    *,
    interrupts: bool = True,
    failures: float = 0.0,
    lengths: Lengths | None = None,
) -> Outcome:
    """The run's numbers once its start is over: the window is full, and what was decoded before is trained on."""
    workload = WORKLOADS[name]
    planned = layout(workload, gpus, staleness)
    _, servers = place(planned, gpus // GPUS_PER_HOST, GPUS_PER_HOST)
    lengths = lengths or workload.lengths
    context = lengths.prompt + lengths.mean_of_tokens
    cluster = SimulatedCluster(
        hardware(workload, Machine()),
        lengths,
        servers=[host for host, groups in servers.items() for _ in groups],
        ranks=planned.ranks,
        is_colocated=planned.placement == "colocated",
        # tokens rounded, so that the plan is computed once
        update_s=lambda tokens: update_s(name, planned.ranks, max(1, round(tokens / 1e7)) * 10_000_000, context),
        prompts=workload.prompts,
        group_size=workload.group_size,
        max_staleness=staleness,
        interrupts=interrupts,
        failures_per_host_s=failures * FAILURES_PER_GPU_S * GPUS_PER_HOST,
        hosts=gpus // GPUS_PER_HOST,
        gpus_per_host=GPUS_PER_HOST,
    )
    return cluster.run(warm_up=2 * (staleness + 1), iterations=iterations)


def row(outcome: Outcome, sync: Outcome | None) -> dict[str, Any]:
    ratio = None if sync is None else round(sync.seconds_per_iteration / outcome.seconds_per_iteration, 2)
    return {
        "async_over_sync": ratio,
        "iterations_per_h": round(3600 / outcome.seconds_per_iteration, 2),
        "idle_fraction": round(sum(outcome.idle.values()), 3),
        **{f"idle_{cause}": round(value, 3) for cause, value in outcome.idle.items()},
    }


def published_runs(report: Report, names: Sequence[str], iterations: int, stalenesses: Sequence[int]) -> None:
    """Each workload at its published size; the source's own asynchronous runs had a staleness of up to 8."""
    for name in names:
        workload = WORKLOADS[name]
        sync = simulate(name, workload.gpus, 0, iterations)
        for staleness in stalenesses:
            outcome = sync if staleness == 0 else simulate(name, workload.gpus, staleness, iterations)
            published = workload.published if staleness == 8 else None
            report.add(
                "staleness", workload=name, gpus=workload.gpus, staleness=staleness, **row(outcome, sync),
                published=published, peak_rss_mib=0,
            )  # fmt: skip


def assumptions(report: Report, name: str, iterations: int) -> None:
    """What the assumed lengths and interruption change."""
    workload = WORKLOADS[name]
    for median in (2_000, 12_000):
        lengths = replace(workload.lengths, median=median)
        sync = simulate(name, workload.gpus, 0, iterations, lengths=lengths)
        for interrupts in (True, False):
            outcome = simulate(name, workload.gpus, 4, iterations, lengths=lengths, interrupts=interrupts)
            report.add(
                "lengths", workload=name, gpus=workload.gpus, staleness=4, median_tokens=median, interrupts=interrupts,
                **row(outcome, sync), peak_rss_mib=0,
            )  # fmt: skip


def sizes(report: Report, name: str, iterations: int, largest: int) -> None:
    """The same batch on more GPUs, and with hosts that fail so often that some do while it is counted."""
    for gpus in (size for size in (64, 256, 1024, 4096) if size <= largest):
        sync = simulate(name, gpus, 0, iterations)
        for failures in (0.0, 300.0):
            outcome = simulate(name, gpus, 4, iterations, failures=failures)
            report.add(
                "sizes", workload=name, gpus=gpus, staleness=4, failure_rate=failures, lost_hosts=outcome.lost_hosts,
                **row(outcome, sync), peak_rss_mib=0,
            )  # fmt: skip


def small_run(report: Report, iterations: int) -> None:
    """A run that was measured: `async_overlap --engine sglang --rollout-to-update 2`, in its seconds × 25.

    There an update took 0.24 s, a sync 0.04 s, and the longest of 128 completions 0.43 s, at any load.
    """
    measured = {1: 1.92, 2: 2.67, 4: 2.51, 8: 3.30}  # benchmarks/README.md
    cap = 10_750  # steps of 1 ms
    lengths = Lengths(median=cap / 8.4, sigma=0.8, cap=cap, prompt=1)  # as lognormal_lengths: of 128 one has the cap
    free = Hardware(1.0, 1e-6, 1, 1e12, 1e30, 1.0, 1e30, step_overhead_s=0.001)  # steps take their overhead alone
    sync: Outcome | None = None
    for staleness in (0, *measured):
        cluster = SimulatedCluster(
            free, lengths, servers=[0], ranks=1, is_colocated=False, update_s=lambda tokens: 5.9, prompts=16,
            group_size=8, max_staleness=staleness, gpus_per_host=2,
        )  # fmt: skip
        outcome = cluster.run(warm_up=staleness + 1, iterations=20 * iterations)
        sync = sync or outcome
        values = row(outcome, sync) | {"idle_rollout": round(2 * outcome.idle["rollout"], 3)}  # of the trainer's time
        report.add(
            "small run", workload="async_overlap", gpus=2, staleness=staleness, **values,
            published=measured.get(staleness), peak_rss_mib=0,
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--iterations", type=int, default=16, help="counted, after those of the start")
    parser.add_argument("--tables", default="small,staleness,lengths,sizes")
    parser.add_argument("--staleness", default=f"0,1,2,4,8,{UNLIMITED}", help="of the first table")
    parser.add_argument("--largest", type=int, default=4096, help="number of GPUs")
    parser.add_argument("--quick", action="store_true", help="one workload, few iterations, up to 256 GPUs")
    given = parser.parse_args(arguments)
    names = ["math-1.5b"] if given.quick else given.workloads.split(",")
    iterations, largest = (2, 256) if given.quick else (given.iterations, given.largest)
    report = Report(
        "cluster_sim",
        assumed={**vars(Machine()), "prefill_mfu": PREFILL_MFU, "score_of_update": SCORE_OF_UPDATE,
                 **vars(LONG), **Hardware.assumed(), "prompts": 512, "group_size": 16},
    )  # fmt: skip
    stalenesses = [int(eta) for eta in given.staleness.split(",")]
    tables = {
        "small": lambda: small_run(report, iterations),
        "staleness": lambda: published_runs(report, names, iterations, stalenesses),
        "lengths": lambda: assumptions(report, names[0], iterations),
        "sizes": lambda: sizes(report, names[-1], iterations, largest),
    }
    for table in given.tables.split(","):
        tables[table]()
    report.finish(
        ["workload", "gpus", "staleness", "median_tokens", "interrupts", "failure_rate", "lost_hosts",
         "async_over_sync", "published", "iterations_per_h", "idle_fraction", "idle_rollout", "idle_tail", "idle_sync",
         "idle_lost"]
    )  # fmt: skip


if __name__ == "__main__":
    main()
