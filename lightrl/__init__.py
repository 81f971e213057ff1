"""lightrl: reinforcement learning for language models, the Lightning way.

The rooms, from the ground up (each imports only from those above it in this list):

    errors        the exceptions of a run, as a tree
    checks        what a configuration says, checked with clear errors
    concurrency   threads, event loops and processes
    trajectory    Prompt, Sampling, Trajectory, Group: plain Python
    functional    equations: advantages, losses, KL, logprobs, packing
    experience    trajectories as tensors
    rewards       reward functions and the processes that run them
    weights       parameters on their way from trainer to engine
    models        what a role is and what its model can do
    dataflow      which model computes what from what
    engines       token ids to completions: local, SGLang, fake
    testing       servers to test with
    workflows     a prompt to a trajectory: turns, environments, agents
    rollout       prompts to judged trajectories, within a staleness
    module        RLModule: the hooks a user writes
    data          prompts by position, chats for SFT
    strategies    where parameters and work live
    algorithms    RLModules ready to use: GRPO and its relatives, SFT
    loops         one iteration inside Lightning's fit loop
    callbacks     weight sync, staleness, metrics, logs, export
    trainer       Lightning's Trainer with an engine
    commands      lightrl fit | validate | test | predict | export | plan | doctor | serve

Public names are loaded when they are first used, so that `import lightrl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightrl.algorithms import (
        CISPO,
        DAPO,
        DPO,
        GRPO,
        GSPO,
        IPO,
        M2PO,
        PPO,
        RLOO,
        SAPO,
        SFT,
        AdaptiveKL,
        Distillation,
        DrGRPO,
        EarlyStop,
        LitePPO,
        ReferenceKL,
        ReinforceBaseline,
        ReinforcePlusPlus,
        RewardModel,
    )
    from lightrl.callbacks import (
        DynamicSampling,
        HuggingFaceExport,
        LearningCurve,
        PromptCurriculum,
        RLCallback,
        RolloutMetrics,
        RolloutProgressBar,
        StalenessControl,
        TrajectoryLog,
        WeightSync,
    )
    from lightrl.data import PreferenceDataModule, PromptDataModule, SFTDataModule, TrajectoryDataModule
    from lightrl.dataflow import ModelCall
    from lightrl.engines import FakeEngine, LocalEngine, RolloutEngine, SGLangEngine
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

_HOMES = {
    "Trainer": "trainer",
    "FSDP2Strategy": "strategies",
    "Parallel3DStrategy": "strategies",
    "RLModule": "module",
    "GRPO": "algorithms",
    "DrGRPO": "algorithms",
    "DAPO": "algorithms",
    "RLOO": "algorithms",
    "ReinforceBaseline": "algorithms",
    "GSPO": "algorithms",
    "CISPO": "algorithms",
    "SAPO": "algorithms",
    "LitePPO": "algorithms",
    "ReinforcePlusPlus": "algorithms",
    "M2PO": "algorithms",
    "PPO": "algorithms",
    "Distillation": "algorithms",
    "SFT": "algorithms",
    "DPO": "algorithms",
    "IPO": "algorithms",
    "RewardModel": "algorithms",
    "ReferenceKL": "algorithms",
    "AdaptiveKL": "algorithms",
    "EarlyStop": "algorithms",
    "ImportanceWeights": "functional",
    "RewardShaping": "functional",
    "OverlongPenalty": "rewards",
    "PromptDataModule": "data",
    "SFTDataModule": "data",
    "PreferenceDataModule": "data",
    "TrajectoryDataModule": "data",
    "ModelSpec": "models",
    "Role": "models",
    "RoleMesh": "models",
    "LoRA": "models",
    "Outputs": "models",
    "ModelCall": "dataflow",
    "Experience": "experience",
    "Prompt": "trajectory",
    "Sampling": "trajectory",
    "Trajectory": "trajectory",
    "Group": "trajectory",
    "Workflow": "workflows",
    "SingleTurn": "workflows",
    "MultiTurn": "workflows",
    "Environment": "workflows",
    "RetryWithFeedback": "workflows",
    "ToolEnvironment": "workflows",
    "AgentWorkflow": "workflows",
    "RolloutEngine": "engines",
    "LocalEngine": "engines",
    "FakeEngine": "engines",
    "SGLangEngine": "engines",
    "RLCallback": "callbacks",
    "WeightSync": "callbacks",
    "StalenessControl": "callbacks",
    "DynamicSampling": "callbacks",
    "PromptCurriculum": "callbacks",
    "RolloutMetrics": "callbacks",
    "RolloutProgressBar": "callbacks",
    "TrajectoryLog": "callbacks",
    "LearningCurve": "callbacks",
    "HuggingFaceExport": "callbacks",
}

__all__ = [
    "__version__", "Trainer", "FSDP2Strategy", "Parallel3DStrategy", "RLModule", "GRPO", "DrGRPO", "DAPO", "RLOO",
    "ReinforceBaseline", "GSPO", "CISPO", "SAPO", "LitePPO", "ReinforcePlusPlus", "M2PO", "PPO", "Distillation",
    "SFT", "DPO", "IPO", "RewardModel", "ReferenceKL", "AdaptiveKL", "EarlyStop", "ImportanceWeights", "RewardShaping",
    "OverlongPenalty", "PromptDataModule", "SFTDataModule", "PreferenceDataModule", "TrajectoryDataModule",
    "ModelSpec", "Role", "RoleMesh", "LoRA", "Outputs", "ModelCall", "Experience", "Prompt", "Sampling", "Trajectory",
    "Group", "Workflow", "SingleTurn", "MultiTurn", "Environment", "RetryWithFeedback",
    "ToolEnvironment", "AgentWorkflow", "RolloutEngine", "LocalEngine", "FakeEngine", "SGLangEngine", "RLCallback",
    "WeightSync", "StalenessControl", "DynamicSampling", "PromptCurriculum", "RolloutMetrics", "RolloutProgressBar",
    "TrajectoryLog", "LearningCurve", "HuggingFaceExport",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lightrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lightrl.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
