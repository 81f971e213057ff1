"""lightrl doctor: checks a run before it starts, and judges again what a run could not.

    lightrl doctor run --config run.yaml                                     everything, with two iterations of the run
    lightrl doctor data --config run.yaml                                    every row that a run may read
    lightrl doctor reward --config run.yaml --n 16                           the policy writes, with the run's engine
    lightrl doctor reward --config run.yaml --completions reference          the data's own answers
    lightrl doctor replay failed_rewards.jsonl --config run.yaml             what a run could not judge

Nothing is kept: what a run would write goes to a temporary folder.

Reading order:
    command.py       the command line; doctor reward and doctor replay
    completions.py   the first prompts, and completions for them
    reward_table.py  judged completions as a table or in full
    data.py          doctor data
    before_run.py    doctor run; findings.py: its verdicts
    machine.py       what it checks of the machine: versions, devices, memory, ports, disk
    inputs.py        of model, tokenizer and data
    trial.py         of two iterations: logprobs, rewards, completions; forecast.py: hours and bytes of the run

May import: what commands/ may. To add a check: a function that returns findings, called in before_run.py.
"""

from lightrl.commands.doctor.command import run

__all__ = ["run"]
