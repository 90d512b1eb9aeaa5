//! A region: one stable block of memory that copies read and write by byte range, private or shared.
//!
//! Arenas are made of regions, devices and stores are handed ranges of them. A region knows nothing of
//! pages. Two accesses to one range at a time are the caller's fault, which is why the slices are `unsafe`:
//! the operation that owns a page is the only one that may touch its bytes (`docs/ARCHITECTURE.md`, idea 2).
#![expect(unsafe_code, reason = "maps memory and hands out slices of it; each block says why it is sound")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a huge page, the unit that huge mappings are rounded up to.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes that one step of [`Region::touch`] commits.
const TOUCH_STEP_BYTES: usize = 64 << 20;

/// Why a region could not be made or a range not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The system refused the mapping.
    #[error("cannot map {bytes} bytes: {source}")]
    Map {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system refused one step of preparing the memory.
    #[error("cannot {step} {bytes} bytes of memory: {source}")]
    Prepare {
        /// The step: create, size, seal, share, bind, commit.
        step: &'static str,
        /// Bytes of the region.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The range does not lie inside the region.
    #[error("range {offset}+{len} outside a region of {region_len} bytes")]
    OutOfRange {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes of the region.
        region_len: usize,
    },
}

/// Who can map the memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Sharing {
    /// This process.
    #[default]
    Private,
    /// Whoever is handed the descriptor (memfd). Sealed against shrinking and growing: a peer that maps it can
    /// not be killed by a file that lost its end.
    Shared,
    /// The same, but the descriptor handed out allows reading only.
    SharedReadOnly,
}

/// Size of the system's pages behind the memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum HugePages {
    /// What the system gives.
    #[default]
    Never,
    /// Asks for transparent huge pages. A system without them is no error.
    Advise,
    /// Reserved huge pages of [`HUGE_PAGE_BYTES`]. A system without enough of them is an error.
    Reserved,
}

/// How memory is to be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Mapping {
    /// Who can map it.
    pub sharing: Sharing,
    /// Page size.
    pub huge_pages: HugePages,
    /// NUMA node whose memory is to be used. Default: the node of the thread that touches a page first.
    pub numa_node: Option<u32>,
}

impl Mapping {
    /// The default: for this process, ordinary pages, any node.
    pub const PRIVATE: Mapping =
        Mapping { sharing: Sharing::Private, huge_pages: HugePages::Never, numa_node: None };
}

/// A mapping. Pages of the system are committed when first touched, so a large region costs address space only.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    mapped_bytes: usize,
    mapping: Mapping,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is owned by this value, not by a thread; all access goes through the unsafe slices,
