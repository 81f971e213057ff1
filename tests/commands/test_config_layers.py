"""Config files are read and parsed once: by the parser as by what names a line."""

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_texts import CHATML, chat_tokenizer
from jsonargparse import get_loader
from parsed import BuildingOnly, BuiltError, parsed, printed_config

from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_errors import value_of_text
from lightrl.commands.config_layers import UsageError, UserSettings, merge, yaml_of
from lightrl.commands.main import main
from lightrl.commands.serve import settings_of


def pipe(name: str, text: str) -> str:
    """A pipe that gives this text once, as the shell's `<(cat run.yaml)` does."""
    os.mkfifo(name)
    threading.Thread(target=Path(name).write_text, args=(text,), daemon=True).start()
    return name


def test_a_config_may_come_from_a_pipe_and_errors_name_its_lines(settings, config):
    text = Path(config(settings)).read_text()
    found = parsed("fit", "--config", pipe("pipe", text), "--model.lr", "0.5")
    assert (found.model.init_args.group_size, found.model.init_args.lr) == (2, 0.5)
    assert [str(path) for path in found.config] == ["pipe"]
    line = 1 + text.splitlines().index("    group_size: 2")
    with pytest.raises(UsageError, match=rf"model.init_args.group_size must be an integer, got 'two' \(wrong:{line}\)"):
        parsed("fit", "--config", pipe("wrong", text.replace("group_size: 2", "group_size: two")))
    with pytest.raises(SystemExit):  # help of the class in the pipe
        parsed("fit", "--config", pipe("asked", text), "--model.sampling.help")


def test_a_pipe_is_refused_where_several_processes_would_read_it(settings, config, capsys):
    name = pipe("pipe", Path(config(settings)).read_text())
    assert main(["fit", "--config", name, "--trainer.devices=2"]) == 2
    assert (
        "--config pipe can be read only once, but 2 processes need it. Write it to a file." in capsys.readouterr().err
    )


def test_servers_take_a_config_from_a_pipe(config):
    engine = {"class_path": "SGLangEngine", "init_args": {"servers": 2}}
    config({})
    assert settings_of([pipe("pipe", yaml.safe_dump({"trainer": {"engine": engine}}))])[1]["servers"] == 2


def test_a_file_that_a_config_names_is_relative_to_it(settings, config):
    Path(config({})).parent.joinpath("below").mkdir()
    trainer = settings.pop("trainer")
    config(trainer, "below/trainer.yaml")
    found = parsed("fit", "--config", config({**settings, "trainer": "trainer.yaml"}, "below/run.yaml"))
    assert found.trainer.max_steps == trainer["max_steps"]


@pytest.mark.parametrize(
    "value",
    ["1e-3", "1.5E5", "-2e+4", "1_0.5e3", ".5", "3", "0x1F", "1.0", "yes", "null", "2026-11-26", "1e", "e5", ".inf"],
)
def test_a_value_in_a_file_is_what_the_parser_makes_of_it(value, config):
    Path(config({})).write_text(f"a: [{value}, x]")
    (found, _), (expected, _) = (
        UserSettings.read(["--config", "run.yaml"]).settings["a"],
        get_loader("yaml")(f"[{value}, x]"),
    )
    assert (found, type(found)) == (expected, type(expected))


def test_a_merged_mapping_is_no_key_that_stands_twice(config):
    Path(config({})).write_text("a: &base {lr: 1, b: 2}\nc:\n  <<: *base\n  lr: 3\n")
    user_settings = UserSettings.read(["--config", "run.yaml"])
    assert user_settings.settings["c"] == {"lr": 3, "b": 2}
    assert user_settings.origin("c.lr") == " (run.yaml:4)"


