// Integer types, memory accesses named by meaning, and conversions of row elements.
// No headers: NVRTC has none, and these few lines need none.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr u32 WARP_SIZE = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ __forceinline__ u32 lane_index() { return threadIdx.x % WARP_SIZE; }

// Bytes that one instruction moves. The largest size that divides a row is used; 16 is the fast one.
template <int BYTES> struct Vector;
template <> struct Vector<16> { u32 words[4]; };
template <> struct Vector<8> { u32 words[2]; };
template <> struct Vector<4> { u32 words[1]; };
template <> struct Vector<2> { u16 words[1]; };
template <> struct Vector<1> { u8 words[1]; };

// Loads of rows that a peer has written or owns. They bypass this SM's L1, which is not coherent.
__device__ __forceinline__ Vector<16> load_shared_row(const Vector<16>* at) {
    Vector<16> v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(at));
    return v;
}
__device__ __forceinline__ Vector<8> load_shared_row(const Vector<8>* at) {
    Vector<8> v;
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.words[0]), "=r"(v.words[1]) : "l"(at));
    return v;
}
__device__ __forceinline__ Vector<4> load_shared_row(const Vector<4>* at) {
    Vector<4> v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v.words[0]) : "l"(at));
    return v;
}
__device__ __forceinline__ Vector<2> load_shared_row(const Vector<2>* at) {
    Vector<2> v;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v.words[0]) : "l"(at));
    return v;
}
__device__ __forceinline__ Vector<1> load_shared_row(const Vector<1>* at) {
    u16 wide;
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=h"(wide) : "l"(at));
    return {{static_cast<u8>(wide)}};
}

// Loads of rows that are constant while the kernel runs. Each is read once, so it need not stay in L1.
__device__ __forceinline__ Vector<16> load_constant_row(const Vector<16>* at) {
    Vector<16> v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3]) : "l"(at));
    return v;
}
template <int BYTES> __device__ __forceinline__ Vector<BYTES> load_constant_row(const Vector<BYTES>* at) { return *at; }

__device__ __forceinline__ void store_row(Vector<16>* at, const Vector<16>& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(at), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]) : "memory");
}
template <int BYTES> __device__ __forceinline__ void store_row(Vector<BYTES>* at, const Vector<BYTES>& v) { *at = v; }

// The same for rows that the caches cannot keep until they are read: L2 evicts them first.
__device__ __forceinline__ void stream_row(Vector<16>* at, const Vector<16>& v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(at), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3]) : "memory");
}
template <int BYTES> __device__ __forceinline__ void stream_row(Vector<BYTES>* at, const Vector<BYTES>& v) { *at = v; }

// Copies into shared memory by one thread, for itself, that bypass L1; those of 16 bytes are asynchronous. All between two
// commits are a group.
__device__ __forceinline__ void begin_copy(Vector<16>* to, const Vector<16>* from) {
    const u32 at = static_cast<u32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
}
template <int BYTES> __device__ __forceinline__ void begin_copy(Vector<BYTES>* to, const Vector<BYTES>* from) {
    *to = load_shared_row(from);
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most MAX_GROUPS groups are in flight.
template <int MAX_GROUPS> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(MAX_GROUPS) : "memory");
}

// Conversions of 16-bit elements: round to nearest, ties to even.
__device__ __forceinline__ u16 round_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ u16 round_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ __forceinline__ float widen_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Flags between ranks, and between blocks of one rank.
__device__ __forceinline__ u32 load_acquire_system(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ u32 load_relaxed_system(const u32* at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_system(u32* at, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u32 load_acquire_device(const u32* at) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ u32 add_acquire_release_device(u32* at, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
}

// Programmatic dependent launch: a kernel may start before the previous one in its stream ends. The previous kernel allows
// it, and the dependent one waits before it reads the results. No effect without support of the hardware or the launch.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
