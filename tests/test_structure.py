"""The structure of the package: imports, public names, docstrings, deadlines and sizes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from test_lightning_names import is_private, nodes_of, own_names

import lightrl

PACKAGE = Path(lightrl.__file__).parent
MAX_TEST_LINES_PER_LINE = 0.9
MAX_GUIDE_WORDS = 32_000
MAX_README_LINES = 140
MAX_BROAD_EXCEPTS_PER_1000_LINES = 0.5
MAX_PRIVATE_NAMES_IN_TESTS = 52
LAYERS = [
    {"errors"},
    {"checks", "columns", "concurrency", "trace"},
    {"trajectory"},
    {"functional"},
    {"experience"},
    {"rewards", "weights"},
    {"models", "dataflow"},
    {"engines", "strategies"},
    {"testing", "workflows"},
    {"rollout", "module", "data"},
    {"algorithms", "loops", "callbacks"},
    {"trainer"},
    {"plan"},
    {"commands"},
    {"__main__"},
]
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def modules_of() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def package_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightrl."):
            found.append((node.lineno, str(node.module).split(".")[1]))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("lightrl.")]
            found += [(node.lineno, name.split(".")[1]) for name in names]
    return found


def test_every_package_has_a_layer():
    assert {package_of(file) for file in modules_of()} - {"__init__"} == set(LAYER)


def test_the_map_names_the_packages_that_are_there():
    named = re.findall(r"^    (\w+) {2,}\S", str(lightrl.__doc__), flags=re.M)
    packages = {package_of(file) for file in modules_of()} - {"__init__", "__main__"}
    assert set(named) == packages
    assert len(named) == len(packages)


def test_the_map_lists_packages_from_the_lowest_layer_up():
    named = re.findall(r"^    (\w+) {2,}\S", str(lightrl.__doc__), flags=re.M)
    assert [LAYER[package] for package in named] == sorted(LAYER[package] for package in named)


def test_only_files_that_a_user_knows_by_name_lie_on_the_top_level():
    names = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert names == {"errors", "trajectory", "experience", "dataflow", "module", "trainer"}


def test_imports_go_downward_only():
    upward = []
    for file in modules_of():
        package = package_of(file)
        if package == "__init__":
            continue
        for line, other in imported_packages(file):
            if other != package and LAYER[other] >= LAYER[package]:
                upward.append(f"{file.relative_to(PACKAGE)}:{line} {package} imports {other}")
    assert not upward, "move the shared part to a lower layer (LAYERS, above):\n" + "\n".join(upward)


def test_what_engines_of_servers_share_knows_no_kind_of_server():
    kinds = [path.name for path in (PACKAGE / "engines").iterdir() if path.is_dir() and path.name != "servers"]
    files = sorted((PACKAGE / "engines" / "servers").rglob("*.py"))
    assert len(files) > 20
    assert not [file for file in files for kind in kinds if f"lightrl.engines.{kind}" in file.read_text()]


def test_nobody_outside_engines_asks_for_the_class_of_an_engine():
    outside = [file for file in modules_of() if package_of(file) != "engines"]
    asked = re.compile(r"isinstance\([^()]*\b\w*Engine\b|(getattr|hasattr)\([^()]*\bengine,")
    assert not [f"{file}: {match[0]}" for file in outside for match in asked.finditer(file.read_text())]


def test_only_strategies_and_module_and_above_import_lightning():
    lowest = LAYER["module"]
    wrong = []
    for file in modules_of():
        package = package_of(file)
        if package in ("__init__", "strategies") or LAYER[package] >= lowest:
            continue
        for node in nodes_of(file):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{file}:{node.lineno}" for name in names if name.split(".")[0] == "lightning"]
    assert not wrong


def test_public_names_all_exist():
    assert "Trainer" in lightrl.__all__
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
    assert not [file for file in modules_of() if not ast.get_docstring(nodes_of(file)[0])]


def test_packages_describe_themselves_in_at_most_25_lines():
    for init in PACKAGE.glob("*/**/__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert len(text.splitlines()) <= 25, init
        named = {file.name for file in init.parent.glob("*.py")} - {"__init__.py"}
        assert not [name for name in named if name not in text], f"{init}: missing in its reading order"


def test_every_deadline_has_a_finite_default():
    """A deadline is a `*timeout_s` parameter or field, or a field of Timeouts: None by default would wait for ever.

    What has no default gets its value from a caller, in the end from a setting, which has one.
    """
    found = {}
    for file in modules_of():
        for node in nodes_of(file):
            deadlines = []
            if isinstance(node, ast.ClassDef):
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                deadlines = [(ast.unparse(field.target), field.value) for field in fields]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                plain = node.args.posonlyargs + node.args.args
                defaults = [None] * (len(plain) - len(node.args.defaults)) + node.args.defaults
                pairs = zip(plain + node.args.kwonlyargs, defaults + node.args.kw_defaults, strict=True)
                deadlines = [(argument.arg, default) for argument, default in pairs]
            for name, default in deadlines:
                if default is not None and (name.endswith("timeout_s") or node.name == "Timeouts"):
                    where = f"{file.relative_to(PACKAGE)}:{node.name}({name})"
                    found[where] = isinstance(default, ast.Constant) and isinstance(default.value, int | float)
    assert len(found) > 50
    assert not [where for where, is_finite in found.items() if not is_finite]


def num_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_tests_and_guides_are_not_too_long():
    assert num_lines((PACKAGE.parent / "tests").rglob("*.py")) <= MAX_TEST_LINES_PER_LINE * num_lines(modules_of())
    assert sum(len(guide.read_text().split()) for guide in (PACKAGE.parent / "docs").glob("*.md")) <= MAX_GUIDE_WORDS
    assert len((PACKAGE.parent / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_every_file_of_the_readmes_reading_path_exists():
    names = re.findall(r"`([a-z_0-9/]+\.py)`", (PACKAGE.parent / "README.md").read_text())
    assert "loops/rollout_loop.py" in names
    assert not [name for name in names if not any((folder / name).is_file() for folder in (PACKAGE, PACKAGE.parent))]


def broad_excepts() -> list[tuple[Path, int]]:
    found = []
    for file in modules_of():
        for node in nodes_of(file):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                    found.append((file, node.lineno))
    return found


def test_broad_excepts_are_rare():
    assert len(broad_excepts()) <= MAX_BROAD_EXCEPTS_PER_1000_LINES * num_lines(modules_of()) / 1000


def test_each_broad_except_gives_its_reason():
    without_reason = []
    for file, line in broad_excepts():
        lines = file.read_text().splitlines()
        comment = lines[line - 1].partition("#")[2] + lines[line - 2].strip().partition("#")[2]
        if len(re.sub(r"noqa: [A-Z0-9, ]+", "", comment).strip(" #-()")) < 10:
            without_reason.append(f"{file}:{line}")
    assert not without_reason


def names_used(tree: ast.AST) -> Iterator[str]:
    """Names read from another object or module, imported from lightrl, or given to `setattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls", "os"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightrl"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")).endswith("attr"):
            yield from (str(getattr(argument, "value", "")) for argument in node.args[1:2])


def test_tests_use_few_private_names_of_the_package():
    used = []
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        names = names_used(ast.parse(file.read_text()))
        ours = own_names() - {*dir(torch.nn.Module)}  # what a class overrides is torch's name
        used += [f"{file.name}: {name}" for name in names if is_private(name) and name in ours]
    assert len(used) <= MAX_PRIVATE_NAMES_IN_TESTS, used
