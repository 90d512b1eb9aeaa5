// A libcuda.so for machines without a device: the functions that the CUDA backend uses, over host memory.
//
// Every stream is a thread, so work is as asynchronous as on a device; kernels are those of the CPU build.
// It exists so that the backend's use of the driver runs in tests: argument order, handles, contexts,
// events, registration, parameters of launches. It shows nothing about speed.
//
//   g++ -std=c++17 -O1 -shared -fPIC -pthread -o target/mock/libcuda.so kernels/mock_driver.cpp
//       kernels/cpu_shim.cpp kernels/cpu_shim_large.cpp
//   LD_LIBRARY_PATH=target/mock SAPWOOD_REQUIRE_CUDA=1 cargo test --features cuda --test device_contract
//
// MOCK_CUDA_BATCH=unsupported lets batched copies answer that a newer driver is needed.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kv_job.h"

extern "C" void kvx_cpu_launch(u32 kernel, u32 large, const void *job, u32 grid, u32 block, u32 stages,
                               u32 stage_bytes, u32 mode);

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NO_BINARY = 209, ALREADY_MAPPED = 712, NOT_REGISTERED = 713,
       NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };

struct Event {
  std::mutex m;
  std::condition_variable cv;
  u64 recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point at;
};

// Streams and events are never freed: work may be behind them when they are destroyed, and a driver
// finishes it all the same.
struct Stream {
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::function<void()>> queue;

  Stream() { std::thread([this] { run(); }).detach(); }

