"""RewardPool with workers that are Ray actors: the tests of processes here, and a worker whose actor is lost."""

# ruff: noqa: F811  # the fixture `pool` is imported, and a pool has that name
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_box import TOKEN, Ray, why_not
from reward_functions import trajectory_that
from test_pool import (  # noqa: F401  # collected here too, with the cluster below
    outcomes,
    pool,
    pool_of,
    reasons,
    test_512_trajectories_are_judged_each_with_its_own_reward,
    test_a_function_that_raises_costs_its_own_trajectory_only,
    test_a_hung_call_in_the_middle_of_a_batch_is_the_only_one_that_fails,
    test_a_worker_that_dies_is_replaced_and_the_culprit_named,
    wait_until_gone,
)

from lightrl.rewards import RewardPool
from lightrl.rewards.pool import PLACE_VARIABLE

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"Ray: {WHY_NOT}"),
]
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, Ray(paths=(str(HERE.parents[1]),)) as made:
        for name, value in {**TOKEN, PLACE_VARIABLE: "ray", "RAY_ADDRESS": made.address}.items():
            patch.setenv(name, value)
        import ray

        yield
        ray.shutdown()


def process_of(pool: RewardPool) -> psutil.Process:
    """The worker process of a pool that has one."""
    (result,) = outcomes(pool, trajectory_that(do="leak"))
    return psutil.Process(int(result.metrics["pid"]))


def actor_of(worker: psutil.Process) -> psutil.Process:
    """Between them is the guardian."""
    guardian = worker.parent()
    actor = guardian.parent()
    return actor


def test_the_processes_are_those_of_the_actors_host_and_end_with_the_pool():
    with pool_of("obey") as pool:
        worker = process_of(pool)
        assert actor_of(worker).cmdline()[0].startswith("ray::")
    assert wait_until_gone([worker.pid])


def test_an_actor_that_is_lost_costs_the_call_that_it_had_and_is_replaced():
    with pool_of("obey") as pool:
        worker = process_of(pool)
        actor_of(worker).kill()
        assert wait_until_gone([worker.pid])
        assert reasons(outcomes(pool, trajectory_that(), trajectory_that())) == [1.0, 1.0]


def test_a_function_that_is_not_there_is_named():
    missing = RewardPool("reward_functions.missing", search_paths=[str(HERE)])
    with pytest.raises(ValueError, match="'reward_functions' has no 'missing'"):
        missing.start()


@pytest.mark.extra
def test_without_room_on_the_cluster_the_pool_says_what_it_waits_for():
    import ray

    holder, held = ray.remote(type("Holder", (), {})), []
    is_placed = True
    while is_placed:  # the last one waits for a CPU that somebody gives back
        held.append(holder.options(num_cpus=1).remote())
        is_placed = bool(ray.wait([held[-1].__ray_ready__.remote()], timeout=5)[0])
    crowded = RewardPool("reward_functions.obey", search_paths=[str(HERE)], startup_timeout_s=2.0)
    with pytest.raises(ValueError, match="no host with a free CPU"):
        crowded.start()
    for actor in held:
        ray.kill(actor)
