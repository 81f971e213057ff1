"""A plan as text: the hosts with what is on each GPU, and a table of the processes."""

from __future__ import annotations

from lightrl.checks.printable import count_text
from lightrl.launch.plan import Plan, Process

_MAX_HOSTS = 16  # drawn; of more the first and the last


def picture(plan: Plan) -> str:
    """One line per host, one cell per GPU.

    node1 | rank 0 | rank 1 | server 0 | server 0
    """
    cells = [["idle"] * plan.gpus_per_host for _ in plan.hosts]
    for process in plan.processes:
        for index, gpu in enumerate(process.gpus):
            row = cells[process.host]
            text = _text(plan, process, index)
            row[gpu] = text if row[gpu] == "idle" else f"{row[gpu]} + {text}"
    kind = "slot" if plan.on_cpu else "GPU"
    rows = [["", *(f"{kind} {gpu}" for gpu in range(plan.gpus_per_host))]]
    rows += [[host, *row] for host, row in zip(plan.hosts, cells, strict=True)]
    if len(rows) > _MAX_HOSTS + 1:
        rows[_MAX_HOSTS:-1] = [[f"... {len(rows) - 1 - _MAX_HOSTS} more", *([""] * plan.gpus_per_host)]]
    return _aligned(rows, " | ")


def table(plan: Plan) -> str:
    """One line per process: where it is, on which GPUs, and its log."""
    rows = [["process", "host", "CPU" if plan.on_cpu else "GPUs", "listens on", "log"]]
    for process in plan.processes:
        ports = [process.environment["MASTER_PORT"]] if process.rank_environment.get("RANK") == "0" else process.ports
        gpus = "-" if plan.on_cpu else ",".join(map(str, process.gpus))
        listens = f"{plan.hosts[process.host]}:{','.join(map(str, ports))}" if ports else "-"
        rows.append([process.name, plan.hosts[process.host], gpus, listens, plan.log_file(process)])
    return _aligned(rows, "  ")


def describe(plan: Plan) -> str:
    """The picture, the table, and what there is to know of the plan."""
    layout = plan.layout
    on = "" if plan.on_cpu else f", {plan.gpus_per_host} GPUs each"
    servers = count_text(layout.servers, "server")
    servers = f"; {servers} with tp={layout.tp}, {layout.placement}" if layout.servers else ""
    hosts, ranks = count_text(len(plan.hosts), "host"), count_text(layout.ranks, "trainer rank")
    head = f"{plan.launch.launcher}: {hosts}{on}; {ranks}{servers}"
    return "\n".join([head, "", picture(plan), "", table(plan), *(["", *plan.notes] if plan.notes else [])]) + "\n"


def _text(plan: Plan, process: Process, index: int) -> str:
    if process.role == "trainer":
        return f"rank {process.name.rpartition('-')[2]}"
    before = sum(len(one.ports) for one in plan.of("servers") if one.host < process.host)
    return f"server {before + index // plan.layout.tp}"


def _aligned(rows: list[list[str]], between: str) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        between.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
