// Communicator arguments of every kernel, and the waits and signals between ranks of a node. Ranks here are local ranks.
//
// Compile-time constants: NUM_RANKS, of the node, and MAX_PARTS, flags of a row. The structs mirror those of fusco/cuda/kernels/comm.py, field by field.
#pragma once

#include "base.cuh"

// Private counters of a rank. Epochs are counted on the device, so a replayed graph continues to count.
enum State : u32 {
    IS_BROKEN,      // a wait timed out, or the host aborted: all waits return at once
    PLAN_EPOCH,     // plans made
    ROWS_EPOCH,     // dispatches done
    COMBINE_EPOCH,  // combines done
    GRID_COUNT,     // blocks that arrived at the grid barrier
    GRID_GENERATION,
    NUM_DONE,       // blocks that finished their kernel
    FIRST_BAD_PAIR, // of a plan: the complement of the first pair with an invalid expert id; 0 for none
    NEXT_SEND,      // rows or partial sums, of this dispatch or combine, that warps have taken to send
    NEXT_RECEIVE,   // rows or tokens that warps have taken to scatter or sum once all has arrived
    BARRIER_EPOCH,  // node barriers done
    COUNTS_EPOCH,   // exchanges of counts done
    ABSENT_RANKS,   // bit r: rank r is gone: nothing is awaited from it, or written there; the host writes it between launches
};

// Purpose of a wait: an index into PHASES of fusco/cuda/failure.py.
enum Phase : u32 {
    EXCHANGING_ROUTING, REUSING_ROWS, RECEIVING_ROWS, REUSING_SUMS, SUMMING_ROWS, GRID_BARRIER, NETWORK, NODE_BARRIER,
    SHARING_COUNTS, COPYING_EXPERTS, EXCHANGING_ROWS
};

// Values of the host's abort word. After the last one, memory that the network should have written is undefined.
enum Abort : u32 { NO_ABORT, END_WAITS, NETWORK_HAS_FAILED };

// The first wait that ended without what it waited for, in host memory. It timed out, or the host gave up.
struct Failure {
    u32 is_set, phase, peer, expected, seen;
};

struct Comm {
    u8* arena[NUM_RANKS];  // every rank's peer-visible memory, as mapped here
    u32* state;            // private counters, indexed by State
    Failure* failure;      // in host memory
    const u32* abort;      // an Abort, in host memory
    u64 timeout_ns;
    // Byte offsets of the sections of an arena.
    u64 routing_ready;  // [source][chunk] plan epoch of the chunk of a source's routing that is here
    u64 rows_released;  // [peer] dispatch epoch after which peer has read what this rank pushed to it
    u64 sums_released;  // [peer] combine epoch after which peer has read what this rank pushed to it
    u64 node_ready;     // [peer] node barrier that peer has come to
    u64 rows_ready;     // [src][token][part] dispatch epoch of src's row that is here
    u64 sums_ready;     // [src][token][part] combine epoch of the partial sum that is here
    u64 ids;            // [parity][source][max_tokens * num_topk] i32
    u64 weights;        // [parity][source][max_tokens * num_topk] 4 or 8 bytes
    u64 received;       // [src][received_bytes] rows or partial sums that a rank of the node pushes
    u64 received_bytes;
    i32 rank;
    i32 max_tokens;
    i32 max_topk;
    i32 has_network;  // there are other nodes
};

template <typename T> __device__ __forceinline__ T* section(const Comm& comm, int rank, u64 offset) {
    return reinterpret_cast<T*>(comm.arena[rank] + offset);
}

// The other ranks of the node that take part: bit r. Kernels of graphs that were captured before a rank was lost go on by it.
__device__ __forceinline__ u32 other_members(const Comm& comm) { return ~(comm.state[ABSENT_RANKS] | 1u << comm.rank); }
__device__ __forceinline__ bool has_rank(u32 ranks, u32 rank) { return ranks >> rank & 1; }

__device__ __forceinline__ bool is_broken(const Comm& comm) {
    return *reinterpret_cast<volatile u32*>(comm.state + IS_BROKEN) != 0;
}

// End all waits on this device. The first caller reports its wait in host memory.
__device__ __noinline__ void break_off(const Comm& comm, const Failure& failure) {
    if (atomicExch(comm.state + IS_BROKEN, 1u) == 0) {
        Failure* report = comm.failure;
        report->phase = failure.phase, report->peer = failure.peer;
        report->expected = failure.expected, report->seen = failure.seen;
        __threadfence_system();
        *reinterpret_cast<volatile u32*>(&report->is_set) = 1;
    }
}

