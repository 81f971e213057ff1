"""SlurmLauncher: runs the trainer and the servers as two concurrent steps of one Slurm job.

The trainer gets the job's first hosts. Lightning reads ranks from Slurm's variables; the main address is set here,
since Lightning would use the job's first host even if it has no ranks. With `server_options` the job has two
components with separate options.

    job.sh ── srun trainer.sh    one task per rank          warning before the time limit, or scancel of the job:
           └─ srun servers.sh    one task per host          the trainer saves its checkpoint and ends, the job is
                                 with servers               requeued if `recover` allows it

Slurm itself requeues a job whose host is lost. A requeued job continues from the newest checkpoint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from lightrl.commands.launch.launcher import FollowedLog, Launcher, LaunchState, inside, script_head
from lightrl.commands.launch.plan import Plan, Process
from lightrl.errors import LightRLError

_TICK_S = 1.0
_CALL_TIMEOUT_S = 60.0
_SERVERS_GRACE_S = 20
_FORBIDDEN = ("array", "nodes", "time", "signal", "requeue", "no-requeue", "output", "open-mode", "ntasks-per-node")
_STEP_OPTIONS = ("job-name", "nodes", "ntasks", "ntasks-per-node", "nodelist", "output", "het-group", "overlap")
_NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")

_JOB = """\
#!/bin/bash
{directives}
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then echo "A run cannot be a job array: submit each job separately." >&2; exit 2; fi
folder={folder}
hosts=($({hosts}))
for host in "${{hosts[@]}}"; do mkdir -p "$folder/$host"; done
export LIGHTRL_HOSTS="${{hosts[*]}}"
printf '%s\\n' "${{hosts[@]}}" > "$folder/hosts"
echo running > "$folder/state"
restarts=${{SLURM_RESTART_COUNT:-0}} is_late= is_canceled=
if [ "$restarts" -gt 0 ]; then export LIGHTRL_RESUME="{resume}"; fi
if [ "$restarts" -gt {retries} ]; then echo "Slurm requeued this more than recover.retries={retries} times."; exit 1; fi

signal_step() {{ [ -f "$folder/$2.step" ] && scancel --signal="$1" "$(cat "$folder/$2.step")"; }}
# signal the step, not srun, which kills its tasks on SIGTERM
trap 'is_late=yes; echo "The time limit is near: the run saves its checkpoint."; signal_step TERM trainer' USR1
trap 'is_canceled=yes; signal_step TERM trainer' TERM
finish() {{ while kill -0 "$1" 2>/dev/null; do wait "$1"; done; wait "$1"; }}  # wait also returns for a trapped signal

