"""`python -m tools.sim`: see command.py."""

import sys

from tools.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
