"""ShardedExperience: an iteration's trajectories over the ranks of a run.

    field                                   on each rank
    rewards, lengths, group_ids … [B]       of all rows
    token_ids, behavior_logprobs … [B, T]   of the rows that this rank works on, end to end, without padding

A row belongs to one minibatch, and for each role to one data-parallel rank, for the whole iteration; so rows travel
once, and a row that drops out leaves the others where they are.

Reading order:
    experience.py    ShardedExperience, which reads as an Experience; token_rows.py: one field per token
    placement.py     the minibatch and the rank of each row; microbatches of a rank
    exchange.py      rows and outputs to the ranks that work on them
    microbatches.py  to the device, one while another is computed on
"""

from lightrl.strategies.sharded_experience.experience import OnLossTokens, ShardedExperience
from lightrl.strategies.sharded_experience.microbatches import Microbatches
from lightrl.strategies.sharded_experience.token_rows import TokenRows

__all__ = ["Microbatches", "OnLossTokens", "ShardedExperience", "TokenRows"]
