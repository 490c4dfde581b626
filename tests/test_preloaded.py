"""Processes forked by a server are like others: their own arguments, environment, directory,
output, exit code and end.
"""

from __future__ import annotations

import json
import signal
import subprocess

import preloaded
import pytest
from framework import IS_PADDLE
from worlds import environment

pytestmark = pytest.mark.skipif(IS_PADDLE, reason="forks PyTorch's processes")
SAY = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('COLOUR'), os.getcwd(), 'torch' in sys.modules]))"


def start(folder, *arguments, **env):
    return preloaded.Process("torch", list(arguments), environment(**env), folder)


@pytest.mark.parametrize("form", ["-c", "-m", "script"])
def test_a_process_has_what_is_its_own(tmp_path, form):
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "says.py").write_text(f"import neighbour\n{SAY}\n")
    begin = {"-c": ["-c", SAY], "-m": ["-m", "says"], "script": [str(tmp_path / "says.py")]}[form]
    process = start(tmp_path, *begin, "a", "-b", COLOUR="blue")
    out, err = process.communicate(120)
    assert process.returncode == 0 and json.loads(out) == [
        ["a", "-b"],
        "blue",
        str(tmp_path),
        True,
    ], err
    assert json.loads(start(tmp_path, *begin).communicate(120)[0])[:2] == [[], None]


def test_ends_are_seen(tmp_path):
    left = start(tmp_path, "-c", "import sys; print('gone'); sys.exit(3)")
    failed = start(
        tmp_path, "-c", "import atexit; atexit.register(print, 'last'); raise KeyError('why')"
    )
    waiting = start(tmp_path, "-c", "import time; time.sleep(600)")
    assert left.communicate(120) == ("gone\n", "") and left.returncode == 3
    out, err = failed.communicate(120)
    assert (
        failed.returncode == 1
        and out == "last\n"
        and "Traceback" in err
        and err.endswith("KeyError: 'why'\n")
    )
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.2)
    assert waiting.poll() is None
    waiting.kill()
    assert waiting.wait(120) == -signal.SIGKILL
