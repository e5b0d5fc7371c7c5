// Copying scattered pieces of memory to scattered places, each piece by one block.
//
// Twin: fusco.kernels.reference.copy_segments.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS.
#include "base.cuh"

struct CopyArgs {
    const u8* src;
    u8* dst;
    const i64* pieces;  // [3][num_pieces]: offset in src, offset in dst, number of bytes
    i64 num_pieces;
};
static_assert(sizeof(CopyArgs) == ARGUMENT_BYTES, "arguments.py mirrors this struct");

template <int BYTES> __device__ __forceinline__ void copy_as(const u8* src, u8* dst, i64 num_bytes) {
    const auto* from = reinterpret_cast<const Vector<BYTES>*>(src);
    auto* to = reinterpret_cast<Vector<BYTES>*>(dst);
    for (i64 i = threadIdx.x; i < num_bytes / BYTES; i += NUM_THREADS) store_row(to + i, load_shared_row(from + i));
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_segments(const __grid_constant__ CopyArgs args) {
    for (i64 piece = blockIdx.x; piece < args.num_pieces; piece += gridDim.x) {
        const u8* src = args.src + args.pieces[piece];
        u8* dst = args.dst + args.pieces[args.num_pieces + piece];
        const i64 num_bytes = args.pieces[2 * args.num_pieces + piece];
        const u64 alignment = reinterpret_cast<u64>(src) | reinterpret_cast<u64>(dst) | static_cast<u64>(num_bytes);
        if (alignment % 16 == 0) copy_as<16>(src, dst, num_bytes);
        else if (alignment % 4 == 0) copy_as<4>(src, dst, num_bytes);
        else copy_as<1>(src, dst, num_bytes);
    }
}
