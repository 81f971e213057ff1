"""Updates of one model by topology on this machine: tokens/s, memory of a rank, bytes sent, idle time of the pipeline.

    python -m benchmarks.parallel [--quick] [--topologies fsdp2,1-2-1,2-1-1i] [--cores 2] [--repeats 3]

The same work for all: an update (zeroed gradients, forward and backward of the microbatches, AdamW, no clipping) of a
float32 model on the same trajectories, all of one length. A topology is `fsdp2` on 2 ranks, or pp-dp-tp, with an i for
the interleaved schedule. The ranks of all contenders share `--cores` cores: one process has as many threads, p ranks
have cores / p each, at least one. So the result is overhead, not speed. `ratio` is tokens/s relative to one process,
whose updates take turns with the topology's; `cpu_ratio` is the processor time of one process over that of all ranks,
the steadier figure on a busy machine. Waiting threads sleep (OMP_WAIT_POLICY=passive).

    bytes     a TorchDispatchMode counts every collective and send of rank 0 (c10d and functional operators); a ring
              sends 2 (n - 1) / n of an all-reduce, (n - 1) / n of the whole of a gather or scatter, a broadcast once.
              `least` is the topology's minimum: over dp each held parameter gathered once and each gradient scattered
              once; over tp four pairs of gather and scatter for each layer and microbatch, and one at each end; over pp
              each activation and its gradient
    idle      1 - time inside forwards and backwards / wall time of the schedule, mean over the pipeline's ranks; on
              shared cores, waiting for a core counts as work. `replayed` puts each action's own processor time into the
              schedule's order instead, which other programs do not disturb; both next to (p - 1) / (v m + p - 1)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.packing import make_experience, weighted_sum
from benchmarks.report import Report, median_ratio, peak_rss_mib
from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import FSDP2Strategy, LogprobSettings, ProcessRanks, SingleModel
from lightrl.strategies.fsdp2_model import FSDP2Model
from lightrl.strategies.parallel_3d import Parallel3DModel
from lightrl.strategies.pipeline import Action, Pipeline, Slot, plan
from lightrl.strategies.ranks.processes import watch_all
from lightrl.strategies.stages import SplitModel, ends_group, split_model

COLLECTIVES = ("gather", "reduce", "scatter", "broadcast", "send", "alltoall", "all_to_all")
ALL = "fsdp2,1-2-1,1-1-2,2-1-1,2-1-1i,1-2-2,2-1-2,2-2-1,2-2-2"


@dataclass(frozen=True)
class Topology:
    """The topology of a contender; `(1, 1, 1)` is one process without a process group."""

    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    is_interleaved: bool = False

    @classmethod
    def named(cls, name: str) -> Topology:
        if name == "fsdp2":
            return cls(name, dp=2)
        pp, dp, tp = map(int, name.removesuffix("i").split("-"))
        return cls(name, pp, dp, tp, name.endswith("i"))

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.is_interleaved else 1


@dataclass(frozen=True)
class Task:
    """The work of every contender."""

    layers: int = 4
    hidden: int = 256
    vocab: int = 1024
    rows: int = 32
    length: int = 64  # prompt included
    microbatches: int = 8  # of all dp ranks together
    cores: int = 2

    def model(self) -> PreTrainedModel:
        config = AutoConfig.for_model(
            "qwen3", vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=8, num_key_value_heads=4,
            head_dim=self.hidden // 8, tie_word_embeddings=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        return model

    def parts(self, dp_rank: int, dp: int) -> list[Experience]:
        """The microbatches of one dp rank, with equally many rows in every topology."""
        prompt = self.length // 4
        whole = make_experience(prompt, [self.length - prompt] * self.rows, self.vocab)
        rows = torch.arange(self.rows).chunk(self.microbatches)
        return [whole.select(part.tolist()) for part in rows[dp_rank::dp]]

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends while active, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # DTensor turns it into collectives, which are counted
        result = func(*args, **(kwargs or {}))
        namespace, name = str(func._overloadpacket).split(".")[:2]
        if namespace in ("c10d", "_c10d_functional") and any(kind in name for kind in COLLECTIVES):
            self._count(name, [*args, *(kwargs or {}).values()], result)
        return result

    def _count(self, name: str, args: Any, result: Any) -> None:
        size = _group_size(name, args)
        input_bytes = sum(_num_bytes(value) for value in args[:1])
        if "reduce_scatter" in name:
            whole = _num_bytes(args[1]) if "_base_" in name or name.endswith("scatter_") else input_bytes
            share = (size - 1) / size
        elif "all_gather" in name or "allgather" in name:
            whole = _num_bytes(args[0]) if name.startswith(("_allgather", "allgather")) else _num_bytes(result)
            share = (size - 1) / size
        elif "all_reduce" in name or "allreduce" in name:
            whole, share = input_bytes, 2 * (size - 1) / size
        else:  # send, broadcast
            whole, share = input_bytes, 1.0
        self.sent[name] += round(whole * share)
        self.calls[name] += 1


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_num_bytes(part) for part in value) if isinstance(value, list | tuple) else 0


def _group_size(name: str, args: Any) -> int:
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return int(value.size())
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(dist.ProcessGroup.unbox(value).size())
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return int(dist.distributed_c10d._resolve_process_group(value).size())  # type: ignore[attr-defined]
    raise ValueError(
        f"{name} got {[type(value) for value in args]}, without a process group. Extend _group_size for this operator."
    )


@dataclass
class Timed:
    """Records the time of each action of a pipeline, and `wall_s` of the whole schedule."""

    pipeline: Pipeline

    def __post_init__(self) -> None:
        self.busy_s = self.wall_s = 0.0
        self.cpu_s: dict[Action, float] = {}
        self._run = self.pipeline.run
        self.pipeline.run = self.run  # type: ignore[method-assign]

    def run(self, num_microbatches: int, forward: Any, backward: Any, activation: Any) -> None:
        def timed(function: Callable[..., Any], is_backward: bool) -> Callable[..., Any]:
            def call(stage: int, microbatch: int, *args: Any) -> Any:
                start, cpu = time.perf_counter(), time.process_time()
                result = function(stage, microbatch, *args)
                self.busy_s += time.perf_counter() - start
                self.cpu_s[Action(is_backward, stage, microbatch)] = time.process_time() - cpu
                return result

            return call

        self.busy_s = 0.0
        start = time.perf_counter()
        later = None if backward is None else timed(backward, True)
        self._run(num_microbatches, timed(forward, False), later, activation)
        self.wall_s = time.perf_counter() - start


def idle_fraction(slots: Sequence[Slot], cost: Callable[[Action], float]) -> float:
    """Idle share of the ranks' time on a plan if each action took its cost and transfers took no time."""
    ends: dict[Action, float] = {}
    clock = [0.0] * len(slots[0])
    for rank, action in ((rank, action) for slot in slots for rank, action in enumerate(slot) if action is not None):
        clock[rank] = ends[action] = max(clock[rank], ends.get(action.previous, 0.0)) + cost(action)
    return 1 - sum(map(cost, ends)) / (len(clock) * max(clock))


