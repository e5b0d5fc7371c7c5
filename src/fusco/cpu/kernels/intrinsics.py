"""Machine-level operations that numba lacks.

16-bit floats are passed as integers of their bits: uint16 for bfloat16, int16 for float16, since NumPy has no bfloat16
and numba supports neither.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def copy_memory(_typing: Any, dst: Any, src: Any, num_bytes: Any) -> Any:
    """Call ``memcpy`` between two addresses, int64."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, origin = (builder.inttoptr(address, _BYTE_POINTER) for address in args[:2])
        cgutils.raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def pointer_to(_typing: Any, address: Any) -> Any:
    """Return a pointer to an address, int64, for ``numba.carray``."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _BYTE_POINTER)

    return types.voidptr(types.int64), generate


@intrinsic
def widen(_typing: Any, value: Any) -> Any:
    """Widen a value for accumulation: bits of bfloat16 or float16 to float32, other floats unchanged."""
    is_bits = value in (types.uint16, types.int16)

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.uint16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        if value == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return (types.float32 if is_bits else value)(value), generate
