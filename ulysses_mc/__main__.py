"""`python -m ulysses_mc` is the command `ulysses-mc`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
