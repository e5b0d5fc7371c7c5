// Copy scattered segments of memory to scattered destinations.
//
// Each block copies an equal piece of the total bytes: part of a large segment, or many small ones. Segments are cut at
// multiples of 16 bytes from their beginning, so accesses stay wide.
// Twin: tests/reference/copy_segments.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS.
#include "copy_bytes.cuh"

struct CopyArgs {
    const u8* src;
    u8* dst;
    const i64* segments;  // [3][num_segments]: offset in src, offset in dst, bytes up to the end of the segment
    i64 num_segments;
    i64 piece_bytes;
};
static_assert(sizeof(CopyArgs) == ARGUMENT_BYTES, "copy_segments.py mirrors this struct");

// Return the first segment that ends after a byte of the concatenated segments.
__device__ i64 segment_at(const i64* ends, i64 num_segments, i64 byte) {
    i64 first = 0, last = num_segments;
    while (first < last) {
        const i64 middle = (first + last) / 2;
        if (ends[middle] > byte) last = middle;
        else first = middle + 1;
    }
    return first;
}

// Round a cut in a segment up to a multiple of 16 bytes.
__device__ __forceinline__ i64 rounded_up(i64 num_bytes) { return num_bytes > 0 ? (num_bytes + 15) / 16 * 16 : 0; }

extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_segments(const __grid_constant__ CopyArgs args) {
    const i64* const src_offset = args.segments;
    const i64* const dst_offset = args.segments + args.num_segments;
    const i64* const ends = args.segments + 2 * args.num_segments;
    const i64 total = ends[args.num_segments - 1];
    for (i64 begin = blockIdx.x * args.piece_bytes; begin < total; begin += gridDim.x * args.piece_bytes) {
        const i64 end = begin + args.piece_bytes;
        for (i64 i = segment_at(ends, args.num_segments, begin); i < args.num_segments; ++i) {
            const i64 segment_begin = i ? ends[i - 1] : 0;
            if (segment_begin >= end) break;
            const i64 first = rounded_up(begin - segment_begin);
            const i64 last = min(ends[i] - segment_begin, rounded_up(end - segment_begin));
            if (first >= last) continue;
            const u8* const src = args.src + src_offset[i] + first;
            copy_bytes<NUM_THREADS>(src, args.dst + dst_offset[i] + first, last - first, threadIdx.x);
        }
    }
}