  void run() {
    std::unique_lock<std::mutex> lock(m);
    for (;;) {
      cv.wait(lock, [this] { return !queue.empty(); });
      auto work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }
  void push(std::function<void()> work) {
    { std::lock_guard<std::mutex> lock(m); queue.push_back(std::move(work)); }
    cv.notify_one();
  }
};

struct Module {
  const char *image;
  bool ptx;
};
struct Function {
  u32 kernel, large;
};

std::mutex state;
std::map<void *, size_t> registered;
int contexts = 0;
thread_local std::vector<void *> current;
char the_context;

Stream &stream_of(void *handle) {
  static Stream *default_stream = new Stream;
  return handle ? *static_cast<Stream *>(handle) : *default_stream;
}

const char *const names[] = {"kvx_copy16_l64", "kvx_copy16_l16", "kvx_copy8",       "kvx_copy4",    "kvx_copy1",
                             "kvx_copy_sum",   "kvx_quant_mx8",  "kvx_dequant_mx8", "kvx_copy_desc", "kvx_bulk"};

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define NEED_CONTEXT() \
  if (current.empty()) return INVALID_CONTEXT

API cuInit(unsigned) { return SUCCESS; }
API cuDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
API cuDeviceGetCount(int *n) { *n = 1; return SUCCESS; }
API cuDeviceGet(int *d, int ordinal) { *d = ordinal; return ordinal == 0 ? SUCCESS : 101; }
API cuDeviceGetName(char *name, int len, int) { std::strncpy(name, "mock device", len); return SUCCESS; }
API cuDeviceTotalMem_v2(size_t *n, int) { *n = 1 << 30; return SUCCESS; }
API cuDeviceGetAttribute(int *v, unsigned which, int) {
  switch (which) {
    case 16: *v = 4; return SUCCESS;
    case 75: *v = 9; return SUCCESS;
    case 76: *v = 0; return SUCCESS;
    case 97: *v = 227 << 10; return SUCCESS;
    default: return INVALID_VALUE;
  }
}
API cuDevicePrimaryCtxRetain(void **ctx, int) {
  std::lock_guard<std::mutex> lock(state);
  contexts++;
  *ctx = &the_context;
  return SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int) {
  std::lock_guard<std::mutex> lock(state);
  return contexts-- > 0 ? SUCCESS : INVALID_CONTEXT;
}
API cuCtxPushCurrent_v2(void *ctx) { current.push_back(ctx); return ctx == &the_context ? SUCCESS : INVALID_CONTEXT; }
API cuCtxPopCurrent_v2(void **ctx) {
  NEED_CONTEXT();
  *ctx = current.back();
  current.pop_back();
  return SUCCESS;
}
API cuCtxGetCurrent(void **ctx) { *ctx = current.empty() ? nullptr : current.back(); return SUCCESS; }
API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  NEED_CONTEXT();
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}
API cuStreamCreateWithPriority(void **s, unsigned flags, int priority) {
  NEED_CONTEXT();
  if (flags != 1 || priority > 0 || priority < -5) return INVALID_VALUE;
  *s = new Stream;
  return SUCCESS;
}
API cuStreamDestroy_v2(void *) {
  NEED_CONTEXT();
  return SUCCESS;
}
API cuEventCreate(void **e, unsigned flags) {
  NEED_CONTEXT();
  if (flags & ~2u) return INVALID_VALUE;
  *e = new Event;
  return SUCCESS;
}
API cuEventDestroy_v2(void *) {
  NEED_CONTEXT();
  return SUCCESS;
}
API cuEventRecord(void *handle, void *s) {
  NEED_CONTEXT();
  Event *e = static_cast<Event *>(handle);
  u64 n;
  { std::lock_guard<std::mutex> lock(e->m); n = ++e->recorded; }
  stream_of(s).push([e, n] {
    { std::lock_guard<std::mutex> lock(e->m); e->reached = n; e->at = std::chrono::steady_clock::now(); }
    e->cv.notify_all();
  });
  return SUCCESS;
}
API cuStreamWaitEvent(void *s, void *handle, unsigned flags) {
  NEED_CONTEXT();
  if (flags) return INVALID_VALUE;
  Event *e = static_cast<Event *>(handle);
  u64 n;
  { std::lock_guard<std::mutex> lock(e->m); n = e->recorded; }
  stream_of(s).push([e, n] {
    std::unique_lock<std::mutex> lock(e->m);
    e->cv.wait(lock, [e, n] { return e->reached >= n; });
  });
  return SUCCESS;
}
API cuEventQuery(void *handle) {
  NEED_CONTEXT();
  Event *e = static_cast<Event *>(handle);
  std::lock_guard<std::mutex> lock(e->m);
  return e->reached == e->recorded ? SUCCESS : NOT_READY;
}
API cuEventSynchronize(void *handle) {
  NEED_CONTEXT();
  Event *e = static_cast<Event *>(handle);
  std::unique_lock<std::mutex> lock(e->m);
  e->cv.wait(lock, [e] { return e->reached == e->recorded; });
  return SUCCESS;
}
API cuEventElapsedTime(float *ms, void *a, void *b) {
  *ms = std::chrono::duration<float, std::milli>(static_cast<Event *>(b)->at - static_cast<Event *>(a)->at).count();
  return SUCCESS;
}
API cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
  NEED_CONTEXT();
  if (!bytes || flags != 3) return INVALID_VALUE;
  std::lock_guard<std::mutex> lock(state);
  for (auto &r : registered)
    if (static_cast<char *>(p) < static_cast<char *>(r.first) + r.second && static_cast<char *>(r.first) < static_cast<char *>(p) + bytes)
      return ALREADY_MAPPED;
  registered[p] = bytes;
  return SUCCESS;
}
API cuMemHostUnregister(void *p) {
  NEED_CONTEXT();
  std::lock_guard<std::mutex> lock(state);
  return registered.erase(p) ? SUCCESS : NOT_REGISTERED;
}
API cuMemHostGetDevicePointer_v2(u64 *d, void *p, unsigned flags) {
  std::lock_guard<std::mutex> lock(state);
  if (flags || !registered.count(p)) return INVALID_VALUE;
  *d = reinterpret_cast<u64>(p);
  return SUCCESS;
}
API cuMemAlloc_v2(u64 *d, size_t bytes) {
  NEED_CONTEXT();
  void *p = bytes ? std::aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
  *d = reinterpret_cast<u64>(p);
  return p ? SUCCESS : INVALID_VALUE;
}
API cuMemFree_v2(u64 d) {
  NEED_CONTEXT();
  std::free(reinterpret_cast<void *>(d));
  return SUCCESS;
}
API cuMemcpyAsync(u64 dst, u64 src, size_t n, void *s) {
  NEED_CONTEXT();
  stream_of(s).push([=] { std::memcpy(reinterpret_cast<void *>(dst), reinterpret_cast<void *>(src), n); });
  return SUCCESS;
}
struct Attributes {
  u32 order;
  int hints[4];
  u32 flags;
};
API cuMemcpyBatchAsync_v2(u64 *dst, u64 *src, size_t *len, size_t n, Attributes *a, size_t *first, size_t attributes, void *s) {
  NEED_CONTEXT();
  const char *mode = std::getenv("MOCK_CUDA_BATCH");
  if (mode && !std::strcmp(mode, "unsupported")) return NOT_SUPPORTED;
  if (attributes != 1 || first[0] != 0 || (a->order != 1 && a->order != 3) || a->flags > 1 || !s) return INVALID_VALUE;
  // The lists are read during the call; the copies have no order.
  for (size_t i = n; i-- > 0;) cuMemcpyAsync(dst[i], src[i], len[i], s);
  return SUCCESS;
}
API cuModuleLoadData(void **m, const void *image) {
  NEED_CONTEXT();
  u32 magic;
  std::memcpy(&magic, image, 4);
  bool ptx = !std::memcmp(image, "//", 2);
  if (!ptx && magic != 0xBA55ED50) return NO_BINARY;
  *m = new Module{static_cast<const char *>(image), ptx};
  return SUCCESS;
}
API cuModuleUnload(void *m) {
  NEED_CONTEXT();
  delete static_cast<Module *>(m);
  return SUCCESS;
}
API cuModuleGetFunction(void **f, void *handle, const char *name) {
  Module *m = static_cast<Module *>(handle);
  std::string entry = std::string(".entry ") + name + "(";
  if (m->ptx && !std::strstr(m->image, entry.c_str())) return NOT_FOUND;
  // Never freed: a handful of them.
  for (u32 k = 0; k < 10; k++)
    for (u32 large = 0; large < 2; large++)
      if (name == std::string(names[k]) + (large ? "_large" : "_small")) {
        *f = new Function{k, large};
        return SUCCESS;
      }
  return NOT_FOUND;
}
API cuFuncSetAttribute(void *, unsigned which, int bytes) {
  NEED_CONTEXT();
  return which == 8 && bytes > 0 && bytes <= 227 << 10 ? SUCCESS : INVALID_VALUE;
}
API cuLaunchKernel(void *handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *s, void **params, void **extra) {
  NEED_CONTEXT();
  if (gy != 1 || gz != 1 || by != 1 || bz != 1 || extra || !gx) return INVALID_VALUE;
  Function f = *static_cast<Function *>(handle);
  size_t bytes = f.kernel == 8 ? (f.large ? sizeof(KvxDescJobLarge) : sizeof(KvxDescJobSmall))
                               : (f.large ? sizeof(KvxJobLarge) : sizeof(KvxJobSmall));
  std::vector<u64> record((bytes + 7) / 8);
  std::memcpy(record.data(), params[0], bytes);
  u32 ring[2] = {0, 0};
  if (f.kernel == 9) {
    std::memcpy(ring, params[1], 8);
    if (shared < 128 + ring[0] * ring[1]) return INVALID_VALUE;
  }
  u32 stages = ring[0], stage_bytes = ring[1];
  stream_of(s).push([f, record, gx, bx, stages, stage_bytes] {
    kvx_cpu_launch(f.kernel, f.large, record.data(), gx, bx, stages, stage_bytes, 6);
  });
  return SUCCESS;
}
API cuLaunchHostFunc(void *s, void (*fn)(void *), void *data) {
  NEED_CONTEXT();
  stream_of(s).push([fn, data] { fn(data); });
  return SUCCESS;
}
