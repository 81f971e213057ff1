"""Helpers for tests of your own code: a tiny policy, and made-up trajectories and groups.

Reading order:
    tiny_model.py    tiny_policy, its char_tokenizer, QUIET (a silent trainer's settings); make_trajectory, make_groups

`lightrl.FakeEngine` is the engine for such tests; docs/test-your-code.md shows how to use these. May import: everything
up to engines. Nothing in lightrl imports this package.
"""

from lightrl.testing.tiny_model import QUIET, char_tokenizer, make_groups, make_trajectory, tiny_policy

__all__ = ["QUIET", "char_tokenizer", "make_groups", "make_trajectory", "tiny_policy"]
