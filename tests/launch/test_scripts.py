"""torchrun's scripts and Kubernetes' manifests of a plan."""

import json
import subprocess

import pytest
import yaml
from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec, TrainerV1alpha1TrainJob

from lightrl.commands.launch.plan import Plan, RunFacts, make_plan
from lightrl.commands.launch.scripts import KubernetesLauncher, TorchrunLauncher
from lightrl.commands.launch.settings import Launch, Recover, Resources


def plan_of(facts: RunFacts | None = None, **launch) -> Plan:
    settings = {"launcher": "torchrun", "nodes": 3, "gpus_per_node": 4, "ranks": 8, "servers": 2, "tp": 2, **launch}
    return make_plan(Launch(**settings), facts or RunFacts(), folder="/runs/launch-0", port=29500)


def on_kubernetes(**launch) -> KubernetesLauncher:
    options = {"claim": "runs", "namespace": "lab"}
    settings = {"launcher": "kubernetes", "container": "lightrl:1", "options": options, **launch}
    return KubernetesLauncher(plan_of(RunFacts(transport="delta"), **settings))


def checked(script: str) -> str:
    """A script that bash can read."""
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    return script


def test_torchrun_gets_a_script_for_each_host_and_the_servers_one_of_their_own():
    launched = TorchrunLauncher(plan_of(setup=["module load cuda"], container="apptainer exec run.sif"))
    files = launched.files()
    assert list(files) == ["trainer-node1.sh", "trainer-node2.sh", "servers-node3.sh"]
    second = checked(files["trainer-node2.sh"])
    assert "--nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=node1 --master-port=29500" in second
    assert "export CUDA_VISIBLE_DEVICES=0,1,2,3\n" in second
    assert "export LIGHTRL_SERVER_ADDRS='file:///runs/launch-0/servers?servers=2'\n" in second
    assert "module load cuda\nexec apptainer exec run.sif python -m torch.distributed.run" in second
    assert "export LIGHTRL_SERVER_TOKEN=$(cat /runs/launch-0/token)" in second
    assert "MASTER_ADDR" not in second  # torchrun sets it
    assert "--servers 2 --tp 2 --host node3 --port 29501" in checked(files["servers-node3.sh"])


# Of a LeaderWorkerSet, from its source (see scripts.py); Kubeflow's package has the types of a TrainJob and a pod.
SERVERS = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
GROUP = {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"}


def test_kubernetes_gets_a_train_job_and_a_set_of_servers():
    files = on_kubernetes().files()
    job, servers = yaml.safe_load(files["trainer.yaml"]), yaml.safe_load(files["servers.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (servers["apiVersion"], servers["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert {one["metadata"]["namespace"] for one in (job, servers)} == {"lab"}
    assert json.loads(TrainerV1alpha1TrainJob.from_dict(job).to_json()) == job
    assert set(servers["spec"]) <= SERVERS
    assert set(servers["spec"]["leaderWorkerTemplate"]) <= GROUP
    pod = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"  # the default, which the type adds
    assert json.loads(IoK8sApiCoreV1PodTemplateSpec.from_dict(pod).to_json()) == pod
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert servers["spec"]["replicas"] == 2
    (container,) = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    (patch,) = job["spec"]["runtimePatches"]
    (part,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (trainer_container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    for each in (container, trainer_container):
        assert {"name": "runs", "mountPath": "/runs"} in each["volumeMounts"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in each["volumeMounts"]


def test_pods_request_the_cpus_and_memory_of_their_ranks_and_servers_on_nodes_with_their_labels():
    ranks = Resources(cpus=8, memory_gb=62.5, node_selector={"gpu": "h200"})
    files = on_kubernetes(
        rank_resources=ranks, server_resources=Resources(cpus=16, node_selector={"gpu": "l40s"})
    ).files()
    job, servers = yaml.safe_load(files["trainer.yaml"]), yaml.safe_load(files["servers.yaml"])
    assert json.loads(TrainerV1alpha1TrainJob.from_dict(job).to_json()) == job
    requests = {"cpu": "32", "memory": "250000M"}  # of the four ranks of a node
    assert job["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}, "requests": requests}
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    pod = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "l40s"}
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}, "requests": {"cpu": "16"}}


@pytest.mark.parametrize(("launcher", "fix"), [("slurm", "Set launch.options, such as"), ("local", "Remove it")])
def test_a_launcher_that_reserves_nothing_per_rank_says_what_to_set_instead(launcher, fix):
    with pytest.raises(ValueError, match=f"needs launcher: ray or kubernetes, got {launcher}. {fix}"):
        Launch(launcher=launcher, server_resources=Resources(cpus=4))


def test_pods_find_each_server_and_its_receiver_by_name():
    files = on_kubernetes().files()
    trainer = checked(files["trainer.sh"])
    assert "export LIGHTRL_SERVER_ADDRS='file:///runs/launch-0/servers?servers=2'\n" in trainer
    assert "CUDA_VISIBLE_DEVICES" not in trainer
    servers = checked(files["servers.sh"])
    assert '--servers 1 --tp 2 --host "$POD_IP" --port 29501' in servers
    assert "--register /runs/launch-0/servers" in servers
    assert "--devices 0,1" in servers


REFUSED = {
    "colocated": ({"placement": "colocated"}, "cannot colocate"),
    "no claim": ({"options": {}}, "needs launch.options.claim"),
    "restarts": ({"recover": Recover(retries=1)}, "launch.recover needs launcher: local, slurm or ray, got kubernetes"),
    "a time limit": ({"time_limit": "1:00:00"}, "launch.time_limit needs launcher: slurm, got kubernetes"),
    "unknown option": ({"options": {"claim": "x", "partition": "gpu"}}, "got partition"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kubernetes_cannot_do_is_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        on_kubernetes(**settings)
