"""The installer: what it changes, that it takes everything back, and what it refuses."""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import pytest
from fleet import double
from framework import IS_PADDLE

from sonicmoe.ernie_compat import fleet
from sonicmoe.errors import EngineUnavailableError, FrameworkError
from sonicmoe.fleet import install as installer
from sonicmoe.fleet.quantizer import quantize_activation_blockscaled_fast
from sonicmoe.fleet.symbols import MOUNT, SYMBOLS

READER = "paddlefleet.transformer.moe.fused_a2a"
needs_paddle = pytest.mark.skipif(not IS_PADDLE, reason="PaddleFleet runs under Paddle")


@pytest.fixture(params=double.SOURCES)
def loader(request, tmp_path):
    """`paddlefleet_ops` with one of its loaders."""
    with double.importable(tmp_path, double.SOURCES[request.param]):
        yield request.param
        fleet.uninstall()


@pytest.fixture
def ops(loader):
    return importlib.import_module("paddlefleet_ops")


@pytest.fixture
def other_ops(tmp_path):
    """`paddlefleet_ops` of a given source."""
    with ExitStack() as stack:
        yield lambda source: stack.enter_context(double.importable(tmp_path, source))
        fleet.uninstall()


def state(ops):
    """Everything that an installation changes."""
    return (
        {name: module for name, module in sys.modules.items() if name.startswith(MOUNT)},
        {name: value for name, value in vars(ops).items() if not name.startswith("__")},
        dict(ops.blocked_import_messages),
        [dict(getattr(finder, "error_messages", {})) for finder in sys.meta_path],
        sys.meta_path[:],
    )


def install():
    return fleet.install(reference=True)


def test_under_pytorch_it_says_what_to_do():
    if IS_PADDLE:
        pytest.skip("this is about PyTorch")
    with pytest.raises(FrameworkError, match=r"imported with PyTorch.*paddle\.enable_compat"):
        install()


@needs_paddle
class TestMounting:
    def test_fleet_finds_every_name(self, ops):
        bound = ops.is_sonic_moe_available
        assert not bound()
        install()
        # Also the function that was bound before.
        assert bound() is ops.is_sonic_moe_available() is True
        for symbol in SYMBOLS:
            if not symbol.late:
                module = importlib.import_module(f"{MOUNT}.{symbol.module}".rstrip("."))
                assert getattr(module, symbol.name) is symbol.get()
        from paddlefleet_ops import sonicmoe
        from paddlefleet_ops.sonicmoe.functional import _refresh_fp8_config

        assert sonicmoe is sys.modules[MOUNT]
        _refresh_fp8_config().enabled = True

    def test_fleet_imported_afterwards_has_the_engine(self, loader):
        install()
        reader = importlib.import_module(READER)
        if loader == "lazy":
            reader._load_sonic_symbols()
        found = reader.quantize_activation_blockscaled_fast
        assert found is quantize_activation_blockscaled_fast

    def test_names_that_are_not_mounted_are_not_looked_for_elsewhere(self, ops, tmp_path):
        vendored = tmp_path / "paddlefleet_ops/sonicmoe"
        vendored.mkdir()
        (vendored / "__init__.py").write_text("raise SystemExit('the engine that Fleet ships')")
        (vendored / "grouped_gemm.py").write_text("raise SystemExit('and a part of it')")
        install()
        with pytest.raises(ModuleNotFoundError, match="grouped_gemm"):
            importlib.import_module(f"{MOUNT}.grouped_gemm")
        with pytest.raises(ImportError, match=r"no attribute 'swish'|cannot import name 'swish'"):
            from paddlefleet_ops.sonicmoe.functional import swish  # noqa: F401

    def test_one_line_says_what_was_done_once(self, loader, caplog):
        caplog.set_level(logging.INFO, logger="sonicmoe")
        line = install()
        assert install() == line and "\n" not in line
        assert [r.getMessage() for r in caplog.records].count(line) == 1
        for part in (MOUNT, f"{len(SYMBOLS)} names", loader, "reference engine", "is True"):
            assert part in line

    def test_paddles_proxy_stays_on_for_this_package(self, ops):
        import paddle

        before = sys.meta_path[:]
        scope = set(paddle.compat.proxy.TORCH_PROXY_FINDER._local_enabled_scope)
        try:
            while installer._proxies_this_package():
                paddle.disable_compat()
            install()
            assert installer._proxies_this_package()
            finders = sys.meta_path[:]
            installer._keep_compat()
            assert sys.meta_path == finders
        finally:
            paddle.enable_compat(scope=scope, silent=True)
            sys.meta_path[:] = before


