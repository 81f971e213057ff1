"""The plan of a launch: which process runs on which host and GPUs, with which command, environment and addresses.

Planning starts nothing and inspects no machine. Trainer ranks come first, so that rank 0 is on the first host
(Lightning under Slurm takes the main address from there); servers use the remaining GPUs:

    nodes 2 × 4 GPUs, 4 ranks, 2 servers with tp 2      node 1: ranks 0 1 2 3      node 2: server 0 0, server 1 1
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Literal

from lightrl.checks.files import check_local
from lightrl.checks.printable import count_text
from lightrl.commands.launch.settings import Launch, Layout, Resources, allocation_of, layout_of
from lightrl.engines.servers.addresses import ADDRESS_VARIABLES
from lightrl.engines.servers.registry import SCHEME
from lightrl.models import RoleMesh
from lightrl.plan import NODE_RANKS, PlannedRun, memory_line, misfits, num_devices, num_nodes
from lightrl.strategies.parallel_3d import check_sizes
from lightrl.trajectory import JsonMapping, JsonObject

_GPUS_ASSUMED = "trainer.accelerator is auto: the hosts are assumed to have GPUs. Set it to cpu if they have none."
_MAX_HOSTS = 16  # maximum number shown: the first hosts and the last one
SERVER_OFFSET = 1  # the servers' ports come after the port for the trainer's store
# names in the launch's folder: the run's settings, the plan's changes to them, the folder in which servers register
CONFIG, LAYOUT, REGISTRY = "config.yaml", "layout.yaml", "servers"


@dataclass(frozen=True)
class RunFacts:
    """A run's settings for ranks, servers and models."""

    ranks: int = 1  # trainer.devices · trainer.num_nodes
    servers: int = 0  # started by the engine
    tp: int = 1  # GPUs per server
    strategy: str | None = None  # class name; None if the YAML leaves it to the trainer
    trainer_pp: int = 1
    trainer_tp: int = 1
    trainer_cp: int = 1
    trainer_ep: int = 1
    on_cpu: bool = False
    device_note: str = ""  # which devices are assumed, if the accelerator is auto; or which GPUs are missing
    engine: str | None = None  # class name
    has_urls: bool = False  # the servers are already running
    transport: str = "disk"
    weight_folder: str | None = None
    meshes: Mapping[str, RoleMesh] = field(default_factory=dict)  # role → mesh
    root: str = "."  # trainer.default_root_dir
    planned: PlannedRun | None = None  # the models and batch sizes, to estimate memory; None if unknown
    unknown: str = ""  # why `planned` is unknown


def facts_of(settings: JsonMapping) -> RunFacts:
    """Reads RunFacts from the parsed settings; raises ValueError if trainer.devices does not determine the ranks."""
    trainer = settings["trainer"]
    kind, strategy = _class(trainer.get("strategy"))
    engine_kind, engine = _class(trainer.get("engine"))
    _, model = _class(settings.get("model"))
    check_local(default_root_dir=trainer.get("default_root_dir"))
    return RunFacts(
        ranks=num_devices(trainer.get("devices")) * int(trainer.get("num_nodes") or 1),
        servers=int(engine.get("servers") or 0),
        tp=int(engine.get("tp") or 1),
        strategy=None if kind in (None, "auto") else kind,
        trainer_pp=int(strategy.get("pp") or 1),
        trainer_tp=int(strategy.get("tp") or 1),
        trainer_cp=int(strategy.get("cp") or 1),
        trainer_ep=int(strategy.get("ep") or 1),
        on_cpu=trainer.get("accelerator") == "cpu",
        device_note=_GPUS_ASSUMED if trainer.get("accelerator") in (None, "auto") else "",
        engine=engine_kind,
        has_urls=engine.get("urls") is not None,
        transport=engine.get("transport") or "disk",
        weight_folder=engine.get("weight_folder"),
        meshes={
            name: RoleMesh(**mesh) for name, value in model.items() if (mesh := _fields(_fields(value).get("mesh")))
        },
        root=str(trainer.get("default_root_dir") or "."),
    )


def _class(value: object) -> tuple[str | None, JsonMapping]:
    """Returns the class name and the arguments from `{class_path: …, init_args: …}` or from a bare class name."""
    if not isinstance(value, Mapping):
        return (None if value is None else str(value).rpartition(".")[2]), {}
    return str(value.get("class_path", "")).rpartition(".")[2], value.get("init_args") or {}