def least_bytes(split: SplitModel, topology: Topology, task: Task) -> dict[str, int]:
    """The bytes that rank 0 of the topology must send in an update, by axis."""
    tokens = task.rows * (task.length - 1) // topology.dp  # a row's last token predicts nothing
    hidden = 4 * tokens * task.hidden  # of all microbatches of a dp rank, at one place of the model
    share = (topology.tp - 1) / topology.tp
    num_ends = sum((number == 0) + stage.is_last for number, stage in split.stages.items())
    numel_of = {name: value.numel() for name, value in split.whole.named_parameters()}
    parameters = sum(4 * numel for name, numel in numel_of.items() if split.stage_of[name] in split.stages)
    num_hops = 2 * len(split.stages) - num_ends
    layers = [layer for stage in split.stages.values() for layer in stage.body.layers]
    num_layers = sum(next(layer.parameters(), None) is not None for layer in layers)  # the others are identities
    return {
        "dp": round(2 * (topology.dp - 1) / topology.dp * parameters / topology.tp),
        "tp": round(share * hidden * (8 * num_layers + 2 * num_ends)),
        "pp": round(hidden / topology.tp * num_hops),
    }


class Contender:
    """One rank of a topology, ready to update."""

    def __init__(self, topology: Topology, task: Task, rank: int, store: str) -> None:
        torch.set_num_threads(max(1, task.cores // topology.size))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task.cores])
        self.topology, self.task = topology, task
        self.timed: Timed | None = None
        self.least: dict[str, int] = {}
        model = task.model()
        settings = LogprobSettings()
        self.model: Any
        if topology.size == 1:
            self.model = SingleModel(model, settings)
            self.model.forms.layouts = {}  # as for the others
        else:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=topology.size)
        if topology.name == "fsdp2":
            mesh = init_device_mesh("cpu", (topology.size,), mesh_dim_names=("dp",))
            strategy = FSDP2Strategy()
            strategy._mesh = mesh
            strategy.shard(model)
            control_group = dist.new_group(backend="gloo")
            watch = watch_all(control_group, main_address="127.0.0.1", hang_timeout_s=600.0)
            ranks = ProcessRanks(
                dp_group=mesh.get_group(), control_group=control_group, device=torch.device("cpu"), watch=watch
            )
            self.model = FSDP2Model(model, settings, ranks=ranks)
            total = sum(4 * value.numel() for value in model.parameters())
            self.least = {"dp": round(2 * (topology.dp - 1) / topology.dp * total), "tp": 0, "pp": 0}
        elif topology.size > 1:
            sizes = (topology.pp, topology.dp, topology.tp)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
            schedule = "Interleaved1F1B" if topology.is_interleaved else "1F1B"
            split = split_model(
                model, mesh, ends=ends_group(mesh), schedule=schedule, stages_per_rank=topology.stages_per_rank
            )
            self.model = Parallel3DModel(split, settings)
            self.timed = Timed(split.pipeline)
            self.least = least_bytes(split, topology, task)
        self.parts = task.parts(rank // topology.tp % topology.dp, topology.dp)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def update(self) -> None:
        def loss(part: Experience, outputs: Outputs) -> Tensor:
            return weighted_sum(part, outputs.logprobs) * (self.topology.dp / self.task.tokens)

        self.optimizer.zero_grad()
        self.model.forward_backward(self.parts, loss, Tensor.backward)
        self.optimizer.step()

    def measure(self, counts_bytes: bool) -> dict[str, Any]:
        if self.topology.size > 1:
            dist.barrier()
        results: dict[str, Any] = {}
        start, cpu = time.perf_counter(), time.process_time()
        if counts_bytes:
            with SentBytes() as counted:
                self.update()
            results = {"sent": dict(counted.sent), "calls": dict(counted.calls), "least": self.least}
        else:
            self.update()
        cpu = time.process_time() - cpu
        if self.topology.size > 1:
            dist.barrier()
        results |= {"cpu_seconds": cpu, "seconds": time.perf_counter() - start, "peak_rss_mib": peak_rss_mib()}
        if self.timed is not None:
            results |= {"idle": 1 - self.timed.busy_s / self.timed.wall_s, "cpu_s": self.timed.cpu_s}
        return results


def serve(topology: Topology, task: Task, rank: int, store: str, orders: Connection) -> None:
    """A rank's process: runs an update for each order, until None."""
    contender = Contender(topology, task, rank, store)
    orders.send(None)
    while (order := orders.recv()) is not None:
        orders.send(contender.measure(order))
    orders.close()
    os._exit(0)  # skips the shutdown of gloo's threads


class World:
    """The processes of one topology; waiting for orders uses no core."""

    def __init__(self, topology: Topology, task: Task, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.packing", "lightrl.strategies"])
        store = str(Path(folder) / f"store-{topology.name}")
        self.orders: list[Connection] = []
        self.processes = []
        for rank in range(topology.size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(topology, task, rank, store, there), daemon=True)
            process.start()
            there.close()
            self.orders.append(here)
            self.processes.append(process)
        for orders in self.orders:
            orders.recv()

    def update(self, *, counts_bytes: bool = False) -> list[dict[str, Any]]:
        """Each rank's measurements."""
        for orders in self.orders:
            orders.send(counts_bytes)
        return [orders.recv() for orders in self.orders]

    def close(self) -> None:
        for orders in self.orders:
            orders.send(None)
        for process in self.processes:
            process.join(10)


def measure(report: Report, topology: Topology, alone: World, task: Task, repeats: int, folder: str) -> float:
    """Adds the row of one topology; returns its ratio to one process."""
    world = World(topology, task, folder)
    counted = world.update(counts_bytes=True)[0]  # also warms up
    alone.update()
    updates: list[list[dict[str, Any]]] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    for index in range(repeats):
        for is_alone in (index % 2 == 0, index % 2 == 1):
            if is_alone:
                (one,) = alone.update()
                seconds.append(one["seconds"])
                cpu_seconds.append(one["cpu_seconds"])
            else:
                updates.append(world.update())
    world.close()
    own = [update[0]["seconds"] for update in updates]
    idle: dict[str, Any] = {}
    num = task.microbatches // topology.dp
    if topology.pp > 1:
        ranks = range(0, topology.size, topology.dp * topology.tp)  # of the first pipeline
        replayed = []
        idle_fractions = [statistics.mean(update[rank]["idle"] for rank in ranks) for update in updates]
        for update in updates:
            costs: dict[Action, float] = {}
            for rank in ranks:
                costs |= update[rank]["cpu_s"]
            replayed.append(idle_fraction(plan(topology.pp, topology.stages_per_rank, num), costs.__getitem__))
        steps = topology.stages_per_rank * num + topology.pp - 1
        idle = {
            "idle": round(statistics.median(idle_fractions), 3),
            "replayed": round(statistics.median(replayed), 3),
            "formula": round((topology.pp - 1) / steps, 3),
        }
    sent, least = sum(counted["sent"].values()), sum(counted["least"].values())
    ratio = median_ratio(seconds, own)
    cpu_ratio = median_ratio(cpu_seconds, [sum(rank["cpu_seconds"] for rank in update) for update in updates])["ratio"]
    report.add(
        "update",
        topology=topology.name,
        processes=topology.size,
        tokens_per_s=round(task.tokens / statistics.median(own)),
        **ratio,
        cpu_ratio=cpu_ratio,
        peak_rss_mib=round(max(rank["peak_rss_mib"] for update in updates for rank in update), 1),
        sent_mib=round(sent / 2**20, 3),
        least_mib=round(least / 2**20, 3),
        sent_over_least=round(sent / least, 3),
        collectives=sum(counted["calls"].values()),
        sent_by_kind={name: round(value / 2**20, 3) for name, value in sorted(counted["sent"].items())},
        least_by_axis={name: round(value / 2**20, 3) for name, value in counted["least"].items()},
        **idle,
    )
    return ratio["ratio"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", help="fsdp2 or pp-dp-tp, with an i for the interleaved schedule")
    parser.add_argument("--cores", type=int, default=2, help="that the processes of a contender share")
    parser.add_argument("--microbatches", type=int, default=8, help="of all dp ranks together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2-1-1 only, one round")
    given = parser.parse_args(arguments)
    task = Task(cores=given.cores, microbatches=given.microbatches)
    if given.quick:
        given.topologies, given.repeats = given.topologies or "2-1-1", 1
        task = Task(layers=2, hidden=32, vocab=32, rows=8, length=16, microbatches=4, cores=given.cores)
    os.environ["OMP_WAIT_POLICY"] = "passive"  # of the processes started below
    report = Report("parallel", dtype="float32", **vars(task))
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = World(Topology("1-1-1"), task, folder)
        first = alone.update()[0]
        report.add(
            "update",
            topology="1-1-1",
            processes=1,
            tokens_per_s=round(task.tokens / alone.update()[0]["seconds"]),
            peak_rss_mib=first["peak_rss_mib"],
        )
        for name in (given.topologies or ALL).split(","):
            ratios[f"ratio_{name}"] = measure(report, Topology.named(name), alone, task, given.repeats, folder)
        alone.close()
    report.finish(
        [
            "topology", "processes", "tokens_per_s", "ratio", "ratio_min", "ratio_max", "cpu_ratio", "peak_rss_mib",
            "sent_mib", "least_mib", "sent_over_least", "collectives", "idle", "replayed", "formula",
        ],
        **ratios,
    )  # fmt: skip


if __name__ == "__main__":
    main()
