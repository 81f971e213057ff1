"""math_answer: compares a completion's final answer with a reference, as numbers, expressions, sets or texts.

Reading order:
    answer.py       math_answer; finds the final answer, compares numbers, units and choices
    expressions.py  converts LaTeX, token by token, to expressions that SymPy compares
    units.py        units and their conversion

May import: the same as rewards/; SymPy only in functions, since its import takes half a second.
"""

from lightrl.rewards.math_answer.answer import final_answer, math_answer

__all__ = ["final_answer", "math_answer"]
