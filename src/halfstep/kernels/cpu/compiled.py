"""Compiles kernels: loops over chunks, once serial and once parallel, cached on disk for other processes.

numba's own on-disk cache notices edits to a function's own file only, and a kernel is made of functions and constants
from several files: a stale kernel would silently compute wrong values. Here the folder of compiled code is named after
a hash of all sources of kernels, so every clone and environment of a user can share it. numba also numbers its files,
so of two processes that compile at once one may store its code under the other's signature or processor. Here files are
named after both.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, InTreeCacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import overload
from numba.misc.appdirs import AppDirs


CHUNK = 1 << 14  # elements a thread takes at a time, the reach of one pair of noise keys (`quant.rounding.NOISE_CHUNK`)
_PROCESS = os.getpid()  # GNU OpenMP aborts a forked child that starts threads after its parent did


class _Part(JITCodeLibrary):
    """Code linked into a kernel that LLVM optimises as a whole: by itself it is neither optimised nor executable."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironments


class _OptimisedPart(_Part):
    def _optimize_final_module(self) -> None:
        JITCodeLibrary._optimize_final_module(self)


class _NoEnvironments:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Nothing: Python names and constants are needed only by functions that Python calls."""


class _PartCompiler(Compiler):
    library: type[_Part] = _Part

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, library or self.library(targetctx.codegen(), "part"), *rest)


class _OptimisedPartCompiler(_PartCompiler):
    library = _OptimisedPart


_NO_CALLS_FROM_C: Any = {"no_cfunc_wrapper": True}
_PART: Any = {"forceinline": False, "no_cpython_wrapper": True, **_NO_CALLS_FROM_C, "pipeline_class": _PartCompiler}
_INLINED: Any = {**_PART, "forceinline": True}


def inner(function: Callable[..., Any]) -> Any:
    """A function that only kernels call: compiled into them, without a wrapper for Python."""
    return numba.njit(function, error_model="numpy", **_PART)


def inner_optimised(function: Callable[..., Any]) -> Any:
    """`inner`, optimised before it is linked too: a loop with many constants may be a quarter faster."""
    return numba.njit(function, error_model="numpy", **{**_PART, "pipeline_class": _OptimisedPartCompiler})


def inner_inlined(function: Callable[..., Any]) -> Any:
    """`inner`, inlined wherever it is called: for the work on one element or one tile, where a call would cost as much
    (dozens of arguments on the stack, and an atomic reference count for every slice)."""
    return numba.njit(function, error_model="numpy", **_INLINED)


def inner_overload(function: Callable[..., Any], inlined: bool = False) -> Any:
    """`numba.extending.overload` for a function that only kernels call."""
    return overload(function, jit_options=_INLINED if inlined else _PART)


def specialized(choose: Callable[..., Any], inlined: bool = False) -> Any:
    """A function for kernels, whose implementation `choose` returns for the numba types of its arguments."""

    def stub(*arguments: Any) -> Any:
        raise NotImplementedError(f"{choose.__name__} is for kernels")

    inner_overload(stub, inlined)(choose)
    return stub


specialized_inlined = partial(specialized, inlined=True)
"""`specialized`, inlined wherever it is called."""


@inner_inlined
def ends(chunk, size):
    """Where a chunk of an array with `size` elements begins and ends."""
    return chunk * CHUNK, min(chunk * CHUNK + CHUNK, size)


@inner_inlined
def whole_lines(count):
    """An array of that many float32 that starts at a cache line: numba aligns to half a line, and vectors that cross
    lines take a tenth longer."""
    found = np.empty(count + 16, np.float32)
    skip = -found.ctypes.data % 64 // 4
    return found[skip : skip + count]


def none(numba_type: Any) -> bool:
    """Whether an argument's type is that of None."""
    return isinstance(numba_type, types.NoneType)


@specialized
def piece(array, start, stop):
    """In kernels: array[start:stop], or None for None, decided at compile time."""
    if none(array):
        return lambda array, start, stop: None
    return lambda array, start, stop: array[start:stop]


@specialized_inlined
def each(numbers, i):
    """In kernels: element i of an array, a pair of elements for a pair of arrays, and scalars and None unchanged."""
    if isinstance(numbers, types.BaseTuple):
        return lambda numbers, i: (numbers[0][i], numbers[1][i])
    if isinstance(numbers, types.NoneType | types.Number):
        return lambda numbers, i: numbers
    return lambda numbers, i: numbers[i]


