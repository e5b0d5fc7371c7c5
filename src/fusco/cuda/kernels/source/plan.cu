// Plan: every rank pushes its routing to all ranks of its node, then sorts the node's pooled routing by its local experts.
//
// A *source* is a rank of any node whose rows are on this node. Each rank publishes the routing of one source per node: its
// own, and that of its counterpart on each other node.
//
// A stable counting sort over pairs (row, k), with rows in order of (source, token). Each block takes an equal run of rows,
// each warp an equal run of the block's pairs. Prefix sums of the counts of all runs give the start of a run in every
// expert's block. Twin: tests/reference/plan.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_NODES, NUM_TOPK, ID_BYTES (4, 8), WEIGHT_BYTES (0, 4, 8),
// NUM_THREADS, CHUNK_PAIRS.
#include "comm.cuh"

struct BadPair {
    i32 src;  // of the first invalid expert id, written last; -1 if there is none
    i32 token, k, id;
};

// Result in host memory, from which the host sizes the output. Words of 8 bytes that the host reads as one are aligned.
struct Report {
    u32 ticket;          // of the plan, written last, together with
    i32 num_slots;       // rows of the expert-major output, including padding
    BadPair bad;         // of the latest plan that the host waits for
    BadPair bad_static;  // of the first other plan since the host has looked
    i32 overflow_needed, overflow_limit;  // of the first plan that did not fit; 0 if all fit
    u32 begun;                            // ticket of the latest plan that the device has come to
    i32 overflow_expert;                  // 1 + local index of the first expert that needed that many; 0: all of them did
};

constexpr i32 NUM_SOURCES = NUM_RANKS * NUM_NODES;

struct PlanArgs {
    Comm comm;
    const u8* topk_idx[NUM_NODES];      // of the sources that this rank publishes; all but the first are i32
    const u8* topk_weights[NUM_NODES];
    const i32* expert_to_local;  // -1 for experts of other ranks
    const i32* expert_to_rank;   // local rank; -1 for experts of other nodes
    i32* row_to_slots;         // [row][k]: slot, NOT_HERE or DROPPED
    u8* row_weights;           // [row][k]
    i64* num_rows_per_expert;
    // [num_local_experts] each: the first slot of a block, its end with the padding of zeros, rows dropped; then one number:
    // the slots that all rows need, or, with rows_per_expert, the rows of the expert with the most
    i32* block_to_first_slot;
    u32* token_to_ranks;       // [row of a held source]: bit r is set if local rank r owns one of its experts
    i32* run_counts;           // [block][expert]: scratch
    i32* reported_counts;      // [num_local_experts] in host memory: num_rows_per_expert, if the host waits for the report
    Report* report;
    u64 ticket;  // below 2^32; 0: the host does not wait for the report
    i32 first_row[NUM_SOURCES + 1];
    i32 publishers[NUM_SOURCES];  // the local rank that publishes a source's routing
    i32 published[NUM_NODES];     // the sources whose routing this rank publishes
    i32 held[NUM_SOURCES - NUM_RANKS + 1];  // the sources with rows in this rank's pool, num_held of them
    i32 num_held, num_experts, num_local_experts, expert_alignment;
    i32 max_slots;
    i32 rows_per_expert;  // slots of each block, which begin at multiples of it; 0 if blocks follow each other
    i32 is_overflow_reported;
    i32 is_followed_early;  // the next kernel may take SMs while this one waits for ranks
};
static_assert(sizeof(PlanArgs) == ARGUMENT_BYTES, "plan.py mirrors this struct");

constexpr i32 NOT_HERE = -1;
constexpr i32 DROPPED = -2;
constexpr i32 KEPT_ROUNDS = 2;  // that is all, unless a budget of SMs leaves fewer blocks
static_assert(KEPT_ROUNDS == 2, "loops over rounds take the first two from registers, by name");
constexpr i32 COUNTS_TOGETHER = NUM_WARPS % 8 ? 1 : 8;  // loads in flight
#if WEIGHT_BYTES == 8
using Weight = u64;
#else
using Weight = u32;
#endif

