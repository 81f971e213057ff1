"""The `lightrl` command.

Reading order:
    main.py           `lightrl <command>`: help, version, and the table of commands
    cli.py            fit, validate, test, predict: LightningCLI with lightrl's defaults
    config_layers.py  settings and their origins; config_errors.py: reads flags, and explains a wrong setting
    console.py        log lines and errors on stderr, exit codes
    setting_help.py   help for a command or a setting; unused_settings.py: reports settings without effect
    intervals.py      confidence intervals for pass@k, after validate and test
    init.py           writes an example into a folder
    plan.py           shows the calls in an iteration, batch sizes and memory, and what to change if memory is too small
    doctor/           checks a run, its data and its reward before the run starts
    serve.py          starts SGLang or vLLM servers in the foreground, or serves a policy for evaluation
    launch/           starts ranks and servers on one machine or many
    status.py         shows what a run and its launch are doing
    inspect/          shows runs in the browser, or exports them as one file
    export.py         turns a checkpoint into a Hugging Face folder; pushes it to a hub, with a model card
    convert/          turns AReaL's configurations into lightrl's

May import everything. To add a command, write a module or package with the command's name and a `run(args)
-> exit code` function, and add it to main.py.
"""
