"""The structure of the package: who imports whom, which private names of Lightning are in use, what is public."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lightrl

PACKAGE = Path(lightrl.__file__).parent
FLOORS = [
    {"errors"},
    {"checks", "concurrency", "trajectory"},
    {"functional"},
    {"experience"},
    {"rewards", "weights"},
    {"models", "dataflow"},
    {"engines", "strategies"},
    {"testing", "workflows"},
    {"rollout", "module", "data"},
    {"algorithms", "loops", "callbacks"},
    {"trainer"},
    {"commands"},
    {"__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Every private name of Lightning that we use: (module, name, where it must exist), and the files that may use it.
PRIVATE_NAMES = {
    ("lightning.pytorch.loops.optimization.automatic", "_AutomaticOptimization"): {"loops/rollout_loop.py"},
    ("lightning.pytorch.trainer.call", "_call_strategy_hook"): {"loops/rollout_loop.py"},
    ("lightning.pytorch.trainer.call", "_call_lightning_module_hook"): {"loops/rollout_loop.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_run_stage"): {"trainer.py"},
    ("lightning.pytorch.trainer.trainer:Trainer", "_teardown"): {"trainer.py"},
    ("lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector", "dump_checkpoint"): {
        "loops/resume_check.py"
    },
    ("lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization", "_on_before_zero_grad"): {
        "loops/rollout_loop.py"
    },
    ("lightning.pytorch.loops.optimization.automatic:_AutomaticOptimization", "_optimizer_zero_grad"): {
        "loops/rollout_loop.py"
    },
}


def modules_of(room_only: str | None = None) -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if room_only in (None, room_of(file))]


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightrl."):
            found.append((node.lineno, str(node.module).split(".")[1]))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("lightrl.")]
            found += [(node.lineno, name.split(".")[1]) for name in names]
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(file) for file in modules_of()} - {"__init__"}
    assert rooms == set(FLOOR)


def test_imports_go_downward_only():
    upward = []
    for file in modules_of():
        room = room_of(file)
        if room == "__init__":
            continue
        for line, other in imported_rooms(file):
            if other != room and FLOOR[other] >= FLOOR[room]:
                upward.append(f"{file.relative_to(PACKAGE)}:{line} {room} imports {other}")
    assert not upward, "move the shared part to a lower floor (FLOORS, above):\n" + "\n".join(upward)


def test_only_strategies_and_module_and_above_import_lightning():
    lowest = FLOOR["module"]
    wrong = []
    for file in modules_of():
        room = room_of(file)
        if room in ("__init__", "strategies") or FLOOR[room] >= lowest:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{file}:{node.lineno}" for name in names if name.split(".")[0] == "lightning"]
    assert not wrong


@pytest.mark.parametrize(("where", "name"), PRIVATE_NAMES, ids=lambda value: str(value).rsplit(".", 1)[-1])
def test_private_lightning_names_in_use_still_exist(where, name):
    module, _, owner = where.partition(":")
    home = importlib.import_module(module)
    assert hasattr(getattr(home, owner) if owner else home, name)


def test_private_lightning_names_are_used_in_the_listed_files_only():
    for (_, name), files in PRIVATE_NAMES.items():
        users = {str(file.relative_to(PACKAGE)) for file in modules_of() if f"{name}(" in file.read_text()}
        assert users <= files, f"{name} is used in {users}"


def test_no_private_lightning_module_is_imported_elsewhere():
    allowed = {file for files in PRIVATE_NAMES.values() for file in files}
    for file in modules_of():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private or str(file.relative_to(PACKAGE)) in allowed, f"{file}: {private}"


def test_public_names_all_exist():
    for name in lightrl.__all__:
        assert getattr(lightrl, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        lightrl.Trainr  # noqa: B018


def test_importing_lightrl_loads_neither_torch_nor_lightning():
    code = "import sys, lightrl; print(sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_no_file_is_named_for_nothing():
    vague = {"utils", "base", "common", "helpers", "manager", "types"}
    assert not [file for file in modules_of() if file.stem in vague]


def test_every_module_says_what_it_is_for():
    assert not [file for file in modules_of() if not ast.get_docstring(ast.parse(file.read_text()))]


def test_rooms_describe_themselves_in_at_most_25_lines():
    for init in PACKAGE.glob("*/**/__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert len(text.splitlines()) <= 25, init
        named = {file.name for file in init.parent.glob("*.py")} - {"__init__.py"}
        assert not [name for name in named if name not in text], f"{init}: missing in its reading order"


def test_every_deadline_has_a_finite_default():
    """A deadline is a `*_timeout_s` argument or a field of Timeouts, a number of seconds; None would wait for ever."""
    found = {}
    for file in modules_of():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == "Timeouts":
                for field in (item for item in node.body if isinstance(item, ast.AnnAssign)):
                    found[f"Timeouts.{ast.unparse(field.target)}"] = isinstance(field.value, ast.Constant)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            plain, given = node.args.posonlyargs + node.args.args, node.args.defaults
            pairs = list(zip(plain[len(plain) - len(given) :], given, strict=True))
            pairs += [pair for pair in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if pair[1]]
            for argument, default in pairs:
                if argument.arg.endswith("timeout_s"):
                    where = f"{file.relative_to(PACKAGE)}:{node.name}({argument.arg})"
                    found[where] = isinstance(default, ast.Constant) and isinstance(default.value, int | float)
    assert len(found) > 15
    assert not [where for where, is_finite in found.items() if not is_finite]
