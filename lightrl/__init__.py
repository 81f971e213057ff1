"""lightrl: reinforcement learning for language models, the Lightning way.

The rooms, from the ground up (each imports only from those above it in this list):

    errors        the exceptions of a run, as a tree
    bounds        numbers of a configuration, refused by name
    disk_errors   why a file could not be written, in words
    dotted_path   functions that a configuration names
    trajectory    Prompt, Sampling, Trajectory, Group: plain Python
    experience    trajectories as tensors
    functional    equations: advantages, losses, KL, logprobs, packing
    rewards       reward functions and the processes that run them
    weights       parameters on their way from trainer to engine
    rollout       prompts to judged trajectories: engines, workflows, staleness
    dataflow      which model computes what from what
    lora          adapters trained instead of weights
    models        what a role is and what its model can do
    model_folder  models as Hugging Face folders, whole or absent
    vocabulary    all models of a module read the same token ids
    module        RLModule: the hooks a user writes
    data          prompts by position, chats for SFT
    strategies    where parameters and work live
    algorithms    RLModules ready to use: GRPO and its relatives, SFT
    loops         one iteration inside Lightning's fit loop
    callbacks     weight sync, staleness, metrics, logs, export
    trainer       Lightning's Trainer with an engine
    export        checkpoint to Hugging Face folder
    cli           lightrl fit | validate | test | predict

Public names are loaded when they are first used, so that `import lightrl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightrl.version import __version__

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
        Distillation,
        DrGRPO,
        LitePPO,
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
    from lightrl.experience import Experience
    from lightrl.lora import LoRA
    from lightrl.models import ModelSpec, Outputs, RoleMesh
    from lightrl.module import RLModule
    from lightrl.rollout import (
        AgentWorkflow,
        Environment,
        FakeEngine,
        LocalEngine,
        MultiTurn,
        RetryWithFeedback,
        RolloutEngine,
        SGLangEngine,
        SingleTurn,
        ToolEnvironment,
        Workflow,
    )
    from lightrl.strategies import FSDP2Strategy, Parallel3DStrategy
    from lightrl.trainer import Trainer
    from lightrl.trajectory import Group, Prompt, Sampling, Trajectory

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
    "PromptDataModule": "data",
    "SFTDataModule": "data",
    "PreferenceDataModule": "data",
    "TrajectoryDataModule": "data",
    "ModelSpec": "models",
    "RoleMesh": "models",
    "LoRA": "lora",
    "Outputs": "models",
    "ModelCall": "dataflow",
    "Experience": "experience",
    "Prompt": "trajectory",
    "Sampling": "trajectory",
    "Trajectory": "trajectory",
    "Group": "trajectory",
    "Workflow": "rollout",
    "SingleTurn": "rollout",
    "MultiTurn": "rollout",
    "Environment": "rollout",
    "RetryWithFeedback": "rollout",
    "ToolEnvironment": "rollout",
    "AgentWorkflow": "rollout",
    "RolloutEngine": "rollout",
    "LocalEngine": "rollout",
    "FakeEngine": "rollout",
    "SGLangEngine": "rollout",
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
    "SFT", "DPO", "IPO", "RewardModel", "PromptDataModule", "SFTDataModule", "PreferenceDataModule",
    "TrajectoryDataModule", "ModelSpec", "RoleMesh", "LoRA", "Outputs", "ModelCall", "Experience", "Prompt", "Sampling",
    "Trajectory", "Group", "Workflow", "SingleTurn", "MultiTurn", "Environment", "RetryWithFeedback",
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
