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
    """A capability that nothing in the core imports, in one folder or file; a folder's `__init__` exports its entry."""

    place: str
    max_lines: int
    entry: str  # a public class or function, a command, or a name in checks/entry_points.py
    tests: str  # files and folders of tests/ that test this leaf alone
    page: str  # the section of docs/ that is about this leaf alone


LEAVES = {
    "supervised": Leaf("algorithms/supervised", 468, "lightrl.SFT",
        "algorithms/supervised", "algorithms.md#from-demonstrations-and-pairs"),
    "relatives": Leaf("algorithms/relatives.py", 553, "lightrl.DAPO",
        "algorithms/test_relatives.py", "algorithms.md#policy-gradients-with-a-baseline-instead-of-a-critic"),
    "turns": Leaf("algorithms/turns.py", 160, "lightrl.GiGPO",
        "algorithms/test_turns.py", "algorithms.md#credit-for-each-turn"),
    "Muon": Leaf("models/muon.py", 119, "Muon",
        "models/test_muon.py models/muon_run.py", "algorithms.md#muon"),
    "bfloat16 moments": Leaf("models/bf16_adamw.py", 123, "lightrl.models.bf16_adamw.BF16AdamW",
        "trainer/test_bf16_adamw.py", "algorithms.md#moments-in-bfloat16"),
    "quantization": Leaf("models/quantized.py", 156, "quantization",
        "trainer/test_quantized.py", "adapters-and-checkpoints.md#a-base-in-4-bits"),
    "PPO": Leaf("algorithms/ppo.py", 300, "lightrl.PPO",
        "algorithms/test_ppo.py", "algorithms.md#ppo-a-critic-instead-of-a-group"),
    "completed prompts": Leaf("data/completions.py", 554, "lightrl.SFTDataModule",
        "data/test_pairs.py data/test_supervised.py", "bring-your-data.md#chats-and-pairs"),
    "tasks": Leaf("data/tasks.py", 214, "lightrl.data.tasks.Task",
        "trainer/test_tasks.py", "bring-your-data.md#one-task-per-source"),
    "recorded trajectories": Leaf("data/trajectories.py", 87, "lightrl.TrajectoryDataModule",
        "trainer/test_recorded.py", "algorithms.md#without-rollouts"),
    "distillation": Leaf("algorithms/distillation.py", 286, "lightrl.Distillation",
        "algorithms/test_distillation.py trainer/test_teachers.py", "algorithms.md#from-a-teacher"),
    "3D": Leaf("strategies/parallel_3d", 1762, "lightrl.Parallel3DStrategy",
        "strategies/test_parallel_3d.py strategies/test_pipeline.py strategies/test_stages.py "
        "strategies/test_tensor_plans.py strategies/world_3d.py", "models.md#split-over-tp-and-pp"),
    "fast decoder": Leaf("engines/local/fast", 771, "fast decoder",
        "engines/test_kernels.py", "performance.md#small-machines"),
    "gateway": Leaf("engines/servers/gateway.py", 235, "gateway",
        "engines/test_gateway.py", "clusters.md#which-server-a-request-goes-to"),
    "SGLang": Leaf("engines/sglang", 740, "lightrl.SGLangEngine",
        "engines/test_sglang_client.py engines/test_sglang_cpu.py engines/test_sglang_ends.py "
        "engines/test_sglang_engine.py engines/test_sglang_server.py engines/test_sglang_sync.py "
        "engines/test_real_sglang.py engines/test_real_sglang_runs.py",
        "serve-with-sglang.md#serve-rollouts-with-sglang"),
    "vLLM": Leaf("engines/vllm", 667, "lightrl.VLLMEngine",
        "engines/test_vllm.py engines/test_real_vllm.py", "serve-with-sglang.md#with-vllm"),
    "fake engine": Leaf("engines/fake_engine.py", 298, "lightrl.FakeEngine",
        "engines/test_fake_engine.py", "test-your-code.md#fakeengine"),
    "testing": Leaf("testing", 93, "lightrl.testing.tiny_policy",
        "test_testing.py", "test-your-code.md#test-your-code"),
    "math": Leaf("rewards/math_answer", 1183, "lightrl.rewards.math_answer",
        "rewards/test_math_answer.py", "write-a-reward.md#math-answers"),
    "code": Leaf("rewards/code_tests.py", 339, "lightrl.rewards.code_tests",
        "rewards/test_code_tests.py", "write-a-reward.md#untrusted-programs"),
    "sandbox": Leaf("rewards/sandbox", 1821, "lightrl.rewards.LocalSandbox",
        "rewards/test_sandbox.py", "security.md#programs-written-by-a-policy"),
    "judge": Leaf("rewards/llm_judge.py", 340, "lightrl.rewards.LLMJudge",
        "rewards/test_llm_judge.py", "write-a-reward.md#a-model-as-the-judge"),
    "text rewards": Leaf("rewards/text_rewards.py", 192, "lightrl.rewards.json_schema",
        "rewards/test_text_rewards.py", "write-a-reward.md#text-only"),
    "reasoning-gym": Leaf("rewards/reasoning_gym.py", 102, "lightrl.rewards.reasoning_gym.reward",
        "rewards/test_reasoning_gym.py", "bring-your-data.md#reasoning-gym"),
    "multi-turn": Leaf("workflows/multi_turn", 877, "lightrl.MultiTurn",
        "workflows/test_multi_turn.py workflows/test_conversation.py",
        "write-an-environment.md#write-an-environment"),
    "multi-agent": Leaf("workflows/multi_agent.py", 284, "lightrl.workflows.MultiAgent",
        "workflows/test_multi_agent.py", "write-an-environment.md#several-agents"),
    "agents' advantages": Leaf("algorithms/agents.py", 117, "agent advantages",
        "algorithms/test_agents.py", "algorithms.md#several-agents"),
    "self-play": Leaf("callbacks/self_play.py", 141, "lightrl.callbacks.self_play.SelfPlay",
        "trainer/test_self_play.py", "write-an-environment.md#self-play"),
    "tools": Leaf("workflows/tools", 641, "lightrl.ToolEnvironment",
        "workflows/test_tools.py workflows/test_mcp_tools.py", "write-an-environment.md#tools"),
    "OpenEnv": Leaf("workflows/openenv.py", 263, "lightrl.workflows.OpenEnv",
        "workflows/test_openenv.py", "write-an-environment.md#openenv"),
    "agents": Leaf("workflows/agent_workflow", 3265, "lightrl.AgentWorkflow",
        "workflows/agents", "train-an-agent.md#train-an-agent"),
    "task folders": Leaf("workflows/task_folders", 1438, "lightrl.workflows.TaskWorkflow",
        "workflows/task_folders", "task-folders.md#task-folders"),
    "trajectory log": Leaf("callbacks/trajectory_log.py", 402, "lightrl.TrajectoryLog",
        "callbacks/test_trajectory_log.py", "inspect.md#what-must-be-logged"),
    "trace": Leaf("callbacks/trace", 643, "lightrl.Trace",
        "callbacks/test_trace.py callbacks/test_trace_files.py", "inspect.md#trace"),
    "learning curve": Leaf("callbacks/learning_curve.py", 275, "lightrl.LearningCurve",
        "callbacks/test_learning_curve.py", "loggers.md#the-learning-curve"),
    "Prometheus": Leaf("callbacks/prometheus.py", 141, "lightrl.PrometheusMetrics",
        "callbacks/test_prometheus.py", "loggers.md#prometheus"),
    "run cost": Leaf("callbacks/run_cost.py", 94, "lightrl.RunCost",
        "callbacks/test_run_cost.py", "loggers.md#hours-and-price"),
    "evaluation command": Leaf("callbacks/evaluation_command.py", 196, "lightrl.EvaluationCommand",
        "trainer/test_evaluation_command.py trainer/asks_policy.py", "loggers.md#evaluate-with-other-programs"),
    "monitors": Leaf("callbacks/monitors.py", 177, "monitors",
        "trainer/test_monitors.py", "lightning-habits.md#monitored-metrics"),
    "group selection": Leaf("callbacks/group_selection.py", 204, "lightrl.DynamicSampling",
        "trainer/test_dynamic_sampling.py callbacks/test_curriculum.py", "async.md#settings-that-select-groups"),
    "bottleneck": Leaf("callbacks/bottleneck.py", 82, "bottleneck",
        "callbacks/test_bottleneck.py", "performance.md#what-limits-an-iteration"),
    "expert balance": Leaf("callbacks/expert_balance.py", 301, "lightrl.ExpertBalance",
        "trainer/test_expert_balance.py", "models.md#balanced-experts"),
    "export callback": Leaf("callbacks/export.py", 214, "lightrl.HuggingFaceExport",
        "callbacks/test_export.py", "share-a-model.md#at-the-end-of-a-run"),
    "export": Leaf("commands/export.py", 291, "lightrl export",
        "commands/test_export_command.py trainer/test_push.py", "share-a-model.md#on-a-hub"),
    "inspect": Leaf("commands/inspect", 1065, "lightrl inspect", "inspect", "inspect.md#look-at-a-run"),
    "init": Leaf("commands/init.py", 93, "lightrl init",
        "commands/test_init.py", "growth-path.md#start-from-an-example"),
    "status": Leaf("commands/status.py", 108, "lightrl status",
        "commands/test_status.py", "clusters.md#logs-and-status"),
    "serve": Leaf("commands/serve.py", 421, "lightrl serve",
        "commands/test_serve.py", "serve-with-sglang.md#three-ways-to-get-servers"),
    "doctor": Leaf("commands/doctor", 1777, "lightrl doctor",
        "commands/test_attacks.py commands/test_doctor.py commands/test_doctor_run.py commands/test_doctor_launch.py",
        "check-a-run.md#check-a-run-before-it-starts"),
    "memory estimate": Leaf("plan", 1728, "memory estimate", "plan", "gpu.md#settings-and-their-effects"),
    "plan": Leaf("commands/plan.py", 416, "lightrl plan",
        "commands/test_plan.py", "check-a-run.md#what-a-run-needs-on-paper"),
    "intervals": Leaf("commands/intervals.py", 42, "intervals",
        "commands/test_intervals.py", "loggers.md#intervals-for-passk"),
    "setting help": Leaf("commands/setting_help.py", 80, "setting help",
        "commands/test_setting_help.py", "check-a-run.md#help-for-a-setting"),
    "unused settings": Leaf("commands/unused_settings.py", 95, "unused settings",
        "commands/test_unused_settings.py", "check-a-run.md#settings-without-effect"),
    "launch": Leaf("commands/launch", 2105, "lightrl launch",
        "commands/test_launch.py launch", "clusters.md#how-the-plan-is-made"),
    "convert": Leaf("commands/convert", 926, "lightrl convert", "convert", "coming-from-areal.md#coming-from-areal"),
}  # fmt: skip

