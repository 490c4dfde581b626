"""`no_compile()` and SONIC_MOE_FORBID_COMPILE."""

import threading

import pytest
from racer import load

from sonicmoe.jit import no_compile
from sonicmoe.jit.errors import CompileForbiddenError


def test_compile_raises_and_names_kernel_and_key(cache, key, compiler, field):
    with no_compile(), pytest.raises(CompileForbiddenError) as raised:
        cache.get(key, compiler(key), load)
    assert str(key) in str(raised.value) and "no_compile()" in str(raised.value)
    assert "sonicmoe warmup" in str(raised.value)
    assert not field.log.exists()


def test_other_threads_are_covered(cache, key, compiler):
    errors = []

    def compile_elsewhere():
        try:
            cache.build(key, compiler(key))
        except Exception as error:
            errors.append(error)

    with no_compile():
        thread = threading.Thread(target=compile_elsewhere)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [CompileForbiddenError]


def test_damaged_artefact_counts_as_a_compile(cache, key, compiler):
    path = cache.build(key, compiler(key)).path
    (path / "kernel.so").write_bytes(b"")
    words = r"damaged: kernel\.so has 0 bytes instead of 4096"
    with no_compile(), pytest.raises(CompileForbiddenError, match=words):
        cache.build(key, compiler(key))