def test_the_tools_of_a_configuration_are_as_the_page_on_environments_shows(settings, config):
    page = (Path(__file__).parents[2] / "docs/write-an-environment.md").read_text()
    text, *_ = re.findall(r"```yaml\n(.*?ToolEnvironment.*?)```", page.partition("## Tools")[2], re.DOTALL)
    text = text.replace("my_project.tools.search", "lightrl.workflows.tools.python")
    config(yaml.safe_load(text), "tools.yaml")
    with pytest.raises(BuiltError) as built:
        BuildingOnly(["fit", "--config", config(settings), "--config", "tools.yaml"])
    environment = built.value.args[0].workflow(chat_tokenizer(CHATML)).make_environment()
    assert (list(environment.tools), environment.max_calls) == (["python", "calculator"], 2)


def test_a_second_file_adds_callbacks_to_those_of_the_first(settings, config):
    more = {"trainer": {"callbacks+": [{"class_path": "Trace"}]}}
    found = parsed("fit", "--config", config(settings), "--config", config(more, "more.yaml"))
    assert [item.class_path.rpartition(".")[2] for item in found.trainer.callbacks] == ["StalenessControl", "Trace"]


@pytest.mark.parametrize(
    ("train", "flags", "expected"),
    [
        ("a.jsonl", ["--data.train.max_rows", "8"], {"source": "a.jsonl", "max_rows": 8}),
        ("a.jsonl", ["--data.train", "b.jsonl", "--data.train.max_rows", "8"], {"source": "b.jsonl", "max_rows": 8}),
        ({"source": "a.jsonl"}, ["--data.train.source=b.jsonl"], {"source": "b.jsonl", "max_rows": None}),
        (
            {"source": "a.jsonl", "max_rows": 3, "streaming": True},
            ["--data.train", "b.jsonl", "--data.init_args.train.max_rows", "8"],
            {"source": "b.jsonl", "max_rows": 8, "streaming": False},
        ),
        (
            {"source": "a.jsonl", "max_rows": 3},
            ["--data.init_args.train=[b].jsonl", "--data.train.max_rows=8"],
            {"source": "[b].jsonl", "max_rows": 8},
        ),
        ("a.jsonl", ["--data.train.max_rows=8", "--data.train=b.jsonl", "--data.train.name=b"], {"source": "b.jsonl"}),
    ],
    ids=["string and setting", "string on the command line", "mapping", "string over a mapping", "brackets", "twice"],
)
def test_a_string_stays_the_source_of_what_flags_add_to_it(train, flags, expected, settings, config, capsys):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": train, "batch_size": 2}}
    printed = yaml.safe_load(printed_config(capsys, "fit", "--config", config(settings), *flags))
    source = printed["data"]["init_args"]["train"]
    assert {name: source[name] for name in expected} == expected


@pytest.mark.parametrize("role", ["some/model", {"model": "some/model", "lora": {"rank": 2}}])
@pytest.mark.parametrize(
    "added",
    [
        ["--model.policy.model.dtype", "bfloat16"],
        ["--model.policy.lora.rank=4", "--model.init_args.policy.init_args.model.init_args.dtype=bfloat16"],
        ["--model.policy.model", "{dtype: bfloat16}"],
        ["--model.policy={lora: {rank: 4}, model: {dtype: bfloat16}}"],
        {"model": {"dtype": "bfloat16"}},
    ],
)
def test_a_string_stays_the_models_path_with_what_later_layers_add_at_any_depth(role, added, settings, config):
    settings["model"]["init_args"]["policy"] = role
    if isinstance(added, dict):
        added = ["--config", config({"model": {"init_args": {"policy": added}}}, "more.yaml")]
    policy = parsed("fit", "--config", config(settings), *added).model.init_args.policy
    assert (policy.model.path, policy.model.dtype) == ("some/model", "bfloat16")
    assert getattr(policy.lora, "rank", None) == (4 if "rank" in str(added) else None if isinstance(role, str) else 2)


def test_a_string_alone_stays_the_models_path_with_settings_of_the_model(settings, config):
    settings["model"]["init_args"]["policy"] = "some/model"
    spec = parsed("fit", "--config", config(settings), "--model.policy.dtype", "bfloat16").model.init_args.policy
    assert (spec.path, spec.dtype) == ("some/model", "bfloat16")


