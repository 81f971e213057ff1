"""What a wrong setting is answered with, through the real parser."""

import copy
import re
from pathlib import Path

import pytest
from parsed import parsed

from lightrl.commands.config_layers import UsageError

pytestmark = pytest.mark.bad_input


def changed(settings, path, value):
    """A copy of settings with one more at a dotted path."""
    settings = copy.deepcopy(settings)
    *parents, name = path.split(".")
    place = settings
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
    place[name] = value
    return settings


@pytest.mark.parametrize(
    ("path", "shown", "owner", "meant"),
    [
        pytest.param("trianer", "trianer", "lightrl", "trainer", id="section"),
        pytest.param("max_steps", "max_steps", "lightrl", "trainer.max_steps", id="setting without its section"),
        pytest.param("group_size", "group_size", "lightrl", "model.init_args.group_size", id="model's, at the top"),
        pytest.param("trainer.max_step", "trainer.max_step", "lightrl.Trainer", "trainer.max_steps", id="trainer"),
        pytest.param(
            "model.init_args.groupsize",
            "model.init_args.groupsize",
            "lightrl.GRPO",
            "model.init_args.group_size",
            id="model",
        ),
        pytest.param(
            "model.init_args.sampling.top_q",
            "model.init_args.sampling.top_q",
            "lightrl.Sampling",
            "model.init_args.sampling.top_p",
            id="data class in the model",
        ),
        pytest.param(
            "data.init_args.batchsize", "data.init_args.batchsize", "tiny_task.Digits", "data.init_args.batch_size",
            id="data",
        ),
        pytest.param(
            "trainer.callbacks.0.init_args.max_stalenes",
            "trainer.callbacks[0].init_args.max_stalenes",
            "lightrl.StalenessControl",
            "trainer.callbacks[0].init_args.max_staleness",
            id="callback",
        ),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_path_owner_and_nearest_key(settings, config, path, shown, owner, meant):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(changed(settings, path, 3)))
    message = str(caught.value)
    assert re.search(rf"^{re.escape(shown)} is not a setting of {owner} \(run\.yaml:\d+\)\.", message)
    assert f"Did you mean {meant}" in message


def test_what_was_meant_comes_before_the_list_which_fits_a_narrow_terminal(settings, config):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(changed(settings, "trainer.max_step", 3)))
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
    ],
)
def test_an_unknown_flag_is_named_like_a_key(settings, config, flag, owner, meant):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(settings), flag, "3")
    assert f"{flag[2:]} is not a setting of {owner} (on the command line)" in str(caught.value)
    assert f"Did you mean {meant}" in str(caught.value)


def test_the_message_names_the_layer_that_has_the_unknown_key(settings, config):
    first = config(settings)
    second = config({"model": {"init_args": {"groupsize": 4}}}, "laptop.yaml")
    with pytest.raises(UsageError, match=r"model\.init_args\.groupsize .* \(laptop\.yaml:3\)"):
        parsed("fit", "--config", first, "--config", second)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        pytest.param("trainer.max_steps", "many", "an integer", id="int"),
        pytest.param("model.init_args.lr", "fast", "a number", id="float"),
        pytest.param("model.init_args.loss_reduction", "mean", "one of 'token', 'sequence', 'fixed'", id="choice"),
        pytest.param("model.init_args.sampling.top_p", "x", "a number", id="in a data class"),
        pytest.param("model.init_args.betas", [0.9], "tuple[float, float]", id="tuple"),
        pytest.param("data.init_args.batch_size", "two", "an integer", id="data"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_path_value_and_type(settings, config, path, value, expected):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(changed(settings, path, value)))
    lines = Path("run.yaml").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if f"{path.rpartition('.')[2]}:" in line)
    assert str(caught.value) == f"{path} must be {expected}, got {value!r} (run.yaml:{number})."


def test_a_wrong_value_of_a_flag_is_named_as_it_was_typed(settings, config):
    with pytest.raises(UsageError, match=r"^model\.lr must be a number, got fast \(on the command line\)\.$"):
        parsed("fit", "--config", config(settings), "--model.lr", "fast")


def test_a_wrong_class_of_a_flag_is_not_looked_for_in_the_file(settings, config):
    with pytest.raises(UsageError, match=r"^model\.class_path=GRP0 \(on the command line\): no class"):
        parsed("fit", "--config", config(settings), "--model", "GRP0")


@pytest.mark.parametrize(
    ("path", "class_path", "message"),
    [
        pytest.param(
            "model",
            "GRP0",
            r"model\.class_path=GRP0 \(run\.yaml:\d+\): no class.*Did you mean GRPO",
            id="short name",
        ),
        pytest.param("model", "lightrl.GRP0", "module lightrl has no GRP0. Did you mean lightrl.GRPO", id="attribute"),
        pytest.param("model", "nowhere.GRPO", "no module nowhere.*Did you mean lightrl.GRPO", id="module"),
        pytest.param("data", "tiny_tsk.Digits", "no module tiny_tsk", id="module of the user's"),
        pytest.param("model", "lightrl.WeightSync", "must be LightningModule or a subclass", id="other kind"),
        pytest.param("trainer.engine", "FakeEngin", "no class has this name.*Did you mean FakeEngine", id="engine"),
        pytest.param("trainer.engine", "lightrl.GRPO", "must be RolloutEngine or a subclass", id="no engine"),
    ],
)
def test_a_class_that_is_not_there_is_named_with_what_is(settings, config, path, class_path, message):
    with pytest.raises(UsageError, match=message):
        parsed("fit", "--config", config(changed(settings, f"{path}.class_path", class_path)))


