"""The benchmarks run, in their tiny form, and measure the same work on both sides. Their times are not tested."""

import asyncio
import importlib.util
import json
import logging
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from benchmarks import (
    async_overlap,
    async_parts,
    delta_sync,
    gpu_update,
    growth,
    grpo_vs_trl,
    held_trajectories,
    lag,
    local_engine,
    orchestrator,
    packing,
    parallel,
    plan,
    sync_faults,
    weight_sync,
)
from benchmarks.async_overlap import PlaybackEngine
from benchmarks.lengths import ForcedLengths, equal_lengths, lognormal_lengths, session_length, skewed_lengths
from benchmarks.report import PeakMemory, Report, interleaved, median_ratio
from lightrl.strategies.costs import Machine, Work, fsdp2_cost
from lightrl.trajectory import Sampling

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _threads_and_logs_as_before():
    before = torch.get_num_threads()
    levels = {name: logging.getLogger(name).level for name in ("lightrl", "lightning.pytorch")}
    yield
    torch.set_num_threads(before)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("forked_children")
def test_a_fleet_that_grows_and_shrinks_loses_no_request():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.elastic", "--fleet", "1,2,1", "--seconds", "2"],
        capture_output=True, text=True, timeout=170, check=True,
    )  # fmt: skip
    (row,) = [row for line in done.stdout.splitlines() if line.startswith("{") and "fleet" in (row := json.loads(line))]
    assert (row["fleet"], row["lost_requests"], row["unproven_tokens"]) == ("1-2-1", 0, 0)
    assert row["tokens"] > 0


def test_an_update_is_compared_with_fine_tuning_of_its_tokens():
    done = forked.run(
        [sys.executable, "-m", "benchmarks.update_vs_sft", "--quick"],
        capture_output=True, text=True, timeout=170, check=True, children_fork=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = [(row["processes"], row["against"]) for row in rows if row.get("measurement") == "update"]
    assert sorted(measured) == [(1, "padded"), (1, "sft"), (2, "sft")]
    assert rows[-1] == {"model": "1M", "ratio": min(row["ratio"] for row in rows if row.get("against") == "sft")}


def printed(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("count", "cap"), [(128, 128), (64, 256), (512, 64)])
def test_skewed_lengths_have_5_percent_at_the_cap_and_a_mean_of_a_quarter_of_it(count, cap):
    lengths = skewed_lengths(count, cap)
    assert len(lengths) == count
    assert min(lengths) >= 1
    assert lengths.count(cap) / count == pytest.approx(0.05, abs=0.01)
    assert statistics.mean(lengths) == pytest.approx(cap / 4, rel=0.03)
    assert statistics.median(lengths) < 0.75 * statistics.mean(lengths)  # ln 2 of the mean if it is geometric


@pytest.mark.parametrize("cap", [256, 4096])
def test_lognormal_lengths_have_their_tail_whatever_the_cap(cap):
    lengths = sorted(lognormal_lengths(128, cap))
    assert lengths[-1] == cap
    assert lengths[121] / statistics.median(lengths) == pytest.approx(math.exp(0.8 * 1.645), rel=0.05)
    assert cap / statistics.mean(lengths) == pytest.approx(6, rel=0.1)


def test_equal_lengths_are_half_the_cap():
    assert equal_lengths(3, 10) == [5, 5, 5]


def test_a_session_has_the_length_of_its_position_and_sample():
    lengths = [10, 11, 12, 13]
    assert [session_length(f"{position}:some/prompt/1", lengths, 2) for position in range(3)] == [11, 13, 11]


def test_forced_rows_draw_the_end_token_at_their_length_and_not_before():
    force = ForcedLengths([1, 2, 3], end_token=1, prompt_tokens=4, cap=3)
    first = force(torch.zeros(3, 4).long(), torch.zeros(3, 5)).softmax(-1)[:, 1]
    second = force(torch.zeros(3, 5).long(), torch.zeros(3, 5)).softmax(-1)[:, 1]
    third = force(torch.zeros(3, 6).long(), torch.zeros(3, 5)).softmax(-1)[:, 1]
    assert first.tolist() == [1, 0, 0]
    assert second[1:].tolist() == [1, 0]
    assert third[2] == 0  # the cap ends it


def test_contenders_take_turns_in_alternating_order():
    calls: list[str] = []
    found = interleaved({name: lambda name=name: calls.append(name) or 1.0 for name in "ab"}, repeats=2)
    assert calls == ["a", "b", "b", "a"]
    assert found == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_ratios_are_made_pair_by_pair():
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"ratio": 2.0, "ratio_min": 1.0, "ratio_max": 3.0}


