// Gather and weighted sum: out[token] = sum over k of weight[token][k] * rows[row_idx[token][k]], in float32 (float64
// for float64 rows), in order of k. Indices outside of the rows contribute nothing.
//
// One block per token; each term is read once, and a lane has the loads of several k in flight.
// Twin: weighted_sum_on_cpu of bench/baseline.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, HIDDEN, NUM_TOPK, ROW_TYPE, VECTOR_ELEMENTS.
#include "elements.cuh"

struct WeightedSumArgs {
    const u8* rows;       // [row]
    const i64* row_idx;   // [token][k]
    const u8* weights;    // [token][k], as accumulated
    u8* out;              // [token]
    i64 num_rows;
    i64 num_tokens;
};
static_assert(sizeof(WeightedSumArgs) == ARGUMENT_BYTES, "weighted_sum.py mirrors this struct");

using Row = Element<ROW_TYPE>;
using Sum = Row::Sum;
constexpr u32 N = VECTOR_ELEMENTS, NUM_VECTORS = HIDDEN / N, IN_FLIGHT = NUM_TOPK < 8 ? NUM_TOPK : 8;
using RowPack = Pack<Row, N>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) weighted_sum(const __grid_constant__ WeightedSumArgs args) {
    for (i64 token = blockIdx.x; token < args.num_tokens; token += gridDim.x) {
        const i64* const row_idx = args.row_idx + token * NUM_TOPK;
        const Sum* const weights = reinterpret_cast<const Sum*>(args.weights) + token * NUM_TOPK;
        for (u32 i = threadIdx.x; i < NUM_VECTORS; i += NUM_THREADS) {
            Sum sums[N] = {};
            for (u32 first = 0; first < NUM_TOPK; first += IN_FLIGHT) {
                RowPack terms[IN_FLIGHT];
                bool is_there[IN_FLIGHT];
#pragma unroll
                for (u32 k = 0; k < IN_FLIGHT; ++k) {
                    const i64 row = first + k < NUM_TOPK ? row_idx[first + k] : -1;
                    is_there[k] = row >= 0 && row < args.num_rows;
                    if (is_there[k]) terms[k].load_constant(args.rows + (row * NUM_VECTORS + i) * RowPack::BYTES);
                }
#pragma unroll
                for (u32 k = 0; k < IN_FLIGHT; ++k)
                    if (is_there[k]) terms[k].add_to(sums, weights[first + k]);
            }
            RowPack out;
            out.round_from(sums);
            out.store(args.out + (token * NUM_VECTORS + i) * RowPack::BYTES);
        }
    }
}
