"""A training run: recipe, trainer, loop, run folder and its command line."""

import sys

from cs336_systems.host.load import wait_asleep

if sys.argv[:1] == ["-m"]:  # Python is starting a command of this package, and torch is not imported yet
    wait_asleep()