def test_a_report_prints_the_machine_each_measurement_and_the_summary_last(capsys):
    report = Report("some_benchmark", seed=3)
    with PeakMemory() as memory:
        torch.zeros(1000)
    report.add("speed", tokens_per_s=12.5, **memory.values())
    report.finish(ratio=2.0)
    lines = printed(capsys)
    assert lines[0]["machine"]["cores"] >= 1
    assert lines[1]["tokens_per_s"] == 12.5
    assert lines[1]["peak_rss_mib"] > 0
    assert lines[-1] == {"ratio": 2.0}


def test_a_played_back_completion_goes_on_under_the_version_that_interrupts_it():
    async def interrupted() -> list[int]:
        engine = PlaybackEngine([20], group_size=1, seconds_per_token=0.01, load_s=0.001)
        engine.start(Qwen3Config(vocab_size=8))
        engine.load_weights([], weight_version=0)
        writing = asyncio.create_task(engine.generate([3], Sampling(), session="0:a/0"))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.load_weights, [], weight_version=1)
        (completion,) = await writing
        return completion.weight_versions

    versions = asyncio.run(interrupted())
    assert len(versions) == 20
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_packing_gives_the_gradients_of_the_padded_form(capsys):
    packing.main(["--quick"])
    rows = [line for line in printed(capsys) if "form" in line]
    assert {row["form"] for row in rows} == {"padded", "rectangles", "shared"}
    assert max(row["gradient_difference"] for row in rows) < packing.LARGEST_DIFFERENCE


def test_local_engine_prints_its_ratio_to_generate(capsys):
    local_engine.main(["--quick", "--workloads", "skewed", "--repeats", "1"])
    assert printed(capsys)[-1]["ratio_1M_64_skewed"] > 0


@pytest.mark.usefixtures("forked_children")
def test_growth_opens_prompts_in_every_form(capsys):
    growth.main(["--quick"])
    lines = printed(capsys)
    rows = [line for line in lines if line.get("axis") == "prompts"]
    assert [(row["prompts"], row["form"], row["is_cached"]) for row in rows] == [
        (20_000, "jsonl", False), (20_000, "parquet", False), (20_000, "parquet", True),
    ]  # fmt: skip
    assert all(row["start_s"] > 0 and row["rss_mib"] > row["imports_mib"] for row in rows)
    marks = [line for line in lines if line.get("axis") == "iterations"]
    assert [row["iteration"] for row in marks] == [2, 10]
    assert all(row["checkpoint_bytes"] > 0 and row["processor_s"] > 0 for row in marks)


def test_growth_measures_what_it_costs_to_hold_trajectories():
    row = held_trajectories.hold(16, 50)
    assert (row["trajectories"], row["tokens_each"], "bytes_per_token" in row) == (16, 250, True)
    assert row["trajectories_per_processor_s"] > 0


def test_async_parts_measures_supports_and_the_lag_probe(capsys):
    async_parts.main(["--quick"])
    update, decoding, *roundings, steps = printed(capsys)[1:]
    assert all(row["with_cpu_s"] > 0 and row["without_cpu_s"] > 0 and row["ratio"] > 0 for row in (update, decoding))
    for row in roundings:  # of a few products, and of the logprob itself
        assert 0 < row["max_abs_dlogp_nats"] < 32 * max(row["float32_spacing"], 2**-21)
    assert 0 < steps["part_cpu_ms"] < steps["iteration_cpu_ms"]


