"""`lightrl convert`: AReaL's settings under our names, and nothing lost on the way."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from parsed import parsed

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from test_make_model import make_folder

from lightrl.algorithms import GRPO
from lightrl.commands import cli
from lightrl.commands.convert import convert
from lightrl.commands.launch import Launch
from lightrl.commands.main import main

SAMPLES = Path(__file__).parent / "areal"
GSM8K, PPO_3D = SAMPLES / "gsm8k_grpo.yaml", SAMPLES / "ppo_3d.yaml"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it


def leaves(tree: Any, path: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {path}
    return {leaf for name, value in tree.items() for leaf in leaves(value, f"{path}.{name}".lstrip("."))}


def converted(path: Path, out: Path) -> Any:
    """What the parser of `lightrl fit` reads from the conversion."""
    main(["convert", str(path), "--out", str(out)])
    return parsed("fit", "--config", str(out))


def callback(run: Any, name: str) -> Any:
    return next(item.init_args for item in run.trainer.callbacks if item.class_path.endswith(f".{name}"))


def norm(mean: str | None, std: str | None) -> dict[str, Any]:
    return {"mean_level": mean, "std_level": std}


def actor(**settings: Any) -> dict[str, Any]:
    return {"actor": {"path": "some/model", **settings}}


@pytest.mark.parametrize("path", [GSM8K, PPO_3D], ids=lambda path: path.stem)
def test_each_setting_is_converted_or_has_no_counterpart_or_is_unknown(path):
    tree = yaml.safe_load(path.read_text())
    result = convert(tree)
    lists = [result.converted, list(result.left), result.unknown]
    assert sorted(key for keys in lists for key in keys) == sorted(leaves(tree))


def test_grpo_on_gsm8k_is_what_the_file_says(tmp_path):
    run = converted(GSM8K, tmp_path / "out.yaml")
    model = run.model.init_args
    assert run.model.class_path.endswith("GRPO")
    assert (model.policy, model.reward) == ("Qwen/Qwen2.5-0.5B-Instruct", "lightrl.rewards.math_answer")
    assert (model.lr, model.weight_decay, list(model.betas)) == (2e-6, 0.02, [0.9, 0.99])
    assert (model.clip_low, model.clip_high, model.num_minibatches) == (0.3, 0.3, 2)
    assert (model.advantage_mean, model.advantage_std, model.reference) == ("group", "group", None)
    assert (model.decoupled.cap, model.decoupled.mode) == (4.0, "mask")
    assert (model.group_size, model.sampling.max_new_tokens, model.sampling.temperature) == (6, 700, 0.9)
    data = run.data.init_args
    assert (data.train.source, data.train.name) == ("openai/gsm8k", "main")
    assert (data.batch_size, data.validation_batch_size) == (32, 64)
    assert (data.max_prompt_tokens, data.prompt_overflow) == (600, "drop")


def test_devices_engine_and_callbacks_follow(tmp_path):
    run = converted(GSM8K, tmp_path / "out.yaml")
    trainer = run.trainer
    assert (trainer.max_epochs, trainer.gradient_clip_val, trainer.precision) == (4, 0.5, "bf16-mixed")
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (20, None)
    assert trainer.default_root_dir == "/shared/runs/digits/first"
    assert trainer.strategy.class_path.endswith("FSDP2Strategy")
    assert trainer.strategy.init_args.activation_checkpointing is True
    assert (run.launch.allocation, run.launch.gpus_per_node) == ("sglang:d2p1t1+d2p1t1", 4)
    engine = trainer.engine.init_args
    assert engine.transport == "distributed"
    assert engine.server_args == {"dtype": "bfloat16", "mem_fraction_static": 0.7, "random_seed": 3}
    staleness = callback(run, "StalenessControl")
    assert (staleness.max_staleness, staleness.max_concurrent) == (3, 96)
    each, newest = [item.init_args for item in trainer.callbacks if item.class_path.endswith(".ModelCheckpoint")]
    assert (each.every_n_epochs, each.save_top_k) == (1, -1)
    assert (newest.train_time_interval.total_seconds(), newest.save_last) == (1800, True)


def test_ppo_in_three_directions_with_areals_own_defaults(tmp_path):
    run = converted(PPO_3D, tmp_path / "out.yaml")
    model = run.model.init_args
    assert run.model.class_path.endswith("PPO")
    assert (model.critic.lr, model.value_clip, model.lam, model.num_minibatches) == (5e-6, 0.4, 1.0, 4)
    assert (model.reference.coef, model.reference.model, model.reference.estimator) == (0.02, "Qwen/Qwen3-8B", "k1")
    assert (model.reward_shaping.scaling, model.whiten_advantages) == (5.0, True)
    assert (model.clip_low, model.clip_high, model.warmup_iterations, model.lr_decay) == (0.2, 0.28, 10, "linear")
    strategy = run.trainer.strategy
    assert strategy.class_path.endswith("Parallel3DStrategy")
    assert (strategy.init_args.pp, strategy.init_args.tp, strategy.init_args.activation_checkpointing) == (2, 2, True)
    assert (run.launch.nodes, run.launch.launcher) == (2, "slurm")


def learns_from(kind: str, section: str = "actor", **settings: Any) -> dict[str, Any]:
    """A file of AReaL that learns from completions which are given."""
    optimizer = {"lr": 3e-6, "warmup_steps_proportion": 0.1, "gradient_clipping": 10.0}
    return {
        "seed": 2,
        "total_train_steps": 50,
        section: {"path": "some/model", "backend": "fsdp:d4", "gradient_checkpointing": True, "optimizer": optimizer},
        "tokenizer_path": f"${{{section}.path}}",
        "train_dataset": {"path": "pairs", "type": kind, "batch_size": 16, "max_length": 300},
        "valid_dataset": {"path": "others", "type": kind, "batch_size": 8},
        **settings,
    }


@pytest.mark.parametrize(
    ("areal", "algorithm", "data"),
    [
        pytest.param(learns_from("dpo", beta=0.3, loss_type="sigmoid"), "DPO", "PreferenceDataModule", id="dpo"),
        pytest.param(learns_from("dpo", beta=0.3, loss_type="ipo"), "IPO", "PreferenceDataModule", id="ipo"),
        pytest.param(learns_from("rw"), "RewardModel", "PreferenceDataModule", id="reward model"),
        pytest.param(learns_from("sft", section="model"), "SFT", "SFTDataModule", id="sft"),
    ],
)
def test_what_learns_from_given_completions_becomes_its_own_class(areal, algorithm, data, tmp_path):
    path = tmp_path / "areal.yaml"
    path.write_text(yaml.safe_dump(areal))
    run = converted(path, tmp_path / "out.yaml")
    model = run.model.init_args
    assert (run.model.class_path.split(".")[-1], run.data.class_path.split(".")[-1]) == (algorithm, data)
    assert (model.lr, model.warmup_steps, model.lr_decay) == (3e-6, 5, "constant")
    assert model.get("kl_coef", 0.3) == 0.3
    assert (run.data.init_args.train, run.data.init_args.batch_size) == ("pairs", 16)
    assert run.trainer.engine is None
    assert run.trainer.strategy.init_args.activation_checkpointing is True
    result = convert(areal)
    lists = [result.converted, list(result.left), result.unknown]
    assert sorted(key for keys in lists for key in keys) == sorted(leaves(areal))
    assert not result.left
    assert not result.unknown


def test_sft_without_a_type_is_not_taken_for_rl():
    areal = learns_from("sft")
    del areal["train_dataset"]["type"]
    result = convert(areal)
    assert (result.settings["model"]["class_path"], result.settings["data"]["class_path"]) == ("SFT", "SFTDataModule")
    assert "reward" not in result.settings["model"]["init_args"]
    assert "is not set" in result.notes["train_dataset.type"]


def test_what_a_run_needs_and_the_file_lacks_is_said(tmp_path, capsys):
    file = tmp_path / "areal.yaml"
    file.write_text("actor: {path: a}\ngconfig: {n_samples: 4}\n")
    assert main(["convert", str(file)]) == 0
    said = capsys.readouterr().err.partition("set these before a run:")[2]
    assert said.split() == ["data.train", "model.reward"]


def test_a_file_of_areal_core_is_read_by_its_older_names():
    result = convert({
        "n_nodes": 1, "n_gpus_per_node": 8, "allocation_mode": "sglang.d4p1m1+d2p2m1", "group_size": 16,
        "max_head_offpolicyness": 4, "actor": {"path": "some/model", "optimizer": {"lr": 2e-5}},
        "ppo": {"gen": {"max_new_tokens": 512, "top_p": 1.0}, "eps_clip": 0.2, "ppo_n_minibatches": 2,
                "reward_output_scaling": 5.0},
        "dataset": {"path": "math.jsonl", "train_bs_n_seqs": 32, "max_prompt_len": 100},
        "exp_ctrl": {"total_train_epochs": 3, "save_freq_steps": 20},
    })  # fmt: skip
    assert (result.left, result.unknown) == ({}, [])
    model, data = (result.settings[name]["init_args"] for name in ("model", "data"))
    assert (model["group_size"], model["sampling"], model["num_minibatches"]) == (
        16, {"max_new_tokens": 512, "top_p": 1.0}, 2)  # fmt: skip
    assert (model["lr"], model["clip_low"], model["reward_shaping"]) == (2e-5, 0.2, {"scaling": 5.0})
    assert (data["train"], data["batch_size"], data["max_prompt_tokens"]) == ("math.jsonl", 32, 100)
    trainer = result.settings["trainer"]
    assert (trainer["max_epochs"], trainer["strategy"]["init_args"]) == (3, {"pp": 2, "tp": 1})
    assert result.settings["launch"]["allocation"] == "sglang.d4p1m1+d2p2m1"
    assert result.missing == ["model.reward"]


def test_schedules_of_areal_are_rl_settings_too():
    optimizer = {"eps": 1e-5, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1, "warmup_steps_proportion": 0.02}
    result = convert({"actor": {"path": "a", "optimizer": optimizer}, "gconfig": {"n_samples": 4}})
    model = result.settings["model"]["init_args"]
    found = [model[name] for name in ("eps", "lr_decay", "min_lr_ratio", "warmup_iterations")]
    assert (found, result.left) == ([1e-5, "cosine", 0.1, 0.02], {})
    assert "fraction of the run" in result.notes["actor.optimizer.warmup_steps_proportion"]


@pytest.mark.parametrize("kind", [{}, {"lr_scheduler_type": "constant"}, {"lr_scheduler_type": None}], ids=str)
def test_the_end_of_a_decay_is_dropped_where_the_learning_rate_is_constant(kind):
    result = convert(actor(optimizer={"min_lr_ratio": 0.1, **kind}) | {"gconfig": {"n_samples": 4}})
    assert "does not decay" in result.notes["actor.optimizer.min_lr_ratio"]
    settings = result.settings["model"]["init_args"]
    schedule = {name: settings[name] for name in ("lr_decay", "min_lr_ratio") if name in settings}
    assert GRPO("some/model", reward="lightrl.rewards.math_answer", **schedule).min_lr_ratio == 0.0


SPEC = {
    "image": "a.sif", "mount": "/data:/data", "env_vars": {"NCCL_DEBUG": "INFO"}, "additional_bash_cmds": ["ulimit -l"],
}  # fmt: skip
CONTAINER = "apptainer exec --nv --bind /data:/data a.sif"


@pytest.mark.parametrize(
    "areal",
    [
        {
            "launcher": {
                "slurm": {"trainer_image": "a.sif", "inference_server_image": "a.sif", "mount": "/data:/data"},
                "trainer_env_vars": "NCCL_DEBUG=INFO", "inference_server_env_vars": "",
            }
        },
        actor(scheduling_spec=[{**SPEC, "cpu": 4, "exclude": "node7"}]) | {"rollout": {"scheduling_spec": None}},
    ],
    ids=["launcher", "scheduling_spec"],
)  # fmt: skip
def test_the_container_and_the_variables_of_a_launch_are_kept(areal):
    result = convert({"scheduler": {"type": "slurm"}, "cluster": {"n_nodes": 2}, "recover": {"mode": "auto"}, **areal})
    assert (result.left, result.unknown) == ({}, [])
    launch = result.settings["launch"]
    assert (launch["launcher"], launch["nodes"], launch["container"]) == ("slurm", 2, CONTAINER)
    assert launch["environment"] == {"NCCL_DEBUG": "INFO"}
    assert "lightrl launch --config … --ckpt_path last" in result.notes["recover.mode"]
    if "actor" in areal:
        assert (launch["setup"], launch["options"]) == (["ulimit -l"], {"exclude": "node7"})
        assert "dropped cpu" in result.notes["actor.scheduling_spec"]
    Launch(**launch)


def test_a_second_container_or_scheduler_has_no_counterpart():
    images = {"slurm": {"trainer_image": "a.sif", "inference_server_image": "b.sif", "container_type": "none"}}
    specs = {"actor": {"scheduling_spec": [SPEC]}, "rollout": {"scheduling_spec": [{**SPEC, "image": "b.sif"}]}}
    result = convert({"scheduler": {"type": "sky"}, "launcher": {**images, "trainer_env_vars": "A=1"}, **specs})
    assert {*result.left} == {"scheduler.type", "launcher.slurm.inference_server_image", "rollout.scheduling_spec"}


def test_another_reference_of_dpo_is_kept_and_microbatches_have_no_counterpart():
    ref = {"path": "other/model", "mb_spec": {"max_tokens_per_mb": 9}}
    result = convert(learns_from("dpo", ref=ref))
    assert result.settings["model"]["init_args"]["reference"] == "other/model"
    assert "accumulate_grad_batches" in result.left["ref.mb_spec.max_tokens_per_mb"]


@pytest.mark.slow
def test_a_converted_file_trains_where_only_the_hub_the_gpus_and_the_sizes_are_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what the run seeds is undone with it
    folder, out = make_folder(tmp_path), tmp_path / "run.yaml"
    main(["convert", str(GSM8K), "--out", str(out)])
    rows = tmp_path / "train.jsonl"
    here = [f"--model.policy={folder}", f"--data.train={rows}", f"--data.validation={rows}"]
    here += ["--trainer.accelerator=cpu", "--trainer.precision=32-true", "--trainer.engine=LocalEngine"]
    here += ["--model.sampling.max_new_tokens=8", "--data.batch_size=4", "--data.validation_batch_size=4"]
    here += [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false"]
    try:
        assert cli.run(["fit", "--config", str(out), *here, "--trainer.fast_dev_run=true"]) == 0
    finally:
        if dist.is_initialized():  # of FSDP2Strategy, else Lightning takes what follows for one of several processes
            dist.destroy_process_group()
    printed = "".join(capfd.readouterr())
    assert "iteration: 4 groups x 6 = 24 trajectories, 2 updates, max_staleness 3" in printed


def test_what_is_left_is_listed_with_its_reason_and_without_its_value(capsys):
    assert main(["convert", str(GSM8K)]) == 1
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["seed_everything"] == 3
    assert "train_dataset.pin_memory" in err.split("No counterpart:")[1].split("Unknown:")[0]
    assert "future_section.speed" in err.split("Unknown:")[1]
    assert "hidden" not in out + err


def test_settings_of_other_releases_and_recipes_have_a_reason(tmp_path, capsys):
    path = tmp_path / "areal.yaml"
    path.write_text(
        "actor: {path: a}\nworkflow: areal.workflow.MathAgent\neval_workflow: areal.workflow.MathAgent\n"
        "rollout: {openai: {mode: inline, turn_discount: 1.0}}\ncheckpointer: {freq_secs: 3600}\n"
    )
    assert main(["convert", str(path)]) == 1
    listed = capsys.readouterr().err
    assert "5 without a counterpart, 0 unknown" in listed
    for key in ("workflow", "eval_workflow", "rollout.openai.mode", "checkpointer.freq_secs"):
        assert f"\n  {key} " in listed


def test_the_code_is_0_if_nothing_is_left(tmp_path, capsys):
    file = tmp_path / "small.yaml"
    file.write_text("seed: 5\nactor: {path: some/model, eps_clip: 2e-1}\n")
    assert main(["convert", str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"] == {
        "num_minibatches": 4,
        "policy": "some/model",
        "clip_low": 0.2,
        "clip_high": 0.2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("- a\n- b\n", "must be a mapping of AReaL's settings, got list"),
        ("a: [1\n", "must be YAML"),
        ("trainer: {max_steps: 3}\n", "none of AReaL's settings"),
    ],
)
def test_a_file_that_is_no_configuration_ends_with_2(text, message, tmp_path, capsys):
    file = tmp_path / "areal.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["convert", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allocation_mode", "sglang:d4+megatron:(attn:d4|ffn:d1t2e2)"),  # tensor parallel experts
        ("allocation_mode", "nonsense"),
        ("allocation_mode", 3),
        ("seed", "${no.such.key}"),
        ("seed", "${seed}"),
        ("train_dataset", {"path": 4}),
    ],
)
def test_a_value_that_cannot_be_read_is_listed(key, value):
    assert [name for name in convert({**actor(), key: value}).left if name.startswith(key)]


@pytest.mark.parametrize(
    ("areal", "key", "is_converted"),
    [
        (actor(reward_scaling=10.0), "actor.reward_scaling", True),
        (actor(reward_scaling=10.0, adv_norm=norm("batch", "batch")), "actor.reward_scaling", True),
        (actor(reward_bias=-1.0, reward_norm=norm("group", None)), "actor.reward_bias", True),
        (actor(reward_scaling=2.0, reward_norm=norm("group", None)), "actor.reward_scaling", True),
        (actor(recompute_logprob=True), "actor.recompute_logprob", False),
        (actor(max_new_tokens=9) | {"gconfig": {"max_new_tokens": 8}}, "actor.max_new_tokens", False),
        (actor(disable_dropout=False), "actor.disable_dropout", False),
        (learns_from("sft") | {"actor.is_critic": True}, "actor.is_critic", False),
    ],
)
def test_a_setting_counts_as_converted_only_if_the_run_is_the_same(areal, key, is_converted):
    result = convert(areal)
    assert (key in result.converted, key in result.left) == (is_converted, not is_converted)


@pytest.mark.parametrize("servers", ["sglang", "vllm"])
@pytest.mark.parametrize(("ranks", "offloaded"), [("d2c2e2", ["optimizer"]), ("d2c2", ["parameters", "optimizer"])])
def test_an_allocation_keeps_context_experts_vllm_and_offloads(servers: str, ranks: str, offloaded: list[str]):
    offloads = {"fsdp": {"offload_params": True}, "optimizer": {"offload": True}}
    engines = {"sglang": {"context_length": 4096}, "vllm": {"max_model_len": 4096}}
    result = convert({**actor(**offloads), "allocation_mode": f"{servers}:d4+megatron:{ranks}", **engines})
    trainer = result.settings["trainer"]
    assert result.settings["launch"]["allocation"] == f"{servers}:d4+megatron:{ranks}"
    assert trainer["strategy"]["init_args"]["offload_to_cpu"] == offloaded
    assert ("actor.fsdp.offload_params" in result.left) is ("e2" in ranks)  # the strategy refuses both
    assert trainer["engine"]["class_path"] == {"sglang": "SGLangEngine", "vllm": "VLLMEngine"}[servers]
    assert ("sglang.context_length" in result.left) is (servers == "vllm")


def test_backends_of_rollout_and_actor_are_one_allocation():
    result = convert({"rollout": {"backend": "sglang:d2t2"}, "actor": {"backend": "fsdp:d4"}})
    assert result.settings["launch"]["allocation"] == "sglang:d2t2+fsdp:d4"
    assert not result.left
