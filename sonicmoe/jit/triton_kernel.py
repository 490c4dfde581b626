"""Triton kernels in the package's own cache: one build per key among many processes, and subject to
`no_compile()`.

`@stored_jit` replaces `@triton.jit` on kernels (device functions keep `triton.jit`). Other Triton
users in the process keep Triton's cache. Needs Triton, and at run time whatever framework Triton
finds.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.compiler import (
    ASTSource,
    CompiledKernel,
    get_cache_invalidating_env_vars,
    get_cache_key,
    make_backend,
)  # fmt: skip
from triton.runtime.cache import CacheManager, FileCacheManager
from triton.runtime.jit import JITCallable, JITFunction, create_function_from_signature

from ..architectures import arch_name
from .cache import CompileCache, default_cache
from .key import CompileKey
from .manifest import Artefact

_SCOPE = threading.Lock()  # one compile at a time swaps Triton's cache manager, a global of Triton
_WARP_SIZE = 32


class StoredJITFunction(JITFunction[Any]):
    """A Triton kernel whose compiles go through `CompileCache`."""

    # JITFunction calls this once per device and looks up `self.compile` at every miss of its own
    # table. Replacing the attribute redirects the compile and leaves signature, specialisation and
    # launch to Triton.
    def create_binder(self) -> Any:
        """Triton's binder for the active device, with the compile step replaced."""
        binder = super().create_binder()
        self.compile = compile_stored
        return binder

    # Triton 3.6 hashes the constants of a called function with the caller only if the called one was
    # hashed before, so its hash depends on what else this process has hashed. A process that warms
    # one kernel and a process that launches all would look for different keys.
    @property
    def cache_key(self) -> str:
        """Triton's hash of this source and of all that it calls, those first."""
        if self.hash is None:
            _hash_called(self, {id(self)})
        key: str = super().cache_key
        return key

    def ahead(self, *args: Any, arch: str, **kwargs: Any) -> TritonCompile:
        """The compile that a launch with such arguments needs, for `arch` and without a GPU.

        Args:
            *args: as for a launch; `triton.runtime.jit.MockTensor(dtype)` stands for a pointer
            aligned to 16 bytes.
            **kwargs: keyword arguments, constants and options (`num_warps=`) of the launch.
        """
        # These steps repeat the first half of `JITFunction.run`, with a target from the argument in
        # place of the active driver. A difference between the two would warm a key that no launch
        # looks for; a test compares them.
        target = GPUTarget("cuda", int(re.sub(r"\D", "", arch)), _WARP_SIZE)
        backend = make_backend(target)
        # Both settings go into Triton's options and so into the hash.
        kwargs["debug"] = kwargs.get("debug", self.debug) or knobs.runtime.debug
        kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attributes = self._pack_args(
            backend, kwargs, bound, specialization, options
        )
        return TritonCompile(
            ASTSource(self, signature, constants, attributes), target, options.__dict__
        )


def _hash_called(function: JITCallable, seen: set[int]) -> None:
    """Hash the functions that this one calls, the innermost first."""
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITCallable) and id(called) not in seen:
            seen.add(id(called))
            _hash_called(called, seen)
            _ = called.cache_key


def stored_jit(*, do_not_specialize: Sequence[str | int] = (), **options: Any) -> Any:
    """`triton.jit` for a kernel whose artefacts belong to the package's cache; a decorator.

    Name every integer argument that counts tokens in `do_not_specialize`: Triton would compile
    again when its value becomes 1 or a multiple of 16. Under TRITON_INTERPRET=1 this is
    `triton.jit`.
    """
    made = triton.jit if knobs.runtime.interpret else StoredJITFunction
    return lambda kernel: made(kernel, do_not_specialize=list(do_not_specialize), **options)


def assembler(arch: int) -> Any:
    """The ptxas of an architecture: Triton's own, unless a user has named another one."""
    # Inductor sets TRITON_PTXAS_PATH to PyTorch's one when it first compiles. Triton asks a process's
    # assembler for its version once, so keys would depend on which of the two came first, and a
    # child or a warm-up would have other keys than a training process.
    found = get_ptxas(arch)
    if Path(found.path).parts[-3:] == ("torch", "bin", "ptxas"):
        return knobs.nvidia.knob_descriptors["ptxas"].transform(None)
    return found