@pytest.mark.parametrize("reward", ["one.reward", {"path": "one.reward"}])
@pytest.mark.parametrize("added", ["other.reward", {"path": "other.reward"}, ["other.reward"]])
@pytest.mark.parametrize("is_flag", [True, False])
def test_an_item_is_added_to_a_string_and_may_be_one(reward, added, is_flag, settings, config):
    settings["model"]["init_args"]["reward"] = reward
    later = ["--config", config({"model": {"init_args": {"reward+": added}}}, "more.yaml")]
    later = [f"--model.reward+={added}"] if is_flag else later
    parts = parsed("fit", "--config", config(settings), *later).model.init_args.reward
    assert [part.path for part in parts] == ["one.reward", "other.reward"]


def test_a_later_file_replaces_the_models_path_by_null(settings, config, capsys):
    settings["model"]["init_args"]["policy"] = "some/model"
    small = {"path": None, "config": {"model_type": "qwen3"}}
    later = config({"model": {"init_args": {"policy": small}}}, "small.yaml")
    printed = printed_config(capsys, "fit", "--config", config(settings), "--config", later)
    spec = yaml.safe_load(printed)["model"]["init_args"]["policy"]
    assert (spec["path"], spec["config"]) == (None, {"model_type": "qwen3"})


TEXTS = ["[strict] be brief", "{question}: {prompt}", "{{ messages }}", "{% for m in messages %}", "Note: be brief."]
TEXTS += ["# a", "&a", "*a", "1e5", "- a", "a: {b", "[" * 2000, "null and void", "'a'", '"', "!!int 3", "2026-11-29"]


def test_two_dashes_are_no_value(settings, config):
    with pytest.raises(UsageError, match=r"--data.train needs a value, got --\."):
        LightRLCLI(["fit", "--config", config(settings), "--data.train=--", "--print_config"])


def test_a_setting_in_a_mapping_on_the_command_line_is_not_placed_in_a_file(settings, config, capsys):
    settings["data"]["init_args"] = {"train": {"source": "a.jsonl", "max_rows": 5}, "batch_size": 2}
    settings["data"]["class_path"] = "PromptDataModule"
    assert main(["fit", "--config", config(settings), "--data.train", "{source: a.jsonl, max_rows: 0}"]) == 2
    text = capsys.readouterr().err
    assert "max_rows (on the command line)" in text
    assert "run.yaml" not in text
    found = UserSettings.read(["--config", config(settings), "--data.train", "{max_rows: 0}"])
    assert found.origin("data.init_args.train.max_rows") == " (on the command line)"
    assert re.fullmatch(r" \(.*run.yaml:\d+\)", found.origin("data.init_args.train.source"))
    assert re.fullmatch(r" \(.*run.yaml:\d+\)", found.origin("data.init_args.batch_size"))


def test_a_later_mapping_keeps_the_other_settings_of_an_object_and_replaces_a_free_mapping(settings, config, capsys):
    """Here `sampling` has fields, and `config` and `logging` have any keys; `lightrl --help` says so."""
    settings["logging"] = {"lightrl.rollout": "debug"}
    later = ["--model.sampling", "{temperature: 0.5}", "--logging", "{lightrl.engines: debug}"]
    found = parsed("fit", "--config", config(settings), *later, "--model.policy.config.hidden_size", "4")
    assert (found.model.init_args.sampling.temperature, found.logging) == (0.5, {"lightrl.engines": "debug"})
    given = settings["model"]["init_args"]
    assert found.model.init_args.sampling.max_new_tokens == given["sampling"]["max_new_tokens"]
    assert found.model.init_args.policy.config == given["policy"]["config"] | {"hidden_size": 4}
    assert main(["--help"]) == 0
    assert "keeps its other settings. A mapping\nwith arbitrary keys" in capsys.readouterr().out


