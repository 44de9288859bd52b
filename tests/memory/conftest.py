"""Make the helpers beside the tests importable (the suite runs with importlib mode)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
