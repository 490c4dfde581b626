"""Names of Fleet's in-tree copy of `run_sonic_moe`, which can be bound and not used."""

from __future__ import annotations

import pytest

from sonicmoe.errors import EngineUnavailableError
from sonicmoe.fleet import twin

BOUND = {
    name: value for name, value in vars(twin).items() if isinstance(value, twin._InFleetsCopyAlone)
}


@pytest.mark.parametrize("name", BOUND)
@pytest.mark.parametrize("way", [lambda it: it.apply, lambda it: it])
def test_parts_of_the_copy_can_be_bound_and_not_used(name, way):
    with pytest.raises(EngineUnavailableError, match=rf"^_?{name} .*call .*run_sonic_moe"):
        way(BOUND[name])(object(), fp8_config=None)