def test_a_module_that_a_users_file_imports_and_is_missing_is_the_one_named(settings, config, tmp_path, monkeypatch):
    name = config(changed(settings, "model.class_path", "needs_more.Mine"))
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="needs_more imports not_installed_at_all, which is not installed"):
        parsed("fit", "--config", name)


def test_a_missing_argument_is_named_with_its_owner(settings, config):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "train.jsonl"}}
    with pytest.raises(
        UsageError, match=r"^lightrl\.PromptDataModule needs data\.init_args\.batch_size \(run\.yaml:1\)\.$"
    ):
        parsed("fit", "--config", config(settings))


def test_a_missing_model_is_asked_for(settings, config):
    del settings["model"]
    with pytest.raises(UsageError, match="model must be set"):
        parsed("fit", "--config", config(settings))


def test_a_missing_config_file_is_answered_with_its_neighbors(settings, config):
    config(settings, "grpo_small.yaml")
    with pytest.raises(UsageError, match=r"grpo_smal\.yaml does not exist.*Nearest in .*: grpo_small\.yaml"):
        parsed("fit", "--config", "grpo_smal.yaml")
    with pytest.raises(UsageError, match="There is no folder nowhere"):
        parsed("fit", "--config", "nowhere/grpo_small.yaml")


def test_a_config_file_that_is_not_yaml_is_answered_with_the_line(config, tmp_path):
    (tmp_path / "broken.yaml").write_text("model:\n  class_path: [GRPO\ntrainer: 3\n")
    config({})
    with pytest.raises(UsageError, match=r"(?s)broken\.yaml is not valid YAML.*line 3"):
        parsed("fit", "--config", "broken.yaml")


def test_a_config_without_its_flag_is_understood(settings, config):
    with pytest.raises(UsageError, match=r"Did you mean --config run\.yaml\?"):
        parsed("fit", config(settings))


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("importance_cap", 2.0, "decoupled.cap"),
        ("kl_coef", 0.1, "reference.coef"),
        ("overlong_buffer_tokens", 4, "overlong_penalty.buffer_tokens"),
    ],
)
def test_a_setting_that_has_moved_is_named_with_its_new_place(settings, config, name, value, place):
    with pytest.raises(UsageError, match=rf"{name} is not a setting of lightrl.GRPO \(run.yaml:7\).* now .*\.{place}"):
        parsed("fit", "--config", config(changed(settings, f"model.init_args.{name}", value)))


@pytest.mark.parametrize("key", ["lora", "lr", "mesh", "offload"])
def test_a_roles_setting_beside_those_of_its_model_is_shown_in_its_place(settings, config, key):
    value = {"lora": {"rank": 2}, "lr": 0.1, "mesh": {"num_ranks": 1}, "offload": True}[key]
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(changed(settings, f"model.init_args.policy.{key}", value)))
    message = str(caught.value)
    mixed = f"mixes settings of the model (config, tokenizer) with those of its role ({key}) (run.yaml:7)"
    assert f"model.init_args.policy {mixed}" in message
    assert f"Write policy: {{model: {{config: ..., tokenizer: ...}}, {key}: ...}}." in message


def test_a_role_may_be_a_path_a_model_or_a_role_with_settings(settings, config):
    role = {"model": settings["model"]["init_args"]["policy"], "lora": {"rank": 2}, "lr": 0.1}
    for policy in ("org/name", {"path": "org/name"}, {"model": "org/name", "lora": {"rank": 2}}, role):
        found = parsed("fit", "--config", config(changed(settings, "model.init_args.policy", policy)))
        assert found.model.init_args.policy
    flags = ["--model.policy.model", "org/name", "--model.policy.lora.rank", "4", "--model.reference.coef", "0.1"]
    arguments = parsed("fit", "--config", config(changed(settings, "model.init_args.policy", "a/b")), *flags)
    assert (arguments.model.init_args.policy.lora.rank, arguments.model.init_args.reference.coef) == (4, 0.1)
    assert arguments.model.init_args.policy.model == "org/name"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("reference", "runs/sft", "settings {coef: ..., model: ..., estimator: ...} or null"),
        ("reference.coef", "much", "a number"),
        ("decoupled.mode", "drop", "one of 'mask', 'clamp'"),
        ("decoupled", "perhaps", "true or false or settings {cap: ..., floor: ..., mode: ..., level: ..., "),
    ],
)
def test_a_wrong_value_of_an_object_is_named_with_its_settings(settings, config, path, value, expected):
    with pytest.raises(UsageError) as caught:
        parsed("fit", "--config", config(changed(settings, f"model.init_args.{path}", value)))
    assert f"model.init_args.{path} must be {expected}" in str(caught.value)
    assert re.search(rf"got {value!r} \(run\.yaml:\d+\)", str(caught.value))


def test_an_adapter_beside_class_path_is_a_setting_of_the_role(settings, config):
    policy = {"class_path": "lightrl.ModelSpec", "init_args": {"path": "org/name", "lora": {"rank": 2}}}
    with pytest.raises(UsageError, match=r"policy\.init_args\.lora is a setting of lightrl\.Role"):
        parsed("fit", "--config", config(changed(settings, "model.init_args.policy", policy)))
