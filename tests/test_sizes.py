"""How large the code may be: files, classes, functions, the package, and what a reader of one iteration must read."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightrl

PACKAGE = Path(lightrl.__file__).parent
README = PACKAGE.parent / "README.md"

# Without testing/. What a capability may add, beside what it replaces.
MAX_PACKAGE_LINES = sum({
    "one machine": 32_983,
    "weight syncs proven against the trainer, as deltas, as adapters, to other hosts": 4_338,
    "data of any size, streamed, rendered ahead; SFT and pairs of any size": 1_400,
    "speed on a CPU: small models, kernels that decode them, commands that start": 1_247,
    "tokens as arrays, trajectories as bytes to reward processes": 400,
    "groups admitted, played and judged together": 140,
    "GPUs: attention of packed rows without a mask, devices, precision": 550,
    "files, programs and secrets of strangers": 606,
    "one section to launch a run on any cluster": 2_200,
    "servers that join and leave a run": 409,
    "the hosts of a Ray cluster, as the local launcher uses this machine": 300,
    "a run that goes on with fewer hosts of a Ray cluster": 85,
    "reward workers on any host of a Ray cluster": 115,
    "ranks and servers on Slurm nodes of different kinds": 23,
    "workflows in several processes of rank 0's host, with servers, pauses and checkpoints as in one": 935,
    "an iteration spread over the ranks, in host memory": 1_441,
    "asynchrony without bias: windowed order, lag and steps measured, losses for it": 753,
    "top-p and top-k trained exactly": 667,
    "asynchronous runs that resume and repeat": 1_450,
    "a run as a page, a trace of it": 2_150,
    "bad input named with file, line and setting": 665,
    "nothing waits for ever: stopped and killed processes, disks that hang, one table of all waits": 901,
    "a terminal that is read: lines that stay, files explained": 168,
    "a run checked before it starts": 1_000,
    "AReaL's configurations converted, a row for each key": 816,
    "a plan with the memory of ranks and servers, messages and batch sizes; of a launch, of SFT and pairs": 738,
    "tables, pictures and models for W&B, MLflow and TensorBoard; habits of Lightning refused by name": 236,
    "requests through SGLang's gateway": 304,
    "ranks that end without an abort, containers that share a folder": 26,
    "old weights found by an unchanged answer, those of served adapters too": 93,
    "a mistyped monitor named before models are loaded; held-out reward where no accuracy is given": 38,
}.values())  # fmt: skip
MAX_FILE_LINES = 500
MAX_METHODS = 25
MAX_FUNCTION_LINES = 60
MAX_PATH_FILES = 16
MAX_PATH_LINES = 4_500
MAX_BROAD_EXCEPTS_PER_1000_LINES = 0.5

# An iteration passes these, whatever else the README's path shows.
ON_THE_PATH = {
    "module.py",
    "experience.py",
    "loops/rollout_loop.py",
    "rollout/controller.py",
    "rollout/group_book.py",
    "rollout/player.py",  # the trajectory, and its reward
    "workflows/workflow.py",
    "engines/local/local_engine.py",
    "rewards/pool.py",
    "loops/score.py",
    "loops/update.py",
    "strategies/single.py",
    "algorithms/grpo.py",
    "callbacks/weight_sync.py",
}

# Hooks that users override, which a class may have beside its methods.
HOOKS = {
    "RLModule": {
        "models", "configure_workflow", "reward", "advantages", "loss", "value_loss", "score_calls",
        "configure_optimizers", "configure_rollout", "validation_step", "test_step", "predict_step",
        "is_update_the_last",
    },
}  # fmt: skip


def files() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if "testing" not in file.relative_to(PACKAGE).parts]


def all_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for file in all_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield str(file.relative_to(PACKAGE)), node


def reading_path() -> list[str]:
    """The files that the README's section on reading the code names, in order."""
    section = README.read_text().split("## Reading the code")[1].split("\n## ")[0]
    return re.findall(r"`([a-z_0-9/]+\.py)`", section.split("`lightrl/__init__.py`")[1])


def test_the_package_stays_small():
    assert sum(num_lines(file) for file in [*files(), *PACKAGE.rglob("*.cpp")]) <= MAX_PACKAGE_LINES


def test_no_file_is_too_long_to_read():
    assert not {str(file): num_lines(file) for file in all_files() if num_lines(file) > MAX_FILE_LINES}


def test_no_class_has_too_many_methods():
    large = {}
    for file, node in nodes(ast.ClassDef):
        names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
        names -= {name for name in names if name.startswith("on_")} | HOOKS.get(node.name, set())
        if len(names) > MAX_METHODS:
            large[f"{file}:{node.name}"] = len(names)
    assert not large


def test_no_function_is_too_long_but_constructors():
    long = {}
    for file, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
        length = node.end_lineno - node.lineno + 1
        if length > MAX_FUNCTION_LINES and node.name != "__init__":
            long[f"{file}:{node.name}"] = length
    assert not long


def test_one_iteration_can_be_read_in_an_afternoon():
    path = reading_path()
    assert len(path) == len(set(path)) <= MAX_PATH_FILES
    assert not [name for name in path if not (PACKAGE / name).is_file()]
    assert sum(num_lines(PACKAGE / name) for name in path) <= MAX_PATH_LINES


def test_the_reading_path_leaves_nothing_out_that_an_iteration_passes():
    assert set(reading_path()) >= ON_THE_PATH


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def broad_excepts() -> list[tuple[Path, int]]:
    return [
        (file, node.lineno)
        for file in files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]


def test_broad_excepts_are_rare():
    num_thousands = sum(num_lines(file) for file in files()) / 1000
    assert len(broad_excepts()) <= MAX_BROAD_EXCEPTS_PER_1000_LINES * num_thousands


def test_each_broad_except_gives_its_reason():
    silent = []
    for file, line in broad_excepts():
        texts = file.read_text().splitlines()
        comment = texts[line - 1].partition("#")[2] + texts[line - 2].strip().partition("#")[2]
        if len(re.sub(r"noqa: [A-Z0-9, ]+", "", comment).strip(" #-()")) < 10:
            silent.append(f"{file}:{line}")
    assert not silent


@pytest.mark.parametrize("source", ["except:", "except Exception:", "except (ValueError, BaseException) as error:"])
def test_broad_means_all_exceptions(source):
    (handler,) = ast.parse(f"try:\n    pass\n{source}\n    pass").body[0].handlers
    assert is_broad(handler)
