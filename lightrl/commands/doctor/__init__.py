"""lightrl doctor: checks a run before it starts, and recomputes rewards that failed in it.

    lightrl doctor run --config run.yaml                                     everything, including two iterations
    lightrl doctor launch --config run.yaml                                  each node of the launch, and their network
    lightrl doctor data --config run.yaml                                    every row that a run may read
    lightrl doctor reward --config run.yaml --n 16                           the policy's rewards; attacks on the reward
    lightrl doctor reward --config run.yaml --completions reference          rewards of the data's own answers
    lightrl doctor replay failed_rewards.jsonl --config run.yaml             a run's failed rewards, recomputed

All output goes to a temporary folder, which is then deleted.

Reading order:
    command.py  the command line; doctor reward and doctor replay
    rewards.py  completions with their rewards; attacks.py: completions that must earn nothing
    data.py     doctor data
    launch.py   doctor launch: starts node.py on each node with the launcher, and compares the reports
    run.py      doctor run: machine, model and data, then two iterations; duration and disk space of the run

May import whatever commands/ may. To add a check, write a function that returns findings, and call it in run.py.
"""

from lightrl.commands.doctor.command import run

__all__ = ["run"]
