// Dispatch: write each of this rank's rows to its slots here, and push it to each rank of the node that wants it, where it is
// written to its slots there.
//
// A row crosses each link at most once, and is read from this rank's memory once. One warp per row, or per part of a row.
// Of few rows, each warp pushes a first one while the plan is made, to the ranks that this rank's routing names, and writes
// it to its slots here afterwards. Twin: tests/reference/scatter_rows.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_TOPK, NUM_PAYLOADS, PAYLOAD_BYTES and VECTOR_BYTES (lists with an
// entry for each payload), MAX_PARTS, NUM_THREADS, UNROLL, IS_STREAMED (1 if the outputs exceed the caches), IS_EARLY (1 if
// the kernel ahead is the plan, which this one does not wait for to begin).
#include "comm.cuh"

struct ScatterArgs {
    Comm comm;
    const u8* rows[NUM_PAYLOADS];            // of this rank
    u8* outputs[NUM_PAYLOADS];
    u64 received[NUM_RANKS][NUM_PAYLOADS];   // offset, in the arena of every rank, of the rows that a rank pushes there
    const i32* row_to_slots;
    const u32* token_to_ranks;
    const i32* block_to_first_slot;  // of each local expert, then the end of its block with the padding
    const i64* num_rows_per_expert;
    const u8* topk_idx;          // of this rank
    const i32* expert_to_rank;   // local rank; -1 for experts of other nodes
    i64 num_slots;
    i32 first_row[NUM_RANKS + 1];
    i32 num_local_experts;
    i32 longest;      // maximum number of tokens of a rank
    i32 parts;        // warps that share a row
    i32 num_senders;  // blocks that move this rank's rows before others'
    i32 id_bytes;     // of topk_idx: 4 or 8; this and the number of experts only if IS_EARLY
    i32 num_experts;
};
static_assert(sizeof(ScatterArgs) == ARGUMENT_BYTES, "scatter_rows.py mirrors this struct");

constexpr u64 ROW_BYTES[NUM_PAYLOADS] = {PAYLOAD_BYTES};
constexpr u32 WIDTHS[NUM_PAYLOADS] = {VECTOR_BYTES};

struct Targets {
    i32 slot;     // of the lane-th pair, or negative
    u32 filled;   // lanes that have a slot
    u32 peers;    // that want the row
};

// Vectors of a row that a lane holds: ROUNDS of them, from its first one on, as far as they are before the end.
template <u32 P, u32 ROUNDS> using Held = Vector<WIDTHS[P]>[ROUNDS];

// A row of this rank is constant; others were pushed.
template <bool IS_OWN, u32 P, u32 ROUNDS>
__device__ __forceinline__ void load(Held<P, ROUNDS>& held, const ScatterArgs& args, i32 src, i32 token, i32 first, i32 end) {
    const u8* const row = IS_OWN ? args.rows[P] + token * ROW_BYTES[P]
                                 : section<u8>(args.comm, args.comm.rank, args.received[src][P] + token * ROW_BYTES[P]);
    const auto* const from = reinterpret_cast<const Vector<WIDTHS[P]>*>(row);
#pragma unroll
    for (u32 u = 0; u < ROUNDS; ++u)
        if (first + u * WARP_SIZE < end)
            held[u] = IS_OWN ? load_constant_row(from + first + u * WARP_SIZE) : load_shared_row(from + first + u * WARP_SIZE);
}

template <u32 P, u32 ROUNDS, bool IS_LOCAL>
__device__ __forceinline__ void store(const Held<P, ROUNDS>& held, u8* row, i32 first, i32 end) {
    auto* const to = reinterpret_cast<Vector<WIDTHS[P]>*>(row);
#pragma unroll
    for (u32 u = 0; u < ROUNDS; ++u)
        if (first + u * WARP_SIZE < end) {
            if (IS_LOCAL && IS_STREAMED) stream_row(to + first + u * WARP_SIZE, held[u]);
            else store_row(to + first + u * WARP_SIZE, held[u]);
        }
}

template <bool IS_OWN, u32 P, u32 ROUNDS>
__device__ __forceinline__ void store_at_all(const Held<P, ROUNDS>& held, const ScatterArgs& args, i32 src, i32 token, i32 first,
                                             i32 end, const Targets& targets) {
    if (IS_OWN)
        for (u32 left = targets.peers; left; left &= left - 1)
            store<P, ROUNDS, false>(
                held, section<u8>(args.comm, __ffs(left) - 1, args.received[src][P] + token * ROW_BYTES[P]), first, end);
    for (u32 left = targets.filled; left; left &= left - 1) {
        const i64 slot = __shfl_sync(ALL_LANES, targets.slot, __ffs(left) - 1);
        store<P, ROUNDS, true>(held, args.outputs[P] + slot * ROW_BYTES[P], first, end);
    }
}

