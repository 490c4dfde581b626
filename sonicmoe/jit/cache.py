"""`CompileCache`: the one door to compiled kernels.

Promises:
* `try_load` never raises: whatever is wrong with the cache is a miss.
* `build` is idempotent, and of many processes that start at once one builds each key; the others
  use its artefact.
* A published artefact is complete: it appears by one rename, and size and checksum of each file are
  verified on load.
* A killed builder blocks nobody; a hanging one blocks for `lock_timeout_s` at most, and the error
  names it.
* A damaged artefact is moved to quarantine and rebuilt. A different architecture or version is a
  miss.
* A cache directory that cannot be written is explained once per host, still read, and complemented
  by a node-local directory.
* Nothing is loaded from a directory in which somebody could have planted it (docs/security.md).
* A kernel that the installed package carries is used before any directory is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ..config import ResolvedConfig, current_config
from ..log import first_time, logger
from .carried import carried
from .errors import ArtefactLoadError, CacheUnwritableError, CompileForbiddenError, ToolchainError
from .files import DamagedFileError
from .guard import check_compile_allowed
from .key import CompileKey
from .lock import may_say
from .manifest import Artefact
from .place import Place, Trust, shared_trust
from .store import ArtefactStore, Builder, StoreProblemError

Loaded = TypeVar("Loaded")
HOW_TO_HELP = (
    "Point SONIC_MOE_CACHE_DIR to a writable directory with free space, or run `sonicmoe warmup` where it is writable "
    "and mount the result read-only, or set SONIC_MOE_LOCAL_CACHE_DIR to a directory of this node."
)


class CompileCache:
    """Artefacts of `root`, complemented by those of the node-local `local_root`."""

    def __init__(
        self,
        root: Path,
        local_root: Path,
        *,
        lock_timeout_s: float = 600.0,
        trusted: bool = False,
    ) -> None:
        """A cache; creates no directory yet.

        Args:
            lock_timeout_s: longest wait for another builder of the same key, seconds.
            trusted: use `root` whoever can write there.
        """
        self.root, self.local_root = Path(root), Path(local_root)
        self.lock_timeout_s = lock_timeout_s
        self._trusted = trusted
        # The operator chose the shared directory, so its owner and group may be others. The local
        # one usually lies in a temporary directory where every user may write, and belongs to this
        # user alone.
        self._shared = ArtefactStore(self.root, shared_trust(trusted), lock_timeout_s)
        self._local = ArtefactStore(self.local_root, Trust.OWNER, lock_timeout_s)
        # Loaded kernels live as long as the cache, which for `default_cache` is the life of the
        # process. Nothing is unloaded: captured graphs and saved functions may hold on to it.
        self._loaded: dict[tuple[Any, ...], Any] = {}
        self._key_locks: dict[tuple[Any, ...], threading.Lock] = {}
        self._mutex = threading.Lock()

    def impatient(self) -> CompileCache:
        """The same directories, for a caller that never waits for another process."""
        return CompileCache(self.root, self.local_root, lock_timeout_s=0.0, trusted=self._trusted)

    @property
    def places(self) -> tuple[Place, Place]:
        """The cache directory and the node's own, with the rules for who may write there."""
        return self._shared.place, self._local.place

    def try_load(self, key: CompileKey) -> Artefact | None:
        """The artefact of `key`, verified where no package carries it, or None. Takes no lock, writes
        nothing, never raises.
        """
        found = carried().find(key) or self._shared.lookup(key).artefact
        return found or self._local.lookup(key).artefact

    def share(self, key: CompileKey) -> Artefact | None:
        """The artefact of `key`, or None; one that only this node has is copied into the cache
        directory. One that the package carries is not: it would pass for a build of this cache.

        Warm-up calls it. Without the copy, a node that had compiled for itself would report a warm
        cluster while all other nodes still have to compile.
        """
        found = carried().find(key) or self._shared.lookup(key).artefact
        local = None if found else self._local.lookup(key).artefact
        # Without a toolchain the key names no directory, so there is no place to copy to.
        if local is None or key.toolchain is None:
            return found or local
        try:
            # A build whose "compiler" copies: lock, manifest and publishing rename are those of any
            # other build.
            return self._shared.build(key, lambda folder: self._local.copy(local, folder))
        except StoreProblemError as problem:
            self._explain(problem)
        except (DamagedFileError, OSError):
            pass  # the local one changed under the copy, so it is looked at again
        return self._local.lookup(key).artefact

    def build(self, key: CompileKey, builder: Builder) -> Artefact:
        """The artefact of `key`; `builder(folder)` is called to fill an empty private folder only
        if there is none.

        Raises:
            CompileForbiddenError: a compile is needed and forbidden.
            ToolchainError: a compile is needed and `key.toolchain` is None.
            CompileLockTimeout: another process has been building it for too long.
            CacheUnwritableError: neither directory can take it.
            Exception: whatever `builder` raises.
        """
        shared = self._shared.lookup(key)
        found = carried().find(key) or shared.artefact or self._local.lookup(key).artefact
        if found is not None:
            return found
        # Asked before any lock is taken, so that a process that may not compile never waits for one
        # that does.
        self.require_compiler(key, shared.reason)
        return self._publish(key, builder)

    def install(self, key: CompileKey, builder: Builder) -> Artefact:
        """`build` with a builder that compiles nothing: it brings files that were compiled on
        another machine, so neither a compiler nor a permission to compile is needed. Errors as
        `build`.
        """
        return self.try_load(key) or self._publish(key, builder)

    def get(self, key: CompileKey, builder: Builder, load: Callable[[Artefact], Loaded]) -> Loaded:
        """`load(artefact)`, remembered for the life of this process; builds the artefact if there
        is none.

        ArtefactLoadError where an intact artefact does not load here; it is kept, because it may load
        on other hosts. Else errors as `build`.
        """
        # Not the digest, because a key without a toolchain has none.
        memo = (key.family, key.toolchain)
        # One lock for each key: threads that need different kernels must not wait for each other's
        # compiler.
        with self._mutex:
            key_lock = self._key_locks.setdefault(memo, threading.Lock())
        with key_lock:
            # Asked inside the lock: a thread that waited here finds the kernel that the first one
            # loaded.
            if memo not in self._loaded:
                self._loaded[memo] = self._load(key, builder, load)
        return self._loaded[memo]  # type: ignore[no-any-return]

    def waited_too_long(self, key: CompileKey) -> str:
        """The message of a bounded wait for the builder of `key` that is over."""
        return self._shared.lock(key).timeout_message()

    def require_compiler(self, key: CompileKey, why: str) -> None:
        """Raise CompileForbiddenError or ToolchainError unless this process may and can compile
        `key`.
        """
        check_compile_allowed(key, why)
        if key.toolchain is None:
            short = carried().shortfall(key.arch)
            raise ToolchainError(
                f"{key} has to be compiled ({why}) and its compiler is not on this machine. Run `sonicmoe warmup` where it "
                "is, with the same SONIC_MOE_CACHE_DIR, or install it (for CUDA sources: set CUDA_HOME)."
                + (f" {short[0].upper()}{short[1:]}." if short else "")
            )

    def _load(
        self, key: CompileKey, builder: Builder, load: Callable[[Artefact], Loaded]
    ) -> Loaded:
        artefact = self.build(key, builder)
        try:
            return load(artefact)
        # A loader may compile by itself and meet the ban, which is no sign of a broken artefact.
        except CompileForbiddenError:
            raise
        except Exception as error:
            raise ArtefactLoadError(
                f"{key}: the artefact {artefact.path} does not load on this host: {error}. It may on others: set "
                "SONIC_MOE_CACHE_DIR to a directory of hosts like this one"
            ) from error

    def _publish(self, key: CompileKey, builder: Builder) -> Artefact:
        """Build in the cache directory, or in that of this node."""
        try:
            return self._shared.build(key, builder)
        except StoreProblemError as problem:
            self._explain(problem)
            refused = f"{key} is not in the cache and cannot be stored. Cache directory {problem}"
        try:
            return self._local.build(key, builder)
        except StoreProblemError as problem:
            words = f"{refused}. Node-local directory {problem}. {HOW_TO_HELP}"
            raise CacheUnwritableError(words) from problem

    def _explain(self, problem: StoreProblemError) -> None:
        # Without the key: a read-only directory is one problem, however many kernels miss it.
        line = (
            f"compile cache {problem}; what cannot be read or stored there goes to {self.local_root} "
            f"on this node. {HOW_TO_HELP}"
        )
        # One problem of all ranks of this host, and of the workers of this process.
        if first_time(line) and may_say(self.local_root, line):
            logger.warning("%s", line)


# One instance per set of directories, so that all callers share the loaded kernels. The limit
# covers processes that switch configurations, as tests do.
_shared_instance = lru_cache(maxsize=8)(CompileCache)


def default_cache(config: ResolvedConfig | None = None) -> CompileCache:
    """The process's cache for the configuration in force (`SONIC_MOE_CACHE_DIR`); loaded kernels
    stay loaded.
    """
    settings = config or current_config()
    return _shared_instance(
        settings.cache_dir,
        settings.local_cache_dir,
        lock_timeout_s=settings.lock_timeout_s,
        trusted=settings.trust_cache,
    )
