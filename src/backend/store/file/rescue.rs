//! The second chance: pages that were read move to the end of the log before their segment is deleted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Inner;
use super::io_threads::{Head, Op, Way};
use super::log::{Loc, Victim};
use super::segment::Segment;
use crate::backend::identity::{Space, StoreKey};
use crate::backend::region::Region;
use crate::backend::store::batch::Span;
use crate::backend::store::envelope::{Header, payload_crc};
use crate::backend::store::gate::locked;
use crate::backend::store::regions::{HeldSpans, Regions};

/// Memory to read pages into; grows to the largest page.
#[derive(Default)]
pub(super) struct Reader {
    regions: Regions,
    span: Option<Span>,
}

/// Why a page could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unread {
    /// No memory to read into.
    NoMemory,
    /// The medium failed.
    Medium,
    /// It is not what it should be.
    Bad,
}

impl Reader {
    fn memory(&mut self, len: usize) -> Option<HeldSpans> {
        let span = match self.span {
            Some(span) if span.len >= len => span,
            _ => {
                let region = Arc::new(Region::anonymous(len.max(1)).ok()?);
                self.regions.clear();
                let token = self.regions.register(&region);
                *self.span.insert(Span { region: token, offset: 0, len: len.max(1) })
            }
        };
        self.regions.resolve(&[Span { len, ..span }]).ok()
    }

    /// Reads and checks a page. Its bytes are valid until the next one is read.
    pub(super) fn read(
        &mut self,
        segment: Arc<Segment>,
        key: StoreKey,
        space: Space,
        loc: Loc,
    ) -> Result<(Header, HeldSpans), Unread> {
        let payload = self.memory(loc.payload as usize).ok_or(Unread::NoMemory)?;
        let offset = u64::from(loc.unit) * u64::from(segment.head.align);
        let head = Head::new(&[], segment.head.header_bytes() as usize);
        let op = Op { segment, way: Way::Read, offset, head, payload };
        let crc = match op.run() {
            Ok(crc) => crc,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(Unread::Bad),
            Err(_) => return Err(Unread::Medium),
        };
        let header = Header::decode(op.head.bytes()).map_err(|_| Unread::Bad)?;
        let holds = header.check(&key, &space).is_ok()
            && header.place == op.segment.head.place(offset)
            && header.payload_bytes == u64::from(loc.payload)
            && header.payload_crc == crc.unwrap_or_else(|| payload_crc(op.payload.runs()));
        if holds { Ok((header, op.payload)) } else { Err(Unread::Bad) }
    }
}

impl Inner {
    /// Moves the pages that were read out of the segment that goes next. Called by the put that has begun a
    /// new segment, with the barrier held shared: a whole segment's time before it matters. At most a quarter
    /// of a segment is moved, so three quarters of what is written are new pages whatever is read.
    pub(super) fn rescue(&self) {
        let Some(Victim { segment: victim, hot }) = self.log.next_victim() else { return };
        let mut budget = self.log.config.segment_bytes / 4;
        let mut reader = Reader::default();
        for (key, loc) in hot {
            let bytes = victim.head.record_bytes(u64::from(loc.payload));
            if bytes > budget {
                break;
            }
            budget -= bytes;
            if self.move_page(&mut reader, &victim, key, loc).is_none() {
                // Gone, damaged, or no room: it takes its chance with the next reader.
                tracing::debug!(?key, "a page was not rescued");
            }
        }
    }

    fn move_page(&self, reader: &mut Reader, victim: &Arc<Segment>, key: StoreKey, loc: Loc) -> Option<()> {
        let space = {
            let index = locked(&self.log.index);
            index.space(loc.space).filter(|_| index.pages.get(&key) == Some(&loc))?
        };
        let (header, payload) = reader.read(Arc::clone(victim), key, space, loc).ok()?;
        let (place, spent) = self.log.place(header.payload_bytes).ok()?;
        self.seal_later(spent);
        let header = Header { place: place.segment.head.place(place.offset), ..header };
        let head = Head::new(&header.encode(), place.segment.head.header_bytes() as usize);
        let op =
            Op { segment: Arc::clone(&place.segment), way: Way::Write, offset: place.offset, head, payload };
        if op.run().is_err() {
            place.segment.end_write(None);
            return None;
        }
        op.testify();
        if self.log.commit(&place, key, space, loc.payload) {
            self.log.counters.rescued.fetch_add(1, Relaxed);
        }
        Some(())
    }
}
