"""Lightning's private names that lightrl depends on: each is listed here with the files that use it.

A new release of Lightning may rename them, so they are few. Reads of attributes, imports, overridden methods and names
in strings (`getattr(trainer, "_x")`) all count.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from functools import cache
from pathlib import Path

import lightning.fabric
import lightning.pytorch
import pytest

import lightrl

PACKAGE = Path(lightrl.__file__).parent

# (class or module where it must exist, name) → files of lightrl that use it.
PRIVATE_NAMES: dict[tuple[str, str], set[str]] = {
    ("lightning.fabric.utilities.device_dtype_mixin", "_update_properties"): {"strategies/fsdp2.py"},
    ("lightning.pytorch.loops.optimization.automatic", "_AutomaticOptimization"): {"loops/rollout_loop.py"},
    ("lightning.pytorch.core.module:LightningModule", "_current_fx_name"): {
        "algorithms/supervised/module.py",
        "loops/rollout_loop.py",
        "module.py",
    },
    ("lightning.pytorch.trainer.connectors.logger_connector.logger_connector", "_LoggerConnector"): {
        "loops/step_log.py"
    },
    ("lightning.pytorch.trainer.connectors.logger_connector.logger_connector:_LoggerConnector", "_first_loop_iter"): {
        "loops/step_log.py"
    },
    ("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop", "_batches_that_stepped"): {"loops/step_log.py"},
    ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_logger_connector"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_run"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_run_stage"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_accelerator_connector"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_checkpoint_connector"): {"trainer.py"},
    ("lightning.pytorch.trainer.connectors.checkpoint_connector", "_CheckpointConnector"): {"loops/resume.py"},
    ("lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector", "_loaded_checkpoint"): {
        "loops/resume.py",
        "trainer.py",
    },
    ("lightning.pytorch.cli:LightningCLI", "_subcommand_parsers"): {"commands/cli.py", "commands/launch/command.py"},
    # The CLI's and the connector's method of this name.
    ("lightning.pytorch.cli:LightningCLI", "_parse_ckpt_path"): {"commands/cli.py", "loops/resume.py"},
    ("lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint", "_every_n_train_steps"): {
        "callbacks/monitors.py",
        "commands/doctor/run.py",
    },
    ("lightning.pytorch.callbacks.early_stopping:EarlyStopping", "_check_on_train_epoch_end"): {
        "callbacks/monitors.py"
    },
    ("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop", "_combined_loader"): {"callbacks/monitors.py"},
    ("lightning.pytorch.loops.evaluation_loop:_EvaluationLoop", "_restart_stage"): {"callbacks/rollout_metrics.py"},
    ("lightning.pytorch.callbacks.model_summary:ModelSummary", "_summarize_kwargs"): {"callbacks/progress.py"},
    ("lightning.pytorch.loggers.wandb:WandbLogger", "_log_model"): {"callbacks/loggers.py"},
    ("lightning.pytorch.strategies:ModelParallelStrategy", "_data_parallel_size"): {"strategies/fsdp2.py"},
    ("lightning.pytorch.strategies:ModelParallelStrategy", "_process_group_backend"): {"strategies/fsdp2.py"},
    ("torch.nn:Module", "_modules"): {"strategies/parallel_3d/stages.py"},  # Lightning has the name too
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def names_of_lightning() -> frozenset[str]:
    """Every private name that Lightning's source defines: functions, classes, methods and attributes."""
    defined = re.compile(r"(?:\bdef |\bclass |\bself\.)(_[A-Za-z]\w*)|\.(_[A-Za-z]\w*)(?:: [^=\n]+)? =[^=]")
    folders = [Path(root.__file__).parent for root in (lightning.pytorch, lightning.fabric)]
    texts = (file.read_text() for folder in folders for file in folder.rglob("*.py"))
    return frozenset(name or attribute for text in texts for name, attribute in defined.findall(text))


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(file.read_text()))]


def defined_in(nodes: list[ast.AST]) -> set[str]:
    """Names that a file defines itself: functions, classes, and attributes of `self`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@cache
def own_names() -> frozenset[str]:
    """Names that lightrl's classes and modules define themselves."""
    return frozenset(set().union(*(defined_in(nodes_of(file)) for file in PACKAGE.rglob("*.py"))))


def private_names_in(nodes: list[ast.AST]) -> set[str]:
    """Lightning's private names that a source file reads, imports or names in a string."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning":
            names |= {alias.name for alias in node.names} | set(str(node.module).split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return {name for name in names - own_names() if is_private(name) and name in names_of_lightning()}


@cache
def overridden() -> frozenset[tuple[str, str]]:
    """(file, name) of each private attribute of a Lightning class that a subclass in lightrl overrides or reads."""
    pairs: set[tuple[str, str]] = set()
    for info in pkgutil.walk_packages([str(PACKAGE)], "lightrl."):
        if info.name.endswith("__main__") or info.name.startswith("lightrl.rewards.sandbox.guard"):
            continue
        module = importlib.import_module(info.name)
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__:
                continue
            theirs = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] == "lightning"]
            if not theirs:
                continue
            source = "".join(inspect.getsource(base) for base in theirs)
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
            read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            own = {node.attr for node in read if ast.unparse(node.value) == "self"}
            for name in filter(is_private, own | set(vars(kind)) - {"_abc_impl"}):
                if f"self.{name}" in source or any(name in vars(base) for base in theirs):
                    pairs.add((str(Path(str(module.__file__)).relative_to(PACKAGE)), name))
    return frozenset(pairs)


def used_names() -> dict[str, set[str]]:
    users: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in private_names_in(nodes_of(file)):
            users.setdefault(name, set()).add(str(file.relative_to(PACKAGE)))
    for where, name in overridden():
        users.setdefault(name, set()).add(where)
    return users


def test_each_private_name_in_use_is_listed_with_its_files():
    assert used_names() == {name: files for (_, name), files in PRIVATE_NAMES.items()}


@pytest.mark.parametrize(("home", "name"), PRIVATE_NAMES, ids=[f"{home}.{name}" for home, name in PRIVATE_NAMES])
def test_each_private_name_still_exists(home, name):
    module, _, owner = home.partition(":")
    holder = importlib.import_module(module)
    if not owner:
        assert hasattr(holder, name)
        return
    kind = getattr(holder, owner)
    sources = [
        inspect.getsource(base) for base in kind.__mro__ if base.__module__.split(".")[0] in ("lightning", "torch")
    ]
    assert hasattr(kind, name) or any(f"self.{name}" in source for source in sources)