// whose contract forbids conflicting use.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` offers no access that is not under that contract.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of zeroed private memory, nothing committed. `len == 0` is a region without bytes.
    pub fn anonymous(len: usize) -> Result<Region, RegionError> {
        Region::map(len, Mapping::default())
    }

    /// Maps `len` bytes of zeroed memory, nothing committed. `len == 0` is a region without bytes.
    pub fn map(len: usize, mapping: Mapping) -> Result<Region, RegionError> {
        if len == 0 {
            return Ok(Region { base: NonNull::dangling(), len, mapped_bytes: 0, mapping, fd: None });
        }
        let error = |source| RegionError::Map { bytes: len, source };
        let unit = if mapping.huge_pages == HugePages::Reserved { HUGE_PAGE_BYTES } else { 1 };
        let too_large = || error(std::io::ErrorKind::OutOfMemory.into());
        let mut bytes = len.checked_next_multiple_of(unit).ok_or_else(too_large)?;
        let fd = match mapping.sharing {
            Sharing::Private => None,
            Sharing::Shared | Sharing::SharedReadOnly => {
                let (fd, sealed_bytes) = sealed_memfd(bytes, mapping)?;
                bytes = sealed_bytes;
                Some(fd)
            }
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let base = match &fd {
            // SAFETY: a fresh mapping of a file nobody else has, at an address the kernel chooses.
            Some(fd) => unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0)
            },
            None => {
                let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                if mapping.huge_pages == HugePages::Reserved {
                    // Without a reservation a missing huge page would be a signal at the first touch.
                    flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
                }
                // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing.
                unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }
            }
        };
        let base = base.map_err(|e| error(e.into()))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| error(std::io::Error::other("mapped at address zero")))?;
        let mut region = Region { base, len, mapped_bytes: bytes, mapping, fd };
        if mapping.sharing == Sharing::SharedReadOnly {
            region.fd = region.fd.as_ref().map(|fd| read_only(fd, len)).transpose()?;
        }
        region.advise()?;
        Ok(region)
    }

    /// Page size and NUMA node, before anything is committed.
    fn advise(&self) -> Result<(), RegionError> {
        if self.mapping.huge_pages == HugePages::Advise {
            // SAFETY: advice on our own mapping changes no byte of it. A system without huge pages refuses;
            // then the pages are small.
            let _ = unsafe {
                rustix::mm::madvise(self.base.as_ptr().cast(), self.mapped_bytes, Advice::LinuxHugepage)
            };
        }
        match self.mapping.numa_node {
            Some(node) => self.bind(node),
            None => Ok(()),
        }
    }

    fn bind(&self, node: u32) -> Result<(), RegionError> {
        const MASK_WORDS: usize = 16;
        let word_bits = libc::c_ulong::BITS;
        let error = |source| RegionError::Prepare { step: "bind", bytes: self.len, source };
        let mut mask: [libc::c_ulong; MASK_WORDS] = [0; MASK_WORDS];
        let Some(word) = mask.get_mut((node / word_bits) as usize) else {
            return Err(error(std::io::ErrorKind::InvalidInput.into()));
        };
        *word = 1 << (node % word_bits);
        // SAFETY: a policy on our own mapping; the kernel reads `mask`, which has that many bits.
        let status = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.mapped_bytes,
                libc::MPOL_BIND,
                mask.as_ptr(),
                MASK_WORDS * word_bits as usize,
                0,
            )
        };
        if status == 0 { Ok(()) } else { Err(error(std::io::Error::last_os_error())) }
    }

    /// Commits all pages with up to `threads` threads, so that no later access waits for the kernel or finds it
    /// out of memory. O(bytes).
    pub fn touch(&self, threads: usize) -> Result<(), RegionError> {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let one = || -> Result<(), RegionError> {
            loop {
                let at = next.fetch_add(TOUCH_STEP_BYTES, std::sync::atomic::Ordering::Relaxed);
                if at >= self.mapped_bytes {
                    return Ok(());
                }
                let bytes = TOUCH_STEP_BYTES.min(self.mapped_bytes - at);
                // SAFETY: inside our own mapping; committing pages changes no byte, and a page that can not
                // be had is an error here instead of a signal later.
                let done = unsafe {
                    let start = self.base.as_ptr().add(at).cast();
                    rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite)
                };
                done.map_err(|e| RegionError::Prepare { step: "commit", bytes: self.len, source: e.into() })?;
            }
        };
        let threads = threads.clamp(1, self.mapped_bytes.div_ceil(TOUCH_STEP_BYTES).max(1));
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads)
                .filter_map(|_| std::thread::Builder::new().spawn_scoped(scope, one).ok())
                .collect();
            let first = one();
            // A thread of this closure does not panic; were it to, its part would be touched later.
            others.into_iter().filter_map(|t| t.join().ok()).fold(first, Result::and)
        })
    }

    /// How it was mapped.
    #[must_use]
    pub fn mapping(&self) -> Mapping {
        self.mapping
    }

    /// The descriptor that another process maps, if the memory is shared.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Bytes of the mapping: [`Region::len`] rounded up to whole huge pages where those were asked for, and for
    /// shared memory the size of the file.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte, for registration with a device or a store.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Whether `offset..offset + len` lies inside.
    pub fn check(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(RegionError::OutOfRange { offset, len, region_len: self.len }),
        }
    }

    /// The bytes of a range.
    ///
    /// # Safety
    /// For the life of the slice nobody writes the range.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], RegionError> {
        self.check(offset, len)?;
        // SAFETY: in bounds by the check, mapped and initialised (zero or written) for the life of `self`;
        // the caller excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len) })
    }

    /// The bytes of a range, to write.
    ///
    /// # Safety
    /// For the life of the slice nobody else reads or writes the range.
    #[expect(clippy::mut_from_ref, reason = "interior memory; exclusivity is the caller's contract")]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], RegionError> {
        self.check(offset, len)?;
        // SAFETY: in bounds by the check, mapped for the life of `self`; the caller excludes everybody else.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), len) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.mapped_bytes != 0 {
            // SAFETY: address and size are those of the mapping made in `map`, unmapped only here; no slice can
            // outlive `self`.
            let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
            debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
        }
    }
}

