"""Configurations with an error: one message with the setting's path, file and line, before anything is built."""

import copy
from pathlib import Path

import pytest
import yaml
from bad_input_rows import each, row

from lightrl.commands.config_layers import UsageError
from lightrl.commands.main import main
from lightrl.commands.serve import parse as parse_serve

pytestmark = pytest.mark.bad_input

RUN = {
    "model": {
        "class_path": "GRPO",
        "init_args": {
            "policy": {
                "config": {"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "num_attention_heads": 2},
                "tokenizer": "tiny_task.tokenizer",
            },
            "reward": "tiny_task.exact",
            "group_size": 2,
        },
    },
    "data": {"class_path": "tiny_task.Digits"},
    "trainer": {"max_steps": 1, "accelerator": "cpu", "enable_progress_bar": False, "logger": False},
}


def staleness(**settings):
    return [{"class_path": "StalenessControl", "init_args": settings}]


def engine(**settings):
    return {"class_path": "SGLangEngine", "init_args": settings}


# A path into RUN and what stands there instead.
SETTINGS = [
    row("a section with a typing error", ("trianer", {"max_steps": 1}), "trianer is not a setting", "run.yaml:", "mean trainer"),
    row("an empty section with a typing error", ("trianer", {}), "trianer is not a setting", "run.yaml:", "mean trainer"),
    row("an empty section of an unknown name in the model", ("model.init_args.samplng", {}), "samplng", "init_args.sampling"),
    row("null for a number", ("model.init_args.lr", None), "model.init_args.lr must be a number, got null", "run.yaml:"),
    row("an unknown setting of the trainer", ("trainer.max_step", 3), "trainer.max_step ", "run.yaml:", "trainer.max_steps"),
    row("an unknown setting of the model", ("model.init_args.lrr", 3), "model.init_args.lrr", "run.yaml:", "init_args.lr"),
    row("an unknown setting of sampling", ("model.init_args.sampling", {"top_q": 1}), "sampling.top_q", "sampling.top_p"),
    row("an unknown setting of a callback", ("trainer.callbacks", staleness(max_stale=1)), "callbacks[0]", "max_staleness"),
    row("an unknown setting of the engine", ("trainer.engine", engine(sever=1)), "engine.init_args.sever", "servers"),
    row("a group of one", ("model.init_args.group_size", 1), "model.init_args.group_size (run.yaml:", "at least 2", "got 1"),
    row("a word for a number", ("model.init_args.group_size", "four"), "group_size must be an integer, got 'four' (run.yaml:"),
    row("a fraction for an integer", ("model.init_args.group_size", 2.5), "group_size must be an integer, got 2.5 (run.yaml:"),
    row("a negative learning rate", ("model.init_args.lr", -1.0), "model.init_args.lr (run.yaml:", ">= 0", "got -1.0"),
    row("top_p of 0", ("model.init_args.sampling", {"top_p": 0.0}), "sampling.top_p (run.yaml:", "in (0, 1]", "got 0.0"),
    row("a deadline of 0 s", ("model.init_args.reward_timeout_s", 0), "reward_timeout_s (run.yaml:", "above 0", "got 0"),
    row("no reward", ("model.init_args.reward", None), "model.init_args.reward (run.yaml:", "no reward", "dotted path"),
    row("an unknown loss reduction", ("model.init_args.loss_reduction", "mean"), "loss_reduction", "one of 'token'", "'mean'"),
    row("a model without settings", ("model.init_args", {}), "GRPO needs model.init_args.policy (run.yaml:"),
    row("a model by name alone", ("model", "GRPO"), "GRPO needs model.init_args.policy (run.yaml:"),
    row("an empty model", ("model", {}), "model must name a class (run.yaml:", "GRPO"),
    row("no model", ("model", None), "model must be set", "--model"),
    row("a list for the model", ("model", []), "model must be the name of a class", "got [] (run.yaml:"),
    row("an unknown model class", ("model.class_path", "GRP0"), "model.class_path=GRP0 (run.yaml:", "Did you mean GRPO"),
    row("a class of another kind", ("model.class_path", "lightrl.WeightSync"), "model.class_path", "must be LightningModule"),
    row("a module that is not there", ("model.class_path", "nowhere.GRPO"), "no module nowhere", "mean lightrl.GRPO"),
    row("a policy with two sources", ("model.init_args.policy.path", "a/b"), "exactly one of path", "policy", "run.yaml:"),
    row("a config without model_type", ("model.init_args.policy.config", {"a": 1}), "model_type", "policy", "run.yaml:"),
    row("a config without tokenizer", ("model.init_args.policy.tokenizer", None), "model.init_args.policy.config (run.yaml:", "Set tokenizer"),
    row("a dtype that torch lacks", ("model.init_args.policy.dtype", "float7"), "policy.dtype (run.yaml:", "float32", "'float7'"),
    row("no data", ("data", None), "data must be set", "--data"),
    row("an unknown data class", ("data.class_path", "PromptData"), "data.class_path=PromptData", "PromptDataModule"),
    row("a batch of nothing", ("data.init_args", {"batch_size": 0}), "data.init_args.batch_size (run.yaml:", ">= 1", "got 0"),
    row("a negative number of steps", ("trainer.max_steps", -5), "trainer.max_steps (run.yaml:", "non-negative"),
    row("an accelerator that is not there", ("trainer.accelerator", "gpu"), "trainer.accelerator (run.yaml:", "Set accelerator to auto or cpu"),
    row("an unknown strategy", ("trainer.strategy", "fsdp3"), "trainer.strategy (run.yaml:", "Did you mean FSDP2Strategy"),
    row("a strategy that cannot train", ("trainer.strategy", "ddp"), "DDPStrategy", "FSDP2Strategy"),
    row("no devices", ("trainer.devices", 0), "trainer.devices (run.yaml:", "not a valid input"),
    row("an unknown precision", ("trainer.precision", "8-bit"), "trainer.precision must be one of", "bf16-mixed", "(run.yaml:"),
    row("a negative staleness", ("trainer.callbacks", staleness(max_staleness=-1)), "callbacks[0].init_args.max_staleness (run.yaml:"),
    row("an unknown callback", ("trainer.callbacks", [{"class_path": "StalnessControl"}]), "callbacks[0]", "StalenessControl"),
    row("an unknown engine", ("trainer.engine", "SGLang"), "trainer.engine=SGLang (run.yaml:", "SGLangEngine"),
    row("a negative number of servers", ("trainer.engine", engine(servers=-1)), "engine.init_args.servers (run.yaml:", ">= 1"),
    row("a negative seed", ("seed_everything", -4), "seed_everything must be between 0 and", "(run.yaml:"),
    row("a checkpoint that is not there", ("ckpt_path", "nothing.ckpt"), "ckpt_path=nothing.ckpt does not exist"),
    row("an unknown optimizer", ("optimizer", {"class_path": "Adm"}), "optimizer.class_path=Adm (run.yaml:", "Adam"),
    row("a scheduler alone", ("lr_scheduler", {"class_path": "StepLR", "init_args": {"step_size": 1}}), "optimizer:"),
    row("a setting without its section", ("max_steps", 3), "max_steps is not a setting of lightrl (run.yaml:", "mean trainer.max_steps"),
    row("a setting of the model without its section", ("group_size", 3), "group_size is not a setting of lightrl (", "mean model.init_args.group_size"),
    row("an unknown setting of the data", ("data.init_args", {"batchsize": 3}), "data.init_args.batchsize is not a setting of tiny_task.Digits", "data.init_args.batch_size"),
    row("one number for two", ("model.init_args.betas", [0.9]), "model.init_args.betas must be tuple[float, float], got [0.9] (run.yaml:"),
    row("an attribute that a module lacks", ("model.class_path", "lightrl.GRP0"), "module lightrl has no GRP0. Did you mean lightrl.GRPO"),
    row("a module of the user's that is not there", ("data.class_path", "tiny_tsk.Digits"), "no module tiny_tsk"),
    row("data without a batch size", ("data", {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl"}}), "lightrl.PromptDataModule needs data.init_args.batch_size (run.yaml:"),
    row("a role's setting beside those of its model", ("model.init_args.policy.lora", {"rank": 2}), "policy mixes settings of the model (config, tokenizer) with settings of its role (lora) (run.yaml:", "Write policy: {model: {config: ..., tokenizer: ...}, lora: ...}."),
    row("a role's setting beside class_path", ("model.init_args.policy", {"class_path": "lightrl.ModelSpec", "init_args": {"path": "a/b", "lora": {"rank": 2}}}), "policy.init_args.lora is a setting of lightrl.Role"),
    row("a path for settings", ("model.init_args.reference", "runs/sft"), "model.init_args.reference must be settings {coef: ..., model: ..., estimator: ...} or null", "got 'runs/sft' (run.yaml:"),
    row("a word for a number of settings", ("model.init_args.reference", {"coef": "much"}), "model.init_args.reference.coef must be a number", "got 'much' (run.yaml:"),
    row("settings beside class_path", ("model.group_size", 2), "model.group_size must be in model.init_args (run.yaml:"),
    row("settings of the data beside class_path", ("data", {"class_path": "tiny_task.Digits", "batch_size": 3}), "data.batch_size must be in data.init_args (run.yaml:", "Write `init_args:`"),
    row("settings of a callback beside class_path", ("trainer.callbacks", [{"class_path": "StalenessControl", "max_staleness": 1}]), "trainer.callbacks[0].max_staleness must be in trainer.callbacks[0].init_args (run.yaml:"),
    row("an unknown choice of settings", ("model.init_args.decoupled", {"mode": "drop"}), "model.init_args.decoupled.mode must be one of 'mask', 'clamp'"),
    row("a word for true or settings", ("model.init_args.decoupled", "perhaps"), "decoupled must be true or false or settings {cap: ..., floor: ..., mode: ...", "got 'perhaps'"),
]  # fmt: skip

# The text of the file.
TEXTS = [
    row("an empty file", "", "run.yaml is empty", "key: value"),
    row("a list", "- 1\n- 2\n", "run.yaml must have settings as `key: value`, got list"),
    row("a tab as indentation", "trainer:\n\tmax_steps: 1\n", "run.yaml is not valid YAML", "line 2"),
    row("a bracket that stays open", "trainer: {max_steps: 1\n", "run.yaml is not valid YAML", 'in "run.yaml", line 2'),
    row("two documents", "---\na: 1\n---\nb: 2\n", "run.yaml is not valid YAML", "single document", "line 3"),
    row("an object of Python", 'model: !!python/object/apply:os.system ["touch ran"]\n', "not valid YAML", "line 1"),
    row("bytes that are not UTF-8", b"model: \xff\xfe\n", "run.yaml is not valid YAML", "utf-8"),
    row("NUL bytes", b"model: \x00\n", "run.yaml is not valid YAML", "special characters"),
    row("a section that stands twice", "trainer:\n  max_steps: 1\ntrainer:\n  max_steps: 2\n", "trainer is set twice in run.yaml", "lines 1 and 3"),
    row("a setting that stands twice", "trainer:\n  max_steps: 1\n  max_steps: 2\n", "trainer.max_steps is set twice", "lines 2 and 3"),
    row("an alias of itself", "a: &a [*a]\n", "run.yaml has more than", "aliases"),
    row("aliases that name a billion", "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{x}: &{x} [{','.join([f'*{y}'] * 9)}]\n" for x, y in zip("bcdefghi", "abcdefgh", strict=True)), "run.yaml has more than 20000 settings", "aliases"),
    row("an alias of nothing", "a: *b\n", "run.yaml is not valid YAML", "undefined alias"),
    row("lists 200 deep", "a: " + "[" * 200 + "]" * 200, "run.yaml has more than", "50 levels"),
]  # fmt: skip

# Configurations of `lightrl serve`.
SERVED = [
    row("serve: a model by name alone", "model: GRPO\n", "needs a model", "--model PATH", "model.init_args.policy"),
    row("serve: a list for the model's settings", "model:\n  init_args: [1]\n", "model.init_args must be settings", "(run.yaml:2)"),
    row("serve: a number for the trainer", "trainer: 3\n", "trainer must be settings as `key: value`, got 3 (run.yaml:1)"),
    row("serve: another engine", "trainer: {engine: {class_path: LocalEngine}}\n", "must be SGLangEngine or VLLMEngine", "run.yaml"),
    row("serve: an unknown setting of the policy", "model: {init_args: {policy: {pth: a}}}\n", "model.init_args.policy has no setting 'pth'", "It has path"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "commands"))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def written(path, value):
    run = copy.deepcopy(RUN)
    *parents, name = path.split(".")
    section = run
    for parent in parents:
        section = section[parent]
    section[name] = value
    return yaml.safe_dump(run)


def check(case, text, capsys):
    Path("run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["fit", "--config", "run.yaml"]) == 2
    case.check(capsys.readouterr().err)
    assert [file.name for file in Path().iterdir()] == ["run.yaml"]


@each(SETTINGS)
def test_a_setting_is_refused_with_its_path_and_line(case, capsys):
    check(case, written(*case.given), capsys)


@each(TEXTS)
def test_a_file_is_refused_with_its_name_and_line(case, capsys):
    check(case, case.given, capsys)


@each(SERVED)
def test_a_configuration_of_servers_is_refused(case):
    Path("run.yaml").write_text(case.given)
    with pytest.raises((ValueError, UsageError)) as caught:
        parse_serve(["--config", "run.yaml"])
    case.check(str(caught.value))