rm -f "$folder"/*.step
step=(srun --overlap --cpu-bind=none --kill-on-bad-exit=1 --open-mode=append{srun_options})
{steps}
finish $trainer; code=$?
{servers_end}
echo "exit code $code" > "$folder/state"
if [ -z "$is_canceled" ] && {{ [ -n "$is_late" ] || [ $code -ne 0 ]; }} && [ "$restarts" -lt {retries} ]; then
  echo "Requeued after $restarts restarts."
  echo requeued > "$folder/state"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


class SlurmLauncher(Launcher):
    """Submits a plan with sbatch; `wait` copies rank 0's output to stderr."""

    def __init__(self, plan: Plan) -> None:
        launch = plan.launch
        for section, options, forbidden in (
            ("options", [*launch.options, *launch.server_options], _FORBIDDEN),
            ("srun_options", [*launch.srun_options], _STEP_OPTIONS),
        ):
            if taken := [name for name in options if name in forbidden]:
                why = "; a run cannot be a job array" if taken[0] == "array" else ", which the launch sets"
                raise ValueError(f"launch.{section} has {taken[0]}{why}. Remove it.")
        self._is_apart = bool(plan.launch.server_options)  # servers are a separate component of the job
        if self._is_apart and {one.host for one in plan.of("servers")} != {*range(plan.trainer_hosts, len(plan.hosts))}:
            fix = "Change launch.nodes, ranks or servers, or remove server_options."
            raise ValueError(f"launch.server_options needs servers on exactly the hosts without ranks. {fix}")
        self.plan = plan
        self.job: str | None = None

    def files(self) -> Mapping[str, str]:
        servers = self.plan.of("servers")
        files = {"job.sh": self._job(), "trainer.sh": self._trainer()}
        return {**files, "servers.sh": self._servers(servers)} if servers else files

    def start(self) -> None:
        state = LaunchState(self.plan)
        self.job = _call("sbatch", "--parsable", f"{self.plan.folder}/job.sh").split(";")[0]
        state.set({}, state="submitted", job=self.job)
        sys.stderr.write(f"Submitted job {self.job}. squeue --job {self.job} shows it, scancel {self.job} ends it.\n")

    def wait(self) -> int:
        """Follows the job through its restarts until it ends; returns 0 if it completed."""
        log: FollowedLog | None = None
        shown = ""
        while True:
            match = re.search(r"JobState=(\w+)", _call("scontrol", "show", "job", str(self.job)))
            state = match[1] if match else "UNKNOWN"
            if state != shown:
                sys.stderr.write(f"job {self.job}: {state.lower()}\n")
                shown = state
            paths = list(Path(self.plan.folder).glob("*/trainer-0.log"))
            if log is None and paths:
                log = FollowedLog(paths[0], "trainer-0 | ", sys.stderr.write, from_start=True)
            if log is not None:
                log.follow()
            if state not in _NOT_ENDED:
                return 0 if state == "COMPLETED" else 1
            time.sleep(_TICK_S)

    def end(self) -> None:
        """Asks the trainer to save its checkpoint and exit; the job then ends."""
        if self.job is not None:
            _call("scancel", "--batch", "--signal=TERM", self.job)
            sys.stderr.write(f"Asked job {self.job} to end. scancel {self.job} ends it immediately.\n")

    def _job(self) -> str:
        plan, launch = self.plan, self.plan.launch
        options: dict[str, str | None] = {
            "job-name": "lightrl",
            "nodes": str(plan.trainer_hosts if self._is_apart else launch.nodes),
            "exclusive": None,
            "output": f"{plan.folder}/job.log",
            "open-mode": "append",
            "requeue" if launch.recover.retries else "no-requeue": None,
        }
        if not plan.on_cpu:
            options["gpus-per-node"] = str(plan.gpus_per_host)
        if launch.time_limit is not None:
            options |= {"time": launch.time_limit, "signal": f"B:USR1@{launch.warning_s}"}
        options |= {name: str(value) for name, value in launch.options.items()}
        directives = _directives(options)
        if self._is_apart:
            server_options = {**options, "nodes": str(launch.nodes - plan.trainer_hosts), **launch.server_options}
            server_options.pop("signal", None)  # only the first component needs it: the script runs there
            directives = f"{directives}\n#SBATCH hetjob\n{_directives(server_options)}"
        ranks, servers = len(plan.of("trainer")), plan.of("servers")
        groups = [f"--het-group={number} " if self._is_apart else "" for number in range(2)]
        steps = [_step_command("trainer", plan.of("trainer"), ranks, plan, groups[0])]
        steps += [_step_command("servers", servers, len(servers), plan, groups[1])] if servers else []
        ends = [
            "signal_step TERM servers",
            f"for _ in $(seq {_SERVERS_GRACE_S}); do kill -0 $servers 2>/dev/null || break; sleep 1; done",
            "signal_step KILL servers",
        ]
        parts = [f"_HET_GROUP_{number}" for number in range(2)] if self._is_apart else [""]
        return _JOB.format(
            directives=directives,
            hosts=";".join(f'scontrol show hostnames "$SLURM_JOB_NODELIST{part}"' for part in parts),
            folder=shlex.quote(plan.folder),
            resume="--ckpt_path last",
            srun_options="".join(f" {shlex.quote(option)}" for option in _words(launch.srun_options)),
            steps="\n".join(steps),
            servers_end="\n".join(ends) if servers else ":",
            retries=launch.recover.retries,
        )

    def _trainer(self) -> str:
        first = self.plan.of("trainer")[0]
        command = f"exec {inside(self.plan, first.command)} $LIGHTRL_RESUME"
        return "\n".join([*self._head("trainer", first), command]) + "\n"

    def _servers(self, servers: list[Process]) -> str:
        lines = self._head("servers", servers[0])
        lines += ['case "$SLURMD_NODENAME" in']
        lines += [f'  "{self.plan.hosts[one.host]}") exec {inside(self.plan, one.command)} ;;' for one in servers]
        return "\n".join([*lines, "esac"]) + "\n"

    def _head(self, step: str, process: Process) -> list[str]:
        """Returns the first lines of a step's script. They record the step's id, so that the job can signal it."""
        file = f"{shlex.quote(self.plan.folder)}/{step}.step"
        part = "_HET_GROUP_1" if self._is_apart and step == "servers" else ""  # scancel ignores ids such as 7+1.0
        note = f'[ "$SLURM_PROCID" != 0 ] || echo "$SLURM_JOB_ID{part}.$SLURM_STEP_ID" > {file}'
        return script_head(self.plan, process.environment, before=[note, "hosts=($LIGHTRL_HOSTS)"])


def _words(options: Mapping[str, str | None]) -> list[str]:
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]


def _directives(options: Mapping[str, str | None]) -> str:
    return "\n".join(f"#SBATCH {option}" for option in _words(options))


def _step_command(name: str, processes: list[Process], tasks: int, plan: Plan, group: str) -> str:
    hosts = sorted({one.host for one in processes})
    number = "%t" if name == "trainer" else "%n"
    words = [
        f'"${{step[@]}}" {group}--job-name={name}', f"--nodes={len(hosts)}", f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks // len(hosts)}", *([] if plan.on_cpu else [f"--gpus-per-node={plan.gpus_per_host}"]),
        f'--nodelist="{",".join(f"${{hosts[{host}]}}" for host in hosts)}"',
        f'--output="$folder/%N/{name}-{number}.log"', f'bash "$folder/{name}.sh" &',
    ]  # fmt: skip
    return " ".join(words) + f" {name}=$!"


def _call(*words: str) -> str:
    """Runs one of Slurm's commands and returns its output."""
    try:
        done = subprocess.run(words, capture_output=True, errors="replace", timeout=_CALL_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise ValueError(f"launcher: slurm needs the program {words[0]}, which is not installed here.") from error
    except subprocess.TimeoutExpired as error:
        raise LightRLError(f"{' '.join(words)} did not answer within {_CALL_TIMEOUT_S:g} s.") from error
    if done.returncode:
        raise LightRLError(f"{' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()