@specialized_inlined
def of_row(numbers, row):
    """In kernels: the scales of a row of a matrix: an element for scales by row (a 1D array), all for scales by column
    (an array of one row), or the same scalar or None."""
    if isinstance(numbers, types.Array):
        return (lambda numbers, row: numbers[row]) if numbers.ndim == 1 else (lambda numbers, row: numbers[0])
    return lambda numbers, row: numbers


class Kernel:
    """A function that loops over chunks with `numba.prange`, compiled on first call, separately for serial and parallel
    runs.

    Serial for small tensors, where torch has one thread, and in forked children (a DataLoader's worker).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.serial = _compile(function, parallel=False)
        self.parallel = _compile(function, parallel=True)

    def __call__(self, size: int, *arguments: Any) -> Any:
        """Run on `arguments`; `size` is the number of elements of work, which decides whether threads are worth their
        start."""
        threads = torch.get_num_threads()
        if threads == 1 or size <= CHUNK or os.getpid() != _PROCESS:
            return self.serial(*arguments)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        result = self.parallel(*arguments)
        if torch.get_num_threads() != threads:  # numba sets it for an OpenMP runtime that torch may share
            torch.set_num_threads(threads)
        return result


SOURCES = ("formats", "quant", "kernels/cpu", "kernels/arithmetic")
"""The folders, and the file, from which kernels' functions and constants come."""

_KEPT = 8  # folders of compiled code in the user's cache; the least recently used are removed


def source_hash(folders: Iterable[Path]) -> str:
    """A hash of all Python files in folders, or of a file (named without .py), and of the compiler's versions."""
    digest = hashlib.sha256(f"numba {numba.__version__}, llvmlite {llvmlite.__version__}".encode())
    for folder in folders:
        for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            digest.update(str(file.relative_to(folder.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _sources() -> str:
    return source_hash(Path(__file__).parents[2] / room for room in SOURCES)


def _folder() -> str:
    return f"kernels-{_sources()}"


def _compile(function: Callable[..., Any], parallel: bool) -> Any:
    dispatcher: Any = numba.njit(function, parallel=parallel, error_model="numpy", **_NO_CALLS_FROM_C)
    with contextlib.suppress(RuntimeError):  # no writable folder: every process compiles for itself
        dispatcher._cache = _Cache(function, "parallel" if parallel else "serial")
    return dispatcher


class _BesideTheSources(InTreeCacheLocator):
    """A folder next to the sources, named after their hash, which also serves as numba's source stamp."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(self._cache_path, _folder())

    def get_source_stamp(self) -> str:
        return _sources()


class _InTheUsersCache(_BesideTheSources):
    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = _users_folder()


def _place() -> Path:
    return Path(AppDirs("halfstep", appauthor=False).user_cache_dir)


def cached_code(place: Path | None = None) -> str:
    """The size and location of the compiled code in the user's cache, as text."""
    place = place or _place()
    folders, size = list(place.glob("kernels-*")), 0
    for file in place.glob("kernels-*/*.nb?"):
        with contextlib.suppress(OSError):  # another process removes it
            size += file.stat().st_size
    return f"{size / 2**20:.0f} MiB in {len(folders)} folders (at most {_KEPT}) of {place}"


@cache
def _users_folder() -> str:
    """The folder for these sources in the user's cache, marked as last used; folders long unused are removed."""
    place = _place()
    folder = place / _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        remove_old(place)
    except OSError:  # another process removes the same folder; or it is not writable, which numba handles
        pass
    return str(folder)


def remove_old(place: Path, kept: int = _KEPT) -> None:
    """Remove all but the last used folders of compiled code. A process that still uses one compiles into it again."""
    folders = sorted(place.glob("kernels-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for old in folders[kept:]:
        shutil.rmtree(old, ignore_errors=True)


class _Places(CompileResultCacheImpl):
    _locator_classes = [_InTheUsersCache, _BesideTheSources]  # noqa: RUF012


class _Files(IndexDataCacheFile):
    """Compiled code in a file named after its key: the signature, numba's target (processor and features), and the
    bytecode."""

    def save(self, key: Any, data: Any) -> None:
        name = f"{self._index_name.removesuffix('.nbi')}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class _Cache(FunctionCache):
    _impl_class: Any = _Places

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        base, stamp = f"{self._impl.filename_base}.{name}", self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, base, stamp)
