// Copy the experts of a batch's plan from their homes to spare places of the node's ranks; or return the gradients of
// copies, and add them at home, in ascending order of rank.
//
// Chunks of an expert are dealt to channels, a warp each, and each exchanges its chunks with the same channel of other ranks,
// without waiting for other warps: it stores a chunk into a slot of the receiver's arena, which copies it from there. Ends of a
// copy go through the messages of a common order, so among those that are left, the first can always move.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_RANKS, NUM_THREADS, NUM_TENSORS, NUM_BLOCKS, DEPTH (slots from each rank),
// CHUNK_BYTES, IS_SUM (gradients are added), ELEMENT (their type).
#include "comm.cuh"
#include "copy_bytes.cuh"
#include "elements.cuh"

struct ExpertTensor {
    const u8* source;  // of experts at home; of gradients, spare places
    u8* target;        // spare places; of gradients, sums of the experts at home
    i64 source_pitch, target_pitch;  // bytes from one place to the next
    i64 num_bytes;                   // of a place of the source
};

struct CopyExpertsArgs {
    Comm comm;
    const i32* plan;   // number of copies, a flag, rows of each expert, then expert, rank and rows of each copy
    const i32* homes;  // [expert], its physical expert
    u64 section;       // offset in an arena: flags and counters, then slots
    ExpertTensor tensors[NUM_TENSORS];
    i32 num_experts, places_per_rank, spare_places, num_targets;
};
static_assert(sizeof(CopyExpertsArgs) == ARGUMENT_BYTES, "copy_experts.py mirrors this struct");

using E = Element<ELEMENT>;
constexpr i32 HEADER_INTS = 2, COPY_INTS = 3;
constexpr i64 GROWTH = IS_SUM ? sizeof(E::Sum) / sizeof(E::Bits) : 1;  // from bytes of a source to those of its target
constexpr i32 NUM_CHANNELS = NUM_BLOCKS * NUM_THREADS / WARP_SIZE;
// Words of each channel and peer: messages that are here, those that the peer has read, and how many were sent and taken.
enum Word : i32 { ARRIVED, RELEASED, SENT, TAKEN, NUM_WORDS };
enum class Action : i32 { SEND, RECEIVE, GIVE_UP };

struct Message {
    i32 peer, place;  // of this rank's source or target
};

__device__ __forceinline__ i32 this_channel() { return (blockIdx.x * NUM_THREADS + threadIdx.x) / WARP_SIZE; }

// What a channel sends or receives: chunks of tensors of copies, in order.
struct Cursor {
    i32 message = 0, tensor = 0;
    i64 first = static_cast<i64>(this_channel()) * CHUNK_BYTES;  // byte of the chunk

    __device__ __forceinline__ void settle(const CopyExpertsArgs& args, i32 num_messages) {
        while (message < num_messages && first >= args.tensors[tensor].num_bytes) {
            first = static_cast<i64>(this_channel()) * CHUNK_BYTES;
            if (++tensor == NUM_TENSORS) tensor = 0, ++message;
        }
    }
    __device__ __forceinline__ void go_on(const CopyExpertsArgs& args, i32 num_messages) {
        first += static_cast<i64>(NUM_CHANNELS) * CHUNK_BYTES;
        settle(args, num_messages);
    }
    __device__ __forceinline__ i64 size(const CopyExpertsArgs& args) const {
        return min(static_cast<i64>(CHUNK_BYTES), args.tensors[tensor].num_bytes - first);
    }
};

__device__ __forceinline__ u32* words(const CopyExpertsArgs& args, i32 rank, Word word) {
    return section<u32>(args.comm, rank, args.section) + (word * NUM_CHANNELS + this_channel()) * NUM_RANKS;
}
// The slot of a message from `src` in a rank's arena.
__device__ __forceinline__ u8* slot_of(const CopyExpertsArgs& args, i32 rank, i32 src, u32 number) {
    const u64 flags = (4 * NUM_WORDS * NUM_CHANNELS * NUM_RANKS + 127) / 128 * 128;
    const u64 slot = (static_cast<u64>(this_channel()) * NUM_RANKS + src) * DEPTH + number % DEPTH;
    return args.comm.arena[rank] + args.section + flags + slot * CHUNK_BYTES;
}

