"""The `lightrl` command.

Reading order:
    main.py           `lightrl <command>`: help, version, and which module a command is
    cli.py            fit, validate, test, predict: LightningCLI with our defaults
    config_errors.py  what is wrong in a YAML, with its path and line
    plan.py           draws what an iteration computes from what
    doctor.py         looks at a reward before a run
    serve.py          starts SGLang servers in the foreground
    export.py         makes a Hugging Face folder of a checkpoint

May import: everything. To add a command: a module with `run(args) -> exit code`, and its line in main.py.
"""
