// Combine: sum each token's local rows with their weights, push one row to the token's holder, and sum the rows there.
//
// Work items are per warp, and the holder's sums overlap with the transfer. Sums are in float32 (float64 for float64
// rows), over ascending k, then over ascending ranks.
// Twin: fusco.reference.combine_rows.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_TOPK, HIDDEN, ROW_TYPE, WIRE_TYPE and OUT_TYPE (BF16, F16, F32,
// F64), WEIGHT_BYTES (0, 4, 8), VECTOR_ELEMENTS, MAX_PARTS, NUM_THREADS, BLOCKS_PER_SM, UNROLL.
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

// Add a token's local rows: vectors first, first + 32, ...
__device__ __forceinline__ void add_local_rows(
    const CombineArgs& args, const Terms& terms, i32 first, i32 end, Sum (&sums)[UNROLL][N]) {
    for (u32 left = terms.filled; left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const i64 slot = __shfl_sync(ALL_LANES, terms.slot, lane);
        const Sum weight = __shfl_sync(ALL_LANES, terms.weight, lane);
        const u8* const from = args.rows + slot * ROW_BYTES;
        RowPack held[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * WARP_SIZE < end) held[u].load_constant(from + (first + u * WARP_SIZE) * RowPack::BYTES);
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * WARP_SIZE < end) held[u].add_to(sums[u], weight);
    }
}

struct Range {
    i32 begin, end;
};
__device__ __forceinline__ Range range_of(i32 part, i32 parts) {
    const i32 per_part = (NUM_VECTORS + parts - 1) / parts;
    return {min(NUM_VECTORS, part * per_part), min(NUM_VECTORS, (part + 1) * per_part)};
}

__device__ void send_partial_sum(const CombineArgs& args, i32 dst, i32 token, i32 part, u32 epoch) {
    const Comm& comm = args.comm;
    const Terms terms = terms_of(args, args.first_row[dst] + token);
    if (!terms.is_any) return;
    const Range range = range_of(part, args.parts);
    const u64 place = static_cast<u64>(comm.rank) * comm.max_tokens + token;
    u8* const to = section<u8>(comm, dst, comm.sums) + place * WIRE_BYTES;
    for (i32 base = range.begin; base < range.end; base += UNROLL * WARP_SIZE) {
        const i32 first = base + static_cast<i32>(lane_index());
        Sum sums[UNROLL][N] = {};
        add_local_rows(args, terms, first, range.end, sums);
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * WARP_SIZE < range.end) {
                WirePack pack;
                pack.round_from(sums[u]);
                pack.store(to + (first + u * WARP_SIZE) * WirePack::BYTES);
            }
    }
    __syncwarp();
    if (lane_index() == 0)
        store_release_system(section<u32>(comm, dst, comm.sums_ready) + place * MAX_PARTS + part, epoch);
}

enum class Patience { LOOK, WAIT };
enum class Arrival { ALL_HERE, NOT_YET, NEVER };

// Check, or wait, for all partial sums of a local token.
__device__ Arrival look_for_sums(const CombineArgs& args, i32 token, i32 part, u32 epoch, Patience patience) {
    const Comm& comm = args.comm;
    const u32 ranks = args.token_to_ranks[token];
    bool is_here = true;
    for (u32 src = lane_index(); src < NUM_RANKS; src += WARP_SIZE)
        if ((ranks >> src & 1) && src != comm.rank) {
            const u64 place = static_cast<u64>(src) * comm.max_tokens + token;
            const u32* const flag = section<u32>(comm, comm.rank, comm.sums_ready) + place * MAX_PARTS + part;
            is_here = patience == Patience::WAIT ? wait_for_epoch(comm, flag, epoch, SUMMING_ROWS, src)
                                                 : has_reached(load_acquire_system(flag), epoch);
        }
    const bool are_all_here = __all_sync(ALL_LANES, is_here);
    __syncwarp();  // all lanes may rely on what one lane has seen
    if (are_all_here) return Arrival::ALL_HERE;
    return patience == Patience::WAIT ? Arrival::NEVER : Arrival::NOT_YET;
}

