"""NativeLibrary: the shared library of kernels, loaded once, on the OpenMP threads that torch already has."""

from __future__ import annotations

import ctypes
import logging
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from headrace.kernels.native.structs import OP_NUMBERS, OPS, Call

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class NativeError(Exception):
    """Why there are no native kernels here; the text is for people."""


class NativeLibrary:
    """csrc/ behind ctypes.

    Args:
        path: of the shared library.

    Raises:
        NativeError: it cannot be loaded, was built from other sources, or has no kernels for this CPU.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"{path.name} cannot be loaded: {error}") from error
        library.hr_instruction_set.restype = c_char_p
        library.hr_args_bytes.restype = c_int64
        library.hr_run.argtypes = [c_int32, c_void_p, c_int32]
        library.hr_run.restype = None
        library.hr_run_program.argtypes = [POINTER(Call), c_int64, POINTER(c_void_p), c_int64, c_int32]
        library.hr_run_program.restype = None
        sizes = [library.hr_args_bytes(op) for op in range(library.hr_num_ops())]
        if sizes != [ctypes.sizeof(struct) for struct in OPS]:
            raise NativeError(f"{path.name} was built from other sources; build it again")
        self._library = library
        self._hr_run = library.hr_run
        if not self.instruction_set:
            raise NativeError("the kernels need AVX2 on x86-64, or a 64-bit Arm")
        self.shares_threads = self._join_openmp()

    @property
    def instruction_set(self) -> str:
        """Which set runs: "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx" or "neon"."""
        name: bytes = self._library.hr_instruction_set()
        return name.decode()

    def choose_instruction_set(self, name: str) -> bool:
        """Use another set from now on; False where it was not compiled or this CPU lacks it."""
        return bool(self._library.hr_choose_instruction_set(name.encode()))

    def run(self, args: ctypes.Structure, num_threads: int) -> None:
        """Run the op whose struct ``args`` is, on up to ``num_threads`` threads."""
        self._hr_run(OP_NUMBERS[type(args)], ctypes.addressof(args), num_threads)

    def run_program(
        self,
        calls: ctypes.Array[Call],
        values: ctypes.Array[c_void_p],
        num_rows: int,
        num_threads: int,
    ) -> None:
        """Run recorded ops over ``num_rows`` tokens, with the pointers ``values``."""
        self._library.hr_run_program(calls, len(calls), values, num_rows, num_threads)

    def _join_openmp(self) -> bool:
        """Hand over the parallel region of the runtime that torch uses; without one, kernels run on one thread.

        Two runtimes would keep two sets of threads, which take the cores from each other.
        """
        for scope in _openmp_scopes():
            try:
                functions = (scope.GOMP_parallel, scope.omp_get_thread_num, scope.omp_get_num_threads)
            except AttributeError:
                continue
            self._library.hr_use_openmp(*(ctypes.cast(function, c_void_p) for function in functions))
            return True
        logger.warning("torch's OpenMP runtime was not found: native kernels run on one thread")
        return False


def _openmp_scopes() -> list[ctypes.CDLL]:
    """Where to look for the runtime: among what is visible to all (preloaded ones win), then what torch brought."""
    scopes = [ctypes.CDLL(None)]
    library = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{_SUFFIX}"
    if library.exists():
        scopes.append(ctypes.CDLL(str(library)))
    return scopes


@cache
def load_library() -> NativeLibrary | str:
    """The library, or why there is none."""
    path = _FOLDER / f"libheadrace_native{_SUFFIX}"
    if not path.exists():
        return "they were not built (no C++ compiler when Headrace was installed?)"
    try:
        return NativeLibrary(path)
    except NativeError as error:
        return str(error)


def library() -> NativeLibrary:
    """The library, where it is known to be there."""
    loaded = load_library()
    assert isinstance(loaded, NativeLibrary), loaded
    return loaded


@cache
def warn_once(reason: str) -> None:
    """Say why plain torch ops run instead."""
    logger.warning("native CPU kernels are not used: %s; plain torch ops are slower", reason)
