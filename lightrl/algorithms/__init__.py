"""Algorithms ready to use: RLModules with a loss, and supervised fine-tuning. Each is a short file.

Reading order:
    grpo.py       GRPO and the settings that its relatives differ in
    relatives.py  DrGRPO, DAPO, RLOO, ReinforceBaseline, GSPO, CISPO: GRPO under other settings
    sft.py        SFT, a plain LightningModule

May import: everything up to module and data. To add one: subclass RLModule, write `loss` from equations in functional/,
give its paper as Source, and add it to the parametrized invariances in tests/algorithms/.
"""

from lightrl.algorithms.grpo import GRPO
from lightrl.algorithms.relatives import CISPO, DAPO, GSPO, RLOO, DrGRPO, ReinforceBaseline
from lightrl.algorithms.sft import SFT

__all__ = ["CISPO", "DAPO", "GRPO", "GSPO", "RLOO", "SFT", "DrGRPO", "ReinforceBaseline"]
