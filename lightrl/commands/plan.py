"""lightrl plan: shows an iteration's calls, memory by rank and server, communication and batch sizes, as text.

It also draws the calls with Mermaid. It parses and builds the configuration as `fit` does, but loads no weights.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.checks.bounds import check_positive
from lightrl.checks.printable import count_text
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported
from lightrl.commands.launch import NO_GPU, LaunchedCLI, aligned, drawing
from lightrl.data import TrajectoryDataModule
from lightrl.dataflow import DataFlowGraph, ModelCall
from lightrl.loops import devices_text
from lightrl.models import Role, RoleMesh
from lightrl.module import RLModule
from lightrl.plan import (
    DEFAULT_GPU,
    GPUS,
    USABLE_FRACTION,
    Choice,
    Misfit,
    PlannedRun,
    PlannedTime,
    UnknownMemory,
    bytes_text,
    choices,
    decoding_rows,
    engine_memory,
    misfits,
    planned,
    planned_time,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
    settings_of,
    settings_text,
    smallest,
)

_HELP = """\
usage: lightrl plan --config run.yaml [--gpu_memory_gb N] [--gpu KIND [--price_per_gpu_hour P]] [--write FILE]
                    [--setting value ...]

Shows the calls in an iteration with their inputs and outputs, models and devices, as text and as a Mermaid drawing.
Estimates all batch sizes and the memory of each rank and server by cause. If the config has a `launch:` section, the
plan also says where ranks and servers run. N is a GPU's memory in 1e9 bytes; the default is launch.gpu_memory_gb or the
memory of the trainer's GPU. If N is known, the plan says what does not fit, and lists the fastest layouts that do, on
the run's ranks and on the fewest ranks. --write FILE writes the settings of the first layout as YAML, to pass as
another --config. KIND is A100, H100, H200, B200 or L40S; the default is the trainer's GPU. If it is known, the plan
predicts the seconds of each phase, tokens per second and, with a price, the cost. Accepts the settings of lightrl fit
(lightrl fit --help), but loads no weights and starts nothing.

