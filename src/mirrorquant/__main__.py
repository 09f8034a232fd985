"""``python -m mirrorquant``: the command line."""

import sys

from mirrorquant.cli import main

if __name__ == "__main__":
    sys.exit(main())
