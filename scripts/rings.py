"""Assigns the package's files to rings and measures them: `python scripts/rings.py` prints the figures.

Ring 1 is the core, which every run needs. Ring 2 is options that the core calls. Ring 3 is leaves, which a
`class_path`, a command or an extra selects. A file in neither table belongs to the core.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "lightrl"


class Leaf(NamedTuple):
    """A capability that nothing in the core imports."""

    max_lines: int
    entry: str  # a public class or function, a command, or a name in checks/entry_points.py
    tests: str
    page: str
    files: str


LEAVES = {
    "supervised": Leaf(992, "lightrl.SFT", "algorithms", "algorithms.md",
        "algorithms/dpo.py algorithms/reward_model.py algorithms/sft.py algorithms/supervised.py data/completions.py"),
    "distillation": Leaf(161, "lightrl.Distillation", "algorithms", "algorithms.md", "algorithms/distillation.py"),
    "fast decoder": Leaf(774, "fast decoder", "engines", "performance.md", "engines/local/fast"),
    "gateway": Leaf(240, "gateway", "engines", "clusters.md", "engines/servers/gateway.py"),
    "vLLM": Leaf(458, "lightrl.VLLMEngine", "engines", "serve-with-sglang.md", "engines/vllm"),
    "math": Leaf(1171, "lightrl.rewards.math_answer", "rewards", "write-a-reward.md",
        "rewards/math_answer.py rewards/math_expressions.py rewards/math_units.py"),
    "code": Leaf(1548, "lightrl.rewards.code_tests", "rewards", "write-a-reward.md",
        "rewards/code_tests.py rewards/sandbox.py rewards/sandbox_guard"),
    "judge": Leaf(241, "lightrl.rewards.LLMJudge", "rewards", "write-a-reward.md", "rewards/llm_judge.py"),
    "texts": Leaf(248, "lightrl.rewards.json_schema", "rewards", "write-a-reward.md",
        "rewards/reasoning_gym.py rewards/text_rewards.py"),
    "tools": Leaf(619, "lightrl.ToolEnvironment", "workflows", "write-an-environment.md",
        "workflows/mcp_tools.py workflows/tools.py"),
    "OpenEnv": Leaf(264, "lightrl.workflows.OpenEnv", "workflows", "write-an-environment.md", "workflows/openenv.py"),
    "agents": Leaf(1854, "lightrl.AgentWorkflow", "workflows", "train-an-agent.md",
        "workflows/agent_command.py workflows/agent_protocol.py workflows/agent_session.py workflows/agent_workflow.py "
        "workflows/chat_protocol.py workflows/completion_parser.py workflows/messages_protocol.py "
        "workflows/openai_endpoint.py workflows/responses_protocol.py"),
    "trajectory log": Leaf(406, "lightrl.TrajectoryLog", "callbacks", "inspect.md", "callbacks/trajectory_log.py"),
    "learning curve": Leaf(259, "lightrl.LearningCurve", "callbacks", "loggers.md", "callbacks/learning_curve.py"),
    "export": Leaf(411, "lightrl.HuggingFaceExport", "callbacks", "share-a-model.md",
        "callbacks/export.py commands/export.py"),
    "inspector": Leaf(1049, "lightrl inspect", "inspect", "inspect.md", "commands/inspect.py inspect"),
    "status": Leaf(106, "lightrl status", "commands", "clusters.md", "commands/status.py"),
    "serve": Leaf(311, "lightrl serve", "commands", "serve-with-sglang.md", "commands/serve.py"),
    "fake engine": Leaf(299, "lightrl.FakeEngine", "engines", "test-your-code.md", "engines/fake_engine.py"),
    "doctor": Leaf(881, "lightrl doctor", "commands", "check-a-run.md", "commands/doctor"),
    "plan": Leaf(1212, "lightrl plan", "plan", "which-when.md", "commands/plan.py plan"),
    "launch": Leaf(1918, "lightrl launch", "launch", "clusters.md",
        "commands/launch.py launch"),
    "convert": Leaf(830, "lightrl convert", "migration", "coming-from-areal.md", "migration"),
}  # fmt: skip

OPTIONS = """columns/supports.py columns/routes.py functional/supports.py functional/branches.py
    strategies/layouts/branches.py
    strategies/layouts/halves.py strategies/layouts/shared_prefix.py
    engines/servers/follower.py engines/servers/leader.py rollout/workflow_pool.py rollout/workflow_worker.py
    engines/servers/registry.py engines/servers/sync/receiver.py
    engines/servers/sync/receivers.py engines/servers/sync/transports/delta.py weights/delta.py
    weights/delta_folder.py engines/servers/sync/transports/broadcast.py weights/broadcast.py
    weights/shared_memory.py engines/servers/sync/adapter_versions.py engines/servers/sync/served_adapters.py
    callbacks/probe.py callbacks/lag_probe.py callbacks/answer_check.py
    engines/servers/sync/cache_canary.py weights/block_fp8.py
    models/images.py loops/shared_tables.py models/tuning.py models/lora.py models/expert_parallel.py models/moe.py
    models/routes.py models/hybrids.py callbacks/dynamic_sampling.py data/curriculum.py data/mixture.py data/streamed.py
    callbacks/trace.py concurrency/listener.py trace"""

# Columns that travel with tokens, and what adapters change -> a pattern of the names that code uses for them. The
# patterns leave out the verb `supports`, and routes of HTTP or of a network.
NAMED = {
    "supports": r"""SUPPORTS|Supports\b|the(ir)? supports|support_\w|\w_supports\b|\bsupports(?=[\].,:=)'"`])""",
    "routes": r"""ROUTES|Routes\b|RouteLayout|\w_routes\b(?!\()|routed_experts|\broutes(?=[\].,=)'"`])""",
    "images": r"image",
    "LoRA": r"(?i)lora|adapter",
}


