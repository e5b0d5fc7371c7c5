// Divide the rows of each expert that has several owners among them; see planner/owners.py.
//
// A thread per expert; its column of rows is in shared memory. Twin: OwnerTables.divide_rows.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS.
#include "base.cuh"

struct DivideArgs {
    const i32* counts;           // [rank][expert]
    const i32* divided;          // [index], the experts with several owners, then -1
    const i32* expert_to_first;  // [expert], the first of its owners; last, their number
    const i32* units;            // [owner], shares in 2**-20; null: quotas are given
    const i32* owner_to_rank;    // [owner]
    const i32* rank_to_node;     // [rank]
    i32* quotas;                 // [owner], used up
    i32* bounds;                 // [owner], result: rows up to and including its own
    i32 num_ranks, num_experts, max_divided, rank;
};
static_assert(sizeof(DivideArgs) == ARGUMENT_BYTES, "divide_rows.py mirrors this struct");

constexpr i32 UNIT_BITS = 20;
enum Nearness { SAME_RANK, SAME_NODE, ANYWHERE };

// Write the rows that each of an expert's owners takes by its share, by largest remainder, lower owners first.
__device__ void write_quotas(const DivideArgs& args, i32 first, i32 end, i64 total) {
    i64 left = total;
    for (i32 owner = first; owner < end; ++owner) left -= total * args.units[owner] >> UNIT_BITS;
    const auto remainder = [&](i32 owner) { return total * args.units[owner] & ((1 << UNIT_BITS) - 1); };
    for (i32 owner = first; owner < end; ++owner) {
        i32 num_before = 0;
        for (i32 other = first; other < end; ++other)
            num_before += remainder(other) > remainder(owner) || (remainder(other) == remainder(owner) && other < owner);
        args.quotas[owner] = static_cast<i32>(total * args.units[owner] >> UNIT_BITS) + (num_before < left);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) divide_rows(const __grid_constant__ DivideArgs args) {
    extern __shared__ i32 shared[];  // [rank][thread], rows that have no owner yet
    const i32 index = blockIdx.x * NUM_THREADS + threadIdx.x;
    const i32 expert = index < args.max_divided ? args.divided[index] : -1;
    if (expert < 0) return;
    i32* const rows = shared + threadIdx.x;
    i64 total = 0;
    for (i32 src = 0; src < args.num_ranks; ++src)
        total += rows[src * NUM_THREADS] = args.counts[static_cast<i64>(src) * args.num_experts + expert];
    const i32 first = args.expert_to_first[expert], end = args.expert_to_first[expert + 1];
    if (args.units) write_quotas(args, first, end, total);
    for (i32 owner = first; owner < end; ++owner) args.bounds[owner] = 0;
    for (i32 nearness = SAME_RANK; nearness <= ANYWHERE; ++nearness)
        for (i32 src = 0; src < args.num_ranks; ++src)
            for (i32 owner = first; owner < end && rows[src * NUM_THREADS]; ++owner) {
                const i32 rank = args.owner_to_rank[owner];
                if (nearness == SAME_RANK && rank != src) continue;
                if (nearness == SAME_NODE && args.rank_to_node[rank] != args.rank_to_node[src]) continue;
                const i32 taken = min(rows[src * NUM_THREADS], args.quotas[owner]);
                rows[src * NUM_THREADS] -= taken;
                args.quotas[owner] -= taken;
                if (src == args.rank) args.bounds[owner] += taken;
            }
    for (i32 owner = first + 1; owner < end; ++owner) args.bounds[owner] += args.bounds[owner - 1];
}
