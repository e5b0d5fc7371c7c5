// Backward of combine: multiply gradient rows by their weights in place, and compute the dot product of each unscaled
// gradient row with the experts' output row.
//
// One warp per row; each row is read once. Dot products are in float32 (float64 for float64 rows).
// Twin: tests/reference/weight_gradients.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, HIDDEN, ROW_TYPE, WEIGHT_BYTES (4, 8), HAS_DOTS (0, 1),
// VECTOR_ELEMENTS.
#include "elements.cuh"

struct WeightArgs {
    u8* grads;          // [row]
    const u8* rows;     // [row]
    const u8* weights;  // [row]
    u8* dots;           // [row], as accumulated
    i64 num_rows;
};
static_assert(sizeof(WeightArgs) == ARGUMENT_BYTES, "weight_gradients.py mirrors this struct");

template <int BYTES> struct WeightType { using Type = float; };
template <> struct WeightType<8> { using Type = double; };

using Row = Element<ROW_TYPE>;
using Sum = Row::Sum;
using Weight = WeightType<WEIGHT_BYTES>::Type;
constexpr u32 N = VECTOR_ELEMENTS, NUM_VECTORS = HIDDEN / N, UNROLL = 4;
using RowPack = Pack<Row, N>;

extern "C" __global__ void __launch_bounds__(NUM_THREADS) weight_gradients(const __grid_constant__ WeightArgs args) {
    const i64 num_warps = gridDim.x * (NUM_THREADS / WARP_SIZE);
    for (i64 row = threadIdx.x / WARP_SIZE * gridDim.x + blockIdx.x; row < args.num_rows; row += num_warps) {
        u8* const grads = args.grads + row * NUM_VECTORS * RowPack::BYTES;
        const u8* const rows = args.rows + row * NUM_VECTORS * RowPack::BYTES;
        const Weight weight = reinterpret_cast<const Weight*>(args.weights)[row];
        Sum dot = 0;
        for (u32 first = lane_index(); first < NUM_VECTORS; first += UNROLL * WARP_SIZE) {
            RowPack grad[UNROLL], other[UNROLL];
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (const u32 i = first + u * WARP_SIZE; i < NUM_VECTORS) {
                    grad[u].load_shared(grads + i * RowPack::BYTES);  // written below, so not constant
                    if constexpr (HAS_DOTS) other[u].load_constant(rows + i * RowPack::BYTES);
                }
#pragma unroll
            for (u32 u = 0; u < UNROLL; ++u)
                if (const u32 i = first + u * WARP_SIZE; i < NUM_VECTORS) {
#pragma unroll
                    for (u32 n = 0; n < N; ++n) {
                        const Sum value = Row::widen(grad[u].bits[n]);
                        if constexpr (HAS_DOTS) dot += multiply(value, Row::widen(other[u].bits[n]));
                        grad[u].bits[n] = Row::round(static_cast<Sum>(value * weight));
                    }
                    grad[u].store(grads + i * RowPack::BYTES);
                }
        }
        if constexpr (HAS_DOTS) {
#pragma unroll
            for (u32 offset = WARP_SIZE / 2; offset; offset /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, offset);
            if (lane_index() == 0) reinterpret_cast<Sum*>(args.dots)[row] = dot;
        }
    }
}
