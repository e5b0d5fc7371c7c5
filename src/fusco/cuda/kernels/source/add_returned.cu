// Last step of combine between nodes: add the sums that other nodes returned to this node's sum of each token.
//
// One warp per token. Sums are in float32 (float64 for float64 rows): this node's first, then those of the other nodes in
// order. Twin: tests/reference/add_returned.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_THREADS, NUM_REMOTE, HIDDEN, ROW_TYPE, WIRE_TYPE, VECTOR_ELEMENTS.
#include "comm.cuh"
#include "elements.cuh"

struct ReturnedArgs {
    Comm comm;
    const u8* own;                   // [token], as accumulated
    const u8* returned[NUM_REMOTE];  // [place], in the wire dtype
    const i32* places[NUM_REMOTE];   // [token]: index of its row among those returned; -1 if none
    u8* out;                         // [token]
    i32 num_tokens;
};
static_assert(sizeof(ReturnedArgs) == ARGUMENT_BYTES, "add_returned.py mirrors this struct");

using Row = Element<ROW_TYPE>;
using Wire = Element<WIRE_TYPE>;
using Sum = Row::Sum;
constexpr u32 N = VECTOR_ELEMENTS, NUM_VECTORS = HIDDEN / N, UNROLL = 2;
using RowPack = Pack<Row, N>;
using WirePack = Pack<Wire, N>;
using SumPack = Pack<Element<sizeof(Sum) == 8 ? F64 : F32>, N>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) add_returned(const __grid_constant__ ReturnedArgs args) {
    const Comm& comm = args.comm;
    const bool is_defined = has_network_arrived(comm, comm.state[COMBINE_EPOCH]) && !is_broken(comm);
    const u32 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    const u64 first_token = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x;
    for (u64 token = first_token; token < static_cast<u64>(args.num_tokens); token += num_warps) {
        i32 places[NUM_REMOTE];
#pragma unroll
        for (u32 node = 0; node < NUM_REMOTE; ++node) places[node] = args.places[node][token];
        for (u32 first = lane_index(); first < NUM_VECTORS; first += UNROLL * WARP_SIZE) {
            Sum sums[UNROLL][N] = {};
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < NUM_VECTORS) {
                    SumPack own;
                    own.load_constant(args.own + (token * NUM_VECTORS + first + u * WARP_SIZE) * SumPack::BYTES);
                    own.add_to(sums[u], 1);
                }
#pragma unroll
            for (u32 node = 0; node < NUM_REMOTE; ++node) {
                if (places[node] < 0) continue;
                const u64 row = static_cast<u64>(places[node]) * NUM_VECTORS;
#pragma unroll
                for (u32 u = 0; u < UNROLL; ++u)
                    if (first + u * WARP_SIZE < NUM_VECTORS) {
                        WirePack held;
                        held.load_constant(args.returned[node] + (row + first + u * WARP_SIZE) * WirePack::BYTES);
                        held.add_to(sums[u], 1);
                    }
            }
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < NUM_VECTORS) {
                    RowPack pack;
                    pack.round_from(sums[u]);
                    pack.store(args.out + (token * NUM_VECTORS + first + u * WARP_SIZE) * RowPack::BYTES);
                }
        }
    }
    if (block_exits(comm.state + NUM_DONE, is_defined) == Exit::BROKEN)
        block_poisons(args.out, args.num_tokens * static_cast<u64>(HIDDEN) * sizeof(Row::Bits));
}
