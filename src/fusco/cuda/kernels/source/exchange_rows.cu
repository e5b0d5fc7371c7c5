// Exchange the rows of an all-to-all within a node: to each rank one run of bytes of the input, from each one of the output.
//
// Chunks of a run are dealt to lanes, and each lane exchanges its chunks with the same lane of other ranks: it stores a chunk
// into a slot of the receiver's arena, which copies it from there. A lane's i-th run goes to the rank i behind this one and
// comes from the rank i before it, so among the chunks that are left, the first can always move. A block goes through its
// lanes in ascending order, so ranks may differ in their blocks. Twin: tests/unit/cuda/simulated_kernels.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_THREADS, MAX_LANES, DEPTH (slots of a lane from each rank).
#include "comm.cuh"
#include "copy_bytes.cuh"

struct ExchangeArgs {
    Comm comm;
    const u8* input;
    u8* output;
    u64 flags, rings;                                  // offsets in an arena
    i64 ring_bytes, chunk_bytes;                       // of each rank's ring, and of a slot
    i64 input_ends[NUM_RANKS], output_ends[NUM_RANKS];  // of runs, in order of rank
    i32 num_lanes, pad;
};
static_assert(sizeof(ExchangeArgs) == ARGUMENT_BYTES, "exchange_rows.py mirrors this struct");

// Words of each lane and peer: chunks that are here, those that the peer has read, and how many were sent and taken.
enum Word : i32 { ARRIVED, RELEASED, SENT, TAKEN };
enum class Action : i32 { SEND, RECEIVE, GIVE_UP };

__device__ __forceinline__ i64 begin_of(const i64* ends, i32 rank) { return rank ? ends[rank - 1] : 0; }

// A lane's chunks of all runs in one direction, in order.
struct Cursor {
    const i64* ends;
    i32 step;  // 1 or -1: ranks behind this one, or before it
    i32 lane, peer, number;
    i64 first;  // byte of the chunk in its run

    __device__ __forceinline__ Cursor(const ExchangeArgs& args, const i64* ends, i32 step, i32 lane)
        : ends(ends), step(step), lane(lane), peer(args.comm.rank), number(0), first(0) {
        next_run(args);
        settle(args);
    }
    __device__ __forceinline__ bool is_left() const { return number < NUM_RANKS; }
    __device__ __forceinline__ i64 begin() const { return begin_of(ends, peer) + first; }
    __device__ __forceinline__ i64 size(const ExchangeArgs& args) const { return min(args.chunk_bytes, ends[peer] - begin()); }
    __device__ __forceinline__ void next_run(const ExchangeArgs& args) {
        peer = (peer + step + NUM_RANKS) % NUM_RANKS, first = lane * args.chunk_bytes, ++number;
    }
    __device__ __forceinline__ void settle(const ExchangeArgs& args) {
        while (is_left() && begin() >= ends[peer]) next_run(args);
    }
    __device__ __forceinline__ void go_on(const ExchangeArgs& args) {
        first += args.num_lanes * args.chunk_bytes;
        settle(args);
    }
};

__device__ __forceinline__ u32* words(const ExchangeArgs& args, i32 rank, Word word, i32 lane) {
    return section<u32>(args.comm, rank, args.flags) + (word * MAX_LANES + lane) * NUM_RANKS;
}
// The slot of a chunk from `src` in a rank's arena.
__device__ __forceinline__ u8* slot_of(const ExchangeArgs& args, i32 rank, i32 src, i32 lane, u32 number) {
    const i64 slot = lane * DEPTH + number % DEPTH;
    return args.comm.arena[rank] + args.rings + src * args.ring_bytes + slot * args.chunk_bytes;
}

// Return what a lane can do next; one thread.
__device__ Action next_action(const ExchangeArgs& args, const Cursor& sent, const Cursor& received) {
    const Comm& comm = args.comm;
    if (is_broken(comm)) return Action::GIVE_UP;
    SpinTimeout timeout;
    while (true) {
        Failure waiting{1, EXCHANGING_ROWS, 0, 0, 0};
        if (received.is_left()) {
            const u32 number = words(args, comm.rank, TAKEN, sent.lane)[received.peer] + 1;
            const u32 seen = load_acquire_system(words(args, comm.rank, ARRIVED, sent.lane) + received.peer);
            if (has_reached(seen, number)) return Action::RECEIVE;
            waiting.peer = received.peer, waiting.expected = number, waiting.seen = seen;
        }
        if (sent.is_left()) {
            const u32 number = words(args, comm.rank, SENT, sent.lane)[sent.peer] + 1 - DEPTH;
            const u32 seen = load_acquire_system(words(args, comm.rank, RELEASED, sent.lane) + sent.peer);
            if (has_reached(seen, number)) return Action::SEND;
            if (!received.is_left()) waiting.peer = sent.peer, waiting.expected = number, waiting.seen = seen;
        }
        __nanosleep(SHORT_PAUSE);
        if (!timeout.should_continue(comm, waiting)) return Action::GIVE_UP;
    }
}

// Exchange the chunks of a lane; false if broken.
__device__ bool exchange(const ExchangeArgs& args, i32 lane, Action& action) {
    const Comm& comm = args.comm;
    Cursor sent(args, args.input_ends, 1, lane), received(args, args.output_ends, -1, lane);
    while (sent.is_left() || received.is_left()) {
        if (threadIdx.x == 0) action = next_action(args, sent, received);
        __syncthreads();
        const Action what = action;
        if (what == Action::GIVE_UP) return false;
        const bool is_send = what == Action::SEND;
        const i32 peer = is_send ? sent.peer : received.peer;
        u32* const count = words(args, comm.rank, is_send ? SENT : TAKEN, lane) + peer;
        const u32 number = *count + 1;
        if (is_send)
            copy_bytes(args.input + sent.begin(), slot_of(args, peer, comm.rank, lane, number), sent.size(args));
        else
            copy_bytes(slot_of(args, comm.rank, peer, lane, number), args.output + received.begin(), received.size(args));
        __syncthreads();  // all threads have stored, or read, and know the number
        if (threadIdx.x == 0) {
            *count = number;
            store_release_system(words(args, peer, is_send ? ARRIVED : RELEASED, lane) + comm.rank, number);
        }
        if (is_send) sent.go_on(args);
        else received.go_on(args);
        __syncthreads();  // before counters are read again
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) exchange_rows(const __grid_constant__ ExchangeArgs args) {
    __shared__ Action action;
    const i32 rank = args.comm.rank;
    const i64 from = begin_of(args.input_ends, rank), to = begin_of(args.output_ends, rank);
    const i64 size = args.input_ends[rank] - from;
    for (i64 i = blockIdx.x * args.chunk_bytes; i < size; i += gridDim.x * args.chunk_bytes)
        copy_bytes(args.input + from + i, args.output + to + i, min(args.chunk_bytes, size - i));
    for (i32 lane = blockIdx.x; lane < args.num_lanes; lane += gridDim.x)
        if (!exchange(args, lane, action)) return;
}