/// A memfd of at least `bytes` bytes that can neither shrink nor grow, and the size it has.
fn sealed_memfd(bytes: usize, mapping: Mapping) -> Result<(OwnedFd, usize), RegionError> {
    let error = |step| move |e: rustix::io::Errno| RegionError::Prepare { step, bytes, source: e.into() };
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if mapping.huge_pages == HugePages::Reserved {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let fd = rustix::fs::memfd_create(c"sapwood", flags).map_err(error("create"))?;
    rustix::fs::ftruncate(&fd, bytes as u64).map_err(error("size"))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(error("seal"))?;
    // What a peer is told is what the file has, not what was asked for: a peer that believes a size past the end
    // of the file is killed by its first access there.
    let stat = rustix::fs::fstat(&fd).map_err(error("size"))?;
    let size = usize::try_from(stat.st_size).unwrap_or(0);
    if size < bytes {
        return Err(error("size")(rustix::io::Errno::FBIG));
    }
    Ok((fd, size))
}

/// Another descriptor of the same file, for reading.
fn read_only(fd: &OwnedFd, bytes: usize) -> Result<OwnedFd, RegionError> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| RegionError::Prepare { step: "share", bytes, source: e.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_and_bytes_stay() {
        let r = Region::anonymous(8192).unwrap();
        // SAFETY: one thread, one slice at a time.
        unsafe {
            r.slice_mut(4096, 4).unwrap().copy_from_slice(&[1, 2, 3, 4]);
            assert_eq!(r.slice(4094, 4).unwrap(), &[0, 0, 1, 2]);
            assert!(r.slice(8190, 3).is_err());
            assert!(r.slice(usize::MAX, 2).is_err());
        }
        assert!(Region::anonymous(0).unwrap().is_empty());
    }

    #[test]
    fn an_absurd_size_is_an_error_value() {
        assert!(matches!(Region::anonymous(usize::MAX - 4095), Err(RegionError::Map { .. })));
    }

    #[test]
    fn shared_memory_is_sealed_and_its_size_is_the_size_of_the_file() {
        let mapping = Mapping { sharing: Sharing::Shared, ..Mapping::default() };
        let r = Region::map(10_000, mapping).unwrap();
        let fd = r.fd().unwrap();
        assert_eq!(rustix::fs::fstat(fd).unwrap().st_size as usize, r.mapped_bytes());
        assert!(rustix::fs::ftruncate(fd, 4096).is_err(), "shrinks");
        assert!(rustix::fs::ftruncate(fd, 1 << 20).is_err(), "grows");
        // SAFETY: one thread.
        unsafe { r.slice_mut(9_999, 1).unwrap()[0] = 7 };
        let mut seen = [0];
        rustix::io::pread(fd, &mut seen, 9_999).unwrap();
        assert_eq!(seen, [7]);
        assert!(Region::anonymous(4096).unwrap().fd().is_none());
    }

    #[test]
    fn a_reader_can_not_write_what_is_shared_for_reading() {
        let mapping = Mapping { sharing: Sharing::SharedReadOnly, ..Mapping::default() };
        let r = Region::map(8192, mapping).unwrap();
        // SAFETY: one thread.
        unsafe { r.slice_mut(0, 1).unwrap()[0] = 9 };
        let mut seen = [0];
        rustix::io::pread(r.fd().unwrap(), &mut seen, 0).unwrap();
        assert_eq!(seen, [9]);
        assert!(rustix::io::pwrite(r.fd().unwrap(), &[1], 0).is_err());
    }

    #[test]
    fn touching_commits_every_page_and_changes_none() {
        for sharing in [Sharing::Private, Sharing::Shared] {
            for threads in [0, 1, 5] {
                let mapping = Mapping { sharing, huge_pages: HugePages::Advise, ..Mapping::default() };
                let r = Region::map(3 << 20, mapping).unwrap();
                // SAFETY: one thread.
                unsafe { r.slice_mut(1 << 20, 1).unwrap()[0] = 5 };
                r.touch(threads).unwrap();
                // SAFETY: one thread.
                let bytes = unsafe { r.slice(0, 3 << 20) }.unwrap();
                assert!(bytes.iter().enumerate().all(|(i, &b)| b == if i == 1 << 20 { 5 } else { 0 }));
            }
        }
        Region::anonymous(0).unwrap().touch(4).unwrap();
    }

    #[test]
    fn what_the_system_does_not_have_is_an_error_value() {
        for numa_node in [Some(1000), Some(u32::MAX)] {
            let mapping = Mapping { numa_node, ..Mapping::default() };
            let refused = Region::map(4096, mapping);
            assert!(matches!(refused, Err(RegionError::Prepare { step: "bind", .. })), "{refused:?}");
        }
        let near = Mapping { numa_node: Some(0), ..Mapping::default() };
        // A kernel without NUMA support knows no such call, which is an answer too.
        assert!(matches!(
            Region::map(4096, near).and_then(|r| r.touch(1)),
            Ok(()) | Err(RegionError::Prepare { step: "bind", .. })
        ));
        for sharing in [Sharing::Private, Sharing::Shared] {
            let mapping = Mapping { sharing, huge_pages: HugePages::Reserved, ..Mapping::default() };
            // 1 TiB of reserved huge pages is more than any machine of the tests has.
            let refused = Region::map(1 << 40, mapping);
            assert!(
                matches!(refused, Err(RegionError::Map { .. } | RegionError::Prepare { .. })),
                "{refused:?}"
            );
            assert!(Region::map(usize::MAX, mapping).is_err());
        }
    }
}
