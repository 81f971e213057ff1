"""Algorithms ready to use: RLModules with a loss, and supervised training. Each is a short file.

Reading order:
    grpo.py       GRPO, with a setting for everything that its relatives change
    reference.py  ReferenceKL: the KL term, its reference policy, its adaptive weight
    relatives.py  DrGRPO, DAPO, RLOO, GSPO, CISPO, SAPO, REINFORCE++, M2PO and more: variants of GRPO;
                  OAPL, TOPR, DPPO for stale trajectories
    turns.py      GiGPO: credit for each turn in an episode
    agents.py     advantages for trajectories with several agents
    ppo.py        PPO: a critic instead of groups
    distillation.py  imitates a teacher's distribution at each token that the policy generates
    supervised/   SFT, DPO, IPO, RewardModel: plain LightningModules that train on given data

May import everything up to module and data. To add an algorithm, subclass RLModule, write `loss` with equations from
functional/, name its paper as Source, and add it to the parametrized invariance tests in tests/algorithms/.
"""

from lightrl.algorithms.distillation import Distillation
from lightrl.algorithms.grpo import GRPO
from lightrl.algorithms.ppo import PPO, EarlyStop
from lightrl.algorithms.reference import AdaptiveKL, ReferenceKL
from lightrl.algorithms.relatives import (
    CISPO,
    DAPO,
    DPPO,
    GDPO,
    GSPO,
    M2PO,
    OAPL,
    RLOO,
    SAPO,
    TOPR,
    DrGRPO,
    LitePPO,
    ReinforceBaseline,
    ReinforcePlusPlus,
)
from lightrl.algorithms.supervised import DPO, IPO, SFT, RewardModel
from lightrl.algorithms.turns import GiGPO

__all__ = ["Distillation", "DPO", "IPO", "GRPO", "PPO", "EarlyStop", "DPPO", "OAPL", "TOPR"]
__all__ += ["AdaptiveKL", "ReferenceKL", "ReinforcePlusPlus", "RewardModel", "SFT"]
__all__ += ["CISPO", "DAPO", "GDPO", "GSPO", "GiGPO", "M2PO", "RLOO", "SAPO", "DrGRPO", "LitePPO", "ReinforceBaseline"]