class _Assembled:
    """The part of a backend that Triton's keys ask for: its architecture, and who assembles for it."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def hash(self) -> str:
        return f"{assembler(self._arch).version}-{self._arch}"


class TritonCompile:
    """One specialisation of a kernel for one target."""

    def __init__(self, source: Any, target: Any, options: Any, environment: Any = None) -> None:
        """Arguments as of `triton.compile`."""
        self._source, self._target, self._options = source, target, dict(options or {})
        self._environment = (
            # Read once and used for the hash and the compile alike: a variable that changes in
            # between cannot store code under the wrong key.
            get_cache_invalidating_env_vars() if environment is None else environment
        )
        backend = make_backend(target)
        # The options that the kernel's source sets for itself come last, as in `triton.compile`.
        parsed = backend.parse_options({**self._options, **source.parse_options()})
        tools = _Assembled(target.arch)
        triton_key = get_cache_key(source, tools, parsed, env_vars=self._environment)
        self._hash = hashlib.sha256(triton_key.encode()).hexdigest()

    def key(self) -> CompileKey:
        """The compile key. Triton's own hash covers sources, constants, signature, options and
        environment.
        """
        return CompileKey.make(
            # CompileKey wants lower case and at most 64 characters. Two kernels whose shortened
            # names agree still differ in the hash.
            re.sub(r"\W", "_", f"triton_{self._source.name}".lower())[:64],
            # Triton's number of an architecture has no suffix; its compiler adds it by itself.
            arch=arch_name(divmod(self._target.arch, 10)),
            statics={"triton": self._hash},
            fingerprint={},
            toolchain={"triton": triton.__version__},
        )

    def compile(self, cache: CompileCache | None = None) -> Artefact:
        """The published artefact, built if needed; errors as `CompileCache.build`."""
        return (cache or default_cache()).build(self.key(), self.build_into)

    def build_into(self, folder: Path) -> None:
        """Run Triton's compiler and leave all its outputs in `folder`."""
        with _cache_in(folder), knobs.nvidia.scope():
            # Triton reads this knob for every architecture before Blackwell.
            knobs.nvidia.ptxas = assembler(self._target.arch).path
            triton.compile(
                self._source,
                target=self._target,
                options=self._options,
                _env_vars=self._environment,
            )

    # CompiledKernel reads the metadata and the binary from these paths. It loads them into the
    # driver at the first launch, so opening needs no GPU.
    def open(self, artefact: Artefact) -> CompiledKernel:
        """Triton's handle of a verified artefact."""
        files = {name: str(artefact.file(name)) for name in artefact.manifest["files"]}
        return CompiledKernel(self._source, files, self._hash)


def compile_stored(
    source: Any, target: Any = None, options: Any = None, _env_vars: Any = None
) -> CompiledKernel:
    """`triton.compile` through the cache of the configuration in force. Errors as
    `CompileCache.build`.
    """
    # Called by Triton inside a launch. Triton keeps the result in its own table of the device, so
    # the artefact is verified once per process and specialisation.
    target = target or triton.runtime.driver.active.get_current_target()
    request = TritonCompile(source, target, options, _env_vars)
    return request.open(request.compile())


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Let Triton write the outputs of this thread's compile into `folder`.

    Triton asks one global for its cache manager. Other threads may compile kernels of other
    packages meanwhile, so they get Triton's usual manager.
    """
    owner = threading.get_ident()

    class FolderManager(FileCacheManager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self.key, self.cache_dir, self.lock_path = key, str(folder), str(folder)

        # No group means a miss, so Triton always compiles into the empty folder. A group would
        # store absolute paths, which the publishing rename makes wrong.
        def put_group(self, filename: str, group: dict[str, str]) -> None:
            return None

    def manager(key: str, *args: Any, **kwargs: Any) -> CacheManager:
        kind = FolderManager if threading.get_ident() == owner else FileCacheManager
        return kind(key, *args, **kwargs)

    # The global is process-wide, so two compiles of this package may not overlap: the second would
    # save the manager of the first and restore it at its end.
    with _SCOPE:
        saved = knobs.cache.manager_class
        knobs.cache.manager_class = manager
        try:
            yield
        finally:
            knobs.cache.manager_class = saved