// Return false, and break off, if the network has failed. Kernels that read what it has received begin with this. One thread
// of the grid reads host memory, which takes it a microsecond.
__device__ __forceinline__ bool has_network_arrived(const Comm& comm, u32 epoch) {
    if (!comm.has_network || blockIdx.x || threadIdx.x) return true;
    if (*reinterpret_cast<const volatile u32*>(comm.abort) != NETWORK_HAS_FAILED) return true;
    break_off(comm, {1, NETWORK, static_cast<u32>(comm.rank), epoch, 0});
    return false;
}

// Overwrite an output, aligned to 16 bytes, of a communicator that has broken: a replayed graph would otherwise return the
// values of its previous replay. Bytes of 0xff are NaN in all floating types, those of 8 bits included, and -1 in signed
// integers. One block calls it, the last of its grid, since others may still write.
__device__ __noinline__ void block_poisons(u8* output, u64 num_bytes) {
    const u64 num_vectors = num_bytes / 16;
    for (u64 i = threadIdx.x; i < num_vectors; i += blockDim.x)
        store_row(reinterpret_cast<Vector<16>*>(output) + i, {{~0u, ~0u, ~0u, ~0u}});
    for (u64 i = num_vectors * 16 + threadIdx.x; i < num_bytes; i += blockDim.x) output[i] = 0xff;
}

// Timeout of a spin-wait. It rarely checks the abort flag: thousands of warps that read host memory at once would queue for
// milliseconds.
class SpinTimeout {
  public:
    __device__ __forceinline__ SpinTimeout() : since_(nanoseconds()), next_check_(since_ + CHECK_INTERVAL) {}

    // Call between polls; false once the wait should end.
    __device__ __forceinline__ bool should_continue(const Comm& comm, const Failure& waiting_for) {
        if (++polls_ % POLLS_PER_CLOCK_READ || nanoseconds() < next_check_) return true;
        return check(comm, waiting_for);
    }

  private:
    static constexpr u32 POLLS_PER_CLOCK_READ = 64;
    static constexpr u64 CHECK_INTERVAL = 10'000'000;  // ns
    // A block that waits for a peer before the grid barrier gives up first: its report names the peer.
    static constexpr u64 BARRIER_GRACE = 1'000'000'000;  // ns

    __device__ __noinline__ bool check(const Comm& comm, Failure waiting_for) {
        next_check_ = nanoseconds() + CHECK_INTERVAL;
        if (is_broken(comm)) return false;
        const u64 limit = comm.timeout_ns + (waiting_for.phase == GRID_BARRIER ? BARRIER_GRACE : 0);
        if (!*reinterpret_cast<const volatile u32*>(comm.abort) && nanoseconds() - since_ < limit) return true;
        break_off(comm, waiting_for);
        return false;
    }

    u64 since_, next_check_;
    u32 polls_ = 0;
};

// Pause between polls: short where a wait is the last step before a result, longer where thousands of warps poll the same
// flag, which must be written in the meantime.
constexpr u32 SHORT_PAUSE = 40, LONG_PAUSE = 500;  // ns

// Epochs wrap around. A flag is never further ahead of its reader than this, but may be any number of epochs behind: flags
// of tokens or chunks beyond the current batch keep an old epoch.
constexpr u32 MAX_EPOCH_LEAD = 16;
__device__ __forceinline__ bool has_reached(u32 seen, u32 epoch) { return seen - epoch < MAX_EPOCH_LEAD; }

// Wait until a flag of `peer` reaches `epoch`, unless that rank is absent; false on timeout or abort. The acquire load at the
// end is cheaper than a fence, which would wait for this SM's stores. The first load acquires, too: most flags are set before
// they are looked for.
__device__ __forceinline__ bool wait_for_epoch(
    const Comm& comm, const u32* flag, u32 epoch, Phase phase, u32 peer, u32 pause = SHORT_PAUSE) {
    if (has_reached(load_acquire_system(flag), epoch) || has_rank(comm.state[ABSENT_RANKS], peer)) return true;
    SpinTimeout timeout;
    for (u32 seen; !has_reached(seen = load_relaxed_system(flag), epoch);) {
        __nanosleep(pause);
        if (!timeout.should_continue(comm, {1, phase, peer, epoch, seen})) return false;
    }
    (void)load_acquire_system(flag);
    return true;
}

