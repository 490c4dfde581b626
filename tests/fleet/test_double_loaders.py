"""Fleet's two loaders of its engine, as the double has them."""

from __future__ import annotations

import double_cases as cases
import pytest
from fleet.double import load, machine, model


@pytest.mark.parametrize("loader", ["eager", "lazy"])
def test_hopper_is_shut_out(loader):
    """What a team on Hopper meets without an installer."""
    with load(loader, on=machine.HOPPER) as fleet:
        assert not fleet.ops.is_sonic_moe_available()
        assert fleet.fused_a2a.quantize_activation_blockscaled_fast is None
        assert fleet.expert._refresh_fp8_config is None
        with pytest.raises(RuntimeError, match="Blackwell"):
            import paddlefleet_ops.sonicmoe  # noqa: F401
        with pytest.raises(AssertionError, match="Blackwell"):
            fleet.layer.MoELayer(cases.config_of(fleet), model.one_rank())
        if loader == "lazy":
            with pytest.raises(RuntimeError, match="Blackwell"):
                fleet.ops.load_sonic_moe()


def test_lazy_loader_imports_on_demand():
    import sonicmoe

    with load("lazy", on=machine.BLACKWELL) as fleet:
        with pytest.raises(RuntimeError, match="load_sonic_moe"):
            import paddlefleet_ops.sonicmoe  # noqa: F401
        assert fleet.expert._refresh_fp8_config is None
        fleet.layer.MoELayer(cases.config_of(fleet), model.one_rank())
        loaded = fleet.ops.sonicmoe
        fleet.ops.load_sonic_moe()
        assert fleet.ops.sonicmoe is loaded is not sonicmoe
        assert fleet.expert.run_sonic_moe is loaded.run_sonic_moe


@pytest.mark.parametrize("loader", ["eager", "lazy"])
def test_this_package_on_hopper(loader):
    """A step in FP8 after `install()`, with either loader; without it Hopper is shut out again."""
    with cases.engine("sonicmoe", loader) as fleet:
        assert fleet.ops.is_sonic_moe_available()
        trainer = model.sonic_trainer(fleet, cases.config_of(fleet, fp8="e4m3"))
        losses = [trainer.step(model.micro_batches(0, 2, 32)) for _ in range(3)]
        assert losses[2] < losses[0]
        assert fleet.expert.run_sonic_moe.__module__ == "sonicmoe.fleet.run"
        assert fleet.expert.fused_grouped_w1_to_sonic.__module__ == "sonicmoe.fleet.weight_layout"
        assert fleet.fused_a2a._SONIC_PACK_SCALE_WORDS_AVAILABLE
    with load(loader, on=machine.HOPPER) as fleet:
        assert not fleet.ops.is_sonic_moe_available()
