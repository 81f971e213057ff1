"""lightrl fit | validate | test | predict: LightningCLI with lightrl's Trainer, short class names and short errors.

`model` and `data` accept any LightningModule or LightningDataModule. Their `class_path` is a short name for classes in
lightrl and Lightning, or a dotted path for a user's classes, which may be in the working folder.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import Path_fr
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

import lightrl
from lightrl.callbacks.loggers import log_settings
from lightrl.callbacks.run_files import contents, run_folder
from lightrl.checks.entry_points import entry_point
from lightrl.checks.secret_settings import without_secrets
from lightrl.commands.config_errors import TextParser, check_empty_settings, explain
from lightrl.commands.config_layers import ConfigText, UsageError, UserSettings, joined, keep_texts, to_plain, yaml_of
from lightrl.commands.console import FIXABLE, chain, reported, unwrapped
from lightrl.models.optimizer import parameter_groups
from lightrl.module import RLModule, TrainedModule
from lightrl.trainer import Trainer
from lightrl.trajectory import Group, encode_json

log = logging.getLogger(__name__)
_Level = Literal["debug", "info", "warning", "error"]


class ConfigParser(TextParser, LightningArgumentParser):
    """Takes the text of config files from `files` instead of reading them again, and never parses a string twice.

    jsonargparse alone would parse a string again when it builds or saves a setting of type Any.
    """

    files: Mapping[str, ConfigText] = {}  # keys are names on the command line

    def instantiate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> Namespace:
        namespace = keep_texts(namespace, in_classes=False)
        return cast(Namespace, to_plain(super().instantiate(namespace, *args, **kwargs)))

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        return str(super().dump(keep_texts(namespace), *args, **kwargs))

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path) not in self.files:
            return super().parse_path(path, *args, **kwargs)
        with Path_fr(path).relative_path_context():
            return self.parse_string(self.files[str(path)], str(path), *args, **kwargs)


class LightRLCLI(LightningCLI):
    """LightningCLI for lightrl. Like LightningCLI, its constructor parses the settings, builds the run and runs it.

    Args:
        args: the command line, starting with the command; `sys.argv[1:]` if None.
        callbacks: added to the callbacks in the config.
        descriptions: a one-line description of each command, for its help.
    """

    trainer: Trainer
    exit_code = 0

    def __init__(
        self,
        args: Sequence[str] | None = None,
        *,
        callbacks: Sequence[L.Callback] = (),
        descriptions: Mapping[str, str] | None = None,
    ) -> None:
        for name in lightrl.__all__:  # import all classes: only imported ones have short names in a config
            getattr(lightrl, name)
        words = list(sys.argv[1:] if args is None else args)
        self._command = words[0]
        strict: dict[str, object] = {"exit_on_error": False, "allow_abbrev": False}
        texts = {"usage": f"lightrl {self._command} --config run.yaml [--setting value ...]"}
        if descriptions:
            texts["description"] = f"lightrl {self._command}: {descriptions[self._command]}."
        super().__init__(
            trainer_class=Trainer,
            parser_class=ConfigParser,
            trainer_defaults={"callbacks": [*callbacks, entry_point("bottleneck")()]},
            save_config_callback=SaveRunConfig,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={**strict, "prog": "lightrl", self._command: {**strict, **texts}},
            args=words,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(dump_header=[f"lightrl=={lightrl.__version__}"], **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning calls it on this object
        """Returns only the command to run, since building all four parsers takes longer than parsing the settings."""
        commands = LightningCLI.subcommands()
        commands["predict"].add("return_predictions")  # not a setting: predictions always go to a file
        return {self._command: commands[self._command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args((torch.optim.Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        levels = "the log level of each package, such as {lightrl.rollout: debug, lightrl.engines: warning}"
        parser.add_argument("--logging", type=dict[str, _Level], default={}, help=levels)
        section = entry_point("launch section") | None
        parser.add_argument("--launch", type=section, default=None, help="where `lightrl launch` starts the run")

    def config_text(self) -> str:
        """Returns all settings as YAML: a config file that reproduces this command on its own."""
        settings = self.config[self.config.subcommand].clone()
        settings.pop("config", None)
        return str(self._subcommand_parsers[self.config.subcommand].dump(settings, skip_none=False))

    def parse_arguments(self, parser: ArgumentParser, args: Any) -> None:
        """Parses the command line into `self.config`; raises UsageError for a wrong setting."""
        command, *rest = joined(args)
        command_parser = self._subcommand_parsers[command]
        self._user_settings = UserSettings.read(rest)
        command_parser.files = self._user_settings.files
        if any(re.fullmatch(r"-h|--help|--[\w.]+\.help(=.*)?", word) for word in rest):
            sys.stdout.write(entry_point("setting help")(command_parser, command, rest, self._user_settings))
            raise SystemExit(0)
        try:
            self.config: Namespace = to_plain(parser.parse_args([command, *rest]))
        except ArgumentError as error:
            raise UsageError(explain(error, command_parser, self._user_settings)) from error
        check_empty_settings(self._user_settings, command_parser)
        seed = self.config[command].get("seed_everything")
        if not isinstance(seed, bool) and seed is not None and not 0 <= seed < 2**32:
            origin = self._user_settings.origin("seed_everything")
            raise UsageError(f"seed_everything must be between 0 and {2**32 - 1}, got {seed}{origin}.")

    def _parse_ckpt_path(self) -> None:
        """Does nothing. Lightning's method would set `model` to any class that a checkpoint's hyperparameters name."""

    def before_instantiate_classes(self) -> None:
        for name, level in self.config[self.config.subcommand].logging.items():
            if name.partition(".")[0] == "lightrl" and importlib.util.find_spec(name) is None:
                raise UsageError(f"logging{self._user_settings.origin('logging')}: there is no module {name}.")
            logging.getLogger(name).setLevel(level.upper())

    def instantiate_classes(self) -> None:
        """Builds trainer, model and data. If one refuses a setting, raises UsageError with its path, file and line."""
        try:
            super().instantiate_classes()
        except FIXABLE as error:
            setting = self._user_settings.place_of(unwrapped(error))
            if not setting:
                raise
            raise UsageError(f"{setting}: {chain(unwrapped(error))}") from error
        if type(self.model) is L.LightningModule:
            raise UsageError(f"model must name a class{self._user_settings.origin('model')}, such as class_path: GRPO.")
        if self.datamodule is None and not is_overridden("train_dataloader", self.model):
            raise UsageError("data must be set, in a --config file or as --data, to a class such as PromptDataModule.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = cast(Trainer, super().instantiate_trainer(**kwargs))
        pipes = [name for name in self._user_settings.files if not Path(name).expanduser().is_file()]
        if pipes and trainer.strategy.launcher is not None:  # the launcher repeats the command line in other processes
            needed = f"{trainer.num_devices} processes need it. Write it to a file."
            raise UsageError(f"--config {pipes[0]} can be read only once, but {needed}")
        logger = self.config[self.config.subcommand].trainer.logger
        # in a fast_dev_run or barebones run, the logger is not Lightning's default
        if logger in (None, True) and [type(logger) for logger in trainer.loggers] == [TensorBoardLogger]:
            root = trainer.default_root_dir  # both loggers write to lightning_logs/version_<n>
            trainer.loggers = [CSVLogger(root), TensorBoardLogger(root)]
        return trainer

    def after_instantiate_classes(self) -> None:
        """Gives the trainer its settings, reports unused ones, and defers building `optimizer`."""
        parsed = self.config[self.config.subcommand]
        self.trainer.settings = _plain(without_secrets(parsed).as_dict())
        entry_point("unused settings")(self._user_settings, parsed, self.model, self.datamodule)
        settings = self.config_init[self.config.subcommand]
        optimizer, scheduler = settings.get("optimizer"), settings.get("lr_scheduler")
        if optimizer is None:
            if scheduler is not None:
                raise UsageError("lr_scheduler needs an optimizer. Add an `optimizer:` section.")
            return
        module_name, note = type(self.model).__name__, "" if scheduler else ", with the model's warm-up and lr_decay"
        log.info("Using optimizer %s instead of %s's own%s.", optimizer["class_path"], module_name, note)
        # an RLModule creates its parameters only after its trainer has started
        self.model.configure_optimizers = partial(_configured_optimizers, self.model, optimizer, scheduler)

    def fit(self, **kwargs: Any) -> None:
        """Trains; on a GPU, first chooses the settings that depend on GPU memory."""
        if (device := self.trainer.strategy.root_device).type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            use_estimate = entry_point("memory estimate")
            use_estimate(self.model, self.trainer, self.datamodule, memory, self._user_settings.origins)
        self.trainer.fit(**kwargs)

    def after_fit(self) -> None:
        if (folder := run_folder(self.trainer)) is None:
            return
        is_listed = any(isinstance(item, lightrl.LearningCurve) for item in self.trainer.callbacks)
        lines = [] if is_listed else [f"Run folder: {folder}", *contents(folder)]
        self.trainer.print("\n".join([*lines, f"lightrl inspect {folder}"]))

    def after_validate(self) -> None:
        if lines := entry_point("intervals")(self.trainer.callback_metrics):
            self.trainer.print(lines)

    after_test = after_validate

    def predict(self, **kwargs: Any) -> None:
        """Writes the trajectories of an RLModule to a file in the run's folder, one per line."""
        writer = _PredictionFile()
        self.trainer.callbacks.append(writer)
        self.trainer.predict(**kwargs, return_predictions=False)
        if writer.path is not None:
            self.trainer.print(f"Predictions: {writer.path}")


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration as config.yaml in the run's folder, but never overwrites a file that the command read.

    Each logger also records the configuration as hyperparameters; CSVLogger writes them to hparams.yaml.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        public = without_secrets(self.config)
        for name, value in self.config.items():
            if public.get(name) != value:
                log.info("config.yaml omits the secrets in %s. Pass them again when you use that file.", name)
        if not trainer.loggers or (folder := trainer.log_dir) is None or not trainer.is_global_zero:
            return
        text = self.parser.dump(self.config, skip_none=False)  # still has secrets, which the parser may require
        header = "".join(re.findall(r"^#.*\n", text, re.MULTILINE))
        text = header + yaml_of(without_secrets(yaml.safe_load(text)))
        target = (Path(folder) / self.config_filename).absolute()
        if target not in [Path(str(source)).absolute() for source in self.config.get("config") or []]:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        if trainer.enable_autolog_hparams:
            log_settings(trainer.loggers, cast(Trainer, trainer).settings or {}, text)