// Wait until every rank has read what this one has pushed to it: rows of dispatches and partial sums of combines are in the
// same memory. All threads get the result, false if broken. The last warp waits: the first ones take items meanwhile.
__device__ __forceinline__ bool block_waits_for_memory(const Comm& comm, u32 rows_epoch, u32 sums_epoch) {
    bool is_ready = !is_broken(comm);
    for (u32 i = blockDim.x - 1 - threadIdx.x; i < 2 * NUM_RANKS; i += blockDim.x) {
        const u32 peer = i % NUM_RANKS;
        is_ready &= i < NUM_RANKS ? wait_for_epoch(comm, section<u32>(comm, comm.rank, comm.rows_released) + peer,
                                                   rows_epoch, REUSING_ROWS, peer)
                                  : wait_for_epoch(comm, section<u32>(comm, comm.rank, comm.sums_released) + peer,
                                                   sums_epoch, REUSING_SUMS, peer);
    }
    return __syncthreads_and(is_ready);
}

// Set this rank's flag on every rank that takes part.
__device__ __forceinline__ void signal_peers(const Comm& comm, u64 flags, u32 epoch, u32 thread, u32 num_threads) {
    for (u32 peer = thread; peer < NUM_RANKS; peer += num_threads)
        if (!has_rank(comm.state[ABSENT_RANKS], peer))
            store_release_system(section<u32>(comm, peer, flags) + comm.rank, epoch);
}

// What a block is told at the end of its kernel: other blocks still run, or it is the last one. Then all threads of all
// blocks have completed their work, or not.
enum class Exit { OTHERS_RUN, ALL_COMPLETE, BROKEN };

// Let a block arrive; the last one resets the counter. All threads must call it. The counter carries whether all are
// complete, as reading the state would take the last block another microsecond. It needs no fence of the system: each warp
// has released to peers what it has stored there, and the last block releases what all blocks have read.
__device__ __forceinline__ Exit block_exits(u32* counter, bool is_complete) {
    constexpr u32 BROKEN_BLOCK = 1 << 16;
    __shared__ u32 arrived;
    const bool is_block_complete = __syncthreads_and(is_complete);
    if (threadIdx.x == 0) {
        const u32 mine = is_block_complete ? 1 : 1 + BROKEN_BLOCK;
        arrived = add_acquire_release_device(counter, mine) + mine;
        if (arrived % BROKEN_BLOCK == gridDim.x) *counter = 0;
    }
    __syncthreads();
    if (arrived % BROKEN_BLOCK != gridDim.x) return Exit::OTHERS_RUN;
    return arrived < BROKEN_BLOCK ? Exit::ALL_COMPLETE : Exit::BROKEN;
}

// A work item of a kernel: one part of one token of a rank.
struct Item {
    i32 token, rank, part;
};

// Items are in order of token, `num_turns` ranks in turn, beginning with the one after this rank, so all links are busy.
// The order of ranks shifts from round to round; otherwise a warp would get the same rank every time.
__device__ __forceinline__ Item item_of(const Comm& comm, i32 number, i32 num_turns, i32 parts, i32 num_warps) {
    const i32 whole = number / parts;
    const i32 token = whole / num_turns;
    const i32 round = static_cast<i32>(static_cast<i64>(token) * num_turns * parts / num_warps);
    const i32 turn = (whole % num_turns + round) % num_turns;
    return {token, static_cast<i32>((comm.rank + 1 + turn) % NUM_RANKS), number % parts};
}

// Warps take what to send and what to receive from counters, so only running warps get work. All is sent even if most blocks
// of a grid are not resident yet, for example because NCCL kernels occupy the device and wait for ranks that wait for this
// one. The number is in lane 0 until `for_all_lanes` broadcasts it, later, since the atomic takes a microsecond. At the end
// thousands of warps find nothing left: a load tells them, since atomics to one address follow each other.
__device__ __forceinline__ i32 take(const Comm& comm, State counter, i32 num_items) {
    if (lane_index() != 0) return 0;
    const u32 taken = *reinterpret_cast<volatile u32*>(comm.state + counter);
    return static_cast<i32>(taken < static_cast<u32>(num_items) ? atomicAdd(comm.state + counter, 1u) : taken);
}
__device__ __forceinline__ i32 for_all_lanes(i32 of_first_lane) { return __shfl_sync(ALL_LANES, of_first_lane, 0); }

constexpr i32 NUM_WARPS = NUM_THREADS / WARP_SIZE;

// The items that a block's warps begin with: in the first `num_senders` blocks with sends, as many as it takes if all of
// these blocks are resident, and all other warps with receives likewise. So few items are spread over all SMs.
struct Beginning {
    i32 num_sends, num_receives;
    bool has_more_sends, has_more_receives;  // than the grid begins with

