"""Prompts for rollouts and chats for SFT: reads, checks and renders them with the policy's tokenizer, on every rank.

Reading order:
    rows.py          rows of a file, a hub dataset or a function, by index; errors that name the row
    tasks.py         Task: a source's own workflow, reward, group size and limit
    mixture.py       mixes weighted sources: decides which source supplies the row at each position
    stream.py        the rows of one source, and prompts by position
    streamed.py      sources that can only be read in order
    chat.py          turns a row's columns into messages, and messages into token ids
    batches.py       the loaders that Lightning iterates over
    loader.py        the prompts of a data module, or of a user's DataLoader
    prompts.py       PromptDataModule: the prompts that an RLModule trains and validates on
    completions.py   prompts with completions from the data: SFTDataModule, PreferenceDataModule
    trajectories.py  TrajectoryDataModule: recorded trajectories, from files

May import: errors, checks, trajectory, experience, models, workflows, lightning. To add a source of prompts, subclass
PromptDataModule and override `make_prompts(split)`. To add a file format, add a reader and its suffix to rows.py.
"""

from lightrl.data.batches import EpochLoader, HostBatch
from lightrl.data.chat import ChatRenderer
from lightrl.data.completions import ChatBatch, PairBatch, PreferenceDataModule, SFTDataModule
from lightrl.data.loader import prompt_source, prompts_of, wrap_train_loader
from lightrl.data.mixture import DataSource, MixtureOrder
from lightrl.data.prompts import PromptDataModule
from lightrl.data.stream import PromptStream
from lightrl.data.tasks import Task
from lightrl.data.trajectories import TrajectoryDataModule

__all__ = ["ChatBatch", "ChatRenderer", "DataSource", "EpochLoader", "HostBatch", "MixtureOrder", "PairBatch"]
__all__ += ["PreferenceDataModule", "PromptDataModule", "PromptStream", "SFTDataModule", "Task"]
__all__ += ["TrajectoryDataModule", "prompt_source", "prompts_of", "wrap_train_loader"]
