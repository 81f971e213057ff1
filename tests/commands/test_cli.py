"""The command from the outside: what is parsed, built, run, written and said."""

import contextlib
import importlib
import inspect
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import forked
import lightning as L
import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from parsed import parsed, printed_config

import lightrl
from lightrl.commands import convert
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import reported, silence_irrelevant
from lightrl.commands.main import COMMANDS, main
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.errors import OtherRankFailed


def test_a_printed_config_parses_to_the_same(settings, config, capsys):
    first = printed_config(capsys, "fit", "--config", config(settings), "--model.lr", "1e-3")
    Path("printed.yaml").write_text(first)
    assert printed_config(capsys, "fit", "--config", "printed.yaml") == first
    assert yaml.safe_load(first)["model"]["init_args"]["lr"] == 1e-3


def test_later_configs_and_flags_win_over_earlier_ones(settings, config):
    second = config({"trainer": {"max_steps": 5}, "model": {"init_args": {"lr": 0.5, "group_size": 4}}}, "b.yaml")
    found = parsed("fit", "--config", config(settings), "--config", second, "--model.lr", "0.25")
    assert (found.trainer.max_steps, found.model.init_args.group_size, found.model.init_args.lr) == (5, 4, 0.25)
    assert found.model.init_args.reward == "tiny_rewards.exact"


def test_values_get_their_types_and_a_reward_path_stays_text(settings, config):
    settings["model"]["init_args"].update(betas=[0.8, 0.9], sampling={"stop_token_ids": [3, 4], "max_new_tokens": 2})
    arguments = parsed("fit", "--config", config(settings)).model.init_args
    assert arguments.betas == (0.8, 0.9)
    assert arguments.sampling.stop_token_ids == (3, 4)
    assert arguments.reward == "tiny_rewards.exact"


@pytest.mark.parametrize("name", ["GRPO", "lightrl.GRPO", "lightrl.algorithms.grpo.GRPO"])
def test_a_class_is_found_by_short_name_and_by_dotted_path(settings, config, name):
    settings["model"]["class_path"] = name
    assert parsed("fit", "--config", config(settings)).model.class_path.rsplit(".", 1)[1] == "GRPO"


def test_every_flag_of_lightnings_trainer_is_there(settings, config):
    found = parsed("fit", "--config", config(settings)).trainer
    assert set(inspect.signature(L.Trainer.__init__).parameters) - {"self"} <= set(found.keys())


def test_the_seed_is_0_unless_given(settings, config):
    assert parsed("fit", "--config", config(settings)).seed_everything == 0
    assert parsed("fit", "--config", config(settings), "--seed_everything", "7").seed_everything == 7


def with_secrets(settings, secret):
    environment = {"GITHUB_TOKEN": secret, "OPENAI_API_KEY": "{api_key}", "MODE": "fast"}
    arguments = {"token": secret, "headers": {"Authorization": f"Bearer {secret}"}, "max_new_tokens": 5}
    of_model = {
        "workflow": {"class_path": "tiny_task.WithEnvironment", "init_args": {"environment": environment}},
        "reward": [{"path": "tiny_rewards.of_service", "arguments": arguments}],
    }
    return settings | {"model": {"class_path": "GRPO", "init_args": settings["model"]["init_args"] | of_model}}


def test_no_file_of_a_run_has_a_secret_of_a_section_or_a_list(settings, config, capsys):
    assert main(["fit", "--config", config(with_secrets(settings, "s3cret")), "--trainer.max_steps", "1"]) == 0
    folder = Path("lightning_logs/version_0")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"config.yaml", "hparams.yaml", "last.ckpt"} <= {path.name for path in files}
    assert not [path for path in files if b"s3cret" in path.read_bytes()]
    saved = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert saved["workflow"]["init_args"]["environment"] == {"OPENAI_API_KEY": "{api_key}", "MODE": "fast"}
    assert saved["reward"][0]["arguments"] == {"headers": {}, "max_new_tokens": 5}
    assert "omits the secrets in model.init_args.workflow.init_args.environment" in capsys.readouterr().err


@pytest.mark.extra
def test_a_run_resumes_with_new_secrets_from_its_own_settings_or_its_config_yaml(settings, config, capsys):
    assert main(["fit", "--config", config(with_secrets(settings, "old")), "--trainer.max_steps", "1"]) == 0
    more = ["--ckpt_path", "last", "--trainer.max_steps"]
    assert main(["fit", "--config", config(with_secrets(settings, "new"), "new.yaml"), *more, "2"]) == 0
    saved = ["fit", "--config", "lightning_logs/version_1/config.yaml", *more, "3"]
    assert main(saved) == 2  # the workflow needs the variable
    variable = "--model.workflow.init_args.environment.GITHUB_TOKEN=new"
    reward = yaml.safe_dump(with_secrets(settings, "new")["model"]["init_args"]["reward"], default_flow_style=True)
    assert main([*saved, variable, f"--model.reward={reward}"]) == 0
    assert Path("lightning_logs/version_2/checkpoints").exists()
    changes = re.findall("Changed since the checkpoint: (.*)", capsys.readouterr().err)
    assert changes == ["trainer.max_steps 1 → 2.", "trainer.max_steps 2 → 3."]


