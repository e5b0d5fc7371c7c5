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
_WORD = ir.IntType(32)


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


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


@intrinsic
def bits_of(_typing: Any, value: Any) -> Any:
    """Return the bits of a float32, uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(_typing: Any, bits: Any) -> Any:
    """Return the float32 that has these bits, uint32."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def larger_magnitude(_typing: Any, bits: Any, value: Any) -> Any:
    """Return the larger of ``bits``, uint32, and those of a float32 without its sign: infinity, then NaN, is above."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        magnitude = builder.and_(builder.bitcast(args[1], _WORD), _word(0x7FFFFFFF))
        return builder.select(builder.icmp_unsigned(">", magnitude, args[0]), magnitude, args[0])

    return types.uint32(types.uint32, types.float32), generate


@intrinsic
def e4m3_code(_typing: Any, value: Any) -> Any:
    """Round a float32 to e4m3, uint8: to nearest, ties to even, at most 448; 0x7f for NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        code, is_nan = _small_float(builder, args[0], mantissa=3, bias=7, largest=0x43E00000, sign_bit=7)
        return builder.trunc(builder.select(is_nan, _word(0x7F), code), ir.IntType(8))

    return types.uint8(types.float32), generate


@intrinsic
def e2m1_code(_typing: Any, value: Any) -> Any:
    """Round a float32 to e2m1, uint8: to nearest, ties to even, at most 6; 7 for NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        code, is_nan = _small_float(builder, args[0], mantissa=1, bias=1, largest=0x40C00000, sign_bit=3)
        return builder.trunc(builder.select(is_nan, _word(7), code), ir.IntType(8))

    return types.uint8(types.float32), generate


def _small_float(builder: Any, value: Any, *, mantissa: int, bias: int, largest: int, sign_bit: int) -> tuple[Any, Any]:
    """Return the code of a float32 in a format of few bits, 32 bits wide, and whether it is NaN.

    Numba widens integers to 64 bits, with which vectors are half as long. Normal values round by an addition to their
    bits; subnormal ones by one to the float whose spacing is theirs.
    """
    shift = 23 - mantissa
    bits = builder.bitcast(value, _WORD)
    magnitude = builder.and_(bits, _word(0x7FFFFFFF))
    limited = builder.select(builder.icmp_unsigned("<", magnitude, _word(largest)), magnitude, _word(largest))
    odd = builder.and_(builder.lshr(limited, _word(shift)), _word(1))
    rounded = builder.add(builder.add(limited, _word((1 << (shift - 1)) - 1)), odd)
    normal = builder.sub(builder.lshr(rounded, _word(shift)), _word((127 - bias) << mantissa))
    spaced = (127 + 24 - bias - mantissa) << 23
    sum_ = builder.fadd(builder.bitcast(limited, ir.FloatType()), builder.bitcast(_word(spaced), ir.FloatType()))
    subnormal = builder.sub(builder.bitcast(sum_, _WORD), _word(spaced))
    is_normal = builder.icmp_unsigned(">=", limited, _word((128 - bias) << 23))
    sign = builder.shl(builder.lshr(bits, _word(31)), _word(sign_bit))
    code = builder.or_(builder.select(is_normal, normal, subnormal), sign)
    return code, builder.icmp_unsigned(">", magnitude, _word(0x7F800000))
