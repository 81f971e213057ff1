"""Files of rows, and data modules that are set up: what the tests of this folder share."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from lightrl.data import PromptDataModule

Data = TypeVar("Data", bound=PromptDataModule)


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """The name of the file, which has these rows as lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def set_up(data: Data, tokenizer: Any, **arguments: Any) -> Data:
    """The data as a run has them; `arguments` are those of `attach`."""
    data.attach(tokenizer, **arguments)
    data.setup("fit")
    return data
