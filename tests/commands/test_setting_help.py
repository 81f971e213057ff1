"""`lightrl fit --some.setting.help`: what a setting takes, each with a text."""

import dataclasses
import re

import pytest

import lightrl
from lightrl.commands.main import main


def help_of(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["fit", *args])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "setting", "text"),
    [
        (["--model.sampling.help"], "sampling.top_k", "-1 keeps every token"),
        (["--model.reference.help"], "reference.coef", "weight of the term, above 0"),
        (["--model.policy.help", "ModelSpec"], "policy.options", "other arguments to `from_pretrained`"),
        (["--model", "PPO", "--model.critic.help=Role"], "critic.lora", "adapters"),
        (["--model.help", "GRPO"], "model.clip_low", "the loss stops falling"),
        (["--trainer.engine.help=SGLangEngine"], "timeouts.request_s", "as lost"),
        (["--launch.help"], "launch.ranks", "number of trainer ranks"),
    ],
)
def test_help_of_a_nested_setting_shows_its_settings(capsys, args, setting, text):
    said = help_of(capsys, *args)
    assert said.startswith("usage: lightrl fit --config run.yaml")
    assert f"{setting} " in said
    assert text in " ".join(said.split())


@pytest.mark.parametrize("name", ["GRPO", "PPO", "Sampling", "ModelSpec", "Role"])
def test_every_setting_has_a_text(capsys, name):
    kind = getattr(lightrl, name)
    path = {"Sampling": "model.sampling", "ModelSpec": "model.policy", "Role": "model.policy"}.get(name, "model")
    said = " ".join(help_of(capsys, f"--{path}.help", *([] if name == "Sampling" else [name])).split())
    assert re.findall(rf"--{path}\.\w+ \S+ \(", said) == []
    if dataclasses.is_dataclass(kind):
        assert all(f"--{path}.{item.name}" in said for item in dataclasses.fields(kind) if item.init)


def test_the_help_of_a_command_has_no_markup_of_other_documents(capsys):
    said = help_of(capsys, "--help")
    assert not re.search(r":[a-z]+:\s*`|``|<class 'lightning|__main__", said)
    assert "\nWhat to train on, such as PromptDataModule:\n" in said
    assert "s3://" not in said


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model.samplng.help", "model has no setting samplng"),
        ("--modl.help", "modl is not a setting"),
        ("--trainer.max_steps.help", "trainer.max_steps is not a class"),
        ("--trainer.engine.timeouts.help", "trainer.engine.timeouts is not a class; --trainer.engine.help shows it"),
        ("--trainer.engine.help", "Add a class to --trainer.engine.help: "),
        ("--model.policy.help=Polcy", "no class has this name"),
    ],
)
def test_help_of_what_is_not_there_says_so(capsys, flag, message):
    assert main(["fit", flag]) == 2
    assert message in capsys.readouterr().err
