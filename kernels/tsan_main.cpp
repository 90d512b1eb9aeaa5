// The kernels with every block on a thread of its own, for the thread sanitizer. `fault` plants two blocks
// on one destination page, which it must report.
//
//   g++ -std=c++17 -g -O1 -fsanitize=thread kernels/tsan_main.cpp kernels/cpu_shim.cpp
//       kernels/cpu_shim_large.cpp -o target/kernels-tsan && setarch -R target/kernels-tsan [fault]
#include <cstdio>
#include <cstring>
#include <vector>

#include "kv_job.h"

extern "C" void kvx_cpu_launch(u32 kernel, u32 large, const void *job, u32 grid, u32 block, u32 stages,
                               u32 stage_bytes, u32 mode);

int main(int argc, char **argv) {
  const bool fault = argc > 1 && !std::strcmp(argv[1], "fault");
  const u32 pages = 12, layers = 3, parts = 2, run = 2048 + 16, page = layers * parts * run;
  std::vector<Unit16> from(pages * page / 16), to(pages * page / 16);
  for (size_t i = 0; i < from.size(); i++) from[i] = {i * 0x9E3779B97F4A7C15ull, ~i};
  u32 bad = 0;
  // 0 wide, 1 narrow, 2 units of 8, 4 bytes, 5 summing, 9 ring.
  for (u32 kernel : {0u, 1u, 2u, 4u, 5u, 9u}) {
    std::memset(to.data(), 0, pages * page);
    std::vector<u64> sums(pages);
    static KvxJobSmall job;
    const u32 segment = kernel == 9 ? 512 : kernel == 0 || kernel == 5 ? 4096 : 1024;
    job.h = KvxHead();
    job.h.src = {reinterpret_cast<u64>(from.data()), page, parts * run, run, 0};
    job.h.dst = {reinterpret_cast<u64>(to.data()), run, parts * pages * run, pages * run, 0};
    job.h.run_bytes = run;
    job.h.sums = reinterpret_cast<u64>(sums.data());
    job.h.pairs = pages;
    job.h.layers = layers;
    job.h.parts = parts;
    job.h.segment_bytes = segment;
    job.h.segments = (run + segment - 1) / segment;
    job.h.flags = KVX_LINES_OFF;
    for (u32 i = 0; i < pages; i++) {
      job.src[i] = i;
      job.dst[i] = fault && i == 1 ? pages - 1 : pages - 1 - i;
    }
    kvx_cpu_launch(kernel, 0, &job, 5, kernel == 9 ? 32 : 128, 4, 512, 1 | (kernel & 1 ? 6 : 0));
    for (u32 p = 0; p < pages && !fault; p++)
      for (u32 l = 0; l < layers; l++)
        for (u32 q = 0; q < parts; q++) {
          const char *a = reinterpret_cast<char *>(from.data()) + p * page + (l * parts + q) * run;
          const char *b = reinterpret_cast<char *>(to.data()) + ((l * parts + q) * pages + pages - 1 - p) * run;
          bad += std::memcmp(a, b, run) != 0;
        }
  }
  std::printf("%u wrong runs\n", bad);
  return bad != 0;
}
