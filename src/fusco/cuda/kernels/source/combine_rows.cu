// Combine: sum each token's local rows with their weights, push one row to the token's holder, and sum the rows there.
//
// Work items are per warp, and the holder's sums overlap with the transfer. Sums are in float32 (float64 for float64
// rows), over ascending k, then over ascending ranks.
// Twin: tests/reference/combine_rows.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_TOPK, HIDDEN, ROW_TYPE, WIRE_TYPE and OUT_TYPE (BF16, F16, F32,
// F64), WEIGHT_BYTES (0, 4, 8), VECTOR_ELEMENTS, MAX_PARTS, NUM_THREADS, BLOCKS_PER_SM, UNROLL, DEPTH.
#include "comm.cuh"
#include "elements.cuh"

struct CombineArgs {
    Comm comm;
    const u8* rows;         // expert-major
    u8* out;                // token-major
    const i32* row_to_slots;
    const u8* row_weights;  // [row][k]
    const u32* token_to_ranks;
    i32 first_row[NUM_RANKS + 1];
    i32 longest;  // maximum number of rows of a rank
    i32 parts;    // warps that share a row
    i32 sum_parts;    // of a row that is summed: as many, or any number if a warp sends a whole row
    i32 num_senders;  // blocks that send before they sum
};
static_assert(sizeof(CombineArgs) == ARGUMENT_BYTES, "combine_rows.py mirrors this struct");

using Row = Element<ROW_TYPE>;
using Wire = Element<WIRE_TYPE>;
using Out = Element<OUT_TYPE>;
using Sum = Row::Sum;
constexpr u32 N = VECTOR_ELEMENTS;
constexpr i32 NUM_VECTORS = HIDDEN / N;
using RowPack = Pack<Row, N>;
using WirePack = Pack<Wire, N>;
using OutPack = Pack<Out, N>;
constexpr u64 ROW_BYTES = HIDDEN * sizeof(Row::Bits);
constexpr u64 WIRE_BYTES = HIDDEN * sizeof(Wire::Bits);
constexpr u64 OUT_BYTES = HIDDEN * sizeof(Out::Bits);

constexpr i32 PIECE = UNROLL * WARP_SIZE;
constexpr u32 STAGE_BYTES = PIECE * 16 * (RowPack::NUM_ACCESSES > WirePack::NUM_ACCESSES ? RowPack::NUM_ACCESSES
                                                                                       : WirePack::NUM_ACCESSES);

struct Terms {
    i32 slot;     // of the lane-th pair, or negative
    Sum weight;   // of the lane-th pair
    u32 filled;   // lanes that have a row
    bool is_any;  // the token has an expert on this rank, including dropped rows
};

__device__ __forceinline__ Terms terms_of(const CombineArgs& args, i32 row) {
    const u32 lane = lane_index();
    const i64 pair = static_cast<i64>(row) * NUM_TOPK + lane;
    Terms terms;
    terms.slot = lane < NUM_TOPK ? args.row_to_slots[pair] : -1;
#if WEIGHT_BYTES == 4
    terms.weight = lane < NUM_TOPK ? reinterpret_cast<const float*>(args.row_weights)[pair] : 0;
#elif WEIGHT_BYTES == 8
    terms.weight = lane < NUM_TOPK ? reinterpret_cast<const double*>(args.row_weights)[pair] : 0;
#else
    terms.weight = 1;
#endif
    terms.filled = __ballot_sync(ALL_LANES, terms.slot >= 0);
    terms.is_any = __any_sync(ALL_LANES, terms.slot != -1);
    return terms;
}

struct Range {
    i32 begin, end;
};
__device__ __forceinline__ Range range_of(i32 part, i32 parts) {
    const i32 per_part = (NUM_VECTORS + parts - 1) / parts;
    return {min(NUM_VECTORS, part * per_part), min(NUM_VECTORS, (part + 1) * per_part)};
}

// Rows and partial sums that a warp adds up for a part of a token, in order of summation.
struct Sources {
    u32 ranks;        // that have a term; this rank's terms are the slots
    Terms terms;
    const u8* received;  // the partial sum of rank 0
    u32 num_terms;
};

// Position of a walk over the terms of each piece of a range. A piece is UNROLL vectors of each lane.
struct Walk {
    i32 first;  // this lane's first vector
    u32 ranks, slots;
};

// What a walk arrives at.
struct Term {
    const u8* at;  // the row
    Sum weight;
    bool is_row;   // else a partial sum
};

__device__ __forceinline__ Walk begin_walk(const Sources& sources, i32 begin) {
    return {begin + static_cast<i32>(lane_index()), sources.ranks, sources.terms.filled};
}

