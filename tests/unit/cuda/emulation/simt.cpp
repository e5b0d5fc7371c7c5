// Scheduler that runs kernels on one host thread: every CUDA thread is a ucontext, and a seed chooses which one runs next.
#undef _FORTIFY_SOURCE  // it forbids jumps between stacks
#include "simt.hpp"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr unsigned WARP_SIZE = 32;
constexpr std::size_t STACK_BYTES = 64 << 10;
constexpr std::uint64_t NS_PER_TURN = 50, NS_PER_IDLE_ROUND = 1'000'000;

struct Block;
struct Launch;

struct Copy {
    void* to;
    const void* from;
    std::size_t num_bytes;
};

struct Thread {
    Block* block;
    unsigned index;
    std::unique_ptr<char[]> stack;
    ucontext_t beginning;
    jmp_buf place;  // where it goes on
    bool has_begun = false, is_done = false;
    std::vector<Copy> begun;                // not committed yet
    std::deque<std::vector<Copy>> groups;  // in flight
};

// Barrier; threads in `arrived` are suspended until the last one arrives.
struct Barrier {
    std::vector<Thread*> arrived;
    bool all = true, result = true;
};

struct Block {
    Launch* launch;
    unsigned index;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Thread*> ready, asleep;
    Barrier barrier;
    std::vector<Barrier> warp_barriers;
    std::vector<std::uint64_t> slots;
    std::map<const void*, std::vector<std::max_align_t>> shared;
    std::vector<std::max_align_t> dynamic_shared;
    unsigned num_done = 0;
    unsigned weight = 1;
    bool launches_dependents = false;
};

struct Launch {
    void (*entry)(const void*);
    std::vector<char> arguments;
    unsigned grid, num_threads, max_resident, weight;
    std::size_t shared_bytes;
    bool is_dependent;
    Launch* ahead;
    unsigned num_begun = 0, num_done = 0, num_launching_dependents = 0;
    bool is_done() const { return num_done == grid; }
};

struct Stream {
    std::deque<Launch*> queue;
    unsigned weight = 0;  // scheduling weight of its threads, relative to other streams
};

std::mt19937 generator;
std::vector<std::unique_ptr<Launch>> launches;
std::map<unsigned long long, Stream> streams;
std::vector<std::unique_ptr<Block>> blocks;  // resident ones
Thread* current = nullptr;
jmp_buf scheduler;
std::uint64_t now_ns = 1'000'000'000;
bool has_progressed = false;  // whether a thread did more than sleep
std::string failure;

unsigned draw(unsigned below) { return generator() % below; }

// Jumps, which unlike swapcontext make no system call.
void yield_to_scheduler() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

// Run the current thread until it yields.
void go_on_with_current() {
    if (_setjmp(scheduler)) return;
    if (current->has_begun) _longjmp(current->place, 1);
    current->has_begun = true;
    setcontext(&current->beginning);
}

void run_thread() {
    current->block->launch->entry(current->block->launch->arguments.data());
    current->is_done = true;
    has_progressed = true;
    yield_to_scheduler();
}

// Release a barrier if all threads of the warp or block that are still running have arrived.
void release_if_complete(Barrier& barrier, Block& block, unsigned first, unsigned end) {
    unsigned num_running = 0;
    for (unsigned i = first; i < end; ++i) num_running += !block.threads[i]->is_done;
    if (barrier.arrived.empty() || barrier.arrived.size() < num_running) return;
    for (Thread* thread : barrier.arrived) block.ready.push_back(thread);
    barrier.arrived.clear();
    barrier.result = barrier.all;
    barrier.all = true;
}

void arrive(Barrier& barrier, unsigned first, unsigned end) {
    Block& block = *current->block;
    has_progressed = true;
    barrier.arrived.push_back(current);
    release_if_complete(barrier, block, first, end);
    yield_to_scheduler();
}

unsigned warp_end(const Block& block, unsigned warp) {
    return std::min<unsigned>((warp + 1) * WARP_SIZE, block.threads.size());
}

