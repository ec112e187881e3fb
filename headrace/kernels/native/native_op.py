"""NativeOp: an op, made of the function that fills its struct in."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from headrace.kernels.native.run import run

P = ParamSpec("P")
Args = TypeVar("Args", bound=ctypes.Structure)


class NativeOp(Generic[P, Args]):
    """Has the function's name, module and parameters, and runs the op instead of returning its struct.

    Attributes:
        fill: the function. The struct points into its arguments, which must outlive it.
    """

    def __init__(self, fill: Callable[P, Args], num_elements: Callable[..., int]) -> None:
        self.fill = fill
        self._num_elements = num_elements
        functools.update_wrapper(self, fill)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        run(self.fill(*args, **kwargs), self._num_elements(*args, **kwargs))


def native_op(num_elements: Callable[..., int]) -> Callable[[Callable[P, Args]], NativeOp[P, Args]]:
    """Makes an op of a function that fills its struct in.

    num_elements: about how many numbers it touches, of the same arguments (see ``run``).
    """
    return lambda fill: NativeOp(fill, num_elements)
