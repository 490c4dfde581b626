"""What tests of commands share with those of the compile cache: its fake compilers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "jit"))
