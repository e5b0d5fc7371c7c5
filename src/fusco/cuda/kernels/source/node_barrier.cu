// Barrier of a node's ranks: what each of them has stored before, here and at others, all of them see afterwards.
//
// One block. Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_THREADS.
#include "comm.cuh"

struct BarrierArgs {
    Comm comm;
};
static_assert(sizeof(BarrierArgs) == ARGUMENT_BYTES, "node_barrier.py mirrors this struct");

extern "C" __global__ void __launch_bounds__(NUM_THREADS) node_barrier(const __grid_constant__ BarrierArgs args) {
    const Comm& comm = args.comm;
    const u32 epoch = comm.state[BARRIER_EPOCH] + 1;
    __threadfence_system();  // stores of earlier kernels to other ranks
    __syncthreads();  // all threads have read the epoch
    if (!is_broken(comm)) signal_peers(comm, comm.node_ready, epoch, threadIdx.x, blockDim.x);
    for (u32 peer = threadIdx.x; peer < NUM_RANKS && !is_broken(comm); peer += blockDim.x)
        wait_for_epoch(comm, section<u32>(comm, comm.rank, comm.node_ready) + peer, epoch, NODE_BARRIER, peer);
    if (threadIdx.x == 0) comm.state[BARRIER_EPOCH] = epoch;
}
