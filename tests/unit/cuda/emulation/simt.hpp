// The emulated GPU as a kernel sees it: threads of blocks that run in any permitted order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace simt {

struct Dim {
    unsigned x;
};
Dim thread_index();
Dim block_index();
Dim grid_dim();
Dim block_dim();

void pass();         // yield to another thread, now and then
void has_written();  // the same, after a write that others may wait for
void sleep();        // suspend this thread until another has made progress
void sync_warp();
void sync_block();
bool sync_block_and(bool value);
std::uint64_t* warp_slots();  // 64 bits for each lane of the warp
std::uint64_t nanoseconds();
void launch_dependents();
bool are_prerequisites_done();
void begin_copy(void* to, const void* from, std::size_t num_bytes);  // done at any time until its group is waited for
void commit_copies();
void wait_for_copies(unsigned max_groups);
void* dynamic_shared();
void* shared_at(const void* key, std::size_t num_bytes);
[[noreturn]] void fail(const char* what);

template <typename T, int NUMBER> T& shared() {
    static const char key = 0;
    return *static_cast<T*>(shared_at(&key, sizeof(T)));
}

// Exchange a value among all lanes of the warp: `read` gets a function from lane to value.
template <typename T, typename F> auto with_all_lanes(T mine, F&& read) {
    std::uint64_t* const slots = warp_slots();
    std::uint64_t bits = 0;
    std::memcpy(&bits, &mine, sizeof(T));
    slots[thread_index().x % 32] = bits;
    sync_warp();
    auto of_lane = [slots](unsigned lane) {
        T value;
        std::memcpy(&value, &slots[lane % 32], sizeof(T));
        return value;
    };
    auto result = read(of_lane);
    sync_warp();  // before any lane overwrites its value
    return result;
}

}  // namespace simt
