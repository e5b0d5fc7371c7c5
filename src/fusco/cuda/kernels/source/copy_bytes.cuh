// Copy and fill bytes by all threads of a block, in accesses as wide as addresses and sizes allow.
//
// Compile-time constants: NUM_THREADS.
#pragma once

#include "base.cuh"

template <int BYTES> __device__ __forceinline__ void copy_as(const u8* src, u8* dst, i64 num_bytes) {
    const auto* from = reinterpret_cast<const Vector<BYTES>*>(src);
    auto* to = reinterpret_cast<Vector<BYTES>*>(dst);
    for (i64 i = threadIdx.x; i < num_bytes / BYTES; i += NUM_THREADS) store_row(to + i, load_shared_row(from + i));
}

__device__ __forceinline__ void copy_bytes(const u8* src, u8* dst, i64 num_bytes) {
    const u64 alignment = reinterpret_cast<u64>(src) | reinterpret_cast<u64>(dst) | static_cast<u64>(num_bytes);
    if (alignment % 16 == 0) copy_as<16>(src, dst, num_bytes);
    else if (alignment % 4 == 0) copy_as<4>(src, dst, num_bytes);
    else copy_as<1>(src, dst, num_bytes);
}

__device__ __forceinline__ void fill_bytes(u8* dst, u8 value, i64 num_bytes) {
    const u32 word = value * 0x01010101u;
    const bool is_wide = (reinterpret_cast<u64>(dst) | static_cast<u64>(num_bytes)) % 16 == 0;
    for (i64 i = threadIdx.x; is_wide && i < num_bytes / 16; i += NUM_THREADS)
        store_row(reinterpret_cast<Vector<16>*>(dst) + i, {{word, word, word, word}});
    for (i64 i = threadIdx.x; !is_wide && i < num_bytes; i += NUM_THREADS) dst[i] = value;
}