@pytest.mark.parametrize("text", TEXTS)
def test_a_flag_for_a_text_is_what_was_typed_and_reads_back_from_the_saved_file(text, settings, config, capsys):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl", "batch_size": 2}}
    flags = [f"--data.system_prompt={text}", f"--data.init_args.answer_column={text}"]
    for args in (["--config", config(settings), *flags], ["--config", "saved.yaml"]):
        printed = printed_config(capsys, "fit", *args)
        values = yaml.safe_load(printed)["data"]["init_args"]
        assert (values["system_prompt"], values["answer_column"]) == (text, text)
        Path("saved.yaml").write_text(printed)


ANYTHING = ["[a]", "{a}", "1e5", "null", "# x", "true", "0123", "2026-11-29", "~", "-", "", " ", "a: {b", "'a'", "0x1F"]


def with_types(value: object) -> object:
    """A value with the type of each part."""
    if isinstance(value, dict):
        return {key: with_types(item) for key, item in value.items()}
    return [with_types(item) for item in value] if isinstance(value, list) else (type(value), value)


def test_quoted_texts_reach_constructors_and_files_of_a_run_as_they_are(settings, config):
    nested = [{"a": [text, {"b": text}], "c": text} for text in ANYTHING]
    texts = {f"text {index}": text for index, text in enumerate(ANYTHING)}
    given = {"table": {"a": nested}, "items": [*ANYTHING, *nested, None, 1], "untyped": "[a]", "anything": "null"}
    given |= {"values": texts, "texts": texts, "command": ANYTHING}
    others = {"other": "null", "more": nested, "number": 1.5}
    inner = {"class_path": "tiny_task.Keeps", "init_args": {"anything": "1e5", "items": nested}, "dict_kwargs": others}
    callback = {"class_path": "tiny_task.Keeps", "init_args": {**given, "inner": inner}, "dict_kwargs": others}
    settings["trainer"] |= {"callbacks": [callback], "max_steps": 1}
    settings["model"]["init_args"]["reward"] = {"path": "tiny_rewards.of_texts", "arguments": {"texts": texts}}
    Path(config({})).write_text(yaml_of(settings))
    saved = "lightning_logs/version_0/config.yaml"
    assert main(["fit", "--config", "run.yaml"]) == 0
    for path in ("run.yaml", saved):
        with pytest.raises(BuiltError) as built:
            BuildingOnly(["fit", "--config", path])
        module, trainer = built.value.args
        keeps = next(callback for callback in trainer.callbacks if type(callback).__name__ == "Keeps")
        for built_with, expected in (
            (keeps.given, given | others),
            (keeps.given["inner"].given, {"anything": "1e5", "items": nested} | others),
            (module.reward_source.arguments, {"texts": texts}),
        ):
            assert with_types({name: built_with[name] for name in expected}) == with_types(expected)
    assert main(["fit", "--config", saved, "--ckpt_path", "last", "--trainer.max_steps", "2"]) == 0
    for version in (0, 1):
        folder = Path(f"lightning_logs/version_{version}")
        for name in ("config.yaml", "hparams.yaml"):
            read = yaml.safe_load((folder / name).read_text())
            assert read["trainer"]["callbacks"][0]["init_args"]["items"] == given["items"]
            assert read["model"]["init_args"]["reward"]["arguments"] == {"texts": texts}
        torch.load(folder / "checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (['.command=["sh", "-c", "echo \\"a\\\\n\\" it\'s\\n"]'], {"command": ["sh", "-c", 'echo "a\\n" it\'s\n']}),
        (['.inner.command=[sh, -c, 1e5, "null"]'], {"command": ["sh", "-c", "1e5", "null"]}),
        (
            ['.inner.values={"a": null, "b": "null", "c": "x\\ny", "d": 1e-5}'],
            {"values": {"a": None, "b": "null", "c": "x\ny", "d": 1e-5}},
        ),
        ([".inner.inner.anything=[a, null]"], {"anything": ["a", None]}),
        (['.inner.texts.a={"b": 1}', ".inner.texts.c=[d]"], {"texts": {"a": '{"b": 1}', "c": "[d]"}}),
        (
            [".texts.a=[1]", ".anything=[1]", ".command=[1]", ".values.a=[1]"],
            {"texts": {"a": "[1]"}, "anything": [1], "command": ["1"], "values": {"a": [1]}},
        ),
        ([".command+=[a]", ".command+=b: [c"], {"command": ["a", "b: [c"]}),
    ],
    ids=["quotes", "list", "mapping", "anything", "values of a mapping", "one text for several types", "items"],
)
def test_the_type_of_its_setting_says_how_a_flag_is_read_at_any_depth(flags, expected, settings, config):
    depth = max(flag.count(".inner") for flag in flags)
    words = ["+=tiny_task.Keeps", *(f"{'.inner' * level}=tiny_task.Keeps" for level in range(1, depth + 1)), *flags]
    flags = [f"--trainer.callbacks{word}" for word in words]
    arguments = parsed("fit", "--config", config(settings), *flags).trainer.callbacks[-1].init_args
    for _ in range(depth):
        arguments = arguments.inner.init_args
    assert with_types({name: arguments[name] for name in expected}) == with_types(expected)


