"""ShardedExperience: an iteration's trajectories, distributed over the ranks of a run.

    field                                   on each rank
    rewards, lengths, group_ids … [B]       all rows
    token_ids, behavior_logprobs … [B, T]   the rows that this rank works on, without padding

A row belongs to one minibatch, and for each role to one data-parallel rank, for the whole iteration. So rows are sent
only once, and if a row is dropped, the others stay where they are.

Reading order:
    experience.py    ShardedExperience, which behaves like an Experience; token_rows.py: one field per token
    placement.py     assigns rows to minibatches and ranks, and to a rank's microbatches
    exchange.py      sends rows and outputs to the ranks that work on them
    microbatches.py  copies each microbatch to the device while the previous one is computed
"""

from lightrl.strategies.sharded_experience.experience import OnLossTokens, ShardedExperience
from lightrl.strategies.sharded_experience.microbatches import Microbatches
from lightrl.strategies.sharded_experience.token_rows import TokenRows

__all__ = ["Microbatches", "OnLossTokens", "ShardedExperience", "TokenRows"]
