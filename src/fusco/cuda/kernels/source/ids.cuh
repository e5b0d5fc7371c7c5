// Ids of experts, as routers give them.
//
// Compile-time constants: ID_BYTES (4, 8), NUM_THREADS.
#pragma once

#include "base.cuh"

__device__ __forceinline__ i64 id_at(const void* ids, i64 pair) {
    return ID_BYTES == 8 ? static_cast<const i64*>(ids)[pair] : static_cast<const i32*>(ids)[pair];
}

// Count those of the first ids for which `find` returns no negative index, by that index, in shared memory, by all threads
// of a block. A thread has several loads under way, also those of `find`.
template <typename F> __device__ __forceinline__ void count_ids(const void* ids, i64 num_pairs, i32* counts, F&& find) {
    constexpr i32 ROUNDS = 8;
    for (i64 first = threadIdx.x; first < num_pairs; first += ROUNDS * NUM_THREADS) {
        i64 held[ROUNDS];
        i32 found[ROUNDS];
#pragma unroll
        for (i32 u = 0; u < ROUNDS; ++u) {
            const i64 pair = first + u * NUM_THREADS;
            held[u] = pair < num_pairs ? id_at(ids, pair) : -1;
        }
#pragma unroll
        for (i32 u = 0; u < ROUNDS; ++u) found[u] = find(held[u]);
#pragma unroll
        for (i32 u = 0; u < ROUNDS; ++u)
            if (found[u] >= 0) atomicAdd(counts + found[u], 1);
    }
}