def test_a_fit_leaves_config_csv_and_tensorboard_in_one_folder(settings, config, capsys):
    assert main(["fit", "--config", config(settings)]) == 0
    folder = Path("lightning_logs/version_0")
    assert "rollout/reward" in (folder / "metrics.csv").read_text()
    assert list(folder.glob("events.out.tfevents*"))
    assert (folder / "checkpoints/last.ckpt").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["init_args"]["group_size"] == 2
    output = capsys.readouterr()
    assert f"Run folder: {folder.absolute()}" in output.out
    assert "metrics.csv" in (folder / "README.txt").read_text()
    assert f"run folder: {folder.absolute()}" in output.err
    assert not [text for text in ("Tip:", "GPU available", "FLOPs") if text in output.out + output.err]


def test_packages_log_at_their_own_level_into_a_file_per_rank(settings, config, monkeypatch):
    package = logging.getLogger("lightrl.rollout")
    monkeypatch.setattr(package, "level", package.level)  # put back
    settings["logging"] = {"lightrl.rollout": "debug", "lightrl.loops": "error"}
    monkeypatch.setattr(logging.getLogger("lightrl.loops"), "level", 0)
    assert main(["fit", "--config", config(settings)]) == 0
    logging.getLogger("lightrl.rollout.controller").debug("after the run")
    assert package.level == logging.DEBUG
    lines = Path("lightning_logs/version_0/logs/rank-0.log").read_text().splitlines()
    names = [line.split()[3].rstrip(":") for line in lines if line[:2] == "20"]
    assert "lightrl.callbacks.run_files" in names
    assert not [name for name in names if name.startswith("lightrl.loops")]
    assert "after the run" not in lines[-1]
    assert yaml.safe_load(Path("lightning_logs/version_0/config.yaml").read_text())["logging"] == settings["logging"]


def test_a_level_for_a_package_that_is_not_there_is_refused(settings, config, capsys):
    settings["logging"] = {"lightrl.rolout": "debug"}
    assert main(["fit", "--config", config(settings)]) == 2
    assert "there is no module lightrl.rolout" in capsys.readouterr().err


def test_ckpt_path_last_goes_on_from_the_newest_run_and_keeps_its_files(settings, config):
    name = config(settings)
    assert main(["fit", "--config", name]) == 0
    before = Path("lightning_logs/version_0/metrics.csv").read_text()
    assert main(["fit", "--config", name, "--ckpt_path", "last", "--trainer.max_steps", "3"]) == 0
    assert Path("lightning_logs/version_0/metrics.csv").read_text() == before
    assert list(Path("lightning_logs/version_1/checkpoints").glob("*step=3.ckpt"))
    assert not list(Path("lightning_logs/version_1/checkpoints").glob("*step=1.ckpt"))


