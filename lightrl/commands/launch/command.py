"""lightrl launch: places the ranks and servers of a run, and starts them or submits them as a job."""

from __future__ import annotations

import functools
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from lightrl.checks.files import host_names
from lightrl.checks.printable import count_text
from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError, keep_texts, to_plain
from lightrl.commands.console import reported
from lightrl.commands.launch.launcher import Launcher, make_folder, write_files
from lightrl.commands.launch.local import LocalLauncher
from lightrl.commands.launch.plan import Plan, describe, facts_of, make_plan
from lightrl.commands.launch.ray import RayLauncher
from lightrl.commands.launch.scripts import KubernetesLauncher, TorchrunLauncher
from lightrl.commands.launch.settings import Launch
from lightrl.commands.launch.slurm import SlurmLauncher
from lightrl.plan import TrainerSettings, UnknownMemory, planned
from lightrl.trajectory import JsonMapping, JsonObject

_HELP = """\
usage: lightrl launch --config run.yaml [--setting value ...] [--dry-run] [--wait]

Starts the trainer ranks and servers of a run, on one machine or many, as set in the config's `launch:` section. Accepts
the settings of lightrl fit; lightrl fit --launch.help shows the launch's own, such as --launch.nodes.

  --dry-run   print the plan as a drawing of the hosts and a table, and the files that would be submitted
  --wait      with Slurm: wait until the job ends, show rank 0's output, and cancel the job on Ctrl-C

lightrl status FOLDER shows the state of the run; docs/clusters.md has an example for each launcher.
"""
NO_GPU = "trainer.accelerator is auto and this machine has no GPU: CPUs are assumed. Set it to gpu to plan for GPUs."
PORT, NUM_PORTS = 29500, 64  # defaults; see Launch.port
_FIRST, _LAST = 20000, 32000  # below the ports that systems assign to outgoing connections
LAUNCHERS: dict[str, Callable[..., Launcher]] = {
    "local": LocalLauncher,
    "torchrun": TorchrunLauncher,
    "slurm": SlurmLauncher,
    "kubernetes": KubernetesLauncher,
    "ray": RayLauncher,
}


