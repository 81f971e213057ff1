"""Settings of a user that have no effect are named."""

import re
from pathlib import Path

import pytest

from lightrl.commands.main import main


def warnings_of(settings, config, capsys, *flags):
    main(["plan", "--config", config(settings), *flags])
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


def test_settings_that_another_class_lacks_are_named_with_the_class(settings, config, capsys):
    del settings["trainer"]["callbacks"]
    settings["trainer"]["strategy"] = {"class_path": "FSDP2Strategy", "init_args": {"activation_checkpointing": True}}
    flags = ["--model=SFT", "--trainer.strategy=SingleDeviceStrategy", "--trainer.strategy.device=cpu"]
    assert warnings_of(settings, config, capsys, *flags)[:2] == [
        "warning: model=SFT (on the command line) has no group_size, reward, sampling: these settings are dropped.",
        "warning: trainer.strategy=SingleDeviceStrategy (on the command line) has no activation_checkpointing: these "
        "settings are dropped.",
    ]


@pytest.mark.parametrize("has_data", [True, False])
def test_settings_of_validation_are_named_where_there_is_nothing_to_validate_on(has_data, settings, config, capsys):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl", "batch_size": 2}}
    settings["data"]["init_args"] |= {"validation_batch_size": 64} | ({"validation": "b.jsonl"} if has_data else {})
    settings["trainer"] |= {"val_check_interval": 5, "gradient_clip_val": 1.0, "limit_val_batches": None}
    settings["model"]["init_args"]["validation_sampling"] = {"temperature": 0.5}
    warnings = warnings_of(settings, config, capsys)
    unused = r"trainer\.val_check_interval \(run\.yaml:\d+\), model\.validation_sampling \(run\.yaml:\d+\)"
    message = rf"warning: data\.validation is not set, so these settings have no effect: {unused}\."
    assert [bool(re.fullmatch(message, line)) for line in warnings] == ([] if has_data else [True])


def test_a_saved_configuration_with_all_defaults_has_no_unused_settings(settings, config, capsys):
    settings["data"] = {"class_path": "PromptDataModule", "init_args": {"train": "a.jsonl", "batch_size": 2}}
    with pytest.raises(SystemExit):
        main(["fit", "--config", config(settings), "--print_config"])
    Path("saved.yaml").write_text(capsys.readouterr().out)
    assert warnings_of({}, lambda _: "saved.yaml", capsys) == []