struct RowPlace {
    i32 src, token;
};
__device__ constexpr i32 half_of_sources() {
    i32 half = 1;
    while (2 * half < NUM_SOURCES) half *= 2;
    return half;
}
__device__ __forceinline__ RowPlace place_of(const PlanArgs& args, i32 row) {
    i32 src = 0;  // binary search for the last source that begins at or before the row
#pragma unroll
    for (i32 step = half_of_sources(); step > 0; step /= 2)
        if (src + step < NUM_SOURCES && row >= args.first_row[src + step]) src += step;
    return {src, row - args.first_row[src]};
}

__device__ __forceinline__ i32 round_up(i32 number, i32 multiple) { return (number + multiple - 1) / multiple * multiple; }

__device__ __forceinline__ i32 num_pairs_of(const PlanArgs& args, i32 src) {
    return (args.first_row[src + 1] - args.first_row[src]) * NUM_TOPK;
}

__device__ __forceinline__ u64 pooled_index(const Comm& comm, u32 parity, i32 src) {
    return static_cast<u64>(parity * NUM_SOURCES + src) * comm.max_tokens * comm.max_topk;
}

// Address of the weight of a source's pair in a rank's pool. The weights of a source begin at the same offset for every
// dtype. Otherwise those of one plan would overlap the other buffer, where those of the previous plan may still be read.
__device__ __forceinline__ Weight* pooled_weight(const Comm& comm, u32 rank, u64 base, i32 pair) {
    constexpr u64 MAX_WEIGHT_BYTES = 8;
    return section<Weight>(comm, rank, comm.weights + base * MAX_WEIGHT_BYTES) + pair;
}

__device__ __forceinline__ i32 max_routing_chunks(const Comm& comm) {
    return max(1, (comm.max_tokens * comm.max_topk + CHUNK_PAIRS - 1) / CHUNK_PAIRS);
}

__device__ __forceinline__ i32 num_chunks_of(const PlanArgs& args, i32 src) {
    return max(1, (num_pairs_of(args, src) + CHUNK_PAIRS - 1) / CHUNK_PAIRS);
}

// A run of chunks of a source, or of a part of them.
struct Chunks {
    i32 first, end;
};

// The run of chunks that this block pushes, where earlier sources have taken `turn` blocks.
__device__ __forceinline__ Chunks chunks_of_block(i32 num_chunks, u32& turn) {
    const i32 per_block = (num_chunks + gridDim.x - 1) / gridDim.x;
    const i32 first = (blockIdx.x + gridDim.x - turn) % gridDim.x * per_block;
    turn = (turn + (num_chunks + per_block - 1) / per_block) % gridDim.x;
    return {first, min(num_chunks, first + per_block)};
}

// Push this block's chunks of routing, mostly one or two, and announce them to all ranks of the node. A source without rows
// has one chunk, too.
__device__ void push_routing(const PlanArgs& args, u32 parity, u32 epoch, u32 absent) {
    const Comm& comm = args.comm;
    u32 turn = 0;
    for (u32 i = 0; i < NUM_NODES; ++i) {
        const i32 src = args.published[i], num_pairs = num_pairs_of(args, src);
        const u64 base = pooled_index(comm, parity, src);
        const Chunks chunks = chunks_of_block(num_chunks_of(args, src), turn);
        const i32 end = min(num_pairs, chunks.end * CHUNK_PAIRS);
        for (i32 pair = chunks.first * CHUNK_PAIRS + threadIdx.x; pair < end; pair += NUM_THREADS) {
            i64 id = ID_BYTES == 8 && i == 0 ? reinterpret_cast<const i64*>(args.topk_idx[i])[pair]
                                             : reinterpret_cast<const i32*>(args.topk_idx[i])[pair];
            if (id != static_cast<i32>(id)) id = id < 0 ? -0x7fffffff : 0x7fffffff;  // invalid, before and after narrowing
            const Weight weight = WEIGHT_BYTES ? reinterpret_cast<const Weight*>(args.topk_weights[i])[pair] : 0;
#pragma unroll
            for (u32 step = 1; step <= NUM_RANKS; ++step) {
                const u32 dst = (comm.rank + step) % NUM_RANKS;
                if (has_rank(absent, dst)) continue;
                section<i32>(comm, dst, comm.ids)[base + pair] = static_cast<i32>(id);
                if (WEIGHT_BYTES) *pooled_weight(comm, dst, base, pair) = weight;
            }
        }
    }
    __syncthreads();
    turn = 0;
    for (u32 i = 0; i < NUM_NODES; ++i) {
        const i32 src = args.published[i];
        const Chunks chunks = chunks_of_block(num_chunks_of(args, src), turn);
        for (i32 flag = chunks.first * NUM_RANKS + threadIdx.x; flag < chunks.end * NUM_RANKS; flag += NUM_THREADS)
            if (!has_rank(absent, flag % NUM_RANKS))
                store_release_system(section<u32>(comm, flag % NUM_RANKS, comm.routing_ready) +
                                         src * max_routing_chunks(comm) + flag / NUM_RANKS, epoch);
    }
}

