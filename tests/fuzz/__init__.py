"""Fuzzing: hostile bytes for everything that reads a file or a text of a user's. See `run`."""

import sys
from pathlib import Path

# Targets use the tests' helpers, also where `python -m fuzz.run` is called and pytest has not put them on the path.
HELPERS = str(Path(__file__).parents[1] / "helpers")
if HELPERS not in sys.path:
    sys.path.append(HELPERS)
