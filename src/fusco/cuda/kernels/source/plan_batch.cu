// Plan the copies of a batch and the owners of its rows, from the rows of each expert; see placement/batch.py.
//
// One block, whose warps try the ways to hold a cap, each with its own state in shared memory. The lanes of a warp find
// giver, expert and taker of a copy by reductions. Twin: plan_batch of placement/batch.py, OwnerTables of planner/owners.py.
//
// Compile-time constants: ARGUMENT_BYTES, NUM_THREADS, and those of core/balance.py: NUM_CAPS, NUM_RULES, MOST_TRIES,
// NUM_TRIES, PRECISION, FIRST_GAP.
#include "base.cuh"

struct Copy {
    i32 expert, rank, rows;
};

struct PlanHeader {
    i32 num_copies, is_aim_held;
};

struct BatchArgs {
    const i32* counts;         // [rank][expert]
    const i32* order;          // [expert], experts by home
    const i32* first;          // [rank], the first of its experts in this order; last, their number
    const i32* homes;          // [expert], the physical expert
    const i32* empty_places;   // [rank][spare place], physical experts
    Copy* tried;               // [way][copy], scratch
    PlanHeader* header;        // results
    i32* rows_per_expert;      // [expert]
    Copy* copies;              // [copy]
    i32* expert_to_first;      // tables of owners, as planner/owners.py has them
    i32* owners;
    i32* owner_to_rank;
    i32* quotas;
    i32* expert_to_divided;
    i32* divided;
    const u32* absent;         // bit r: rank r of the only node is gone, after a graph was captured; see State of comm.cuh
    double aim_over_mean, rows_per_copy;
    i32 num_ranks, num_experts, places_per_rank, spare_places, ranks_per_node, max_divided;
};
static_assert(sizeof(BatchArgs) == ARGUMENT_BYTES, "plan_batch.py mirrors this struct");

constexpr i32 NUM_WARPS = NUM_THREADS / WARP_SIZE;
constexpr i32 MOST = 0x7fffffff, ANY = 2;

// A rank that is gone computes nothing: its experts have no rows, and it takes no copies.
__device__ __forceinline__ bool is_absent(const BatchArgs& args, i32 rank) {
    return rank < static_cast<i32>(WARP_SIZE) && (*args.absent >> rank & 1);
}
__device__ __forceinline__ i32 places_of(const BatchArgs& args, i32 rank) {
    return is_absent(args, rank) ? 0 : args.spare_places;
}

// What a warp has of a batch while it copies experts.
struct State {
    i32* left;    // [expert], rows of the home
    i32* loads;   // [rank]
    i32* places;  // [rank], that are left
    i32* sent;    // [rank], copies
};

struct Held {
    i32 num_copies, most_load, most_copies;
};

// The lowest index of those with the greatest value of all lanes, values of at least 0; -1 if all are negative.
__device__ __forceinline__ i32 warp_argmax(i32 value, i32 index) {
    const i32 most = static_cast<i32>(__reduce_max_sync(ALL_LANES, static_cast<u32>(value < 0 ? 0 : value + 1))) - 1;
    if (most < 0) return -1;
    return static_cast<i32>(__reduce_min_sync(ALL_LANES, static_cast<u32>(value == most ? index : MOST)));
}
// Of the indices below `size` for which it is not negative, the first with the greatest value; -1 if there is none.
template <typename F> __device__ __forceinline__ i32 argmax(i32 size, F&& value_of) {
    i32 most = -1, index = MOST;
    for (i32 i = lane_index(); i < size; i += WARP_SIZE) {
        const i32 value = value_of(i);
        if (value > most) most = value, index = i;
    }
    return warp_argmax(most, index);
}
// The index of one for which it holds, by a random number; -1: none.
template <typename F> __device__ __forceinline__ i32 some(i32 size, i64 seed, F&& holds) {
    i32 number = 0;
    for (i32 i = lane_index(); i < size; i += WARP_SIZE) number += holds(i);
    number = __reduce_add_sync(ALL_LANES, number);
    i32 skipped = static_cast<i32>((seed >> 12) % max(number, 1));
    for (i32 i = 0; i < size; i += WARP_SIZE) {
        const i32 mine = i + static_cast<i32>(lane_index());
        u32 lanes = __ballot_sync(ALL_LANES, mine < size && holds(mine));
        if (skipped >= __popc(lanes)) {
            skipped -= __popc(lanes);
            continue;
        }
        for (; skipped; --skipped) lanes &= lanes - 1;
        return i + __ffs(lanes) - 1;
    }
    return -1;
}
__device__ __forceinline__ i64 next(i64 seed) { return (seed * 1103515245 + 12345) % 2147483648ll; }

