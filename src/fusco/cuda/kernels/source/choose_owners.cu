// Choose the physical expert of each pair (token, k), where an expert may be in several places; see planner/owners.py.
//
// A thread per pair. The index of a pair among those of its expert decides, so each block first counts the experts of
// all pairs before its own, in shared memory, instead of waiting for other blocks.
// Twin: choose_owners of tests/reference.
//
// Compile-time constants: ARGUMENT_BYTES, ID_BYTES (4, 8), PAIRS_PER_BLOCK, NUM_THREADS.
#include "ids.cuh"

struct ChooseArgs {
    const void* topk_idx;          // [pair]
    void* chosen;                  // [pair]
    const i32* expert_to_first;    // [expert], the first of its owners; last, their number
    const i32* owners;             // [owner], physical expert
    const i32* expert_to_divided;  // [expert], index among the experts with several owners, or -1
    const i32* bounds;             // [owner], rows up to and including its own; null: owners take turns
    i64 num_pairs;
    i32 num_experts, num_physical, rank, max_divided;
};
static_assert(sizeof(ChooseArgs) == ARGUMENT_BYTES, "choose_owners.py mirrors this struct");

constexpr i64 UNPLACED = -0x80000000ll;  // of planner/routing.py

__device__ __forceinline__ bool is_expert(const ChooseArgs& args, i64 id) { return id >= 0 && id < args.num_experts; }

// Return the owner of the ``number``-th pair of an expert, as an index among its owners.
__device__ __forceinline__ i32 owner_of(const ChooseArgs& args, i32 first, i32 num_owners, i32 number) {
    if (args.bounds == nullptr) return (number + args.rank) % num_owners;
    i32 owner = 0;
    while (owner + 1 < num_owners && args.bounds[first + owner] <= number) ++owner;
    return owner;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) choose_owners(const __grid_constant__ ChooseArgs args) {
    extern __shared__ i32 shared[];  // [divided], pairs before those that this block, and each warp in turn, looks at
    for (i32 i = threadIdx.x; i < args.max_divided; i += NUM_THREADS) shared[i] = 0;
    __syncthreads();
    const i64 first_pair = static_cast<i64>(blockIdx.x) * PAIRS_PER_BLOCK;
    const auto divided_index = [&](i64 id) { return is_expert(args, id) ? args.expert_to_divided[id] : -1; };
    count_ids(args.topk_idx, first_pair, shared, divided_index);
    __syncthreads();
    const i64 end = min(first_pair + static_cast<i64>(PAIRS_PER_BLOCK), args.num_pairs);
    for (i64 tile = first_pair; tile < end; tile += NUM_THREADS) {
        const i64 pair = tile + threadIdx.x;
        const i64 id = pair < end ? id_at(args.topk_idx, pair) : -1;
        const i32 index = divided_index(id);
        const u32 same = __match_any_sync(ALL_LANES, index), before = same & ((1u << threadIdx.x % WARP_SIZE) - 1);
        i32 number = 0;
        for (u32 warp = 0; warp < NUM_THREADS / WARP_SIZE; ++warp) {
            if (warp == threadIdx.x / WARP_SIZE) {
                if (index >= 0) number = shared[index] + __popc(before);
                __syncwarp();  // all lanes have read
                if (index >= 0 && !before) shared[index] += __popc(same);
            }
            __syncthreads();
        }
        i64 physical = id;
        if (is_expert(args, id)) {
            const i32 first = args.expert_to_first[id], num_owners = args.expert_to_first[id + 1] - first;
            const i32 owner = index >= 0 ? owner_of(args, first, num_owners, number) : 0;
            physical = num_owners ? args.owners[first + owner] : -1;  // none of an expert that is lost
        } else if (id >= args.num_experts && id < args.num_physical) {
            physical = id + UNPLACED;  // no expert, and no physical one either
        }
        if (pair >= end) continue;
        if (ID_BYTES == 8)
            static_cast<i64*>(args.chosen)[pair] = physical;
        else
            static_cast<i32*>(args.chosen)[pair] = static_cast<i32>(physical);
    }
}
