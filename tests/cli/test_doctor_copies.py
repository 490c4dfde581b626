"""Other copies of sonicmoe and quack beside this one, each a warning of the doctor."""

import sys
from types import ModuleType

import pytest

from sonicmoe.diagnostics import copies, doctor
from sonicmoe.diagnostics.doctor import examine_copies
from sonicmoe.diagnostics.doctor_report import Report
from sonicmoe.kernels.quack_gemm import PACKAGES

QUACK = PACKAGES["quack-kernels"]
SONICMOE, OTHER_QUACK = "there is another sonicmoe", f"quack of another version than {QUACK}"


def found():
    report = Report()
    examine_copies(report)
    assert report.healthy
    return [problem.what for problem in report.problems]


@pytest.mark.parametrize(
    ("name", "version", "warning"),
    [
        ("paddlefleet_ops.sonicmoe", "9.8", SONICMOE),
        ("paddlefleet_ops.quack", "0.2", OTHER_QUACK),
        ("paddlefleet_ops.quack", QUACK, None),
    ],
)
def test_an_importable_copy(name, version, warning, tmp_path, monkeypatch):
    """A package that raises if anybody imports it."""
    monkeypatch.setattr(doctor, "capabilities_of_host", lambda: ())
    before = found()
    package = tmp_path.joinpath(*name.split("."))
    package.mkdir(parents=True)
    top = tmp_path / name.partition(".")[0] / "__init__.py"
    top.write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text(f'__version__ = "{version}"\nraise RuntimeError("imp")\n')
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    line = f"{warning}: {name} {version} from {package} (importable)"
    assert sorted(found()) == sorted(before + ([line] if warning else []))


@pytest.mark.parametrize(
    ("gpus", "warned"),
    [([(9, 0)] * 2, False), ([(9, 0), (10, 0)], True), ([(10, 0)], True), ([], True)],
)
def test_hopper_needs_no_version_of_quack(gpus, warned, tmp_path, monkeypatch):
    other = copies.Copy("paddlefleet_ops.quack", "0.2", tmp_path, False)
    monkeypatch.setattr(doctor, "wrong_quacks", lambda: [other])
    monkeypatch.setattr(doctor, "capabilities_of_host", lambda: tuple(gpus))
    assert any(line.startswith(OTHER_QUACK) for line in found()) == warned


def test_a_loaded_copy(tmp_path, monkeypatch):
    copy = ModuleType("paddlefleet_ops.sonicmoe")
    copy.__file__, copy.__version__ = str(tmp_path / "__init__.py"), "0.3"
    copy.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    # No package: what loads upstream's kernels there.
    module = ModuleType("transformers.integrations.sonicmoe")
    module.__file__ = str(tmp_path / "integrations" / "sonicmoe.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert found() == [f"{SONICMOE}: paddlefleet_ops.sonicmoe 0.3 from {tmp_path} (loaded)"]


def test_installed_under_another_version(monkeypatch):
    monkeypatch.setattr(copies, "version", lambda name: "9.8")
    assert found()[0].startswith("sonicmoe 9.8 is installed, but ")