def test_predict_writes_trajectories_with_rewards(settings, config):
    assert main(["predict", "--config", config(settings)]) == 0
    lines = Path("lightning_logs/version_0/predictions.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert lightrl.Trajectory.from_json(json.loads(lines[0])).reward in (0.0, 1.0)


def test_a_strategy_of_null_is_the_default(settings, config):
    name = config(settings | {"trainer": settings["trainer"] | {"strategy": "FSDP2Strategy"}})
    assert main(["validate", "--config", name, "--trainer.strategy", "null"]) == 0
    saved = yaml.safe_load(Path("lightning_logs/version_0/config.yaml").read_text())
    assert saved["trainer"]["strategy"] is None


def test_predict_without_a_logger_keeps_the_predictions_of_earlier_runs(settings, config, capsys):
    settings["trainer"]["logger"] = False
    places = [Path("predictions.jsonl"), Path("predictions-2.jsonl")]
    places[0].write_text("an earlier run's")
    assert main(["predict", "--config", config(settings)]) == 0
    assert places[0].read_text() == "an earlier run's"
    assert len(places[1].read_text().splitlines()) == 8
    assert f"Predictions: {places[1].absolute()}" in capsys.readouterr().out


def test_without_a_logger_no_config_is_written_over_the_users(settings, config):
    settings["trainer"]["logger"] = False
    settings["trainer"]["enable_checkpointing"] = False
    name = config(settings, "config.yaml")
    before = Path(name).read_text()
    assert main(["fit", "--config", name]) == 0
    assert Path(name).read_text() == before
    assert {path.name for path in Path.cwd().iterdir()} == {"config.yaml"}


def test_optimizer_and_scheduler_sections_replace_the_modules(settings, config):
    settings["optimizer"] = {"class_path": "SGD", "init_args": {"lr": 0.5}}
    settings["lr_scheduler"] = {"class_path": "StepLR", "init_args": {"step_size": 1, "gamma": 0.5}}
    settings["trainer"]["callbacks"].append({"class_path": "LearningRateMonitor"})
    assert main(["fit", "--config", config(settings)]) == 0
    header, *rows = Path("lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = header.split(",").index("lr-SGD")
    assert [float(row.split(",")[column]) for row in rows if row.split(",")[column]] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("own", "scheduler", "message"),
    [
        ({"lr_decay": "linear", "min_lr_ratio": 0.5}, "", ""),
        ({"lr": 0.3}, "", r"model.lr=0.3 \(run.yaml:\d+\) has no effect with optimizer"),
        (
            {"warmup_iterations": 2},
            "{class_path: StepLR, init_args: {step_size: 1}}",
            "has no effect with lr_scheduler",
        ),
        ({}, "{class_path: OneCycleLR, init_args: {max_lr: 0.1, total_steps: 9}}", "OneCycleLR sets one learning rate"),
    ],
    ids=["kept", "lr", "two schedules", "one rate for all"],
)
def test_an_optimizer_section_keeps_rates_and_schedule_or_refuses_what_it_replaces(
    own, scheduler, message, settings, config, capsys
):
    arguments = settings["model"]["init_args"]
    critic = {"class_path": "Role", "init_args": {"model": arguments["policy"], "lr": 0.2}}
    settings["model"] = {"class_path": "PPO", "init_args": {**arguments, **own, "critic": critic}}
    settings["optimizer"] = {"class_path": "SGD", "init_args": {"lr": 0.4}}
    settings |= {"lr_scheduler": yaml.safe_load(scheduler)} if scheduler else {}
    settings["trainer"]["callbacks"].append({"class_path": "LearningRateMonitor"})
    assert (main(["fit", "--config", config(settings)]) != 0) == bool(message)
    assert re.search(message, capsys.readouterr().err)
    if not message:
        header, *rows = (row.split(",") for row in Path("lightning_logs/version_0/metrics.csv").read_text().split())
        columns = [header.index(f"lr-SGD/pg{group}") for group in (1, 2)]
        rates = [[float(row[column]) for column in columns] for row in rows if row[columns[0]]]
        assert rates == [pytest.approx([0.4, 0.2]), pytest.approx([0.3, 0.15])]


def test_fast_dev_run_leaves_no_files(settings, config):
    settings["trainer"]["fast_dev_run"] = True
    name = config(settings)
    assert main(["fit", "--config", name]) == 0
    assert [path.name for path in Path.cwd().iterdir()] == [name]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--trainer.accumulate_grad_batches", "2"], "accumulate_grad_batches must be 1", id="set-up"),
        pytest.param(["--model.reward", "tiny_rewards.exat"], "Did you mean 'exact'", id="reward"),
        pytest.param(
            ["--model.policy.model", "org/name", "--model.policy.lora.rank", "0"],
            "lightrl: model.policy.lora.rank (on the command line): lora.rank must be >= 1, got 0",
            id="deep in a union",
        ),
    ],
)
def test_what_a_user_can_fix_is_one_message_and_exit_code_2(settings, config, capfd, flags, message):
    assert main(["fit", "--config", config(settings), *flags]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert "Union" not in said


def test_an_error_during_the_run_says_where_the_traceback_is_and_exits_with_1(settings, config, capfd):
    assert main(["fit", "--config", config(settings), "--model.reward", "tiny_rewards.broken"]) == 1
    said = capfd.readouterr().err
    assert "this reward is broken" in said
    assert "Full traceback: " in said
    assert "RolloutError" in Path(said.rsplit("Full traceback: ", 1)[1].strip()).read_text()


def test_a_server_that_is_not_there_is_said_in_words_alone(settings, config, capfd):
    with contextlib.closing(HeldPort("127.0.0.1")) as silent:
        init_args = {"urls": [f"http://127.0.0.1:{silent.number}"], "timeouts": {"startup_s": 0.1}}
        settings["trainer"]["engine"] = {"class_path": "SGLangEngine", "init_args": init_args}
        assert main(["fit", "--config", config(settings)]) == 1
    said = capfd.readouterr().err
    assert "refused the connection; nothing is listening there" in said
    assert "caused by" not in said


def test_a_full_disk_is_said_in_words_and_the_traceback_is_kept_elsewhere(tmp_path, capfd):
    (tmp_path / "traceback.txt").symlink_to("/dev/full")  # which accepts nothing

    def log_metrics(callbacks):
        callbacks[0].has_started, callbacks[0].folder = True, tmp_path
        (tmp_path / "traceback.txt").write_text("as a logger of Lightning's fails")

    assert reported(log_metrics) == 1
    said = capfd.readouterr().err
    assert "No space left on device" in said
    assert "Free disk space, or set trainer.default_root_dir to another disk." in said
    kept = Path(said.rsplit("Full traceback: ", 1)[1].strip())
    assert kept.parent != tmp_path
    assert "log_metrics" in kept.read_text()
    shutil.rmtree(kept.parent)


def test_a_rank_that_had_to_end_says_in_short_what_it_met_and_last_why(tmp_path, capfd):
    def go_on_alone(callbacks):
        callbacks[0].has_started, callbacks[0].folder = True, tmp_path
        try:
            raise RuntimeError("connection closed by peer")
        except RuntimeError as error:
            raise OtherRankFailed("Mend rank 1.\nRank 1 failed in 'update': ValueError: on purpose") from error

    assert reported(go_on_alone) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "lightrl: RuntimeError: connection closed by peer"
    assert said[-1] == "Rank 1 failed in 'update': ValueError: on purpose"
    kept = Path(said[1].removeprefix("Full traceback: "))
    assert "go_on_alone" in kept.read_text()
    assert kept.parent != tmp_path  # where that of the rank that failed lies
    shutil.rmtree(kept.parent)


def test_lightrl_debug_shows_the_exception_itself(settings, config, monkeypatch):
    monkeypatch.setenv("LIGHTRL_DEBUG", "1")
    with pytest.raises(UsageError, match=r"group_size \(on the command line\): group_size must be at least 2"):
        main(["fit", "--config", config(settings), "--model.group_size", "1"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fti"], "Did you mean lightrl fit?"),
        (["start"], "Commands: init, fit, validate, test, predict, export"),
        (["--config", "run.yaml", "fit"], "The command must come first: lightrl fit --config"),
    ],
)
def test_a_call_without_a_command_is_answered_with_the_commands(args, message, capsys):
    assert main(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["fit"], ["validate"], ["plan"], ["doctor", "run"]])