def files_of(names: str) -> set[Path]:
    """Returns the Python files in these files and folders of the package, each of which must exist."""
    paths = [PACKAGE / name for name in names.split()]
    assert all(path.exists() for path in paths), [str(path) for path in paths if not path.exists()]
    return {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}


def leaf_files() -> dict[Path, str]:
    return {file: name for name, leaf in LEAVES.items() for file in files_of(leaf.files)}


def core_files() -> list[Path]:
    return sorted(set(PACKAGE.rglob("*.py")) - leaf_files().keys() - files_of(OPTIONS))


def num_lines(files: set[Path] | list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


@cache
def imports_of(file: Path) -> frozenset[Path]:
    """Returns the package's files that a file imports, even for types or in functions, looking through `__init__`s."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightrl":
            for alias in node.names:
                found |= set(_home(str(node.module), alias.name))
        elif isinstance(node, ast.Import):
            found |= {
                home for alias in node.names if alias.name.startswith("lightrl.") for home in _home(alias.name, "")
            }
    return frozenset(found - {file})


def _home(module: str, name: str) -> Iterator[Path]:
    """Yields the file that defines a name: the module itself, or the one that its package's `__init__` imports from."""
    folder = PACKAGE.joinpath(*module.split(".")[1:])
    if (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py"
    elif folder.with_suffix(".py").is_file():
        yield folder.with_suffix(".py")
    else:
        door = (folder / "__init__.py").read_text()
        pattern = rf'from lightrl\.([\w.]+) import (?:\([^)]*\b{name}\b|[^(\n]*\b{name}\b)|"([\w.]+)": \[[^\]]*"{name}"'
        if match := re.search(pattern, door):
            inner = f"lightrl.{match[1]}" if match[1] else f"{module}.{match[2]}"
            if inner != module:
                yield from _home(inner, name)


def back_doors() -> list[str]:
    """Lists imports from the core into a leaf, except those in a package's `__init__`."""
    leaves = leaf_files()
    return sorted(
        f"{file.relative_to(PACKAGE)} -> {leaves[target]}"
        for file in core_files()
        for target in imports_of(file)
        if file.name != "__init__.py" and target in leaves
    )


def circles() -> list[list[str]]:
    """Returns groups of files that import each other, by Tarjan's algorithm."""
    order: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[str]] = []

    def visit(file: Path) -> None:
        order[file] = low[file] = len(order)
        stack.append(file)
        for target in imports_of(file):
            if target not in order:
                visit(target)
            if target in stack:
                low[file] = min(low[file], low[target])
        if low[file] == order[file]:
            group = stack[stack.index(file) :]
            del stack[stack.index(file) :]
            if len(group) > 1:
                found.append(sorted(str(item.relative_to(PACKAGE)) for item in group))

    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name != "__init__.py" and file not in order:
            visit(file)
    return sorted(found)


def core_files_naming(what: str) -> list[str]:
    return [str(file.relative_to(PACKAGE)) for file in core_files() if re.search(NAMED[what], file.read_text())]


if __name__ == "__main__":
    num_core = num_lines(core_files())
    print(f"A  lines of the core: {num_core}; with options: {num_core + num_lines(files_of(OPTIONS))}")
    print(f"B  imports from the core into a leaf: {len(back_doors())}", *back_doors(), sep="\n     ")
    print("C  core files that name", ", ".join(f"{what}: {len(core_files_naming(what))}" for what in NAMED))
    for name, leaf in LEAVES.items():
        print(f"E  {name}: {num_lines(files_of(leaf.files))} of {leaf.max_lines} lines")
    print(f"F  circles: {len(circles())}", *map(" / ".join, circles()), sep="\n     ")
    tests = num_lines(set((REPOSITORY / "tests").rglob("*.py")))
    print(f"G  lines of tests per line: {tests / num_lines(set(PACKAGE.rglob('*.py'))):.3f}")