// Copy a part of a row to its slots, and to the memory of peers. Payloads of one vector for each lane at most, such as
// scales, are copied with the first part. They are loaded before wider ones are copied, and stored after: else a warp would
// wait for memory once more, which takes as long for few bytes as for many.
template <bool IS_OWN, bool IS_WIDE = false, u32 P = 0>
__device__ __forceinline__ void copy_payloads(const ScatterArgs& args, i32 src, i32 token, i32 part, const Targets& targets) {
    const i32 lane = static_cast<i32>(lane_index());
    if constexpr (P < NUM_PAYLOADS) {
        constexpr i32 NUM_VECTORS = ROW_BYTES[P] / WIDTHS[P];
        if constexpr (IS_WIDE != (NUM_VECTORS > static_cast<i32>(WARP_SIZE))) {
            copy_payloads<IS_OWN, IS_WIDE, P + 1>(args, src, token, part, targets);
        } else if constexpr (IS_WIDE) {
            const i32 per_part = (NUM_VECTORS + args.parts - 1) / args.parts;
            const i32 begin = part * per_part, end = min(NUM_VECTORS, begin + per_part);
            for (i32 first = begin + lane; first - lane < end; first += UNROLL * WARP_SIZE) {
                Held<P, UNROLL> held;
                load<IS_OWN, P, UNROLL>(held, args, src, token, first, end);
                store_at_all<IS_OWN, P, UNROLL>(held, args, src, token, first, end, targets);
            }
            copy_payloads<IS_OWN, true, P + 1>(args, src, token, part, targets);
        } else {
            Held<P, 1> held;
            if (!part) load<IS_OWN, P, 1>(held, args, src, token, lane, NUM_VECTORS);
            copy_payloads<IS_OWN, false, P + 1>(args, src, token, part, targets);
            if (!part) store_at_all<IS_OWN, P, 1>(held, args, src, token, lane, NUM_VECTORS, targets);
        }
    } else if constexpr (!IS_WIDE) {
        copy_payloads<IS_OWN, true, 0>(args, src, token, part, targets);
    }
}

__device__ __forceinline__ Targets targets_of(const ScatterArgs& args, i32 src, i32 token, u32 others) {
    const i32* const slots = args.row_to_slots + static_cast<i64>(args.first_row[src] + token) * NUM_TOPK;
    Targets targets = {};
    targets.slot = lane_index() < NUM_TOPK ? slots[lane_index()] : -1;
    targets.filled = __ballot_sync(ALL_LANES, targets.slot >= 0);
    if (src == args.comm.rank) targets.peers = args.token_to_ranks[token] & others;
    return targets;
}

// Peers that want a row, by this rank's routing: the plan marks the same.
__device__ __forceinline__ u32 peers_that_want(const ScatterArgs& args, i32 token, u32 others) {
    const i64 pair = static_cast<i64>(token) * NUM_TOPK + lane_index();
    i64 id = -1;
    if (lane_index() < NUM_TOPK)
        id = args.id_bytes == 8 ? reinterpret_cast<const i64*>(args.topk_idx)[pair]
                                : reinterpret_cast<const i32*>(args.topk_idx)[pair];
    const i32 rank = id >= 0 && id < args.num_experts ? args.expert_to_rank[id] : -1;
    return __reduce_or_sync(ALL_LANES, rank >= 0 ? 1u << rank : 0) & others;
}

// Experts' blocks are padded to the alignment; padding is zero. What is behind that, in blocks of a fixed size, is not written.
template <u32 P = 0> __device__ __forceinline__ void clear_slots(const ScatterArgs& args, i64 begin, i64 end) {
    if constexpr (P < NUM_PAYLOADS) {
        constexpr u64 PER_ROW = ROW_BYTES[P] / WIDTHS[P];
        auto* const output = reinterpret_cast<Vector<WIDTHS[P]>*>(args.outputs[P]);
        for (i64 i = begin * PER_ROW + threadIdx.x; i < end * PER_ROW; i += NUM_THREADS) store_row(output + i, {});
        clear_slots<P + 1>(args, begin, end);
    }
}
__device__ void clear_padding(const ScatterArgs& args) {
    for (i32 expert = blockIdx.x; expert < args.num_local_experts; expert += gridDim.x)
        clear_slots(args, args.block_to_first_slot[expert] + args.num_rows_per_expert[expert],
                    args.block_to_first_slot[args.num_local_experts + expert]);
}

template <u32 P = 0> __device__ __forceinline__ void poison_slots(const ScatterArgs& args) {
    if constexpr (P < NUM_PAYLOADS) {
        block_poisons(args.outputs[P], args.num_slots * ROW_BYTES[P]);
        poison_slots<P + 1>(args);
    }
}

// Wait for what this kernel reads of the one ahead, and return whether that has broken off: its results are not made then.
__device__ __forceinline__ u32 wait_for_plan(const Comm& comm) {
    wait_for_prerequisites();
    return *reinterpret_cast<volatile u32*>(comm.state + IS_BROKEN);
}