void begin_block(Launch& launch) {
    blocks.push_back(std::make_unique<Block>());
    Block& block = *blocks.back();
    block.launch = &launch;
    block.index = launch.num_begun++;
    block.weight = launch.weight << draw(3);
    const unsigned num_warps = (launch.num_threads + WARP_SIZE - 1) / WARP_SIZE;
    block.warp_barriers.resize(num_warps);
    block.slots.resize(num_warps * WARP_SIZE);
    block.dynamic_shared.resize(launch.shared_bytes / sizeof(std::max_align_t) + 1);
    std::memset(block.dynamic_shared.data(), 0xa5, block.dynamic_shared.size() * sizeof(std::max_align_t));
    for (unsigned i = 0; i < launch.num_threads; ++i) {
        block.threads.push_back(std::make_unique<Thread>());
        Thread& thread = *block.threads.back();
        thread.block = &block;
        thread.index = i;
        thread.stack.reset(new char[STACK_BYTES]);
        getcontext(&thread.beginning);
        thread.beginning.uc_stack.ss_sp = thread.stack.get();
        thread.beginning.uc_stack.ss_size = STACK_BYTES;
        thread.beginning.uc_link = nullptr;
        makecontext(&thread.beginning, run_thread, 0);
        block.ready.push_back(&thread);
    }
}

bool may_begin(const Launch& launch) {
    return !launch.ahead || launch.ahead->is_done() ||
           (launch.is_dependent && launch.ahead->num_launching_dependents == launch.ahead->grid);
}

// Begin every block that may begin; return whether there was one.
bool begin_blocks() {
    bool has_begun = false;
    for (auto& [handle, stream] : streams) {
        while (!stream.queue.empty() && stream.queue.front()->is_done()) stream.queue.pop_front();
        for (Launch* launch : stream.queue) {
            if (!may_begin(*launch)) break;
            while (launch->num_begun < launch->grid && launch->num_begun - launch->num_done < launch->max_resident) {
                begin_block(*launch);
                has_begun = true;
            }
        }
    }
    return has_begun;
}

void go_on(Block& block) {
    const unsigned chosen = draw(block.ready.size());
    current = block.ready[chosen];
    block.ready[chosen] = block.ready.back();
    block.ready.pop_back();
    now_ns += NS_PER_TURN;
    go_on_with_current();
    if (!current->is_done) return;
    Launch& launch = *block.launch;
    const unsigned warp = current->index / WARP_SIZE;
    ++block.num_done;
    release_if_complete(block.warp_barriers[warp], block, warp * WARP_SIZE, warp_end(block, warp));
    release_if_complete(block.barrier, block, 0, block.threads.size());
    if (block.num_done < block.threads.size()) return;
    ++launch.num_done;
    launch.num_launching_dependents += !block.launches_dependents;
    blocks.erase(std::find_if(blocks.begin(), blocks.end(), [&](const auto& each) { return each.get() == &block; }));
}

Block* choose_block() {
    unsigned sum = 0;
    for (const auto& block : blocks)
        if (!block->ready.empty()) sum += block->weight;
    if (!sum) return nullptr;
    unsigned left = draw(sum);
    for (const auto& block : blocks)
        if (!block->ready.empty()) {
            if (left < block->weight) return block.get();
            left -= block->weight;
        }
    return nullptr;
}

void wake_all() {
    for (const auto& block : blocks) {
        block->ready.insert(block->ready.end(), block->asleep.begin(), block->asleep.end());
        block->asleep.clear();
    }
}

}  // namespace

