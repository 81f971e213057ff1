"""A made-up column, for columns_run.py: how much the engine doubts each token that it sampled."""

from lightrl.columns import Column, register

DOUBT = Column("doubt", "f")
register(DOUBT)
