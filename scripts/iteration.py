"""What a warm iteration of the quickstart enters, over all threads (measure D): `python scripts/iteration.py`.

Prints the number of the package's functions, their lines and files; then the files in the order in which the iteration
enters them, each with its lines and functions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # for the quickstart's task
PACKAGE = str(REPOSITORY / "lightrl")
START = "RolloutLoop.run"  # the function that an iteration begins with
WARM = 4  # the iteration that is traced, from 1; those before it have filled every cache


class Tracer:
    """Notes each function of the package that any thread enters from one start of an iteration to the next."""

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


def lines_of(code: CodeType) -> set[int]:
    """The lines of a function, from its first decorator on, with those of the functions in it."""
    lines = {line for *_, line in code.co_lines() if line is not None} | {code.co_firstlineno}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            lines |= lines_of(constant)
    return set(range(min(lines), max(lines) + 1))


def report(entered: Iterable[CodeType]) -> None:
    functions: dict[str, dict[str, None]] = {}  # by file, in order
    lines: dict[str, set[int]] = {}
    for code in entered:
        if code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>"):
            continue  # part of a function
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        functions.setdefault(file, {}).setdefault(f"{code.co_qualname}:{code.co_firstlineno}")
        lines.setdefault(file, set()).update(lines_of(code))
    counts = {"lines": sum(map(len, lines.values())), "functions": sum(map(len, functions.values()))}
    print(
        f"D  lines of entered functions: {counts['lines']}; functions: {counts['functions']}; files: {len(functions)}"
    )
    for file, names in functions.items():
        print(f"   {len(lines[file]):4} {file}: {', '.join(name.rpartition(':')[0] for name in names)}")


def main() -> None:
    from lightrl.commands.main import main as run

    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "max_steps": WARM + 1,
            "val_check_interval": 1000,
            "num_sanity_val_steps": 0,
            "default_root_dir": folder,
        }
        arguments = ["fit", "--config", str(REPOSITORY / "examples/quickstart/grpo.yaml")]
        run([*arguments, *(f"--trainer.{name}={value}" for name, value in settings.items())])
    report(tracer.entered)


if __name__ == "__main__":
    main()