// Mark the ranks that own an expert of each token; `id_of` gives the id of a pair.
template <typename F> __device__ __forceinline__ void mark_ranks(const PlanArgs& args, i32 num_tokens, u32* marks, F&& id_of) {
    for (i32 token = blockIdx.x * NUM_THREADS + threadIdx.x; token < num_tokens; token += gridDim.x * NUM_THREADS) {
        u32 ranks = 0;
#pragma unroll 8
        for (u32 k = 0; k < NUM_TOPK; ++k) {
            const i64 id = id_of(token * NUM_TOPK + k);
            const i32 rank = id >= 0 && id < args.num_experts ? args.expert_to_rank[id] : -1;
            if (rank >= 0) ranks |= 1u << rank;
        }
        marks[token] = ranks;
    }
}

// Wait for the routing chunks of rows `first` to `end`. The first block waits for a chunk of every source, so no rank gets
// ahead of another by more than one plan.
__device__ bool block_waits_for_routing(const PlanArgs& args, i32 first, i32 end, u32 epoch) {
    const Comm& comm = args.comm;
    bool is_ready = true;
    for (i32 src = threadIdx.x / WARP_SIZE; src < NUM_SOURCES; src += NUM_WARPS) {  // a warp for each
        const i32 begin = max(first, args.first_row[src]) - args.first_row[src];
        const i32 stop = min(end, args.first_row[src + 1]) - args.first_row[src];
        i32 chunk = begin * NUM_TOPK / CHUNK_PAIRS, last = (stop * NUM_TOPK - 1) / CHUNK_PAIRS;
        if (begin >= stop) chunk = 0, last = blockIdx.x == 0 ? 0 : -1;
        const u32* const flags =
            section<u32>(comm, comm.rank, comm.routing_ready) + src * max_routing_chunks(comm);
        for (chunk += lane_index(); chunk <= last; chunk += WARP_SIZE)
            is_ready &= wait_for_epoch(comm, flags + chunk, epoch, EXCHANGING_ROUTING, args.publishers[src]);
    }
    return __syncthreads_and(is_ready);
}

// The result of a block's rows if the communicator has broken: no row has a slot. Nothing that the caller computes from the
// plan then reads slots or counts of an earlier plan, or uninitialised ones.
__device__ __noinline__ void forget_rows(const PlanArgs& args, i32 first_row, i32 end_row) {
    for (i32 pair = first_row * NUM_TOPK + threadIdx.x; pair < end_row * NUM_TOPK; pair += NUM_THREADS)
        args.row_to_slots[pair] = NOT_HERE;
    if (blockIdx.x == 0)
        for (i32 expert = threadIdx.x; expert < args.num_local_experts; expert += NUM_THREADS)
            args.num_rows_per_expert[expert] = 0, args.block_to_first_slot[2 * args.num_local_experts + expert] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) args.block_to_first_slot[3 * args.num_local_experts] = 0;
}

