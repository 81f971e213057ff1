"""ShardedExperience: an iteration's trajectories, distributed over the ranks of a run.

    field                                   on each rank
    rewards, lengths, group_ids … [B]       all rows
    token_ids, behavior_logprobs … [B, T]   the rows that this rank works on, without padding

For a whole iteration, each row belongs to one minibatch and, for each role, to one data-parallel rank. So rows are sent
only once, and if a row is dropped, the others stay where they are.

Reading order:
    experience.py  ShardedExperience, which behaves like an Experience; TokenRows, a field with values per token
    placement.py   assigns rows to minibatches, ranks and microbatches; copies microbatches to the device
    other_prompts.py  OtherPrompts: the rows that a model reads, and the prompts that replace the policy's
    exchange.py    sends rows and outputs to the ranks that work on them
"""

from lightrl.strategies.sharded_experience.experience import OnLossTokens, ShardedExperience, TokenRows
from lightrl.strategies.sharded_experience.placement import Microbatches

__all__ = ["Microbatches", "OnLossTokens", "ShardedExperience", "TokenRows"]
