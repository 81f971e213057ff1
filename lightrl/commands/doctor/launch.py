"""lightrl doctor launch: starts doctor/node.py on each node with the run's launcher, and compares the reports."""

from __future__ import annotations

import json
import math
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L

from lightrl.checks.bounds import check_positive
from lightrl.checks.files import with_hosts
from lightrl.checks.printable import count_text, end_of_log, one_period
from lightrl.commands.config_layers import UsageError
from lightrl.commands.doctor.node import SPEC_FILE, STEPS, NodeSpec, Report, wait_until
from lightrl.commands.doctor.run import Finding, check
from lightrl.commands.launch import (
    LAUNCHERS,
    NUM_PORTS,
    SERVER_OFFSET,
    LaunchedCLI,
    Plan,
    Process,
    Recover,
    aligned,
    plan_of,
    write_files,
)
from lightrl.concurrency.owner import own_prefix
from lightrl.module import RLModule
from lightrl.plan import bytes_text

_BY_HAND_S = 600.0  # time for a user to start torchrun's scripts
_LEAST_FREE = 0.9  # fraction of a GPU's memory
_CLOCK_S = 1.0
_LOG_BYTES, _LOG_LINES = 4096, 5
_LEAST_MIN = 10  # minutes of a Slurm job in addition to the time for the steps


def check_launch(args: Sequence[str], deadline_s: float, callbacks: Sequence[L.Callback]) -> int:
    """Starts the check on all nodes, waits for reports, and prints findings and a table; returns 1 if a check fails."""
    check_positive(deadline_s=deadline_s)
    cli = LaunchedCLI(["fit", *args], callbacks=callbacks)
    if cli.launched is None:
        raise UsageError("lightrl doctor launch needs a `launch:` section in the YAML, or flags like --launch.nodes.")
    if cli.launched.launch.launcher == "kubernetes":
        why = "does not support launcher: kubernetes, since pods get their nodes only when a run starts"
        fix = "Run `lightrl doctor run` in a pod with the run's image and volume instead."
        raise UsageError(f"lightrl doctor launch {why}. {fix}")
    root = Path(cli.launched.facts.root).absolute()
    planned = plan_of(cli.given, folder=str(root / "lightrl-doctor"))
    LAUNCHERS[planned.launch.launcher](planned)  # raises any error before a folder is made
    root.mkdir(parents=True, exist_ok=True)
    prefix = own_prefix("lightrl-doctor-", root)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as folder:
        run_plan = plan_of(cli.given, folder=folder)
        spec = spec_of(run_plan, _models(cli.model), deadline_s)
        (Path(folder) / SPEC_FILE).write_text(json.dumps(asdict(spec)))
        plan = check_plan(run_plan, deadline_s)
        _run_on_nodes(plan, spec)
        reports = [spec.read(node) for node in range(len(plan.hosts))]
        file = Path(folder) / "hosts"  # written by launchers that get their hosts from a scheduler
        hosts = file.read_text().split() if file.exists() else [*plan.hosts]
        hosts = [with_hosts(host, hosts) for host in plan.hosts]
        nums: Counter[str] = Counter()
        for finding in findings(spec, hosts, reports, _logs(plan, hosts)):
            nums[finding.status] += 1
            sys.stdout.write(f"{one_period(str(finding))}\n")
        for path in spec.folders.values():
            for node in range(len(hosts)):
                spec.probe(path, node).unlink(missing_ok=True)  # killed nodes leave their files behind
    totals = f"{nums['ok']} ok, {count_text(nums['warning'], 'warning')}, {nums['fails']} failed"
    sys.stdout.write(f"\n{table(spec, hosts, reports)}\n\n{totals}\n")
    return int(nums["fails"] > 0)


def _models(module: Any) -> dict[str, str]:
    roles: Mapping[str, Any] = module.models() if isinstance(module, RLModule) else module.planned_roles()
    return {name: role.spec.path for name, role in roles.items() if role.spec.path and role.spec.url is None}


def spec_of(plan: Plan, models: Mapping[str, str], deadline_s: float) -> NodeSpec:
    """Returns the instructions with which the nodes check a run's plan."""
    ports: list[list[int]] = [[] for _ in plan.hosts]
    gpus: list[set[int]] = [set() for _ in plan.hosts]
    for process in plan.processes:
        ports[process.host] += [*process.ports, *(process.ports[-1] + 1 for _ in process.ports[:1])]
        gpus[process.host] |= set() if plan.on_cpu else {*process.gpus}
    folders = {"trainer.default_root_dir": str(Path(plan.folder).parent)}
    if plan.facts.weight_folder is not None:
        folders["trainer.engine.weight_folder"] = plan.facts.weight_folder
    return NodeSpec(
        folder=plan.folder,
        # torchrun already listens on the plan's port, so that port works; use another one for the check
        port=plan.port + (NUM_PORTS if plan.launch.launcher == "torchrun" else 0),
        ports=[here or [plan.port + SERVER_OFFSET] for here in ports],
        num_gpus=[*map(len, gpus)],  # a process sees only these
        folders=folders,
        models=dict(models),
        deadline_s=deadline_s,
        servers_wait=plan.launch.launcher in ("local", "ray"),
    )


