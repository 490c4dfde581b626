"""On the GPU: what was compiled ahead is what a launch finds, at every length, under
`no_compile()`.
"""

import importlib.util

import pytest
from cuda_sample import toolchain_probe
from racers import NOT_RUN
from test_jit_cute_kernel import sample

from sonicmoe import SonicMoEConfig
from sonicmoe.jit import CompileCache, default_cache, no_compile
from sonicmoe.jit.triton_variant import TritonVariant

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
LENGTHS = (0, 1, 15, 16, 1000, 65536)


def check_launches(scale_add):
    for length in LENGTHS:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.arange(length, dtype=torch.float32, device="cuda")
            y = torch.ones_like(x)
            scale_add(x, y)
        torch.cuda.synchronize()
        assert torch.equal(y, 2 * x + 1)


def test_cuda_source(tmp_path):
    cache = CompileCache(tmp_path / "cache", tmp_path / "local")
    toolchain_probe("sm_90a").compile(cache)
    with no_compile():
        module = toolchain_probe("sm_90a").load(cache)
        check_launches(lambda x, y: module.scale_add(x, y, 2.0))


def test_triton_kernel(tmp_path):
    import triton_sample

    with SonicMoEConfig(
        cache_dir=tmp_path / "cache", local_cache_dir=tmp_path / "local"
    ).activate():
        entry = "triton_sample:scale_add_for"
        variant = TritonVariant.make("scale_add", entry, {"block": 256}, "sm_90a")
        variant.compile(default_cache())

        def scale_add(x, y):
            if len(x):
                triton_sample.scale_add[(-(-len(x) // 256),)](x, y, 2.0, len(x), BLOCK=256)

        with no_compile():
            check_launches(scale_add)


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason=f"{NOT_RUN}needs nvidia-cutlass-dsl"
)
def test_cute_kernel(tmp_path):
    cache = CompileCache(tmp_path / "cache", tmp_path / "local")
    kernel = sample()
    kernel.compile(cache)
    with no_compile():
        function = kernel.load(cache)
        check_launches(lambda x, y: function(x, y, 2.0) if len(x) else None)
