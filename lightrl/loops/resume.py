"""Resume keeps the state that a resumed run or the next fit continues from; `check_resume` checks it (fast_dev_run)."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightrl.checks.files import nearest_files
from lightrl.checks.printable import duration_text
from lightrl.checks.secret_settings import is_secret, without_secrets
from lightrl.data import PromptDataModule
from lightrl.errors import LightRLError
from lightrl.loops.update import GradientGuard
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import FSDP2Strategy, is_on_all_ranks, mark_as_on_all_ranks, ranks_of
from lightrl.strategies.checkpoint.folder import META_FILE
from lightrl.strategies.checkpoint.one_file import explained_mismatch, load_optimizers

log = logging.getLogger(__name__)

Settings = dict[str, Any]  # settings by name or path, or a part of a checkpoint
OptimizerSettings = list[list[Settings]]  # for each optimizer and parameter group, numbers by name

# Settings that identify an experiment. `last` never picks a checkpoint from a run with different values.
_IDENTITY = ("model.class_path", "model.class", "model.policy")
_FIT_IDENTITY = ("seed_everything", *_IDENTITY, "data.class_path", "data.class", "data.train")


def settings_of(trainer: RLTrainer, optimizers: OptimizerSettings) -> Settings:
    """Returns a fit's settings by path, from the command if there is one, or else the module's constructor arguments.

    Adds the numbers in `optimizers`, which `configure_optimizers` set, unless they are settings of the model.
    """
    settings = trainer.settings
    if settings is None:
        module = trainer.lightning_module
        kinds: Any = type(module).__mro__
        names = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
        of_module = {name: value for name, value in vars(module).items() if name in names}
        data: Any = trainer.datamodule  # type: ignore[attr-defined]  # of Lightning
        sources = data.sources["train"] if isinstance(data, PromptDataModule) else ()
        settings = {
            "seed_everything": trainer.run_seed,
            "model": {**of_module, "class": type(module).__qualname__, "policy": getattr(module, "policy_role", None)},
            "trainer": {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs},
            "data": {} if data is None else {"class": type(data).__qualname__, "train": [i.source for i in sources]},
        }
    given = by_path({name: value for name, value in settings.items() if name not in ("config", "ckpt_path")})
    numbers = [pair for groups in optimizers[:1] for pair in groups[0].items() if pair[0] != "is_scheduled"]
    others = by_path({f"optimizer.{name}": value for name, value in numbers if f"model.{name}" not in given})
    return {name: value for name, value in (others | given).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Whether a checkpoint may contain this value: a checkpoint is read as data, not as code."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def by_path(value: object, path: str = "") -> Settings:
    """Flattens settings to paths (`model.sampling.temperature`), without secrets; class names identify list items."""
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(item.get("class_path", index)).rpartition(".")[2]: item for index, item in enumerate(value)}
    if is_secret(path):
        return {}
    settings: Settings = {}
    if not isinstance(value, Mapping):
        settings = without_secrets({path: list(value) if isinstance(value, tuple) else value})
        return settings
    for name, inner in value.items():
        settings |= by_path(inner, path if name == "init_args" else f"{path}.{name}".lstrip("."))
    return settings


def changes(before: Settings, after: Settings) -> list[str]:
    """Describes each changed setting, like `model.group_size 8 → 4`; if a class changed, only its shared arguments."""
    are_complete = all("model.class_path" in settings for settings in (before, after))  # both come from a command
    common = before.keys() & after.keys()
    names = [name for name in dict.fromkeys([*before, *after]) if are_complete or name in common]
    different = [name for name in names if before.get(name) != after.get(name)]
    changed_classes = tuple(name.removesuffix("class_path") for name in different if name.endswith(".class_path"))
    return [
        f"{name} {_text(before.get(name))} → {_text(after.get(name))}"
        for name in different
        if name in common or name.endswith(".class_path") or not name.startswith(changed_classes)
    ]


def _text(value: object) -> str:
    return "null" if value is None else f"{value!s:.80}"


class Resume:
    """Keeps the rollout's state, and counters that Lightning does not keep, such as skipped updates.

    The trainer's rollout is open between `restore_rollout` and `keep_rollout`.
    """

    def __init__(self, trainer: RLTrainer, guard: GradientGuard) -> None:
        self.trainer = trainer
        self.guard = guard
        self.why_no_checkpoint: str | None = None  # why a checkpoint saved now would be wrong
        self._rollout_state: Settings | None = None  # from the last fit or a checkpoint, for the next rollout
        self._is_restored = False  # whether the open rollout has loaded that state
        self._optimizers: OptimizerSettings = []  # set by this fit's `configure_optimizers`
        self._settings: Settings = {}  # path → setting of this fit
        self._saved: Settings = {}  # a checkpoint's `optimizers` and `settings`, until `apply_settings`

    def begin(self) -> None:
        """Clears the state from an earlier stage, which may have failed."""
        self.why_no_checkpoint = None
        self._is_restored = False

    def state_dict(self) -> Settings:
        """Returns the state for a checkpoint; without a rollout, only the settings."""
        state = (self.trainer.rollout.state_dict() if self._is_restored else None) or self._rollout_state
        settings = {"optimizers": self._optimizers, "settings": self._settings} if self._optimizers else {}
        if state is None:
            return settings
        return {
            **settings,
            "rollout": state,
            "num_skipped": self.guard.num_skipped,
            "num_skipped_in_a_row": self.guard.num_in_a_row,
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state_dict: Settings) -> None:
        self._saved = {name: state_dict[name] for name in ("optimizers", "settings") if name in state_dict}
        self._rollout_state = state_dict.get("rollout")
        if self._rollout_state is None:
            return
        self.guard.num_skipped = int(state_dict["num_skipped"])
        self.guard.num_in_a_row = int(state_dict["num_skipped_in_a_row"])
        torch.set_rng_state(state_dict["torch_rng"])

    def keep_settings(self) -> None:
        """Keeps this fit's settings and optimizer settings (`lr` is the initial rate) before a checkpoint is loaded."""
        self._optimizers = [
            [
                {name: value for name, value in group.items() if isinstance(value, float | tuple)}
                | {"lr": group.get("initial_lr", group["lr"]), "is_scheduled": "initial_lr" in group}
                for group in optimizer.param_groups
            ]
            for optimizer in self.trainer.optimizers
        ]
        self._settings = settings_of(self.trainer, self._optimizers)

    def apply_settings(self) -> None:
        """Reports settings that differ from the checkpoint's, and applies this fit's settings to the optimizers."""
        saved, self._saved = self._saved, {}
        if changed := changes(saved.get("settings", {}), self._settings):
            is_only_longer = all(change.startswith("trainer.max_") for change in changed)
            level = logging.INFO if is_only_longer else logging.WARNING
            log.log(level, "Changed since the checkpoint: %s.", "; ".join(changed))
        if saved and 0 < self.trainer.max_steps <= self.trainer.global_step:
            log.warning(
                "Nothing is left to train: the checkpoint is already at trainer.max_steps=%d.", self.trainer.max_steps
            )
        config_of = {id(config.scheduler.optimizer): config for config in self.trainer.lr_scheduler_configs}
        of_all = zip(self.trainer.optimizers, self._optimizers, saved.get("optimizers", []), strict=False)
        for optimizer, groups, saved_groups in of_all:
            for group, new, old in zip(optimizer.param_groups, groups, saved_groups, strict=True):
                names = [name for name in new if name in group and name in old and name != "lr"]
                group.update({name: new[name] for name in names if new[name] != old[name]})
            self._apply_rates(optimizer, groups, saved_groups, config_of.get(id(optimizer)))

    def _apply_rates(
        self, optimizer: Optimizer, groups: list[Settings], saved_groups: list[Settings], config: Any
    ) -> None:
        """Applies this fit's learning rates to an optimizer; `config` contains its scheduler, or is None."""
        was_scheduled = saved_groups[0]["is_scheduled"]
        if config is None:
            for group, new, old in zip(optimizer.param_groups, groups, saved_groups, strict=True):
                if was_scheduled or new["lr"] != old["lr"]:
                    group["lr"] = new["lr"]
        elif isinstance(config.scheduler, LambdaLR):  # computes each rate from the initial rate
            step = config.scheduler.last_epoch
            if not was_scheduled:
                step = self.trainer.global_step if config.interval == "step" else self.trainer.current_epoch
            for group, new, factor in zip(optimizer.param_groups, groups, config.scheduler.lr_lambdas, strict=True):
                group["initial_lr"] = new["lr"]
                group["lr"] = new["lr"] * factor(step)
            bases, rates = [new["lr"] for new in groups], [group["lr"] for group in optimizer.param_groups]
            changed = {"base_lrs": bases, "_last_lr": rates, "last_epoch": step}
            config.scheduler.load_state_dict(config.scheduler.state_dict() | changed)
        else:  # computes each rate from the last rate
            for new, old in zip(groups, saved_groups, strict=True):
                if new["lr"] != old["lr"]:
                    log.warning(
                        "lr=%s has no effect on this resumed run: %s continues from the checkpoint's %s. To use the "
                        "new lr, start from exported weights.", new["lr"], type(config.scheduler).__name__, old["lr"],
                    )  # fmt: skip

    def restore_rollout(self) -> None:
        """Loads the state from a checkpoint or the previous fit, if there is one, into the newly opened rollout."""
        if self._rollout_state is not None:
            seed = self._rollout_state["run_seed"]
            if seed != self.trainer.run_seed:
                log.warning(
                    "The checkpoint was made with seed %d, but this run has seed %d: prompts come in a different "
                    "order, so some repeat. Set seed_everything to %d.", seed, self.trainer.run_seed, seed,
                )  # fmt: skip
            self.trainer.rollout.load_state_dict(self._rollout_state)
        self._is_restored = True

    def keep_rollout(self) -> None:
        """Keeps the closing rollout's state for checkpoints and later fits; if it cannot be read, none can be saved."""
        if not self._is_restored:
            return
        self._is_restored = False  # `state_dict` now returns the kept state
        reason, self.why_no_checkpoint = self.why_no_checkpoint, "the rollout's state could not be read"
        try:
            self._rollout_state = self.trainer.rollout.state_dict() or None  # None for recorded groups
            self.why_no_checkpoint = reason  # the state was read
        except LightRLError as error:
            log.warning("The rollout's state could not be read for a checkpoint: %s", error)

    def note_failure(self, error: BaseException) -> None:
        """Prevents a checkpoint if only this rank failed: state sharded over all ranks could not be saved."""
        ranks = ranks_of(self.trainer.strategy)
        if ranks.size > 1 and not is_on_all_ranks(error):
            self.why_no_checkpoint = f"rank {ranks.rank} failed, but the other ranks did not"
            ranks.fail(error)  # before callbacks' on_exception, which may wait for other ranks


