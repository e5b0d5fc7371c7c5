// Copy and fill bytes, in accesses as wide as addresses and sizes allow, by THREADS threads: all of a block, or of a warp.
#pragma once

#include "base.cuh"

// A thread has several loads under way, as these are not moved past its stores.
template <i32 BYTES, i32 THREADS> __device__ __forceinline__ void copy_as(const u8* src, u8* dst, i64 num_bytes, u32 thread) {
    constexpr i32 ROUNDS = 8;
    const auto* const from = reinterpret_cast<const Vector<BYTES>*>(src);
    auto* const to = reinterpret_cast<Vector<BYTES>*>(dst);
    const i64 end = num_bytes / BYTES;
    for (i64 first = thread; first < end; first += ROUNDS * THREADS) {
        Vector<BYTES> held[ROUNDS];
#pragma unroll
        for (i32 u = 0; u < ROUNDS; ++u)
            if (first + u * THREADS < end) held[u] = load_shared_row(from + first + u * THREADS);
#pragma unroll
        for (i32 u = 0; u < ROUNDS; ++u)
            if (first + u * THREADS < end) store_row(to + first + u * THREADS, held[u]);
    }
}

template <i32 THREADS> __device__ __forceinline__ void copy_bytes(const u8* src, u8* dst, i64 num_bytes, u32 thread) {
    const u64 alignment = reinterpret_cast<u64>(src) | reinterpret_cast<u64>(dst) | static_cast<u64>(num_bytes);
    if (alignment % 16 == 0) copy_as<16, THREADS>(src, dst, num_bytes, thread);
    else if (alignment % 4 == 0) copy_as<4, THREADS>(src, dst, num_bytes, thread);
    else copy_as<1, THREADS>(src, dst, num_bytes, thread);
}

template <i32 THREADS> __device__ __forceinline__ void fill_bytes(u8* dst, u8 value, i64 num_bytes, u32 thread) {
    const u32 word = value * 0x01010101u;
    const bool is_wide = (reinterpret_cast<u64>(dst) | static_cast<u64>(num_bytes)) % 16 == 0;
    for (i64 i = thread; is_wide && i < num_bytes / 16; i += THREADS)
        store_row(reinterpret_cast<Vector<16>*>(dst) + i, {{word, word, word, word}});
    for (i64 i = thread; !is_wide && i < num_bytes; i += THREADS) dst[i] = value;
}