// Return false in warps that have given up.
__device__ __forceinline__ bool send_and_receive(const ScatterArgs& args, u32 epoch) {
    __shared__ i32 first_send;
    __shared__ i32 first_receive;
    __shared__ u32 others;  // not in registers, of which there are too few
    const Comm& comm = args.comm;
    if (threadIdx.x == 0) others = other_members(comm);
    const i32 num_sends = (args.first_row[comm.rank + 1] - args.first_row[comm.rank]) * args.parts;
    const i32 num_receives = args.longest * (NUM_RANKS - 1) * args.parts;
    const Beginning beginning(args.num_senders, num_sends, num_receives);
    beginning.take_all(comm, first_send, first_receive);
    const bool has_arrived = has_network_arrived(comm, epoch);
    if (!__syncthreads_and(block_waits_for_memory(comm, epoch - 1, comm.state[COMBINE_EPOCH]) && has_arrived)) return false;

    const i32 warp = threadIdx.x / WARP_SIZE, num_warps = gridDim.x * NUM_WARPS;
    // -1: none is taken. A warp never waits long for a row while there may be one to send, so there is no circular wait
    // between ranks.
    i32 send = beginning.send_of(warp, first_send), receive = beginning.receive_of(warp, first_receive);
    const bool sends_first = send >= 0;
    bool may_send = true;
    bool is_planned = !IS_EARLY, is_pushed = false;
    u32 is_plan_broken = 0;  // looked at when all rows are moved: the load takes as long as a row
    while (true) {
        if (send >= 0 && send < num_sends) {
            const i32 token = send / args.parts, part = send % args.parts;
            Targets targets = {};
            i32 next = num_sends;
            if (!IS_EARLY || is_planned) {
                if (!sends_first) next = -1;
                else if (beginning.has_more_sends) next = take(comm, NEXT_SEND, num_sends);
                targets = targets_of(args, comm.rank, token, others);
                if (is_pushed) targets.peers = 0;
            } else if (NUM_RANKS > 1) targets.peers = peers_that_want(args, token, others);
            if (targets.filled | targets.peers) {
                copy_payloads<true>(args, comm.rank, token, part, targets);
                __syncwarp();
                for (u32 peer = lane_index(); peer < NUM_RANKS; peer += WARP_SIZE)
                    if (targets.peers >> peer & 1)
                        store_release_system(row_flag(comm, peer, comm.rank, token, part), epoch);
            }
            is_pushed = IS_EARLY && !is_planned;
            if (is_pushed) is_plan_broken = wait_for_plan(comm), is_planned = true;
            else send = for_all_lanes(next);
            continue;
        }
        if (IS_EARLY && !is_planned) is_plan_broken = wait_for_plan(comm), is_planned = true;
        may_send &= send < 0;
        if (receive < 0)
            receive = beginning.has_more_receives ? for_all_lanes(take(comm, NEXT_RECEIVE, num_receives)) : num_receives;
        if (receive >= num_receives && !(may_send && beginning.has_more_sends)) break;
        bool is_here = receive < num_receives;
        if (is_here) {
            const auto [token, src, part] = item_of(comm, receive, max(1, NUM_RANKS - 1), args.parts, num_warps);
            Targets targets = {};
            if (has_rank(others, src) && token < args.first_row[src + 1] - args.first_row[src])
                targets = targets_of(args, src, token, others);
            if (targets.filled) {
                const Arrival arrival = warp_looks_for(comm, row_flag(comm, comm.rank, src, token, part), epoch,
                                                       RECEIVING_ROWS, src, lane_index() == 0, may_send ? MAX_LOOKS : 0);
                if (arrival == Arrival::NEVER) return false;
                is_here = arrival == Arrival::ALL_HERE;
            }
            if (is_here) {
                const i32 next = beginning.has_more_receives ? take(comm, NEXT_RECEIVE, num_receives) : num_receives;
                if (targets.filled) copy_payloads<false>(args, src, token, part, targets);
                receive = for_all_lanes(next);
            }
        }
        if (!is_here) send = for_all_lanes(take(comm, NEXT_SEND, num_sends));
    }
    if (is_plan_broken) return false;
    clear_padding(args);
    return true;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1024 / NUM_THREADS)
    scatter_rows(const __grid_constant__ ScatterArgs args) {
    const Comm& comm = args.comm;
    // Behind the plan of the same dispatch, a warp waits for it when it has pushed a row. Behind any other kernel it waits
    // before the state is read: that may be another scatter, of a slice, or make the rows.
    if (!IS_EARLY) wait_for_prerequisites();
    const u32 epoch = comm.state[ROWS_EPOCH] + 1;
    const bool is_complete = send_and_receive(args, epoch);
    if (IS_EARLY) wait_for_prerequisites();  // in warps that have given up before: later kernels rely on the plan's end
    const Exit exit = block_exits(comm.state + NUM_DONE, is_complete);
    if (exit == Exit::BROKEN) return poison_slots(args);
    if (exit == Exit::ALL_COMPLETE) {
        signal_peers(comm, comm.rows_released, epoch, threadIdx.x, NUM_THREADS);
        if (threadIdx.x == 0) comm.state[ROWS_EPOCH] = epoch, comm.state[NEXT_SEND] = 0, comm.state[NEXT_RECEIVE] = 0;
    }
}
