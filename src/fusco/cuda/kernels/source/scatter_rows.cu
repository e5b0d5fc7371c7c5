// Dispatch: read each row for this rank's experts once, from any rank of the node, and write it to all its slots.
//
// One warp per row, or per part of a row if there are few. Sources take turns, so all links are busy.
// Twin: fusco.reference.scatter_rows.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_TOPK, NUM_PAYLOADS, PAYLOAD_BYTES and VECTOR_BYTES (lists with an
// entry for each payload), NUM_THREADS, CHUNK_ROWS, UNROLL.
#include "comm.cuh"

struct ScatterArgs {
    Comm comm;
    const u8* rows[NUM_RANKS][NUM_PAYLOADS];  // every rank's rows: this rank's in the caller's tensor, others in their pools
    u8* outputs[NUM_PAYLOADS];
    const i32* row_to_slots;
    const i32* block_to_first_slot;
    const i64* num_rows_per_expert;
    i32 first_row[NUM_RANKS + 1];
    i32 num_local_experts;
    i32 num_slots;
    i32 longest;          // maximum number of tokens of a rank
    i32 parts;            // warps that share a row
    u32 in_place_ranks;   // bit r is set if peers read rank r's rows from the caller's tensor
};
static_assert(sizeof(ScatterArgs) == ARGUMENT_BYTES, "scatter_rows.py mirrors this struct");

constexpr u64 ROW_BYTES[NUM_PAYLOADS] = {PAYLOAD_BYTES};
constexpr u32 WIDTHS[NUM_PAYLOADS] = {VECTOR_BYTES};

struct Slots {
    i32 mine;    // the slot of the lane-th pair, or negative
    u32 filled;  // lanes that have a slot
};

template <int BYTES, bool IS_SHARED>
__device__ __forceinline__ void copy_part(
    const u8* row, u8* output, u64 row_bytes, i32 part, i32 parts, const Slots& slots) {
    const auto* const from = reinterpret_cast<const Vector<BYTES>*>(row);
    const i32 num_vectors = static_cast<i32>(row_bytes / BYTES);
    const i32 per_part = (num_vectors + parts - 1) / parts;
    const i32 begin = part * per_part, end = min(num_vectors, begin + per_part);
    for (i32 first = begin + static_cast<i32>(lane_index()); first - static_cast<i32>(lane_index()) < end;
         first += UNROLL * WARP_SIZE) {
        Vector<BYTES> held[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * WARP_SIZE < end)
                held[u] = IS_SHARED ? load_shared_row(from + first + u * WARP_SIZE)
                                    : load_constant_row(from + first + u * WARP_SIZE);
        for (u32 left = slots.filled; left; left &= left - 1) {
            const i64 slot = __shfl_sync(ALL_LANES, slots.mine, __ffs(left) - 1);
            auto* const to = reinterpret_cast<Vector<BYTES>*>(output + slot * row_bytes);
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (first + u * WARP_SIZE < end) store_row(to + first + u * WARP_SIZE, held[u]);
        }
    }
}

template <bool IS_SHARED, u32 P = 0>
__device__ __forceinline__ void copy_payloads(const ScatterArgs& args, i32 src, i32 token, i32 part, const Slots& slots) {
    if constexpr (P < NUM_PAYLOADS) {
        const u8* const row = args.rows[src][P] + token * ROW_BYTES[P];
        copy_part<WIDTHS[P], IS_SHARED>(row, args.outputs[P], ROW_BYTES[P], part, args.parts, slots);
        copy_payloads<IS_SHARED, P + 1>(args, src, token, part, slots);
    }
}

// Experts' blocks are padded to the alignment; padding is zero.
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
                    args.block_to_first_slot[expert + 1]);
}

template <u32 P = 0> __device__ __forceinline__ void poison_slots(const ScatterArgs& args) {
    if constexpr (P < NUM_PAYLOADS) {
        block_poisons(args.outputs[P], args.num_slots * ROW_BYTES[P]);
        poison_slots<P + 1>(args);
    }
}

// Return false in warps that have given up.
__device__ __forceinline__ bool fill_slots(const ScatterArgs& args, u32 epoch, bool is_in_place) {
    const Comm& comm = args.comm;
    const u32 lane = lane_index();
    if (is_in_place && blockIdx.x == gridDim.x - 1)
        for (u32 peer = threadIdx.x; peer < NUM_RANKS; peer += NUM_THREADS)
            store_release_system(section<u32>(comm, peer, comm.rows_ready) + comm.rank * comm.max_chunks, epoch);

    const i32 num_items = args.longest * NUM_RANKS * args.parts;
    const i32 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    // Consecutive items go to different multiprocessors.
    bool is_alive = true;
    for (i32 item = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x; is_alive && item < num_items; item += num_warps) {
        const auto [token, src, part] = item_of(comm, item, NUM_RANKS, args.parts, num_warps);
        if (token >= args.first_row[src + 1] - args.first_row[src]) continue;
        const i32* const row_slots = args.row_to_slots + static_cast<i64>(args.first_row[src] + token) * NUM_TOPK;
        Slots slots;
        slots.mine = lane < NUM_TOPK ? row_slots[lane] : -1;
        slots.filled = __ballot_sync(ALL_LANES, slots.mine >= 0);
        if (!slots.filled) continue;
        if (src == comm.rank) {
            copy_payloads<false>(args, src, token, part, slots);
        } else {
            // Rows in place are announced as one chunk, the first.
            const i32 chunk = args.in_place_ranks >> src & 1 ? 0 : token / CHUNK_ROWS;
            const u32* const flag = section<u32>(comm, comm.rank, comm.rows_ready) + src * comm.max_chunks + chunk;
            is_alive = __all_sync(ALL_LANES, lane != 0 || wait_for_epoch(comm, flag, epoch, STAGING_ROWS, src, LONG_PAUSE));
            __syncwarp();  // all lanes may rely on what one lane has seen
            if (is_alive) copy_payloads<true>(args, src, token, part, slots);
        }
    }
    clear_padding(args);
    return is_alive;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2) scatter_rows(const __grid_constant__ ScatterArgs args) {
    const Comm& comm = args.comm;
    wait_for_prerequisites();
    const u32 epoch = comm.state[ROWS_EPOCH] + 1;
    const bool is_in_place = args.in_place_ranks >> comm.rank & 1;
    const bool has_begun = __all_sync(ALL_LANES, has_network_arrived(comm, epoch) && !is_broken(comm));
    const bool is_complete = has_begun && fill_slots(args, epoch, is_in_place);
    const Exit exit = block_exits(comm.state + NUM_DONE, is_complete);
    if (exit == Exit::BROKEN) return poison_slots(args);
    if (exit == Exit::ALL_COMPLETE) {
        signal_peers(comm, comm.rows_released, epoch, threadIdx.x, NUM_THREADS);
        // The caller may overwrite its rows as soon as this kernel ends.
        if (is_in_place) block_waits_for_peers(comm, comm.rows_released, epoch, LEAVING);
        if (threadIdx.x == 0) {
            // Staging is concurrent with this kernel and reads the same epoch, which must not advance before all its blocks end.
            if (!is_in_place) wait_for_epoch(comm, comm.state + STAGED_EPOCH, epoch, STAGING_ROWS, comm.rank);
            comm.state[ROWS_EPOCH] = epoch;
        }
    }
}
