"""Slurm on hosts in a box: a controller on node1, `slurmd` and `munged` on each; state is in each host's own /run."""

import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import hosts
from waits import comes_true

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "srun", "bash", "hostname")
_CONFIG = """\
ClusterName=box
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=/run/munge/socket,cred_expire=5
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=5
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
PropagateResourceLimits=NONE
NodeName=node[1-{num}] CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=node[1-{num}] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why this machine cannot have Slurm in a box; None if it can."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return hosts.why_not()


class Slurm(hosts.Hosts):
    """Hosts with Slurm; `folder` is for its configuration and logs."""

    def __init__(self, num: int, folder: Path) -> None:
        super().__init__(num, are_named=True)
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        super().__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self, *words: str, number: int = 1, timeout_s: float = 60, **options: Any) -> str:
        """The output of a command on a host, which must succeed."""
        options |= {"env": {**self.environment, **options.get("env", {})}, "text": True}
        if folder := options.pop("cwd", None):  # nsenter begins in /
            words = ("sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words)
        process = self.popen(number, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{words}: {output}"
        return str(output)

    def wait_for(self, job: str, state: str, timeout_s: float) -> None:
        """Waits until the job has this state."""

        def shown() -> str:
            return self.run("scontrol", "show", "job", job)

        assert comes_true(lambda: f"JobState={state} " in shown(), timeout_s, pause_s=0.2), shown()

    def _start_daemons(self) -> None:
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder, num=self.num))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for number in range(1, self.num + 1):
            begin = [
                "mkdir -m 755 -p /run/munge /run/slurmd /run/slurmctld",
                f"cp {key} /run/munge/key; chmod 400 /run/munge/key",
                "munged --force --key-file /run/munge/key --socket /run/munge/socket --pid-file /run/munge/pid"
                " --seed-file /run/munge/seed --log-file /run/munge/log",
                *(["slurmctld"] if number == 1 else []),
                f"slurmd -N node{number}",
            ]
            self.run("bash", "-ec", "\n".join(begin), number=number)

        def states() -> list[str]:
            return self.run("sinfo", "--noheader", "--Node", "--format=%t").split()

        assert comes_true(lambda: states() == ["idle"] * self.num, pause_s=0.2), states()