namespace simt {

Dim thread_index() { return {current->index}; }
Dim block_index() { return {current->block->index}; }
Dim grid_dim() { return {current->block->launch->grid}; }
Dim block_dim() { return {current->block->launch->num_threads}; }

void pass() {
    if (draw(4)) return;
    current->block->ready.push_back(current);
    yield_to_scheduler();
}

void has_written() {
    has_progressed = true;
    pass();
}

void sleep() {
    current->block->asleep.push_back(current);
    yield_to_scheduler();
}

void sync_warp() {
    Block& block = *current->block;
    const unsigned warp = current->index / WARP_SIZE;
    arrive(block.warp_barriers[warp], warp * WARP_SIZE, warp_end(block, warp));
}

void sync_block() { sync_block_and(true); }

bool sync_block_and(bool value) {
    Block& block = *current->block;
    block.barrier.all &= value;
    arrive(block.barrier, 0, block.threads.size());
    return block.barrier.result;
}

std::uint64_t* warp_slots() { return current->block->slots.data() + current->index / WARP_SIZE * WARP_SIZE; }
std::uint64_t nanoseconds() { return now_ns; }

void launch_dependents() {
    Block& block = *current->block;
    if (block.launches_dependents) return;
    block.launches_dependents = true;
    ++block.launch->num_launching_dependents;
}

bool are_prerequisites_done() {
    const Launch& launch = *current->block->launch;
    return !launch.ahead || launch.ahead->is_done();
}

void begin_copy(void* to, const void* from, std::size_t num_bytes) {
    if (draw(2)) current->begun.push_back({to, from, num_bytes});
    else std::memcpy(to, from, num_bytes);
}

void commit_copies() {
    current->groups.push_back(std::move(current->begun));
    current->begun.clear();
}

void wait_for_copies(unsigned max_groups) {
    for (auto& groups = current->groups; groups.size() > max_groups; groups.pop_front())
        for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.num_bytes);
}

void* dynamic_shared() { return current->block->dynamic_shared.data(); }

void* shared_at(const void* key, std::size_t num_bytes) {
    auto& memory = current->block->shared[key];
    if (memory.empty()) {
        memory.resize(num_bytes / sizeof(std::max_align_t) + 1);
        std::memset(memory.data(), 0xa5, memory.size() * sizeof(std::max_align_t));
    }
    return memory.data();
}

void fail(const char* what) {
    failure = what;
    current->is_done = true;  // it is never resumed
    yield_to_scheduler();
    __builtin_unreachable();
}

}  // namespace simt

extern "C" {

void simt_reset(unsigned seed) {
    generator.seed(seed);
    blocks.clear();
    streams.clear();
    launches.clear();
    failure.clear();
}

// Enqueue a kernel on a stream and return its number. At most `max_resident` of its blocks are resident at once.
unsigned simt_launch(void (*entry)(const void*), const void* arguments, std::size_t num_bytes, unsigned long long stream,
                     unsigned grid, unsigned num_threads, std::size_t shared_bytes, bool is_dependent,
                     unsigned max_resident) {
    auto launch = std::make_unique<Launch>();
    launch->entry = entry;
    launch->arguments.assign(static_cast<const char*>(arguments), static_cast<const char*>(arguments) + num_bytes);
    launch->grid = grid, launch->num_threads = num_threads, launch->max_resident = max_resident;
    launch->shared_bytes = shared_bytes, launch->is_dependent = is_dependent;
    auto& [queue, weight] = streams[stream];
    if (!weight) weight = 1u << (4 * draw(3));
    launch->weight = weight;
    launch->ahead = queue.empty() ? nullptr : queue.back();
    queue.push_back(launch.get());
    launches.push_back(std::move(launch));
    return launches.size() - 1;
}

unsigned simt_num_done() {
    return std::count_if(launches.begin(), launches.end(), [](const auto& launch) { return launch->is_done(); });
}

bool simt_is_done(unsigned number) { return launches[number]->is_done(); }

// Run threads for a number of turns. Returns false if all wait for something that no thread will do.
bool simt_go_on(unsigned num_turns) {
    while (num_turns-- && failure.empty()) {
        const bool has_begun = begin_blocks();
        Block* const block = choose_block();
        if (block) {
            Launch& launch = *block->launch;
            const unsigned num_done = launch.num_done;
            for (unsigned turns = 1 + draw(64); turns && failure.empty(); --turns) {
                go_on(*block);
                if (launch.num_done != num_done || block->ready.empty()) break;
            }
            if (launch.num_done != num_done && launch.is_done()) return true;
            if (!draw(16)) wake_all();
            continue;
        }
        if (blocks.empty() || !(has_begun || has_progressed)) {
            wake_all();
            has_progressed = true;  // until the next call
            now_ns += NS_PER_IDLE_ROUND;
            return false;
        }
        has_progressed = false;
        wake_all();
        now_ns += NS_PER_IDLE_ROUND;
    }
    return true;
}

const char* simt_failure() { return failure.c_str(); }
}
