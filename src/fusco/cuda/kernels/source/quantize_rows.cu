// Quantise rows: codes of 8 or 4 bits, and a scale for each block of BLOCK columns.
//
// Rows are whole blocks, and contiguous, so all of them are one run of blocks: rows do not matter here. A lane has eight
// columns, and BLOCK / 8 lanes a block, whose largest value they exchange. A warp reads several runs of 256 columns before it
// computes any. Every column is read once, and every code written once.
// Twin: tests/reference/quantize_rows.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, ROW_TYPE, BLOCK (16 to 256), RULE (ScaleRule), SCALE_BYTES (1, 4).
#include "elements.cuh"
#include "small_floats.cuh"

struct QuantizeArgs {
    const u8* rows;
    u8* values;
    u8* scales;
    i64 num_columns;  // of all rows
    float global_scale;
};
static_assert(sizeof(QuantizeArgs) == ARGUMENT_BYTES, "quantize_rows.py mirrors this struct");

using Row = Element<ROW_TYPE>;
constexpr u32 N = 8, LANES = BLOCK / N, UNROLL = 4, PIECE = N * WARP_SIZE;
constexpr u32 VALUE_BYTES = RULE == NVFP4 ? N / 2 : N;
using RowPack = Pack<Row, N>;

__device__ __forceinline__ Vector<VALUE_BYTES> codes_of(const RowPack& columns, float factor) {
    float scaled[2][4];
#pragma unroll
    for (u32 n = 0; n < N; ++n) scaled[n / 4][n % 4] = multiply(Row::widen(columns.bits[n]), factor);
    Vector<VALUE_BYTES> codes = {};
#pragma unroll
    for (u32 n = 0; n < N; ++n) {
        if constexpr (RULE == NVFP4) codes.words[0] |= e2m1_code(scaled[n / 4][n % 4]) << 4 * n;
        else if (n % 4 == 0) codes.words[n / 4] = e4m3_codes(scaled[n / 4]);
    }
    return codes;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) quantize_rows(const __grid_constant__ QuantizeArgs args) {
    const i64 warp = static_cast<i64>(blockIdx.x) * (NUM_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const i64 num_warps = static_cast<i64>(gridDim.x) * (NUM_THREADS / WARP_SIZE);
    for (i64 piece = warp * UNROLL; piece * PIECE < args.num_columns; piece += num_warps * UNROLL) {
        RowPack columns[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u)
            if (const i64 at = (piece + u) * PIECE + lane_index() * N; at < args.num_columns)
                columns[u].load_constant(args.rows + at * sizeof(Row::Bits));
#pragma unroll
        for (u32 u = 0; u < UNROLL; ++u) {
            const i64 at = (piece + u) * PIECE + lane_index() * N;
            const bool is_there = at < args.num_columns;  // the same for all lanes of a block
            u32 largest = 0;
#pragma unroll
            for (u32 n = 0; n < N; ++n)
                if (is_there) largest = max(largest, __float_as_uint(Row::widen(columns[u].bits[n])) & MAGNITUDE);
#pragma unroll
            for (u32 step = LANES / 2; step; step /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
            if (!is_there) continue;
            const BlockScale scale = scale_of<RULE>(largest, args.global_scale);
            store_row(reinterpret_cast<Vector<VALUE_BYTES>*>(args.values + at / N * VALUE_BYTES),
                      codes_of(columns[u], scale.factor));
            if (at % BLOCK) continue;
            if constexpr (SCALE_BYTES == 1) args.scales[at / BLOCK] = static_cast<u8>(scale.bits);
            else reinterpret_cast<u32*>(args.scales)[at / BLOCK] = RULE == AMAX ? scale.bits : scale.bits << 23;
        }
    }
}
