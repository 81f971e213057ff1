"""A program in place of SGLang, and a run's settings for it, for tests of launches."""

import sys
from pathlib import Path
from typing import Any

import lightrl

# In place of a Python with SGLang: takes its arguments and is the fake server.
_PROGRAM = """#!{python}
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = {paths!r}
import yaml
from fake_sglang.server import main
words = sys.argv[1:]
token = yaml.safe_load(open(words[words.index("--config") + 1]))["api-key"]
given = [words[words.index(name) + place] for name in ("--model-path", "--host", "--port") for place in (0, 1)]
main([*given, "--api-key", token])
"""


def fake_sglang(folder: Path) -> str:
    """The path of a program for `sglang_python`."""
    path = folder / "fake-sglang"
    paths = [str(Path(lightrl.__file__).parents[1]), str(Path(__file__).parent)]
    path.write_text(_PROGRAM.format(python=sys.executable, paths=paths))
    path.chmod(0o700)
    return str(path)


def engine(folder: Path, **settings: Any) -> dict[str, Any]:
    """An SGLangEngine whose servers are fake."""
    return {"class_path": "SGLangEngine", "init_args": {"sglang_python": fake_sglang(folder), **settings}}
