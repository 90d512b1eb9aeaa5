//! How much host memory the ranks of a node may take together.
//!
//! "So many GiB of host cache" is asked for by every rank on its own. Each fits alone, together they do not, and
//! who looks at free memory sees what the others happen to have touched by then. So the ranks share one ledger,
//! and what is compared is what was promised, not what is free: the answer does not depend on who starts first.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Share of the machine's memory that a budget without a limit of its own may promise, in percent. What is left is
/// for the engines, the page cache and the system.
const SHARE_PERCENT: u64 = 85;

/// What bounds a budget.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Bound {
    /// The operator's number.
    Configured,
    /// 85 percent of the memory limit of the control group.
    ControlGroup,
    /// 85 percent of the memory of the machine.
    Machine,
}

/// Why memory was not promised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// It does not fit beside what was promised before.
    #[error(
        "{asked_bytes} bytes of host memory do not fit: {promised_bytes} of {limit_bytes} bytes ({bound:?}) are \
         promised to {holders} others on this node"
    )]
    Exceeded {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes promised to others.
        promised_bytes: u64,
        /// Bytes there are.
        limit_bytes: u64,
        /// Where the limit comes from.
        bound: Bound,
        /// Promises there are.
        holders: usize,
    },
    /// The ledger that the ranks share can not be read or written.
    #[error("budget ledger {path:?}: {source}")]
    Ledger {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A promise. Ends when it is dropped, and with the process.
#[derive(Debug)]
#[must_use]
pub struct Promise {
    budget: Budget,
    bytes: u64,
    id: u64,
}

impl Promise {
    /// Bytes promised.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Err(error) = self.budget.give_back(self.id) {
            // The entry ends with the process.
            tracing::warn!(%error, "sapwood: a memory promise could not be taken out of the ledger");
        }
    }
}

/// One entry of the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    pid: u32,
    /// Start of the process in ticks since boot: tells it from a later one of the same number.
    started: u64,
    id: u64,
    bytes: u64,
}

#[derive(Debug)]
enum Ledger {
    /// Ranks of one process.
    Here(Mutex<Vec<Entry>>),
    /// Ranks of several processes: a file under a lock.
    File(PathBuf),
}

/// A budget. Clones share the ledger.
#[derive(Clone, Debug)]
pub struct Budget {
    limit_bytes: u64,
    bound: Bound,
    ledger: Arc<Ledger>,
}

impl Budget {
    /// A budget for the ranks of this process. `limit_bytes` is cut to what the control group and the machine have.
    #[must_use]
    pub fn of_process(limit_bytes: Option<u64>) -> Budget {
        Budget::with(limit_bytes, Ledger::Here(Mutex::default()))
    }

    /// A budget for all processes that name the same file. It is made if it is missing; a file below a temporary
    /// folder that ends with the machine's uptime is a good place.
    #[must_use]
    pub fn of_node(path: impl Into<PathBuf>, limit_bytes: Option<u64>) -> Budget {
        Budget::with(limit_bytes, Ledger::File(path.into()))
    }

    fn with(configured: Option<u64>, ledger: Ledger) -> Budget {
        let share = |bytes: u64| bytes / 100 * SHARE_PERCENT;
        let machine = machine_bytes().map(|n| (share(n), Bound::Machine));
        let group = control_group_bytes().map(|n| (share(n), Bound::ControlGroup));
        let configured = configured.map(|n| (n, Bound::Configured));
        // Of equal limits the first counts: the one the operator can change.
        let least = [configured, group, machine].into_iter().flatten().min_by_key(|(n, _)| *n);
        let (limit_bytes, bound) = least.unwrap_or((u64::MAX, Bound::Machine));
        Budget { limit_bytes, bound, ledger: Arc::new(ledger) }
    }

    /// Bytes that may be promised together, and why not more.
    #[must_use]
    pub fn limit(&self) -> (u64, Bound) {
        (self.limit_bytes, self.bound)
    }

    /// Promises `bytes`, or says with numbers why not. O(promises).
    pub fn promise(&self, bytes: u64) -> Result<Promise, BudgetError> {
        let me = std::process::id();
        let started = start_of(me).unwrap_or(0);
        let id = self.change(|entries| {
            let promised = entries.iter().fold(0_u64, |sum, e| sum.saturating_add(e.bytes));
            if promised.saturating_add(bytes) > self.limit_bytes {
                return Err(BudgetError::Exceeded {
                    asked_bytes: bytes,
                    promised_bytes: promised,
                    limit_bytes: self.limit_bytes,
                    bound: self.bound,
                    holders: entries.len(),
                });
            }
            let id = 1 + entries.iter().filter(|e| e.pid == me).map(|e| e.id).max().unwrap_or(0);
            entries.push(Entry { pid: me, started, id, bytes });
            Ok(id)
        })??;
        Ok(Promise { budget: self.clone(), bytes, id })
    }

    fn give_back(&self, id: u64) -> Result<(), BudgetError> {
        let me = std::process::id();
        self.change(|entries| entries.retain(|e| (e.pid, e.id) != (me, id)))
    }

