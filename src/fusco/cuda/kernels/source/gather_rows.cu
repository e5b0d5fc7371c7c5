// Pack scattered rows into contiguous messages, one for each other node.
//
// One warp per row. Twin: torch.index_select.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, NUM_MESSAGES, ROW_BYTES, VECTOR_BYTES.
#include "base.cuh"

struct GatherArgs {
    const u8* rows;
    u8* messages[NUM_MESSAGES];
    const i32* places[NUM_MESSAGES];  // [i]: row that is the i-th of a message; -1 leaves it as it is
    i32 first_row[NUM_MESSAGES + 1];  // of each message in their concatenation; last, the total number of rows
};
static_assert(sizeof(GatherArgs) == ARGUMENT_BYTES, "gather_rows.py mirrors this struct");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gather_rows(const __grid_constant__ GatherArgs args) {
    using V = Vector<VECTOR_BYTES>;
    constexpr u32 NUM_VECTORS = ROW_BYTES / VECTOR_BYTES, UNROLL = 8;
    const u32 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    const u32 num_rows = args.first_row[NUM_MESSAGES];
    for (u32 row = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x; row < num_rows; row += num_warps) {
        u32 message = 0;
        while (row >= static_cast<u32>(args.first_row[message + 1])) ++message;
        const u32 i = row - args.first_row[message];
        const i32 place = args.places[message][i];
        if (place < 0) continue;
        const auto* const from = reinterpret_cast<const V*>(args.rows + static_cast<u64>(place) * ROW_BYTES);
        auto* const to = reinterpret_cast<V*>(args.messages[message] + static_cast<u64>(i) * ROW_BYTES);
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
