"""``python -m mirrorquant``: the command line."""

import sys

from mirrorquant.cli import main

sys.exit(main())
