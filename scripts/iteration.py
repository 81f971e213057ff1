"""Measures the code that a warm iteration of the quickstart runs (measure D): `python scripts/iteration.py`.

Prints how many functions (including lambdas and comprehensions), lines and files of the package all threads enter; then
lists the files in order of entry, with their lines and named functions.
"""

from __future__ import annotations

import math
import sys
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from types import CodeType, FrameType

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for the quickstart's task
PACKAGE = str(REPOSITORY / "lightrl")
START = "RolloutLoop.run"  # the first function of an iteration
WARM = 4  # the iteration to trace, from 1; the earlier ones fill every cache


class Tracer:
    """Records each function of the package that any thread enters during one iteration."""

    def __init__(self) -> None:
        self.entered: dict[CodeType, None] = {}
        self.num_started = 0
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.num_started += code.co_qualname == START
            if self.num_started == WARM:
                self.entered.setdefault(code)
            elif self.num_started > WARM:
                sys.setprofile(None)


def lines_of(code: CodeType) -> set[int]:
    """Returns the lines of a function, including its decorators and nested functions."""
    lines = {line for *_, line in code.co_lines() if line is not None} | {code.co_firstlineno}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            lines |= lines_of(constant)
    return set(range(min(lines), max(lines) + 1))


def report(entered: Collection[CodeType]) -> None:
    codes: dict[str, list[CodeType]] = {}  # by file
    for code in entered:
        codes.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), []).append(code)
    lines = {file: set[int]().union(*map(lines_of, of_file)) for file, of_file in codes.items()}
    num_lines = sum(map(len, lines.values()))
    print(f"D  lines of entered functions: {num_lines}; functions: {len(entered)}; files: {len(codes)}")
    for file, of_file in codes.items():
        names = dict.fromkeys(code.co_qualname for code in of_file if not code.co_name.startswith("<"))
        print(f"   {len(lines[file]):4} {file}: {', '.join(names)}")


def main() -> None:
    from lightrl.callbacks import progress
    from lightrl.commands.main import main as run

    progress._SILENT_S = progress._SILENT_PHASE_S = math.inf  # a slow machine prints no additional lines
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": WARM + 1, "val_check_interval": 1000, "num_sanity_val_steps": 0}
        arguments = [f"--trainer.{name}={value}" for name, value in settings.items()]
        config = str(REPOSITORY / "examples/quickstart/grpo.yaml")
        code = run(["fit", "--config", config, f"--trainer.default_root_dir={folder}", *arguments])
    sys.setprofile(None)
    threading.setprofile(None)
    if code:
        sys.exit(code)
    report(tracer.entered)


if __name__ == "__main__":
    main()
