"""lightrl doctor launch: conclusions from reports, and the check on this machine, on hosts of Slurm and on Ray."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hosts
import pytest
import ray_box
import slurm_box
import yaml
from launched import engine
from waits import comes_true

from lightrl.commands.doctor import run
from lightrl.commands.doctor.launch import check_plan, findings, spec_of, table
from lightrl.commands.doctor.node import NodeCheck, NodeSpec, Report, fingerprint, missing_interfaces
from lightrl.commands.launch import Launch
from lightrl.commands.launch.plan import RunFacts, make_plan

HOSTS = ["node1", "node2", "node3"]
LONGEST_S = 600.0
TESTS = Path(__file__).parents[1]
on_slurm = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(slurm_box.why_not() is not None, reason=f"Slurm in a box: {slurm_box.why_not()}"),
]
SPEC = NodeSpec(
    folder="/runs/check", port=29500, ports=[[29501]] * 3, num_gpus=[1] * 3, models={"policy": "/models/m"},
    folders={"trainer.default_root_dir": "/runs"}, deadline_s=60.0, servers_wait=False,
)  # fmt: skip
GOOD = Report(
    step="done", host="gpu-1", versions={"torch": "2.11.0"}, driver="570.86", gpus=[("NVIDIA H200", 139e9, 140e9)],
    models={"policy": "4 files abc"}, reached=[0, 1], clock_s=(0.002, 0.001), bytes_per_s={"gloo": 1e9, "nccl": 4e10},
)  # fmt: skip
WRONG = {  # what the second node reports → finding, and its fix
    "version": ({"versions": {"torch": "2.10.0"}}, "fails versions torch differs between nodes: 2.11.0 on node1, "
                "node3; 2.10.0 on node2. fix: Install the same versions"),
    "driver": ({"driver": ""}, "fails versions driver differs between nodes: 570.86 on node1, node3; none on node2."),
    "used GPU": ({"gpus": [("NVIDIA H200", 20e9, 140e9)]}, "fails GPUs node2: GPU 0, NVIDIA H200, has 20.0 GB of "
                 "140.0 GB free. fix: Another process uses it: `nvidia-smi` on node2"),
    "other GPU": ({"gpus": [("NVIDIA L40S", 48e9, 48e9)]}, "warning GPUs Nodes have different GPUs"),
    "folder": ({"unseen": {"trainer.default_root_dir": [0, 2]}}, "fails folders node2 does not see the files from "
               "node1, node3 in trainer.default_root_dir=/runs. fix: Mount one shared disk at /runs"),
    "model": ({"models": {"policy": ""}}, "fails model policy differs between nodes: /models/m 4 files abc on node1, "
              "node3; /models/m not found on node2. fix: Put /models/m on a shared folder"),
    "clock": ({"clock_s": (-2.5, 0.001)}, "warning clocks Clocks that differ from node1's: node2 -2.5 s."),
    "port": ({"problems": [("ports", "node2: port 29501 cannot be opened: Address already in use.", "Stop it.")]},
             "fails ports node2: port 29501 cannot be opened: Address already in use. fix: Stop it."),
    "hangs": ({"step": "network"}, "fails nodes node2 did not finish the step 'done'. fix: Repeat with a larger "
              "--deadline_s if it is slow. The end of its log: its last line"),
}  # fmt: skip


def said(reports: list[Report | None]) -> list[str]:
    """The findings in one line each."""
    logs = ["", "its last line", ""]
    return [" ".join(str(finding).split()) for finding in findings(SPEC, HOSTS, reports, logs)]


def test_equal_nodes_have_no_problem():
    lines = said([GOOD] * 3)
    assert all(line.startswith("ok ") for line in lines)
    assert "ok all_reduce nccl: the slowest node sends 40.0 GB per second." in lines
    row = table(SPEC, HOSTS, [GOOD] * 3).splitlines()[1].split("  ")
    assert [cell.strip() for cell in row if cell][2:5] == ["1 x NVIDIA H200", "139.0 GB", "570.86"]


@pytest.mark.parametrize("case", WRONG)
def test_a_problem_names_its_node_and_a_fix(case):
    changed, expected = WRONG[case]
    problems = [line for line in said([GOOD, replace(GOOD, **changed), GOOD]) if not line.startswith("ok ")]
    assert len(problems) == 1
    assert problems[0].startswith(expected)


def test_a_node_without_a_report_is_named_with_the_end_of_its_log():
    (problem,) = [line for line in said([GOOD, None, GOOD]) if not line.startswith("ok ")]
    assert problem.startswith("fails nodes node2 did not report. fix: Check that node2 shares /runs with the other")
    assert problem.endswith("The end of its log: its last line")
    assert "no report" in table(SPEC, HOSTS, [GOOD, None, GOOD])
    assert [line.split()[0] for line in said([None] * 3)] == ["fails"] * 3


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ""),
        ("GLOO_SOCKET_IFNAME", "eth", "eth"),
        ("NCCL_SOCKET_IFNAME", "eth", ""),
        ("NCCL_SOCKET_IFNAME", "=eth", "eth"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", ""),
        ("NCCL_SOCKET_IFNAME", "ib", "ib"),
        ("NCCL_SOCKET_IFNAME", "^docker", ""),
    ],
)
def test_interfaces_are_matched_as_gloo_and_nccl_match_them(variable, text, expected):
    assert missing_interfaces(variable, text, ["lo", "eth0"]) == expected


def test_a_connection_that_is_reset_does_not_end_a_nodes_answers():
    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            answered.append(self)

        def sendall(self, _):
            if not answered:
                raise ConnectionResetError

    class Listener:
        def accept(self):
            if len(answered) == 2:
                raise EOFError  # ends the loop of this test
            return Connection(), None

    answered = []
    with pytest.raises(EOFError):
        NodeCheck(SPEC, 0, HOSTS, is_server=False).answer(Listener())


def test_a_folder_of_a_model_is_the_same_if_its_config_and_the_sizes_of_its_files_are(tmp_path):
    for name, content in (("a", "{}"), ("b", "{}"), ("c", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    assert fingerprint(f"{tmp_path}/a") == fingerprint(f"{tmp_path}/b") != fingerprint(f"{tmp_path}/c")
    assert fingerprint(f"{tmp_path}/none") == fingerprint("nobody/none") == ""


def test_each_host_gets_one_process_in_the_place_of_its_ranks_or_servers():
    launch = Launch(launcher="slurm", nodes=4, gpus_per_node=4, ranks=4, servers=3, tp=2, time_limit="2-00:00:00")
    plan = make_plan(launch, RunFacts(weight_folder="/w"), folder="/runs/check", port=29500)
    checked = check_plan(plan, 60.0)
    assert [(one.role, one.host) for one in checked.processes] == [
        ("trainer", 0), ("servers", 1), ("servers", 2), ("servers", 3),
    ]  # fmt: skip
    assert "--node" not in checked.processes[0].command
    assert checked.processes[2].command[-2:] == ("--node", "2")
    assert checked.launch.time_limit != launch.time_limit
    spec = spec_of(plan, {}, 60.0)
    assert spec.ports == [[29501], [29501, 29502, 29503], [29501, 29502], [29501]]
    assert spec.num_gpus == [4, 4, 2, 0]
    used = replace(plan, processes=tuple(replace(one, gpus=(2, 3)) for one in plan.processes))
    assert spec_of(used, {}, 60.0).num_gpus == [2, 2, 2, 0]
    assert spec.folders == {"trainer.default_root_dir": "/runs", "trainer.engine.weight_folder": "/w"}


@pytest.fixture
def launched(settings, tmp_path):
    settings["trainer"] |= {"engine": engine(tmp_path), "default_root_dir": str(tmp_path / "runs")}
    settings["launch"] = {"ranks": 2, "servers": 1}
    return settings


@pytest.mark.slow
def test_this_machine_is_checked_and_nothing_is_left(launched, config, tmp_path, capsys):
    assert run(["launch", "--config", config(launched)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^127.0.0.1 .* 0 of 0 +1 of 1", printed, re.M), printed
    assert "0 warnings, 0 failed" in printed
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (None, "needs a `launch:` section"),
        ({"launcher": "kubernetes", "container": "x", "ranks": 2}, "does not support launcher: kubernetes"),
        ({"ranks": 2, "servers": 1, "gpus_per_node": 2}, "has room for 0 servers"),
        ({"ranks": 2, "servers": 1, "launcher": "slurm", "options": {"array": "1-4"}}, "launch.options has array"),
    ],
)
def test_a_launch_without_nodes_to_check_is_refused_and_makes_no_folder(launched, config, capsys, section, message):
    launched["launch"] = section
    assert run(["launch", "--config", config(launched)]) == 2
    assert message in capsys.readouterr().err
    assert not Path(launched["trainer"]["default_root_dir"]).exists()


def checked_on(slurm: slurm_box.Slurm, folder: Path, settings: dict, *words: str) -> tuple[int, str]:
    """Exit code and output of the check on hosts of Slurm: a rank on two of them, a server on the third."""
    settings["launch"] = {"launcher": "slurm", "nodes": 3, "gpus_per_node": 1, "ranks": 2, "servers": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "lightrl", "doctor", "launch", "--config", "run.yaml", *words]
    paths = os.pathsep.join([str(TESTS / "commands"), *sys.path])
    script = '"$@"; echo "exit code $?"'
    output = slurm.run("sh", "-c", script, "sh", *command, cwd=folder, env={"PYTHONPATH": paths}, timeout_s=LONGEST_S)
    return int(output.rpartition("exit code ")[2]), output


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_box.Slurm(3, tmp_path_factory.mktemp("slurm")) as made:
        yield made


class TestOnSlurm:
    pytestmark = on_slurm

    @pytest.mark.extra
    def test_three_hosts_reach_each_other_and_share_the_runs_folder(self, slurm, launched, tmp_path):
        code, output = checked_on(slurm, tmp_path, launched)
        assert code == 0, output
        for node in HOSTS:
            assert re.search(rf"^{node} +{node} .* 2 of 2 +1 of 1 +gloo .*/s", output, re.M), output
        assert not list((tmp_path / "runs").glob("lightrl-doctor-*"))

    @pytest.mark.extra
    def test_a_folder_of_each_hosts_own_a_taken_port_and_a_wrong_interface_are_named(self, slurm, launched, tmp_path):
        launched["trainer"]["engine"]["init_args"]["weight_folder"] = "/run/weights"  # each host has its own /run
        listen = "import socket, time; s = socket.create_server(('', 29501)); time.sleep(600)"
        taken = slurm.popen(3, [sys.executable, "-c", listen])
        try:
            words = ["--launch.environment.GLOO_SOCKET_IFNAME", "ib0", "--deadline_s", "20"]
            code, output = checked_on(slurm, tmp_path, launched, *words)
        finally:
            taken.kill()
        text = " ".join(output.split())
        assert code == 1, output
        assert "node1 does not see the files from node2, node3 in trainer.engine.weight_folder=/run/weights" in text
        assert "node3: port 29501 cannot be opened: Address already in use" in text
        assert "node2: GLOO_SOCKET_IFNAME=ib0, but its network interfaces are lo, eth0; ib0 is missing" in text

    @pytest.mark.extra
    def test_a_host_that_another_cannot_reach_is_named(self, slurm, launched, tmp_path):
        cut = '[ "$SLURMD_NODENAME" != node2 ] || ip route replace unreachable 10.77.0.3'
        code, output = checked_on(slurm, tmp_path, launched, "--launch.setup", f"[{cut!r}]", "--deadline_s", "20")
        assert code == 1, output
        assert "node2: cannot reach node3:29501: [Errno 113] No route to host" in " ".join(output.split()), output
        assert re.search(r"^node2 +node2 .* 1 of 2 +1 of 1 +-$", output, re.M), output


@pytest.mark.extra
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(hosts.why_not() is not None, reason=f"hosts in a box: {hosts.why_not()}")
def test_hosts_of_torchrun_are_checked_by_scripts_that_the_user_starts(launched, config, tmp_path):
    launched["launch"] |= {"launcher": "torchrun", "nodes": 3, "hosts": HOSTS, "gpus_per_node": 1}
    command = [sys.executable, "-m", "lightrl", "doctor", "launch", "--config", str(tmp_path / config(launched))]
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS / "commands"), *sys.path])}
    written = tmp_path / "output"
    with hosts.Hosts(3, are_named=True) as box, written.open("w") as output:

        def start(number: int, *words: str) -> subprocess.Popen:
            return box.popen(number, words, env=environment, stdout=output, stderr=output)

        check = start(1, *command)
        line = re.compile(r"^  on node(\d):  bash (.+)\n", re.M)
        assert comes_true(lambda: len(line.findall(written.read_text())) == 3 or check.poll() is not None, LONGEST_S)
        scripts = [start(int(number), "bash", path) for number, path in line.findall(written.read_text())]
        assert check.wait(LONGEST_S) == 0, written.read_text()
        assert [script.wait(LONGEST_S) for script in scripts] == [0, 0, 0], written.read_text()
    assert "--ckpt_path last" not in written.read_text()  # a check does not continue
    assert len(re.findall(r"^node\d +node\d .* 2 of 2 +1 of 1 +gloo .*/s", written.read_text(), re.M)) == 3


@pytest.mark.extra
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(ray_box.why_not() is not None, reason=f"Ray: {ray_box.why_not()}")
def test_a_node_of_ray_is_checked(launched, config, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS / "commands"), *sys.path]))
    for name, value in ray_box.TOKEN.items():
        monkeypatch.setenv(name, value)
    with ray_box.Ray(paths=(str(TESTS / "commands"),)) as cluster:
        launched["launch"] |= {"launcher": "ray", "options": {"address": cluster.address}}
        assert run(["launch", "--config", config(launched)]) == 0
    assert re.search(r"^[\d.]+ .* 0 of 0 +1 of 1", capsys.readouterr().out, re.M)
