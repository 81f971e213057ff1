"""Starts runs on one machine or many. A plan assigns processes to hosts; launchers start and stop them.

Reading order:
    settings.py     Launch: the `launch:` section of the YAML, and AReaL's allocation strings
    plan.py         which ranks and servers run on which hosts and GPUs, and whether the model fits
    launcher.py     the protocol for launchers, the folder of a launch, its scripts and log files
    slurm.py        a job on a Slurm cluster; scripts.py: files for torchrun and Kubernetes
    local.py        processes on this machine; ray.py: the same on the hosts of a Ray cluster
    command.py      the command line

May import whatever commands/ may. To add a launcher, write a class with Launcher's methods in a file of at most 250
lines, add its name to settings.py and command.py, a test, and a section to docs/clusters.md.
"""

from lightrl.commands.launch.command import LAUNCHERS, NO_GPU, NUM_PORTS, LaunchedCLI, launch, plan_of, run
from lightrl.commands.launch.launcher import write_files
from lightrl.commands.launch.plan import SERVER_OFFSET, Plan, Process, aligned, drawing
from lightrl.commands.launch.settings import Launch, Recover, layout_of

__all__ = ["LAUNCHERS", "NO_GPU", "NUM_PORTS", "SERVER_OFFSET", "Launch", "LaunchedCLI", "Plan", "Process", "Recover"]
__all__ += ["aligned", "drawing", "launch", "layout_of", "plan_of", "run", "write_files"]