// Write the messages of copies: `[0]`, from ranks that have the expert at home, `[1]`, of this rank's spare places; one thread.
__device__ void list_messages(const CopyExpertsArgs& args, const i32* experts, Message* of_homes, Message* of_places, i32* sizes) {
    const i32 rank = args.comm.rank, num_places = args.spare_places;
    const u32 absent = args.comm.state[ABSENT_RANKS];
    i32 num_homes = 0, num_here = 0;
    for (i32 i = 0; i < NUM_RANKS * num_places; ++i) {
        // Copies go to all ranks in turn; gradients come in ascending order of rank.
        const i32 peer = IS_SUM ? i / num_places : (rank + 1 + i % NUM_RANKS) % NUM_RANKS;
        const i32 expert = experts[peer * num_places + (IS_SUM ? i % num_places : i / NUM_RANKS)];
        if (expert < 0 || args.homes[expert] / args.places_per_rank != rank || has_rank(absent, peer)) continue;
        of_homes[num_homes++] = {peer, args.homes[expert] % args.places_per_rank};
    }
    for (i32 place = 0; place < num_places; ++place) {
        const i32 expert = experts[rank * num_places + place];
        if (expert < 0) continue;
        const i32 peer = args.homes[expert] / args.places_per_rank;
        if (!has_rank(absent, peer)) of_places[num_here++] = {peer, place};
    }
    sizes[0] = num_homes, sizes[1] = num_here;
}

// Return what this channel can do next; one lane.
__device__ Action next_action(const CopyExpertsArgs& args, const Message* sent, const Message* received) {
    const Comm& comm = args.comm;
    if (is_broken(comm)) return Action::GIVE_UP;
    SpinTimeout timeout;
    while (true) {
        Failure waiting{1, COPYING_EXPERTS, 0, 0, 0};
        if (received) {
            const u32 number = words(args, comm.rank, TAKEN)[received->peer] + 1;
            const u32 seen = load_acquire_system(words(args, comm.rank, ARRIVED) + received->peer);
            if (has_reached(seen, number)) return Action::RECEIVE;
            waiting.peer = received->peer, waiting.expected = number, waiting.seen = seen;
        }
        if (sent) {
            const u32 number = words(args, comm.rank, SENT)[sent->peer] + 1 - DEPTH;
            const u32 seen = load_acquire_system(words(args, comm.rank, RELEASED) + sent->peer);
            if (has_reached(seen, number)) return Action::SEND;
            if (!received) waiting.peer = sent->peer, waiting.expected = number, waiting.seen = seen;
        }
        __nanosleep(SHORT_PAUSE);
        if (!timeout.should_continue(comm, waiting)) return Action::GIVE_UP;
    }
}

__device__ __forceinline__ void add_elements(const u8* slot, E::Sum* sums, i64 number) {
    constexpr i32 WIDE = 16 / sizeof(E::Bits);
    for (i64 i = lane_index(); i < number / WIDE; i += WARP_SIZE) {
        Pack<E, WIDE> pack;
        pack.load_shared(slot + i * 16);
#pragma unroll
        for (i32 j = 0; j < WIDE; ++j) sums[i * WIDE + j] += E::widen(pack.bits[j]);
    }
    for (i64 i = number / WIDE * WIDE + lane_index(); i < number; i += WARP_SIZE) {
        Pack<E, 1> pack;
        pack.load_shared(slot + i * sizeof(E::Bits));
        sums[i] += E::widen(pack.bits[0]);
    }
}

