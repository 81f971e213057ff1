"""`python -m lightrl` is the `lightrl` command."""

import sys

from lightrl.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