def test_a_command_without_settings_names_what_is_missing(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == "lightrl: model must be set, in a --config file or as --model.\n"


@pytest.mark.parametrize("place", [(importlib, "import_module"), (convert, "run")], ids=["its import", "its run"])
def test_ctrl_c_in_a_command_is_one_line(place, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    if place[0] is importlib:
        monkeypatch.delitem(sys.modules, "lightrl.commands.convert", raising=False)
    monkeypatch.setattr(*place, interrupted)
    assert main(["convert", "a.yaml"]) == 130
    assert capsys.readouterr().err == "lightrl: convert was interrupted\n"


def test_windows_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="Linux and macOS, not on Windows"):
        importlib.reload(lightrl)


def test_lightnings_line_about_a_checkpoint_gives_way_to_ours():
    words = " was raised with message: "
    assert words in inspect.getsource(ModelCheckpoint.on_exception)  # Lightning's own text
    text = f"An KeyboardInterrupt{words}            , saved checkpoint to a.ckpt"
    silence_irrelevant()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    assert not logger.filter(logging.LogRecord("lightning", logging.INFO, "", 0, text, None, None))


def test_help_names_each_command_with_a_line(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name:<10} {line}" in said for name, line in COMMANDS.items())


def test_a_commands_help_says_what_it_does_and_lists_the_trainers_flags(capsys):
    with pytest.raises(SystemExit) as done:
        main(["validate", "--help"])
    said = capsys.readouterr().out
    assert done.value.code == 0
    assert "usage: lightrl validate --config run.yaml" in said
    assert "lightrl validate: evaluate a policy" in said
    assert "--trainer.max_time" in said
    assert "<function" not in said  # the title that a method without a docstring gets


def test_help_does_not_load_torch():
    code = "from lightrl.commands.main import main; main(['--help'])"
    check = "import sys; assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}\n{check}"], check=True, capture_output=True)


def test_the_installed_command_finds_code_in_the_working_folder(settings, config, tmp_path):
    for name in ("task", "rewards"):
        (tmp_path / f"my_own_{name}.py").write_text(Path(__file__).with_name(f"tiny_{name}.py").read_text())
    settings["model"]["init_args"]["reward"] = "my_own_rewards.exact"
    settings["model"]["init_args"]["policy"]["tokenizer"] = "my_own_task.tokenizer"
    settings["data"]["class_path"] = "my_own_task.Digits"
    settings["trainer"]["fast_dev_run"] = True
    script = tmp_path / "bin" / "lightrl"
    script.parent.mkdir()
    # As the script that pip makes.
    script.write_text("import sys; sys.path.pop(0); from lightrl.commands.main import main; sys.exit(main())")
    done = forked.run([sys.executable, script, "fit", "--config", config(settings)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