@pytest.mark.usefixtures("forked_children")
def test_orchestrator_compares_the_controller_to_a_bare_loop(capsys):
    orchestrator.main(["--quick"])
    lines = printed(capsys)
    assert {line["measurement"] for line in lines if "in_flight" in line} == {"bare", "engine", "controller"}
    assert lines[-1]["controller_ratio_40"] > 0


def test_async_overlap_keeps_its_staleness_bound_and_the_distribution_of_lengths(capsys):
    async_overlap.main(["--quick"])
    lines = [line for line in printed(capsys) if "order" in line]
    rows = [line for line in lines if line["measurement"] == "overlap"]
    assert [row["staleness"] for row in rows] == [0, 1]
    assert all(row["staleness_reached_versions"] <= row["staleness"] for row in rows)
    assert [(row["ks_distance"], row["discarded_groups"]) for row in rows] == [(0.0, 0.0)] * 2
    simulated = {(row["order"], row["longest_in_updates"], row["staleness"]): row for row in lines if row not in rows}
    windowed = [row for (order, _, _), row in simulated.items() if order == "windowed"]
    assert all(row["discarded_groups"] == 0 for row in windowed)
    assert len({row["ks_distance"] for row in windowed}) == 1  # that of the draws themselves
    assert windowed[0]["ks_distance"] < 1.95 / 1000**0.5
    for order in ("redraw", "discard", "over-sample"):  # at η = 1, stragglers of 4 updates
        assert simulated[order, 4.0, 1]["discarded_groups"] > 0
        assert simulated[order, 4.0, 1]["mean_length"] < 0.9 * simulated["windowed", 4.0, 1]["mean_length"]
    assert simulated["windowed", 0.9, 1]["idle_fraction"] == 0


@pytest.mark.usefixtures("forked_children")
def test_async_overlap_asks_a_server_process_and_syncs_it(capsys):
    async_overlap.main(["--quick", "--engine", "sglang"])
    rows = [line for line in printed(capsys) if line.get("measurement") == "overlap"]
    assert [row["staleness"] for row in rows] == [0, 1]
    assert all(row["staleness_reached_versions"] <= row["staleness"] for row in rows)
    assert all(row["trained_tokens"] == sum(lognormal_lengths(8, 8)) and row["sync_s"] > 0 for row in rows)


def test_grpo_vs_trl_runs_lightrl_by_turns(capsys):
    grpo_vs_trl.main(["--quick", "--threads", "1", "--tasks", "skewed", "--contenders", "lightrl"])
    (row,) = [line for line in printed(capsys) if "contender" in line]
    assert row["trained_tokens"] == sum(skewed_lengths(32, 16))


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: extra [bench]")
def test_grpo_vs_trl_trains_as_many_tokens_on_both_sides(capsys):
    grpo_vs_trl.main(["--quick", "--threads", "1", "--tasks", "skewed", "--contenders", "trl,lightrl"])
    lines = printed(capsys)
    tokens = [line["trained_tokens"] for line in lines if "contender" in line]
    assert tokens == [sum(skewed_lengths(32, 16))] * 2
    assert lines[-1]["ratio_skewed"] > 0


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_grpo_vs_trl_says_how_to_install_trl():
    with pytest.raises(SystemExit, match="not installed"):
        grpo_vs_trl.main(["--quick"])


def test_weight_sync_measures_each_transport_in_processes_of_its_own(capfd):
    weight_sync.main(["--quick", "--transports", "gloo,disk"])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    found = {line["measurement"] for line in lines if "measurement" in line}
    assert found == {"gloo", "disk", "plain_memory_copy", "plain_file_copy", "share"}


