"""Jobs that the launcher writes, and what they do with Slurm on hosts in a box: order, warning, requeue, a run."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from launched import engine
from slurm_box import Slurm, why_not
from waits import comes_true

from lightrl.checks.files import host_names
from lightrl.commands.launch.launcher import make_folder, write_files
from lightrl.commands.launch.plan import Plan, RunFacts, make_plan
from lightrl.commands.launch.settings import Launch, Recover
from lightrl.commands.launch.slurm import SlurmLauncher
from lightrl.commands.status import status_text

WHY_NOT = why_not()
ON_SLURM = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"Slurm in a box: {WHY_NOT}"),
]
TASK = Path(__file__).parents[1] / "commands"
LONGEST_S = 600.0

# In place of `python -m lightrl fit …` and `… serve …`: notes what it gets, and ends as these do.
PROGRAM = """#!{python}
import json, os, signal, sys, time
names = ["MASTER_ADDR", "MASTER_PORT", "LIGHTRL_SERVER_ADDRS", "LIGHTRL_SERVER_TOKEN", "CUDA_VISIBLE_DEVICES"]
names += ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURMD_NODENAME"]
names += ["NCCL_SOCKET_IFNAME"]
role = "servers" if "serve" in sys.argv else "trainer"
def note(**fields):
    with open({notes!r}, "a") as file:
        file.write(json.dumps({{"role": role, "at": time.time(), **fields}}) + "\\n")
