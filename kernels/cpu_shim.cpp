// The kernels compiled for the CPU, and a launch function. For tests: it runs every block and thread, at
// less than a thousandth of a device's speed.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <thread>
#include <vector>

#include "kv_port.h"

thread_local KvxThread kvx_thread;

#include "kv_copy.cu"
#include "kv_bulk.cu"

// Defined by cpu_shim_large.cpp.
#define KVX_LARGE_KERNEL(name) extern "C" void name##_large(const KvxJobLarge &)
KVX_LARGE_KERNEL(kvx_copy16_l64);
KVX_LARGE_KERNEL(kvx_copy16_l16);
KVX_LARGE_KERNEL(kvx_copy8);
KVX_LARGE_KERNEL(kvx_copy4);
KVX_LARGE_KERNEL(kvx_copy1);
KVX_LARGE_KERNEL(kvx_copy_sum);
KVX_LARGE_KERNEL(kvx_quant_mx8);
KVX_LARGE_KERNEL(kvx_dequant_mx8);
extern "C" void kvx_copy_desc_large(const KvxDescJobLarge &);

namespace {

[[noreturn]] void trap(const char *what) {
  std::fprintf(stderr, "kernel shim: %s\n", what);
  std::abort();
}

void need(bool ok, const char *what) {
  if (!ok) trap(what);
}

// What the hardware may do early or late: loads at issue or at the wait, stores at commit or at the last
// wait that permits them. All four combinations are legal, so a ring that works in all four is in order.
thread_local u32 late_loads, late_stores;

struct Bar {
  bool ready = false, loading = false;
  u32 phase = 0;
  u64 from = 0;
  u32 stage = 0, bytes = 0;
};
struct Store {
  u64 to;
  u32 stage, bytes;
};
thread_local std::vector<Bar> bars(16);
thread_local std::deque<Store> stores;
thread_local u32 shared_bytes;

void run_load(Bar &b) { std::memcpy(kvx_thread.shared + b.stage, reinterpret_cast<const void *>(b.from), b.bytes); }

void run_stores(size_t keep) {
  while (stores.size() > keep) {
    Store s = stores.front();
    stores.pop_front();
    if (s.bytes) std::memcpy(reinterpret_cast<void *>(s.to), kvx_thread.shared + s.stage, s.bytes);
  }
}

Bar &bar_at(u32 bar) {
  need(bar % 8 == 0 && bar / 8 < bars.size(), "no such barrier");
  return bars[bar / 8];
}

}  // namespace

u32 shared_addr(const void *p) { return (u32)(static_cast<const u8 *>(p) - kvx_thread.shared); }
void bar_init(u32 bar) {
  bar_at(bar) = Bar();
  bar_at(bar).ready = true;
}
void bar_init_done() {}
void bulk_load(u32 stage, u64 from, u32 bytes, u32 bar) {
  Bar &b = bar_at(bar);
  need(b.ready && !b.loading, "load into a barrier that is in use");
  need(stage % 16 == 0 && from % 16 == 0 && bytes % 16 == 0 && bytes, "a bulk load is not aligned to 16");
  need(stage + bytes <= shared_bytes, "a bulk load leaves shared memory");
  b.loading = true;
  b.from = from;
  b.stage = stage;
  b.bytes = bytes;
  if (!late_loads) run_load(b);
}
void bar_wait(u32 bar, u32 parity) {
  Bar &b = bar_at(bar);
  need(b.loading, "wait for a barrier that nothing will complete");
  need(b.phase == parity, "wait for the wrong phase");
  if (late_loads) run_load(b);
  b.loading = false;
  b.phase ^= 1;
}
void bulk_store(u64 to, u32 stage, u32 bytes) {
  need(stage % 16 == 0 && to % 16 == 0 && bytes % 16 == 0, "a bulk store is not aligned to 16");
  need(stage + bytes <= shared_bytes, "a bulk store leaves shared memory");
  stores.push_back({to, stage, bytes});
  if (!late_stores) run_stores(0);
}
void bulk_stores_read_but_one() { run_stores(1); }
void bulk_stores_done() { run_stores(0); }

namespace {

template <class Job> using Kernel = void (*)(const Job &);

struct Launch {
  u32 kernel, large, grid, block, mode;
  KvxRing ring;
};

template <class Job> void call(Kernel<Job> kernel, const void *job) { kernel(*static_cast<const Job *>(job)); }

void one_thread(const Launch &l, const void *job) {
  switch (l.kernel * 2 + l.large) {
    case 0: return call<KvxJobSmall>(kvx_copy16_l64_small, job);
    case 1: return call<KvxJobLarge>(kvx_copy16_l64_large, job);
    case 2: return call<KvxJobSmall>(kvx_copy16_l16_small, job);
    case 3: return call<KvxJobLarge>(kvx_copy16_l16_large, job);
    case 4: return call<KvxJobSmall>(kvx_copy8_small, job);
    case 5: return call<KvxJobLarge>(kvx_copy8_large, job);
    case 6: return call<KvxJobSmall>(kvx_copy4_small, job);
    case 7: return call<KvxJobLarge>(kvx_copy4_large, job);
    case 8: return call<KvxJobSmall>(kvx_copy1_small, job);
    case 9: return call<KvxJobLarge>(kvx_copy1_large, job);
    case 10: return call<KvxJobSmall>(kvx_copy_sum_small, job);
    case 11: return call<KvxJobLarge>(kvx_copy_sum_large, job);
    case 12: return call<KvxJobSmall>(kvx_quant_mx8_small, job);
    case 13: return call<KvxJobLarge>(kvx_quant_mx8_large, job);
    case 14: return call<KvxJobSmall>(kvx_dequant_mx8_small, job);
    case 15: return call<KvxJobLarge>(kvx_dequant_mx8_large, job);
    case 16: return call<KvxDescJobSmall>(kvx_copy_desc_small, job);
    case 17: return call<KvxDescJobLarge>(kvx_copy_desc_large, job);
    case 18: return kvx_bulk_small(*static_cast<const KvxJobSmall *>(job), l.ring);
    case 19: return kvx_bulk_large(*static_cast<const KvxJobLarge *>(job), l.ring);
    default: trap("no such kernel");
  }
}

void one_block(const Launch &l, const void *job, u32 block) {
  std::vector<Unit16> shared;
  shared_bytes = l.kernel == 9 ? KVX_RING_HEAD + l.ring.stages * l.ring.stage_bytes : 0;
  shared.resize(shared_bytes / 16);
  late_loads = l.mode & 2;
  late_stores = l.mode & 4;
  for (u32 t = 0; t < l.block; t++) {
    kvx_thread = {t, l.block, block, l.grid, reinterpret_cast<u8 *>(shared.data())};
    one_thread(l, job);
  }
  need(stores.empty(), "a block ended with bulk stores in flight");
}

}  // namespace

// mode bit 0: every block on a thread of its own; bits 1, 2: late loads, late stores of bulk copies.
extern "C" void kvx_cpu_launch(u32 kernel, u32 large, const void *job, u32 grid, u32 block, u32 stages,
                               u32 stage_bytes, u32 mode) {
  Launch l = {kernel, large, grid, block, mode, {stages, stage_bytes}};
  if (mode & 1) {
    std::vector<std::thread> threads;
    for (u32 b = 0; b < grid; b++) threads.emplace_back([&l, job, b] { one_block(l, job, b); });
    for (auto &t : threads) t.join();
  } else {
    for (u32 b = 0; b < grid; b++) one_block(l, job, b);
  }
}
