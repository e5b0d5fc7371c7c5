// Copy one contiguous chunk between two memories that this GPU can access: its own, a peer's, or pinned host memory.
//
// Compile-time constants: NUM_THREADS.
#include "base.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_chunk(u64 to, u64 from, i64 num_bytes) {
    const i64 first = static_cast<i64>(blockIdx.x) * NUM_THREADS + threadIdx.x;
    const i64 stride = static_cast<i64>(gridDim.x) * NUM_THREADS;
    const bool is_aligned = (to | from) % 16 == 0;
    const i64 num_wide = is_aligned ? num_bytes / 16 : 0;
    const auto* src = reinterpret_cast<const Vector<16>*>(from);
    auto* dst = reinterpret_cast<Vector<16>*>(to);
    i64 i = first;
    for (; i + 3 * stride < num_wide; i += 4 * stride) {  // four loads in flight
        Vector<16> held[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) held[j] = load_shared_row(src + i + j * stride);
#pragma unroll
        for (int j = 0; j < 4; ++j) dst[i + j * stride] = held[j];
    }
    for (; i < num_wide; i += stride) dst[i] = load_shared_row(src + i);
    const auto* src_bytes = reinterpret_cast<const u8*>(from);
    for (i64 b = 16 * num_wide + first; b < num_bytes; b += stride) reinterpret_cast<u8*>(to)[b] = src_bytes[b];
}
