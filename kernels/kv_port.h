// What the kernels need from their compiler: nvcc for a device, any C++17 compiler for the CPU.
//
// Rules for kernels, so that one source serves both: no __syncthreads, no shuffles, no static shared
// memory, no CUDA header, one argument struct. On the CPU a launch runs the threads of a block one after
// the other, and blocks one after the other or each on a thread of its own.
#pragma once

#ifdef __CUDACC__
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define KVX_DEV static __device__ __forceinline__
#define KVX_CALL __device__ __forceinline__
#define KVX_KERNEL extern "C" __global__
#define KVX_BOUNDS(n) __launch_bounds__(n)
#define KVX_PARAM(type) const __grid_constant__ type
#define KVX_UNROLL _Pragma("unroll")
#define KVX_TID threadIdx.x
#define KVX_NTID blockDim.x
#define KVX_BID blockIdx.x
#define KVX_NBID gridDim.x
#else
#include <cstdint>
#include <cstring>
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
#define KVX_DEV static inline
#define KVX_CALL inline
#define KVX_KERNEL extern "C"
#define KVX_BOUNDS(n)
#define KVX_PARAM(type) const type &
struct KvxThread {
  u32 tid, ntid, bid, nbid;
  u8 *shared;
};
extern thread_local KvxThread kvx_thread;
#define KVX_UNROLL
#define KVX_TID kvx_thread.tid
#define KVX_NTID kvx_thread.ntid
#define KVX_BID kvx_thread.bid
#define KVX_NBID kvx_thread.nbid
#endif

struct alignas(16) Unit16 {
  u64 lo, hi;
};

// Loads bypass L1 and stores are marked as streamed: every byte is touched once. ld.global.nc would be
// wrong, a page may be written by other work right after the copy.
#ifdef __CUDACC__
template <class T> struct Mem;
template <> struct Mem<Unit16> {
  static __device__ __forceinline__ Unit16 load(u64 at) {
    Unit16 v;
    asm volatile("ld.global.L1::no_allocate.v2.u64 {%0,%1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(at) : "memory");
    return v;
  }
  static __device__ __forceinline__ void store(u64 at, Unit16 v) {
    asm volatile("st.global.cs.v2.u64 [%0], {%1,%2};" ::"l"(at), "l"(v.lo), "l"(v.hi) : "memory");
  }
};
template <> struct Mem<u64> {
  static __device__ __forceinline__ u64 load(u64 at) {
    u64 v;
    asm volatile("ld.global.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
  }
  static __device__ __forceinline__ void store(u64 at, u64 v) {
    asm volatile("st.global.cs.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
  }
};
template <> struct Mem<u32> {
  static __device__ __forceinline__ u32 load(u64 at) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
  }
  static __device__ __forceinline__ void store(u64 at, u32 v) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
  }
};
template <> struct Mem<u8> {
  static __device__ __forceinline__ u8 load(u64 at) {
    u32 v;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return (u8)v;
  }
  static __device__ __forceinline__ void store(u64 at, u8 v) {
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(at), "r"((u32)v) : "memory");
  }
};
KVX_DEV void add_u64(u64 at, u64 v) { atomicAdd(reinterpret_cast<u64 *>(at), v); }
KVX_DEV u64 load_table(u64 table, u32 i) { return reinterpret_cast<const u64 *>(table)[i]; }
KVX_DEV float bits_to_f32(u32 b) { return __uint_as_float(b); }
KVX_DEV u32 f32_to_bits(float f) { return __float_as_uint(f); }
#else
// Plain typed accesses, not memcpy: so that a misaligned one is seen by the undefined-behaviour sanitizer.
template <class T> struct Mem {
  static T load(u64 at) { return *reinterpret_cast<const T *>(at); }
  static void store(u64 at, T v) { *reinterpret_cast<T *>(at) = v; }
};
KVX_DEV void add_u64(u64 at, u64 v) { __atomic_fetch_add(reinterpret_cast<u64 *>(at), v, __ATOMIC_RELAXED); }
KVX_DEV u64 load_table(u64 table, u32 i) { return reinterpret_cast<const u64 *>(table)[i]; }
KVX_DEV float bits_to_f32(u32 b) {
  float f;
  std::memcpy(&f, &b, 4);
  return f;
}
KVX_DEV u32 f32_to_bits(float f) {
  u32 b;
  std::memcpy(&b, &f, 4);
  return b;
}
#endif

// Bulk copies through shared memory (sm_90 and later), in the five steps the ring needs.
#ifdef __CUDACC__
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
KVX_DEV u32 shared_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
KVX_DEV void bar_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory"); }
KVX_DEV void bar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KVX_DEV void bulk_load(u32 stage, u64 from, u32 bytes, u32 bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
KVX_DEV void bar_wait(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra wait;\n}" ::"r"(
                   bar),
               "r"(parity)
               : "memory");
}
// Always a group of its own, an empty one too: the ring counts groups.
KVX_DEV void bulk_store(u64 to, u32 stage, u32 bytes) {
  if (bytes)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(stage), "r"(bytes)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
KVX_DEV void bulk_stores_read_but_one() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
KVX_DEV void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif
#else
// The CPU bodies live in cpu_shim.cpp: a barrier there stops the process when it is waited for in the wrong
// phase, and loads and stores happen as early or as late as the order of the calls permits.
u32 shared_addr(const void *p);
void bar_init(u32 bar);
void bar_init_done();
void bulk_load(u32 stage, u64 from, u32 bytes, u32 bar);
void bar_wait(u32 bar, u32 parity);
void bulk_store(u64 to, u32 stage, u32 bytes);
void bulk_stores_read_but_one();
void bulk_stores_done();
#endif
