"""The examples for GPUs, which have not run on any: what can be told of them without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.plan import MODELS
from lightrl.commands.launch import launch
from lightrl.commands.plan import run

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (ROOT / "examples" / "gpu").glob("*.yaml"))
OF_ALL = {"vocab_size": 151936, "max_position_embeddings": 32768}
SIZES: dict[str, dict[str, Any]] = {  # of the models, whose configurations are on the hub
    "Qwen/Qwen2.5-1.5B-Instruct": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": MODELS["qwen3-30b-a3b"],
    "Qwen/Qwen3-235B-A22B": MODELS["qwen3-235b-a22b"],
}  # fmt: skip


ONE_OF_ITS_KIND = ("gsm8k_8.yaml", "moe_30b.yaml")


@pytest.fixture(
    params=[name if name in ONE_OF_ITS_KIND else pytest.param(name, marks=pytest.mark.extra) for name in NAMES]
)
def configs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The example with its model's sizes in place of the hub's name, on a machine that seems to have eight GPUs."""
    path = ROOT / "examples" / "gpu" / request.param
    policy = yaml.safe_load(path.read_text())["model"]["init_args"]["policy"]
    role = policy if isinstance(policy, dict) else {"model": {"path": policy}}
    config = {**OF_ALL, **SIZES[role["model"]["path"]]}
    role["model"] |= {"path": None, "config": config, "tokenizer": "examples.quickstart.task.tokenizer"}
    (tmp_path / "sizes.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"policy": role}}}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.chdir(ROOT)
    return ["--config", str(path), "--config", str(tmp_path / "sizes.yaml")]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_says_that_it_has_not_run(name: str) -> None:
    lines = (ROOT / "examples" / "gpu" / name).read_text().splitlines()
    assert len(lines) <= 40
    assert lines[1].endswith("Not run.")


def test_its_plan_fits_80_gb(configs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*configs, "--gpu_memory_gb=80"]) == 0
    assert "fits: 72.0 GB usable of 80.0 GB on each device" in capsys.readouterr().out


def test_a_dry_run_of_its_launch_places_all(configs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if "launch" not in yaml.safe_load(Path(configs[1]).read_text()):
        pytest.skip("runs on one GPU, without a launch")
    assert launch([*configs, "--dry-run"]) == 0
    assert "rank 0" in capsys.readouterr().out
