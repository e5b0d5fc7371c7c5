// List the tokens for each other node in order of token, one block per node.
//
// The block of this node searches for invalid expert ids instead. Twin: fusco.reference.plan_forwarding.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_TOPK, ID_BYTES (4, 8), NUM_THREADS.
#include "base.cuh"

struct ForwardingArgs {
    const u8* topk_idx;
    const i32* expert_to_node;
    i32* node_to_tokens;  // [node][num_tokens + 1]: the tokens for a node; the rest is undefined
    i32* token_to_place;  // [node][num_tokens]: index of a token among those; -1 if none
    i64* summary;         // in host memory: [node] number of tokens for each node; the first invalid pair; its expert id
    i32 num_tokens, num_experts, num_nodes, own_node;
};
static_assert(sizeof(ForwardingArgs) == ARGUMENT_BYTES, "plan_forwarding.py mirrors this struct");

constexpr u32 NUM_WARPS = NUM_THREADS / WARP_SIZE;

__device__ __forceinline__ i64 id_of(const ForwardingArgs& args, i32 pair) {
    return ID_BYTES == 8 ? reinterpret_cast<const i64*>(args.topk_idx)[pair]
                         : reinterpret_cast<const i32*>(args.topk_idx)[pair];
}

__device__ void report_invalid_ids(const ForwardingArgs& args) {
    __shared__ i32 first;
    const i32 num_pairs = args.num_tokens * NUM_TOPK;
    if (threadIdx.x == 0) first = num_pairs;
    __syncthreads();
    for (i32 pair = threadIdx.x; pair < num_pairs; pair += NUM_THREADS) {
        const i64 id = id_of(args, pair);
        if (id < -1 || id >= args.num_experts) {
            atomicMin(&first, pair);
            break;
        }
    }
    i32* const places = args.token_to_place + static_cast<i64>(args.own_node) * args.num_tokens;
    for (i32 token = threadIdx.x; token < args.num_tokens; token += NUM_THREADS) places[token] = -1;
    __syncthreads();
    if (threadIdx.x == 0) {
        args.summary[args.own_node] = 0;
        args.summary[args.num_nodes] = first;
        args.summary[args.num_nodes + 1] = first < num_pairs ? id_of(args, first) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) plan_forwarding(const __grid_constant__ ForwardingArgs args) {
    const i32 node = blockIdx.x;
    if (node == args.own_node) {
        report_invalid_ids(args);
        return;
    }
    __shared__ i32 warp_counts[NUM_WARPS];
    const u32 warp = threadIdx.x / WARP_SIZE, lane = lane_index();
    i32* const tokens = args.node_to_tokens + static_cast<i64>(node) * (args.num_tokens + 1);
    i32* const places = args.token_to_place + static_cast<i64>(node) * args.num_tokens;
    i32 num_found = 0;
    for (i32 first = 0; first < args.num_tokens; first += NUM_THREADS) {
        const i32 token = first + threadIdx.x;
        bool is_wanted = false;
        if (token < args.num_tokens)
            for (u32 k = 0; k < NUM_TOPK; ++k) {
                const i64 id = id_of(args, token * NUM_TOPK + k);
                is_wanted |= id >= 0 && id < args.num_experts && args.expert_to_node[id] == node;
            }
        const u32 wanted = __ballot_sync(ALL_LANES, is_wanted);
        if (lane == 0) warp_counts[warp] = __popc(wanted);
        __syncthreads();
        i32 before = 0, all = 0;
        for (u32 w = 0; w < NUM_WARPS; ++w) {
            all += warp_counts[w];
            if (w < warp) before += warp_counts[w];
        }
        __syncthreads();  // before the next round's counts
        const i32 place = num_found + before + __popc(wanted & ((1u << lane) - 1));
        if (token < args.num_tokens) places[token] = is_wanted ? place : -1;
        if (is_wanted) tokens[place] = token;
        num_found += all;
    }
    if (threadIdx.x == 0) args.summary[node] = num_found;
}
