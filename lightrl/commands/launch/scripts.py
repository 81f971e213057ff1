"""TorchrunLauncher and KubernetesLauncher: write files for another program; they start nothing.

TorchrunLauncher writes scripts that a user or another program starts on each host: one starts the host's ranks with
torchrun, and a separate one starts its servers.

KubernetesLauncher writes manifests: a TrainJob (Kubeflow Trainer 2.2) for ranks, a LeaderWorkerSet for servers. The
launch's folder is on a volume that all pods mount at the same path: the `options.claim` claim, mounted at the run's
root. Each server has its own pod and registers its address in the launch's folder. Sources:
https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go,
https://github.com/kubernetes-sigs/lws/blob/main/docs/examples/sglang/lws.yaml. Not tested on a cluster.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from lightrl.commands.launch.launcher import Launcher, LaunchState, inside, script_head
from lightrl.commands.launch.plan import REGISTRY, SERVER_OFFSET, Plan, Process, command_of
from lightrl.commands.launch.settings import Resources
from lightrl.concurrency import parent_guard
from lightrl.trajectory import JsonMapping, JsonObject


class TorchrunLauncher(Launcher):
    """Writes a plan's scripts for torchrun."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def files(self) -> Mapping[str, str]:
        """Returns `trainer-HOST.sh`, which passes its arguments to `lightrl fit`, and `servers-HOST.sh`."""
        return {name: self._script(process) for name, process in self._scripts().items()}

    def start(self) -> None:
        """Prints which script to start on which host."""
        LaunchState(self.plan).set({}, state="written")
        lines = [
            f"  on {self.plan.hosts[process.host]}:  bash {shlex.quote(f'{self.plan.folder}/{name}')}"
            for name, process in self._scripts().items()
        ]
        text = "\n".join(lines)
        sys.stdout.write(f"\nStart all of these now; each writes its log below {self.plan.folder}:\n{text}\n")

    def _scripts(self) -> dict[str, Process]:
        """Maps a script's name to its process, for each host and role; a host's first rank represents all its ranks."""
        scripts: dict[str, Process] = {}
        for process in self.plan.processes:
            scripts.setdefault(f"{process.role}-{self.plan.hosts[process.host]}.sh", process)
        return scripts

    def _script(self, process: Process) -> str:
        plan = self.plan
        name = process.role if process.role == "trainer" else process.name
        before = _log_lines(shlex.quote(f"{plan.folder}/{plan.hosts[process.host]}"), name)
        environment = {key: value for key, value in process.environment.items() if not key.startswith("MASTER_")}
        command = list(process.command)
        if process.role == "trainer":
            main = {"nnodes": plan.trainer_hosts, "nproc-per-node": plan.ranks_per_host, "node-rank": process.host}
            words = [f"--{key}={value}" for key, value in main.items()]
            words += [f"--master-addr={plan.hosts[0]}", f"--master-port={plan.port}"]
            # a rank must not outlive its torchrun, even if torchrun is killed
            guard = ["-m", parent_guard.__name__, "0", str(plan.launch.warning_s), ""]
            command = [command[0], "-m", "torch.distributed.run", *words, "--no-python", command[0], *guard, *command]
        end = ' "$@" < /dev/null' if process.role == "trainer" else ""
        return "\n".join([*script_head(plan, environment, before=before), f"exec {inside(plan, command)}{end}"]) + "\n"


def _log_lines(folder: str, name: str) -> list[str]:
    return [f"mkdir -p {folder}", f"exec > >(tee -a {folder}/{name}.log) 2>&1"]


_OPTIONS = ("claim", "namespace", "name", "runtime")
# NCCL shares memory between a pod's processes; a container has only 64 MiB of shared memory by default.
_MEMORY: JsonObject = {"name": "shm", "emptyDir": {"medium": "Memory"}}
_SHARED_MEMORY: JsonObject = {"name": "shm", "mountPath": "/dev/shm"}
_TRAINER = "node"  # name of the job and its container in Kubeflow's runtime torch-distributed


