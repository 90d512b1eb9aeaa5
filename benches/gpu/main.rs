//! Every copy path of a CUDA device, verified and then timed. Run by `benches/gpu/run.sh`.
//!
//! First every byte is checked against a CPU reference; a wrong one ends the program with code 1. Then the
//! table: each figure beside its denominator, one large pinned copy of the same direction in the same run.
//! Times are those of device events, best of five. `SAPWOOD_GPU_MIB` (default 1024) sets the bytes of a copy.
#![expect(unsafe_code, reason = "times raw launches and copies")]
#![expect(clippy::unwrap_used, reason = "a benchmark stops where a step fails")]

mod checks;
mod rig;

use std::time::Instant;

use sapwood::backend::device::Direction;
use sapwood::backend::device::cuda::{CudaDriver, IMAGE_KIND};
use sapwood::backend::device::driver::Driver;
use sapwood::backend::device::kernels::Kernel;

use rig::{Rig, Table};

const TO_HOST: Direction = Direction::DeviceToHost;
const TO_DEVICE: Direction = Direction::HostToDevice;
const INSIDE: Direction = Direction::DeviceToDevice;

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let mut driver = match CudaDriver::open(0) {
        Ok(driver) => driver,
        Err(e) => {
            eprintln!("no figures: {e}");
            std::process::exit(3);
        }
    };
    println!("{:?}\nkernels: {IMAGE_KIND}\n", driver.info());
    let checked = checks::all();
    println!("verified {checked} pages, every byte\n");
    let mib = std::env::var("SAPWOOD_GPU_MIB").ok().and_then(|s| s.parse().ok()).unwrap_or(1024usize);
    let mut table = Table::new();
    registration(&mut driver, &mut table, mib << 20);
    let mut rig = Rig::new(driver, mib << 20);
    link(&mut rig, &mut table);
    ring(&mut rig, &mut table);
    registers(&mut rig, &mut table);
    batches(&mut rig, &mut table);
    staged(&mut rig, &mut table);
    layers(&mut rig, &mut table);
    local(&mut rig, &mut table);
    sums(&mut rig, &mut table);
    quantised(&mut rig, &mut table);
    interference(&mut rig, &mut table);
    baselines(&mut rig, &mut table);
    table.finish();
}

/// 13: registering host memory.
fn registration(driver: &mut CudaDriver, table: &mut Table, bytes: usize) {
    let region = sapwood::backend::region::Region::anonymous(bytes).unwrap();
    // SAFETY: the region is `bytes` long and ours. Touched first: the commit is not what is timed.
    unsafe { std::ptr::write_bytes(region.base().as_ptr(), 1, bytes) };
    let start = Instant::now();
    driver.register_host(region.base(), bytes).unwrap();
    let us = start.elapsed().as_secs_f64() * 1e6;
    driver.unregister_host(region.base(), bytes).unwrap();
    table.row(13, "register anonymous memory", "", bytes, us, None);
}

/// 1: what the link does.
fn link(rig: &mut Rig, table: &mut Table) {
    for direction in [TO_HOST, TO_DEVICE] {
        let us = rig.large(direction);
        rig.set_link(direction, us);
        table.row(1, "copy engine, one copy", direction, rig.bytes, us, None);
    }
    let us = rig.both_ways();
    table.row(1, "copy engine, both ways at once", "", 2 * rig.bytes, us, None);
    for direction in [TO_HOST, TO_DEVICE] {
        let grid = rig.processors();
        let us = rig.pages(direction, Kernel::Copy16Wide, 64 << 10, grid);
        table.row(1, "register kernel, full grid", direction, rig.bytes, us, rig.link(direction));
    }
}

/// 2: the ring.
fn ring(rig: &mut Rig, table: &mut Table) {
    if rig.ring().is_none() {
        return table.note("2: this device has no ring");
    }
    for direction in [TO_HOST, TO_DEVICE] {
        for quota in [1, 2, 4, 8] {
            let us = rig.pages(direction, Kernel::Bulk, 64 << 10, quota);
            let name = format!("ring, runs of 64 KiB, {quota} blocks");
            table.row(2, &name, direction, rig.bytes, us, rig.link(direction));
        }
    }
}

/// 3: register kernels over run lengths and quotas.
fn registers(rig: &mut Rig, table: &mut Table) {
    for direction in [TO_HOST, TO_DEVICE] {
        for run in [1 << 10, 4 << 10, 16 << 10, 64 << 10] {
            for quota in [1, 2, 4, 8] {
                let us = rig.pages(direction, Kernel::Copy16Wide, run, quota);
                let name = format!("registers, runs of {} KiB, {quota} blocks", run >> 10);
                table.row(3, &name, direction, rig.bytes, us, rig.link(direction));
            }
        }
    }
}

