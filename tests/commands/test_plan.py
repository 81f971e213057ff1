import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from tiny import tiny_spec

from examples.quickstart.task import LargestDigit
from lightrl import Trainer
from lightrl.algorithms import GRPO, PPO, AdaptiveKL
from lightrl.commands.launch import run as run_launch
from lightrl.commands.plan import batch_rows, plan_mermaid, plan_text, run
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.models import Role, RoleMesh
from lightrl.plan.planned_run import planned_run
from lightrl.trajectory import Sampling

ROOT = Path(__file__).parents[2]
QUICKSTART = ["--config", "examples/quickstart/grpo.yaml"]
Printed = Callable[..., str]


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def printed_plan(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs the command, and gives what it prints. Its exit code is that of a failed check if the run does not fit."""

    def run_plan(*args: str) -> str:
        code, out = run([*args]), capsys.readouterr().out
        assert code == ("\ndoes not fit\n" in out)
        return out

    return run_plan


def test_the_drawing_has_every_call_and_the_keys_between_them() -> None:
    module = PPO(tiny_spec(), reward=len, reference=AdaptiveKL(0.1, tiny_spec()))
    drawn = plan_mermaid(module.data_flow())
    assert drawn.splitlines()[0] == "flowchart LR"
    assert '  reference_logprobs["reference_logprobs<br/>reference on trainer"]' in drawn
    assert '  generate -- "token_ids" --> values' in drawn
    assert '  advantages -- "returns" --> critic_update' in drawn


def test_the_text_says_roles_and_where_calls_run() -> None:
    text = plan_text(module := PPO(tiny_spec(), reward=len, lr=0.5), module.data_flow())
    assert "  critic         random qwen3: trained, lr 0.5, one number per position" in text
    assert "  reward         reward processes" in text
    assert "reference" not in text


def test_a_critic_that_warms_up_first_hides_no_update() -> None:
    graph = PPO(tiny_spec(), reward=len, critic_warmup_iterations=10).data_flow()
    assert [call.name for call in graph.of_kind("train")] == ["policy_update", "critic_update"]


def test_a_moving_reference_is_not_called_frozen() -> None:
    fixed, moving = (
        PPO(tiny_spec(), reward=len, reference=AdaptiveKL(0.1, tiny_spec(), decay=decay)) for decay in (None, 0.9)
    )
    assert "  reference      random qwen3: frozen" in plan_text(fixed, fixed.data_flow())
    assert "  reference      random qwen3: follows the policy" in plan_text(moving, moving.data_flow())


def test_the_text_says_which_ranks_a_role_has() -> None:
    critic = Role(tiny_spec(), mesh=RoleMesh(4, 2, tp=2))
    text = plan_text(module := PPO(tiny_spec(), reward=len, critic=critic), module.data_flow())
    assert "one number per position, ranks 4 to 5, tp 2" in text


def test_settings_prune_the_graph() -> None:
    plain = GRPO(tiny_spec(), reward=len)
    assert [call.name for call in plain.data_flow().calls] == ["generate", "reward", "advantages", "policy_update"]
    assert [call.name for call in plain.data_flow(from_file=True).calls] == ["advantages", "policy_update"]


def test_the_command_prints_the_plan_of_an_example(printed_plan: Printed) -> None:
    out = printed_plan("--config", "examples/ppo/sync.yaml")
    assert out.startswith("PPO: 6 calls per iteration")
    text, _, drawn = out.partition("\n\ndrawing: paste this into https://mermaid.live")
    assert "flowchart" not in text
    assert drawn.splitlines()[2] == "flowchart LR"
    assert "flowchart LR" in out


SECTION = ["--launch.nodes=2", "--launch.gpus_per_node=4", "--launch.launcher=slurm"]


def test_ranks_servers_and_strategy_come_from_the_launch(printed_plan: Printed) -> None:
    settings = [*QUICKSTART, *SECTION]
    out = printed_plan(*settings, "--launch.ranks=4", "--launch.servers=2", "--launch.tp=2")
    assert "node1 | rank 0   | rank 1   | rank 2   | rank 3\nnode2 | server 0 | server 0 | server 1 | server 1" in out
    assert "trainer.strategy is FSDP2Strategy" in out
    assert "  policy     789,632  789,632  ranks 0 to 3  1 · 4 · 1" in out
    assert "engine: SGLangEngine, servers: 2, tp 2; each device" in out
    assert "256 concurrent trajectories of 64 tokens" in out  # 512 over two servers
    split = printed_plan(*settings, "--launch.allocation=sglang.d1t2+d2p2t1")
    assert "1 servers" not in split
    assert "ranks 0 to 3  2 · 2 · 1" in split


def test_a_launch_that_does_not_fit_is_told_with_what_would_change_it(printed_plan: Printed) -> None:
    gpus = ["--launch.ranks=2", "--launch.servers=2", "--launch.gpu_memory_gb=0.0005"]
    out = printed_plan(*QUICKSTART, *SECTION, *gpus)
    assert "does not fit" in out
    assert "a server's GPU" in out


BIG = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip


def layer_of(folder: Path, policy: dict[str, Any]) -> list[str]:
    """Arguments for the quickstart with another policy."""
    spec = {"tokenizer": "examples.quickstart.task.tokenizer", "config": None, **policy}
    (folder / "policy.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"policy": spec}}}))
    return [*QUICKSTART, "--config", str(folder / "policy.yaml")]


def test_batch_sizes_follow_from_each_other() -> None:
    sampling = Sampling(max_new_tokens=30)
    module = PPO(tiny_spec(), reward=len, group_size=2, microbatch_tokens=64, sampling=sampling)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data = LargestDigit(batch_size=6, max_prompt_tokens=20)
    numbers = {name.strip(): number for name, number, _ in batch_rows(planned_run(module, trainer, data))}
    assert numbers["trajectories per iteration"] == "12"
    assert numbers["tokens per trajectory, at most"] == "50"
    assert numbers["tokens per microbatch, at most"] == "64"
    assert numbers["microbatches per rank and update"] == "10"  # 600 tokens of 64


def test_ranks_that_share_rows_are_in_a_roles_layout(printed_plan: Printed) -> None:
    ranks = ["--trainer.devices=4", "--trainer.strategy=FSDP2Strategy", "--trainer.strategy.cp=2"]
    assert "1 · 2 · 1 · cp 2" in printed_plan(*QUICKSTART, "--trainer.accelerator=cpu", *ranks)


def test_plan_and_launch_say_the_same_of_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, printed_plan: Printed
) -> None:
    four = ["--launch.ranks=4", "--launch.gpus_per_node=4", "--launch.launcher=slurm"]
    arguments = [*layer_of(tmp_path, {"config": BIG}), *four]
    out = printed_plan(*arguments)
    totals = next(line for line in out.splitlines() if line.startswith("  total  "))
    planned = re.split(r" {2,}", totals.strip())[1]  # of rank 0, which has the engine too
    assert run_launch([*arguments, "--dry-run"]) == 0
    assert f"Estimated memory per rank: {planned}." in capsys.readouterr().out


@pytest.mark.parametrize("section", [[], SECTION])
def test_a_plan_for_gpus_needs_none(section: list[str], printed_plan: Printed) -> None:
    out = printed_plan(*QUICKSTART, "--trainer.accelerator=gpu", *section, "--gpu_memory_gb=80")
    assert "fits: 72.0 GB usable of 80.0 GB on each device" in out


@pytest.mark.parametrize(
    ("section", "said"),
    [
        pytest.param([], "CPUs are assumed", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
        (SECTION, "the hosts are assumed to have GPUs"),
        ([*SECTION, "--trainer.accelerator=gpu"], None),
        ([*SECTION, "--trainer.accelerator=cpu"], None),
    ],
)
def test_the_plan_says_which_devices_it_assumed(section: list[str], said: str | None, printed_plan: Printed) -> None:
    out = printed_plan(*QUICKSTART, "--trainer.accelerator=auto", *section)
    assert said in out if said else "assumed" not in out


@pytest.mark.parametrize(("gigabytes", "fits"), [(40, False), (150, True)])
def test_plan_and_launch_agree_on_what_fits_four_ranks_of_a_model_of_1_5_billion(
    gigabytes: int, fits: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, printed_plan: Printed
) -> None:
    four = ["--launch.ranks=4", "--launch.gpus_per_node=4", "--launch.launcher=slurm", "--trainer.accelerator=gpu"]
    arguments = [*layer_of(tmp_path, {"config": BIG}), *four, f"--launch.gpu_memory_gb={gigabytes}"]
    assert ("does not fit" not in printed_plan(*arguments)) == fits
    assert run_launch([*arguments, "--dry-run"]) == (0 if fits else 2)
    assert (f"launch.gpu_memory_gb={gigabytes} is not enough" in capsys.readouterr().err) != fits


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, printed_plan: Printed
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    held = HeldPort("127.0.0.1")  # nobody listens there
    hub = f"http://127.0.0.1:{held.number}"
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    out = printed_plan(*layer_of(tmp_path, {"path": "nobody/no-model"}))
    held.close()
    (line,) = (line for line in out.splitlines() if "Memory was not checked: " in line)
    assert f"Model 'nobody/no-model' is not in the cache, and {hub} does not answer" in line
    assert "Download the model first, or set path to a folder with it." in line
    assert "512  P · G = 32 · 16" in out  # batch sizes need no model


def test_memory_that_is_not_known_is_said_by_plan_and_launch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, printed_plan: Printed
) -> None:
    folder = tmp_path / "without_config"
    folder.mkdir()
    arguments = layer_of(tmp_path, {"path": str(folder)})
    out = printed_plan(*arguments)
    (line,) = (line for line in out.splitlines() if "Memory was not checked: " in line)
    assert str(folder) in line
    assert run([*arguments, "--gpu_memory_gb=80"]) == 2
    assert "because a model cannot be read" in capsys.readouterr().err
    assert run_launch([*arguments, *SECTION, "--launch.ranks=4", "--dry-run"]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_a_launch_that_is_impossible_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUICKSTART, *SECTION, "--launch.ranks=9"]) == 2
    assert "9 trainer ranks need 9 GPUs" in capsys.readouterr().err


def test_the_servers_example_has_all_tables(printed_plan: Printed) -> None:
    out = printed_plan(*QUICKSTART, "--config", "examples/quickstart/sglang_cpu.yaml")
    for title in ("batch sizes", "models", "memory of a rank's device", "host memory of a rank"):
        assert f"\n{title}" in out
    assert "engine: SGLangEngine, servers: 1, tp 1; each device" in out


@pytest.mark.parametrize(
    ("name", "head", "rows"),
    [
        (
            "sft/sft",
            "SFT: batches of data, no rollouts\n\nroles\n  policy         random qwen3: trained, lr 0.0005",
            128,
        ),
        (
            "reward_model/reward_model",
            "  reward_model   random qwen3: trained, lr 0.0005, one number per position",
            128,
        ),
    ],
)
def test_a_module_that_trains_on_data_has_its_batches_and_memory(
    name: str, head: str, rows: int, printed_plan: Printed
) -> None:
    out = printed_plan("--config", f"examples/{name}.yaml")
    assert head in out
    assert f"{rows * 64:,}  {rows} · 64, padded to the longest" in out
    assert "memory of a rank's device" in out
    assert "experience" not in out
    assert "engine" not in out
    assert "flowchart" not in out


@pytest.mark.parametrize("flag", ["--gpu_memory_gb=-5", "--gpu_memory_gb=0", "--launch.gpu_memory_gb=0"])
def test_a_gpu_without_memory_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUICKSTART, flag]) == 2
    assert "gpu_memory_gb must be a finite number above 0, got" in capsys.readouterr().err


def test_trajectories_that_wait_for_a_servers_memory_are_counted(printed_plan: Printed, tmp_path: Path) -> None:
    servers = ["--trainer.engine=SGLangEngine", "--trainer.engine.servers=2", "--trainer.accelerator=gpu"]
    arguments = [*layer_of(tmp_path, {"config": BIG}), *servers, "--model.sampling.max_new_tokens=3072"]
    out = printed_plan(*arguments, "--gpu_memory_gb=20", "--model.microbatch_tokens=4096")
    (line,) = (line for line in out.splitlines() if line.startswith("  run at once"))
    num = int(line.split()[3])
    assert num < 256  # of two servers' 512
    words = " ".join(out.split())
    assert "of 256 trajectories of maximum length fit into a server; the others wait" in words
    assert f"generation takes up to {-(-256 // num)} times as long" in words


def test_a_run_from_a_trajectory_file_generates_nothing(printed_plan: Printed) -> None:
    recorded = ["--data", "TrajectoryDataModule", "--data.path", "runs/quickstart/trajectories"]
    out = printed_plan(*QUICKSTART, *recorded)
    assert "policy_update" in out
    assert "generate" not in out


def test_the_command_prints_what_does_not_fit_in_lines_of_100_columns(printed_plan: Printed) -> None:
    out = printed_plan(*QUICKSTART, "--gpu_memory_gb", "0.5")
    tables = out[out.index("batch sizes") :]  # the last words are whether it fits
    assert "does not fit\n  rank 0 needs " in tables
    assert "model.microbatch_tokens to at most" in " ".join(tables.split())
    assert max(map(len, tables.splitlines())) <= 100


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (["FSDP2Strategy", "ep=3"], "ep=3 divides experts, but no model in this run has any"),
        (["Parallel3DStrategy", "tp=8"], "tp=8 must divide the model's num_attention_heads"),
    ],
)
def test_a_strategy_that_cannot_split_the_model_is_an_error(
    strategy: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, size = strategy
    settings = [f"--trainer.strategy={name}", f"--trainer.strategy.{size}", "--trainer.devices=24"]
    assert run([*QUICKSTART, "--trainer.accelerator=cpu", *settings]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "P · G = 32 · 16" in printed.out


def test_the_settings_that_the_plan_writes_make_the_run_fit(printed_plan: Printed, tmp_path: Path) -> None:
    ranks = ["--trainer.accelerator=gpu", "--trainer.devices=4", "--gpu_memory_gb=30", "--trainer.precision=bf16-mixed"]
    arguments, file = [*layer_of(tmp_path, {"config": BIG}), *ranks], tmp_path / "fits.yaml"
    out = printed_plan(*arguments, "--gpu=A100", f"--write={file}")
    assert "\ndoes not fit\n" in out
    assert "layouts that fit, fastest first, estimated for the A100" in out
    assert yaml.safe_load(file.read_text())["trainer"]["strategy"]["class_path"]
    assert "\nfits: 27.0 GB usable" in printed_plan(*arguments, "--config", str(file))


def test_the_settings_of_a_layout_name_its_servers_too(printed_plan: Printed, tmp_path: Path) -> None:
    sizes = ["--trainer.engine=SGLangEngine", "--trainer.accelerator=gpu", "--launch.gpus_per_node=8"]
    sizes += ["--launch.allocation=sglang:d4+fsdp:d4", "--gpu_memory_gb=40", "--model.sampling.max_new_tokens=3072"]
    table = printed_plan(*layer_of(tmp_path, {"config": BIG}), *sizes).partition("layouts that fit")[2]
    others = {(num, tp) for num, tp in re.findall(r"(\d+) · tp (\d+)", table) if (num, tp) != ("4", "1")}
    assert others
    assert [each for each in others if f"launch.allocation to sglang:d{each[0]}t{each[1]}" not in table] == []


def test_a_model_without_formulas_leaves_the_rest_of_the_plan(tmp_path: Path, printed_plan: Printed) -> None:
    config = {"model_type": "gpt2", "vocab_size": 14, "n_embd": 16, "n_layer": 2, "n_head": 4}
    out = printed_plan(*layer_of(tmp_path, {"config": config}))
    assert "\nMemory was not checked: the policy's config (gpt2) has no" in out
    assert "flowchart LR" in out


def test_the_time_and_cost_of_an_iteration_are_predicted_for_a_known_gpu(printed_plan: Printed, capsys: Any) -> None:
    assert "how long? Pass --gpu, one of A100, H100, H200, B200, L40S, and" in printed_plan(*QUICKSTART)
    on_gpu = [*QUICKSTART, "--trainer.accelerator", "gpu", "--trainer.devices", "1", "--gpu", "H200"]
    text = printed_plan(*on_gpu)
    assert "time of an iteration on H200 (989 TFLOP/s, 4.8 TB/s, link 450 GB/s), estimated; assumed: bfloat16" in text
    assert re.search(r"^  rollout +[\d.]+ s  1 x 4 steps of 512 rows in .*kernel launches", text, re.M), text
    assert "per million trained tokens" not in text
    priced = printed_plan(*on_gpu, "--price_per_gpu_hour", "3")
    assert re.search(r"^  cost +[\d.e-]+ +of 1 GPU at 3 an hour; [\d.e-]+ per million trained tokens$", priced, re.M)
    assert run([*on_gpu, "--price_per_gpu_hour", "-3"]) == 2
    assert "price_per_gpu_hour" in capsys.readouterr().err


def test_settings_are_written_only_if_a_layout_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUICKSTART, f"--write={tmp_path / 'fits.yaml'}"]) == 2
    assert "it needs --gpu_memory_gb" in capsys.readouterr().err


@pytest.mark.parametrize(("optimizer", "num_bytes"), [("lightrl.models.bf16_adamw.BF16AdamW", 4), ("SGD", 0)])
def test_moments_are_the_state_of_the_optimizer_section(optimizer: str, num_bytes: int, printed_plan: Printed) -> None:
    text = printed_plan(*QUICKSTART, "--optimizer", optimizer, "--optimizer.lr", "5.0e-4")
    units = {"B": 1, "kB": 1e3, "MB": 1e6}
    sizes = re.findall(r"^  (?:weights|moments) +([\d.]+) (\w+)$", text, re.M)
    weights, moments = (float(number) * units[unit] for number, unit in sizes)
    assert moments == pytest.approx(num_bytes / 4 * weights, rel=0.03)
