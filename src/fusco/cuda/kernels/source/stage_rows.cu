// Copy rows into the pool that peers read, chunk by chunk, and announce each chunk to all peers.
//
// Twin: torch.Tensor.copy_, since rows are copied unchanged.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_PAYLOADS, NUM_THREADS, CHUNK_ROWS.
#include "comm.cuh"

struct StageArgs {
    Comm comm;
    const u8* payloads[NUM_PAYLOADS];  // the caller's rows
    u8* pools[NUM_PAYLOADS];           // the pool
    u64 row_bytes[NUM_PAYLOADS];
    i32 num_tokens;
};
static_assert(sizeof(StageArgs) == ARGUMENT_BYTES, "stage_rows.py mirrors this struct");

__device__ __forceinline__ void copy_bytes(const u8* src, u8* dst, u64 num_bytes) {
    constexpr u32 UNROLL = 4;
    const u64 num_vectors = num_bytes / 16;
    const auto* from = reinterpret_cast<const Vector<16>*>(src);
    auto* to = reinterpret_cast<Vector<16>*>(dst);
    for (u64 first = threadIdx.x; first < num_vectors; first += UNROLL * NUM_THREADS) {
        Vector<16> held[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * NUM_THREADS < num_vectors) held[u] = load_constant_row(from + first + u * NUM_THREADS);
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (first + u * NUM_THREADS < num_vectors) store_row(to + first + u * NUM_THREADS, held[u]);
    }
    for (u64 i = num_vectors * 16 + threadIdx.x; i < num_bytes; i += NUM_THREADS) dst[i] = src[i];
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) stage_rows(const __grid_constant__ StageArgs args) {
    const Comm& comm = args.comm;
    const u32 epoch = comm.state[ROWS_EPOCH] + 1;  // scatter_rows advances the epoch only after this grid
    if (!block_waits_for_peers(comm, comm.rows_released, epoch - 1, REUSING_POOL)) return;
    const i32 num_chunks = (args.num_tokens + CHUNK_ROWS - 1) / CHUNK_ROWS;
    for (i32 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const i32 first = chunk * CHUNK_ROWS, end = min(args.num_tokens, first + CHUNK_ROWS);
#pragma unroll
        for (u32 p = 0; p < NUM_PAYLOADS; ++p) {
            // Chunks are multiples of 16 rows, so each begins on a multiple of 16 bytes.
            const u64 offset = first * args.row_bytes[p];
            copy_bytes(args.payloads[p] + offset, args.pools[p] + offset, (end - first) * args.row_bytes[p]);
        }
        __syncthreads();
        for (u32 peer = threadIdx.x; peer < NUM_RANKS; peer += NUM_THREADS)
            if (peer != comm.rank)
                store_release_system(section<u32>(comm, peer, comm.rows_ready) + comm.rank * comm.max_chunks + chunk, epoch);
    }
    if (block_exits(comm.state + NUM_STAGED, true) == Exit::ALL_COMPLETE && threadIdx.x == 0) comm.state[STAGED_EPOCH] = epoch;
}
