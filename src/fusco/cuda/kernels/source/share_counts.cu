// Count a rank's pairs (token, k) of each expert, and exchange the counts among the ranks of the node.
//
// One block: it counts in shared memory, stores to all ranks, and waits for theirs. Counts of a launch are not overwritten
// by the next one, which a faster rank may have begun, and those of the launch after it follow once this rank has begun
// the next. Twin: count_experts of tests/reference.
//
// Compile-time constants: ARGUMENT_BYTES, ID_BYTES (4, 8), NUM_RANKS, NUM_THREADS.
#include "comm.cuh"
#include "ids.cuh"

struct ShareArgs {
    Comm comm;
    const void* topk_idx;  // [pair]
    i32* counts;           // [rank of all nodes][expert], on this rank alone; the rows of this node are written
    u64 ready;             // offset in an arena: [src] launch whose counts are here
    u64 arrived;           // offset in an arena: [parity][src][expert]
    i64 num_pairs;
    i32 num_experts;
    i32 ranks[NUM_RANKS];  // of all nodes, by local rank
};
static_assert(sizeof(ShareArgs) == ARGUMENT_BYTES, "share_counts.py mirrors this struct");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) share_counts(const __grid_constant__ ShareArgs args) {
    extern __shared__ i32 shared[];  // [expert]
    const Comm& comm = args.comm;
    const i32 num_experts = args.num_experts;
    const u32 epoch = comm.state[COUNTS_EPOCH] + 1, absent = comm.state[ABSENT_RANKS];
    for (i32 expert = threadIdx.x; expert < num_experts; expert += NUM_THREADS) shared[expert] = 0;
    __syncthreads();  // all threads have read the epoch
    count_ids(args.topk_idx, args.num_pairs, shared, [&](i64 id) {
        return id >= 0 && id < num_experts ? static_cast<i32>(id) : -1;
    });
    __syncthreads();
    const u64 first = static_cast<u64>(epoch % 2) * NUM_RANKS * num_experts;
    for (i32 i = threadIdx.x; i < num_experts * NUM_RANKS; i += NUM_THREADS) {
        const i32 peer = (comm.rank + 1 + i / num_experts) % NUM_RANKS, expert = i % num_experts;
        if (!has_rank(absent, peer))
            section<i32>(comm, peer, args.arrived)[first + comm.rank * num_experts + expert] = shared[expert];
    }
    __syncthreads();
    bool is_ready = !is_broken(comm);
    if (is_ready) signal_peers(comm, args.ready, epoch, threadIdx.x, NUM_THREADS);
    for (u32 peer = threadIdx.x; peer < NUM_RANKS && is_ready; peer += NUM_THREADS)
        is_ready = wait_for_epoch(comm, section<u32>(comm, comm.rank, args.ready) + peer, epoch, SHARING_COUNTS, peer);
    is_ready = __syncthreads_and(is_ready);
    const Vector<4>* const arrived = section<Vector<4>>(comm, comm.rank, args.arrived) + first;
    for (i32 i = threadIdx.x; i < num_experts * NUM_RANKS; i += NUM_THREADS)
        args.counts[static_cast<i64>(args.ranks[i / num_experts]) * num_experts + i % num_experts] =
            is_ready && !has_rank(absent, i / num_experts) ? static_cast<i32>(load_shared_row(arrived + i).words[0]) : 0;
    if (threadIdx.x == 0) comm.state[COUNTS_EPOCH] = epoch;
}