OPTIONS = """columns/supports.py columns/routes.py columns/topk.py columns/turns.py columns/agents.py
    functional/supports.py strategies/sharded_experience/other_prompts.py
    functional/centering.py functional/branches.py
    strategies/layouts/branches.py strategies/layouts/packing_trial.py functional/chunk_buffers.py
    strategies/layouts/halves.py strategies/layouts/pieces.py strategies/layouts/shared_prefix.py
    engines/servers/follower.py engines/servers/leader.py rollout/workflow_pool.py rollout/workflow_worker.py
    engines/servers/registry.py engines/servers/sync/receiver.py
    engines/servers/sync/receivers.py engines/servers/sync/transports/delta.py weights/delta.py
    weights/delta_folder.py engines/servers/sync/transports/broadcast.py weights/broadcast.py
    weights/shared_memory.py engines/servers/sync/adapter_versions.py engines/servers/sync/served_adapters.py
    callbacks/probe.py callbacks/lag_probe.py callbacks/answer_check.py
    engines/servers/sync/cache_canary.py weights/block_fp8.py
    models/images.py loops/shared_tables.py models/tuning.py models/lora.py models/expert_parallel.py models/moe.py
    models/routes.py models/hybrids.py data/mixture.py data/streamed.py
    rewards/length_penalty.py strategies/offload.py strategies/ranks/role_mesh.py concurrency/listener.py trace"""