__device__ __forceinline__ Term next_term(const CombineArgs& args, const Sources& sources, Walk& walk) {
    const u32 src = __ffs(walk.ranks) - 1;
    Term term = {sources.received + src * args.comm.received_bytes, 1, false};
    bool is_last = true;
    if (src == static_cast<u32>(args.comm.rank)) {
        const int lane = __ffs(walk.slots) - 1;
        const i64 slot = __shfl_sync(ALL_LANES, sources.terms.slot, lane);
        term = {args.rows + slot * ROW_BYTES, __shfl_sync(ALL_LANES, sources.terms.weight, lane), true};
        walk.slots &= walk.slots - 1;
        is_last = !walk.slots;
    }
    if (is_last) walk.ranks &= walk.ranks - 1;
    return term;
}
__device__ __forceinline__ void go_to_next_piece(const Sources& sources, Walk& walk) {
    walk.first += PIECE, walk.ranks = sources.ranks, walk.slots = sources.terms.filled;
}

// A lane's vectors of one term in shared memory.
template <typename E>
__device__ __forceinline__ void begin_piece(u8* stage, const u8* row, i32 first, i32 end) {
    using P = Pack<E, N>;
#pragma unroll
    for (u32 u = 0; u < UNROLL; ++u)
        if (first + u * WARP_SIZE < end)
#pragma unroll
            for (int i = 0; i < P::NUM_ACCESSES; ++i)
                begin_copy(reinterpret_cast<Vector<P::ACCESS_BYTES>*>(stage + (u * P::NUM_ACCESSES + i) * (16 * WARP_SIZE)),
                           reinterpret_cast<const Vector<P::ACCESS_BYTES>*>(row + (first + u * WARP_SIZE) * P::BYTES) + i);
}
template <typename E>
__device__ __forceinline__ void add_piece(Sum (&sums)[UNROLL][N], const u8* stage, Sum weight) {
    using P = Pack<E, N>;
#pragma unroll
    for (u32 u = 0; u < UNROLL; ++u) {
        P pack;
#pragma unroll
        for (int i = 0; i < P::NUM_ACCESSES; ++i)
            pack.vectors[i] =
                *reinterpret_cast<const Vector<P::ACCESS_BYTES>*>(stage + (u * P::NUM_ACCESSES + i) * (16 * WARP_SIZE));
        pack.add_to(sums[u], weight);
    }
}
template <typename E>
__device__ __forceinline__ void store_piece(const Sum (&sums)[UNROLL][N], u8* to, i32 first, i32 end) {
#pragma unroll
    for (u32 u = 0; u < UNROLL; ++u)
        if (first + u * WARP_SIZE < end) {
            Pack<E, N> pack;
            pack.round_from(sums[u]);
            pack.store(to + (first + u * WARP_SIZE) * Pack<E, N>::BYTES);
        }
}

// Add up the terms of a part of a token, and store the sums: to a peer, or where the caller wants them. Each lane copies its
// own vectors into shared memory, DEPTH - 1 terms ahead of the one that it adds.
__device__ __forceinline__ void sum_terms(
    const CombineArgs& args, const Sources& sources, const Range& range, u8* to, bool is_sent) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const ring = shared + threadIdx.x / WARP_SIZE * (DEPTH * STAGE_BYTES) + lane_index() * 16;
    const u32 num_terms = max(1u, sources.num_terms);  // without terms, the sums are zero
    const u32 num_steps = (range.end - range.begin + PIECE - 1) / PIECE * num_terms;
    Walk ahead = begin_walk(sources, range.begin), walk = ahead;
    u32 begun = 0, added = 0;  // terms of the piece
    Sum sums[UNROLL][N] = {};
#pragma unroll 1
    for (u32 step = 0; step < num_steps + DEPTH - 1; ++step) {
        if (step < num_steps) {
            if (sources.num_terms) {
                const Term term = next_term(args, sources, ahead);
                u8* const stage = ring + step % DEPTH * STAGE_BYTES;
                if (ROW_TYPE == WIRE_TYPE || term.is_row) begin_piece<Row>(stage, term.at, ahead.first, range.end);
                else begin_piece<Wire>(stage, term.at, ahead.first, range.end);
            }
            if (++begun == num_terms) begun = 0, go_to_next_piece(sources, ahead);
        }
        commit_copies();
        if (step + 1 < DEPTH) continue;
        wait_for_copies<DEPTH - 1>();
        if (sources.num_terms) {
            const Term term = next_term(args, sources, walk);
            const u8* const stage = ring + (step + 1) % DEPTH * STAGE_BYTES;
            if (ROW_TYPE == WIRE_TYPE || term.is_row) add_piece<Row>(sums, stage, term.weight);
            else add_piece<Wire>(sums, stage, 1);
        }
        if (++added < num_terms) continue;
        if (WIRE_TYPE == OUT_TYPE || !is_sent) store_piece<Out>(sums, to, walk.first, range.end);
        else store_piece<Wire>(sums, to, walk.first, range.end);
        added = 0;
        go_to_next_piece(sources, walk);
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
#pragma unroll
            for (u32 i = 0; i < N; ++i) sums[u][i] = 0;
    }
}

