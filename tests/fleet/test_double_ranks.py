"""Fleet's layer over two ranks of gloo equals plain experts on all tokens."""

from __future__ import annotations

import double_cases as cases
import numpy as np
import pytest
from double_ranks import BATCHES, FORMS, TOKENS, own
from fleet.double import model
from worlds import TESTS, paddle_variables, run_world


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("double")
    folder = TESTS / "fleet"
    run_world(
        lambda rank: [folder / "double_worker.py", rank, directory],
        [{**each, "SONICMOE_TEST_FRAMEWORK": "paddle"} for each in paddle_variables(2)],
    )
    return [dict(np.load(directory / f"{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def wanted():
    with cases.engine("fleets") as fleet:
        return {
            form: cases.plain_results(fleet, cases.config_of(fleet, **changes), BATCHES)
            for form, changes in FORMS.items()
        }


@pytest.mark.parametrize("form", FORMS)
def test_ranks_together_are_the_whole_layer(ranks, wanted, form):
    bound = 0.085 if "fp8" in form else 8e-3
    for name, value in wanted[form].items():
        for rank, found in enumerate(ranks):
            got = found[f"{form}/{name}"]
            if name in ("out", "dx"):
                part = value[:, rank * TOKENS : (rank + 1) * TOKENS]
            elif name == "gate.weight":
                got, part = sum(each[f"{form}/{name}"] for each in ranks), value
            else:
                part = own(form, name, value, rank, 2)
            assert cases.relative(got, part) <= bound, (name, rank)


def test_fp8_sends_half_the_bytes(ranks):
    """Codes and a 32-bit word per 128 columns, there and back; routing is counted nowhere."""
    for rank in ranks:
        plain, fp8 = (int(rank[f"{form}/sent"]) for form in ("deepep", "deepep fp8"))
        assert fp8 - plain == plain * (128 + 4) / 256


@pytest.mark.parametrize("form", FORMS)
def test_shards_of_a_checkpoint_are_the_whole_weights(ranks, form):
    with cases.engine("fleets") as fleet:
        config = cases.config_of(fleet, **FORMS[form])
        whole = model.initialise(model.PlainMoE(config, fleet.layer.TopKRouter))
        weights = [cases.as_numpy(w) for w in whole.grouped_gemm_experts.parameters()]
    for name, weight in zip(("weight1", "weight2"), weights, strict=True):
        shape = ranks[0][f"{form}/saved/{name}/place"][0]
        together = np.full(shape, np.nan, np.float32)
        for rank in ranks:
            shard, (_, first) = (rank[f"{form}/saved/{name}{end}"] for end in ("", "/place"))
            place = [slice(n, n + size) for n, size in zip(first, shard.shape, strict=True)]
            together[tuple(place)] = shard
        assert np.array_equal(together.ravel(), weight.ravel())
