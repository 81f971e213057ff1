"""Prompts for rollouts and chats for SFT: read, rendered with the policy's tokenizer, sized, the same on all ranks.

Reading order:
    rows.py        rows of a file or a hub dataset; errors that name the row
    mixture.py     several sources with weights: whose turn it is at each position
    chat.py        a row's columns to messages, messages to token ids
    stream.py      prompts by position, and the loaders that Lightning iterates over
    loader.py      a user's own DataLoader as a stream
    prompts.py     PromptDataModule: what an RLModule trains and validates on
    curriculum.py  which prompts are worth a rollout, from past success
    supervised.py  SFTDataModule: prompts with the completion to imitate
    pairs.py       PreferenceDataModule: prompts with a chosen and a rejected completion
    trajectories.py  TrajectoryDataModule: what was rolled out before, from files
    source.py      where a trainer's prompts come from

May import: errors, trajectory, experience, models, lightning. Not the other rooms on its floor (module, strategies).

One more source of prompts: subclass PromptDataModule and override `make_prompts(split)`. One more file format: a
reader in rows.py and its suffix in FILE_SUFFIXES.
"""

from lightrl.data.chat import ChatRenderer
from lightrl.data.curriculum import SuccessRateCurriculum
from lightrl.data.loader import wrap_train_loader, wrap_validation_loader
from lightrl.data.mixture import DataSource, MixtureOrder
from lightrl.data.pairs import PairBatch, PreferenceDataModule
from lightrl.data.prompts import PromptDataModule
from lightrl.data.source import prompt_source, prompts_of
from lightrl.data.stream import EpochLoader, PromptBatch, PromptStream, iteration_clock, prompt_batches
from lightrl.data.supervised import ChatBatch, SFTDataModule
from lightrl.data.trajectories import TrajectoryDataModule

__all__ = [
    "PromptDataModule",
    "SFTDataModule",
    "PreferenceDataModule",
    "TrajectoryDataModule",
    "PairBatch",
    "ChatBatch",
    "DataSource",
    "MixtureOrder",
    "PromptStream",
    "PromptBatch",
    "EpochLoader",
    "ChatRenderer",
    "SuccessRateCurriculum",
    "iteration_clock",
    "prompt_batches",
    "prompt_source",
    "prompts_of",
    "wrap_train_loader",
    "wrap_validation_loader",
]
