// Packing: rows that stand scattered, one behind the other into one message.
//
// Work goes by warps, one row at a time. Twin: torch.index_select.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, ROW_BYTES, VECTOR_BYTES.
#include "base.cuh"

struct GatherArgs {
    const u8* rows;
    u8* message;
    const i32* places;  // which row comes first, second, ...
    i32 num_rows;       // of the message
};
static_assert(sizeof(GatherArgs) == ARGUMENT_BYTES, "arguments.py mirrors this struct");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gather_rows(const __grid_constant__ GatherArgs args) {
    using V = Vector<VECTOR_BYTES>;
    constexpr u32 NUM_VECTORS = ROW_BYTES / VECTOR_BYTES, UNROLL = 8;
    const u32 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    for (u32 i = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x; i < static_cast<u32>(args.num_rows); i += num_warps) {
        const auto* const from = reinterpret_cast<const V*>(args.rows + static_cast<u64>(args.places[i]) * ROW_BYTES);
        auto* const to = reinterpret_cast<V*>(args.message + static_cast<u64>(i) * ROW_BYTES);
        for (u32 first = lane_index(); first < NUM_VECTORS; first += UNROLL * WARP_SIZE) {
            V held[UNROLL];
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < NUM_VECTORS) held[u] = load_constant_row(from + first + u * WARP_SIZE);
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < NUM_VECTORS) store_row(to + first + u * WARP_SIZE, held[u]);
        }
    }
}