The exit code is 0 if the run fits or no GPU's memory is known, 1 if it does not fit, and 2 if a setting is wrong, if
the strategy cannot split the models, or if memory was given but a model cannot be read.
"""

_DRAWING = "drawing: paste this into https://mermaid.live, or on GitHub into a ```mermaid block"
_WHERE = {"generate": "engine", "train": "trainer, updated"}
_GATHERED = "gathered: the whole layers and gradients that a rank assembles from all ranks' shards to compute"
_WIDTH, _MAX_COLUMNS = 100, 4  # maximum characters per line, and columns of numbers per table


class PlanCLI(LaunchedCLI):
    """Prints the plan of the run that `fit` would start with the same arguments."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--gpu_memory_gb", type=float | None, default=None, help="memory per GPU, in 1e9 bytes")
        kinds: Any = Literal[tuple(GPUS)]
        parser.add_argument("--gpu", type=kinds | None, default=None, help="kind of GPU, for the time of an iteration")
        parser.add_argument("--write", type=str | None, default=None, help="file for the best layout's settings")
        parser.add_argument("--price_per_gpu_hour", type=float | None, default=None, help="for the cost; any currency")

    def fit(self, **kwargs: object) -> None:
        """Prints the plan instead of training."""
        check_positive(price_per_gpu_hour=self.config_init[self.config.subcommand].get("price_per_gpu_hour"))
        module, launched, device_bytes = self.model, self.launched, self._device_bytes()
        accelerator = self.config[self.config.subcommand].trainer.accelerator
        if isinstance(module, RLModule):
            graph = module.data_flow(from_file=isinstance(self.datamodule, TrajectoryDataModule))
            text, mermaid = plan_text(module, graph), [_DRAWING, plan_mermaid(graph)]
            if (tasks := getattr(self.datamodule, "tasks", None)) is not None:
                tasks.check(module)
            if tasks:
                text += "\n\n" + "\n".join(["tasks", *(f"  {line}" for line in tasks.lines(module))])
            try:
                where = f"devices\n  {devices_text(self.trainer)}"
            except ValueError as error:  # this machine has too few GPUs for the run's servers
                where = f"devices\n  {error}"
        elif isinstance(module, SupervisedModule):
            roles = role_lines(module.planned_roles(), {module.trained_role: module.lr})
            text, mermaid = "\n".join([f"{type(module).__name__}: batches of data, no rollouts", "", *roles]), []
            where = f"devices\n  trainer {self.trainer.strategy.root_device}"
        else:
            raise UsageError(f"lightrl plan needs an RLModule, SFT, DPO or RewardModel, got {type(module).__name__}.")
        if launched is not None:
            where = "\n".join(["launch", drawing(launched), *launched.notes])
        elif accelerator in (None, "auto") and self.trainer.strategy.root_device.type == "cpu":
            where += f"\n  {NO_GPU}"
        shown = [text, *mermaid, where]
        try:
            run = self._planned(reads_models=True)
        except UnknownMemory as error:
            sys.stdout.write("\n\n".join([*shown, _batches_text(self._planned(reads_models=False)), str(error)]) + "\n")
            if self._memory_gb is not None:
                raise UsageError("gpu_memory_gb was not checked, because a model cannot be read.") from None
            return
        except ValueError:  # the strategy cannot split the models
            sys.stdout.write("\n\n".join([*shown, _batches_text(self._planned(reads_models=False))]) + "\n")
            raise
        gpu = GPUS[self._kind or DEFAULT_GPU]
        misfit_list = [] if device_bytes is None else list(misfits(run, device_bytes, gpu))
        self.exit_code = int(bool(misfit_list))
        shown += [costs_text(run, device_bytes, misfit_list), self._time_text(run, device_bytes)]
        found: list[Choice] = []
        if device_bytes is not None:
            here, least = choices(run, device_bytes, gpu), smallest(run, device_bytes, gpu)
            found = [*here, *(choice for choice in least if choice.run.world != run.world)]
            shown.append(choices_text(run, found, self._kind))
        sys.stdout.write("\n\n".join(shown) + "\n")
        self._write(run, found)

    @property
    def _kind(self) -> str | None:
        """The kind of GPU that the user gave, or the trainer's if it is known."""
        on_gpu = self.trainer.strategy.root_device.type == "cuda" and torch.cuda.is_available()
        name = torch.cuda.get_device_name(0) if on_gpu else ""
        kind: str | None = self.config_init[self.config.subcommand].get("gpu")
        return kind or next((known for known, gpu in GPUS.items() if gpu.torch_name == name), None)

    def _time_text(self, run: PlannedRun, device_bytes: float | None) -> str:
        kind, on_gpu = self._kind, self.trainer.strategy.root_device.type == "cuda"
        price = self.config_init[self.config.subcommand].get("price_per_gpu_hour")
        if kind is None or not on_gpu:
            return f"how long? Pass --gpu, one of {', '.join(GPUS)}, and --trainer.accelerator gpu."
        return time_text(run, kind, planned_time(run, GPUS[kind], device_bytes), price)

    def _write(self, run: PlannedRun, found: Sequence[Choice]) -> None:
        path = self.config_init[self.config.subcommand].get("write")
        if path is None:
            return
        if not found:
            reason = "no layout fits" if self._device_bytes() else "it needs --gpu_memory_gb to find a layout that fits"
            raise UsageError(f"--write {path}: {reason}. Nothing was written.")
        best = found[0].run
        settings = settings_of(best, run)
        if self.launched is None and self.config[self.config.subcommand].trainer.devices in ("auto", -1, "-1"):
            ranks = {"devices": best.world // best.num_nodes, "num_nodes": best.num_nodes}
            settings["trainer"] = {**ranks, **settings.get("trainer", {})}  # `auto` would count this machine's GPUs
        head = "# Written by lightrl plan, to pass as another --config after the run's. Not tested.\n"
        Path(path).write_text(head + yaml.safe_dump(settings, sort_keys=False))

    def _planned(self, *, reads_models: bool) -> PlannedRun:
        run = planned(self.model, self.trainer, self.datamodule, reads_models=reads_models)
        return run if self.launched is None else self.launched.of_memory(run)

    @property
    def _memory_gb(self) -> float | None:
        """The memory of each GPU, in 1e9 bytes, if the user set it."""
        settings = self.config_init[self.config.subcommand]
        given: float | None = settings.get("gpu_memory_gb")
        return getattr(settings.get("launch"), "gpu_memory_gb", None) if given is None else given

    def _device_bytes(self) -> float | None:
        """Returns the memory of each GPU in bytes; None if it is not set and there is no GPU."""
        if self._memory_gb is not None:
            check_positive(gpu_memory_gb=self._memory_gb)
            return float(self._memory_gb) * 1e9
        is_here = self.trainer.strategy.root_device.type == "cuda" and torch.cuda.is_available()
        return float(torch.cuda.get_device_properties(0).total_memory) if is_here else None


def plan_text(module: RLModule, graph: DataFlowGraph) -> str:
    """Lists the roles with their models, and the calls in an order in which they can run."""
    lines = [f"{type(module).__name__}: {count_text(len(graph.calls), 'call')} per iteration", ""]
    lines += role_lines(module.models(), dict.fromkeys(module.trained_roles(), module.lr), module.saved_roles())
    rows = [("call", "on", "role", "needs -> gives")]
    for call in graph.calls:
        keys = f"{', '.join(call.inputs) or '-'} -> {', '.join(call.outputs) or '-'}"
        rows.append((call.name, where(call), call.role or "-", keys))
    return "\n".join([*lines, "", "calls", textwrap.indent(aligned(rows, "  "), "  ")])


def role_lines(roles: Mapping[str, Role], trained: Mapping[str, float], saved: Collection[str] = ()) -> list[str]:
    """Describes each role's model in one line; `trained` maps the trained roles to their learning rates."""
    lines = ["roles"]
    for name, role in roles.items():
        spec = role.spec
        source = spec.path or spec.url or f"random {(spec.config or {}).get('model_type')}"
        state = "follows the policy" if name in saved else "frozen"
        state = f"trained, lr {trained[name] if role.lr is None else role.lr:g}" if name in trained else state
        notes = [state, *(["one number per position"] if spec.head == "scalar" else [])]
        notes += ["kept in CPU memory between uses"] if role.offload else []
        notes += [_mesh_text(role.mesh)] if role.mesh is not None else []
        lines.append(f"  {name:<14} {source}: {', '.join(notes)}")
    return lines


def plan_mermaid(graph: DataFlowGraph) -> str:
    """Draws the graph as a Mermaid flowchart with keys on its edges, for a README or https://mermaid.live."""
    lines = ["flowchart LR"]
    for call in graph.calls:
        lines.append(f'  {call.name}["{call.name}<br/>{call.role or "no model"} on {where(call)}"]')
    for call in graph.calls:
        for name in graph.edges[call.name]:
            keys = [key for key in call.inputs if graph.producers.get(key) == name]
            lines.append(f'  {name} -- "{", ".join(keys)}" --> {call.name}' if keys else f"  {name} -.-> {call.name}")
    return "\n".join(lines)


def _mesh_text(mesh: RoleMesh) -> str:
    last = "the last" if mesh.num_ranks is None else str(mesh.first_rank + mesh.num_ranks - 1)
    ranks = f"rank {last}" if mesh.num_ranks == 1 else f"ranks {mesh.first_rank} to {last}"
    return ranks + "".join(f", {name} {size}" for name, size in (("pp", mesh.pp), ("tp", mesh.tp)) if size > 1)


def where(call: ModelCall) -> str:
    if call.url is not None:
        return "server"
    if call.role is None:
        places = {"reward": "reward processes", "advantages": "trainer, on the whole iteration"}
        return places.get(call.name, "its own thread")
    return _WHERE.get(call.kind, "trainer")


def run(args: Sequence[str]) -> int:
    if any(item in ("-h", "--help") for item in args):
        sys.stdout.write(_HELP)
        return 0
    return reported(lambda callbacks: PlanCLI(["fit", *args], callbacks=callbacks).exit_code)


def costs_text(run: PlannedRun, device_bytes: float | None, misfit_list: Sequence[Misfit]) -> str:
    """Formats all tables, and says whether the run fits into the memory of each device."""
    engine = _engine_text(run, device_bytes)
    parts = [_batches_text(run), _roles_text(run), _memory_text(run), engine, _fit_text(run, device_bytes, misfit_list)]
    return "\n\n".join(part for part in parts if part)


def time_text(run: PlannedRun, kind: str, time: PlannedTime, price: float | None) -> str:
    """Formats seconds by phase, tokens per second and, with a price, the cost."""
    gpu, unit = GPUS[kind], "iteration" if run.batches_per_update is None else "update"
    rows = [(name, f"{seconds:.3g} s", text) for name, seconds, text in time.phases]
    overlap = "the next rollout runs during the update; " if time.overlaps else ""
    per_s = f"{overlap}{time.tokens / time.total_s:,.0f} tokens/s, {time.trained_tokens / time.total_s:,.0f} trained"
    rows.append((unit, f"{time.total_s:.3g} s", per_s))
    if price is not None:
        each, per_million = time.cost(price)
        of = f"of {count_text(time.num_gpus, 'GPU')} at {price:g} an hour; {per_million:.3g} per million trained tokens"
        rows.append(("cost", f"{each:.3g}", of))
    peaks = (f"{gpu.flops_per_s / 1e12:g} TFLOP/s", f"{gpu.bytes_per_s / 1e12:g} TB/s")
    rates = ", ".join([*peaks, f"link {gpu.link_bytes_per_s / 1e9:g} GB/s"])
    assumed = "assumed: bfloat16, a model of 0.5e9 parameters or more, every trajectory of maximum length, rewards and "
    assumed += "environments that take no time"
    title = f"time of an {unit} on {kind} ({rates}), estimated; {assumed}"
    return _titled("\n  ".join(textwrap.wrap(title, _WIDTH)), rows, right=(1,))


def _batches_text(run: PlannedRun) -> str:
    return _titled("batch sizes", (batch_rows if run.batches_per_update is None else data_rows)(run), right=(1,))


def _roles_text(run: PlannedRun) -> str:
    rows = [("role", "parameters", "trained", "ranks", "pp · dp · tp", "sent per rank and update")]
    for role in run.roles:
        split = f"{role.pp} · {role.dp} · {role.tp}" + (f" · cp {role.cp}" if role.cp > 1 else "")
        sent = bytes_text(role_cost(run, role).sent)
        rows.append((role.name, f"{role.parameters:,}", f"{role.trained:,}", ranks_text(role.ranks), split, sent))
    return _titled("models", rows, right=(1, 2))


def _memory_text(run: PlannedRun) -> str:
    memories = rank_memories(run)
    blocks = []
    for place, name in (("device", "memory of a rank's device"), ("host", "host memory of a rank")):
        used = [getattr(memory, place) for memory in memories]
        causes = list(dict.fromkeys(cause for parts in used for cause in parts))
        if not causes:
            continue
        rows: list[tuple[str, ...]] = [("", *(ranks_text(memory.ranks) for memory in memories))]
        rows += [(cause, *(bytes_text(parts.get(cause, 0.0)) for parts in used)) for cause in causes]
        rows.append(("total", *(bytes_text(sum(parts.values())) for parts in used)))
        if len(memories) > _MAX_COLUMNS:  # leave out the last ranks
            rows = [(*row[:_MAX_COLUMNS], "" if index else "…") for index, row in enumerate(rows)]
        blocks.append(_titled(f"{name}, estimated", rows, right=range(1, len(memories) + 1)))
        if any(parts.get("gathered") for parts in used):
            blocks[-1] += f"\n  {_GATHERED}"
    return "\n\n".join(blocks)


def _engine_text(run: PlannedRun, device_bytes: float | None) -> str:
    engine = run.engine
    if engine is None:
        return ""
    weights, key_values = engine_memory(run, engine)
    num = rows_of(run, engine)
    device_texts = {"rank 0": "on rank 0's device", "elsewhere": "on a separate device"}
    where = device_texts.get(engine.place, f"servers: {engine.servers}, tp {engine.tp}")
    rows = [
        ("weights", bytes_text(weights), f"{run.roles[0].parameters:,} parameters of {engine.width} bytes"),
        ("KV cache", bytes_text(key_values), f"{num:,} concurrent trajectories of {run.longest:,} tokens"),
        ("one trajectory", bytes_text(engine_memory(run, engine, rows=1)[1]), f"of {run.longest:,} tokens"),
        *_waiting_rows(run, device_bytes),
        ("sent per iteration", bytes_text(weights * engine.tp * engine.servers), "whole weights, to all servers"),
    ]
    return _titled(f"engine: {engine.name}, {where}; each device", rows, right=(1,))


def choices_text(run: PlannedRun, found: Sequence[Choice], kind: str | None) -> str:
    """Lists the layouts that fit, what they need, and the settings that select them."""
    if not found:
        return "layouts that fit: none"
    by = f"estimated for the {kind or f'{DEFAULT_GPU}, since --gpu is not set'}"
    rows = [("ranks", "servers", "memory", "sent per update", "iteration", "settings to change")]
    for choice in found:
        engine = choice.run.engine
        is_served = engine is not None and engine.place == "servers"
        servers = f"{engine.servers} · tp {engine.tp}" if engine is not None and is_served else "-"
        sent, seconds = bytes_text(choice.sent), f"{choice.time.total_s:.3g} s"
        text = settings_text(choice.run, run) or "none"
        text = re.sub(r"trainer\.strategy's (\w+) to ", r"\1 ", text).replace(" and ", ", ")
        rows.append((f"{choice.run.world:,}", servers, bytes_text(choice.memory), sent, seconds, text))
    return _titled(f"layouts that fit, fastest first, {by}", rows, right=(0, 2, 3, 4))


def _waiting_rows(run: PlannedRun, device_bytes: float | None) -> list[tuple[str, str, str]]:
    """Returns a table row if a server's memory has no room for the KV cache of all its trajectories."""
    engine = run.engine
    if engine is None or engine.place != "servers" or device_bytes is None:
        return []
    num, total = decoding_rows(run, engine, device_bytes), rows_of(run, engine)
    how = f"generation takes up to {math.ceil(total / num)} times as long"
    fix = "Increase servers or tp, or lower max_new_tokens."
    text = f"of {total:,} trajectories of maximum length fit into a server; the others wait, so {how}. {fix}"
    return [("run at once", f"{num:,}", text)] if num < total else []


def _fit_text(run: PlannedRun, device_bytes: float | None, misfit_list: Sequence[Misfit]) -> str:
    if device_bytes is None:
        return "does it fit? Pass --gpu_memory_gb, in 1e9 bytes, to see what does not fit and what to change."
    wrap = textwrap.TextWrapper(_WIDTH, initial_indent="  ", subsequent_indent="    ").wrap
    lines = [line for misfit in misfit_list for line in wrap(misfit.text)]
    of = f"{bytes_text(USABLE_FRACTION * device_bytes)} usable of {bytes_text(device_bytes)}"
    waiting = "; some trajectories wait for others, see the engine" if _waiting_rows(run, device_bytes) else ""
    return "\n".join(["does not fit", *lines]) if lines else f"fits: {of} on each device{waiting}"


def _titled(title: str, rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Formats a table; right-aligns the columns in `right`, and wraps the text in the last column."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last + 1)]
    lines = [title]
    for row in rows:
        sized = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if index in right else cell.ljust(width) for index, (cell, width) in sized]
        start = "  " + "  ".join(cells[:-1]) + "  "
        text, text_width = cells[-1].rstrip(), _WIDTH - len(start)
        first, *others = [text] if len(text) <= text_width else textwrap.wrap(text, text_width)
        lines += [f"{start}{first}".rstrip(), *(" " * len(start) + other for other in others)]
    return "\n".join(lines)


def data_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """Returns the rows of `batch_rows` for a run that trains on data, without rollouts."""
    rows, dp, name = run.trajectories, run.roles[0].dp, "pairs" if run.group_size == 2 else "chats"
    numbers = [
        (f"{name} per batch", run.prompts or 1, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("batches per update", run.batches_per_update or 1, "trainer.accumulate_grad_batches"),
        ("tokens per row, at most", run.longest, run.prompt_source),
        ("tokens per batch, at most", rows * run.longest, f"{rows:,} · {run.longest:,}, padded to the longest"),
        ("  on each of the dp ranks", run.microbatch, f"{rows:,} rows / {dp}; one forward and backward"),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in numbers]


def batch_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """Returns the name, value and origin of each batch size; sizes per rank are for the policy's ranks."""
    prompts, total = run.prompts or 1, run.trajectories
    dp = run.roles[0].dp if run.roles else run.world
    update = math.ceil(total / run.num_minibatches)
    rank_tokens = math.ceil(update / dp) * run.longest
    in_flight, updates = run.max_staleness + 1, run.num_minibatches * run.update_epochs
    updates_text = f"num_minibatches · update_epochs = {run.num_minibatches} · {run.update_epochs}"
    microbatches = max(1, math.ceil(rank_tokens / run.microbatch))
    per_microbatch = f"{rank_tokens:,} tokens / {run.microbatch:,}; fewer if trajectories are shorter"
    longest = f"{run.prompt_tokens:,} of the prompt ({run.prompt_source}) + {run.new_tokens:,} new"
    rows = [
        ("prompts per iteration, P", prompts, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("trajectories per prompt, G", run.group_size, "model.group_size"),
        ("trajectories per iteration", total, f"P · G = {prompts} · {run.group_size}"),
        ("trajectories in flight, at most", total * in_flight, f"P · G · (max_staleness + 1) = {total} · {in_flight}"),
        ("tokens per trajectory, at most", run.longest, longest),
        ("tokens per iteration, at most", total * run.longest, f"{total:,} · {run.longest:,}"),
        ("updates per iteration", updates, updates_text),
        ("trajectories per update", update, f"{total:,} / num_minibatches = {total:,} / {run.num_minibatches}"),
        ("  on each of the dp ranks", math.ceil(update / dp), f"{update:,} / {dp}, balanced by tokens"),
        ("tokens per microbatch, at most", run.microbatch, "model.microbatch_tokens, but at least one trajectory"),
        ("microbatches per rank and update", microbatches, per_microbatch),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in rows]