__device__ void sum_token(const CombineArgs& args, i32 token, i32 part) {
    const Comm& comm = args.comm;
    const u32 lane = lane_index(), ranks = args.token_to_ranks[token];
    const Terms terms = terms_of(args, args.first_row[comm.rank] + token);
    const Range range = range_of(part, args.parts);
    u8* const to = args.out + token * OUT_BYTES;
    for (i32 base = range.begin; base < range.end; base += UNROLL * WARP_SIZE) {
        const i32 first = base + static_cast<i32>(lane);
        Sum sums[UNROLL][N] = {};
        for (u32 left = ranks; left; left &= left - 1) {
            const u32 src = __ffs(left) - 1;
            if (src == comm.rank) {
                add_local_rows(args, terms, first, range.end, sums);
                continue;
            }
            const u64 place = static_cast<u64>(src) * comm.max_tokens + token;
            const u8* const from = section<u8>(comm, comm.rank, comm.sums) + place * WIRE_BYTES;
            WirePack held[UNROLL];
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < range.end) held[u].load_shared(from + (first + u * WARP_SIZE) * WirePack::BYTES);
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < range.end) held[u].add_to(sums[u], 1);
        }
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * WARP_SIZE < range.end) {
                OutPack pack;
                pack.round_from(sums[u]);
                pack.store(to + (first + u * WARP_SIZE) * OutPack::BYTES);
            }
    }
}

// Warps take partial sums to send from a counter, so only running warps get them. All sums are sent even if most blocks of
// this grid are not resident yet, for example because NCCL kernels occupy the device and wait for ranks that wait for these
// sums. The number is in lane 0 until `for_all_lanes` broadcasts it, later, since the atomic takes a microsecond.
__device__ __forceinline__ i32 take_send(const Comm& comm) {
    return lane_index() == 0 ? static_cast<i32>(atomicAdd(comm.state + NEXT_SEND, 1u)) : 0;
}
__device__ __forceinline__ i32 for_all_lanes(i32 of_first_lane) { return __shfl_sync(ALL_LANES, of_first_lane, 0); }

// Return false in warps that have given up.
__device__ __forceinline__ bool send_and_sum(const CombineArgs& args, u32 epoch) {
    const Comm& comm = args.comm;
    i32 taken = take_send(comm);
    if (!block_waits_for_peers(comm, comm.sums_released, epoch - 1, REUSING_SUMS)) return false;

    // Each warp has partial sums to send and tokens to add up. It never waits for sums while it can send, so there is no
    // circular wait between ranks.
    const i32 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    const i32 num_sends = args.longest * (NUM_RANKS - 1) * args.parts;
    const i32 num_sums = (args.first_row[comm.rank + 1] - args.first_row[comm.rank]) * args.parts;
    i32 sum = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x;  // consecutive items go to different multiprocessors
    i32 send = for_all_lanes(taken);
    while (send < num_sends || sum < num_sums) {
        if (sum < num_sums) {
            const i32 token = sum / args.parts, part = sum % args.parts;
            const Patience patience = send < num_sends ? Patience::LOOK : Patience::WAIT;
            const Arrival arrival = look_for_sums(args, token, part, epoch, patience);
            if (arrival == Arrival::NEVER) return false;
            if (arrival == Arrival::ALL_HERE) {
                sum_token(args, token, part);
                sum += num_warps;
                continue;
            }
        }
        taken = take_send(comm);
        const Item item = item_of(comm, send, max(1, NUM_RANKS - 1), args.parts, num_warps);
        if (item.token < args.first_row[item.rank + 1] - args.first_row[item.rank])
            send_partial_sum(args, item.rank, item.token, item.part, epoch);
        send = for_all_lanes(taken);
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
        if (threadIdx.x == 0) comm.state[COMBINE_EPOCH] = epoch, comm.state[NEXT_SEND] = 0;
    }
}
