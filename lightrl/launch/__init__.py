"""Launch: one run on one machine or many. A plan says who runs where; existing engines start and end the processes.

Reading order:
    settings.py     Launch: the section `launch:` of the YAML, and AReaL's strings for the same
    plan.py         the run's facts; the plan, pure: ranks and servers on hosts and GPUs, whether the model fits
    launcher.py     the protocol of launchers, the folder of a launch, its scripts and its followed output
    slurm.py        on other hosts; scripts.py: files for torchrun and Kubernetes
    local.py        on this machine; ray.py: as local.py, on the hosts of a Ray cluster

May import: everything up to trainer. To add a launcher: a class with the methods of Launcher in a file of at most 250
lines, its name in settings.py and commands/launch.py, a test, and a section in docs/clusters.md.
"""

from lightrl.launch.launcher import Launcher, make_folder, write_files
from lightrl.launch.local import LocalLauncher
from lightrl.launch.plan import Plan, describe, facts_of, make_plan
from lightrl.launch.settings import Launch

__all__ = ["Launch", "Launcher", "LocalLauncher", "Plan", "describe", "facts_of"]
__all__ += ["make_folder", "make_plan", "write_files"]