/// 4: batches of the copy engine, and the cost of a descriptor they imply.
fn batches(rig: &mut Rig, table: &mut Table) {
    for direction in [TO_HOST, TO_DEVICE] {
        for run in [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20] {
            let us = rig.batch(direction, run);
            let name = format!("copy engine, runs of {} KiB", run >> 10);
            table.row(4, &name, direction, rig.bytes, us, rig.link(direction));
            if run == 64 << 10 {
                let each = (us - rig.link(direction).unwrap()) * 1000.0 / (rig.bytes / run) as f64;
                table.note(&format!("4: {each:.0} ns per descriptor, {direction:?}"));
            }
        }
    }
}

/// 5: staged write-back, 2 MiB pages scattered over layers on the device, whole on the host.
fn staged(rig: &mut Rig, table: &mut Table) {
    let (us, relayout_us) = rig.staged(2 << 20, 64 << 10);
    table.row(5, "staged write-back, pages of 2 MiB", TO_HOST, rig.bytes, us, rig.link(TO_HOST));
    table.note(&format!("5: {:.1} % of it is the relayout kernel", 100.0 * relayout_us / us));
}

/// 6: a load layer by layer against the same in one piece.
fn layers(rig: &mut Rig, table: &mut Table) {
    let (all_us, by_layer_us, host_us) = rig.by_layer(80, 64 << 10);
    table.row(6, "80 layers in one piece", TO_DEVICE, rig.bytes, all_us, rig.link(TO_DEVICE));
    table.row(6, "80 layers one by one", TO_DEVICE, rig.bytes, by_layer_us, Some(all_us));
    table.note(&format!("6: {host_us:.1} us of the submitting thread per layer"));
}

/// 7: inside the device; bytes count twice, read and written.
fn local(rig: &mut Rig, table: &mut Table) {
    let grid = 2 * rig.processors();
    for run in [1 << 10, 64 << 10] {
        let us = rig.pages(INSIDE, Kernel::Copy16Wide, run, grid);
        let name = format!("relayout, runs of {} KiB (read + written)", run >> 10);
        table.row(7, &name, INSIDE, 2 * rig.bytes, us, None);
    }
}

/// 8: summing while copying.
fn sums(rig: &mut Rig, table: &mut Table) {
    for direction in [TO_HOST, TO_DEVICE] {
        for quota in [2, 4] {
            let plain = rig.pages(direction, Kernel::Copy16Wide, 64 << 10, quota);
            let us = rig.pages(direction, Kernel::CopySum, 64 << 10, quota);
            let name = format!("copy with sums, {quota} blocks (against plain)");
            table.row(8, &name, direction, rig.bytes, us, Some(plain));
        }
    }
}

/// 9: bf16 to mx8 on the way out; bytes are those of the bf16 side.
fn quantised(rig: &mut Rig, table: &mut Table) {
    for quota in [2, 4, 8, 16] {
        let us = rig.quantised(64 << 10, quota);
        let name = format!("bf16 to mx8, {quota} blocks");
        table.row(9, &name, TO_HOST, rig.bytes, us, rig.link(TO_HOST));
    }
}

/// 10: what a memory-bound neighbour feels. The neighbour is a relayout inside the device, on its own
/// stream: the nearest thing to a decoding model that this crate carries.
fn interference(rig: &mut Rig, table: &mut Table) {
    let alone = rig.neighbour(None);
    table.note(&format!("10: neighbour alone: p50 {:.0} us, p99 {:.0} us", alone.0, alone.1));
    let full = rig.processors();
    for (name, kernel, grid) in [
        ("copy engine", None, 0),
        ("registers, 2 blocks", Some(Kernel::Copy16Wide), 2),
        ("registers, full grid", Some(Kernel::Copy16Wide), full),
        ("ring, 1 block", Some(Kernel::Bulk), 1),
    ] {
        if kernel == Some(Kernel::Bulk) && rig.ring().is_none() {
            continue;
        }
        let (p50, p99) = rig.neighbour(Some((kernel, grid)));
        let slower = 100.0 * (p99 / alone.1 - 1.0);
        table.note(&format!("10: beside {name}: p50 {p50:.0} us, p99 {p99:.0} us ({slower:+.1} %)"));
    }
}

/// 12: what others do, in our words: 8-byte units with a small grid, a block per pair without a cap, and a
/// loop of single copies.
fn baselines(rig: &mut Rig, table: &mut Table) {
    for direction in [TO_HOST, TO_DEVICE] {
        let us = rig.pages(direction, Kernel::Copy8, 4 << 10, 2);
        table.row(12, "8-byte units, 2 blocks, 4 KiB", direction, rig.bytes, us, rig.link(direction));
        let us = rig.pages(direction, Kernel::Copy16Wide, 4 << 10, 4072);
        table.row(12, "a block per pair, no cap, 4 KiB", direction, rig.bytes, us, rig.link(direction));
        let us = rig.loop_of_copies(direction, 64 << 10);
        table.row(12, "loop of single copies, 64 KiB", direction, rig.bytes, us, rig.link(direction));
    }
}