class KubernetesLauncher(Launcher):
    """Writes a plan's manifests for Kubernetes."""

    def __init__(self, plan: Plan) -> None:
        options = plan.launch.options
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ValueError(f"launch.options for kubernetes are {', '.join(_OPTIONS)}; got {', '.join(unknown)}.")
        if "claim" not in options:
            raise ValueError("launcher: kubernetes needs launch.options.claim, a volume claim that all pods can mount.")
        if plan.layout.placement == "colocated":
            raise ValueError("launcher: kubernetes cannot colocate: two pods cannot share a GPU. Use separate.")
        self.plan = plan
        self.name = options.get("name", "lightrl")

    def files(self) -> Mapping[str, str]:
        """Returns the manifests, and the scripts that the pods start."""
        files = {"trainer.yaml": _dump(self.train_job()), "trainer.sh": self._trainer()}
        if self.plan.layout.servers:
            files |= {"servers.yaml": _dump(self.leader_worker_set()), "servers.sh": self._servers()}
        return files

    def start(self) -> None:
        """Prints which manifests to apply and delete."""
        LaunchState(self.plan).set({}, state="written")
        names = " ".join(f"-f {self.plan.folder}/{name}" for name in self.files() if name.endswith(".yaml"))
        sys.stdout.write(f"\nThe volume claim must contain {self.plan.folder}. Then:\n  kubectl apply {names}\n")
        sys.stdout.write("When the TrainJob is complete, delete the servers:\n")
        sys.stdout.write(f"  kubectl delete {names}\n")

    def train_job(self) -> JsonObject:
        """Returns the manifest for the trainer, with a node for each of its hosts."""
        plan = self.plan
        trainer: JsonObject = {
            "image": plan.launch.container,
            "command": ["bash", f"{plan.folder}/trainer.sh"],
            "numNodes": plan.trainer_hosts,
            "numProcPerNode": plan.ranks_per_host,
        }
        if resources := _resources(plan, plan.of("trainer")[0], plan.ranks_per_host):
            trainer["resourcesPerNode"] = resources
        pod: JsonObject = {
            "volumes": [self._volume(), _MEMORY],
            "containers": [{"name": _TRAINER, "volumeMounts": [self._mount(), _SHARED_MEMORY]}],
        }
        pod |= _selector(plan.launch.rank_resources)
        job = {"name": _TRAINER, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"manager": "lightrl.launch", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        runtime = {"name": plan.launch.options.get("runtime", "torch-distributed")}
        spec = {"runtimeRef": runtime, "trainer": trainer, "runtimePatches": [patch]}
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", self.name, spec)

    def leader_worker_set(self) -> JsonObject:
        """Returns the manifest for the servers, with a pod for each; Kubernetes replaces a pod that ends."""
        plan = self.plan
        container: JsonObject = {
            "name": "server",
            "image": plan.launch.container,
            "command": ["bash", f"{plan.folder}/servers.sh"],
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "ports": [{"containerPort": plan.port + SERVER_OFFSET}],
            "volumeMounts": [self._mount(), _SHARED_MEMORY],
        }
        if resources := _resources(plan, plan.of("servers")[0], 1, plan.layout.tp):
            container["resources"] = resources
        volumes = [self._volume(), _MEMORY]
        group = {
            "size": 1,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "workerTemplate": {
                "spec": {"containers": [container], "volumes": volumes, **_selector(plan.launch.server_resources)}
            },
        }
        spec = {"replicas": plan.layout.servers, "networkConfig": {"subdomainPolicy": "Shared"}}
        spec["leaderWorkerTemplate"] = group
        return self._object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", f"{self.name}-servers", spec)

    def _trainer(self) -> str:
        pod_sets = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")  # set by the runtime and by Kubernetes
        first = self.plan.of("trainer")[0]
        environment = {name: value for name, value in first.environment.items() if name not in pod_sets}
        python, *fit = first.command
        command = inside(self.plan, [python, "-m", "torch.distributed.run", *fit])  # PET_* variables set the rest
        before = _log_lines(f"{shlex.quote(self.plan.folder)}/$HOSTNAME", "trainer-$PET_NODE_RANK")
        return "\n".join([*script_head(self.plan, environment, before=before), command]) + "\n"

    def _servers(self) -> str:
        plan = self.plan
        settings: JsonObject = {
            "servers": 1, "tp": plan.layout.tp, "host": "$POD_IP", "port": plan.port + SERVER_OFFSET,
            "log_folder": f"{plan.folder}/$HOSTNAME", "register": f"{plan.folder}/{REGISTRY}", "leave_s": 0,
        }  # fmt: skip
        settings |= {} if plan.on_cpu else {"devices": ",".join(map(str, range(plan.layout.tp)))}
        command = inside(plan, command_of("serve", plan.folder, **settings))
        before = _log_lines(f"{shlex.quote(plan.folder)}/$HOSTNAME", "servers")
        return "\n".join([*script_head(plan, plan.launch.environment, before=before), f"exec {command}"]) + "\n"

    def _object(self, version: str, kind: str, name: str, spec: JsonMapping) -> JsonObject:
        metadata = {"name": name}
        if namespace := self.plan.launch.options.get("namespace"):
            metadata["namespace"] = namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}

    def _volume(self) -> JsonObject:
        return {"name": "runs", "persistentVolumeClaim": {"claimName": self.plan.launch.options["claim"]}}

    def _mount(self) -> dict[str, str]:
        return {"name": "runs", "mountPath": str(Path(self.plan.folder).parent)}


def _resources(plan: Plan, process: Process, number: int, gpus_each: int = 1) -> JsonObject:
    """Returns the resources for a pod with `number` ranks or servers; Kubernetes requires limits for GPUs only."""
    each, _ = plan.resources_of(process)
    requests = {"cpu": str(each.cpus * number)} if each.cpus is not None else {}
    requests |= {"memory": f"{round(each.memory_gb * 1e3) * number}M"} if each.memory_gb is not None else {}
    limits = {} if plan.on_cpu else {"nvidia.com/gpu": gpus_each * number}
    return {name: values for name, values in (("limits", limits), ("requests", requests)) if values}


def _selector(resources: Resources) -> JsonObject:
    return {"nodeSelector": resources.node_selector} if resources.node_selector else {}


def _dump(manifest: JsonMapping) -> str:
    return str(yaml.safe_dump(dict(manifest), sort_keys=False))
