"""What a wrong flag, layer or file is answered with; wrong settings of a file are in bad_input/test_bad_yaml.py."""

import inspect
from pathlib import Path

import lightning
import pytest
import yaml
from parsed import parsed, printed_config

from lightrl.commands.config_layers import UsageError

pytestmark = pytest.mark.bad_input

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart"


def test_what_was_meant_comes_before_the_list_which_fits_a_narrow_terminal(settings, config):
    settings["trainer"]["max_step"] = 3
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(settings))
    first, _, *names = str(caught.value).splitlines()
    assert first.endswith("Did you mean trainer.max_steps or trainer.max_time?")
    assert " accelerator," in names[0]
    assert max(map(len, names)) <= 80


@pytest.mark.parametrize(
    ("flag", "owner", "meant"),
    [
        ("--trainer.max_step", "lightrl.Trainer", "trainer.max_steps"),
        ("--model.lrr", "lightrl.GRPO", "model.lr"),
        ("--model.init_args.lrr", "lightrl.GRPO", "model.init_args.lr"),
        ("--ckpt_pth", "lightrl", "ckpt_path"),
        ("--confg", "lightrl", "--config"),
    ],
)
def test_an_unknown_flag_is_named_like_a_key(settings, config, flag, owner, meant):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(settings), flag, "3")
    assert f"{flag[2:]} is not a setting of {owner} (on the command line)" in str(caught.value)
    assert f"Did you mean {meant}" in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--model.lr", "fast", r"^model\.lr must be a number, got fast \(on the command line\)\.$"),
        ("--model", "GRP0", r"^model\.class_path=GRP0 \(on the command line\): no class"),
    ],
)
def test_a_wrong_flag_is_named_as_it_was_typed_and_not_looked_for_in_the_file(settings, config, flag, value, message):
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings), flag, value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["+=StalnessControl"], r"^trainer\.callbacks\+\[0\]=StalnessControl \(on .* Did you mean StalenessControl\?$"),
        (["+", "[Trace, StalnessControl]"], r"^trainer\.callbacks\+\[1\]=StalnessControl \(on .* Did you mean Stalen"),
        (["+=Trace", "+={class_path: StalenessControl, init_args: {max_stale: 1}}"], r"\+\[1\]\..*\.max_stale is not"),
        (["={class_path: StalenessControl, max_staleness: 1}"], r"^trainer\.callbacks\.max_staleness must be in"),
        (["+=Trace", ".max_cots=1"], r"^trainer\.callbacks\+\[0\]\.init_args\.max_cots is not .* \S+max_cost\?"),
        ([".init_args.max_stalenes=1"], r"^trainer\.callbacks\[0\]\.init_args\.max_stalenes is not .*max_staleness\?"),
        ([".max_stalenes=1"], r"^trainer\.callbacks\[0\]\.init_args\.max_stalenes is not .* \S+max_staleness\?"),
    ],
    ids=["added", "list", "setting", "no init_args", "flag for the added", "flag with init_args", "flag for the last"],
)  # fmt: skip
def test_a_wrong_callback_is_named_where_flags_add_to_the_list(flags, message, settings, config):
    words = [flag if flag.startswith("[") else f"--trainer.callbacks{flag}" for flag in flags]
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings), *words)


def test_a_wrong_callback_is_named_where_a_file_adds_to_the_list(settings, config):
    more = config({"trainer": {"callbacks+": [{"class_path": "StalnessControl"}]}}, "more.yaml")
    message = r"^trainer\.callbacks\+\[0\]\.class_path=StalnessControl \(more\.yaml:3\).*mean StalenessControl\?$"
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings), "--config", more)


def test_an_error_of_yaml_names_the_file_or_the_flag(settings, config):
    Path(config({}, "trainer.yaml")).write_text("max_steps: [\n")
    for words, name in (
        (["--config", "{a: ["], "--config"),
        (["--config", config(settings), "--trainer", "trainer.yaml"], "trainer.yaml"),
        (["--config", config(settings | {"trainer": "trainer.yaml"}, "below.yaml")], "trainer.yaml"),
    ):
        with pytest.raises(UsageError, match=rf'in "{name}", line 2, column 1'):
            parsed("fit", *words)


def test_the_message_names_the_layer_that_has_the_unknown_key(settings, config):
    first = config(settings)
    second = config({"model": {"init_args": {"groupsize": 4}}}, "laptop.yaml")
    with pytest.raises(UsageError, match=r"model\.init_args\.groupsize .* \(laptop\.yaml:3\)"):
        parsed("fit", "--config", first, "--config", second)


def test_a_module_that_a_users_file_imports_and_is_missing_is_the_one_named(settings, config, tmp_path, monkeypatch):
    settings["model"]["class_path"] = "needs_more.Mine"
    name = config(settings)
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="needs_more imports not_installed_at_all, which is not installed"):
        parsed("fit", "--config", name)


