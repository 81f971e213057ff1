"""Launch: runs on one machine or many. A plan places the processes; launchers start and end them there.

Reading order:
    settings.py     Launch: the section `launch:` of the YAML, and AReaL's strings for the same
    plan.py         the run's facts; the plan: ranks and servers on hosts and GPUs, whether the model fits
    launcher.py     the protocol of launchers, the folder of a launch, its scripts and log files
    slurm.py        a job on a Slurm cluster; scripts.py: files for torchrun and Kubernetes
    local.py        processes on this machine; ray.py: the same on the hosts of a Ray cluster

May import: everything up to trainer. To add a launcher: write a class with the methods of Launcher in a file of at
most 250 lines, add its name to settings.py and commands/launch.py, a test, and a section to docs/clusters.md.
"""

from lightrl.launch.launcher import Launcher, make_folder, write_files
from lightrl.launch.local import LocalLauncher
from lightrl.launch.plan import Plan, describe, facts_of, make_plan
from lightrl.launch.settings import Launch

__all__ = ["Launch", "Launcher", "LocalLauncher", "Plan", "describe", "facts_of"]
__all__ += ["make_folder", "make_plan", "write_files"]
