"""Algorithms ready to use: RLModules with a loss, and supervised fine-tuning. Each is a short file.

Reading order:
    grpo.py       GRPO and the settings that its relatives differ in
    relatives.py  DrGRPO, DAPO, RLOO, GSPO, CISPO, SAPO, REINFORCE++, M2PO and more: GRPO under other settings
    ppo.py        PPO: a critic instead of groups
    distillation.py  a teacher judges each token that the policy writes
    setting_names.py  what an equation refuses, said of the setting that the user typed
    supervised.py what the plain LightningModules share that train on data which is there:
    sft.py        SFT
    dpo.py        DPO and IPO, from pairs
    reward_model.py  RewardModel, from pairs

May import: everything up to module and data. To add one: subclass RLModule, write `loss` from equations in functional/,
give its paper as Source, and add it to the parametrized invariances in tests/algorithms/.
"""

from lightrl.algorithms.distillation import Distillation
from lightrl.algorithms.dpo import DPO, IPO
from lightrl.algorithms.grpo import GRPO
from lightrl.algorithms.ppo import PPO
from lightrl.algorithms.relatives import (
    CISPO,
    DAPO,
    GSPO,
    M2PO,
    RLOO,
    SAPO,
    DrGRPO,
    LitePPO,
    ReinforceBaseline,
    ReinforcePlusPlus,
)
from lightrl.algorithms.reward_model import RewardModel
from lightrl.algorithms.sft import SFT

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GRPO",
    "GSPO",
    "IPO",
    "M2PO",
    "PPO",
    "RLOO",
    "SAPO",
    "SFT",
    "Distillation",
    "DrGRPO",
    "LitePPO",
    "ReinforceBaseline",
    "ReinforcePlusPlus",
    "RewardModel",
]
