// Codes of 8 and 4 bits: rounding from float32, and back; scales of blocks. All as cpu/kernels/quantize_rows.py, bit for bit.
#pragma once

#include "base.cuh"

constexpr u32 INFINITY_BITS = 0x7f800000u, MAGNITUDE = 0x7fffffffu;
constexpr u32 E4M3_NAN = 0x7f, E8M0_NAN = 0xff;

// Rounds a float to nearest, ties to even, at most LARGEST (as bits of a float), with a sign; whatever for NaN. Normal values
// round by an addition to their bits; subnormal ones by one to the float whose spacing is theirs.
template <u32 MANTISSA, u32 BIAS, u32 LARGEST, u32 SIGN_BIT> __device__ __forceinline__ u32 small_code(float value) {
    constexpr u32 SHIFT = 23 - MANTISSA, SPACED = (127 + 24 - BIAS - MANTISSA) << 23;
    const u32 bits = __float_as_uint(value), limited = min(bits & MAGNITUDE, LARGEST);
    const u32 normal = ((limited + (1u << (SHIFT - 1)) - 1 + (limited >> SHIFT & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA);
    const u32 subnormal = __float_as_uint(__uint_as_float(limited) + __uint_as_float(SPACED)) - SPACED;
    return (limited >= (128 - BIAS) << 23 ? normal : subnormal) | bits >> 31 << SIGN_BIT;
}
__device__ __forceinline__ bool is_nan(float value) { return (__float_as_uint(value) & MAGNITUDE) > INFINITY_BITS; }

__device__ __forceinline__ u32 e4m3_code(float value) {
    return is_nan(value) ? E4M3_NAN : small_code<3, 7, 0x43e00000u, 7>(value);
}
__device__ __forceinline__ u32 e2m1_code(float value) {
    return is_nan(value) ? 7 : small_code<1, 1, 0x40c00000u, 3>(value);
}

// Four e4m3 codes, the first in the low byte. From sm_89 on there is an instruction for two.
__device__ __forceinline__ u32 e4m3_codes(const float (&values)[4]) {
#if __CUDA_ARCH__ >= 890
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values[1]), "f"(values[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(values[3]), "f"(values[2]));
    const u32 codes = static_cast<u32>(high) << 16 | low;
    return codes & ~((codes & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u);  // no signs of NaN
#else
    return e4m3_code(values[0]) | e4m3_code(values[1]) << 8 | e4m3_code(values[2]) << 16 | e4m3_code(values[3]) << 24;
#endif
}

enum ScaleRule { AMAX, POWER_OF_TWO, MX_FLOOR, MX_CEIL, NVFP4 };

struct BlockScale {
    u32 bits;      // of a float32, of e4m3, or an exponent
    float factor;  // of the block's columns
};

// The biased exponent of the next power of two that is not smaller; 0 is 2**-127.
__device__ __forceinline__ u32 exponent_above(float value) {
    const u32 bits = __float_as_uint(value), exponent = bits >> 23;
    return exponent + ((bits & 0x7fffffu) > (exponent ? 0 : 0x400000u));
}

// `largest` is the largest absolute value of a block, as bits: those of NaN are above those of infinity.
template <ScaleRule RULE> __device__ __forceinline__ BlockScale scale_of(u32 largest, float global_scale) {
    const float nan = __uint_as_float(INFINITY_BITS | 1), amax = __uint_as_float(largest);
    if constexpr (RULE == AMAX || RULE == POWER_OF_TWO) {
        const float scale = __fdiv_rn(amax < 1e-4f ? 1e-4f : amax, 448.0f);
        if constexpr (RULE == AMAX) return {__float_as_uint(scale), __fdiv_rn(1.0f, scale)};
        const u32 exponent = min(max(exponent_above(scale), 1u), 254u);
        return {exponent, __fdiv_rn(1.0f, __uint_as_float(exponent << 23))};
    } else if constexpr (RULE == NVFP4) {
        const float wanted = __fdiv_rn(__fdiv_rn(amax, 6.0f), global_scale);
        const u32 code = e4m3_code(wanted < 0.015625f ? 0.015625f : wanted);
        if (code == E4M3_NAN) return {code, nan};
        return {code, __fdiv_rn(__fdiv_rn(1.0f, global_scale), __uint_as_float((code << 20) + (120u << 23)))};
    } else {
        if (largest >= INFINITY_BITS) return {E8M0_NAN, nan};
        u32 exponent = largest >> 23;
        exponent = exponent > 8 ? exponent - 8 : 0;
        if constexpr (RULE == MX_CEIL) exponent = exponent_above(__fmul_rn(amax, static_cast<float>(1 / 448.0)));
        return {exponent, __uint_as_float((254 - exponent) << 23)};
    }
}
