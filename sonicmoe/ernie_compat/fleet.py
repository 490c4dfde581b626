"""PaddleFleet on this package's engine: `install()` before anything of `paddlefleet` is imported."""

from ..fleet.install import install, uninstall

__all__ = ["install", "uninstall"]
