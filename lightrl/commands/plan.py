"""lightrl plan: what an iteration of a configuration computes from what, as text and as a Mermaid drawing, and what it
takes: memory of each rank and server, messages, batch sizes.

It parses and builds the configuration as `fit` does, but loads no weights and starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.checks.printable import count_text
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported
from lightrl.commands.launch import NO_GPU, LaunchedCLI
from lightrl.commands.plan_run import planned
from lightrl.commands.plan_tables import costs_text
from lightrl.data import TrajectoryDataModule
from lightrl.dataflow import DataFlowGraph, ModelCall
from lightrl.launch.picture import picture
from lightrl.loops import devices_text
from lightrl.models import Role, RoleMesh
from lightrl.module import RLModule

_HELP = """\
usage: lightrl plan --config run.yaml [--gpu_memory_gb N] [--setting value ...]

Shows what an iteration computes from what: models, calls, keys and devices, as text and as a Mermaid drawing; and, on
paper, all batch sizes, the memory of each rank and server by cause, and which setting makes fit what does not. A
section `launch:` says how many ranks and servers there are, and the plan where they are. N is a GPU's memory in 1e9
bytes; without it, launch.gpu_memory_gb or that of the trainer's GPU. Takes the settings of lightrl fit (lightrl fit
--help), but loads no weights and starts nothing.
"""

_DRAWING = "drawing: paste this into https://mermaid.live, or on GitHub into a ```mermaid block"
_WHERE = {"generate": "engine", "train": "trainer, updated"}


class PlanCLI(LaunchedCLI):
    """Prints the plan of the run that `fit` would make of the same arguments."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--gpu_memory_gb", type=float | None, default=None, help="of each GPU, in 1e9 bytes")

    def fit(self, **kwargs: Any) -> None:
        """Prints instead of training."""
        module, launched = self.model, self.launched
        if isinstance(module, RLModule):
            graph = module.data_flow(from_file=isinstance(self.datamodule, TrajectoryDataModule))
            text, drawing = plan_text(module, graph), [_DRAWING, plan_mermaid(graph)]
            where = "devices\n  " + self._devices_text()
        elif isinstance(module, SupervisedModule):
            roles = role_lines(module.planned_roles(), {module.trained_role: module.lr})
            text, drawing = "\n".join([f"{type(module).__name__}: batches of data, no rollouts", "", *roles]), []
            where = f"devices\n  trainer {self.trainer.strategy.root_device}"
        else:
            raise UsageError(f"lightrl plan needs an RLModule or SFT, DPO, RewardModel, got {type(module).__name__}.")
        if launched is not None:
            where = "\n".join(["launch", picture(launched), *launched.notes])
        elif self._is_assumed_cpu():
            where += f"\n  {NO_GPU}"
        try:
            run = planned(module, self.trainer, self.datamodule)
            assert run is not None
            costs = costs_text(run if launched is None else launched.of_memory(run), self._device_bytes())
        except ValueError as error:
            costs = str(error)
        sys.stdout.write("\n\n".join([text, where, costs, *drawing]) + "\n")

    def _devices_text(self) -> str:
        try:
            return devices_text(self.trainer)
        except ValueError as error:  # this machine has too few GPUs for the run's servers
            return str(error)

    def _is_assumed_cpu(self) -> bool:
        accelerator = self.config[self.config.subcommand].trainer.accelerator
        return accelerator in (None, "auto") and self.trainer.strategy.root_device.type == "cpu"

    def _device_bytes(self) -> float | None:
        """The memory of each GPU; None if there is none, and none is given."""
        settings = self.config_init[self.config.subcommand]
        given = settings.get("gpu_memory_gb") or getattr(settings.get("launch"), "gpu_memory_gb", None)
        if given is not None:
            return float(given) * 1e9
        is_here = self.trainer.strategy.root_device.type == "cuda" and torch.cuda.is_available()
        return float(torch.cuda.get_device_properties(0).total_memory) if is_here else None


def plan_text(module: RLModule, graph: DataFlowGraph) -> str:
    """The roles with their models, and the calls in an order in which they can run."""
    lines = [f"{type(module).__name__}: {count_text(len(graph.calls), 'call')} per iteration", ""]
    lines += role_lines(module.models(), dict.fromkeys(module.trained_roles(), module.lr), module.saved_roles())
    rows = [("call", "on", "role", "needs", "gives")]
    rows += [
        (call.name, where(call), call.role or "-", ", ".join(call.inputs) or "-", ", ".join(call.outputs) or "-")
        for call in graph.calls
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines += ["", "calls"]
    for row in rows:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"  {start}  {row[3]} -> {row[4]}")
    return "\n".join(lines)


def role_lines(roles: Mapping[str, Role], trained: Mapping[str, float], saved: Collection[str] = ()) -> list[str]:
    """A line per model; `trained` has the learning rates of those that are."""
    lines = ["roles"]
    for name, role in roles.items():
        spec = role.spec
        source = spec.path or spec.url or f"random {(spec.config or {}).get('model_type')}"
        state = "follows the policy" if name in saved else "frozen"
        state = f"trained, lr {trained[name] if role.lr is None else role.lr:g}" if name in trained else state
        notes = [state, *(["one number per position"] if spec.head == "scalar" else [])]
        notes += ["waits in CPU memory between uses"] if role.offload else []
        notes += [_mesh_text(role.mesh)] if role.mesh is not None else []
        lines.append(f"  {name:<14} {source}: {', '.join(notes)}")
    return lines


def plan_mermaid(graph: DataFlowGraph) -> str:
    """The graph as a Mermaid flowchart, for a README or https://mermaid.live; edges are labeled with keys."""
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
    """Names the place where a call runs."""
    own = {"reward": "reward processes", "advantages": "trainer, on the whole iteration"}
    if call.url is not None:
        return "server"
    if call.role is None:
        return own.get(call.name, "its own thread")
    return _WHERE.get(call.kind, "trainer")


def run(args: Sequence[str]) -> int:
    """Runs `lightrl plan` with these arguments; returns the exit code."""
    if any(item in ("-h", "--help") for item in args):
        sys.stdout.write(_HELP)
        return 0
    return reported(lambda callbacks: PlanCLI(["fit", *args], callbacks=callbacks).exit_code)