# A column that travels with tokens, or LoRA -> a pattern of the names that code uses for it. The patterns do not match
# the verb `supports`, nor routes of HTTP or of a network.
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
    return {file: name for name, leaf in LEAVES.items() for file in files_of(leaf.place)}


def core_files() -> list[Path]:
    return sorted(set(PACKAGE.rglob("*.py")) - leaf_files().keys() - files_of(OPTIONS))


def num_lines(files: set[Path] | list[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


@cache
def imports_of(file: Path) -> frozenset[Path]:
    """Returns the package's files that a file imports, also for types and in functions; follows `__init__`s."""
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


def side_doors() -> list[str]:
    """Lists imports from a leaf's folder that do not go through its `__init__`."""
    doors = {leaf.place: f"lightrl.{leaf.place.replace('/', '.')}." for leaf in LEAVES.values()}
    return sorted(
        f"{file.relative_to(PACKAGE)}: {node.module}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        for place, door in doors.items()
        if (node.module or "").startswith(door) and not file.is_relative_to(PACKAGE / place)
    )


def tests_of(leaf: Leaf) -> set[Path]:
    """Returns a leaf's test files, including all Python files in its test folders."""
    paths = [REPOSITORY / "tests" / name for name in leaf.tests.split()]
    return {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}


def leaves_imported_by(files: set[Path]) -> set[str]:
    leaves = leaf_files()
    return {leaves[target] for file in files for target in imports_of(file) if target in leaves}


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
        print(f"E  {name}: {num_lines(files_of(leaf.place))} of {leaf.max_lines} lines")
    print(f"F  circles: {len(circles())}", *map(" / ".join, circles()), sep="\n     ")
    tests = num_lines(set((REPOSITORY / "tests").rglob("*.py")))
    print(f"G  lines of tests per line: {tests / num_lines(set(PACKAGE.rglob('*.py'))):.3f}")
