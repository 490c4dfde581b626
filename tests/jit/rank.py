"""One rank of a test: `python rank.py REQUEST.json` builds fake jobs together with other ranks and
prints the outcomes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fake_jobs import TimedJob
from racer import wait_for

from sonicmoe.jit import CompileCache
from sonicmoe.jit.parallel import Outcomes, ParallelBuild
from sonicmoe.jit.slots import HostSlots


def main(request: dict[str, Any]) -> dict[str, str]:
    cache = CompileCache(
        Path(request["root"]), Path(request["local"]), lock_timeout_s=request.get("timeout", 30.0)
    )
    log, seconds = Path(request["log"]), request["seconds"]
    jobs = [TimedJob(size, log, seconds) for size in range(1, request["jobs"] + 1)]
    wait_for(Path(request["go"]))
    collected = Outcomes()
    ParallelBuild(jobs, cache, HostSlots(cache.local_root, request["limit"]), collected).run()
    return {
        outcome.kernel: f"{outcome.state} {outcome.message}".strip()
        for outcome in collected.outcomes
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
