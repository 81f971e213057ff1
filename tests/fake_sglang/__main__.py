"""Starts the fake SGLang server with `tests/` and lightrl on the import path, in place of this folder."""

import sys
from pathlib import Path

sys.path[:1] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from fake_sglang.server import main  # noqa: E402

main()
