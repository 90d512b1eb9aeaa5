// Page copies by bulk copies through a ring in shared memory, sm_90 and later.
//
// One thread per block issues everything: bulk loads into the ring, bulk stores out of it. A ring of 192
// KiB keeps three times as many bytes in flight as a block of registers does, and needs no registers.
// Addresses and run lengths are multiples of 16; a segment is at most one stage.
#include "kv_job.h"

// Stages that are not being loaded: one being stored, one whose store may still read it.
#define KVX_SLACK 2u

// Barriers of the ring, before the stages.
#define KVX_RING_HEAD 128u

struct KvxRing {
  u32 stages;       // 3 to 16
  u32 stage_bytes;  // multiple of 128
};

template <class Job> KVX_DEV void bulk_job(const Job &job, const KvxRing &ring, u8 *shared) {
  if (KVX_TID != 0) return;
  const u32 total = segments_of(job), stages = ring.stages, ahead = stages - KVX_SLACK;
  const u32 mine = KVX_BID < total ? (total - KVX_BID - 1) / KVX_NBID + 1 : 0;
  const u32 bars = shared_addr(shared), data = bars + KVX_RING_HEAD;
  for (u32 s = 0; s < stages; s++) bar_init(bars + 8 * s);
  bar_init_done();
  u32 in = 0, out = 0;  // stages of the next load and the next store
  u32 phases = 0;       // one bit per stage: parity of the next wait
  for (u32 i = 0; i < mine + ahead; i++) {
    if (i < mine) {
      // The stage was last stored by segment i - stages; one younger store has been committed since.
      if (i >= stages) bulk_stores_read_but_one();
      KvxSegment s = segment_of(job, KVX_BID + i * KVX_NBID);
      if (s.bytes) bulk_load(data + in * ring.stage_bytes, s.src, s.bytes, bars + 8 * in);
      in = in + 1 == stages ? 0 : in + 1;
    }
    if (i >= ahead) {
      KvxSegment s = segment_of(job, KVX_BID + (i - ahead) * KVX_NBID);
      if (s.bytes) {
        bar_wait(bars + 8 * out, phases >> out & 1);
        phases ^= 1u << out;
      }
      bulk_store(s.dst, data + out * ring.stage_bytes, s.bytes);
      out = out + 1 == stages ? 0 : out + 1;
    }
  }
  bulk_stores_done();
}

#ifdef __CUDACC__
extern __shared__ __align__(128) u8 kvx_shared[];
#else
#define kvx_shared kvx_thread.shared
#endif

KVX_KERNEL void KVX_BOUNDS(32) kvx_bulk_small(KVX_PARAM(KvxJobSmall) job, KVX_PARAM(KvxRing) ring) {
  bulk_job(job, ring, kvx_shared);
}
KVX_KERNEL void KVX_BOUNDS(32) kvx_bulk_large(KVX_PARAM(KvxJobLarge) job, KVX_PARAM(KvxRing) ring) {
  bulk_job(job, ring, kvx_shared);
}
