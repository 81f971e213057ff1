"""RayLauncher: runs a plan on a Ray cluster, with one placement group, and a bundle and an actor for each host.

    launcher, Ray's driver ── actor on host 1 ── guard ── rank 0, rank 1
                           └─ actor on host 2 ── guard ── lightrl serve

An actor reserves CPUs, memory and GPUs for its host's processes, and starts, watches and ends them (see local.py).
When the launcher ends, Ray ends the actors, and the guards then end their processes. When a host is lost, Ray places
its bundle on another host; the launcher then restarts the host's servers or, if it had ranks, the whole run.

Ray Train is not used: it would train in a thread, where Lightning receives no signal to save a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightrl.commands.launch.launcher import with_addresses
from lightrl.commands.launch.local import LOST, GuardedProcesses, LocalLauncher
from lightrl.commands.launch.plan import Plan
from lightrl.errors import LightRLError
from lightrl.trajectory import JsonObject

_REACH_S = 10.0
_REPORT_EVERY_S = 30.0
_ATTEMPTS = 3  # maximum attempts to place an actor


class RayHost(GuardedProcesses):
    """The processes of a host, reached through its actor; if the host is lost, they count as failed."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self.is_lost = False
        self._actor = actor
        self._codes: dict[str, int | None] = {}

    def start(self, name: str, command: Sequence[str], **settings: object) -> None:
        self._codes[name] = None
        self._call("start", name, command, **settings)

    def codes(self) -> dict[str, int | None]:
        self._codes |= self._call("codes") or {}
        if self.is_lost:
            self._codes = {name: LOST if code is None else code for name, code in self._codes.items()}
        return self._codes

    def ask_to_end(self, names: Collection[str], grace_s: float) -> None:
        self._call("ask_to_end", names, grace_s)

    def kill(self, name: str) -> None:
        self._call("kill", name)

    def give_up(self) -> None:
        """Kills the actor, or withdraws the request for it."""
        import ray

        self.is_lost = True
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: object, **settings: object) -> Any:
        """Returns the actor's answer, or None if the host is lost; Ray notices a silent host after about a minute."""
        import ray

        if self.is_lost:
            return None
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments, **settings))
        except ray.exceptions.RayActorError:
            self.is_lost = True
            return None


