//! bf16 to mx8 and back, against arithmetic in f64.

use std::sync::LazyLock;

use sapwood::backend::device::cpu::{CpuMode, launch_pages};
use sapwood::backend::device::kernels::{Head, Kernel, PAIRS_SMALL, PageJob, Side};

use crate::world::{RING, Random, shapes};

fn e4m3(byte: u8) -> f64 {
    let (sign, e, m) = (byte >> 7, (byte >> 3) & 15, byte & 7);
    let magnitude = match (e, m) {
        (15, 7) => f64::NAN,
        (0, m) => f64::from(m) * 2f64.powi(-9),
        (e, m) => (1.0 + f64::from(m) / 8.0) * 2f64.powi(i32::from(e) - 7),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

fn bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Nearest e4m3 code of a magnitude up to 448, ties to the even code, by bisection of all magnitudes.
fn nearest(value: f64) -> u8 {
    static MAGNITUDES: LazyLock<Vec<f64>> = LazyLock::new(|| (0..0x7F).map(e4m3).collect());
    let m = value.abs();
    let above = MAGNITUDES.partition_point(|&x| x < m).min(0x7E);
    let below = above.saturating_sub(1);
    let (up, down) = (MAGNITUDES[above] - m, m - MAGNITUDES[below]);
    let code = if up < down || (up == down && above % 2 == 0) { above } else { below };
    code as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

fn launch(kernel: Kernel, head: Head, pages: &[(u32, u32)], grid: u32) {
    let mut job = PageJob::<PAIRS_SMALL> { head, ..Default::default() };
    job.head.pairs = pages.len() as u32;
    for (i, &(s, d)) in pages.iter().enumerate() {
        (job.src[i], job.dst[i]) = (s, d);
    }
    // SAFETY: the tests below size their vectors by the same head.
    assert!(unsafe { launch_pages(kernel, &job, grid, 64, RING, CpuMode::default()) });
}

#[test]
fn every_block_is_rounded_to_nearest_and_none_saturates() {
    let mut random = Random::new(11);
    let mut worst = 0f64;
    for shape in 0..shapes() {
        let (layers, parts, blocks, pages) =
            (1 + random.below(3), 1 + random.below(2), 1 + random.below(6), 1 + random.below(4));
        let values = (layers * parts * blocks * 32) as usize;
        let page_q = values + values.div_ceil(32).next_multiple_of(16);
        let mut bf = vec![0u128; (pages as usize * values * 2).div_ceil(16)];
        let mut mx = vec![0u128; (pages as usize * page_q).div_ceil(16)];
        let mut back = vec![0u128; bf.len()];
        let n = pages as usize * values;
        // SAFETY: a vector of u128 is valid as u16; it is not touched otherwise while the slice lives.
        let input = unsafe { std::slice::from_raw_parts_mut(bf.as_mut_ptr().cast::<u16>(), n) };
        let spread = 1 + random.below(40);
        let centre = 20 + random.below(215);
        for v in input.iter_mut() {
            let exponent = (centre + random.below(spread)).saturating_sub(spread / 2).min(254);
            let special = shape % 7 == 0 && random.below(9) == 0;
            *v = if special {
                random.next() as u16
            } else {
                (random.next() as u16 & 0x807F) | (exponent as u16) << 7
            };
            if random.below(50) == 0 {
                *v &= 0x8000;
            }
        }
        let run = blocks * 64;
        let wide = |base: *mut u128, run: u64, page_step: u64| Side {
            base: base as u64,
            page_step,
            layer_step: parts * run,
            part_step: run,
            table: 0,
        };
        let (bf_page, q_page) = (values as u64 * 2, page_q as u64);
        let pairs: Vec<(u32, u32)> = (0..pages as u32).map(|p| (p, pages as u32 - 1 - p)).collect();
        let head = Head {
            src: wide(bf.as_mut_ptr(), run, bf_page),
            dst: wide(mx.as_mut_ptr(), run / 2, q_page),
            run_bytes: run,
            scales: values as u64,
            layers: layers as u32,
            parts: parts as u32,
            ..Head::default()
        };
        launch(Kernel::QuantMx8, head, &pairs, 1 + random.below(3) as u32);
        let swapped: Vec<_> = pairs.iter().map(|&(s, d)| (d, s)).collect();
        let head = Head { src: head.dst, dst: wide(back.as_mut_ptr(), run, bf_page), ..head };
        launch(Kernel::DequantMx8, head, &swapped, 2);

        // SAFETY: plain reads of the vectors after the kernels have returned.
        let (input, mx, back) = unsafe {
            (
                std::slice::from_raw_parts(bf.as_ptr().cast::<u16>(), n),
                std::slice::from_raw_parts(mx.as_ptr().cast::<u8>(), pages as usize * page_q),
                std::slice::from_raw_parts(back.as_ptr().cast::<u16>(), n),
            )
        };
        for &(s, d) in &pairs {
            for block in 0..values / 32 {
                let scale = mx[d as usize * page_q + values + block];
                let at = s as usize * values + block * 32;
                let finite = |v: u16| if bf16(v).is_finite() { bf16(v).abs() } else { 0.0 };
                let amax = input[at..at + 32].iter().fold(0f64, |a, &v| a.max(finite(v)));
                let unit = 2f64.powi(i32::from(scale) - 127);
                assert!(amax / unit <= 448.0, "block saturates: {amax} at scale {scale}");
                assert!(scale == 0 || amax / unit > 224.0, "scale {scale} is too large for {amax}");
                for i in 0..32 {
                    let (v, q, b) = (input[at + i], mx[d as usize * page_q + block * 32 + i], back[at + i]);
                    if !bf16(v).is_finite() {
                        assert!(e4m3(q).is_nan() && bf16(b).is_nan());
                        continue;
                    }
                    assert_eq!(q, nearest(bf16(v) / unit), "{v:#06x} at scale {scale}");
                    let largest = bf16(0x7F7F);
                    let exact = (e4m3(q) * unit).clamp(-largest, largest);
                    assert!((bf16(b) - exact).abs() <= exact.abs() / 256.0, "{q:#04x} at scale {scale}");
                    if amax > 0.0 {
                        worst = worst.max((bf16(b) - bf16(v)).abs() / amax);
                    }
                }
            }
        }
    }
    eprintln!("worst error: {:.2} % of the block's maximum", worst * 100.0);
    assert!(worst <= 0.0625, "{worst}");
}