@pytest.mark.usefixtures("forked_children")
def test_delta_sync_gives_the_servers_the_trainers_weights_and_sends_little(capfd):
    weight_sync.main(["--quick", "--transports", "delta,growth,paper"])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    (delta,) = [line for line in lines if line.get("measurement") == "delta"]
    assert delta["bit_equal"] is True
    assert 0 < delta["bytes_fraction"] < 0.05
    grown = [line for line in lines if line.get("measurement") == "growth"]
    transports = {"delta transport, full", "delta", "broadcast", "shared folder"}
    assert {(line["transport"], line["receivers"]) for line in grown} == {
        (transport, receivers) for transport in transports for receivers in (1, 2)
    }
    full = [line for line in grown if line["transport"] == "delta transport, full"]
    assert all(line["models_sent_by_trainer"] == pytest.approx(line["receivers"], rel=0.01) for line in full)
    assert all(line["is_arithmetic"] for line in lines if line.get("measurement") == "paper")


def test_a_killed_benchmark_leaves_neither_its_link_nor_a_process_behind():
    def wait_on_a_link(pipe):
        with delta_sync.Link() as link:
            holder = link._holder and link._holder.pid
            child = link.prefix and subprocess.Popen([*link.prefix, "sleep", "60"]).pid
            pipe.send((link._own_end, holder, child))
            time.sleep(60)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=wait_on_a_link, args=(there,))
    process.start()
    link, holder, child = here.recv()
    if not child:
        process.kill()
        pytest.skip("needs root and iproute2")
    assert Path(f"/sys/class/net/{link}").exists()
    process.kill()
    left = [Path(f"/sys/class/net/{link}"), Path(f"/proc/{holder}/ns"), Path(f"/proc/{child}/ns")]
    deadline = time.monotonic() + 20
    while any(path.exists() for path in left):  # the kernel removes a namespace in the background
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("forked_children")
def test_sync_faults_prints_a_row_for_each_run_and_counts_false_alarms(capsys):
    sync_faults.main(["--quick"])
    rows = printed(capsys)
    found = [row for row in rows if "fault" in row]
    assert [row["servers"] for row in found] == [1, 1, 1]
    assert {"fault", "servers", "lr", "dtype", "noticed_by", "iterations"} <= found[0].keys()
    assert (found[0]["fault"], found[0]["iterations"]) == ("acknowledged and ignored", 0)
    (healthy,) = [row for row in rows if "healthy_syncs" in row]
    assert healthy["healthy_syncs"] == 16
    assert healthy["false_alarms"] == 0


def test_plan_prints_both_strategies_for_each_size(capsys):
    plan.main(["--gpus", "64", "--model", "qwen3-0.6b"])
    rows = [line for line in printed(capsys) if "strategy" in line]
    assert [(row["gpus"], row["strategy"]) for row in rows] == [(8, "FSDP2"), (8, "3D"), (64, "FSDP2"), (64, "3D")]
    assert all(row["fits"] for row in rows)


def test_plans_formula_for_a_ranks_state_is_what_fsdp2_shards():
    values = {**plan.MODELS["qwen3-0.6b"], "num_hidden_layers": 2, "vocab_size": 1024}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    paper = fsdp2_cost(config, 64, Work(2**16), Machine()).state_bytes
    assert plan.sharded_state_bytes(config, 64, 0) == pytest.approx(paper, rel=1e-3)  # norms are not in the formula


def test_plan_says_which_constants_are_assumed(capsys):
    plan.main(["--gpus", "8", "--model", "qwen3-0.6b", "--mfu", "0.3"])
    assumed = printed(capsys)[0]["assumed"]
    assert assumed["mfu"] == 0.3
    assert assumed["memory_bytes"] == 80e9


@pytest.mark.slow
def test_parallel_sends_little_more_than_it_must(capfd):
    parallel.main(["--quick"])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    (row,) = [line for line in lines if line.get("topology") == "2-1-1"]
    assert row["formula"] == 0.2  # (2 - 1) / (4 + 2 - 1)
    assert row["least_by_axis"] == {"dp": 0, "tp": 0, "pp": round(4 * 8 * 15 * 32 / 2**20, 3)}
    assert 1 <= row["sent_over_least"] < 1.3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_update_says_when_there_is_no_gpu():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        gpu_update.main([])


