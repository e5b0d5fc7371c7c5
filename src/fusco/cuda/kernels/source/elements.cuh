// Row elements: storage, widening to the accumulation dtype, and rounding back, for each dtype.
#pragma once

#include "base.cuh"

enum ElementType { BF16, F16, F32, F64 };

// Products are rounded, never fused into a multiply-add, so sums equal those of the CPU backend bit for bit.
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }

template <ElementType TYPE> struct Element;

template <> struct Element<BF16> {
    using Bits = u16;
    using Sum = float;
    static __device__ __forceinline__ Sum widen(Bits bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
    static __device__ __forceinline__ Bits round(Sum sum) { return round_to_bf16(sum); }
};
template <> struct Element<F16> {
    using Bits = u16;
    using Sum = float;
    static __device__ __forceinline__ Sum widen(Bits bits) { return widen_f16(bits); }
    static __device__ __forceinline__ Bits round(Sum sum) { return round_to_f16(sum); }
};
template <> struct Element<F32> {
    using Bits = float;
    using Sum = float;
    static __device__ __forceinline__ Sum widen(Bits value) { return value; }
    static __device__ __forceinline__ Bits round(Sum sum) { return sum; }
};
template <> struct Element<F64> {
    using Bits = double;
    using Sum = double;
    static __device__ __forceinline__ Sum widen(Bits value) { return value; }
    static __device__ __forceinline__ Bits round(Sum sum) { return sum; }
};

// `NUM` elements that one lane moves: a power of two bytes, in accesses of at most 16 bytes.
template <typename E, int NUM> struct Pack {
    static constexpr int BYTES = sizeof(typename E::Bits) * NUM;
    static constexpr int ACCESS_BYTES = BYTES < 16 ? BYTES : 16;
    static constexpr int NUM_ACCESSES = BYTES / ACCESS_BYTES;
    union {
        typename E::Bits bits[NUM];
        Vector<ACCESS_BYTES> vectors[NUM_ACCESSES];
    };

    __device__ __forceinline__ void load_constant(const void* at) {
#pragma unroll
        for (int i = 0; i < NUM_ACCESSES; ++i)
            vectors[i] = load_constant_row(static_cast<const Vector<ACCESS_BYTES>*>(at) + i);
    }
    __device__ __forceinline__ void load_shared(const void* at) {
#pragma unroll
        for (int i = 0; i < NUM_ACCESSES; ++i)
            vectors[i] = load_shared_row(static_cast<const Vector<ACCESS_BYTES>*>(at) + i);
    }
    __device__ __forceinline__ void store(void* at) const {
#pragma unroll
        for (int i = 0; i < NUM_ACCESSES; ++i) store_row(static_cast<Vector<ACCESS_BYTES>*>(at) + i, vectors[i]);
    }
    __device__ __forceinline__ void round_from(const typename E::Sum (&sums)[NUM]) {
#pragma unroll
        for (int i = 0; i < NUM; ++i) bits[i] = E::round(sums[i]);
    }
    __device__ __forceinline__ void add_to(typename E::Sum (&sums)[NUM], typename E::Sum weight) const {
#pragma unroll
        for (int i = 0; i < NUM; ++i) sums[i] += multiply(weight, E::widen(bits[i]));
    }
};
