"""Run the command `spikefuse` as `python -m spikefuse`."""

import sys

from spikefuse.train.cli import main

sys.exit(main())
