// What a kernel sees of the processor that runs it: threads of blocks that go on in any order they may.
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

void pass();         // some other thread may go on, now and then
void has_written();  // likewise, after something that others may wait for
void sleep();        // this one has nothing to do until another has gone on
void sync_warp();
void sync_block();
bool sync_block_and(bool value);
std::uint64_t* warp_slots();  // a word for each lane of the warp
std::uint64_t nanoseconds();
void let_next_kernel_come();
bool is_kernel_ahead_done();
void* dynamic_shared();
void* shared_at(const void* key, std::size_t num_bytes);
[[noreturn]] void fail(const char* what);

template <typename T, int NUMBER> T& shared() {
    static const char key = 0;
    return *static_cast<T*>(shared_at(&key, sizeof(T)));
}

// What all lanes of the warp have given, by lane.
template <typename T, typename F> auto with_all_lanes(T mine, F&& look) {
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
    auto result = look(of_lane);
    sync_warp();  // before anybody's next word
    return result;
}

}  // namespace simt