__device__ i32 giver_of(const BatchArgs& args, const State& state, i32 cap, i32 rule, i64 seed) {
    const i32* const loads = state.loads;
    if (rule == 0) return argmax(args.num_ranks, [=](i32 rank) { return loads[rank] > cap ? loads[rank] : -1; });
    if (rule == 1) return argmax(args.num_ranks, [=](i32 rank) { return loads[rank] > cap ? MOST - 1 - loads[rank] : -1; });
    return some(args.num_ranks, seed, [=](i32 rank) { return loads[rank] > cap; });
}

// The rank of least room for the wanted rows, on the giver's node if there is one; else that of most room; -1: none.
__device__ i32 taker_of(const BatchArgs& args, const State& state, i32 cap, i32 giver, i32 wanted) {
    const i32 *const loads = state.loads, *const places = state.places, node = giver / args.ranks_per_node;
    const auto room_of = [=](i32 rank) { return places[rank] ? cap - loads[rank] : 0; };
    const i32 best = argmax(args.num_ranks, [&](i32 rank) {
        const i32 room = room_of(rank);
        return room <= 0 || room < wanted ? -1 : MOST - 1 - (rank / args.ranks_per_node == node ? room : room + cap);
    });
    if (best >= 0) return best;
    return argmax(args.num_ranks, [&](i32 rank) { return room_of(rank) > 0 ? room_of(rank) : -1; });
}

// The place in a rank's experts of the one with the most rows left.
__device__ __forceinline__ i32 largest_of(const BatchArgs& args, const State& state, i32 rank) {
    const i32 first = args.first[rank];
    return argmax(args.first[rank + 1] - first, [&](i32 i) { return state.left[args.order[first + i]]; });
}

// Copy experts until no rank has more rows than the cap: a warp. The number of copies is -1 if places do not suffice.
__device__ Held hold(
    const BatchArgs& args, const State& state, const i32* rows, const i32* before, i32 cap, i32 way, Copy* copies) {
    const i32 num_ranks = args.num_ranks;
    __syncwarp();
    for (i32 i = lane_index(); i < args.num_experts; i += WARP_SIZE) state.left[i] = rows[i];
    for (i32 i = lane_index(); i < num_ranks; i += WARP_SIZE)
        state.loads[i] = before[i], state.places[i] = places_of(args, i), state.sent[i] = 0;
    __syncwarp();
    i32 giver_rule = way / 2, taker_rule = way % 2, num_copies = 0;
    i64 seed = way;
    while (true) {
        if (way >= NUM_RULES) {
            seed = next(seed);
            giver_rule = (seed >> 16) % 3, taker_rule = (seed >> 20) % 3;
        }
        const i32 giver = giver_of(args, state, cap, giver_rule, seed);
        if (giver < 0) break;
        const i32 expert = args.order[args.first[giver] + largest_of(args, state, giver)];
        const i32 surplus = state.loads[giver] - cap, left = state.left[expert];
        const i32 taker = taker_rule == ANY
            ? some(num_ranks, next(seed), [&](i32 rank) { return state.loads[rank] < cap && state.places[rank] > 0; })
            : taker_of(args, state, cap, giver, taker_rule == 0 ? min(surplus, left) : cap);
        const i32 moved = taker < 0 ? 0 : min(min(surplus, left), cap - state.loads[taker]);
        if (moved <= 0) return {-1, 0, 0};
        __syncwarp();  // all lanes have read
        if (lane_index() == 0) {
            copies[num_copies] = {expert, taker, moved};
            state.left[expert] -= moved;
            state.loads[giver] -= moved, state.loads[taker] += moved;
            --state.places[taker], ++state.sent[giver];
        }
        ++num_copies;
        __syncwarp();
    }
    i32 most_load = 0, most_copies = 0;
    for (i32 i = lane_index(); i < num_ranks; i += WARP_SIZE) {
        most_load = max(most_load, state.loads[i]);
        most_copies = max(most_copies, max(state.sent[i], places_of(args, i) - state.places[i]));
    }
    most_load = static_cast<i32>(__reduce_max_sync(ALL_LANES, static_cast<u32>(most_load)));
    most_copies = static_cast<i32>(__reduce_max_sync(ALL_LANES, static_cast<u32>(most_copies)));
    return {num_copies, most_load, most_copies};
}