def check_plan(plan: Plan, deadline_s: float) -> Plan:
    """Returns a plan in which one process per host replaces the host's ranks or, if it has none, its servers.

    The process has the environment, container and options of the run, and the GPUs that the run uses on this host.
    """
    command = (plan.processes[0].command[0], "-m", "lightrl", "doctor", "node", plan.folder, *plan.hosts)
    processes = []
    for host in range(len(plan.hosts)):
        here = [one for one in plan.processes if one.host == host]
        is_server = not any(one.role == "trainer" for one in here)
        role: Any = "servers" if is_server else "trainer"
        processes.append(
            Process(
                name=f"{role}-{host}",
                role=role,
                host=host,
                gpus=tuple(sorted({gpu for one in here for gpu in one.gpus})) or (0,),
                command=(*command, *(["--node", str(host)] if is_server else [])),
                environment=plan.launch.environment,
                rank_environment={"RANK": str(host)},
                ports=tuple(port for one in here for port in one.ports) or (plan.port + SERVER_OFFSET,),
            )
        )
    minutes = str(_LEAST_MIN + math.ceil(len(STEPS) * deadline_s / 60)) if plan.launch.launcher == "slurm" else None
    launch = replace(plan.launch, time_limit=minutes, warning_s=10, recover=Recover())
    return replace(plan, launch=launch, processes=tuple(processes))


def _run_on_nodes(plan: Plan, spec: NodeSpec) -> None:
    launcher = LAUNCHERS[plan.launch.launcher](plan)
    write_files(plan, "", launcher.files())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.stdout.write(f"Checking {count_text(len(plan.hosts), 'node')} with launcher: {plan.launch.launcher}.\n")
    sys.stdout.flush()
    try:
        launcher.start()
        launcher.wait()
    except BaseException:  # the launcher must end everything it started, whatever interrupts it
        launcher.end()
        raise

    def are_done() -> bool:
        reports = [spec.read(node) for node in range(len(plan.hosts))]
        return all(report is not None and report.step == STEPS[-1] for report in reports)

    # a user starts torchrun's scripts; on a network file system, a report may appear after its process has ended
    wait_until(are_done, _BY_HAND_S if plan.launch.launcher == "torchrun" else 5.0)


def _logs(plan: Plan, hosts: Sequence[str]) -> list[str]:
    """Returns the end of each node's log, or of the job's log if the node has none."""
    ends = []
    for process in plan.processes:
        files = (Path(with_hosts(plan.log_file(process), hosts)), Path(plan.folder) / "job.log")
        lines = next((end_of_log(file, _LOG_BYTES).splitlines() for file in files if file.exists()), [])
        ends.append(" / ".join(lines[-_LOG_LINES:]))
    return ends


def findings(
    spec: NodeSpec, hosts: Sequence[str], reports: Sequence[Report | None], logs: Sequence[str]
) -> Iterator[Finding]:
    """Compares the reports from all nodes; each finding names the nodes."""
    present = {hosts[node]: report for node, report in enumerate(reports) if report is not None}
    for host, report, log in zip(hosts, reports, logs, strict=True):
        if report is None:
            fix = f"Check that {host} shares {Path(spec.folder).parent} with the other nodes. "
            fix += f"Its Python needs lightrl (launch.setup, launch.container). The end of its log: {log or 'empty'}"
            yield Finding("nodes", f"{host} did not report.", "fails", fix)
        elif report.step != STEPS[-1]:
            after = STEPS[STEPS.index(report.step) + 1]
            fix = f"Repeat with a larger --deadline_s if it is slow. The end of its log: {log or 'empty'}"
            yield Finding("nodes", f"{host} did not finish the step {after!r}.", "fails", fix)
    if len(present) == len(hosts):
        yield Finding("nodes", f"{count_text(len(hosts), 'node')} reported: {', '.join(present)}.")
    for area, text, fix in (problem for report in present.values() for problem in report.problems):
        yield Finding(area, text, "fails", fix)
    yield from _equal("versions", _versions(present), "Install the same versions on all nodes, or use one container.")
    yield from _gpu_findings(present)
    yield from _folder_findings(spec, hosts, reports)
    for role, path in spec.models.items():
        found = {host: report.models[role] for host, report in present.items() if role in report.models}
        fix = f"Put {path} on a shared folder, or the same files on all nodes."
        if found and not any(found.values()):
            text = f"{role}: no node has {path}; each node would download it."
            yield Finding("model", text, "warning", "Download it first to a folder or HF_HOME that all nodes share.")
        else:
            texts = {host: f"{path} {name or 'not found'}" for host, name in found.items()}
            yield from _equal("model", {role: texts}, fix)
    clocks = {host: report.clock_s for host, report in present.items() if report.clock_s is not None}
    wrong = [f"{host} {offset:+.1f} s" for host, (offset, error) in clocks.items() if abs(offset) - error > _CLOCK_S]
    differing = f"Clocks that differ from {hosts[0]}'s: {', '.join(wrong)}."
    text = differing if wrong else f"The clocks agree within {_CLOCK_S:g} s."
    fix = "Set up chrony or ntpd; otherwise, times in logs, the trace and lightrl status are wrong."
    if clocks:
        yield check("clocks", text, "warning", fix, is_wrong=bool(wrong))
    speeds = [report.bytes_per_s for report in present.values()]
    for name in dict.fromkeys(name for speed in speeds for name in speed):
        slowest = min(speed.get(name, 0.0) for speed in speeds)
        yield Finding("all_reduce", f"{name}: the slowest node sends {bytes_text(slowest)} per second.")


