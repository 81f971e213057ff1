"""`lightrl` for tests that fork it, with the ranks that it starts: the first argument is the folder that it runs in."""

import os
import sys

from lightrl.commands.main import main

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
