"""Supervised training: plain LightningModules, trained on given data by Lightning's loop.

Reading order:
    module.py        SupervisedModule: one trained model with its optimizer and metrics, on any number of ranks
    sft.py           SFT
    dpo.py           DPO and IPO, from pairs
    reward_model.py  RewardModel, from pairs

May import: what algorithms/ may. To add one, subclass SupervisedModule and write `measure`.
"""

from lightrl.algorithms.supervised.dpo import DPO, IPO
from lightrl.algorithms.supervised.module import SupervisedModule
from lightrl.algorithms.supervised.reward_model import RewardModel
from lightrl.algorithms.supervised.sft import SFT

__all__ = ["DPO", "IPO", "SFT", "RewardModel", "SupervisedModule"]