def test_a_missing_config_file_or_flag_is_answered_with_what_is_there(settings, config):
    name = config(settings, "grpo_small.yaml")
    with pytest.raises(UsageError, match=r"grpo_smal\.yaml does not exist.*Nearest in .*: grpo_small\.yaml"):
        parsed("fit", "--config", "grpo_smal.yaml")
    with pytest.raises(UsageError, match="There is no folder nowhere"):
        parsed("fit", "--config", "nowhere/grpo_small.yaml")
    with pytest.raises(UsageError, match=r"Did you mean --config grpo_small\.yaml\?"):
        parsed("fit", name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.policy.lora.rank=4", "--model.lr=fast"], r"^model\.lr must be a number, got fast"),
        (
            ["--model.policy.dtype=a", "--model.policy.lora.rank=4"],
            r"^model\.policy mixes settings of the model \(dtype\)",
        ),
        (
            ["--model.policy.model.dtpe=a", "--model.policy.lora.rank=4"],
            r"^model\.policy\.model\.dtpe is not a setting",
        ),
        (
            ["--model={init_args: {reward: [a.b]}}"],
            r"^model\.init_args\.reward\[0\] must be settings \{path: \.\.\., .*\}, got 'a\.b'",
        ),
    ],
)
def test_settings_added_to_a_string_hide_no_other_error(flags, message, settings, config):
    settings["model"]["init_args"]["policy"] = "some/model"
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings), *flags)


def test_a_list_of_names_is_described_by_the_names(settings, config):
    settings["trainer"]["strategy"] = {"class_path": "FSDP2Strategy", "init_args": {"offload_to_cpu": True}}
    message = r"offload_to_cpu must be a list of 'parameters', 'optimizer', 'activations', got True \(run\.yaml"
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings))


def test_a_role_may_be_a_path_a_model_or_a_role_with_settings(settings, config):
    arguments = settings["model"]["init_args"]
    role = {"model": arguments["policy"], "lora": {"rank": 2}, "lr": 0.1}
    for policy in (role, {"path": "org/name"}, {"model": "org/name", "lora": {"rank": 2}}, "org/name"):
        arguments["policy"] = policy
        assert parsed("fit", "--config", config(settings)).model.init_args.policy
    flags = ["--model.policy.model", "org/name", "--model.policy.lora.rank", "4", "--model.reference.coef", "0.1"]
    found = parsed("fit", "--config", config(settings), *flags).model.init_args
    assert (found.policy.lora.rank, found.reference.coef, found.policy.model) == (4, 0.1, "org/name")


@pytest.mark.parametrize(
    ("workflow", "flag", "message"),
    [
        ("MultTurn", "", r"=MultTurn \(run\.yaml:\d+\): no class has this name"),
        ({"class_path": "MultiTurn"}, "", r"lightrl\.MultiTurn needs .*\.init_args\.environment"),
        ({"max_turn": 3}, "", r"\.max_turn is not a setting of .*MultiTurn \(run\.yaml:\d+\)"),
        ({"max_turns": "three"}, "", r"\.max_turns must be an integer, got 'three' \(run\.yaml:"),
        (
            {"environment": {"class_path": "ToolEnvironment", "init_args": {"tool": []}}},
            "",
            r"workflow\.init_args\.environment\.init_args\.tool is not a setting of lightrl\.ToolEnvironment",
        ),
        (
            {},
            "--model.workflow.max_turn",
            r"^model\.workflow\.max_turn is not a setting of .*MultiTurn \(on the command",
        ),
        ({}, "--model.init_args.lrr", r"^model\.init_args\.lrr is not a setting"),
    ],
    ids=["name", "missing", "key", "type", "within the environment", "flag", "needs no tokenizer"],
)
def test_a_workflow_is_checked_against_its_signature_like_a_model(settings, config, workflow, flag, message):
    if isinstance(workflow, dict) and "class_path" not in workflow:
        workflow = {"class_path": "MultiTurn", "init_args": {"environment": "RetryWithFeedback", **workflow}}
    settings["model"]["init_args"]["workflow"] = workflow
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(settings), *([flag, "3"] if flag else []))


def test_the_quickstart_with_servers_has_at_most_122_settings_of_ours(capsys):
    files = [argument for name in ("grpo", "sglang_cpu") for argument in ("--config", f"{QUICKSTART}/{name}.yaml")]
    printed = yaml.safe_load(printed_config(capsys, "fit", *files))
    lightnings = set(inspect.signature(lightning.Trainer).parameters) - {"callbacks"}
    printed["trainer"] = {name: value for name, value in printed["trainer"].items() if name not in lightnings}
    sections = ("trainer", "model", "data", "logging", "launch")
    assert sum(_num_leaves(printed[section]) for section in sections) <= 122


def _num_leaves(value: object) -> int:
    items = list(value.values()) if isinstance(value, dict) else value
    return sum(map(_num_leaves, items)) or 1 if isinstance(items, list) else 1