class UnstartedCLI(LightRLCLI):
    """Builds model, data, engine and callbacks as `lightrl fit` does, but no trainer, so that no GPU is needed."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return TrainerSettings.of(self.config_init[self.config.subcommand].trainer)

    def before_fit(self) -> None:
        """Does nothing: a plan needs no checkpoint and has no run folder."""

    after_fit = before_fit


class LaunchedCLI(UnstartedCLI):
    """Builds the run with the ranks, servers and strategy that the plan of its `launch:` section sets."""

    launched: Plan | None = None

    def before_instantiate_classes(self) -> None:
        """Applies the settings from a preliminary plan; memory is checked later, when the models have been built."""
        settings = self.config[self.config.subcommand]
        if settings.get("launch") is None:
            return
        self.given, self.given_text = settings.as_dict(), self.config_text()
        values = {**self.given, "launch": {**self.given["launch"], "gpu_memory_gb": None}}
        self.launched = plan_of(values, folder="launch-N", is_shown=True)
        parser, layout = self._subcommand_parsers[self.config.subcommand], dict(self.launched.settings)
        merged = parser.parse_object(keep_texts(layout), keep_texts(settings))
        self.config[self.config.subcommand] = to_plain(merged)

    def fit(self, **kwargs: object) -> None:
        """Starts nothing."""

    def memory_facts(self) -> JsonObject:
        """Returns the fields of RunFacts that the planner needs to check memory."""
        try:
            return {"planned": planned(self.model, self.trainer, self.datamodule)}
        except UnknownMemory as error:
            return {"unknown": str(error)}


def plan_of(
    settings: JsonMapping,
    *,
    folder: str,
    is_shown: bool = False,
    memory: JsonMapping | None = None,
    is_dry: bool = False,
) -> Plan:
    """Plans a parsed configuration; raises ValueError if it does not fit.

    Args:
        memory: the fields of RunFacts that the memory check needs; None skips the check.
        is_shown: whether the plan is only shown; unknown hosts are then called `node1` and so on.
        is_dry: whether nothing will be started; this machine then does not need the GPUs.
    """
    launch = Launch.of(settings["launch"])
    facts = replace(facts_of(settings), **(memory or {}))
    unassigned = [] if is_shown else host_names(launch.nodes)
    hosts_by_launcher = {"local": ["127.0.0.1"], "slurm": unassigned, "ray": unassigned}
    is_local = launch.launcher == "local"
    num_gpus = torch.cuda.device_count() if is_local and not facts.on_cpu else None
    if num_gpus == 0 and facts.device_note:  # the accelerator is auto: use the CPU, as Lightning does
        facts = replace(facts, on_cpu=True, device_note=NO_GPU)
    elif num_gpus is not None:
        problem = ""
        if num_gpus < (needed := launch.gpus_per_node or 1):
            problem = f"launch.gpus_per_node={needed}, but torch sees {count_text(num_gpus, 'GPU')} on this machine."
            problem += " Lower it, or set launch.launcher to one that starts the run elsewhere."
        if problem and not (is_shown or is_dry):
            raise ValueError(problem)
        facts = replace(facts, device_note=problem)
    try:
        return make_plan(
            launch,
            facts,
            folder=folder,
            hosts=hosts_by_launcher.get(launch.launcher, launch.hosts),
            gpus_per_host=num_gpus,
            port=launch.port or (free_ports(NUM_PORTS) if is_local else PORT),
            python="python" if launch.container else sys.executable,
        )
    except ValueError as error:
        # an allocation sets these values, so the message must name it instead of launch.ranks and so on
        text = re.sub(r"launch\.(?=(ranks|servers|tp|placement)\b)", "", str(error))
        if launch.allocation is None or text == str(error):
            raise
        raise ValueError(f"launch.allocation={launch.allocation!r} does not fit: {text}") from None


def launch(args: Sequence[str]) -> int:
    """Plans a run and starts it, or only prints the plan with `--dry-run`; returns the exit code."""
    words = [word for word in args if word not in ("--dry-run", "--wait")]
    cli = LaunchedCLI(["fit", *words])
    if cli.launched is None:
        raise UsageError("lightrl launch needs a `launch:` section in the YAML, or flags such as --launch.servers 1.")
    root = cli.launched.facts.root
    is_dry = "--dry-run" in args
    make = functools.partial(plan_of, cli.given, memory=cli.memory_facts(), is_dry=is_dry)
    plan = make(folder=str(Path(root).absolute() / "launch-N"))  # raises any error before a folder is made
    launcher = LAUNCHERS[plan.launch.launcher](plan)
    if not is_dry:
        plan = make(folder=str(make_folder(root)))
        launcher = LAUNCHERS[plan.launch.launcher](plan)
    sys.stdout.write(describe(make(folder=plan.folder, is_shown=True)))
    if is_dry:
        layout = {"layout.yaml": yaml.safe_dump(dict(plan.settings), sort_keys=False)}
        for name, text in {**layout, **launcher.files()}.items():
            sys.stdout.write(f"\n--- {plan.folder}/{name}\n{text}")
        return 0
    write_files(plan, cli.given_text, launcher.files())
    sys.stdout.write(f"\nLogs and status: lightrl status {plan.folder}\n")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    has_started = False
    try:
        launcher.start()
        if plan.launch.launcher == "torchrun":
            sys.stdout.write("After a failure, restart all scripts, the trainer's with `--ckpt_path last`.\n")
        has_started = True
        is_watched = plan.launch.launcher in ("local", "ray") or "--wait" in args
        return launcher.wait() if is_watched else 0
    except BaseException:  # the launcher must end everything it started, whatever interrupts it
        launcher.end()
        if not (has_started or any(Path(plan.folder).glob("*/*.log"))):  # for example, sbatch refused the job
            shutil.rmtree(plan.folder)
        raise


def run(args: Sequence[str]) -> int:
    """Runs `lightrl launch ARGS`; returns the run's exit code, 130 after Ctrl-C or SIGTERM, 2 for wrong arguments."""
    if not args or any(word in ("-h", "--help") for word in args):
        sys.stdout.write(_HELP)
        return 0

    def command(callbacks: Sequence[object]) -> int:
        try:
            return launch(args)
        except KeyboardInterrupt:
            sys.stderr.write("Stopped the launch.\n")
            return 130

    return reported(command)


def free_ports(number: int) -> int:
    """Returns the first of `number` consecutive ports that are free now."""
    for _ in range(100):
        first = random.SystemRandom().randrange(_FIRST, _LAST - number)
        if all(_is_free(port) for port in range(first, first + number)):
            return first
    raise OSError(f"There are no {number} consecutive free ports from {_FIRST} to {_LAST}. Set launch.port.")


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