// Return false if ranks with room have too few places, even if each could take as much as the one of most room: a warp.
__device__ bool has_places(const BatchArgs& args, const State& state, const i32* rows, const i32* before, i32 cap) {
    __syncwarp();
    const i32 num_places = args.num_ranks * args.spare_places;
    i32 least = MOST, num_left = 0, num_used = 0, is_possible = 1;
    for (i32 i = lane_index(); i < args.num_experts; i += WARP_SIZE) state.left[i] = rows[i];
    for (i32 rank = lane_index(); rank < args.num_ranks; rank += WARP_SIZE) {
        if (!is_absent(args, rank)) least = min(least, before[rank]);
        num_left += before[rank] < cap ? places_of(args, rank) : 0;
    }
    const i32 most_room = cap - static_cast<i32>(__reduce_min_sync(ALL_LANES, static_cast<u32>(least)));
    __syncwarp();
    for (i32 rank = lane_index(); rank < args.num_ranks; rank += WARP_SIZE)
        for (i32 surplus = before[rank] - cap; surplus > 0 && is_possible && num_used <= num_places; ++num_used) {
            i32 largest = args.order[args.first[rank]];
            for (i32 i = args.first[rank]; i < args.first[rank + 1]; ++i)
                if (state.left[args.order[i]] > state.left[largest]) largest = args.order[i];
            const i32 moved = min(state.left[largest], most_room);
            is_possible = moved > 0;
            state.left[largest] -= moved, surplus -= moved;
        }
    return __all_sync(ALL_LANES, is_possible) && __reduce_add_sync(ALL_LANES, num_left - num_used) >= 0;
}

