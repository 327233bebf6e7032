"""`python -m spikefuse`: the command `spikefuse`."""

import sys

from spikefuse.train.cli import main

sys.exit(main())
