"""The benchmark of small batches says what it needs where there is no GPU; what it times is tested in
`tests/gpu/test_graphed_gpu.py`.
"""

from __future__ import annotations

from pathlib import Path

import processes
from worlds import environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "small_batch_bench.py"


def test_a_host_is_refused_in_one_line():
    process = processes.run([str(SCRIPT)], environment(), ROOT, timeout=120)
    if process.returncode == 0:  # this machine has a Hopper GPU
        assert "| 256, 8 | graphed |" in process.stdout
        return
    assert process.returncode == 1
    assert process.stderr.strip() == "Error: this needs an NVIDIA Hopper GPU"
