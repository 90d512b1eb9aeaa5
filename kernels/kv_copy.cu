// Page copies by registers: plain, summing, by descriptor, and to and from mx8.
//
// A group of lanes moves one segment at a time and groups stride over all segments of the job, so any grid
// is correct and a small one is enough: a block of 1024 threads with four 16-byte loads each keeps 64 KiB
// in flight, which covers the round trip of a PCIe link with one or two blocks.
//
// Compiled twice: as it is, and with KVX_LARGE for the long page lists.
#include "kv_job.h"

#ifdef KVX_LARGE
typedef KvxJobLarge Job;
typedef KvxDescJobLarge DescJob;
#define KVX_NAME(name) name##_large
#else
typedef KvxJobSmall Job;
typedef KvxDescJobSmall DescJob;
#define KVX_NAME(name) name##_small
#endif

// Copies one segment by `LANES` lanes with four loads in flight each; `each(offset, unit)` sees every unit.
template <class Unit, int LANES, class Each>
KVX_DEV void copy_segment(u64 src, u64 dst, u32 bytes, u32 lane, Each each) {
  const u32 n = (u32)sizeof(Unit), step = LANES * n;
  u32 at = lane * n;
  for (; at + 3 * step < bytes; at += 4 * step) {
    Unit a = Mem<Unit>::load(src + at);
    Unit b = Mem<Unit>::load(src + at + step);
    Unit c = Mem<Unit>::load(src + at + 2 * step);
    Unit d = Mem<Unit>::load(src + at + 3 * step);
    Mem<Unit>::store(dst + at, a);
    Mem<Unit>::store(dst + at + step, b);
    Mem<Unit>::store(dst + at + 2 * step, c);
    Mem<Unit>::store(dst + at + 3 * step, d);
    each(at, a);
    each(at + step, b);
    each(at + 2 * step, c);
    each(at + 3 * step, d);
  }
  for (; at < bytes; at += step) {
    Unit a = Mem<Unit>::load(src + at);
    Mem<Unit>::store(dst + at, a);
    each(at, a);
  }
}

namespace {
struct Nothing {
  template <class Unit> KVX_CALL void operator()(u32, Unit) const {}
};
}  // namespace

template <class Unit, int LANES> KVX_DEV void copy_job(const Job &job) {
  const u32 lane = KVX_TID % LANES, groups = KVX_NBID * (KVX_NTID / LANES);
  const u32 n = segments_of(job);
  for (u32 i = KVX_BID * (KVX_NTID / LANES) + KVX_TID / LANES; i < n; i += groups) {
    KvxSegment s = segment_of(job, i);
    copy_segment<Unit, LANES>(s.src, s.dst, s.bytes, lane, Nothing());
  }
}

KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy16_l64)(KVX_PARAM(Job) job) { copy_job<Unit16, 64>(job); }
KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy16_l16)(KVX_PARAM(Job) job) { copy_job<Unit16, 16>(job); }
KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy8)(KVX_PARAM(Job) job) { copy_job<u64, 32>(job); }
KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy4)(KVX_PARAM(Job) job) { copy_job<u32, 32>(job); }
KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy1)(KVX_PARAM(Job) job) { copy_job<u8, 32>(job); }

// The sum of a page: each 16-byte unit, mixed with its position in the default byte order, added mod 2^64.
// Order of addition does not matter, so it is the same for every grid, and on the CPU (host/sum.rs).
KVX_DEV u64 mix_unit(Unit16 v, u64 position) {
  u64 x = (v.lo ^ (position * 0x9E3779B97F4A7C15ull + 0x243F6A8885A308D3ull)) * 0xBF58476D1CE4E5B9ull;
  u64 y = (v.hi ^ (position * 0xD6E8FEB86659FD93ull + 0x13198A2E03707344ull)) * 0x94D049BB133111EBull;
  u64 z = x ^ (x >> 32) ^ (y << 17 | y >> 47);
  z *= 0xD1B54A32D192ED03ull;
  return z ^ (z >> 29);
}

namespace {
struct Summing {
  u64 *sum;
  u64 first;  // position of the first unit of the segment
  KVX_CALL void operator()(u32 at, Unit16 v) const { *sum += mix_unit(v, first + at / 16); }
};
}  // namespace

KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy_sum)(KVX_PARAM(Job) job) {
  const u32 LANES = 64, lane = KVX_TID % LANES, groups = KVX_NBID * (KVX_NTID / LANES);
  const u32 n = segments_of(job);
  for (u32 i = KVX_BID * (KVX_NTID / LANES) + KVX_TID / LANES; i < n; i += groups) {
    KvxSegment s = segment_of(job, i);
    u64 sum = 0;
    u64 run = (u64)s.layer * job.h.parts + s.part;
    Summing each = {&sum, (run * job.h.run_bytes + s.at) / 16};
    copy_segment<Unit16, 64>(s.src, s.dst, s.bytes, lane, each);
    if (sum) add_u64(job.h.sums + 8ull * s.pair, sum);
  }
}

// A list of unequal copies. The descriptor of a segment is found by bisection.
KVX_KERNEL void KVX_BOUNDS(1024) KVX_NAME(kvx_copy_desc)(KVX_PARAM(DescJob) job) {
  const u32 LANES = 64, lane = KVX_TID % LANES, groups = KVX_NBID * (KVX_NTID / LANES);
  for (u32 i = KVX_BID * (KVX_NTID / LANES) + KVX_TID / LANES; i < job.segments; i += groups) {
    u32 lo = 0, hi = job.descs;
    while (hi - lo > 1) {
      u32 mid = (lo + hi) / 2;
      if (job.d[mid].first_segment <= i)
        lo = mid;
      else
        hi = mid;
    }
    u64 src = job.d[lo].src, dst = job.d[lo].dst;
    u32 at = (i - job.d[lo].first_segment) * job.segment_bytes;
    u32 bytes = job.d[lo].bytes - at;
    if (bytes > job.segment_bytes) bytes = job.segment_bytes;
    if (((src | dst | job.d[lo].bytes) & 15) == 0)
      copy_segment<Unit16, 64>(src + at, dst + at, bytes, lane, Nothing());
    else
      copy_segment<u8, 64>(src + at, dst + at, bytes, lane, Nothing());
  }
}

// mx8: 32 bf16 values become 32 bytes e4m3 and one shared exponent e8m0. The exponent is rounded up when
// the largest magnitude has a mantissa above 1.75, the mantissa of the largest e4m3 value, so that no value
// saturates. Infinities and NaN become NaN and take no part in the exponent.
KVX_DEV u32 shared_exponent(u32 amax_bf16) {
  u32 exponent = amax_bf16 >> 7, mantissa = amax_bf16 & 127;
  u32 e = exponent + (mantissa > 0x60 ? 1 : 0);  // biased by 127; 2^(e - 127) * 1.75 >= amax
  return e > 8 ? e - 8 : 0;
}

// Nearest e4m3, ties to even, of a finite |f| <= 448.
KVX_DEV u8 to_e4m3(float f) {
  u32 bits = f32_to_bits(f), sign = (bits >> 24) & 0x80;
  u32 mag = bits & 0x7FFFFFFF;
  if (mag < 0x3C800000) {  // below 2^-6: a multiple of 2^-9; 2^14 + f has exactly those units in its mantissa
    float shifted = bits_to_f32(mag) + 16384.0f;
    return (u8)(sign | (f32_to_bits(shifted) & 15));
  }
  mag += 0x7FFFF + ((mag >> 20) & 1);
  return (u8)(sign | ((mag - 0x3C000000) >> 20));
}

KVX_DEV float from_e4m3(u8 b) {
  u32 sign = (u32)(b & 0x80) << 24, mag = b & 0x7F;
  if (mag == 0x7F) return bits_to_f32(sign | 0x7FC00000);
  if (mag < 8) return bits_to_f32(sign | f32_to_bits((float)mag * 0.001953125f));
  return bits_to_f32(sign | ((mag << 20) + 0x3C000000));
}

// 2^(127 - e) and 2^(e - 127) for a biased e in 0..=254, subnormal results included.
KVX_DEV float power(int exponent) {
  return exponent >= -126 ? bits_to_f32((u32)(exponent + 127) << 23) : bits_to_f32(0x00400000u >> (-127 - exponent));
}

KVX_DEV u32 bf16_magnitude(u64 word, u32 i) {
  u32 m = (u32)(word >> (16 * i)) & 0x7FFF;
  return m < 0x7F80 ? m : 0;
}

KVX_DEV u64 quantise4(u64 word, float scale) {
  u64 out = 0;
  for (u32 i = 0; i < 4; i++) {
    u32 v = (u32)(word >> (16 * i)) & 0xFFFF;
    u8 q = (v & 0x7F80) == 0x7F80 ? (u8)(0x7F | (v >> 8 & 0x80)) : to_e4m3(bits_to_f32(v << 16) * scale);
    out |= (u64)q << (8 * i);
  }
  return out;
}