def test_a_text_of_a_file_is_that_text_where_a_setting_takes_anything_and_stays_when_it_is_saved(
    settings, config, capsys
):
    texts = {str(index): text for index, text in enumerate([*TEXTS, "null", "true", "5", "~", "[abc]", "{a: 1}", "-"])}
    texts = {name: text for name, text in texts.items() if text != "1e5"}  # which this dumper does not quote
    arguments = {**texts, "list": ["[a]", {"b": "c: d"}], "others": [None, True, 5, 1.5, {"a": 1}]}
    settings["model"]["init_args"]["reward"] = {"path": "a.b", "arguments": arguments}
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl", "batch_size": 2}}
    settings["data"]["init_args"]["system_prompt"] = "null"
    for path in (config(settings), "saved.yaml"):
        printed = printed_config(capsys, "fit", "--config", path)
        values = yaml.safe_load(printed)
        assert values["model"]["init_args"]["reward"]["arguments"] == arguments
        assert values["data"]["init_args"]["system_prompt"] == "null"
        Path("saved.yaml").write_text(printed)
    found = parsed("fit", "--config", "saved.yaml").model.init_args.reward.arguments
    assert {type(text) for text in found.values()} == {str, list}


@pytest.mark.parametrize("text", ["[strict]", "{question}", "- a", "a: b", "null and void", "{a: 1}", "# a"])
def test_a_flag_for_a_part_of_a_source_that_is_a_string_is_what_was_typed(text, settings, config, capsys):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl", "batch_size": 2}}
    printed = printed_config(capsys, "fit", "--config", config(settings), f"--data.train.source={text}")
    assert yaml.safe_load(printed)["data"]["init_args"]["train"]["source"] == text


@pytest.mark.parametrize(
    ("hint", "typed", "value"),
    [
        (list[str], "[sh, -c, 1e5, yes, null]", ["sh", "-c", "1e5", "yes", "null"]),
        (Mapping[str, str] | None, "{A: 1, B: '#c'}", {"A": "1", "B": "#c"}),
        (str | list[str], "[a] b", "[a] b"),
        (dict[str, Any], "{A: 1}", None),
        (float | None, "[a]", None),
    ],
)
def test_lists_and_mappings_of_texts_have_texts_alone(hint, typed, value):
    assert value_of_text(typed, hint, is_item=False) == value


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"callbacks+": ["TrajectoryLog"]}, {"every": 3}),
        ({"callbacks": [{"class_path": "TrajectoryLog", "init_args": None}]}, {"every": 3}),
        ({"callbacks": [{"class_path": "TrajectoryLog"}]}, {"init_args": {"every": 3}}),
    ],
    ids=["of an added item", "without arguments", "in init_args"],
)
def test_a_flag_for_a_setting_of_a_callback_goes_to_the_last_one(settings, flag):
    (key,) = settings
    merge(settings, {"callbacks": flag})
    assert settings == {key: [{"class_path": "TrajectoryLog", "init_args": {"every": 3}}]}