// Report the slots that are needed, of the rows in `num_all` for each expert, and the first invalid id, which `id_of` returns
// for a pair; one thread.
template <typename F>
__device__ __forceinline__ void report_plan(const PlanArgs& args, i32 needed, const i32* num_all, F&& id_of) {
    Report* const report = args.report;
    u32* const first_bad = args.comm.state + FIRST_BAD_PAIR;
    if (const u32 bad = *reinterpret_cast<volatile u32*>(first_bad)) {
        const i32 pair = static_cast<i32>(~bad);
        const RowPlace place = place_of(args, pair / NUM_TOPK);
        BadPair* const invalid = args.ticket ? &report->bad : &report->bad_static;
        volatile i32* const src = &invalid->src;
        if (args.ticket || *src < 0) {  // the host may read another one now
            invalid->token = place.token, invalid->k = pair % NUM_TOPK;
            invalid->id = id_of(pair);
            __threadfence_system();
            *src = place.src;
            __threadfence_system();
        }
        *first_bad = 0;
    }
    const i32 limit = args.rows_per_expert ? args.rows_per_expert : args.max_slots;
    if (needed > limit && args.is_overflow_reported && report->overflow_needed == 0) {
        i32 number = args.rows_per_expert ? 1 : 0;
        while (number && num_all[number - 1] < needed) ++number;
        report->overflow_limit = limit, report->overflow_expert = number;
        __threadfence_system();
        report->overflow_needed = needed;
    }
    if (args.ticket) {
        __threadfence_system();
        *reinterpret_cast<volatile u64*>(report) = args.ticket | static_cast<u64>(needed) << 32;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) plan(const __grid_constant__ PlanArgs args) {
    extern __shared__ i32 shared[];
    const Comm& comm = args.comm;
    if (args.is_followed_early) launch_dependents();  // all blocks of this grid are resident then
    const u32 warp = threadIdx.x / WARP_SIZE, lane = lane_index();
    const i32 num_experts = args.num_local_experts;
    i32* const warp_counts = shared;                            // [warp][expert]
    i32* const num_before = shared + NUM_WARPS * num_experts;   // [expert], rows of earlier blocks
    i32* const num_all = num_before + num_experts;              // [expert]
    i32* const first_slot = num_all + num_experts;              // [expert + 1]
    const i32 num_rows = args.first_row[NUM_SOURCES];
    const i32 rows_per_block = (num_rows + gridDim.x - 1) / gridDim.x;
    const i32 first_row = min(num_rows, static_cast<i32>(blockIdx.x) * rows_per_block);
    const i32 end_row = min(num_rows, static_cast<i32>(blockIdx.x + 1) * rows_per_block);
    if (args.ticket && blockIdx.x == 0 && threadIdx.x == 0)
        *reinterpret_cast<volatile u32*>(&args.report->begun) = static_cast<u32>(args.ticket);
    const u32 epoch = comm.state[PLAN_EPOCH] + 1, absent = comm.state[ABSENT_RANKS];
    if (!__syncthreads_and(!is_broken(comm))) return forget_rows(args, first_row, end_row);

    // Step 1: push routing. The pool is double-buffered: a rank that begins plan n has seen all others begin n - 1, so none
    // of them still reads the routing of plan n - 2.
    const u32 parity = epoch % 2;
    push_routing(args, parity, epoch, absent);
    for (i32 i = threadIdx.x; i < NUM_WARPS * num_experts; i += NUM_THREADS) warp_counts[i] = 0;
    mark_ranks(args, num_pairs_of(args, args.published[0]) / NUM_TOPK, args.token_to_ranks, [&](i32 pair) -> i64 {
        return ID_BYTES == 8 ? reinterpret_cast<const i64*>(args.topk_idx[0])[pair]
                             : reinterpret_cast<const i32*>(args.topk_idx[0])[pair];
    });
    if (!block_waits_for_routing(args, first_row, end_row, epoch)) return forget_rows(args, first_row, end_row);

    // Step 2: count this block's pairs for each expert, warp by warp.
    const i32 block_first = first_row * NUM_TOPK, block_end = end_row * NUM_TOPK;
    const i32 rounds = (block_end - block_first + NUM_THREADS - 1) / NUM_THREADS;
    const i32 warp_first = block_first + warp * rounds * WARP_SIZE;
    const i32* const pooled_ids = section<i32>(comm, comm.rank, comm.ids);
    i32* const own_counts = warp_counts + warp * num_experts;

    struct PooledPair {
        u64 base;  // of the source's pairs
        i32 pair;  // among them
        bool is_here;  // the rank that publishes them takes part; else they have no expert
    };
    auto pooled_pair_of = [&](i32 pair) -> PooledPair {
        const RowPlace place = place_of(args, pair / NUM_TOPK);
        return {pooled_index(comm, parity, place.src), place.token * NUM_TOPK + pair % NUM_TOPK,
                !has_rank(absent, args.publishers[place.src])};
    };
    auto pooled_id_of = [&](const PooledPair& place) -> i32 {
        return place.is_here ? *reinterpret_cast<const volatile i32*>(pooled_ids + place.base + place.pair) : -1;
    };
    auto local_expert_of = [&](i32 id) -> i32 {
        return id >= 0 && id < args.num_experts ? args.expert_to_local[id] : -1;
    };
    // Experts and weights of the first rounds stay in registers for step 5. Their loads are in flight together.
    auto pair_in = [&](i32 round) { return warp_first + round * static_cast<i32>(WARP_SIZE) + static_cast<i32>(lane); };
    auto weight_in = [&](i32 round) -> Weight {
        const i32 pair = pair_in(round);
        if (!WEIGHT_BYTES || round >= rounds || pair >= block_end) return 0;
        const PooledPair place = pooled_pair_of(pair);
        return *const_cast<const volatile Weight*>(pooled_weight(comm, comm.rank, place.base, place.pair));
    };
    auto expert_in = [&](i32 round, bool is_checked) -> i32 {
        const i32 pair = pair_in(round);
        if (round >= rounds || pair >= block_end) return -1;
        const i32 id = pooled_id_of(pooled_pair_of(pair));
        if (is_checked && (id < -1 || id >= args.num_experts))
            atomicMax(comm.state + FIRST_BAD_PAIR, ~static_cast<u32>(pair));
        return local_expert_of(id);
    };
    i32 kept[KEPT_ROUNDS];
    Weight kept_weights[KEPT_ROUNDS];
#pragma unroll
    for (i32 round = 0; round < KEPT_ROUNDS; ++round) kept[round] = expert_in(round, true);
#pragma unroll
    for (i32 round = 0; round < KEPT_ROUNDS; ++round) kept_weights[round] = weight_in(round);
#pragma unroll 1  // code that runs once takes as long to load as to run
    for (i32 round = 0; round < rounds; ++round) {
        const i32 expert = round == 0 ? kept[0] : round == 1 ? kept[1] : expert_in(round, true);
        if (expert >= 0) atomicAdd(own_counts + expert, 1);
    }
    __syncthreads();
    for (i32 expert = threadIdx.x; expert < num_experts; expert += NUM_THREADS) {
        i32 sum = 0;
#pragma unroll 1
        for (i32 first = 0; first < NUM_WARPS; first += COUNTS_TOGETHER) {
            i32 counts[COUNTS_TOGETHER];
            i32* const of_warps = warp_counts + first * num_experts + expert;
#pragma unroll
            for (i32 w = 0; w < COUNTS_TOGETHER; ++w) counts[w] = of_warps[w * num_experts];
#pragma unroll
            for (i32 w = 0; w < COUNTS_TOGETHER; ++w) of_warps[w * num_experts] = sum, sum += counts[w];
        }
        num_before[expert] = 0;
        num_all[expert] = gridDim.x > 1 ? 0 : sum;
        if (gridDim.x > 1) args.run_counts[blockIdx.x * num_experts + expert] = sum;
    }
    if (gridDim.x > 1 && !grid_barrier(comm)) return forget_rows(args, first_row, end_row);
    launch_dependents();
    __syncthreads();

    // Step 3: compute where this block's run begins in every expert's block, and where the experts' blocks begin.
    const i32 num_groups = max(1, static_cast<i32>(NUM_THREADS) / max(1, num_experts));  // of threads, one for each expert
    for (i32 i = threadIdx.x; gridDim.x > 1 && i < num_groups * num_experts; i += NUM_THREADS) {
        const i32 expert = i % num_experts;
        i32 before = 0, all = 0;
#pragma unroll 8
        for (u32 block = i / num_experts; block < gridDim.x; block += num_groups) {
            const i32 count = *reinterpret_cast<volatile i32*>(args.run_counts + block * num_experts + expert);
            all += count;
            if (block < blockIdx.x) before += count;
        }
        atomicAdd(num_before + expert, before);
        atomicAdd(num_all + expert, all);
    }
    __syncthreads();
    if (warp == 0) {
        i32 begin = 0, most = 0;
        for (i32 first = 0; first < num_experts; first += WARP_SIZE) {
            const i32 expert = first + lane;
            const i32 count = expert < num_experts ? num_all[expert] : 0;
            if (args.rows_per_expert) {  // the start of a block is no sum of those before it
                if (expert < num_experts) first_slot[expert] = expert * args.rows_per_expert;
                most = max(most, count);
                continue;
            }
            const i32 padded = round_up(count, args.expert_alignment);
            i32 end = padded;
            for (u32 step = 1; step < WARP_SIZE; step *= 2) {
                const i32 other = __shfl_up_sync(ALL_LANES, end, step);
                if (lane >= step) end += other;
            }
            if (expert < num_experts) first_slot[expert] = begin + end - padded;
            begin += __shfl_sync(ALL_LANES, end, WARP_SIZE - 1);
        }
        for (u32 other = WARP_SIZE / 2; args.rows_per_expert && other; other /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, other));
        if (lane == 0) first_slot[num_experts] = args.rows_per_expert ? most : begin;
    }
    __syncthreads();

    // Step 4: the first block reports the size, for which the host waits, and closes the epoch, which all blocks read before
    // the grid barrier.
    if (blockIdx.x == 0) {
        for (i32 expert = threadIdx.x; args.ticket && expert < num_experts; expert += NUM_THREADS)
            args.reported_counts[expert] = num_all[expert];
        __syncthreads();  // the fence before the ticket is for the counts of all threads, too
        if (threadIdx.x == 0) {
            report_plan(args, first_slot[num_experts], num_all, [&](i32 pair) { return pooled_id_of(pooled_pair_of(pair)); });
            comm.state[PLAN_EPOCH] = epoch;
        }
    }

    // Step 5: assign a slot to every pair. Lanes with the same expert take consecutive slots.
#pragma unroll 1
    for (i32 round = 0; round < rounds; ++round) {
        const i32 expert = round == 0 ? kept[0] : round == 1 ? kept[1] : expert_in(round, false);
        const i32 pair = pair_in(round);
        const bool is_inside = pair < block_end;
        const u32 same = __match_any_sync(ALL_LANES, expert);
        i32 slot = NOT_HERE;
        if (expert >= 0) {
            const i32 position = num_before[expert] + own_counts[expert] + __popc(same & ((1u << lane) - 1));
            slot = first_slot[expert] + position;
            if (args.rows_per_expert ? position >= args.rows_per_expert : slot >= args.max_slots) slot = DROPPED;
        }
        __syncwarp();
        if (expert >= 0 && lane == __ffs(same) - 1) own_counts[expert] += __popc(same);
        __syncwarp();
        if (!is_inside) continue;
        args.row_to_slots[pair] = slot;
        if (WEIGHT_BYTES)
            reinterpret_cast<Weight*>(args.row_weights)[pair] =
                round == 0 ? kept_weights[0] : round == 1 ? kept_weights[1] : weight_in(round);
    }
    i32 num_before_source = 0;
    for (i32 i = 0; NUM_NODES > 1 && i < args.num_held; ++i) {
        const i32 src = args.held[i], num_tokens = args.first_row[src + 1] - args.first_row[src];
        const i32* const ids_of_source = pooled_ids + pooled_index(comm, parity, src);
        if (src != args.published[0])  // those of this rank are marked already
            mark_ranks(args, num_tokens, args.token_to_ranks + num_before_source, [&](i32 pair) {
                return static_cast<i64>(*reinterpret_cast<const volatile i32*>(ids_of_source + pair));
            });
        num_before_source += num_tokens;
    }

    if (blockIdx.x == 0) {
        i32* const ends = args.block_to_first_slot + num_experts;
        for (i32 expert = threadIdx.x; expert < num_experts; expert += NUM_THREADS) {
            const i32 wanted = num_all[expert], padded = round_up(wanted, args.expert_alignment);
            const i32 first = min(first_slot[expert], args.max_slots);
            const i32 room = args.rows_per_expert ? args.rows_per_expert : min(padded, args.max_slots - first);
            const i32 kept = min(wanted, room);
            args.num_rows_per_expert[expert] = kept;
            args.block_to_first_slot[expert] = first;
            ends[expert] = first + min(padded, room);
            ends[num_experts + expert] = wanted - kept;
        }
        if (threadIdx.x == 0) ends[2 * num_experts] = first_slot[num_experts];
    }
}