    __device__ __forceinline__ Beginning(i32 num_senders, i32 sends, i32 receives) {
        const i32 num_blocks = gridDim.x;
        const i32 of_sender = min(NUM_WARPS, (sends + num_senders - 1) / max(1, num_senders));
        const i32 per_block = (receives + num_blocks - 1) / num_blocks;
        const bool is_sender = static_cast<i32>(blockIdx.x) < num_senders;
        num_sends = is_sender ? of_sender : 0;
        num_receives = min(NUM_WARPS - num_sends, per_block);
        has_more_sends = num_senders * of_sender < sends;
        has_more_receives = num_senders * min(NUM_WARPS - of_sender, per_block) +
                                (num_blocks - num_senders) * min(NUM_WARPS, per_block) < receives;
    }

    // Take them, by one atomic for all warps of the block: atomics to one address are slow. Threads synchronise before they
    // read `first_send` and `first_receive`, which are shared.
    __device__ __forceinline__ void take_all(const Comm& comm, i32& first_send, i32& first_receive) const {
        if (threadIdx.x == 0 && num_sends)
            first_send = static_cast<i32>(atomicAdd(comm.state + NEXT_SEND, static_cast<u32>(num_sends)));
        if (threadIdx.x == WARP_SIZE % NUM_THREADS && num_receives)
            first_receive = static_cast<i32>(atomicAdd(comm.state + NEXT_RECEIVE, static_cast<u32>(num_receives)));
    }
    // The item of this warp, -1 if it begins without.
    __device__ __forceinline__ i32 send_of(i32 warp, i32 first_send) const {
        return warp < num_sends ? first_send + warp : -1;
    }
    __device__ __forceinline__ i32 receive_of(i32 warp, i32 first_receive) const {
        return warp >= num_sends && warp < num_sends + num_receives ? first_receive + warp - num_sends : -1;
    }
};

enum class Arrival { ALL_HERE, NOT_YET, NEVER };
constexpr u32 MAX_LOOKS = 32;  // of about a microsecond each, before a warp sends instead

// Look for the flags of a warp's lanes: `max_looks` times, or if that is 0 until all are set.
__device__ __forceinline__ Arrival warp_looks_for(
    const Comm& comm, const u32* flag, u32 epoch, Phase phase, u32 peer, bool has_flag, u32 max_looks) {
    bool is_here = true;
    if (has_flag && !max_looks) is_here = wait_for_epoch(comm, flag, epoch, phase, peer);
    else if (has_flag) {
        u32 looks = 0;
        do is_here = has_reached(load_acquire_system(flag), epoch);
        while (!is_here && ++looks < max_looks);
    }
    const bool are_all_here = __all_sync(ALL_LANES, is_here);
    __syncwarp();  // all lanes may rely on what one lane has seen
    if (are_all_here) return Arrival::ALL_HERE;
    return max_looks ? Arrival::NOT_YET : Arrival::NEVER;
}

// Flags, at a rank, of a part of a row or partial sum that `src` pushes there.
__device__ __forceinline__ u32* row_flag(const Comm& comm, u32 at, u32 src, i32 token, i32 part) {
    return section<u32>(comm, at, comm.rows_ready) + (static_cast<u64>(src) * comm.max_tokens + token) * MAX_PARTS + part;
}
__device__ __forceinline__ u32* sum_flag(const Comm& comm, u32 at, u32 src, i32 token, i32 part) {
    return section<u32>(comm, at, comm.sums_ready) + (static_cast<u64>(src) * comm.max_tokens + token) * MAX_PARTS + part;
}

// Grid barrier. The grid must not have more blocks than SMs: then all of them become resident, at once or when
// other kernels end. Long-running kernels that wait for other ranks, such as NCCL's, must leave this grid that many
// SMs. (A cooperative launch would guarantee it at once, but costs 12 us.)
__device__ __forceinline__ bool grid_barrier(const Comm& comm) {
    bool is_ready = true;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 generation = load_acquire_device(comm.state + GRID_GENERATION);
        if (add_acquire_release_device(comm.state + GRID_COUNT, 1) == gridDim.x - 1) {
            comm.state[GRID_COUNT] = 0;
            add_acquire_release_device(comm.state + GRID_GENERATION, 1);
        } else {
            SpinTimeout timeout;
            const u32 own_rank = comm.rank;
            while (is_ready && load_acquire_device(comm.state + GRID_GENERATION) == generation)
                is_ready = timeout.should_continue(comm, {1, GRID_BARRIER, own_rank, gridDim.x, comm.state[GRID_COUNT]});
        }
    }
    return __syncthreads_and(is_ready);
}
