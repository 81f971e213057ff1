"""lightrl: reinforcement learning for language models, the Lightning way.

Each package imports only from packages above it in this list:

    errors        the exceptions that a run raises, as a tree
    checks        checks configurations and user code, with clear errors
    concurrency   threads, event loops and processes
    columns       data that travels with tokens, from the engine to the loss
    trace         records what processes did and when
    trajectory    Prompt, Sampling, Trajectory, Group: plain Python
    functional    equations: advantages, losses, KL, logprobs, packing
    experience    trajectories as tensors
    rewards       reward functions and the processes that run them
    weights       how parameters get from the trainer to the engine
    models        roles, and what each role's model can do
    dataflow      model calls and the graph they form
    engines       turn token ids into completions: local, SGLang, vLLM, fake
    strategies    divide parameters and work over devices
    testing       a tiny policy and made-up trajectories for tests
    workflows     turn a prompt into a trajectory: turns, environments, agents
    rollout       turns prompts into rewarded trajectories, within a staleness bound
    module        RLModule: the hooks a user writes
    data          data modules: prompts read by position, and chats for SFT
    algorithms    RLModules ready to use: GRPO and its relatives, SFT
    loops         one iteration inside Lightning's fit loop
    callbacks     weight sync, staleness, metrics, logs, export
    trainer       Lightning's Trainer with an engine
    plan          estimates of a run: memory, messages, batch sizes
    commands      lightrl fit | validate | test | predict | export | plan | convert | doctor | launch |
                  status | inspect | serve

Public names are loaded when they are first used, so that `import lightrl` costs nothing.
"""

from __future__ import annotations

import importlib
import sys

if sys.platform == "win32":
    raise ImportError("lightrl runs on Linux and macOS, not on Windows. Use WSL 2 there.")
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def loaded_on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which imports a public name's module when the name is first used.

    `homes` maps public names to the modules that define them, relative to the package.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


if TYPE_CHECKING:
    from lightrl.algorithms import (
        CISPO,
        DAPO,
        DPO,
        DPPO,
        GDPO,
        GRPO,
        GSPO,
        IPO,
        M2PO,
        OAPL,
        PPO,
        RLOO,
        SAPO,
        SFT,
        TOPR,
        AdaptiveKL,
        Distillation,
        DrGRPO,
        EarlyStop,
        GiGPO,
        LitePPO,
        ReferenceKL,
        ReinforceBaseline,
        ReinforcePlusPlus,
        RewardModel,
    )
    from lightrl.callbacks import (
        DynamicSampling,
        EvaluationCommand,
        ExpertBalance,
        HuggingFaceExport,
        LearningCurve,
        PrometheusMetrics,
        PromptCurriculum,
        RLCallback,
        RolloutMetrics,
        RolloutProgressBar,
        RunCost,
        StalenessControl,
        Trace,
        TrajectoryLog,
        WeightSync,
    )
    from lightrl.data import PreferenceDataModule, PromptDataModule, SFTDataModule, TrajectoryDataModule
    from lightrl.dataflow import ModelCall
    from lightrl.engines import FakeEngine, LocalEngine, RolloutEngine, SGLangEngine, VLLMEngine
    from lightrl.experience import Experience
    from lightrl.functional import ImportanceWeights, RewardShaping
    from lightrl.models import LoRA, ModelSpec, Outputs, Role, RoleMesh
    from lightrl.module import RLModule
    from lightrl.rewards import OverlongPenalty
    from lightrl.strategies import FSDP2Strategy, Parallel3DStrategy
    from lightrl.trainer import Trainer
    from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
    from lightrl.workflows import (
        AgentWorkflow,
        Environment,
        MultiTurn,
        RetryWithFeedback,
        SingleTurn,
        ToolEnvironment,
        Workflow,
    )

_NAMES = {
    "trainer": ["Trainer"],
    "strategies": ["FSDP2Strategy", "Parallel3DStrategy"],
    "module": ["RLModule"],
    "algorithms": ["GRPO", "DrGRPO", "DAPO", "RLOO", "ReinforceBaseline", "GSPO", "CISPO", "SAPO", "LitePPO",
        "ReinforcePlusPlus", "M2PO", "OAPL", "TOPR", "DPPO", "PPO", "Distillation", "SFT", "DPO", "IPO", "RewardModel",
        "ReferenceKL", "AdaptiveKL", "EarlyStop", "GDPO", "GiGPO"],
    "functional": ["ImportanceWeights", "RewardShaping"],
    "rewards": ["OverlongPenalty"],
    "data": ["PromptDataModule", "SFTDataModule", "PreferenceDataModule", "TrajectoryDataModule"],
    "models": ["ModelSpec", "Role", "RoleMesh", "LoRA", "Outputs"],
    "dataflow": ["ModelCall"],
    "experience": ["Experience"],
    "trajectory": ["Prompt", "Sampling", "Trajectory", "Group"],
    "workflows": ["Workflow", "SingleTurn", "MultiTurn", "Environment", "RetryWithFeedback", "ToolEnvironment",
        "AgentWorkflow"],
    "engines": ["RolloutEngine", "LocalEngine", "FakeEngine", "SGLangEngine", "VLLMEngine"],
    "callbacks": ["RLCallback", "WeightSync", "StalenessControl", "DynamicSampling", "PromptCurriculum",
        "RolloutMetrics", "RolloutProgressBar", "TrajectoryLog", "Trace", "LearningCurve", "HuggingFaceExport",
        "PrometheusMetrics", "RunCost", "EvaluationCommand", "ExpertBalance"],
}  # fmt: skip
_HOMES = {name: package for package, names in _NAMES.items() for name in names}

__all__ = [
    "__version__", "Trainer", "FSDP2Strategy", "Parallel3DStrategy", "RLModule", "GRPO", "DrGRPO", "DAPO", "RLOO",
    "ReinforceBaseline", "GSPO", "CISPO", "SAPO", "LitePPO", "ReinforcePlusPlus", "M2PO", "OAPL", "TOPR", "DPPO",
    "PPO", "Distillation", "SFT", "DPO", "IPO", "RewardModel", "ReferenceKL", "AdaptiveKL", "EarlyStop", "GDPO",
    "GiGPO", "ImportanceWeights", "RewardShaping", "OverlongPenalty", "PromptDataModule", "SFTDataModule",
    "PreferenceDataModule", "TrajectoryDataModule", "ModelSpec", "Role", "RoleMesh", "LoRA", "Outputs", "ModelCall",
    "Experience", "Prompt", "Sampling", "Trajectory", "Group", "Workflow", "SingleTurn", "MultiTurn", "Environment",
    "RetryWithFeedback", "ToolEnvironment", "AgentWorkflow", "RolloutEngine", "LocalEngine", "FakeEngine",
    "SGLangEngine", "VLLMEngine", "RLCallback", "WeightSync", "StalenessControl", "DynamicSampling", "PromptCurriculum",
    "RolloutMetrics", "RolloutProgressBar", "TrajectoryLog", "Trace", "LearningCurve", "HuggingFaceExport",
    "PrometheusMetrics", "RunCost", "EvaluationCommand", "ExpertBalance",
]  # fmt: skip

__getattr__ = loaded_on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