class RayLauncher(LocalLauncher):
    """Starts a plan's processes on the hosts of a running Ray cluster."""

    def __init__(self, plan: Plan, *, write: Callable[[str], object] = sys.stderr.write) -> None:
        if unknown := sorted(plan.launch.options.keys() - {"address"}):
            raise ValueError(f"launch.options for ray must contain only address, got {', '.join(unknown)}.")
        super().__init__(plan, write=write)
        self.hosts = []
        self._unplaced = plan
        self.selectors = _selectors(plan)  # for each host of the plan: labels that its node must have
        self._group: Any = None
        self._actors: dict[int, RayHost] = {}  # plan's host → its actor
        self._places: dict[int, tuple[str, list[str]]] = {}  # plan's host → address and GPUs

    def files(self) -> Mapping[str, str]:
        """Returns the placement group that is requested from Ray."""
        group = {"strategy": "STRICT_SPREAD", "bundles": self.bundles(), "bundle_label_selector": self.selectors}
        return {"placement_group.yaml": yaml.safe_dump(group)}

    def bundles(self) -> list[dict[str, int]]:
        """Returns the resources of each host of the plan: CPUs, bytes of memory, and GPUs up to the last one used."""
        bundles = []
        for host in range(1 + max(one.host for one in self._unplaced.processes)):
            here = [one for one in self._unplaced.processes if one.host == host]
            gpus = 0 if self._unplaced.on_cpu else 1 + max(gpu for one in here for gpu in one.gpus)
            needs = [self._unplaced.resources_of(one) for one in here]
            memory = sum(round((each.memory_gb or 0) * 1e9) * number for each, number in needs)
            cpus = sum(1 if each.cpus is None else each.cpus * number for each, number in needs)
            bundles.append({"CPU": cpus} | ({"memory": memory} if memory else {}) | ({"GPU": gpus} if gpus else {}))
        return bundles

    def start(self) -> None:
        """Waits for the cluster's hosts, then starts the processes on them."""
        if self._group is None:
            self._connect()
            from ray.util.placement_group import placement_group

            name = Path(self.plan.folder).name
            selectors = {"bundle_label_selector": self.selectors} if any(self.selectors) else {}
            self._group = placement_group(self.bundles(), strategy="STRICT_SPREAD", name=name, **selectors)
        super().start()

    def end(self) -> None:
        super().end()
        if self._group is not None:
            import ray

            ray.shutdown()  # ends the actors and the placement group

    def _connect(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"launcher: ray needs Ray ({error}). Run `pip install ray` on all hosts.") from error
        handler = signal.getsignal(signal.SIGTERM)
        try:
            address = self.plan.launch.options.get("address") or os.environ.get("RAY_ADDRESS", "auto")
            host, _, port = address.rpartition(":")
            if host and "/" not in host:  # ray.init would retry for minutes
                socket.create_connection((host, int(port)), _REACH_S).close()
            ray.init(address=address, log_to_driver=False, logging_level="WARNING")
        except OSError as error:
            raise ValueError(
                f"launcher: ray finds no Ray cluster at {address} ({error}). Run `ray start --head` on one host and "
                "`ray start --address HEAD:6379` on the others, then lightrl launch on one of them, or set "
                "launch.options.address."
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # ray.init replaces it

    def _place(self, *, while_ranks_run: bool = False) -> None:
        """Creates an actor on each host that has none; waits until Ray has resources for all of them."""
        import ray

        for attempt in range(_ATTEMPTS):
            answers = self._create_actors()
            while answers and (
                waiting := ray.wait([*answers.values()], num_returns=len(answers), timeout=_REPORT_EVERY_S)[1]
            ):
                nodes = [_offered(node) for node in ray.nodes()]
                labels = f" with labels {self.selectors}" if any(self.selectors) else ""
                request = f"{len(waiting)} of these on separate hosts: {self.bundles()}{labels}"
                self._write(f"Ray has no resources yet for {request}. It has {nodes}.\n")
                if while_ranks_run and not self._ranks_run():
                    for index in answers:
                        self._actors[index].give_up()
                    return
            for index, answer in answers.items():
                try:
                    self._places[index] = ray.get(answer)
                except ray.exceptions.RayError as error:
                    if attempt == _ATTEMPTS - 1 or not isinstance(error, ray.exceptions.RayActorError):
                        raise LightRLError(f"Ray could not start the launch on a host: {error}") from error
                    self._actors[index].give_up()  # it was placed on a host that was already lost
            if not any(host.is_lost for host in self._actors.values()):
                break
        self.hosts = list(self._actors.values())
        addresses_and_gpus = [self._places[index] for index in range(len(self.hosts))]
        self.plan = with_addresses(self._unplaced, addresses_and_gpus)
        (Path(self.plan.folder) / "hosts").write_text("\n".join(host for host, _ in addresses_and_gpus))

    def _create_actors(self) -> dict[int, Any]:
        """Creates an actor for each host that has none; returns their pending replies: address and GPUs."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def where(_: object) -> tuple[str, list[str]]:
            return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

        answers = {}
        for index, bundle in enumerate(self.bundles()):
            if index not in self._actors or self._actors[index].is_lost:
                place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                needs = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "memory": bundle.get("memory")}
                actor = ray.remote(GuardedProcesses).options(**needs, scheduling_strategy=place).remote()
                self._actors[index] = RayHost(actor)
                answers[index] = actor.__ray_call__.remote(where)
        return answers


def _selectors(plan: Plan) -> list[dict[str, str]]:
    """Returns the labels of each host's node; raises ValueError if a host's ranks and servers need different ones."""
    selectors: list[dict[str, str]] = [{} for _ in range(1 + max(one.host for one in plan.processes))]
    for process in plan.processes:
        selector = selectors[process.host]
        for label, value in plan.resources_of(process)[0].node_selector.items():
            if selector.setdefault(label, value) != value:
                raise ValueError(
                    f"A host has ranks and servers, but launch.rank_resources and server_resources select nodes with "
                    f"{label}={selector[label]} and {label}={value}. Use equal labels, or hosts with only servers."
                )
    return selectors


def _offered(node: Mapping[str, Any]) -> JsonObject:
    """Returns a Ray node's resources, and the labels that a user gave it."""
    labels = {name: value for name, value in node.get("Labels", {}).items() if not name.startswith("ray.io/")}
    return {name: node["Resources"].get(name, 0) for name in ("CPU", "memory", "GPU")} | labels
