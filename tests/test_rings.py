"""The rings of the package: bounds that may only fall. `python scripts/rings.py` prints what is measured."""

import importlib
import re
import subprocess
import sys

import pytest

from lightrl.commands.main import COMMANDS
from scripts import rings

MAX_CORE_LINES = 38315
MAX_CORE_AND_OPTION_LINES = 46129
MAX_CORE_FILES_THAT_NAME = {"supports": 10, "routes": 10, "images": 23, "LoRA": 10}
BACK_DOORS = [  # none may come, all are to go
    "commands/cli.py -> launch",
    "commands/cli.py -> plan",
    "engines/local/local_engine.py -> compiled kernels",
]
MAX_CIRCLES = 3
MAX_ENTERED = (5960, 885, 98)  # lines, functions and files of a warm iteration, of which some depend on threads


def test_the_core_does_not_grow():
    num_core = rings.num_lines(rings.core_files())
    assert num_core <= MAX_CORE_LINES
    assert num_core + rings.num_lines(rings.files_of(rings.OPTIONS)) <= MAX_CORE_AND_OPTION_LINES


def test_the_core_imports_no_further_leaf():
    assert rings.back_doors() == BACK_DOORS


def test_no_further_files_import_each_other():
    assert len(rings.circles()) <= MAX_CIRCLES


@pytest.mark.parametrize("what", rings.NAMED)
def test_few_files_of_the_core_name_a_column_or_an_adapter(what: str):
    assert len(rings.core_files_naming(what)) <= MAX_CORE_FILES_THAT_NAME[what]


@pytest.mark.parametrize("name", rings.LEAVES)
def test_a_leaf_has_an_entry_tests_a_page_and_a_budget(name: str):
    leaf = rings.LEAVES[name]
    program, _, command = leaf.entry.partition(" ")
    module, _, public = program.rpartition(".")
    assert command in COMMANDS if command else hasattr(importlib.import_module(module), public)
    assert list((rings.REPOSITORY / "tests" / leaf.tests).glob("test_*.py"))
    assert (rings.REPOSITORY / "docs" / leaf.page).is_file()
    assert rings.num_lines(rings.files_of(leaf.files)) <= leaf.max_lines


def test_no_file_is_of_two_rings():
    files = [file for leaf in rings.LEAVES.values() for file in rings.files_of(leaf.files)]
    assert len(files) == len(set(files))
    assert not set(files) & rings.files_of(rings.OPTIONS)


@pytest.mark.extra
def test_a_warm_iteration_enters_few_lines_functions_and_files():
    command = [sys.executable, rings.REPOSITORY / "scripts" / "iteration.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    figures = re.search(r"^D  lines of entered functions: (\d+); functions: (\d+); files: (\d+)$", done.stdout, re.M)
    assert figures is not None, done.stderr[-3000:]
    assert all(int(figure) <= bound for figure, bound in zip(figures.groups(), MAX_ENTERED, strict=True))