def _versions(present: Mapping[str, Report]) -> dict[str, dict[str, str]]:
    """Returns each package's version by node, and the version of NVIDIA's driver if any node has it."""
    versions: dict[str, dict[str, str]] = {}
    for host, report in present.items():
        for name, version in {**report.versions, "driver": report.driver}.items():
            versions.setdefault(name, {})[host] = version
    return {name: by_host for name, by_host in versions.items() if any(by_host.values())}


def _equal(area: str, values: Mapping[str, Mapping[str, str]], fix: str) -> Iterator[Finding]:
    """Reports each value that differs between nodes or, if none does, all values in one line."""
    differing = {name: by_host for name, by_host in values.items() if len(set(by_host.values())) > 1}
    for name, by_host in differing.items():
        hosts_by_value: dict[str, list[str]] = {}
        for host, value in by_host.items():
            hosts_by_value.setdefault(value or "none", []).append(host)
        text = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_by_value.items())
        yield Finding(area, f"{name} differs between nodes: {text}.", "fails", fix)
    equal = [f"{name} {next(iter(by_host.values()))}" for name, by_host in values.items() if by_host]
    if equal and not differing:
        yield Finding(area, f"The same on all nodes: {', '.join(equal)}.")


def _gpu_findings(present: Mapping[str, Report]) -> Iterator[Finding]:
    kinds = {host: ", ".join(sorted({name for name, *_ in report.gpus})) for host, report in present.items()}
    kinds = {host: kind for host, kind in kinds.items() if kind}
    if len(set(kinds.values())) > 1:
        text = "; ".join(f"{host} has {kind}" for host, kind in kinds.items())
        fix = "Ranks wait for the slowest: select one kind, for example with launch.options: {constraint: …}."
        yield Finding("GPUs", f"Nodes have different GPUs: {text}.", "warning", fix)
    for host, report in present.items():
        for index, (name, free, total) in enumerate(report.gpus):
            if free < _LEAST_FREE * total:
                text = f"{host}: GPU {index}, {name}, has {bytes_text(free)} of {bytes_text(total)} free."
                yield Finding("GPUs", text, "fails", f"Another process uses it: `nvidia-smi` on {host} shows which.")


def _folder_findings(spec: NodeSpec, hosts: Sequence[str], reports: Sequence[Report | None]) -> Iterator[Finding]:
    for setting, path in spec.folders.items():
        unseen = {
            hosts[node]: [hosts[other] for other in report.unseen[setting]]
            for node, report in enumerate(reports)
            if report is not None and setting in report.unseen
        }
        for host, others in unseen.items():
            text = f"{host} does not see the files from {', '.join(others)} in {setting}={path}."
            fix = f"Mount one shared disk at {path} on all nodes, or change {setting}."
            yield Finding("folders", text, "fails", fix)
        if not unseen and all(report is not None and report.step != STEPS[0] for report in reports):
            yield Finding("folders", f"All nodes can write and see each other's files in {setting}={path}.")


def table(spec: NodeSpec, hosts: Sequence[str], reports: Sequence[Report | None]) -> str:
    """Returns one line per node."""
    rows = [["node", "host", "GPUs", "least free", "driver", "clock", "reaches", "folders", "all_reduce"]]
    for host, report in zip(hosts, reports, strict=True):
        if report is None:
            rows.append([host, "no report", *["-"] * 7])
            continue
        num_shared = len(spec.folders) - len(report.unseen)
        is_far = STEPS.index(report.step) >= STEPS.index("network")
        gpus = Counter(name for name, *_ in report.gpus)
        rows.append([
            host,
            report.host,
            ", ".join(f"{num} x {name}" for name, num in gpus.items()) or "-",
            bytes_text(min(free for _, free, _ in report.gpus)) if gpus else "-",
            report.driver or "-",
            f"{report.clock_s[0] * 1e3:+.1f} ms" if report.clock_s is not None else "-",
            f"{len(report.reached)} of {len(hosts) - 1}" if is_far else "-",
            f"{num_shared} of {len(spec.folders)}" if report.step != STEPS[0] else "-",
            ", ".join(f"{name} {bytes_text(speed)}/s" for name, speed in report.bytes_per_s.items()) or "-",
        ])  # fmt: skip
    return aligned(rows, "  ")
