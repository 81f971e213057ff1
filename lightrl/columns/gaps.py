"""The `gaps` column: the number of tokens between a token and its predecessor in the same conversation."""

from lightrl.columns.column import Column

GAPS = Column("gaps", "i", as_runs=True, is_model_input=True)