def _fields(value: object) -> JsonMapping:
    """Returns the fields of a role or model, which may be written as a class with its arguments."""
    if not isinstance(value, Mapping):
        return {}
    return value.get("init_args") or {} if "class_path" in value else value


@dataclass(frozen=True)
class Process:
    """One process of the plan."""

    name: str  # such as trainer-3
    role: Literal["trainer", "servers"]
    host: int  # index into Plan.hosts
    gpus: tuple[int, ...]  # numbers of the GPUs that it uses
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # variables added to the launcher's
    rank_environment: Mapping[str, str] = field(default_factory=dict)  # variables that torchrun sets; Slurm sets others
    ports: tuple[int, ...] = ()  # ports of the servers that it starts


@dataclass(frozen=True)
class Plan:
    """The processes of a launch, with their hosts and settings."""

    launch: Launch
    layout: Layout
    folder: str  # for logs and files; all hosts see it
    hosts: tuple[str, ...]
    port: int  # the trainer's store listens here
    gpus_per_host: int
    on_cpu: bool
    processes: tuple[Process, ...]
    settings: JsonMapping  # override the run's settings
    facts: RunFacts = field(default_factory=RunFacts)  # the run's settings before the plan overrides them
    notes: tuple[str, ...] = ()

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    def resources_of(self, process: Process) -> tuple[Resources, int]:
        """Returns what each rank or server in a process needs, and how many of them the process runs."""
        is_rank = process.role == "trainer"
        return (self.launch.rank_resources, 1) if is_rank else (self.launch.server_resources, len(process.ports))

    def of_memory(self, run: PlannedRun) -> PlannedRun:
        """Returns the run on the ranks and servers in this launch, to estimate its memory."""
        return _launched(run, self.launch, self.layout, _trainer_split(self.layout, self.facts))

    @property
    def ranks_per_host(self) -> int:
        return sum(process.host == 0 for process in self.of("trainer"))

    @property
    def trainer_hosts(self) -> int:
        return len({process.host for process in self.of("trainer")})

    def log_file(self, process: Process) -> str:
        """Returns the path of `HOST/NAME.log` in the folder."""
        return f"{self.folder}/{self.hosts[process.host]}/{process.name}.log"