// Fill this channel's chunks of a place of all targets.
__device__ void fill_place(const CopyExpertsArgs& args, i32 place, u8 value) {
    Cursor chunk;
    for (chunk.settle(args, 1); chunk.message < 1; chunk.go_on(args, 1)) {
        const ExpertTensor& tensor = args.tensors[chunk.tensor];
        u8* const target = tensor.target + place * tensor.target_pitch + chunk.first * GROWTH;
        fill_bytes<WARP_SIZE>(target, value, chunk.size(args) * GROWTH, lane_index());
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) copy_experts(const __grid_constant__ CopyExpertsArgs args) {
    extern __shared__ i32 shared[];  // experts in spare places of all ranks, messages of homes, those of this rank's places
    __shared__ i32 sizes[2];
    const Comm& comm = args.comm;
    const i32 num_places = NUM_RANKS * args.spare_places, num_copies = args.plan[0];
    const i32* const copies = args.plan + HEADER_INTS + args.num_experts;
    Message *const of_homes = reinterpret_cast<Message*>(shared + num_places), *const of_places = of_homes + num_places;
    for (i32 i = threadIdx.x; i < num_places; i += NUM_THREADS) shared[i] = -1;
    __syncthreads();
    for (i32 i = threadIdx.x; i < num_copies; i += NUM_THREADS) {
        const i32 rank = copies[COPY_INTS * i + 1];
        i32 place = 0;
        for (i32 j = 0; j < i; ++j) place += copies[COPY_INTS * j + 1] == rank;
        shared[rank * args.spare_places + place] = copies[COPY_INTS * i];
    }
    __syncthreads();
    if (threadIdx.x == 0) list_messages(args, shared, of_homes, of_places, sizes);
    __syncthreads();
    const Message *const sends = IS_SUM ? of_places : of_homes, *const receives = IS_SUM ? of_homes : of_places;
    const i32 num_sends = sizes[IS_SUM], num_receives = sizes[!IS_SUM];
    for (i32 place = 0, next = 0; !IS_SUM && place < args.spare_places; ++place) {
        if (next < num_receives && receives[next].place == place) ++next;
        else fill_place(args, place, 0);  // behind the last copy, or of an expert whose home is absent
    }
    Cursor sent, received;
    sent.settle(args, num_sends), received.settle(args, num_receives);
    while (sent.message < num_sends || received.message < num_receives) {
        const Message* const to = sent.message < num_sends ? sends + sent.message : nullptr;
        const Message* const from = received.message < num_receives ? receives + received.message : nullptr;
        Action what = Action::GIVE_UP;
        if (lane_index() == 0) what = next_action(args, to, from);
        __syncwarp();  // all lanes may rely on what one lane has seen
        what = static_cast<Action>(__shfl_sync(ALL_LANES, static_cast<i32>(what), 0));
        if (what == Action::GIVE_UP) break;
        if (what == Action::SEND) {
            const ExpertTensor& tensor = args.tensors[sent.tensor];
            const u32 number = words(args, comm.rank, SENT)[to->peer] + 1;
            const u8* const source = tensor.source + to->place * tensor.source_pitch + sent.first;
            copy_bytes<WARP_SIZE>(source, slot_of(args, to->peer, comm.rank, number), sent.size(args), lane_index());
            __syncwarp();  // all lanes have stored
            if (lane_index() == 0) {
                store_release_system(words(args, to->peer, ARRIVED) + comm.rank, number);
                words(args, comm.rank, SENT)[to->peer] = number;
            }
            sent.go_on(args, num_sends);
        } else {
            const ExpertTensor& tensor = args.tensors[received.tensor];
            const u32 number = words(args, comm.rank, TAKEN)[from->peer] + 1;
            const u8* const slot = slot_of(args, comm.rank, from->peer, number);
            u8* const target = tensor.target + from->place * tensor.target_pitch + received.first * GROWTH;
            if (IS_SUM)
                add_elements(slot, reinterpret_cast<E::Sum*>(target), received.size(args) / sizeof(E::Bits));
            else
                copy_bytes<WARP_SIZE>(slot, target, received.size(args), lane_index());
            __syncwarp();  // all lanes have read
            if (lane_index() == 0) {
                words(args, comm.rank, TAKEN)[from->peer] = number;
                store_release_system(words(args, from->peer, RELEASED) + comm.rank, number);
            }
            received.go_on(args, num_receives);
        }
        __syncwarp();  // before counters are read again
    }
    if (__any_sync(ALL_LANES, is_broken(comm)))  // a replayed graph would otherwise return earlier values
        for (i32 place = 0; place < args.num_targets; ++place) fill_place(args, place, 0xff);
}
