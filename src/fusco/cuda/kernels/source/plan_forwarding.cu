// List the tokens for each other node in order of token, and pack their routing into messages, one block per node.
//
// The block of this node searches for invalid expert ids instead. Twin: tests/reference/plan_forwarding.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_TOPK, ID_BYTES (4, 8), WEIGHT_BYTES (0, 4, 8), NUM_THREADS.
#include "ids.cuh"

struct ForwardingArgs {
    const u8* topk_idx;
    const u8* topk_weights;
    const i32* expert_to_node;
    i32* node_to_tokens;  // [node][num_tokens + 1]: the tokens for a node; then -1 as far as its message goes
    i32* token_to_place;  // [node][num_tokens]: index of a token among those; -1 if none
    u8* messages;         // [other node][message_bytes]: weights, then i32 ids, of its tokens; ids of other nodes are -1
    u64* summary;         // in host memory: the words of ForwardingSummary
    u64 message_bytes;
    i32 num_tokens, num_experts, num_nodes, own_node;
    i32 max_rows;             // tokens for a node beyond these are left out
    i32 is_fixed;             // every message has max_rows rows, those after its tokens without ids
    i32 is_overflow_reported;
    i32 sends_invalid_ids;  // if this rank has an invalid id, its messages carry only the invalid ids
    u64 ticket;  // below 2**32
};
static_assert(sizeof(ForwardingArgs) == ARGUMENT_BYTES, "plan_forwarding.py mirrors this struct");

constexpr u32 NUM_WARPS = NUM_THREADS / WARP_SIZE;

__device__ __forceinline__ bool is_on_node(const ForwardingArgs& args, i64 id, i32 node) {
    return id >= 0 && id < args.num_experts && args.expert_to_node[id] == node;
}

__device__ __forceinline__ bool is_invalid(const ForwardingArgs& args, i64 id) { return id < -1 || id >= args.num_experts; }

// The host polls these words: each is complete as soon as it has the ticket.
__device__ __forceinline__ void tell(const ForwardingArgs& args, i32 word, i32 value) {
    __threadfence_system();
    reinterpret_cast<volatile u64*>(args.summary)[word] = args.ticket << 32 | static_cast<u32>(value);
}

__device__ void report_invalid_ids(const ForwardingArgs& args) {
    __shared__ i32 first;
    const i32 num_pairs = args.num_tokens * NUM_TOPK;
    if (threadIdx.x == 0) first = num_pairs;
    __syncthreads();
    for (i32 pair = threadIdx.x; pair < num_pairs; pair += NUM_THREADS) {
        if (is_invalid(args, id_at(args.topk_idx, pair))) {
            atomicMin(&first, pair);
            break;
        }
    }
    i32* const places = args.token_to_place + static_cast<i64>(args.own_node) * args.num_tokens;
    for (i32 token = threadIdx.x; token < args.num_tokens; token += NUM_THREADS) places[token] = -1;
    __syncthreads();
    if (threadIdx.x == 0) {
        args.summary[args.num_nodes] = first < num_pairs ? id_at(args.topk_idx, first) : 0;
        tell(args, args.own_node, first);
    }
}

// Return how many tokens are for a node; all of them are counted, and no more than max_rows listed. Set `has_invalid` if
// this thread sees an invalid id.
__device__ i32 list_tokens(const ForwardingArgs& args, i32 node, i32* tokens, bool& has_invalid) {
    __shared__ i32 warp_counts[NUM_WARPS];
    const u32 warp = threadIdx.x / WARP_SIZE, lane = lane_index();
    i32* const places = args.token_to_place + static_cast<i64>(node) * args.num_tokens;
    i32 num_found = 0;
    for (i32 first = 0; first < args.num_tokens; first += NUM_THREADS) {
        const i32 token = first + threadIdx.x;
        bool is_wanted = false;
        if (token < args.num_tokens)
            for (u32 k = 0; k < NUM_TOPK; ++k) {
                const i64 id = id_at(args.topk_idx, token * NUM_TOPK + k);
                is_wanted |= is_on_node(args, id, node);
                has_invalid |= is_invalid(args, id);
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
        const bool is_listed = is_wanted && place < args.max_rows;
        if (token < args.num_tokens) places[token] = is_listed ? place : -1;
        if (is_listed) tokens[place] = token;
        num_found += all;
    }
    return num_found;
}

// Pack the routing of a message. If it `is_rejected`, its rows are this rank's tokens, so that the rank which receives it
// can say which pair is invalid; there are as many.
__device__ void pack_routing(const ForwardingArgs& args, i32 node, i32 num_listed, i32* tokens, bool is_rejected) {
    const i32 num_rows = args.is_fixed ? args.max_rows : num_listed;
    u8* const weights = args.messages + (node - (node > args.own_node)) * args.message_bytes;
    auto* const ids = reinterpret_cast<i32*>(weights + static_cast<u64>(num_rows) * NUM_TOPK * WEIGHT_BYTES);
#pragma unroll 4
    for (i32 pair = threadIdx.x; pair < num_rows * NUM_TOPK; pair += NUM_THREADS) {
        const i32 row = pair / NUM_TOPK, k = pair % NUM_TOPK;
        i32 id = -1;
        if (row < num_listed && !is_rejected) {
            const i32 from = tokens[row] * NUM_TOPK + k;
            const i64 given = id_at(args.topk_idx, from);
            if (is_on_node(args, given, node)) id = static_cast<i32>(given);
#if WEIGHT_BYTES == 4
            reinterpret_cast<u32*>(weights)[pair] = reinterpret_cast<const u32*>(args.topk_weights)[from];
#elif WEIGHT_BYTES == 8
            reinterpret_cast<u64*>(weights)[pair] = reinterpret_cast<const u64*>(args.topk_weights)[from];
#endif
        }
        if (row >= num_listed && k == 0) tokens[row] = -1;
        if (is_rejected) {
            const i64 given = id_at(args.topk_idx, pair);
            if (is_invalid(args, given)) id = given < 0 ? max(given, -0x7fffffffll) : min(given, 0x7fffffffll);  // as in plan
        }
        ids[pair] = id;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) plan_forwarding(const __grid_constant__ ForwardingArgs args) {
    const i32 node = blockIdx.x;
    if (node == args.own_node) {
        report_invalid_ids(args);
        return;
    }
    i32* const tokens = args.node_to_tokens + static_cast<i64>(node) * (args.num_tokens + 1);
    bool has_invalid = false;
    const i32 num_found = list_tokens(args, node, tokens, has_invalid);
    if (threadIdx.x == 0) {
        volatile u64* const overflow = args.summary + args.num_nodes + 1 + node;
        if (num_found > args.max_rows && args.is_overflow_reported && *overflow == 0)
            *overflow = static_cast<u64>(num_found) << 32 | static_cast<u32>(args.max_rows);
        tell(args, node, num_found);
    }
    const bool is_rejected = !__syncthreads_and(!has_invalid) && args.sends_invalid_ids;  // and all tokens are listed
    pack_routing(args, node, min(num_found, args.max_rows), tokens, is_rejected);
}
