"""Shows runs in a browser: curves, trajectories token by token, timelines, problems, settings.

Reading order:
    run_folder.py  which folders are runs, their status and settings
    index.py       the table of trajectories: SQLite in the user's cache, built from the first bytes of each line
    answers.py     answers the page's questions with JSON: curves, each token of a trajectory, timelines
    server.py      the page on the loopback interface, with a token in its address
    command.py     the command line; the page as one file
    page/          the HTML, JavaScript and CSS that the browser gets

May import: checks, trace, trajectory; neither torch nor Lightning, so the page opens at once. Text from a model
only ever enters the page as text (`textContent`). To show something new, add an answer here and a view in
page/inspect.js.
"""

from lightrl.commands.inspect.command import export, run
from lightrl.commands.inspect.run_folder import Run

__all__ = ["Run", "export", "run"]