@needs_paddle
class TestTakingBack:
    def test_leaves_what_was_found(self, ops):
        assert "nothing was installed" in fleet.uninstall()
        before = state(ops)
        for _ in range(2):
            install()
            assert state(ops) != before
            fleet.uninstall()
            assert state(ops) == before
        with pytest.raises(RuntimeError):
            importlib.import_module(MOUNT)

    def test_names_the_modules_that_keep_the_engine(self, loader):
        install()
        assert READER not in fleet.uninstall()
        install()
        importlib.import_module(READER)
        assert READER in fleet.uninstall()

    @pytest.mark.parametrize("step", ["mounted_modules", "_mount", "_open_gates", "_verify"])
    def test_a_failure_changes_nothing(self, ops, step, monkeypatch):
        before, real = state(ops), getattr(installer, step)

        def fails(*arguments):
            real(*arguments)
            raise RuntimeError("out of luck")

        monkeypatch.setattr(installer, step, fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            install()
        assert state(ops) == before
        monkeypatch.undo()
        install()

    def test_what_others_changed_meanwhile_stays(self, ops):
        install()
        theirs = ModuleType(f"{MOUNT}.functional")
        sys.modules[f"{MOUNT}.functional"] = theirs
        fleet.uninstall()
        assert sys.modules.pop(f"{MOUNT}.functional") is theirs


UNKNOWN = "not known to this package: it needs is_sonic_moe_available"


@needs_paddle
class TestRefusals:
    def refused(self, match, **arguments):
        with pytest.raises(EngineUnavailableError, match=match):
            fleet.install(**(arguments or {"reference": True}))
        assert MOUNT not in sys.modules

    def test_no_fleet_and_no_gpu(self):
        self.refused("there is no paddlefleet_ops")
        self.refused(r"no GPU is here.*needs 9\.0.*reference=True", reference=False)

    def test_an_error_inside_fleet_is_its_own(self, other_ops):
        other_ops("import a_library_that_is_not_there")
        with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
            install()

    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("", UNKNOWN),
            ("blocked_import_messages = {}", UNKNOWN),
            (double.EAGER + "\nsonicmoe = sys", "another engine is imported"),
            (
                double.EAGER + f"\nsys.modules['{MOUNT}.functional'] = sys",
                "another engine is imported",
            ),
            (
                double.SOURCES["lazy"].replace("_AVAILABLE = False", "_AVAILABLE = True"),
                "is True already: PaddleFleet's own engine",  # on a GPU that it runs on
            ),
            (
                double.EAGER.replace("return _SONIC_MOE_AVAILABLE", "return False"),
                r"is_sonic_moe_available\(\) stays False; this version",
            ),
        ],
    )
    def test_a_fleet_that_cannot_take_it(self, source, words, other_ops):
        other_ops(source)
        self.refused(words)

    @pytest.mark.parametrize("package", ["paddlefleet", "paddleformers.fleet"])
    def test_fleet_imported_before(self, loader, package, monkeypatch):
        """With the loader that imports on demand nothing is lost by then."""
        module = ModuleType(f"{package}.transformer.moe.moe_expert")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if loader == "eager":
            self.refused(rf"{package}.transformer.moe.moe_expert imported already.*before anything")
        else:
            install()

    @pytest.mark.parametrize("kept", ["load_sonic_moe", "HAVE_SONIC_MOE"])
    def test_fleet_that_keeps_an_answer_from_before(self, other_ops, kept, monkeypatch):
        other_ops(double.SOURCES["lazy"])
        ops = importlib.import_module("paddlefleet_ops")
        module = ModuleType(READER)
        setattr(module, kept, getattr(ops, kept) if kept == "load_sonic_moe" else False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        self.refused("fused_a2a imported already")

    def test_a_part_that_was_imported_with_pytorch(self, ops, monkeypatch):
        module = ModuleType("sonicmoe.astray")
        module.torch = SimpleNamespace(Tensor=object)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(FrameworkError, match=r"sonicmoe\.astray were imported with PyTorch"):
            install()
        assert MOUNT not in sys.modules and not ops.is_sonic_moe_available()


@needs_paddle
class TestDevices:
    @pytest.mark.parametrize(
        ("capability", "count", "found"),
        [
            *(((a, b), 1, f"capability {a}.{b}") for a, b in ((9, 0), (8, 9), (10, 0), (9, 5))),
            ((9, 0), 0, "no GPU is here"),
        ],
    )
    def test_hopper_alone_needs_no_permission(self, capability, count, found, monkeypatch):
        import paddle

        asked = {"device_count": lambda: count, "get_device_capability": lambda: capability}
        monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
        monkeypatch.setattr(paddle.device, "cuda", SimpleNamespace(**asked))
        if found != "capability 9.0":
            with pytest.raises(EngineUnavailableError, match=f"{found}, .* needs 9"):
                installer._device(reference=False)
        assert found in installer._device(reference=found != "capability 9.0")