def check_exists(ckpt_path: Any) -> None:
    """Raises ValueError if a checkpoint's path does not exist."""
    if ckpt_path in (None, "last", "best", "hpc") or ":" in str(ckpt_path) or Path(ckpt_path).exists():
        return
    near = nearest_files(Path(ckpt_path), ".ckpt")
    raise ValueError(f"ckpt_path={ckpt_path} does not exist. Pass a checkpoint's path, 'last' or 'best'. {near}")


class CheckpointConnector(_CheckpointConnector):
    """Lightning's connector, which can also load a multi-process checkpoint in one process and explains mismatches."""

    def __init__(self, trainer: RLTrainer, resume: Resume) -> None:
        super().__init__(trainer)
        self._resume = resume
        # Callbacks whose folder the user set; for all other callbacks, a stage sets it.
        self._named = [item for item in trainer.checkpoint_callbacks if getattr(item, "dirpath", None)]

    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        """Finds `last` among this experiment's runs; raises ValueError if the checkpoint does not exist."""
        if ckpt_path == "last":
            if self.trainer.world_size > 1:
                return ckpt_path  # rank 0 finds it in `resume_start`, which broadcasts it
            ckpt_path = last_checkpoint(self.trainer, self._named, Path(self.trainer.log_dir or "."))
            if ckpt_path is None:
                return None
        elif ckpt_path == "best":
            ckpt_path = getattr(self.trainer.checkpoint_callback, "best_model_path", None)
            if not ckpt_path:
                raise ValueError(
                    "ckpt_path=best needs a checkpoint that this trainer saved in a fit, and there is none. "
                    "Pass the path to a checkpoint, or last."
                )
        check_exists(ckpt_path)
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Loads the checkpoint that rank 0 chose: other ranks may see different files or not know the run's folder."""
        trainer, problem = self.trainer, ""
        if trainer.world_size > 1:
            log_dir = Path(trainer.log_dir or ".")  # on all ranks: reading `log_dir` is a collective
            if trainer.is_global_zero and checkpoint_path == "last":
                try:
                    found = last_checkpoint(trainer, self._named, log_dir)
                    checkpoint_path = super()._parse_ckpt_path(TrainerFn.FITTING, found, True, True)
                except ValueError as error:
                    problem = str(error)
            checkpoint_path, problem = trainer.strategy.broadcast((checkpoint_path, problem))
            if problem:
                raise mark_as_on_all_ranks(ValueError(problem))
            check_exists(checkpoint_path)
            self._resume.trainer.restoring = checkpoint_path if trainer.state.fn == TrainerFn.FITTING else None
        super().resume_start(checkpoint_path, weights_only)

    def restore_model(self) -> None:
        module = self.trainer.lightning_module
        is_split = isinstance(self.trainer.strategy, FSDP2Strategy)
        with contextlib.nullcontext() if is_split else explained_mismatch(module, self._loaded_checkpoint):
            super().restore_model()

    def restore_training_state(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._resume.keep_settings()
        super().restore_training_state()
        path = Path(self.trainer.ckpt_path or "")
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING and self.trainer.is_global_zero:
            age = f", saved {duration_text(time.time() - path.stat().st_mtime)} ago" if path.exists() else ""
            of_total = f" of {self.trainer.max_steps}" if self.trainer.max_steps > 0 else ""
            log.info("Continuing after iteration %d%s from %s%s.", self.trainer.global_step, of_total, path, age)

    def restore_optimizers(self) -> None:
        strategy = self.trainer.strategy
        if not self._loaded_checkpoint or isinstance(strategy, FSDP2Strategy):
            super().restore_optimizers()
        else:
            load_optimizers(strategy, strategy.load_optimizer_state_dict, self._loaded_checkpoint)


def last_checkpoint(trainer: Any, named: list[Any], log_dir: Path) -> str | None:
    """Returns the newest last.ckpt of the trainer's own run or, if it has none, of runs in the same experiment.

    The folders that the user set for `named` callbacks are also always searched. If nothing is found, a fit logs why.

    Raises:
        ValueError: if the checkpoints are links to missing files or, outside a fit, if there is none.
    """
    is_fit = trainer.state.fn == TrainerFn.FITTING
    if any("://" in item.dirpath for item in named):
        return "last"  # Lightning finds it
    in_named = [path for item in named for path in Path(item.dirpath).glob(f"{item.CHECKPOINT_NAME_LAST}*.ckpt")]
    saved, searched = [*in_named], dict.fromkeys(item.dirpath for item in named)
    unnamed: list[Any] = [item for item in trainer.checkpoint_callbacks if item not in named]
    if unnamed or not named:
        root, run = (log_dir.parent, "*/") if trainer.loggers else (Path(trainer.default_root_dir), "")
        searched[str(root)] = None
        own = {Path(item.dirpath) for item in unnamed if getattr(item, "dirpath", None)}  # set by an earlier stage
        own_saved = [path for folder in own for path in folder.glob("last*.ckpt")]
        saved += own_saved or root.glob(f"{run}checkpoints/last*.ckpt")
    settings, folders, newest_other, broken_links, found = settings_of(trainer, []), ", ".join(searched), "", [], None
    for path in sorted(saved, key=lambda path: path.stat().st_mtime if path.exists() else 0, reverse=True):
        saved_settings = {} if path in in_named else _saved_settings(path)
        if not path.exists():
            broken_links.append(path)
        elif difference := _difference(saved_settings, settings, is_fit=is_fit):
            newest_other = newest_other or f"{path} ({difference})"
        elif saved_settings or path in in_named:
            found = path
            break
        else:
            found = found or path  # its experiment is unknown, so a checkpoint from this experiment takes precedence
    if found is not None:
        is_elsewhere = trainer.loggers and found not in in_named and log_dir not in found.parents
        log.info("ckpt_path=last is %s.%s", found, " This run writes to a new folder." if is_elsewhere else "")
        return str(found)
    if broken_links:
        raise ValueError(
            f"ckpt_path=last: {broken_links[0]} is a link to {broken_links[0].readlink()}, which does not exist. Pass "
            "the path to another checkpoint, or remove the link to start from the beginning."
        )
    reason = f"ckpt_path=last: {folders} has no last*.ckpt from an earlier run."
    if newest_other:
        reason = (
            f"ckpt_path=last: {folders} has only checkpoints from other experiments. The newest is {newest_other}. To "
            "continue from it, pass its path as ckpt_path."
        )
    if not is_fit:
        raise ValueError(f"{reason} Pass the path to a checkpoint.")
    log.warning("%s The run starts from the beginning.", reason)
    return None


def _saved_settings(checkpoint: Path) -> Settings:
    """Returns a checkpoint's settings without reading its tensors; {} if they are unknown."""
    file = checkpoint / META_FILE if checkpoint.is_dir() else checkpoint
    with contextlib.suppress(Exception):  # if the file is bad, loading it raises a clear error later
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return dict(saved["loops"]["fit_loop"]["epoch_loop.automatic_optimization.state_dict"]["settings"])
    return {}


def _difference(then: Settings, now: Settings, *, is_fit: bool) -> str | None:
    """Describes the first identifying setting that differs from a saved run's; None if no known setting differs."""
    has_random_seed = any(settings.get("seed_everything") is True for settings in (then, now))
    for section in _FIT_IDENTITY if is_fit else _IDENTITY:
        old, new = (
            {name: value for name, value in settings.items() if f"{name}.".startswith(f"{section}.")}
            for settings in (then, now)
        )
        if old and new and not (has_random_seed and section == "seed_everything"):
            for name in dict.fromkeys([*old, *new]):
                if old.get(name) != new.get(name):
                    return f"its {name} is {old.get(name)!r:.80}, this run has {new.get(name)!r:.80}"
    return None


def check_resume(trainer: RLTrainer) -> None:
    """Saves a checkpoint without weights and optimizers to memory, loads it, and compares both. Called on all ranks.

    Raises LightRLError if a part cannot be loaded, or differs after loading.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    state = {name: part for name, part in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    problem = ranks_of(trainer.strategy).broadcast_json(_first_problem(state))
    if problem is not None:
        raise mark_as_on_all_ranks(LightRLError(problem))
    log.info("fast_dev_run: the state of loops, callbacks, module and data module survives a checkpoint.")


def _first_problem(state: Settings) -> str | None:
    """Returns why a checkpoint would not preserve this state; None if it would."""
    leaves, structure = tree_flatten_with_path(state)
    try:
        loaded, loaded_structure = tree_flatten_with_path(_save_and_load(state))
    except Exception as error:  # noqa: BLE001  # a user's class may raise anything when pickled
        name = next((keystr(path) for path, value in leaves if not _can_be_loaded(value)), "")
        return (
            f"The checkpoint cannot be loaded with weights_only=True, because of checkpoint{name}: {error} Callbacks, "
            "module and data module may save only tensors and plain Python values. Convert the state there."
        )
    pairs = zip(leaves, loaded, strict=False)
    different = [keystr(path) for (path, left), (_, right) in pairs if not _are_equal(left, right)]
    if not different and structure == loaded_structure:
        return None
    name = different[0] if different else ""
    return f"checkpoint{name} changes when it is saved and loaded. Save only tensors and plain Python values there."


def _save_and_load(value: object) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _can_be_loaded(value: object) -> bool:
    with contextlib.suppress(Exception):  # a user's class may raise anything; the caller names the value
        _save_and_load(value)
        return True
    return False


def _are_equal(left: object, right: object) -> bool:
    """Whether the values are equal; NaN equals NaN here."""
    if not isinstance(left, torch.Tensor):
        return bool(left == right or (left != left and right != right))
    if not isinstance(right, torch.Tensor) or left.shape != right.shape:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
