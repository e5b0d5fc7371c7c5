// Exchange the rows of an all-to-all within a node: to each rank one run of bytes of the input, from each one of the output.
//
// Chunks of a run are dealt to channels, and a warp exchanges the chunks of one with the same channel of other ranks: it stores
// a chunk into a slot of the receiver's arena, which copies it from there. A channel's i-th run goes to the rank i behind this
// one and comes from the rank i before it, so among the chunks that are left, the first can always move. A warp goes through
// its channels in ascending order, so ranks may differ in their blocks. Twin: tests/unit/cuda/simulated_kernels.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_THREADS, MAX_CHANNELS, DEPTH (slots of a channel from each rank).
#include "comm.cuh"
#include "copy_bytes.cuh"

struct ExchangeArgs {
    Comm comm;
    const u8* input;
    u8* output;
    u64 flags, rings;                                  // offsets in an arena
    i64 ring_bytes, chunk_bytes;                       // of each rank's ring, and of a slot
    i64 input_ends[NUM_RANKS], output_ends[NUM_RANKS];  // of runs, in order of rank
    i32 num_channels, pad;
};
static_assert(sizeof(ExchangeArgs) == ARGUMENT_BYTES, "exchange_rows.py mirrors this struct");

// Words of each channel and peer: chunks that are here, those that the peer has read, and how many were sent and taken.
enum Word : i32 { ARRIVED, RELEASED, SENT, TAKEN };
enum class Action : i32 { SEND, RECEIVE, GIVE_UP };

__device__ __forceinline__ i64 begin_of(const i64* ends, i32 rank) { return rank ? ends[rank - 1] : 0; }

// A channel's chunks of all runs in one direction, in order.
struct Cursor {
    const i64* ends;
    i32 step;  // 1 or -1: ranks behind this one, or before it
    i32 channel, peer, number;
    i64 first;  // byte of the chunk in its run

    __device__ __forceinline__ Cursor(const ExchangeArgs& args, const i64* ends, i32 step, i32 channel)
        : ends(ends), step(step), channel(channel), peer(args.comm.rank), number(0), first(0) {
        next_run(args);
        settle(args);
    }
    __device__ __forceinline__ bool is_left() const { return number < NUM_RANKS; }
    __device__ __forceinline__ i64 begin() const { return begin_of(ends, peer) + first; }
    __device__ __forceinline__ i64 size(const ExchangeArgs& args) const { return min(args.chunk_bytes, ends[peer] - begin()); }
    __device__ __forceinline__ void next_run(const ExchangeArgs& args) {
        peer = (peer + step + NUM_RANKS) % NUM_RANKS, first = channel * args.chunk_bytes, ++number;
    }
    __device__ __forceinline__ void settle(const ExchangeArgs& args) {
        while (is_left() && begin() >= ends[peer]) next_run(args);
    }
    __device__ __forceinline__ void go_on(const ExchangeArgs& args) {
        first += args.num_channels * args.chunk_bytes;
        settle(args);
    }
};

__device__ __forceinline__ u32* words(const ExchangeArgs& args, i32 rank, Word word, i32 channel) {
    return section<u32>(args.comm, rank, args.flags) + (word * MAX_CHANNELS + channel) * NUM_RANKS;
}
// The slot of a chunk from `src` in a rank's arena.
__device__ __forceinline__ u8* slot_of(const ExchangeArgs& args, i32 rank, i32 src, i32 channel, u32 number) {
    const i64 slot = channel * DEPTH + number % DEPTH;
    return args.comm.arena[rank] + args.rings + src * args.ring_bytes + slot * args.chunk_bytes;
}

// Return what a channel can do next; one lane.
__device__ Action next_action(const ExchangeArgs& args, const Cursor& sent, const Cursor& received) {
    const Comm& comm = args.comm;
    if (is_broken(comm)) return Action::GIVE_UP;
    SpinTimeout timeout;
    while (true) {
        Failure waiting{1, EXCHANGING_ROWS, 0, 0, 0};
        if (received.is_left()) {
            const u32 number = words(args, comm.rank, TAKEN, sent.channel)[received.peer] + 1;
            const u32 seen = load_acquire_system(words(args, comm.rank, ARRIVED, sent.channel) + received.peer);
            if (has_reached(seen, number)) return Action::RECEIVE;
            waiting.peer = received.peer, waiting.expected = number, waiting.seen = seen;
        }
        if (sent.is_left()) {
            const u32 number = words(args, comm.rank, SENT, sent.channel)[sent.peer] + 1 - DEPTH;
            const u32 seen = load_acquire_system(words(args, comm.rank, RELEASED, sent.channel) + sent.peer);
            if (has_reached(seen, number)) return Action::SEND;
            if (!received.is_left()) waiting.peer = sent.peer, waiting.expected = number, waiting.seen = seen;
        }
        __nanosleep(SHORT_PAUSE);
        if (!timeout.should_continue(comm, waiting)) return Action::GIVE_UP;
    }
}

// Exchange the chunks of a channel; false if broken.
__device__ bool exchange(const ExchangeArgs& args, i32 channel) {
    const Comm& comm = args.comm;
    Cursor sent(args, args.input_ends, 1, channel), received(args, args.output_ends, -1, channel);
    while (sent.is_left() || received.is_left()) {
        Action what = Action::GIVE_UP;
        if (lane_index() == 0) what = next_action(args, sent, received);
        __syncwarp();  // all lanes may rely on what one lane has seen
        what = static_cast<Action>(__shfl_sync(ALL_LANES, static_cast<i32>(what), 0));
        if (what == Action::GIVE_UP) return false;
        const bool is_send = what == Action::SEND;
        const i32 peer = is_send ? sent.peer : received.peer;
        u32* const count = words(args, comm.rank, is_send ? SENT : TAKEN, channel) + peer;
        const u32 number = *count + 1;
        u8* const slot = slot_of(args, is_send ? peer : comm.rank, is_send ? comm.rank : peer, channel, number);
        if (is_send) copy_bytes<WARP_SIZE>(args.input + sent.begin(), slot, sent.size(args), lane_index());
        else copy_bytes<WARP_SIZE>(slot, args.output + received.begin(), received.size(args), lane_index());
        __syncwarp();  // all lanes have stored, or read, and know the number
        if (lane_index() == 0) {
            *count = number;
            store_release_system(words(args, peer, is_send ? ARRIVED : RELEASED, channel) + comm.rank, number);
        }
        if (is_send) sent.go_on(args);
        else received.go_on(args);
        __syncwarp();  // before counters are read again
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) exchange_rows(const __grid_constant__ ExchangeArgs args) {
    const i32 rank = args.comm.rank, warp = (blockIdx.x * NUM_THREADS + threadIdx.x) / WARP_SIZE;
    const i32 num_warps = gridDim.x * NUM_THREADS / WARP_SIZE;
    const u8* const from = args.input + begin_of(args.input_ends, rank);
    u8* const to = args.output + begin_of(args.output_ends, rank);
    const i64 size = args.input_ends[rank] - begin_of(args.input_ends, rank);
    for (i64 i = warp * args.chunk_bytes; i < size; i += num_warps * args.chunk_bytes)
        copy_bytes<WARP_SIZE>(from + i, to + i, min(args.chunk_bytes, size - i), lane_index());
    for (i32 channel = warp; channel < args.num_channels; channel += num_warps)
        if (!exchange(args, channel)) return;
}
