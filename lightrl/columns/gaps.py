"""The column `gaps`: the tokens between a token and the one before it in its conversation."""

from lightrl.columns.column import Column

GAPS = Column("gaps", "i", as_runs=True, is_model_input=True)