// Return false in warps that have given up.
__device__ __forceinline__ bool send_and_sum(const CombineArgs& args, u32 epoch) {
    __shared__ i32 first_send;
    __shared__ i32 first_sum;
    const Comm& comm = args.comm;
    const i32 num_sends = args.longest * (NUM_RANKS - 1) * args.parts;
    const i32 num_sums = (args.first_row[comm.rank + 1] - args.first_row[comm.rank]) * args.sum_parts;
    // Of many rows the first blocks send, the others sum: an SM whose stores to peers queue for the link could not
    // load rows fast enough.
    const Beginning beginning(args.num_senders, num_sends, num_sums);
    beginning.take_all(comm, first_send, first_sum);
    if (!block_waits_for_memory(comm, comm.state[ROWS_EPOCH], epoch - 1)) return false;

    const u32 others = other_members(comm);
    const i32 warp = threadIdx.x / WARP_SIZE, num_warps = gridDim.x * NUM_WARPS;
    // -1: none is taken. A warp never waits long for sums while there may be one to send, so there is no circular wait between
    // ranks.
    i32 send = beginning.send_of(warp, first_send), sum = beginning.receive_of(warp, first_sum);
    const bool sends_first = send >= 0;
    bool may_send = num_sends > 0;
    while (true) {
        const bool is_sent = send >= 0 && send < num_sends;
        i32 next;  // in lane 0
        Terms terms;
        Sources sources;
        Range range;
        u8* to;
        u32* flag;
        if (is_sent) {
            next = !sends_first ? -1 : beginning.has_more_sends ? take(comm, NEXT_SEND, num_sends) : num_sends;
            const Item item = item_of(comm, send, max(1, NUM_RANKS - 1), args.parts, num_warps);
            const i32 row = args.first_row[item.rank] + item.token;
            const bool is_row = has_rank(others, item.rank) && row < args.first_row[item.rank + 1];
            if (is_row) terms = terms_of(args, row);
            if (!is_row || !terms.is_any) {
                send = for_all_lanes(next);
                continue;
            }
            sources = {terms.filled ? 1u << comm.rank : 0, terms, nullptr, static_cast<u32>(__popc(terms.filled))};
            range = range_of(item.part, args.parts);
            to = section<u8>(comm, item.rank, comm.received) + comm.rank * comm.received_bytes + item.token * WIRE_BYTES;
            flag = sum_flag(comm, item.rank, comm.rank, item.token, item.part);
        } else {
            may_send &= send < 0;
            if (sum < 0)
                sum = beginning.has_more_receives ? for_all_lanes(take(comm, NEXT_RECEIVE, num_sums)) : num_sums;
            if (sum >= num_sums && !(may_send && beginning.has_more_sends)) break;
            const i32 token = sum / args.sum_parts, part = sum % args.sum_parts;
            Arrival arrival = Arrival::NOT_YET;
            u32 peers = 0;
            if (sum < num_sums) {
                terms = terms_of(args, args.first_row[comm.rank] + token);
                peers = args.token_to_ranks[token] & others;
                const u32 src = lane_index() % NUM_RANKS;
                const bool has_flag = lane_index() < NUM_RANKS && (peers >> src & 1);
                const u32* const awaited = sum_flag(comm, comm.rank, src, token, args.parts == 1 ? 0 : part);
                arrival = warp_looks_for(comm, awaited, epoch, SUMMING_ROWS, src, has_flag, may_send ? MAX_LOOKS : 0);
            }
            if (arrival == Arrival::NEVER) return false;
            if (arrival == Arrival::NOT_YET) {
                send = for_all_lanes(take(comm, NEXT_SEND, num_sends));
                continue;
            }
            next = beginning.has_more_receives ? take(comm, NEXT_RECEIVE, num_sums) : num_sums;
            sources = {peers | (terms.filled ? 1u << comm.rank : 0), terms,
                       section<u8>(comm, comm.rank, comm.received) + token * WIRE_BYTES,
                       static_cast<u32>(__popc(terms.filled) + __popc(peers))};
            range = range_of(part, args.sum_parts);
            to = args.out + token * OUT_BYTES;
        }
        sum_terms(args, sources, range, to, is_sent);
        if (is_sent) {
            __syncwarp();
            if (lane_index() == 0) store_release_system(flag, epoch);
        }
        (is_sent ? send : sum) = for_all_lanes(next);
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM)
    combine_rows(const __grid_constant__ CombineArgs args) {
    const Comm& comm = args.comm;
    const u32 epoch = comm.state[COMBINE_EPOCH] + 1;
    const Exit exit = block_exits(comm.state + NUM_DONE, send_and_sum(args, epoch));
    const u64 num_tokens = args.first_row[comm.rank + 1] - args.first_row[comm.rank];
    if (exit == Exit::BROKEN) return block_poisons(args.out, num_tokens * OUT_BYTES);
    if (exit == Exit::ALL_COMPLETE) {
        signal_peers(comm, comm.sums_released, epoch, threadIdx.x, NUM_THREADS);
        if (threadIdx.x == 0) comm.state[COMBINE_EPOCH] = epoch, comm.state[NEXT_SEND] = 0, comm.state[NEXT_RECEIVE] = 0;
    }
}
