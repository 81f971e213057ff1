"""The benchmarks run, in their tiny form, and measure the same work on both sides. Their times are not tested."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch

from benchmarks import (
    algorithms,
    async_overlap,
    gpu_update,
    growth,
    grpo_vs_trl,
    lag,
    learned,
    learning_vs_trl,
    local_engine,
    orchestrator,
    plan,
    roofline,
    routing,
    same_update,
    weight_sync,
)
from benchmarks.lengths import lognormal_lengths, skewed_lengths

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("forked_children")]


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def printed(capture) -> list[dict]:
    return rows_of(capture.readouterr().out)


@pytest.mark.extra
def test_an_update_is_compared_with_fine_tuning_of_its_tokens():
    command = [sys.executable, "-m", "benchmarks.update_vs_sft", "--quick", "--topk", "0,8"]
    rows = rows_of(forked.run(command, stdout=subprocess.PIPE, text=True, check=True, children_fork=True).stdout)
    updates = [row for row in rows if row.get("measurement") == "update"]
    plain, centered = ([row for row in updates if ("topk" in row) == is_centered] for is_centered in (False, True))
    for part in (plain, centered):
        assert sorted((row["processes"], row["against"]) for row in part) == [(1, "padded"), (1, "sft"), (2, "sft")]
    assert {(row["topk"], row["topk_bytes"], row["topk_tensor_bytes"]) for row in centered} == {(8, 64, 96)}
    assert rows[-1] == {"model": "1M", "ratio": min(row["ratio"] for row in plain if row["against"] == "sft")}


@pytest.mark.extra
def test_local_engine_prints_its_ratio_to_generate(capsys):
    local_engine.main(["--quick", "--workloads", "skewed", "--repeats", "1"])
    assert printed(capsys)[-1]["ratio_1M_64_skewed"] > 0


@pytest.mark.extra
def test_growth_opens_prompts_in_every_form(capsys):
    growth.main(["--quick"])
    rows = [line for line in printed(capsys) if "prompts" in line]
    assert [(row["prompts"], row["form"], row["is_cached"]) for row in rows] == [
        (20_000, "jsonl", False), (20_000, "parquet", False), (20_000, "parquet", True),
    ]  # fmt: skip


@pytest.mark.extra
def test_orchestrator_compares_the_controller_to_a_bare_loop(capsys):
    orchestrator.main(["--quick"])
    lines = printed(capsys)
    assert {line["measurement"] for line in lines if "in_flight" in line} == {"bare", "engine", "controller"}
    assert lines[-1]["controller_ratio_40"] > 0


@pytest.mark.parametrize("engine", [[], pytest.param(["--engine", "sglang"], marks=pytest.mark.extra)])
def test_async_overlap_keeps_its_staleness_bound_and_the_distribution_of_lengths(engine, capsys):
    async_overlap.main(["--quick", *engine])
    lines = printed(capsys)
    rows = [line for line in lines if line.get("measurement") == "overlap"]
    assert [row["staleness"] for row in rows] == [0, 1]
    assert all(row["staleness_reached_versions"] <= row["staleness"] for row in rows)
    if engine:  # a server process
        assert all(row["trained_tokens"] == sum(lognormal_lengths(8, 8)) and row["sync_s"] > 0 for row in rows)
    else:
        assert [(row["ks_distance"], row["discarded_groups"]) for row in rows] == [(0.0, 0.0)] * 2
        assert {line["order"] for line in lines if "order" in line} >= {"windowed", "discard", "over-sample"}


@pytest.mark.extra
def test_grpo_vs_trl_runs_lightrl_by_turns(capsys):
    grpo_vs_trl.main(["--quick", "--threads", "1", "--tasks", "skewed", "--contenders", "lightrl"])
    (row,) = [line for line in printed(capsys) if "contender" in line]
    assert row["trained_tokens"] == sum(skewed_lengths(32, 16))


def test_curves_are_compared_in_pairs_of_seeds_that_ran_equally_long():
    def rows(seed: int, trl: list[float], lightrl: list[float]) -> list[dict]:
        both = zip(("trl", "lightrl"), (trl, lightrl), strict=True)
        more = {"task": "sums", "seed": seed, "ratio": 2.5, "cpu_ratio": 3}
        return [{"contender": name, "rewards": curve, "held_out": curve[-1], **more} for name, curve in both]

    long = rows(0, [0.0] * 10 + [0.5] * 10, [0.1] * 10 + [0.25] * 10)
    table = learning_vs_trl.table([*long, *rows(1, [0.2] * 10, [0.4] * 10)], "sums")
    assert "| sampled, iterations 1 to 10 | 10.0 | 25.0 | +15.0 ± 5.0 | 2 |" in table
    assert "| sampled, iterations 11 to 20 | 50.0 | 25.0 | -25.0 ± nan | 1 |" in table
    assert "| held out, greedy, after 11 | 20.0 | 40.0 | +20.0 ± nan | 1 |" in table
    assert "processor time, TRL over lightrl, by seed: 3.00, 3.00" in table


def test_both_trainers_get_the_reward_of_a_completion_that_ends():
    tokenizer = SimpleNamespace(
        eos_token_id=0,
        batch_decode=lambda rows, **_: ["Positive." if 1 in ids else "positive, positive" for ids in rows],
    )
    completions = [[1, 0], [1, 2], [2, 0]]
    assert learned.LEARNED["reviews"].rewards(tokenizer, completions, ["positive"] * 3) == [1.0, 0.0, 0.0]
    assert (
        learned.train_rows("train", "sums", 3)
        == learned.LEARNED["sums"].train_rows(3)
        != learned.train_rows("train", "sums", 4)
    )


@pytest.mark.extra
def test_trl_makes_the_same_update_of_the_same_completions(capsys):
    pytest.importorskip("trl")
    same_update.main([])
    (row,) = [line for line in printed(capsys) if line.get("measurement") == "update"]
    # TRL adds 1e-4 to a standard deviation of about 0.5, lightrl 1e-5; the rest is rounding
    assert row["difference"] < 1e-3
    assert row["trl_norm"] > 1


@pytest.mark.extra
def test_weight_sync_measures_each_transport_and_delta_sends_little(capfd):
    weight_sync.main(["--quick", "--transports", "gloo,disk,delta"])
    lines = printed(capfd)
    measurements = {line.get("measurement") for line in lines}
    assert {"gloo", "disk", "plain_memory_copy", "plain_file_copy", "share"} <= measurements
    (delta,) = [line for line in lines if line.get("measurement") == "delta"]
    assert delta["bit_equal"] is True
    assert 0 < delta["bytes_fraction"] < 0.05


@pytest.mark.extra
def test_routing_computes_each_prompt_token_at_most_once_for_a_turn(capsys):
    routing.main(["--servers", "2", "--groups", "1", "--routers", "lightrl"])
    (row,) = [line for line in printed(capsys) if "router" in line]
    assert row["lower_bound"] <= row["computed_fraction"] <= 1


def test_plan_prints_both_strategies_for_each_size(capsys):
    plan.main(["--gpus", "64", "--model", "qwen3-0.6b"])
    rows = [line for line in printed(capsys) if line.get("measurement") == "update"]
    found = {(row["gpus"], row["layout"].split()[0]) for row in rows}
    assert found == {(8, "FSDP2"), (8, "3D"), (64, "FSDP2"), (64, "3D")}
    assert all(0 < row["memory_gib"] < 80 for row in rows)


@pytest.mark.extra
def test_gpu_update_has_the_same_gradients_on_both_sides():
    config = gpu_update.make_config("tiny")
    experience = gpu_update.make_parts(256, 32, config.vocab_size)
    gradients = []
    for name in ("plain", "pure"):
        model = gpu_update.make_model(config, torch.float32).cpu()
        gpu_update.backward_of(name, model, experience.to("cpu"), plain_tokens=128)()
        gradients.append(torch.cat([value.grad.flatten() for value in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


@pytest.mark.extra
def test_gpu_update_prints_each_contender(capsys):
    gpu_update.main(["--quick", "--contenders", "plain,pure,mixed"])
    rows = [line for line in printed(capsys) if "contender" in line]
    assert [row["contender"] for row in rows] == ["plain", "pure", "mixed"]


@pytest.mark.extra
def test_gpu_update_times_the_update_phase_of_a_trainer(capsys):
    gpu_update.main(["--quick", "--contenders", "trainer"])
    (row,) = [line for line in printed(capsys) if "contender" in line]
    assert row["tokens_per_s"] > 0


@pytest.mark.extra
def test_the_roofline_has_no_part_that_gets_slower_when_it_is_compiled(capsys):
    for form in ([], ["--eager"], ["--shared"]):
        roofline.main(["--quick", *form])
    fused, eager, shared = [line for line in printed(capsys) if line.get("measurement") == "update"]
    assert fused["tokens"] == eager["tokens"] == 256
    assert all(fused[f"{part}_us"] <= eager[f"{part}_us"] for part in ("layers", "attention", "head", "optimizer"))
    assert shared["attention_us"] <= fused["attention_us"]


@pytest.mark.extra
def test_a_run_with_lag_trains_on_what_older_weights_sampled(tmp_path, capsys, monkeypatch):
    lags = []
    sampled = lag.sample
    for module in ("algorithms", "lag"):  # it would stay quiet after this test
        monkeypatch.setattr(f"benchmarks.{module}.quiet", lambda: None)
    monkeypatch.setattr(lag, "sample", lambda *args: lags.append(args[2]) or sampled(*args))
    lag.main(["--quick", "--out", str(tmp_path)])
    assert lags == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3]  # on-policy; then a queue that begins with two iterations' worth
    trained = [row for row in printed(capsys)[1:] if row["measurement"] == "trained"]
    assert [(row["loss"], row["staleness"], row["seeds"]) for row in trained] == [("GRPO", 0, 1), ("OAPL", 2, 1)]
    lags.clear()
    lag.main(["--quick", "--out", str(tmp_path)])
    assert lags == []  # from the records


@pytest.mark.extra
def test_algorithms_writes_curves_and_does_not_repeat_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(algorithms.__file__).parents[1])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    command = ["--quick", "--out", str(tmp_path), "--algorithms"]
    algorithms.main([*command, "decoupled"])
    assert '"measurement": "decoupled"' in capsys.readouterr().out
    shutil.rmtree(tmp_path / "runs")  # as in a fresh checkout, which has the curves alone
    algorithms.main([*command, "decoupled"])
    assert '"measurement"' not in capsys.readouterr().out
    algorithms.main([*command, "GRPO"])  # keeps what is there
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["seed"], row["iteration"]) for row in rows] == [
        ("GRPO", "0", "1"),
        ("GRPO", "0", "2"),
        ("decoupled", "0", "1"),
        ("decoupled", "0", "2"),
    ]
    assert (tmp_path / "curves.png").stat().st_size > 5000
