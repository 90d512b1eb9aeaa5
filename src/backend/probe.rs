//! What this machine has, in findings that a person can act on. `sapwood doctor` prints them.
//!
//! Probing loads the CUDA driver if there is one and the feature is on, reads a few files of the system,
//! and changes nothing. It never fails: what cannot be found out is a finding too.

use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// As it should be, or a plain fact.
    Good,
    /// Works, but slower or with less than could be had.
    Note,
    /// Something that was asked for cannot be had.
    Missing,
}

/// One thing found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Finding {
    /// The crate was built without CUDA support.
    CudaNotBuilt,
    /// No driver library was found.
    NoCudaDriver,
    /// The driver is there and does not do.
    CudaDriver {
        /// Why not.
        problem: String,
    },
    /// The driver works and sees no device.
    NoCudaDevice,
    /// A device.
    CudaDevice {
        /// Its number.
        ordinal: u32,
        /// Its name.
        name: String,
        /// Compute capability.
        capability: (u32, u32),
        /// Bytes of memory.
        memory_bytes: u64,
        /// 1000 x major + 10 x minor of the driver.
        driver_version: u32,
        /// Whether the kernels of this build run there; if not, the copy engine does their work.
        kernels: bool,
        /// Whether the bulk-copy ring runs there.
        ring: bool,
    },
    /// Where the kernels of this build come from: `ptx`, or `fatbin` and its architectures.
    Kernels {
        /// As [`Finding::Kernels`] says.
        images: String,
    },
    /// Copies on the host.
    HostCopies {
        /// Whether stores that bypass the cache are used.
        non_temporal: bool,
        /// Threads that may be used.
        threads: usize,
    },
    /// Memory that may be locked, which bounds what can be registered with a device; `None` is unlimited.
    LockedMemory {
        /// Bytes.
        limit_bytes: Option<u64>,
    },
    /// Memory of the machine.
    Memory {
        /// Bytes in all.
        total_bytes: u64,
        /// Bytes that can be had now.
        available_bytes: u64,
    },
}

impl Finding {
    /// How bad it is.
    #[must_use]
    pub fn severity(&self) -> Severity {
        match self {
            Finding::NoCudaDriver | Finding::CudaDriver { .. } | Finding::NoCudaDevice => Severity::Missing,
            Finding::CudaDevice { kernels: false, .. } => Severity::Missing,
            Finding::CudaDevice { ring, capability, .. } if !ring && capability.0 >= 9 => Severity::Note,
            Finding::CudaNotBuilt | Finding::HostCopies { non_temporal: false, .. } => Severity::Note,
            Finding::LockedMemory { limit_bytes: Some(n) } if *n < 1 << 30 => Severity::Note,
            _ => Severity::Good,
        }
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::CudaNotBuilt => {
                write!(f, "CUDA: not built in (feature `cuda`); the software device works")
            }
            Finding::NoCudaDriver => {
                write!(f, "CUDA: no driver (libcuda was not found); the software device works")
            }
            Finding::CudaDriver { problem } => write!(f, "CUDA: the driver cannot be used: {problem}"),
            Finding::NoCudaDevice => write!(f, "CUDA: the driver sees no device"),
            Finding::CudaDevice {
                ordinal,
                name,
                capability,
                memory_bytes,
                driver_version,
                kernels,
                ring,
            } => {
                let (major, minor) = (driver_version / 1000, driver_version % 1000 / 10);
                write!(
                    f,
                    "CUDA device {ordinal}: {name}, sm_{}{}, {:.0} GiB, driver {major}.{minor}, kernels {}, ring {}",
                    capability.0,
                    capability.1,
                    gib(*memory_bytes),
                    if *kernels { "yes" } else { "no, copies go through the copy engine only" },
                    if *ring { "yes" } else { "no" },
                )
            }
            Finding::Kernels { images } => write!(f, "kernels: {images}"),
            Finding::HostCopies { non_temporal, threads } => {
                let how = if *non_temporal { "with" } else { "without" };
                write!(f, "host copies: {threads} threads, {how} non-temporal stores")
            }
            Finding::LockedMemory { limit_bytes: None } => write!(f, "locked memory: unlimited"),
            Finding::LockedMemory { limit_bytes: Some(n) } => {
                write!(f, "locked memory: at most {:.2} GiB (ulimit -l)", gib(*n))
            }
            Finding::Memory { total_bytes, available_bytes } => {
                write!(f, "memory: {:.1} GiB, {:.1} GiB available", gib(*total_bytes), gib(*available_bytes))
            }
        }
    }
}

/// Looks around. Takes milliseconds, or about a second where a device has to compile the kernels.
#[must_use]
pub fn report() -> Vec<Finding> {
    let mut findings = cuda();
    let (non_temporal, threads) = crate::backend::host::copy_means();
    findings.push(Finding::HostCopies { non_temporal, threads });
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    findings.push(Finding::LockedMemory { limit_bytes: limit.current });
    findings.extend(memory());
    findings
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Vec<Finding> {
    vec![Finding::CudaNotBuilt]
}

#[cfg(feature = "cuda")]
fn cuda() -> Vec<Finding> {
    use crate::backend::device::cuda::{CudaDriver, CudaError, IMAGE_KIND, devices};
    use crate::backend::device::driver::Driver;

    let kernels = Finding::Kernels { images: IMAGE_KIND.to_string() };
    let problem = |e: CudaError| match e {
        CudaError::NoDriver => Finding::NoCudaDriver,
        e => Finding::CudaDriver { problem: e.to_string() },
    };
    let infos = match devices() {
        Ok(infos) if infos.is_empty() => return vec![Finding::NoCudaDevice, kernels],
        Ok(infos) => infos,
        Err(e) => return vec![problem(e), kernels],
    };
    let mut findings: Vec<Finding> = Vec::new();
    for (ordinal, info) in (0..).zip(infos) {
        findings.push(match CudaDriver::open(ordinal) {
            Err(e) => problem(e),
            Ok(driver) => {
                let can = driver.capabilities();
                Finding::CudaDevice {
                    ordinal,
                    name: info.name,
                    capability: info.capability,
                    memory_bytes: info.memory_bytes,
                    driver_version: info.driver_version,
                    kernels: can.kernels,
                    ring: can.ring.is_some(),
                }
            }
        });
    }
    findings.push(kernels);
    findings
}

/// From /proc/meminfo; nothing where that cannot be read.
fn memory() -> Option<Finding> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(Finding::Memory { total_bytes: field("MemTotal:")?, available_bytes: field("MemAvailable:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_always_comes_and_says_something_about_everything() {
        let findings = report();
        let has = |test: fn(&Finding) -> bool| findings.iter().any(test);
        assert!(has(|f| matches!(f, Finding::HostCopies { threads: 1.., .. })));
        assert!(has(|f| matches!(f, Finding::LockedMemory { .. })));
        assert!(has(|f| matches!(f, Finding::Memory { total_bytes: 1.., .. })));
        if cfg!(not(feature = "cuda")) {
            assert_eq!(findings[0], Finding::CudaNotBuilt);
        } else {
            assert!(has(|f| matches!(f, Finding::Kernels { .. })));
        }
        for finding in &findings {
            let text = finding.to_string();
            assert!(text.is_ascii() && text.len() > 8, "{text}");
        }
    }

    #[test]
    fn no_driver_is_said_in_words() {
        assert!(Finding::NoCudaDriver.to_string().contains("no driver"));
        assert_eq!(Finding::NoCudaDriver.severity(), Severity::Missing);
        assert!(Severity::Good < Severity::Note && Severity::Note < Severity::Missing);
    }
}
