"""`python -m segue` is the `segue` command."""

import sys

from segue.cli import main

sys.exit(main())
