"""What this package says of CuTe DSL and quack is what they say, asked once of one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import processes
import pytest
import torch
from engine.host_gemms import scale_offset
from kept import key_of
from worlds import ROOT, environment

from sonicmoe.engine.blackwell import mx
from sonicmoe.engine.capabilities import BF16
from sonicmoe.enums import ActivationType
from sonicmoe.jit.key import package_versions

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="needs quack-kernels"
)
ROWS, BLOCKS = 256, 12  # 2 x 3 atoms


@pytest.fixture(scope="module")
def facts(artefacts):
    """The facts are kept, because importing CuTe DSL takes seconds."""
    script = Path(__file__).with_name("cute_facts.py")
    ours = ROOT / "sonicmoe/kernels/blackwell/quack_epilogues.py", ROOT / "sonicmoe/enums.py"
    versions = package_versions("nvidia-cutlass-dsl", "quack-kernels", "torch")

    def build(folder):
        done = processes.run(["-P", script, ROWS, BLOCKS], environment(), ROOT, timeout=600)
        assert done.returncode == 0, done.stderr
        (folder / "facts.json").write_text(done.stdout, encoding="utf-8")

    key = key_of("cute_facts", [script, *ours], ROWS, BLOCKS, versions)
    return json.loads(artefacts.build(key, build).file("facts.json").read_text(encoding="utf-8"))


def test_the_layout_of_scales_is_that_of_cute_and_of_quack(facts):
    """Every scale of a matrix, by closed formula, by `to_atoms`, by CuTe's `tile_atom_to_shape_SF`
    evaluated on the host, and by the packer of quack's own tests.
    """
    ours = [[scale_offset(m, b, BLOCKS) for b in range(BLOCKS)] for m in range(ROWS)]
    assert ours == facts["cute"] == facts["quack"]
    flat = torch.arange(ROWS * BLOCKS, dtype=torch.int64).reshape(ROWS, BLOCKS)
    for byte in (flat % 251, flat // 251):  # together they tell every scale from every other
        atoms = mx.to_atoms(byte.to(torch.uint8)).reshape(-1)
        assert torch.equal(atoms[torch.tensor(ours)], byte.to(torch.uint8))


def test_the_bf16_record_has_the_activations_of_the_epilogues(facts):
    """A record says an engine has a kernel exactly where its sources have one."""
    wanted = {a.value: 2 for a in ActivationType if a in BF16.activations}
    assert facts["activations"] == wanted
