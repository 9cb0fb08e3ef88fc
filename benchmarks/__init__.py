"""Benchmarks of aiogpu: one question per script. `python -m benchmarks` runs them all."""

import sys
from pathlib import Path

# The scripts' helpers lie beside them; with this, `python -m benchmarks.wake` finds them as well.
sys.path.insert(0, str(Path(__file__).parent))
