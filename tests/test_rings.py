"""The rings of the package: bounds that may only fall. `python scripts/rings.py` prints what is measured."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.checks.entry_points import ENTRY_POINTS, entry_point
from lightrl.commands.main import COMMANDS
from scripts import rings

MAX_CORE_LINES = 34131
MAX_CORE_AND_OPTION_LINES = 41998
MAX_CORE_FILES_THAT_NAME = {"supports": 7, "routes": 8, "images": 10, "LoRA": 8}
# Lines, functions and files of a warm iteration, on Python 3.11 with OMP_NUM_THREADS=1; more threads enter more.
MAX_ENTERED = (5498, 784, 75)

# Leaves that meet: in a file that one writes and the other reads, or in a run to which each gives a part, such as
# its algorithm, strategy or engine. The tests of the first import the second too.
MEET = {
    "supervised": {"export callback", "3D"}, "launch": {"status"}, "inspect": {"trace"},
    "recorded trajectories": {"trajectory log", "PPO"}, "plan": {"PPO"}, "memory estimate": {"PPO", "SGLang"},
    "gateway": {"SGLang"}, "vLLM": {"SGLang"}, "turns": {"multi-turn", "tasks"},
    "tasks": {"completed prompts", "multi-agent", "group selection"}, "group selection": {"relatives"},
    "expert balance": {"3D", "supervised"}, "agents' advantages": {"PPO", "relatives"},
    "quantization": {"3D", "export", "export callback"}, "doctor": {"code", "math", "reasoning-gym", "text rewards"},
}  # fmt: skip


def test_the_core_does_not_grow():
    num_core = rings.num_lines(rings.core_files())
    assert num_core <= MAX_CORE_LINES
    assert num_core + rings.num_lines(rings.files_of(rings.OPTIONS)) <= MAX_CORE_AND_OPTION_LINES


def test_the_core_imports_no_leaf():
    assert rings.back_doors() == []


def test_no_files_import_each_other():
    assert rings.circles() == []


def test_an_entry_point_leads_into_a_leaf():
    leaves = {file.relative_to(rings.REPOSITORY).with_suffix("") for file in rings.leaf_files()}
    for name, path in ENTRY_POINTS.items():
        module = entry_point(name).__module__
        assert Path(*module.split(".")) in leaves, path


@pytest.mark.parametrize("what", rings.NAMED)
def test_few_files_of_the_core_name_a_column_or_an_adapter(what: str):
    assert len(rings.core_files_naming(what)) <= MAX_CORE_FILES_THAT_NAME[what]


@pytest.mark.parametrize("name", rings.LEAVES)
def test_a_leaf_has_an_entry_tests_a_section_and_a_budget(name: str):
    leaf = rings.LEAVES[name]
    program, _, command = leaf.entry.partition(" ")
    module, _, public = program.rpartition(".")
    if leaf.entry in ENTRY_POINTS:
        assert entry_point(leaf.entry)
    elif command:
        assert command in COMMANDS
        assert callable(importlib.import_module(f"lightrl.commands.{command}").run)
    else:
        assert hasattr(importlib.import_module(module), public)
    assert any(file.name.startswith("test_") for file in rings.tests_of(leaf))
    page, _, section = leaf.page.partition("#")
    titles = re.findall(r"^#+ (.+)$", (rings.REPOSITORY / "docs" / page).read_text(), re.M)
    assert section in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
    assert rings.num_lines(rings.files_of(leaf.place)) <= leaf.max_lines


def test_no_two_leaves_share_a_test_or_a_section():
    tests = [file for leaf in rings.LEAVES.values() for file in rings.tests_of(leaf)]
    pages = [leaf.page for leaf in rings.LEAVES.values()]
    assert len(tests) == len(set(tests))
    assert len(pages) == len(set(pages))


def test_a_leafs_folder_is_imported_through_its_init_only():
    assert rings.side_doors() == []


@pytest.mark.parametrize("name", rings.LEAVES)
def test_the_tests_of_a_leaf_import_no_leaf_that_it_does_not_use_itself(name: str):
    leaf = rings.LEAVES[name]
    used = rings.leaves_imported_by(rings.files_of(leaf.place)) | {name, "fake engine"} | MEET.get(name, set())
    assert rings.leaves_imported_by(rings.tests_of(leaf)) <= used


def test_no_file_is_of_two_rings():
    files = [file for leaf in rings.LEAVES.values() for file in rings.files_of(leaf.place)]
    assert len(files) == len(set(files))
    assert not set(files) & rings.files_of(rings.OPTIONS)


@pytest.mark.extra
def test_a_warm_iteration_enters_few_lines_functions_and_files():
    command = [sys.executable, rings.REPOSITORY / "scripts" / "iteration.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    figures = re.search(r"^D  lines of entered functions: (\d+); functions: (\d+); files: (\d+)$", done.stdout, re.M)
    assert figures is not None, done.stderr[-3000:]
    assert all(int(figure) <= bound for figure, bound in zip(figures.groups(), MAX_ENTERED, strict=True))