// Write the tables of the owners that the plan's copies and all homes are. Behind the copies, in shared memory, there is
// room for as many marks.
__device__ void write_tables(const BatchArgs& args, const Copy* copies, i32 num_copies) {
    i32* const is_first = reinterpret_cast<i32*>(const_cast<Copy*>(copies) + num_copies);  // of its expert
    for (i32 i = threadIdx.x; i < num_copies; i += NUM_THREADS) {
        is_first[i] = 1;
        for (i32 j = 0; j < i; ++j) is_first[i] &= copies[j].expert != copies[i].expert;
    }
    __syncthreads();
    for (i32 expert = threadIdx.x; expert <= args.num_experts; expert += NUM_THREADS) {
        i32 num_before = 0, divided = 0, moved = 0, of_expert = 0, lower = 0;
        const i32 home = expert < args.num_experts ? args.homes[expert] : 0, home_rank = home / args.places_per_rank;
        for (i32 i = 0; i < num_copies; ++i) {
            num_before += copies[i].expert < expert;
            if (copies[i].expert == expert) ++of_expert, moved += copies[i].rows, lower += copies[i].rank < home_rank;
            divided += copies[i].expert < expert && is_first[i];
        }
        args.expert_to_first[expert] = expert + num_before;
        if (expert == args.num_experts) {
            for (; divided < args.max_divided; ++divided) args.divided[divided] = -1;
            continue;
        }
        const i32 owner = expert + num_before + lower;
        args.owners[owner] = home, args.owner_to_rank[owner] = home_rank;
        args.quotas[owner] = of_expert ? args.rows_per_expert[expert] - moved : 0;
        args.expert_to_divided[expert] = of_expert ? divided : -1;
        if (of_expert) args.divided[divided] = expert;
    }
    for (i32 i = threadIdx.x; i < num_copies; i += NUM_THREADS) {
        const Copy copy = copies[i];
        i32 owner = copy.expert + (args.homes[copy.expert] / args.places_per_rank < copy.rank), place = 0;
        for (i32 j = 0; j < num_copies; ++j) {
            owner += copies[j].expert < copy.expert || (copies[j].expert == copy.expert && copies[j].rank < copy.rank);
            place += j < i && copies[j].rank == copy.rank;
        }
        args.owners[owner] = args.empty_places[copy.rank * args.spare_places + place];
        args.owner_to_rank[owner] = copy.rank, args.quotas[owner] = copy.rows;
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) plan_batch(const __grid_constant__ BatchArgs args) {
    extern __shared__ i32 shared[];  // rows per expert, loads of ranks, and a state of each warp; in the end, copies
    __shared__ i32 first_way;        // of those that hold the cap
    __shared__ Held held[NUM_RULES + MOST_TRIES];
    const i32 num_experts = args.num_experts, num_ranks = args.num_ranks, warp = threadIdx.x / WARP_SIZE;
    i32 *const rows = shared, *const before = rows + num_experts;
    i32* const mine = before + num_ranks + warp * (num_experts + 3 * num_ranks);
    const State state{mine, mine + num_experts, mine + num_experts + num_ranks, mine + num_experts + 2 * num_ranks};
    for (i32 expert = threadIdx.x; expert < num_experts; expert += NUM_THREADS) {
        i32 sum = 0;
        for (i32 rank = 0; rank < num_ranks; ++rank) sum += args.counts[static_cast<i64>(rank) * num_experts + expert];
        if (is_absent(args, args.homes[expert] / args.places_per_rank)) sum = 0;
        args.rows_per_expert[expert] = rows[expert] = sum;
    }
    __syncthreads();
    for (i32 rank = threadIdx.x; rank < num_ranks; rank += NUM_THREADS) {
        before[rank] = 0;
        for (i32 i = args.first[rank]; i < args.first[rank + 1]; ++i) before[rank] += rows[args.order[i]];
    }
    __syncthreads();
    i32 total = 0, most = 0;
    for (i32 rank = lane_index(); rank < num_ranks; rank += WARP_SIZE)
        total += before[rank], most = max(most, before[rank]);
    total = __reduce_add_sync(ALL_LANES, total);
    most = static_cast<i32>(__reduce_max_sync(ALL_LANES, static_cast<u32>(most)));
    const i32 num_left = num_ranks - __popc(*args.absent);
    const i32 aim = max((total + num_left - 1) / num_left,
                        static_cast<i32>(__dmul_rn(total, args.aim_over_mean) / static_cast<double>(num_left)));
    const i32 all_ways = NUM_RULES + min(MOST_TRIES, NUM_TRIES / (num_left * num_left));
    i32 num_best = 0, cap = aim, failed = aim, least_held = most, gap = max(1, aim / FIRST_GAP);
    bool is_aim_held = most <= aim;
    double least_cost = most;
    for (i32 i = 0; i < NUM_CAPS && cap < most && cap > 0; ++i) {
        const i32 num_ways = i == 0 || least_held < most ? all_ways : 1;
        const i64 most_copies = static_cast<i64>(num_ranks) * args.spare_places;
        if (threadIdx.x == 0) first_way = num_ways;
        __syncthreads();
        for (i32 way = warp; way < num_ways; way += NUM_WARPS) {
            if (__shfl_sync(ALL_LANES, first_way, 0) < way) break;
            const Held found = hold(args, state, rows, before, cap, way, args.tried + way * most_copies);
            if (lane_index() == 0 && found.num_copies >= 0) held[way] = found, atomicMin(&first_way, way);
        }
        __syncthreads();
        if (first_way == num_ways) {
            if (num_ways > 1 || !has_places(args, state, rows, before, cap)) failed = cap;
        } else {
            const Held best = held[first_way];
            least_held = min(least_held, cap), is_aim_held |= cap == aim;
            const double cost = __dadd_rn(best.most_load, __dmul_rn(args.rows_per_copy, best.most_copies));
            if (cost < least_cost) {
                least_cost = cost, num_best = best.num_copies;
                for (i32 j = threadIdx.x; j < num_best; j += NUM_THREADS)
                    args.copies[j] = args.tried[first_way * most_copies + j];
            }
        }
        __syncthreads();
        if (args.rows_per_copy == 0 && least_held < most) {
            if (least_held <= failed + max(1, aim / PRECISION)) break;
            cap = (least_held + failed) / 2;
        } else {
            cap = aim + gap, gap *= 2;
        }
    }
    Copy* const copies = reinterpret_cast<Copy*>(shared);
    for (i32 i = threadIdx.x; i < num_best; i += NUM_THREADS) copies[i] = args.copies[i];
    if (threadIdx.x == 0) *args.header = {num_best, is_aim_held};
    __syncthreads();
    write_tables(args, copies, num_best);
}
