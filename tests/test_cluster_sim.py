"""benchmarks.cluster_sim: numbers that follow from paper and pencil."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import cluster_sim, simulated_cluster
from benchmarks.simulated_cluster import RESTART_S, SYNC_OVERHEAD_S, Hardware, Lengths, SimulatedCluster

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


def test_an_update_on_the_servers_gpus_leaves_them_idle_for_the_sync_alone():
    outcome = run(0, is_colocated=True, servers=[0, 0], ranks=2)
    assert sum(outcome.idle.values()) == pytest.approx(SYNC_OVERHEAD_S / (10 + 10 + SYNC_OVERHEAD_S))


def test_without_interruption_weights_wait_for_the_longest_completion():
    mixed = Lengths(median=3_000, sigma=1.0, cap=30_000, prompt=0)
    waits, interrupts = (run(1, lengths=mixed, iterations=50, interrupts=value) for value in (False, True))
    assert waits.seconds_per_iteration > interrupts.seconds_per_iteration


def test_a_host_that_fails_costs_its_restart_and_no_trajectory():
    calm = run(1, iterations=2000)
    failing = run(1, iterations=2000, failures_per_host_s=1e-4)  # with ranks, so all starts again
    assert failing.lost_hosts > 0
    lost_s = 2000 * (failing.seconds_per_iteration - calm.seconds_per_iteration)
    # what was under way is done again: at most an update and a rollout for each failure
    assert RESTART_S <= lost_s / failing.lost_hosts <= RESTART_S + 21


def test_the_pace_of_a_step_is_the_line_through_published_speeds():
    bytes_read = np.array(list(simulated_cluster.PUBLISHED_TOKENS_PER_S))
    seconds = 1 / np.array(list(simulated_cluster.PUBLISHED_TOKENS_PER_S.values()))
    slope, overhead_s = np.polyfit(bytes_read, seconds, 1)
    assert pytest.approx(overhead_s, rel=0.02) == simulated_cluster.STEP_OVERHEAD_S
    assert pytest.approx(1 / (slope * 2.039e12), rel=0.02) == simulated_cluster.MEMORY_EFFICIENCY


def test_an_update_of_long_sequences_takes_longer_by_attentions_scores():
    machine, config = cluster_sim.Machine(), cluster_sim.WORKLOADS["math-7b"].config()
    more_s = [cluster_sim.update_s("math-7b", 64, 40_000_000, context) for context in (0.0, 10_000.0)]
    # forward of causal attention: 2 products of 2 operations with half of the context: 4 times with the backward and
    # the recomputed forward, and the score's forward
    operations = 2 * 10_000 * 28 * 128 * 28 * 40_000_000 * 5
    assert config.num_hidden_layers == 28
    assert more_s[1] - more_s[0] == pytest.approx(operations / (64 * machine.flops * machine.mfu))


def test_the_planner_places_the_published_runs():
    for name, workload in cluster_sim.WORKLOADS.items():
        for staleness in (0, 4):
            layout = cluster_sim.layout(workload, workload.gpus, staleness)
            share = 1 if staleness == 0 else 0.25
            assert layout.ranks == share * workload.gpus
            assert cluster_sim.update_s(name, layout.ranks, 50_000_000) > 0
    assert cluster_sim.WORKLOADS["math-1.5b"].published == 2.77
    assert cluster_sim.WORKLOADS["code-32b"].published == 1.64
