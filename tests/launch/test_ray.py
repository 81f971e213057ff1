"""The Ray launcher on a real Ray: where processes are, how they end, what starts again, and the numbers of a run."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import forked
import psutil
import pytest
import yaml
from hosts import Hosts
from hosts import why_not as why_no_hosts
from rank_scripts import ROUNDING
from ray_box import TOKEN, Ray, why_not
from ray_numbers import numbers_in
from test_local import NOTES, WAITS, notes, state, wait_for
from waits import comes_true

from benchmarks.recovery import LaunchedRun, _runs, settings
from lightrl.checks.files import host_names
from lightrl.commands.launch.command import free_ports
from lightrl.commands.launch.launcher import make_folder, with_addresses, write_files
from lightrl.commands.launch.plan import Plan, Process, RunFacts, make_plan
from lightrl.commands.launch.ray import RayLauncher
from lightrl.commands.launch.settings import Launch, Layout, Recover, Resources
from lightrl.commands.status import status_text

WHY_NOT = why_not()
WHY_NO_HOSTS = WHY_NOT or why_no_hosts()
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LONGEST_S = 600.0
QUICKSTART = str(ROOT / "examples/quickstart/grpo.yaml")
NOTES_GPUS = NOTES + "note(os.environ.get('CUDA_VISIBLE_DEVICES', 'none') + ' ' + ' '.join(sys.argv[3:]))\n"
needs_ray = pytest.mark.skipif(WHY_NOT is not None, reason=f"Ray: {WHY_NOT}")
pytestmark = [pytest.mark.cluster, needs_ray]


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TOKEN.items():
            patch.setenv(name, value)
        yield


def plan_on(hosts: int, **settings) -> Plan:
    """Two ranks and two servers with four GPUs on each host."""
    launch = Launch(launcher="ray", nodes=hosts, gpus_per_node=4, ranks=2, servers=2 * hosts - 1, **settings)
    return make_plan(launch, RunFacts(), folder="/shared/launch-0", port=29500, hosts=host_names(hosts))


def test_a_bundle_has_the_cpus_and_gpus_of_its_hosts_processes():
    plan = plan_on(2)
    assert RayLauncher(plan).bundles() == [{"CPU": 3, "GPU": 4}, {"CPU": 1, "GPU": 1}]
    assert yaml.safe_load(RayLauncher(plan).files()["placement_group.yaml"])["strategy"] == "STRICT_SPREAD"


def test_a_bundle_has_what_each_of_its_ranks_and_servers_needs():
    needs = {"rank_resources": Resources(cpus=8, memory_gb=50), "server_resources": Resources(cpus=4, memory_gb=1.5)}
    launcher = RayLauncher(plan_on(2, **needs))
    first = {"CPU": 2 * 8 + 2 * 4, "memory": 103_000_000_000, "GPU": 4}
    assert launcher.bundles() == [first, {"CPU": 4, "memory": 1_500_000_000, "GPU": 1}]
    assert launcher.selectors == [{}, {}]


def test_a_hosts_ranks_and_servers_cannot_be_on_nodes_of_two_kinds():
    kinds = {"server_resources": Resources(node_selector={"gpu": "l40s", "rack": "1"})}
    assert RayLauncher(plan_on(2, **kinds)).selectors == [{"gpu": "l40s", "rack": "1"}] * 2
    with pytest.raises(ValueError, match="select nodes with gpu=h200 and gpu=l40s"):
        RayLauncher(plan_on(2, **kinds, rank_resources=Resources(node_selector={"gpu": "h200"})))


def test_processes_get_the_addresses_and_the_gpus_that_ray_has_chosen():
    plan = with_addresses(plan_on(2), [("10.0.0.5", ["7", "5", "3", "1"]), ("10.0.0.6", ["2"])])
    rank, (first, second) = plan.of("trainer")[1], plan.of("servers")
    assert rank.environment["CUDA_VISIBLE_DEVICES"] == "7,5"
    assert rank.environment["MASTER_ADDR"] == "10.0.0.5"
    assert "--devices 3,1" in " ".join(first.command)
    assert "--host 10.0.0.6" in " ".join(second.command)
    assert "--devices 2" in " ".join(second.command)
    assert plan.log_file(second) == "/shared/launch-0/10.0.0.6/servers-1.log"


def test_an_option_that_ray_has_not_is_refused():
    with pytest.raises(ValueError, match="must contain only address, got partition"):
        RayLauncher(plan_on(1, options={"partition": "gpu"}))


def test_no_cluster_is_one_message(tmp_path):
    plan = plan_of(tmp_path, {"trainer-0": WAITS}, options={"address": f"127.0.0.1:{free_ports(1)}"})
    with pytest.raises(ValueError, match="finds no Ray cluster"):
        RayLauncher(plan).start()


def plan_of(folder: Path, programs: dict[str, str], **settings) -> Plan:
    """These programs on one host, by name of their process, each with a GPU."""
    processes = tuple(
        Process(
            name, name.split("-")[0], 0, (index,), (sys.executable, "-c", source, str(folder / "notes"), name),
            environment={"CUDA_VISIBLE_DEVICES": str(index)},
        )
        for index, (name, source) in enumerate(programs.items())
    )  # fmt: skip
    launch = Launch(launcher="ray", **settings)
    plan = Plan(launch, Layout(1), str(make_folder(folder)), tuple(host_names(1)), 29500, 4, False, processes, {})
    write_files(plan, "", {})
    return plan


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    with Ray(gpus=4, paths=(str(HERE), str(ROOT))) as made:
        yield made


@pytest.mark.slow
class TestOnOneNode:
    def launched(self, ray: Ray, folder: Path, programs: dict[str, str], **settings) -> RayLauncher:
        plan = plan_of(folder, programs, options={"address": ray.address}, **settings)
        launcher = RayLauncher(plan, write=lambda line: None)
        launcher.start()
        return launcher

    @pytest.mark.extra
    def test_ranks_end_then_servers_and_the_clusters_resources_are_free_again(self, ray, tmp_path):
        programs = {"trainer-0": NOTES_GPUS + "time.sleep(0.5); end()", "servers-0": WAITS}
        launcher = self.launched(ray, tmp_path, programs)
        import ray as cluster

        assert cluster.available_resources()["GPU"] == 2
        wait_for({"servers-0 started"}, tmp_path)
        assert launcher.wait() == 0
        assert notes(tmp_path)[-2:] == ["trainer-0 ended", "servers-0 ended"]
        (shown,) = {line for line in notes(tmp_path) if line.startswith("trainer-0 ") and line[10].isdigit()}
        assert shown.split()[1] in "0123"
        assert state(launcher.plan)["state"] == "ended"
        (host,) = launcher.plan.hosts
        assert (Path(launcher.plan.folder) / host / "trainer-0.log").exists()
        assert f"servers-0  {host}  exit code 0" in status_text(tmp_path)

    @pytest.mark.extra
    def test_a_lost_actor_starts_the_ranks_again_from_the_newest_checkpoint(self, ray, tmp_path):
        program = NOTES_GPUS + "time.sleep(0 if '--ckpt_path' in sys.argv else 600)"
        launcher = self.launched(ray, tmp_path, {"trainer-0": program, "servers-0": WAITS}, recover=Recover(retries=1))
        wait_for({"trainer-0 started", "servers-0 started"}, tmp_path)
        before = launcher.hosts[0]
        guards_of(tmp_path)[0].parent().kill()  # Ray's worker
        assert launcher.wait() == 0
        assert launcher.hosts[0] is not before
        assert [line for line in notes(tmp_path) if "--ckpt_path last" in line]
        assert state(launcher.plan)["restarts"] == 1

    @pytest.mark.extra
    def test_a_node_is_chosen_by_its_labels_and_lends_what_the_ranks_need(self, ray, tmp_path):
        needs = {"rank_resources": Resources(cpus=3, memory_gb=0.5, node_selector={"kind": "box"})}
        launcher = self.launched(ray, tmp_path, {"trainer-0": NOTES}, **needs)
        import ray as cluster

        total, free = cluster.cluster_resources(), cluster.available_resources()
        assert (total["CPU"] - free["CPU"], total["memory"] - free["memory"]) == (3, 5e8)
        assert launcher.wait() == 0

    @pytest.mark.extra
    def test_servers_that_fail_start_again_alone(self, ray, tmp_path):
        once = NOTES + "sys.exit(3) if notes_of(name) == 1 else time.sleep(600)"
        once = once.replace("notes_of(name)", "open(notes).read().count(f'{name} started')")
        trainer = NOTES + "\nwhile open(notes).read().count('servers-0 started') < 2: time.sleep(0.1)\n"
        launcher = self.launched(ray, tmp_path, {"trainer-0": trainer, "servers-0": once}, recover=Recover(retries=1))
        assert launcher.wait() == 0
        assert notes(tmp_path).count("trainer-0 started") == 1
        assert notes(tmp_path).count("servers-0 started") == 2

    @pytest.mark.extra
    def test_no_process_outlives_a_launcher_that_is_killed(self, ray, tmp_path):
        driver = [sys.executable, str(HERE / "ray_driver.py"), str(tmp_path), ray.address, TOKEN["RAY_AUTH_TOKEN"]]
        with forked.Popen(driver, stdin=subprocess.PIPE, env=without_ray()) as launcher:
            wait_for({"trainer-0 started", "servers-0 started"}, tmp_path)
            left = guarded(tmp_path)
            launcher.kill()
        assert comes_true(lambda: not any(_runs(process.pid) for process in left), LONGEST_S), left


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=f"Ray on hosts in a box: {WHY_NO_HOSTS}")
def test_a_lost_head_ends_the_launch_on_another_host_in_words_and_leaves_no_process(tmp_path):
    with Hosts(2, are_named=True) as hosts:
        cluster = Ray(hosts, gpus=4, paths=(str(HERE), str(ROOT)))
        cluster.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "20"  # 60 else
        with cluster, (tmp_path / "output").open("w") as output:
            driver = [sys.executable, str(HERE / "ray_driver.py"), str(tmp_path), cluster.address]
            driver.append(TOKEN["RAY_AUTH_TOKEN"])
            pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            launcher = hosts.popen(2, driver, env=cluster.environment, **pipes)
            # A busy machine takes minutes for Ray's first actor.
            assert comes_true(lambda: len(notes(tmp_path)) == 2, LONGEST_S), (tmp_path / "output").read_text()
            left = guarded(tmp_path)
            cluster.kill(1)
            assert launcher.wait(LONGEST_S) == 1
            assert comes_true(lambda: not any(_runs(process.pid) for process in left), LONGEST_S), left
    said = (tmp_path / "output").read_text()
    assert "Failed to connect to GCS" in said or "failed with the loss of its host 10.77.0.1" in said


class RayRun(LaunchedRun):
    """The quickstart, made small, by `lightrl launch` on Ray."""

    def __init__(self, ray: Ray, folder: Path, words: Sequence[str] = (), **settings) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "numbers.yaml").write_text(yaml.safe_dump(numbers(folder, ray)))
        self.words = ["--config", str(folder / "numbers.yaml"), "--launch.port", str(free_ports(64)), *words]
        super().__init__(folder, **settings)

    def start(self, *words: str) -> None:
        super().start(*self.words, *words)


class RunOnHosts(RayRun):
    """The same from the first of hosts in a box, with ranks on all of them."""

    def __init__(self, hosts: Hosts, ray: Ray, folder: Path, *, ranks: int, iterations: int, **launch) -> None:
        self.hosts, self.ray = hosts, ray
        places = {"nodes": hosts.num, "gpus_per_node": ranks // hosts.num, **launch}
        folder.mkdir()
        (folder / "hosts.yaml").write_text(yaml.safe_dump({"launch": places}))
        super().__init__(ray, folder, ["--config", str(folder / "hosts.yaml")], ranks=ranks, iterations=iterations)

    def popen(self, command: Sequence[str], **options) -> subprocess.Popen:
        return self.hosts.popen(1, command, **{**options, "env": self.ray.environment})

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_for_text(self, text: str) -> None:
        assert comes_true(lambda: text in self.output(), LONGEST_S), self.output()


def numbers(folder: Path, ray: Ray | None = None) -> dict:
    """On top of the settings of benchmarks.recovery."""
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}}
    kept = {"class_path": "ray_numbers.Numbers", "init_args": {"folder": str(folder)}}
    launch = {} if ray is None else {"launcher": "ray", "options": {"address": ray.address}}
    return {
        "trainer": {"callbacks": [checkpoint, kept], "strategy": "auto"},
        "model": {"class_path": "ray_numbers.BySGD", "init_args": {"lr": 0.1}},
        "launch": launch,
    }


def one_process(folder: Path, iterations: int, **trainer) -> Path:
    """The folder of a run that nobody launches and nothing disturbs."""
    folder.mkdir()
    parts = [settings(folder, 1, iterations, 0), numbers(folder), {"trainer": trainer}]
    words = ["--config", QUICKSTART]
    for number, part in enumerate(parts):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(part))
        words += ["--config", str(folder / f"{number}.yaml")]
    command = [sys.executable, "-m", "lightrl", "fit", *words]
    done = forked.run(
        command, env=without_ray(), cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def assert_same_numbers(found: Path, expected: Path, num: int) -> None:
    """Of so many iterations; the expected run may have had more."""
    gradients, losses = numbers_in(found)
    expected_gradients, expected_losses = numbers_in(expected)
    assert len(gradients) == len(expected_gradients) > 10
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient - reference).abs().max() <= ROUNDING * reference.abs().max()
    by_iteration = {line["iteration"]: line["losses"] for line in expected_losses}
    assert {line["iteration"] for line in losses} == {*range(1, num + 1)}
    for line in losses:  # an iteration that was trained again too
        assert line["losses"] == pytest.approx(by_iteration[line["iteration"]], rel=0, abs=ROUNDING)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    return one_process(tmp_path_factory.mktemp("one_process") / "run", 5)


@pytest.mark.slow
class TestNumbers:
    @pytest.fixture(autouse=True)
    def paths(self, monkeypatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))

    @pytest.mark.extra
    def test_two_ranks_one_killed_learn_what_one_process_learns(self, ray, expected, tmp_path):
        with RayRun(ray, tmp_path / "run", ranks=2, iterations=5, retries=1) as run:
            run.wait_for(2)  # a checkpoint is there
            assert 0 <= run.kill("rank 1")["lost_iterations"] <= 1
            assert run.finish() == 0, run.output()
        assert_same_numbers(run.folder, expected, 5)

    @pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=f"Ray on hosts in a box: {WHY_NO_HOSTS}")
    @pytest.mark.extra  # nearly two minutes; `pytest -m cluster` has it
    def test_a_run_that_loses_a_host_starts_again_from_its_checkpoint_once_the_host_is_back(self, expected, tmp_path):
        with Hosts(2, are_named=True) as hosts, Ray(hosts, paths=(str(HERE), str(ROOT))) as cluster:
            run = RunOnHosts(hosts, cluster, tmp_path / "run", ranks=2, iterations=5, recover={"retries": 1})
            run.wait_for(2)
            cluster.kill(2)
            run.wait_for_text("Ray has no resources yet for 1 of these")
            cluster.start(2)
            assert run.finish() == 0, run.output()
        assert "the loss of its host 10.77.0.2" in run.output()
        assert_same_numbers(run.folder, expected, 5)
        assert len(run.losses()) <= 5 + 1  # the restart repeats one at most


def without_ray() -> dict[str, str]:
    """An environment in which a process may be forked."""
    paths = os.pathsep.join([str(HERE), str(ROOT), *sys.path])
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"PYTHONPATH": paths}


def guards_of(folder: Path) -> list[psutil.Process]:
    """The guards of processes whose notes are in this folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any("parent_guard" in word for word in process.info["cmdline"] or ())
        and str(folder / "notes") in process.info["cmdline"]
    ]


def guarded(folder: Path) -> list[psutil.Process]:
    """The guards of a rank and of servers, and these."""
    guards = guards_of(folder)
    found = [*guards, *(child for guard in guards for child in guard.children(recursive=True))]
    assert len(found) == 4
    return found