    /// Changes the entries of processes that live.
    fn change<T>(&self, change: impl FnOnce(&mut Vec<Entry>) -> T) -> Result<T, BudgetError> {
        match &*self.ledger {
            Ledger::Here(entries) => Ok(change(&mut entries.lock().unwrap_or_else(PoisonError::into_inner))),
            Ledger::File(path) => {
                change_file(path, change).map_err(|source| BudgetError::Ledger { path: path.clone(), source })
            }
        }
    }
}

fn change_file<T>(path: &Path, change: impl FnOnce(&mut Vec<Entry>) -> T) -> std::io::Result<T> {
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    // Ends with the descriptor, also when the process is killed.
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let mut entries: Vec<Entry> = text.lines().filter_map(parse).collect();
    entries.retain(|e| start_of(e.pid) == Some(e.started));
    let result = change(&mut entries);
    let text: String =
        entries.iter().map(|e| format!("{} {} {} {}\n", e.pid, e.started, e.id, e.bytes)).collect();
    file.seek(SeekFrom::Start(0))?;
    file.write_all(text.as_bytes())?;
    file.set_len(text.len() as u64)?;
    Ok(result)
}

/// One line. A line that is torn or foreign is nobody's promise.
fn parse(line: &str) -> Option<Entry> {
    let mut words = line.split(' ').map(str::parse::<u64>);
    let mut next = || words.next()?.ok();
    let entry = Entry { pid: u32::try_from(next()?).ok()?, started: next()?, id: next()?, bytes: next()? };
    words.next().is_none().then_some(entry)
}

/// When a process started, in ticks since boot; `None` if there is none.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, the fields behind its last parenthesis are numbers.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

fn machine_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 =
        text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The smallest memory limit on the way from our control group to the root.
fn control_group_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let root = Path::new("/sys/fs/cgroup");
    let limit_of = |file: PathBuf| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let unified = groups.lines().find_map(|l| l.strip_prefix("0::")).map(|group| (root.to_path_buf(), group));
    let old =
        groups.lines().find_map(|l| l.split_once(":memory:")).map(|(_, group)| (root.join("memory"), group));
    let least = |(root, group): (PathBuf, &str), file: &str| {
        let mut at = root.join(group.trim_start_matches('/'));
        let mut least: Option<u64> = None;
        while at.starts_with(&root) {
            least = least.into_iter().chain(limit_of(at.join(file))).min();
            if !at.pop() {
                break;
            }
        }
        least
    };
    // Version 1 writes "no limit" as a number near 2^63.
    let limits =
        [unified.and_then(|g| least(g, "memory.max")), old.and_then(|g| least(g, "memory.limit_in_bytes"))];
    limits.into_iter().flatten().filter(|&n| n < 1 << 60).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn ranks_share_one_limit_and_the_refusal_has_the_numbers() {
        let budget = Budget::of_process(Some(100 * MIB));
        assert_eq!(budget.limit(), (100 * MIB, Bound::Configured));
        let first = budget.promise(60 * MIB).unwrap();
        let other_rank = budget.clone();
        let refused = other_rank.promise(41 * MIB).unwrap_err();
        assert!(
            matches!(
                refused,
                BudgetError::Exceeded {
                    asked_bytes,
                    promised_bytes,
                    limit_bytes,
                    bound: Bound::Configured,
                    holders: 1
                } if (asked_bytes, promised_bytes, limit_bytes) == (41 * MIB, 60 * MIB, 100 * MIB)
            ),
            "{refused}"
        );
        let second = other_rank.promise(40 * MIB).unwrap();
        drop(first);
        let third = budget.promise(60 * MIB).unwrap();
        assert!(budget.promise(1).is_err());
        drop((second, third));
        assert_eq!(budget.promise(100 * MIB).unwrap().bytes(), 100 * MIB);
        assert!(budget.promise(u64::MAX).is_err());
    }

    #[test]
    fn a_limit_of_the_system_is_found() {
        let (limit, bound) = Budget::of_process(None).limit();
        assert!(limit > 0 && limit < u64::MAX, "{limit}");
        assert_ne!(bound, Bound::Configured);
        let (cut, _) = Budget::of_process(Some(u64::MAX)).limit();
        assert_eq!(cut, limit, "the operator can not promise what is not there");
    }

    #[test]
    fn processes_share_a_ledger_and_the_dead_hold_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("budget");
        let (one, two) = (Budget::of_node(&path, Some(10)), Budget::of_node(&path, Some(10)));
        let held = one.promise(6).unwrap();
        assert!(matches!(two.promise(5), Err(BudgetError::Exceeded { promised_bytes: 6, holders: 1, .. })));
        let also = two.promise(4).unwrap();
        drop(held);
        let again = one.promise(6).unwrap();
        drop((also, again));
        // A process that is gone, one whose number was given again, and lines of nobody.
        let mine = std::process::id();
        std::fs::write(&path, format!("4194304999 1 1 9\n{mine} 1 1 9\n1 2 x\n\n7")).unwrap();
        let all = one.promise(10).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 1);
        drop(all);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
        let nowhere = Budget::of_node(dir.path().join("no/such/folder"), Some(10));
        assert!(matches!(nowhere.promise(1), Err(BudgetError::Ledger { .. })));
    }
}
