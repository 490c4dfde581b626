"""The doctor's findings as a file for somebody else's eyes: JSON without names of this machine, of its
users, or of their directories.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..jit.manifest import utc_now
from .doctor_report import Report
from .json_data import plain

# Left out as a whole: nothing but places of this machine.
PRIVATE_FIELDS = ("package_path", "caches")
_PATH = re.compile(r"(?<![\w/.~])(?:~|[A-Za-z]:)?/(?:[^\s/'\"`,;:()\[\]]+/)*([^\s/'\"`,;:()\[\]]*)")


def write_report(path: Path, report: Report) -> None:
    """Write what a maintainer needs of `report` to `path`."""
    path.write_text(json.dumps(contents(report), indent=1, allow_nan=False) + "\n", "utf-8")


def contents(report: Report) -> dict[str, Any]:
    """The report as JSON types without private names; a number that is not finite is its name."""
    # The whole report and not a selection: nobody knows yet which fact explains the fault.
    found = {k: v for k, v in asdict(report).items() if k not in PRIVATE_FIELDS}
    system = {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpus": os.cpu_count(),
    }
    made = {"report_of": "sonicmoe doctor", "at": utc_now(), "healthy": report.healthy}
    names = private_names()
    return dict(
        plain(
            {**made, "system": system, **found},
            text=lambda said: scrub(said, names),
            not_finite=str,
        )
    )


def private_names() -> tuple[str, ...]:
    """This host, its user, and the user's home directory."""
    found = [socket.gethostname(), socket.getfqdn(), platform.node(), str(Path.home())]
    # Without a name in the environment or in the password file there is none to leave out.
    with suppress(KeyError, OSError, ImportError):
        found.append(getpass.getuser())
    found += [os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "HOSTNAME")]
    # "root" and "localhost" name nobody.
    usual = ("root", "localhost", "/root", "")
    # The longest first: a host name that contains the user's would keep its rest.
    return tuple(sorted({name for name in found if name not in usual}, key=len, reverse=True))


def scrub(text: str, names: Iterable[str]) -> str:
    """`text` with the last part of each absolute path, and without these names."""
    text = _PATH.sub(lambda found: f".../{found[1]}", text)
    # Whole words only, because a user may be called "ada" and an engine "adapter".
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text