def _plain(value: Any) -> Any:
    """Converts a setting to JSON types; paths and other objects become strings, as loggers write them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


class _PredictionFile(L.Callback):
    """Writes the trajectories of each batch, with their rewards, to a new file, one per line."""

    path: Path | None = None  # None until the first trajectory is written

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = run_folder(trainer) or Path(trainer.default_root_dir)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, *_: object
    ) -> None:
        groups = [item for item in outputs if isinstance(item, Group)] if isinstance(outputs, list) else []
        if not groups or not trainer.is_global_zero:
            return
        if self.path is None:
            self.path = self._new_file()
        with self.path.open("ab") as file:
            for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
                file.write(encode_json(trajectory) + b"\n")

    def _new_file(self) -> Path:
        """Creates a file under a new name; without a logger, other runs may write to the same folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number, path = 1, self.folder / "predictions.jsonl"
        while True:
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                number += 1
                path = self.folder / f"predictions-{number}.jsonl"


def _configured_optimizers(module: L.LightningModule, optimizer: Any, scheduler: Any) -> Any:
    """Builds the return value of `configure_optimizers` from the `optimizer:` and `lr_scheduler:` sections."""
    trained: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if isinstance(module, RLModule):
        roles = module.models()
        trained = parameter_groups(module, {name: roles[name] for name in module.trained_roles()})
    built = instantiate_class((trained,), optimizer)
    if scheduler is None:
        return module.add_schedule(built) if isinstance(module, TrainedModule) else built
    rates = [group["lr"] for group in built.param_groups]
    built_scheduler = instantiate_class(built, scheduler)
    if len(set(rates)) > 1 and rates != [group.get("initial_lr", group["lr"]) for group in built.param_groups]:
        name = scheduler["class_path"]
        raise ValueError(f"lr_scheduler {name} sets one learning rate, but the roles have {rates}. Use another one.")
    if isinstance(module, RLModule) and not hasattr(built_scheduler, "monitor"):
        # the schedule of an RL run advances every iteration; Lightning's default is every epoch
        return {"optimizer": built, "lr_scheduler": {"scheduler": built_scheduler, "interval": "step"}}
    return LightningCLI.configure_optimizers(module, built, built_scheduler)


def run(args: Sequence[str], descriptions: Mapping[str, str] | None = None) -> int:
    """Runs one command; returns 0 on success, 1 if the run failed, 2 if the command line or config is wrong."""
    return reported(lambda callbacks: LightRLCLI(args, callbacks=callbacks, descriptions=descriptions).exit_code)