// bf16 bits, nearest even.
KVX_DEV u64 to_bf16(float f) {
  u32 b = f32_to_bits(f);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return (b >> 16) | 0x40;
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}

// A value close to the largest bf16 may have been rounded up past it: it comes back as the largest.
KVX_DEV u64 dequantise1(u8 byte, float scale) {
  u64 v = to_bf16(from_e4m3(byte) * scale);
  return (v & 0x7FFF) == 0x7F80 ? v - 1 : v;
}

KVX_DEV u64 dequantise4(u32 bytes, float scale) {
  u64 out = 0;
  for (u32 i = 0; i < 4; i++) out |= dequantise1((u8)(bytes >> (8 * i)), scale) << (16 * i);
  return out;
}

// One thread per block of 32 values. In these two, `run_bytes` counts the bf16 side.
KVX_KERNEL void KVX_BOUNDS(256) KVX_NAME(kvx_quant_mx8)(KVX_PARAM(Job) job) {
  const KvxHead &h = job.h;
  const u32 blocks = (u32)(h.run_bytes / 64), n = h.pairs * h.layers * h.parts * blocks;
  for (u32 i = KVX_BID * KVX_NTID + KVX_TID; i < n; i += KVX_NBID * KVX_NTID) {
    u32 block = i % blocks, run = i / blocks;
    u32 part = run % h.parts, layer = run / h.parts % h.layers, pair = run / h.parts / h.layers;
    u64 src = side_at(h.src, h, job.src[pair], layer, part) + 64ull * block;
    u64 dst = side_at(h.dst, h, job.dst[pair], layer, part) + 32ull * block;
    Unit16 in[4];
    KVX_UNROLL
    for (u32 k = 0; k < 4; k++) in[k] = Mem<Unit16>::load(src + 16 * k);
    u32 amax = 0;
    KVX_UNROLL
    for (u32 k = 0; k < 4; k++)
      for (u32 j = 0; j < 4; j++) {
        u32 a = bf16_magnitude(in[k].lo, j), b = bf16_magnitude(in[k].hi, j);
        amax = a > amax ? a : amax;
        amax = b > amax ? b : amax;
      }
    u32 e = shared_exponent(amax);
    float scale = power(127 - (int)e);
    KVX_UNROLL
    for (u32 k = 0; k < 2; k++) {
      Unit16 out = {quantise4(in[2 * k].lo, scale) | quantise4(in[2 * k].hi, scale) << 32,
                    quantise4(in[2 * k + 1].lo, scale) | quantise4(in[2 * k + 1].hi, scale) << 32};
      Mem<Unit16>::store(dst + 16 * k, out);
    }
    u64 scales = h.dst.base + job.dst[pair] * h.dst.page_step + h.scales;
    Mem<u8>::store(scales + (u64)(layer * h.parts + part) * blocks + block, (u8)e);
  }
}

KVX_KERNEL void KVX_BOUNDS(256) KVX_NAME(kvx_dequant_mx8)(KVX_PARAM(Job) job) {
  const KvxHead &h = job.h;
  const u32 blocks = (u32)(h.run_bytes / 64), n = h.pairs * h.layers * h.parts * blocks;
  for (u32 i = KVX_BID * KVX_NTID + KVX_TID; i < n; i += KVX_NBID * KVX_NTID) {
    u32 block = i % blocks, run = i / blocks;
    u32 part = run % h.parts, layer = run / h.parts % h.layers, pair = run / h.parts / h.layers;
    u64 src = side_at(h.src, h, job.src[pair], layer, part) + 32ull * block;
    u64 dst = side_at(h.dst, h, job.dst[pair], layer, part) + 64ull * block;
    u64 scales = h.src.base + job.src[pair] * h.src.page_step + h.scales;
    Unit16 in[2] = {Mem<Unit16>::load(src), Mem<Unit16>::load(src + 16)};
    float scale = power((int)Mem<u8>::load(scales + (u64)(layer * h.parts + part) * blocks + block) - 127);
    KVX_UNROLL
    for (u32 k = 0; k < 2; k++) {
      Unit16 a = {dequantise4((u32)in[k].lo, scale), dequantise4((u32)(in[k].lo >> 32), scale)};
      Unit16 b = {dequantise4((u32)in[k].hi, scale), dequantise4((u32)(in[k].hi >> 32), scale)};
      Mem<Unit16>::store(dst + 32 * k, a);
      Mem<Unit16>::store(dst + 32 * k + 16, b);
    }
  }
}
