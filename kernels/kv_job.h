// The argument of every kernel: what to copy. Mirrored field by field in src/backend/device/kernels.rs,
// where the sizes are asserted as well.
//
// One addressing model for all layouts. A side is a base and three distances; page p, layer l, part q
// starts at base + p * page_step + l * layer_step + q * part_step. With a table, base is replaced by
// table[(first_layer + l) * table_parts + q] and the two inner steps are not used. From there `run_bytes`
// bytes are contiguous. The planner merges neighbouring axes that are contiguous on both sides before it
// fills in the counts, so a job of whole pages has layers = parts = 1.
#pragma once
#include "kv_port.h"

struct KvxSide {
  u64 base;
  u64 page_step;
  u64 layer_step;
  u64 part_step;
  u64 table;
};

struct KvxHead {
  KvxSide src;
  KvxSide dst;
  u64 run_bytes;      // contiguous bytes per (page, layer, part), as the source has them
  u64 sums;           // one u64 per pair, for the summing copy; else 0
  u64 scales;         // quantised side: offset of the scales from the start of the page
  u32 pairs;          // pages in this launch
  u32 layers;
  u32 parts;
  u32 segments;       // per run
  u32 segment_bytes;  // multiple of 128
  u32 first_layer;    // of the tables
  u32 table_parts;    // entries per layer of the tables
  u32 flags;          // KVX_LINES_*
};

// Segments are cut at 128-byte lines of the source address, or of the destination with this flag: of the
// side across the link, so that no packet straddles two lines.
#define KVX_LINES_OF_DST 1u
// Cut segments at multiples of their size from the start of the run instead.
#define KVX_LINES_OFF 2u

// Page lists travel in the launch parameters: no upload, nothing to keep alive. 4 KiB of parameters work
// everywhere, 32,764 bytes need PTX ISA 8.1.
#define KVX_PAIRS_SMALL 490
#define KVX_PAIRS_LARGE 4072

struct KvxJobSmall {
  KvxHead h;
  u32 src[KVX_PAIRS_SMALL];
  u32 dst[KVX_PAIRS_SMALL];
};

struct KvxJobLarge {
  KvxHead h;
  u32 src[KVX_PAIRS_LARGE];
  u32 dst[KVX_PAIRS_LARGE];
};

struct KvxDesc {
  u64 src;
  u64 dst;
  u32 bytes;
  u32 first_segment;  // segments of all descriptors before this one
};

#define KVX_DESCS_SMALL 170
#define KVX_DESCS_LARGE 1364

template <int N> struct KvxDescJobOf {
  u32 descs;
  u32 segments;  // of all descriptors
  u32 segment_bytes;
  u32 zero;
  KvxDesc d[N];
};
typedef KvxDescJobOf<KVX_DESCS_SMALL> KvxDescJobSmall;
typedef KvxDescJobOf<KVX_DESCS_LARGE> KvxDescJobLarge;

static_assert(sizeof(KvxHead) == 136, "mirrored in kernels.rs");
static_assert(sizeof(KvxJobSmall) <= 4096, "fits the parameters of any driver");
static_assert(sizeof(KvxJobLarge) <= 32764, "fits the large parameters");
static_assert(sizeof(KvxDescJobSmall) <= 4096, "fits the parameters of any driver");
static_assert(sizeof(KvxDescJobLarge) <= 32764, "fits the large parameters");

KVX_DEV u64 side_at(const KvxSide &s, const KvxHead &h, u32 page, u32 layer, u32 part) {
  if (s.table)
    return load_table(s.table, (h.first_layer + layer) * h.table_parts + part) + page * s.page_step;
  return s.base + page * s.page_step + layer * s.layer_step + part * s.part_step;
}

// One segment of one run.
struct KvxSegment {
  u64 src, dst;   // addresses of its first byte
  u64 at;         // offset of its first byte in the run
  u32 bytes;      // 0: nothing to do
  u32 pair, layer, part;
};

// Segment `i` of the job; the page lists are indexed in the parameters, never copied.
template <class Job> KVX_DEV KvxSegment segment_of(const Job &job, u32 i) {
  const KvxHead &h = job.h;
  KvxSegment s;
  u32 k = i % h.segments;
  i /= h.segments;
  s.part = i % h.parts;
  i /= h.parts;
  s.layer = i % h.layers;
  s.pair = i / h.layers;
  u64 src = side_at(h.src, h, job.src[s.pair], s.layer, s.part);
  u64 dst = side_at(h.dst, h, job.dst[s.pair], s.layer, s.part);
  u64 skew = (h.flags & KVX_LINES_OFF) ? 0 : ((h.flags & KVX_LINES_OF_DST) ? dst : src) & 127;
  u64 from = (u64)k * h.segment_bytes, to = from + h.segment_bytes;
  from = from > skew ? from - skew : 0;
  to = to > skew ? to - skew : 0;
  if (to > h.run_bytes) to = h.run_bytes;
  s.at = from;
  s.src = src + from;
  s.dst = dst + from;
  s.bytes = to > from ? (u32)(to - from) : 0;
  return s;
}

template <class Job> KVX_DEV u32 segments_of(const Job &job) {
  return job.h.pairs * job.h.layers * job.h.parts * job.h.segments;
}