def end(*_):
    note(word="ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note(word="started", cwd=os.getcwd(), words=sys.argv, **{{name: os.environ.get(name) for name in names}})
print("iteration 1", flush=True)
time.sleep(0 if "--ckpt_path" in sys.argv else 600)
end()
"""


def plan_in(folder: Path, **launch) -> Plan:
    """Two ranks on the first two hosts, a server on the third."""
    program = folder / "program"
    program.write_text(PROGRAM.format(python=sys.executable, notes=str(folder / "notes")))
    program.chmod(0o700)
    settings = {"launcher": "slurm", "nodes": 3, "gpus_per_node": 1, "ranks": 2, "servers": 1, **launch}
    facts = RunFacts(on_cpu=True)
    place = str(make_folder(folder))
    return make_plan(Launch(**settings), facts, folder=place, port=29500, hosts=host_names(3), python=str(program))


def notes(folder: Path) -> list[dict]:
    file = folder / "notes"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_job_asks_for_its_hosts_and_its_end(tmp_path):
    options = {"partition": "gpu", "account": "lab"}
    more = {"srun_options": {"container-image": "lab/lightrl v1.sqsh"}, "environment": {"NCCL_SOCKET_IFNAME": "ib0"}}
    more |= {"setup": ["module load cuda"], "recover": Recover(3)}
    plan = plan_in(tmp_path, time_limit="1-00:00:00", options=options, **more)
    files = SlurmLauncher(plan).files()
    job = files["job.sh"].splitlines()
    for line in ("nodes=3", "exclusive", "requeue", "time=1-00:00:00", "signal=B:USR1@300", "partition=gpu"):
        assert f"#SBATCH --{line}" in job
    (trainer,) = [line for line in job if line.startswith('"${step[@]}" --job-name=trainer')]
    assert "--open-mode=append '--container-image=lab/lightrl v1.sqsh')" in files["job.sh"]
    assert all("export NCCL_SOCKET_IFNAME=ib0" in files[step] for step in ("trainer.sh", "servers.sh"))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in trainer
    assert '--nodelist="${hosts[0]},${hosts[1]}"' in trainer
    assert "module load cuda" in files["trainer.sh"]
    assert 'export MASTER_ADDR="${hosts[0]}"' in files["trainer.sh"]
    assert f"export LIGHTRL_SERVER_ADDRS='file://{plan.folder}/servers?servers=1'" in files["trainer.sh"]


def test_a_job_without_retries_is_not_requeued_and_one_without_servers_has_one_step(tmp_path):
    files = SlurmLauncher(plan_in(tmp_path, servers=0)).files()
    assert "#SBATCH --no-requeue" in files["job.sh"]
    assert "servers.sh" not in files
    assert "--job-name=trainer" in files["job.sh"]
    assert "--job-name=servers" not in files["job.sh"]


@pytest.mark.parametrize(
    ("section", "option", "message"),
    [
        ("options", "array", "launch.options has array; a run cannot be a job array"),
        ("options", "nodes", "launch.options has nodes, which the launch sets"),
        ("srun_options", "ntasks", "launch.srun_options has ntasks, which the launch sets"),
        ("environment", "LIGHTRL_SERVER_ADDRS", "launch.environment has LIGHTRL_SERVER_ADDRS, which the launch sets"),
    ],
)
def test_options_that_contradict_the_plan_are_refused(tmp_path, section, option, message):
    with pytest.raises(ValueError, match=message):
        SlurmLauncher(plan_in(tmp_path, **{section: {option: "1-4"}}))


def test_servers_on_hosts_of_another_kind_make_a_heterogeneous_job(tmp_path):
    options = {"partition": "gpu", "account": "lab"}
    plan = plan_in(tmp_path, time_limit="60", options=options, server_options={"partition": "small"})
    trainer, servers = SlurmLauncher(plan).files()["job.sh"].split("#SBATCH hetjob")
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu", "#SBATCH --signal=B:USR1@300"} <= {*trainer.splitlines()}
    assert {"#SBATCH --nodes=1", "#SBATCH --partition=small", "#SBATCH --time=60"} <= {*servers.splitlines()}
    assert "--account=lab" in servers.split("if [")[0]
    assert "--signal" not in servers.split("if [")[0]


@pytest.mark.parametrize("servers", [0, 3])
def test_server_options_without_hosts_for_servers_alone_are_refused(tmp_path, servers):
    plan = plan_in(tmp_path, gpus_per_node=4, ranks=2, servers=servers, nodes=2, server_options={"qos": "x"})
    with pytest.raises(ValueError, match="on exactly the hosts without ranks"):
        SlurmLauncher(plan)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Slurm(3, tmp_path_factory.mktemp("slurm")) as made:
        yield made


class TestOnSlurm:
    pytestmark = ON_SLURM

    @pytest.mark.extra
    def test_both_steps_run_at_once_and_the_warning_before_the_time_limit_saves_and_requeues(self, slurm, tmp_path):
        more = {"environment": {"NCCL_SOCKET_IFNAME": "ib0"}, "srun_options": {"chdir": "/usr/share"}}
        plan = plan_in(tmp_path, recover=Recover(retries=1), time_limit="1", warning_s=40, **more)
        job = self.submitted(slurm, plan, tmp_path)
        first = {one["SLURMD_NODENAME"]: one for one in notes(tmp_path)}
        ranks = [first["node1"], first["node2"]]
        assert [one["SLURM_PROCID"] for one in ranks] == ["0", "1"]
        assert first["node3"]["role"] == "servers"
        assert {(one["NCCL_SOCKET_IFNAME"], one["cwd"]) for one in first.values()} == {("ib0", "/usr/share")}
        for one in ranks:  # what Lightning checks against devices and num_nodes
            assert (one["SLURM_NTASKS"], one["SLURM_NTASKS_PER_NODE"], one["SLURM_NNODES"]) == ("2", "1", "2")
            assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("node1", "29500")
            assert one["LIGHTRL_SERVER_ADDRS"] == f"file://{plan.folder}/servers?servers=1"
            assert len(one["LIGHTRL_SERVER_TOKEN"]) == 64
            assert one["CUDA_VISIBLE_DEVICES"] is None
        host = first["node3"]["words"][first["node3"]["words"].index("--host") + 1]
        assert host == "node3"

        slurm.wait_for(job, "COMPLETED", timeout_s=LONGEST_S)
        again = [one for one in notes(tmp_path)[3:] if one["role"] == "trainer" and one["word"] == "started"]
        assert [one["words"][-2:] for one in again] == [["--ckpt_path", "last"]] * 2
        ended = [one["role"] for one in notes(tmp_path)[3:] if one["word"] == "ended"]
        assert ended == ["trainer", "trainer", "servers"] * 2
        assert (Path(plan.folder) / "node2" / "trainer-1.log").read_text() == "iteration 1\n" * 2
        log = (Path(plan.folder) / "job.log").read_text()
        assert "The time limit is near" in log
        assert "Requeued after 0 restarts." in log

    @pytest.mark.extra
    @pytest.mark.parametrize("retries", [1, 0])
    def test_a_lost_host_ends_the_job_which_continues_elsewhere_if_it_may(self, retries, tmp_path):
        (tmp_path / "slurm").mkdir()
        with Slurm(4, tmp_path / "slurm") as slurm:
            plan = plan_in(tmp_path, recover=Recover(retries=retries))
            job = self.submitted(slurm, plan, tmp_path)
            slurm.kill(2)
            slurm.wait_for(job, "COMPLETED" if retries else "NODE_FAIL", timeout_s=LONGEST_S)
        started = [one for one in notes(tmp_path)[3:] if one["word"] == "started" and one["role"] == "trainer"]
        assert [one["words"][-2:] for one in started] == [["--ckpt_path", "last"]] * 2 * retries
        assert {one["SLURMD_NODENAME"] for one in started} == ({"node1", "node3"} if retries else set())

    def test_a_run_of_two_hosts_with_a_server_on_a_third(self, slurm, settings, tmp_path):
        settings["trainer"].update(engine=engine(tmp_path), default_root_dir=str(tmp_path / "runs"))
        settings["launch"] = {"launcher": "slurm", "nodes": 3, "gpus_per_node": 1, "ranks": 2, "servers": 1}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        words = [sys.executable, "-m", "lightrl", "launch", "--config", "run.yaml", "--wait"]
        paths = os.pathsep.join([str(TASK), *sys.path])
        output = slurm.run(*words, cwd=tmp_path, env={"PYTHONPATH": paths}, timeout_s=LONGEST_S)
        assert "trainer-0 | iteration: 2 groups x 2 = 4 trajectories" in output, output
        text = status_text(tmp_path / "runs")
        assert "iteration  2 of 2; weight version 2" in text
        assert "http://node3:29501  routable  version 2" in text
        assert "slurm, exit code 0, job" in text
        assert f"{tmp_path}/runs/launch-0/node2/trainer-1.log" in text
        checkpoint = tmp_path / "runs/lightning_logs/version_0/checkpoints/last.ckpt"
        assert {file.name for file in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}

    @staticmethod
    def submitted(slurm, plan, folder):
        """The job of a plan, once its three processes have started."""
        write_files(plan, "", SlurmLauncher(plan).files())
        job = slurm.run("sbatch", "--parsable", f"{plan.folder}/job.sh", cwd=folder).strip()
        slurm.wait_for(job, "RUNNING", timeout_s=LONGEST_S)
        assert comes_true(lambda: len(notes(folder)) >= 3, LONGEST_S), notes(folder)
        return job