def test_gpu_update_has_the_same_gradients_on_both_sides(capsys):
    config = gpu_update.make_config("tiny")
    contest = gpu_update.Contest(config, gpu_update.make_parts(256, 32, config.vocab_size), "cpu", plain_tokens=128)
    assert len(contest.plain) > 1
    contest._step = lambda: None
    gradients = []
    for update in (contest.update_plain, contest.update_lightrl):
        contest.model.zero_grad()
        update()
        gradients.append(torch.cat([value.grad.flatten() for value in contest.model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_gpu_update_prints_both_contenders(capsys):
    gpu_update.main(["--quick"])
    rows = [line for line in printed(capsys) if "contender" in line]
    assert [(row["measurement"], row["contender"]) for row in rows] == [
        ("update", "plain"), ("update", "lightrl"), ("logprobs", "plain"), ("logprobs", "lightrl"),
    ]  # fmt: skip


def test_flops_of_a_small_model():
    # A layer: 2 · 32 · 8 · (4 + 2) + 3 · 32 · 64 = 9,216 weights; the head 64 · 32 at two tokens; 2 · 32 · (9 + 1) for
    # the attention of a layer over sequences of 3 and 1.
    forward = 2 * (2 * 9216 * 4 + 64 * 32 * 2) + 2 * 2 * 32 * 10
    assert gpu_update.flops(gpu_update.make_config("tiny"), [3, 1], 2, has_backward=False) == forward
    assert gpu_update.flops(gpu_update.make_config("tiny"), [3, 1], 2, has_backward=True) == 3 * forward


def test_a_run_with_lag_trains_on_what_older_weights_sampled(tmp_path, capsys, monkeypatch):
    lags = []
    sampled = lag.sample
    for module in ("algorithms", "lag"):  # it would stay quiet after this test
        monkeypatch.setattr(f"benchmarks.{module}.quiet", lambda: None)
    monkeypatch.setattr(lag, "sample", lambda *args: lags.append(args[2]) or sampled(*args))
    lag.main(["--quick", "--out", str(tmp_path)])
    assert lags == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3]  # on-policy; then a queue that begins with two iterations' worth
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")][1:]
    trained = [row for row in rows if row["measurement"] == "trained"]
    assert [(row["loss"], row["staleness"], row["seeds"]) for row in trained] == [("GRPO", 0, 1), ("OAPL", 2, 1)]
    counts = [(row["loss"], row["runs"], row["healthy"]) for row in rows[2:] if row["runs"]]
    assert counts == [("GRPO", 1, 1), ("OAPL", 1, 1), ("seeds before 12", 2, 2), ("all", 2, 2)]
    assert rows[0]["fraction_of_on_policy"] == 1
    assert rows[0]["ess_warning_lead_iterations"] is None
    lags.clear()
    lag.main(["--quick", "--out", str(tmp_path)])
    assert lags == []  # from the records


def test_a_collapse_is_a_fall_of_the_mean_and_its_warning_comes_before():
    rewards = [0.3] * 10 + [0.9] * 30 + [0.5] * 10  # the mean of 10 is below 0.7 when more than half are of the last
    assert lag.collapse_of(rewards) == 45
    assert lag.collapse_of([0.9] * 40 + [0.8] * 40) is None
    ess = [1.0] * 20 + [0.1] * 30
    even, near = {"ess_fraction": [1.0] * 50}, {"kl_behavior_nats": [0.0] * 50}
    warning, means = lag.watched({"ess_fraction": ess, **near})
    assert warning == 29  # the mean of 9 of them and a 1 is 0.19
    assert [len(values) for values in means] == [41] * 3  # since the 10th iteration
    assert min(means[0]) == pytest.approx(0.1)
    assert lag.watched({**even, "kl_behavior_nats": [0.0] * 20 + [3.0] * 30})[0] == 29  # 3 · 9 = 27, not above 2.8 · 10
    moving = {"ess_fraction": [1.0] * 60, "kl_behavior_nats": [0.0] * 60, "step_k3_nats": [0.01] * 60}
    moving["grad_norm"] = [0.5] * 60  # 0.014 · √0.5 = 0.0099
    assert lag.watched(moving)[0] == 49  # 30 of them, without the first 20
    assert lag.watched({**moving, "step_k3_nats": [1.0] * 20 + [0.0098] * 40})[0] is None
    assert lag.watched({**moving, "grad_norm": [0.52] * 60})[0] is None


def test_other_seeds_decide_whether_a_warning_without_a_collapse_is_a_false_alarm():
    def run(loss, seed, rewards, *, step=0.015, lr=lag.LR):
        flat = {"ess_fraction": [1.0] * 80, "kl_behavior_nats": [0.0] * 80, "step_k3_nats": [step] * 80}
        flat["grad_norm"] = [1.0] * 80
        return {"loss": loss, "staleness": 64, "lr": lr, "seed": seed, "reward": rewards, **flat}

    stays, falls, falls_early = [0.9] * 80, [0.9] * 65 + [0.5] * 15, [0.9] * 35 + [0.5] * 45
    runs = [run("GRPO", 0, stays), run("GRPO", 1, stays, step=0.001)]  # healthy, one with a warning
    runs += [run("OAPL", 0, stays), run("OAPL", 15, falls)]  # on the edge; 70 - 49 = 21 iterations ahead
    runs += [run("OAPL", 1, stays, step=0.001), run("OAPL", 2, falls_early), run("OAPL", 16, falls, step=0.001)]
    runs += [run("GRPO", 0, falls, lr=4 * lag.LR), run("GRPO", 1, stays, lr=4 * lag.LR)]
    rows = lag.warnings_of(runs)
    provoked = {"provoked_collapses": 1, "warned_in_time": 1, "least_lead_iterations": 21}
    provoked |= {"provoked_without_collapse": 1, "of_these_with_a_warning": 1}
    none = {key: None if key == "least_lead_iterations" else 0 for key in provoked}
    no_edge = {"on_the_edge": 0, "edge_collapses": 0, "edge_warned_in_time": 0, "edge_warned_without_collapse": 0}
    healthy = {"healthy": 2, "healthy_with_a_warning": 1}
    assert rows["GRPO"] == {"runs": 4, **provoked, **no_edge, **healthy}
    edge = {"on_the_edge": 5, "edge_collapses": 3, "edge_warned_in_time": 1, "edge_warned_without_collapse": 1}
    assert rows["OAPL"] == {"runs": 5, **none, **edge, "healthy": 0, "healthy_with_a_warning": 0}
    assert rows["all"] == {"runs": 9, **provoked, **edge, **healthy}
    assert rows["seeds before 12"]["on_the_edge"] == 3  # seeds 0 to 2, of which one collapsed
    assert rows["seeds 12 to 15"]["edge_warned_in_time"] == 1
    assert rows["seeds from 16 on"]["edge_collapses"] == 1


def test_a_row_has_the_reward_against_on_policy_and_the_least_lead():
    rewards, ess = [0.3] * 10 + [0.9] * 30 + [0.5] * 10, [1.0] * 20 + [0.1] * 30
    records = {
        ("GRPO", 0, lag.LR, 0): {"reward": [0.8] * 50, "ess_fraction": [1.0] * 50},
        ("GRPO", 64, lag.LR, 0): {"reward": rewards, "ess_fraction": ess},
        ("OAPL", 64, lag.LR, 0): {"reward": rewards, "ess_fraction": [1.0] * 50},
        ("TOPR", 64, lag.LR, 0): {"reward": [0.8] * 50, "ess_fraction": ess},
    }
    for record in records.values():
        record["kl_behavior_nats"] = [0.0] * 50
    rows = {loss: lag.row_of(records, loss, 64, lag.LR, [0]) for loss in ("GRPO", "OAPL", "TOPR")}
    assert [row["ess_warning_lead_iterations"] for row in rows.values()] == [16, "missed", None]
    assert [row["warned_without_collapse"] for row in rows.values()] == [0, 0, 1]
    assert [row["fraction_of_on_policy"] for row in rows.values()] == [0.625, 0.625, 1.0]
