"""Script of test_iteration.py: a few iterations of the quickstart, in the fourth of which a flag is up.

iteration_run.py CONFIG FOLDER
"""

import sys
from typing import Any

from lightrl import RLCallback
from lightrl.commands.cli import run

WARM_UP = 3  # iterations


class Flag(RLCallback):
    """Up from the start of one iteration to the start of the next."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        watcher: Any = sys.getprofile()
        if trainer.global_step == WARM_UP:
            watcher.flag.touch()
        elif trainer.global_step == WARM_UP + 1:
            watcher.flag.unlink()
        watcher.is_up = watcher.flag.exists()


def main() -> None:
    config, folder = sys.argv[1:]
    options = [f"--trainer.max_steps={WARM_UP + 2}", "--trainer.limit_val_batches=0"]
    callback = "--trainer.callbacks+=iteration_run.Flag"
    raise SystemExit(run(["fit", "--config", config, *options, callback, f"--trainer.default_root_dir={folder}"]))


if __name__ == "__main__":
    main()
