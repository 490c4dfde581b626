"""What every test needs: machine-dependent tests are skipped out loud, and no test inherits the
developer's flags.
"""

from __future__ import annotations

# Before anything that may import numpy, which test modules do as they are collected.
import one_thread  # noqa: F401
import rare_collections  # noqa: F401

# isort: split
import gc
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import results

# A worker that tests Paddle leaves out of its imports what the processes that it starts leave out.
if os.environ.get("SONICMOE_TEST_FRAMEWORK") == "paddle":
    import sitecustomize  # noqa: F401

from sonicmoe import observe
from sonicmoe.config import FLAGS_BY_ENV, reload_environment
from sonicmoe.flags import PREFIX
from sonicmoe.frameworks import is_importable
from sonicmoe.jit.cache import CompileCache
from sonicmoe.log import forget_what_was_said, logger

# So that a failed assertion there shows its values, as one in a test file does.
pytest.register_assert_rewrite("gpu.engine_cases", "gpu.device")

# Every test starts from the defaults, whatever the shell exported.
for name in [name for name in os.environ if name.startswith(PREFIX) or name in FLAGS_BY_ENV]:
    del os.environ[name]

NEEDS = {"gpu": "needs an NVIDIA Hopper GPU", "paddle": "needs paddlepaddle"}


@cache
def hopper_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9


# The files that take longest begin first: one that begins last would leave a worker idle until it
# ends. They come one after the other on one worker, so that none waits for another's compiler.
FIRST = (
    "kernels/test_quack_gemm.py",
    "kernels/test_cuda_sources.py",
    "kernels/test_quantize_on_host.py",
    "engine/test_hopper_passes.py",
    "jit/test_jit_cuda_source.py",
    "test_contributing.py",
    "ernie_compat/test_ernie_ranks.py",
    "ernie_compat/test_train_command.py",
    "functional/test_diagnosis.py",
    "ep/test_ep_worlds.py",
    "gpu/test_hopper_sanitizer_gpu.py",
    "gpu/test_hopper_numerics_gpu.py",
    "gpu/test_trust_gpu.py",
)
TESTS = Path(__file__).parent
KEPT_BY_A_WORKER = 2 << 30  # bytes of a GPU's memory

AVAILABLE = {"gpu": hopper_gpu, "paddle": cache(lambda: is_importable("paddle"))}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-variant",
        action="store_true",
        help="compile every variant of the kernels and graphs, not only a covering set",
    )
    parser.addoption(
        "--attacks",
        type=int,
        default=200,
        help="cases of every kind of attack on files and commands; a thorough run takes 20000",
    )
    parser.addoption("--cases", type=int, default=0, help="further cases of tests/oracle, drawn")
    parser.addoption("--seed", type=int, default=1, help="which further cases")


@pytest.fixture
def weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node keeps what is prepared of the weights, as on a GPU; on a host every forward prepares."""
    from sonicmoe.layer import bound
    from sonicmoe.weights import cache

    for module in (bound, cache):
        monkeypatch.setattr(module, "is_cuda", lambda _tensor: True)


@pytest.fixture(autouse=True)
def _everything_is_new() -> None:
    """A process reads its flags once, says some lines once, and a command chooses what it logs; every
    test is a process of its own in this respect.
    """
    logger.setLevel(logging.NOTSET)
    reload_environment()
    forget_what_was_said()


@pytest.fixture(autouse=True)
def _room_on_the_gpu(request: pytest.FixtureRequest, session_folder: Path) -> Iterator[None]:
    """Workers share one GPU. No three tests that need much of its memory run at once, and no worker
    keeps much of what it no longer uses.
    """
    if request.node.get_closest_marker("gpu") is None or not hopper_gpu():
        yield
        return
    import torch
    from filelock import FileLock

    large = request.node.get_closest_marker("large")
    with FileLock(session_folder / turn_of(request.node)) if large else nullcontext():
        yield
        if torch.cuda.memory_reserved() > KEPT_BY_A_WORKER:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture
def set_flags(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set variables (None: unset them) in a test that has read the environment already."""

    def set_variables(**values: str | None) -> None:
        for name, value in values.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        reload_environment()

    return set_variables


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this run, the same one in all of its parallel workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "session"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def artefacts(session_folder: Path) -> CompileCache:
    """The compiled kernels: each is compiled once, whichever run, worker and test asks first. Their
    host halves are not optimised. Never damage them.
    """
    import kept  # not before the framework is known

    return kept.open_cache(session_folder / "local")


def turn_of(item: pytest.Item) -> str:
    """Which of two rows of large tests this one stands in. The tests of a row run one after the other."""
    return f"large {zlib.crc32(item.nodeid.partition('@')[0].encode()) % 2}"


def place_in_the_run(item: pytest.Item) -> int:
    """What tests are sorted by; those of equal places keep their order."""
    path = item.path
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=place_in_the_run)
    if not config.getoption("--every-variant"):
        left_out = [item for item in items if item.get_closest_marker("every_variant")]
        items[:] = [item for item in items if not item.get_closest_marker("every_variant")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if item.get_closest_marker("large"):
            # `--dist loadgroup` has one worker run a row, so that no other waits for its lock.
            item.add_marker(pytest.mark.xdist_group(turn_of(item)))
        for marker, reason in NEEDS.items():
            if item.get_closest_marker(marker) and not AVAILABLE[marker]():
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """No collection looks again at what is imported by now. A process that has collected every test
    holds a million objects, and a collection of all of them took up to a second.
    """
    gc.collect()
    gc.freeze()


# The trainers of tests/doors, which have an environment of their own.
TRAINERS = ("torchtitan", "megatron")
STARTED = time.monotonic()


def not_run(config: pytest.Config, skipped: Counter[str]) -> Iterator[str]:
    """What this run left out, and who runs it."""
    missing = ", ".join(name for name in TRAINERS if not is_importable(name))
    if missing and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        yield f"NOT RUN here, but by `make doors`: tests of {missing}"
    if config.option.markexpr == "not kernels":
        yield "NOT RUN here, but by `make kernels`: compiles of kernels that no test executes, and Triton's interpreter"
    for reason in NEEDS.values():
        if skipped[f"Skipped: {reason}"]:
            count = skipped[f"Skipped: {reason}"]
            yield f"NOT RUN on this machine: {count} tests, {reason}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print each failure at once, because a run that is ended early prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        print(f"\n{report.nodeid}: {crash.message if crash else report.longreprtext}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    stats = terminalreporter.stats
    skipped = Counter(report.longrepr[2] for report in stats.get("skipped", []))
    left_out = list(not_run(config, skipped))
    for line in left_out:
        terminalreporter.write_line(line, yellow=True, bold=True)
    counted = ("failed", "error", "passed", "skipped", "xfailed")
    counts = {name: len(stats.get(name, [])) for name in counted}
    results.write_down(counts, time.monotonic() - STARTED, left_out)


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    yield
    assert observe._observers == ()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """With which recipe the reference engine prepared weights, every time that it did."""
    # Here and not above, because the engine imports a framework.
    from sonicmoe.engine.reference import ReferenceEngine

    recipes, original = [], ReferenceEngine.prepare_weights

    def count(self, *arguments):
        recipes.append(arguments[-1].recipe)
        return original(self, *arguments)

    monkeypatch.setattr(ReferenceEngine, "prepare_weights", count)
    return recipes
