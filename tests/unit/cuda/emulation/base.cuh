// Replaces fusco/cuda/kernels/source/base.cuh and the builtins of NVRTC, so that kernels compile as C++ for the host.
#pragma once

#include "simt.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define gridDim (simt::grid_dim())
#define blockDim (simt::block_dim())

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr u32 WARP_SIZE = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

inline u32 lane_index() { return threadIdx.x % WARP_SIZE; }

template <typename T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T max(T a, T b) { return a < b ? b : a; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline u32 __float_as_uint(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline void __syncwarp() { simt::sync_warp(); }
inline void __syncthreads() { simt::sync_block(); }
inline bool __syncthreads_and(bool value) { return simt::sync_block_and(value); }
inline void __nanosleep(u32) { simt::sleep(); }
inline void __threadfence_system() { simt::pass(); }

template <typename T> T __shfl_sync(u32, T value, u32 lane) {
    return simt::with_all_lanes(value, [lane](auto of_lane) { return of_lane(lane); });
}
template <typename T> T __shfl_up_sync(u32, T value, u32 step) {
    const u32 lane = lane_index();
    return simt::with_all_lanes(value, [=](auto of_lane) { return of_lane(lane < step ? lane : lane - step); });
}
template <typename T> T __shfl_xor_sync(u32, T value, u32 mask) {
    const u32 lane = lane_index() ^ mask;
    return simt::with_all_lanes(value, [lane](auto of_lane) { return of_lane(lane); });
}
template <typename F> u32 lanes_for_which(F&& holds) {
    u32 lanes = 0;
    for (u32 lane = 0; lane < WARP_SIZE; ++lane) lanes |= static_cast<u32>(bool(holds(lane))) << lane;
    return lanes;
}
inline u32 __ballot_sync(u32, bool value) {
    return simt::with_all_lanes(value, [](auto of_lane) { return lanes_for_which(of_lane); });
}
inline bool __all_sync(u32 lanes, bool value) { return __ballot_sync(lanes, value) == ALL_LANES; }
inline bool __any_sync(u32 lanes, bool value) { return __ballot_sync(lanes, value) != 0; }
inline u32 __match_any_sync(u32, i32 value) {
    return simt::with_all_lanes(value, [value](auto of_lane) {
        return lanes_for_which([&](u32 lane) { return of_lane(lane) == value; });
    });
}
inline u32 __reduce_or_sync(u32, u32 value) {
    return simt::with_all_lanes(value, [](auto of_lane) {
        u32 bits = 0;
        for (u32 lane = 0; lane < WARP_SIZE; ++lane) bits |= of_lane(lane);
        return bits;
    });
}
inline u32 __reduce_max_sync(u32, u32 value) {
    return simt::with_all_lanes(value, [](auto of_lane) {
        u32 most = 0;
        for (u32 lane = 0; lane < WARP_SIZE; ++lane) most = max(most, u32(of_lane(lane)));
        return most;
    });
}
inline u32 __reduce_min_sync(u32 lanes, u32 value) { return ~__reduce_max_sync(lanes, ~value); }
inline i32 __reduce_add_sync(u32, i32 value) {
    return simt::with_all_lanes(value, [](auto of_lane) {
        i32 sum = 0;
        for (u32 lane = 0; lane < WARP_SIZE; ++lane) sum += of_lane(lane);
        return sum;
    });
}

template <typename T, typename U, typename F> T change(T* at, U value, F&& changed) {
    simt::pass();
    const T before = *at;
    *at = changed(before, static_cast<T>(value));
    simt::has_written();
    return before;
}
template <typename T, typename U> T atomicAdd(T* at, U value) {
    return change(at, value, [](T a, T b) { return static_cast<T>(a + b); });
}
template <typename T, typename U> T atomicMax(T* at, U value) { return change(at, value, max<T>); }
template <typename T, typename U> T atomicMin(T* at, U value) { return change(at, value, min<T>); }
template <typename T, typename U> T atomicExch(T* at, U value) {
    return change(at, value, [](T, T b) { return b; });
}

template <int BYTES> struct Vector;
template <> struct Vector<16> { u32 words[4]; };
template <> struct Vector<8> { u32 words[2]; };
template <> struct Vector<4> { u32 words[1]; };
template <> struct Vector<2> { u16 words[1]; };
template <> struct Vector<1> { u8 words[1]; };

template <int BYTES> void check_alignment(const Vector<BYTES>* at) {
    if (reinterpret_cast<u64>(at) % BYTES) simt::fail("an access that is not aligned");
}
template <int BYTES> Vector<BYTES> load_shared_row(const Vector<BYTES>* at) {
    check_alignment(at);
    simt::pass();
    return *at;
}
template <int BYTES> Vector<BYTES> load_constant_row(const Vector<BYTES>* at) {
    check_alignment(at);
    return *at;
}
template <int BYTES> void store_row(Vector<BYTES>* at, const Vector<BYTES>& value) {
    check_alignment(at);
    *at = value;
}
template <int BYTES> void stream_row(Vector<BYTES>* at, const Vector<BYTES>& value) { store_row(at, value); }

template <int BYTES> void begin_copy(Vector<BYTES>* to, const Vector<BYTES>* from) {
    check_alignment(to);
    check_alignment(from);
    simt::begin_copy(to, from, BYTES);
}
inline void commit_copies() { simt::commit_copies(); }
template <int MAX_GROUPS> void wait_for_copies() { simt::wait_for_copies(MAX_GROUPS); }

inline u16 round_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u16 round_to_f16(float value) {
    const _Float16 narrow = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &narrow, sizeof bits);
    return bits;
}
inline float widen_f16(u16 bits) {
    _Float16 narrow;
    std::memcpy(&narrow, &bits, sizeof narrow);
    return static_cast<float>(narrow);
}

inline u32 load_acquire_system(const u32* at) {
    simt::pass();
    return *at;
}
inline u32 load_relaxed_system(const u32* at) { return load_acquire_system(at); }
inline u32 load_acquire_device(const u32* at) { return load_acquire_system(at); }
inline void store_release_system(u32* at, u32 value) {
    *at = value;
    simt::has_written();
}
inline u32 add_acquire_release_device(u32* at, u32 value) { return atomicAdd(at, value); }

inline void launch_dependents() { simt::launch_dependents(); }
inline void wait_for_prerequisites() {
    while (!simt::are_prerequisites_done()) simt::sleep();
}
inline u64 nanoseconds() { return simt::nanoseconds(); }
