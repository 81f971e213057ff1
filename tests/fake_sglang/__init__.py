"""A small HTTP server that speaks SGLang's interface and fails on request, for tests and benchmarks without SGLang.

Reading order:
    process.py    FakeServerProcess starts a server and ends it; __main__.py is the program it starts
    server.py     routes of generation, pause and memory; weights.py  of weights and adapters, and the prefix cache
    faults.py     what goes wrong with which requests; wrong_loads.py  with weights, in silence
    script.py     completions by rule, without torch; model.py  with a LocalEngine, and a draft model
    layout.py     the names and shards under which SGLang holds parameters
"""

import shlex
import sys
from pathlib import Path

# Starts a server from any folder, also where `tests/` is not on the import path.
COMMAND = [sys.executable, str(Path(__file__).with_name("__main__.py"))]


def python_of_fakes(folder: Path, *words: str) -> str:
    """A program in this folder for `sglang_python`: it starts fake servers with these words."""
    program = folder / "python-of-fakes"
    program.write_text(f'#!/bin/sh\nexec {shlex.join([*COMMAND, *words])} -- "$@"\n')
    program.chmod(0o755)
    return str(program)