def make_plan(
    launch: Launch,
    facts: RunFacts,
    *,
    folder: str,
    port: int,
    hosts: Sequence[str] = (),
    gpus_per_host: int | None = None,
    python: str = "python",
) -> Plan:
    """Places the ranks and servers of a run; raises ValueError if something does not fit, before anything is started.

    Args:
        folder: the launch's folder; all hosts must see it.
        port: port for the trainer's store on the first host; servers use the ports above it.
        hosts: names or addresses; by default `node1`, `node2` and so on.
        gpus_per_host: used if the launch does not set it.
        python: the interpreter on the hosts.
    """
    layout = layout_of(launch, ranks=facts.ranks, servers=facts.servers, tp=facts.tp)
    served = layout.servers * layout.tp if layout.placement == "separate" else 0
    needed = layout.ranks + (served and -layout.ranks % layout.tp) + served  # a server's first GPU is a multiple of tp
    gpus = launch.gpus_per_node or gpus_per_host or -(-needed // launch.nodes)
    split = _trainer_split(layout, facts)
    settings, notes = _changed_settings(layout, facts)
    notes += [facts.device_note] if facts.device_note else []
    ranks_of, servers_of = place(layout, launch.nodes, gpus, split[1])
    check_model(layout, facts, split)
    notes += [*_unused_sizes(launch, layout, facts), *check_memory(launch, layout, facts, split)]
    names = tuple(hosts) or tuple(f"node{number + 1}" for number in range(launch.nodes))
    processes = _trainers(ranks_of, names, port, facts.on_cpu, command_of("fit", folder, python))
    servers = _servers(servers_of, names, port, layout, facts, folder, python)
    if servers:
        url = f"{SCHEME}{folder}/{REGISTRY}?servers={layout.servers}"
        processes = [replace(one, environment={**one.environment, ADDRESS_VARIABLES[0]: url}) for one in processes]
        elsewhere = {one.host for one in servers} - {0}
        if elsewhere and facts.transport == "disk" and facts.weight_folder is None:
            settings["trainer"]["engine"]["init_args"]["weight_folder"] = f"{folder}/weights"
    used = {(host, gpu) for placed in (ranks_of, servers_of) for host in placed for gpu in sum(placed[host], ())}
    if idle := launch.nodes * gpus - len(used):
        notes.append(f"{idle} of {launch.nodes * gpus} {'slots' if facts.on_cpu else 'GPUs'} stay idle.")
    trainer = settings["trainer"]
    trainer["default_root_dir"] = str(PurePath(folder).parent)  # a process may start in another folder
    trainer["num_nodes"], trainer["devices"] = len(ranks_of), len(ranks_of[0])
    for one in (*processes, *servers):
        if taken := sorted(launch.environment.keys() & {**one.environment, **one.rank_environment}.keys()):
            raise ValueError(f"launch.environment has {taken[0]}, which the launch sets. Remove it.")
    everything = tuple(
        replace(one, environment={**launch.environment, **one.environment}) for one in (*processes, *servers)
    )
    return Plan(launch, layout, folder, names, port, gpus, facts.on_cpu, everything, settings, facts, tuple(notes))


def command_of(name: str, folder: str, python: str = "python", **settings: object) -> list[str]:
    """Returns the command line of `lightrl NAME` with the launch's configuration and these settings."""
    words = [word for file in (CONFIG, LAYOUT) for word in ("--config", f"{folder}/{file}")]
    words += [word for setting, value in settings.items() for word in (f"--{setting}", str(value))]
    return [python, "-m", "lightrl", name, *words]


Placed = dict[int, list[tuple[int, ...]]]  # host → GPUs of each rank or server on it


def place(layout: Layout, nodes: int, gpus: int, trainer_tp: int = 1) -> tuple[Placed, Placed]:
    """Returns the GPUs of each rank and of each server, by host; raises ValueError if they do not fit."""
    have = f"launch.nodes={nodes} with gpus_per_node={gpus}"
    if layout.ranks > nodes * gpus:
        ranks_text, need = count_text(layout.ranks, "trainer rank"), "needs" if layout.ranks == 1 else "need"
        needed = count_text(layout.ranks, "GPU")
        raise ValueError(f"{ranks_text} {need} {needed}, but {have} has {nodes * gpus}.")
    per_host = max(size for size in range(1, gpus + 1) if layout.ranks % size == 0)
    if layout.ranks // per_host > nodes:
        needed = f"{per_host} per host would need {layout.ranks // per_host} hosts. Change launch.ranks."
        raise ValueError(f"{layout.ranks} trainer ranks cannot be spread evenly over {have}: {needed}")
    if per_host % trainer_tp:
        why = "since tp communicates in every layer. Change tp, launch.ranks or launch.gpus_per_node."
        raise ValueError(f"The trainer's tp={trainer_tp} must divide the {per_host} ranks on a host, {why}")
    ranks: Placed = {host: [(gpu,) for gpu in range(per_host)] for host in range(layout.ranks // per_host)}
    if not layout.servers:
        return ranks, {}
    tp = layout.tp
    is_colocated = layout.placement == "colocated"
    if gpus % tp or (is_colocated and per_host % tp):
        raise ValueError(
            f"launch.tp={tp} must divide the {per_host if is_colocated else gpus} "
            f"{'trainer ranks' if is_colocated else 'GPUs'} on a host: a server cannot span hosts. Change launch.tp."
        )
    first = {host: len(ranks.get(host, ())) for host in range(nodes)}
    free = {host: range(first[host]) if is_colocated else range(-(-first[host] // tp) * tp, gpus) for host in first}
    slots = [
        (host, tuple(gpus_of[at : at + tp])) for host, gpus_of in free.items() for at in range(0, len(gpus_of), tp)
    ]
    if len(slots) < layout.servers:
        where = "on the trainer's GPUs" if is_colocated else f"next to {count_text(layout.ranks, 'trainer rank')}"
        raise ValueError(
            f"launch.servers={layout.servers} with tp={tp} needs {count_text(layout.servers * tp, 'GPU')} {where}, but "
            f"{have} has room for {count_text(len(slots), 'server')}. Lower launch.servers or launch.ranks, or add "
            "nodes."
        )
    servers: Placed = {}
    for host, share in slots[: layout.servers]:
        servers.setdefault(host, []).append(share)
    return ranks, servers


def _trainer_split(layout: Layout, facts: RunFacts) -> tuple[int, int]:
    pp = facts.trainer_pp if layout.trainer_pp is None else layout.trainer_pp
    return pp, facts.trainer_tp if layout.trainer_tp is None else layout.trainer_tp


def _changed_settings(layout: Layout, facts: RunFacts) -> tuple[JsonObject, list[str]]:
    """Returns the settings that this layout changes, with notes; raises ValueError if it contradicts the user's."""
    trainer: JsonObject = {}
    notes: list[str] = []
    strategy_split = (facts.trainer_pp, facts.trainer_tp)
    pp, tp = _trainer_split(layout, facts)
    if facts.strategy not in (None, "FSDP2Strategy", "Parallel3DStrategy") and layout.ranks > 1:
        raise ValueError(
            f"trainer.strategy={facts.strategy} cannot train on several ranks. Use FSDP2Strategy or Parallel3DStrategy."
        )
    if facts.strategy == "FSDP2Strategy" and pp * tp > 1:
        fix = "Remove trainer.strategy."
        raise ValueError(f"The allocation has p={pp} and t={tp}, but FSDP2Strategy supports neither. {fix}")
    if facts.strategy == "Parallel3DStrategy" and strategy_split != (pp, tp):
        raise ValueError(f"The allocation has p={pp} and t={tp}, but trainer.strategy (pp, tp)={strategy_split}.")
    # An allocation without c means cp 1, since it fixes dp; an allocation without e leaves ep to the strategy.
    for name, size, own, is_given in (
        ("cp", layout.cp, facts.trainer_cp, layout.trainer_pp is not None),
        ("ep", layout.ep, facts.trainer_ep, layout.ep > 1),
    ):
        if is_given and own > 1 and size != own:
            raise ValueError(f"The allocation has {name}={size}, but trainer.strategy has {name}={own}. Remove one.")
    sizes = {name: size for name, size in (("cp", layout.cp), ("ep", layout.ep)) if size > 1}
    name = "Parallel3DStrategy" if pp * tp > 1 else facts.strategy or "FSDP2Strategy"
    if facts.strategy is None and layout.ranks > 1:
        sizes = {"pp": pp, "tp": tp, **sizes} if pp * tp > 1 else sizes
        trainer["strategy"] = {"class_path": name, **({"init_args": sizes} if sizes else {})}
        notes.append(f"trainer.strategy is {name}, since several ranks share the model.")
    elif sizes:
        trainer["strategy"] = {"class_path": name, "init_args": sizes}
    if layout.servers:
        engine = facts.engine or layout.engine or "SGLangEngine"
        if layout.engine not in (None, engine):
            backend = {"SGLangEngine": "sglang", "VLLMEngine": "vllm"}.get(engine)
            other = f", or the allocation's backend to {backend}" if backend else ""
            raise ValueError(
                f"The allocation has servers of {layout.engine}, but trainer.engine is {engine}. Set trainer.engine to "
                f"{layout.engine}{other}."
            )
        if facts.has_urls:
            raise ValueError("trainer.engine has urls of running servers. Remove urls, or set launch.servers: 0.")
        if engine not in ("SGLangEngine", "VLLMEngine"):
            raise ValueError(
                f"launch.servers={layout.servers} needs an engine with servers, but trainer.engine is {engine}. "
                "Use SGLangEngine or VLLMEngine, or set launch.servers: 0."
            )
        if engine == "VLLMEngine" and layout.placement == "colocated":
            raise ValueError("launch.placement=colocated needs SGLangEngine: vLLM never frees memory. Use separate.")
        # the launch starts the servers; the engine finds them in its registry
        arguments = {"servers": None, "tp": layout.tp, "placement": layout.placement}
        trainer["engine"] = {"class_path": engine, "init_args": arguments}
    return {"trainer": trainer}, notes


def _trainers(placed: Placed, names: Sequence[str], port: int, on_cpu: bool, command: Sequence[str]) -> list[Process]:
    world = sum(len(groups) for groups in placed.values())
    processes: list[Process] = []
    for host, groups in placed.items():
        for local_rank, gpus in enumerate(groups):
            rank = len(processes)
            environment = {} if on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for (gpu,) in groups)}
            numbers: JsonObject = {}
            if world > 1:
                environment |= {"MASTER_ADDR": names[0], "MASTER_PORT": str(port)}
                numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": host, "WORLD_SIZE": world}
                numbers |= {"LOCAL_WORLD_SIZE": len(groups), "TORCHELASTIC_RUN_ID": "lightrl"}
            of_rank = {name: str(value) for name, value in numbers.items()}
            processes.append(Process(f"trainer-{rank}", "trainer", host, gpus, tuple(command), environment, of_rank))
    return processes


def _servers(
    placed: Placed,
    names: Sequence[str],
    port: int,
    layout: Layout,
    facts: RunFacts,
    folder: str,
    python: str,
) -> list[Process]:
    """Returns one `lightrl serve` per host with servers; its weight receiver uses the port after its last server's."""
    processes: list[Process] = []
    for number, (host, groups) in enumerate(placed.items()):
        ports = tuple(port + SERVER_OFFSET + index for index in range(len(groups)))
        gpus = tuple(gpu for group in groups for gpu in group)
        # leave_s is 0, since the servers stop only after the trainer
        settings: JsonObject = {
            "servers": len(groups), "tp": layout.tp, "host": names[host], "port": ports[0],
            "log_folder": f"{folder}/{names[host]}", "register": f"{folder}/{REGISTRY}", "leave_s": 0,
        }  # fmt: skip
        settings |= {} if facts.on_cpu else {"devices": ",".join(map(str, gpus))}
        settings |= {"server_args.enable_memory_saver": "true"} if layout.placement == "colocated" else {}
        command = tuple(command_of("serve", folder, python, **settings))
        processes.append(Process(f"servers-{number}", "servers", host, gpus, command, ports=ports))
    return processes


def check_model(layout: Layout, facts: RunFacts, split: tuple[int, int]) -> None:
    """Raises ValueError if the ranks, a mesh or the model's dimensions do not allow the layout; `split` is (pp, tp)."""
    pp, tp = split
    if layout.ranks % (pp * tp):
        raise ValueError(
            f"{count_text(layout.ranks, 'trainer rank')} cannot be split by pp={pp} · tp={tp} = {pp * tp}, which must "
            "divide them. Change launch.ranks, or pp and tp of trainer.strategy."
        )
    for role, mesh in facts.meshes.items():
        try:
            mesh.ranks(layout.ranks)
        except ValueError as error:
            ranks = count_text(layout.ranks, "rank")
            raise ValueError(f"model.{role}.mesh does not fit the launch's {ranks}: {error}") from error
    if facts.planned is None:
        return
    config = facts.planned.roles[0].config
    if pp * tp > 1:
        check_sizes(config, pp, tp, "1F1B", 1)
    heads = int(config.num_attention_heads)
    if layout.servers and heads % layout.tp:
        raise ValueError(f"launch.tp={layout.tp} must divide the model's {heads} attention heads.")


def _unused_sizes(launch: Launch, layout: Layout, facts: RunFacts) -> list[str]:
    """Returns a note for each of the run's own sizes that the launch overrides."""
    section = "launch" if launch.allocation is None else "launch.allocation"
    sizes = {
        "trainer.devices · trainer.num_nodes": (facts.ranks, layout.ranks, 1),
        "trainer.engine's servers": (facts.servers, layout.servers, 0),
        "trainer.engine's tp": (facts.tp, layout.tp, 1),
    }
    return [
        f"{name} is {given}, but has no effect: {section} sets it to {used}."
        for name, (given, used, default) in sizes.items()
        if given not in (used, default)
    ]


def _sizing(launch: Launch, run: PlannedRun) -> JsonObject:
    """Returns the settings in the `launch:` section that give a run its ranks and servers."""
    policy, engine = run.roles[0], run.engine
    is_served = engine is not None and engine.place == "servers" and engine.starts_servers
    servers, tp = (engine.servers, engine.tp) if engine is not None and is_served else (0, 1)
    needed = run.world if run.shares_gpus else run.world + servers * tp
    settings: JsonObject = {"nodes": max(launch.nodes, -(-needed // (launch.gpus_per_node or NODE_RANKS)))}
    if launch.allocation is None:
        return {"launch": {**settings, "ranks": run.world, **({"servers": servers, "tp": tp} if servers else {})}}
    placement: Literal["colocated", "separate"] = "colocated" if run.shares_gpus else "separate"
    name = engine.name if engine is not None and is_served else None
    layout = Layout(run.world, servers, tp, placement, policy.pp, policy.tp, policy.cp, run.ep, name)
    return {"launch": {**settings, "allocation": allocation_of(layout)}}


def _launched(run: PlannedRun, launch: Launch, layout: Layout, split: tuple[int, int]) -> PlannedRun:
    """Returns the run on the ranks and servers in this layout; `split` is (pp, tp)."""
    gpus = launch.gpus_per_node or NODE_RANKS
    run = replace(run, gpus_per_node=gpus)
    run = run if layout.ranks == run.world else run.over(layout.ranks, *split)
    roles = tuple(replace(role, cp=max(role.cp, layout.cp)) for role in run.roles)
    run = replace(run, ep=max(run.ep, layout.ep), roles=roles, sizing=functools.partial(_sizing, launch))
    run = replace(run, num_nodes=num_nodes(run.world, gpus))
    if run.engine is None or not layout.servers:
        return run
    return replace(run, engine=replace(run.engine, place="servers", servers=layout.servers, tp=layout.tp))


def check_memory(launch: Launch, layout: Layout, facts: RunFacts, split: tuple[int, int]) -> list[str]:
    """Returns a line about the memory that ranks and servers need; raises ValueError if a GPU has less."""
    if facts.planned is None:
        return [facts.unknown] if facts.unknown else []
    run = _launched(facts.planned, launch, layout, split)
    if launch.gpu_memory_gb is not None and not facts.on_cpu:
        for misfit in misfits(run, launch.gpu_memory_gb * 1e9):
            raise ValueError(f"launch.gpu_memory_gb={launch.gpu_memory_gb:g} is not enough: {misfit.text}.")
    return [memory_line(run)]


def drawing(plan: Plan) -> str:
    """Draws one line per host with one cell per GPU, such as `node1 | rank 0 | rank 1 | server 0 | server 0`."""
    cells = [["idle"] * plan.gpus_per_host for _ in plan.hosts]
    for process in plan.processes:
        for index, gpu in enumerate(process.gpus):
            row = cells[process.host]
            text = _cell_text(plan, process, index)
            row[gpu] = text if row[gpu] == "idle" else f"{row[gpu]} + {text}"
    kind = "slot" if plan.on_cpu else "GPU"
    rows = [["", *(f"{kind} {gpu}" for gpu in range(plan.gpus_per_host))]]
    rows += [[host, *row] for host, row in zip(plan.hosts, cells, strict=True)]
    if len(rows) > _MAX_HOSTS + 1:
        rows[_MAX_HOSTS:-1] = [[f"... {len(rows) - 1 - _MAX_HOSTS} more", *([""] * plan.gpus_per_host)]]
    return aligned(rows, " | ")


def table(plan: Plan) -> str:
    """Lists each process with its host, GPUs, port and log."""
    rows = [["process", "host", "CPU" if plan.on_cpu else "GPUs", "listens on", "log"]]
    for process in plan.processes:
        ports = [process.environment["MASTER_PORT"]] if process.rank_environment.get("RANK") == "0" else process.ports
        gpus = "-" if plan.on_cpu else ",".join(map(str, process.gpus))
        listens = f"{plan.hosts[process.host]}:{','.join(map(str, ports))}" if ports else "-"
        rows.append([process.name, plan.hosts[process.host], gpus, listens, plan.log_file(process)])
    return aligned(rows, "  ")


def describe(plan: Plan) -> str:
    layout = plan.layout
    on = "" if plan.on_cpu else f", {plan.gpus_per_host} GPUs each"
    servers = count_text(layout.servers, "server")
    servers = f"; {servers} with tp={layout.tp}, {layout.placement}" if layout.servers else ""
    hosts, ranks = count_text(len(plan.hosts), "host"), count_text(layout.ranks, "trainer rank")
    head = f"{plan.launch.launcher}: {hosts}{on}; {ranks}{servers}"
    return "\n".join([head, "", drawing(plan), "", table(plan), *(["", *plan.notes] if plan.notes else [])]) + "\n"


def _cell_text(plan: Plan, process: Process, index: int) -> str:
    if process.role == "trainer":
        return f"rank {process.name.rpartition('-')[2]}"
    before = sum(len(one.ports) for one in plan.of("servers") if one.host < process.host)
    return f"server {before + index // plan.layout.tp}"


def aligned(rows: Sequence[Sequence[str]], between: str) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        between.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
