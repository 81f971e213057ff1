"""Helpers for tests of your own code: a tiny policy, and made-up trajectories and groups.

Reading order:
    tiny_model.py    tiny_policy, its char_tokenizer, and QUIET, settings of a silent trainer
    trajectories.py  make_trajectory and make_groups, for rewards, losses and callbacks

`lightrl.FakeEngine` is the engine for such tests; docs/test-your-code.md shows how to use these. May import: everything
up to engines. Nothing in lightrl imports this package.
"""

from lightrl.testing.tiny_model import QUIET, char_tokenizer, tiny_policy
from lightrl.testing.trajectories import make_groups, make_trajectory

__all__ = ["QUIET", "char_tokenizer", "make_groups", "make_trajectory", "tiny_policy"]
