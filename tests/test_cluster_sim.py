"""benchmarks.cluster_sim: numbers that follow from paper and pencil."""

import pytest

from benchmarks import cluster_sim
from benchmarks.simulated_cluster import SYNC_OVERHEAD_S, Hardware, Lengths, SimulatedCluster

# A step takes its overhead of 1 ms, however many completions.
FREE = Hardware(1.0, 1e-6, 1, 1e12, 1e30, 1.0, 1e30, step_overhead_s=0.001)
ALIKE = Lengths(median=10_000, sigma=0.0, cap=10_000, prompt=0)  # 10 s each


def run(max_staleness: int, *, update_s: float = 10.0, iterations: int = 10, **settings):
    settings = {"servers": [0], "ranks": 1, "is_colocated": False, "prompts": 4, "group_size": 2, **settings}
    lengths = settings.pop("lengths", ALIKE)
    cluster = SimulatedCluster(
        FREE, lengths, update_s=lambda tokens: update_s, max_staleness=max_staleness, gpus_per_host=2, **settings
    )
    return cluster.run(warm_up=max_staleness + 1, iterations=iterations)


def test_on_policy_an_iteration_is_rollout_update_and_sync():
    outcome = run(0)
    assert outcome.seconds_per_iteration == pytest.approx(10 + 10 + SYNC_OVERHEAD_S)
    # of two GPUs, each works for 10 of the 21 seconds; both wait for the sync
    assert sum(outcome.idle.values()) == pytest.approx(1 - 10 / 21)
    assert outcome.idle["sync"] == pytest.approx(1 / 21)


def test_asynchronous_rollouts_of_one_update_hide_behind_it():
    outcome = run(1)
    assert outcome.seconds_per_iteration == pytest.approx(10 + SYNC_OVERHEAD_S)
    assert outcome.idle["rollout"] == pytest.approx(0, abs=1e-6)


def test_the_planner_places_the_published_runs():
    for name, workload in cluster_sim.WORKLOADS.items():
        for staleness in (0, 4):
            layout = cluster_sim.layout(workload, workload.gpus, staleness)
            share = 1 if staleness == 0 else 0.25
            assert layout.ranks == share * workload.gpus
            assert cluster_sim.update_s(name, layout.ranks, 50_000_000) > 0
    assert cluster_sim.WORKLOADS["math-1.5b"].published == 2.77
    assert cluster_sim.WORKLOADS["code-32b"].published == 1.64
