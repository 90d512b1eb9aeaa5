//! Batches of the store as calls to the service.

use std::ops::Range;

use super::conn::CallError;
use super::session::{CALLS_AHEAD, ITEMS_PER_CALL, Lane, Session};
use super::wire::{self, Answer, Function, Malformed, Reply, Request, code};
use super::{Call, Outcome, StoreError, StoreKey, TransportCause, name_of, outcome_of_code};
use crate::backend::store::Item;
use crate::backend::store::envelope::{HEADER_BYTES, Header, payload_crc};
use crate::backend::store::regions::HeldSpans;
use crate::backend::store::sealed::outcome_of;
use crate::base::containers::Map;

/// Bytes of one call to the service at most. Between two calls of a connection the real client talks to the master for
/// most of a millisecond; as long at least must the call of the other connection be copied.
const BYTES_PER_CALL: usize = 16 << 20;
/// Bytes of the first call of a put, which are mostly summed up while the service looks what is there. Each further one is
/// half as large again: a sum takes two thirds to three quarters of the time of a copy.
const BYTES_FIRST_PUT: usize = 6 << 20;
/// Bytes of the last call of a get, since nothing is copied while it is checked, and of the first: two calls of one size
/// that begin together are copied by turns and end together, and nothing is copied until the next ones have begun.
const BYTES_OUTER_GET: usize = 4 << 20;
/// Keys of one call that moves no payload.
const KEYS_PER_CALL: usize = 1024;

/// An item and the memory it names.
pub(super) type Object<'a> = (&'a Item, &'a HeldSpans);

/// The service through a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Service<'a> {
    pub(super) session: &'a Session,
    pub(super) prefer_same_node: bool,
}

fn unheard(error: CallError, call: &Call) -> Outcome {
    match error {
        CallError::Timeout => call.stopped().unwrap_or(Outcome::Timeout),
        other => Outcome::Transport(other.cause()),
    }
}

impl Service<'_> {
    /// Runs `step` on a lane; a failed lane is given up, a good one kept.
    fn on_lane<T>(
        self,
        call: &Call,
        moving: bool,
        step: impl FnOnce(&mut Lane) -> Result<T, CallError>,
    ) -> Result<T, Outcome> {
        let mut lane = self.session.lane(call.deadline)?;
        match step(&mut lane) {
            Ok(value) => {
                self.session.keep_lane(lane);
                Ok(value)
            }
            // A caller's deadline and a refused call say nothing about the real client, but the connection may owe
            // answers that nobody reads.
            Err(error @ (CallError::Timeout | CallError::Rpc(_))) if !moving => {
                self.session.drop_lane(lane);
                Err(unheard(error, call))
            }
            Err(error) => {
                self.session.give_up_lane(lane, error, moving);
                Err(unheard(error, call))
            }
        }
    }

    /// One answer per key, in calls of bounded size. `meanwhile` is done while the first of them is under way; not at
    /// all if there is none.
    fn by_keys<T: Clone>(
        self,
        function: &'static Function,
        keys: &[StoreKey],
        call: &Call,
        finish: impl Fn(Request) -> Request,
        value: impl Fn(&mut Reply<'_>) -> Result<T, Malformed>,
        meanwhile: impl FnOnce(),
    ) -> Vec<Result<Answer<T>, Outcome>> {
        let mut out = Vec::with_capacity(keys.len());
        let mut meanwhile = Some(meanwhile);
        for chunk in keys.chunks(KEYS_PER_CALL) {
            let names: Vec<String> = chunk.iter().map(name_of).collect();
            let done = match call.stopped() {
                Some(stopped) => Err(stopped),
                None => self.on_lane(call, false, |lane| {
                    let request = Request::new(function, names.len()).texts(names.iter().map(String::as_str));
                    let number = lane.conn.send(finish(request))?;
                    if let Some(work) = meanwhile.take() {
                        work();
                    }
                    let body = lane.conn.receive(number, call.deadline)?;
                    Ok(Reply::of(function, &body)?.each(chunk.len(), &value)?)
                }),
            };
            match done {
                Ok(answers) => out.extend(answers.into_iter().map(Ok)),
                Err(outcome) => out.extend(std::iter::repeat_n(Err(outcome), chunk.len())),
            }
        }
        out
    }

    /// Presence: `Ok(0)` or `Missing`. `meanwhile` is done while the service looks.
    pub(super) fn exist(self, keys: &[StoreKey], call: &Call, meanwhile: impl FnOnce()) -> Vec<Outcome> {
        let answers = self.by_keys(&wire::EXIST, keys, call, |r| r, |v| v.flag(), meanwhile);
        answers
            .into_iter()
            .map(|answer| match answer {
                Ok(Ok(true)) => Outcome::Ok(0),
                Ok(Ok(false)) => Outcome::Missing,
                Ok(Err(code)) => outcome_of_code(code),
                Err(outcome) => outcome,
            })
            .collect()
    }

    /// Removes whatever is under the keys, leased or not: `Ok(0)` or `Missing`.
    pub(super) fn remove(self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let answers = self.by_keys(&wire::REMOVE, keys, call, |r| r.flag(true), |v| v.nothing(), || ());
        answers
            .into_iter()
            .map(|answer| match answer {
                Ok(Ok(())) => Outcome::Ok(0),
                Ok(Err(code)) => outcome_of_code(code),
                Err(outcome) => outcome,
            })
            .collect()
    }

    /// Payload lengths. One call per key, many under way at a time.
    pub(super) fn sizes(self, keys: &[StoreKey], call: &Call) -> Vec<Outcome> {
        let mut out = Vec::with_capacity(keys.len());
        for chunk in keys.chunks(ITEMS_PER_CALL) {
            let done = match call.stopped() {
                Some(stopped) => Err(stopped),
                None => self.on_lane(call, false, |lane| {
                    let mut numbers = Vec::with_capacity(chunk.len());
                    for key in chunk {
                        let name = name_of(key);
                        numbers.push(lane.conn.send(Request::new(&wire::SIZE, name.len()).text(&name))?);
                    }
                    numbers
                        .into_iter()
                        .map(|n| {
                            let body = lane.conn.receive(n, call.deadline)?;
                            Ok(Reply::of(&wire::SIZE, &body)?.number()?)
                        })
                        .collect::<Result<Vec<Answer<i64>>, CallError>>()
                }),
            };
            match done {
                Ok(sizes) => out.extend(sizes.into_iter().map(|size| match size {
                    Ok(n) => Outcome::Ok(usize::try_from(n).unwrap_or(0).saturating_sub(HEADER_BYTES)),
                    Err(code) => outcome_of_code(code),
                })),
                Err(outcome) => out.extend(std::iter::repeat_n(outcome, chunk.len())),
            }
        }
        out
    }

    /// Removes every object whose name matches; how many.
    pub(super) fn remove_matching(self, pattern: &str, call: &Call) -> Result<u64, StoreError> {
        let stopped = |outcome| match outcome {
            Outcome::Timeout => StoreError::Timeout,
            Outcome::Cancelled => StoreError::Cancelled,
            Outcome::Closed => StoreError::Closed,
            Outcome::Transport(cause) => StoreError::Remote { op: "clear", cause },
            _ => StoreError::Busy,
        };
        if let Some(outcome) = call.stopped() {
            return Err(stopped(outcome));
        }
        let answer = self.on_lane(call, false, |lane| {
            let request = Request::new(&wire::REMOVE_MATCHING, pattern.len()).text(pattern).flag(true);
            lane.conn.call(&wire::REMOVE_MATCHING, request, call.deadline, |r| r.number())
        });
        match answer.map_err(stopped)? {
            Ok(n) => Ok(u64::try_from(n).unwrap_or(0)),
            Err(code) => Err(StoreError::Remote { op: "clear", cause: TransportCause::Remote(code) }),
        }
    }

    /// Writes objects that are not there. Sealing the next call's objects goes on while this one's are copied; `sums`
    /// are the checksums of payloads that are known already.
    pub(super) fn put(self, objects: &[Object<'_>], sums: &Map<StoreKey, u32>, call: &Call) -> Vec<Outcome> {
        let seal = |lane: &Lane, slot: usize, (item, memory): &Object<'_>| {
            let crc = sums.get(&item.key).copied().unwrap_or_else(|| payload_crc(memory.runs()));
            let header = Header::new(item.key, item.space, memory.len() as u64, crc);
            let held = self.session.slot(lane, slot)?;
            held.fill(0, &header.encode());
            Ok(held)
        };
        let finish =
            |lane: &Lane, r: Request| r.put_options(self.prefer_same_node).int(0).client(lane.client);
        let outcomes = |body: &[u8], objects: &[Object<'_>], _: &[HeldSpans]| {
            let answers = Reply::of(&wire::PUT, body)?.each(objects.len(), Reply::nothing)?;
            Ok(answers
                .into_iter()
                .zip(objects)
                .map(|(answer, (_, memory))| match answer {
                    Ok(()) | Err(code::EXISTS) => Outcome::Ok(memory.len()),
                    Err(code) => outcome_of_code(code),
                })
                .collect())
        };
        let out =
            self.transfer(&wire::PUT, cuts(objects, room_of_put()), objects, call, seal, finish, outcomes);
        if out.contains(&Outcome::AddressLost) {
            self.session.doubt();
        }
        out
    }

    /// Reads objects and checks them while the next call's are copied.
    pub(super) fn get(self, objects: &[Object<'_>], call: &Call) -> Vec<Outcome> {
        let slot = |lane: &Lane, slot: usize, _: &Object<'_>| self.session.slot(lane, slot);
        let finish = |lane: &Lane, r: Request| r.flag(false).int(0).client(lane.client);
        let outcomes = |body: &[u8], objects: &[Object<'_>], headers: &[HeldSpans]| {
            let answers = Reply::of(&wire::GET, body)?.each(objects.len(), Reply::int64)?;
            Ok(answers
                .into_iter()
                .zip(objects.iter().zip(headers))
                .map(|(answer, (object, header))| match answer {
                    Ok(n) if usize::try_from(n) == Ok(HEADER_BYTES + object.1.len()) => check(object, header),
                    Ok(_) => Outcome::Transport(TransportCause::Protocol),
                    Err(code) => outcome_of_code(code),
                })
                .collect())
        };
        let mut out =
            self.transfer(&wire::GET, cuts(objects, room_of_get()), objects, call, slot, finish, outcomes);
        self.explain(objects, call, &mut out);
        out
    }

    /// A length that does not fit and an address that is not known come as the same codes. The length of the
    /// object says which it was; nothing was written.
    fn explain(self, objects: &[Object<'_>], call: &Call, out: &mut [Outcome]) {
        let doubtful = |o: &Outcome| {
            matches!(o, Outcome::AddressLost | Outcome::Transport(TransportCause::Remote(code::TRANSFER)))
        };
        let keys: Vec<StoreKey> =
            objects.iter().zip(&*out).filter(|(_, o)| doubtful(o)).map(|((item, _), _)| item.key).collect();
        let mut sizes = self.sizes(&keys, call).into_iter();
        let mut lost = false;
        for ((_, memory), o) in objects.iter().zip(out.iter_mut()).filter(|(_, o)| doubtful(o)) {
            match sizes.next() {
                Some(Outcome::Ok(stored)) if stored != memory.len() => *o = Outcome::SizeMismatch { stored },
                Some(Outcome::Missing) => *o = Outcome::Missing,
                _ => lost |= *o == Outcome::AddressLost,
            }
        }
        if lost {
            self.session.doubt();
        }
    }

    /// Keeps [`CALLS_AHEAD`] of `calls` under way: `prepare` readies the header of each object of a call, `finish` ends
    /// the request, `outcomes` reads the answer.
    #[expect(clippy::too_many_arguments, reason = "what a put and a get have not in common")]
    fn transfer(
        self,
        function: &'static Function,
        calls: impl Iterator<Item = Range<usize>>,
        objects: &[Object<'_>],
        call: &Call,
        prepare: impl Fn(&Lane, usize, &Object<'_>) -> Result<HeldSpans, Outcome>,
        finish: impl Fn(&Lane, Request) -> Request,
        outcomes: impl Fn(&[u8], &[Object<'_>], &[HeldSpans]) -> Result<Vec<Outcome>, Malformed>,
    ) -> Vec<Outcome> {
        let mut out: Vec<Outcome> = Vec::with_capacity(objects.len());
        if objects.is_empty() {
            return out;
        }
        let mut stopped = None;
        let run = self.on_lane(call, true, |lane| {
            let mut calls = calls.enumerate().peekable();
            if calls.peek().is_some_and(|(_, first)| first.len() < objects.len()) {
                self.session.widen(lane);
            }
            let mut ahead = std::collections::VecDeque::with_capacity(CALLS_AHEAD);
            loop {
                while ahead.len() < CALLS_AHEAD && stopped.is_none() {
                    let Some((index, range)) = calls.next() else { break };
                    stopped = call.stopped();
                    if stopped.is_some() {
                        break;
                    }
                    let first_slot = index % CALLS_AHEAD * ITEMS_PER_CALL;
                    let headers = objects[range.clone()]
                        .iter()
                        .enumerate()
                        .map(|(i, object)| prepare(lane, first_slot + i, object))
                        .collect::<Result<Vec<_>, _>>();
                    let headers = match headers {
                        Ok(headers) => headers,
                        Err(outcome) => {
                            stopped = Some(outcome);
                            break;
                        }
                    };
                    let request = finish(lane, addresses(function, &objects[range.clone()], &headers));
                    let number = lane.conn_of(index).send(request)?;
                    ahead.push_back((index, number, range, headers));
                }
                let Some((index, number, range, headers)) = ahead.pop_front() else { return Ok(()) };
                let body = lane.conn_of(index).receive(number, None)?;
                // The next answers are on their way already; what is read here costs them nothing.
                out.extend(outcomes(&body, &objects[range], &headers)?);
            }
        });
        let rest = run.err().or(stopped).unwrap_or(Outcome::Transport(TransportCause::Protocol));
        out.resize(objects.len(), rest);
        out
    }
}

/// Names, addresses and lengths of a call, of each object [what it consists of](pieces).
fn addresses(function: &Function, objects: &[Object<'_>], headers: &[HeldSpans]) -> Request {
    let names: Vec<String> = objects.iter().map(|(item, _)| name_of(&item.key)).collect();
    let pieces: Vec<Vec<(u64, u64)>> =
        objects.iter().zip(headers).map(|((_, memory), header)| pieces(memory, header)).collect();
    let longest = pieces.iter().map(Vec::len).max().unwrap_or(0).max(objects.len());
    Request::new(function, longest)
        .texts(names.iter().map(String::as_str))
        .numbers(pieces.iter().map(|p| p.iter().map(|(at, _)| *at)))
        .numbers(pieces.iter().map(|p| p.iter().map(|(_, len)| *len)))
}

/// Addresses and lengths of an object, in order: the payload's runs of memory, the header *behind* them. The pool puts an
/// object on a page boundary, and engines put their pages on one, so the real client copies between places that lie alike
/// in their pages. With the header in front a put writes 128 bytes further in the page than it reads, and a copy past the
/// caches (docs/MOONCAKE.md advises it) takes three times as long on some machines (docs/performance/store.md).
fn pieces(memory: &HeldSpans, header: &HeldSpans) -> Vec<(u64, u64)> {
    let runs = memory.spans().iter().filter(|s| s.len > 0);
    runs.chain(header.spans()).map(|s| (s.as_ptr() as u64, s.len as u64)).collect()
}

/// Whether what arrived is what was asked for.
fn check((item, memory): &Object<'_>, header: &HeldSpans) -> Outcome {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    header.append_to(&mut bytes);
    let header = match Header::decode(&bytes).and_then(|h| h.check(&item.key, &item.space).map(|()| h)) {
        Ok(header) => header,
        Err(defect) => return outcome_of(defect),
    };
    if header.payload_bytes != memory.len() as u64 || header.payload_crc != payload_crc(memory.runs()) {
        return Outcome::Corrupt;
    }
    Outcome::Ok(memory.len())
}

/// Bytes of the calls of a put, one after the other. Each is summed up while the ones before are copied, which takes longer.
fn room_of_put() -> impl FnMut(usize) -> usize {
    let mut next = BYTES_FIRST_PUT;
    move |_| {
        let room = next;
        next = (room / 2 * 3).min(BYTES_PER_CALL);
        room
    }
}

/// Bytes of the calls of a get, one after the other: the first is small, and from then on half of what is left.
fn room_of_get() -> impl FnMut(usize) -> usize {
    let mut most = BYTES_OUTER_GET;
    move |left| {
        let room = (left / 2).clamp(BYTES_OUTER_GET, most);
        most = BYTES_PER_CALL;
        room
    }
}

/// Cuts a batch into calls of at most so many objects and, but for single objects, of so many bytes as `room` has for the
/// next one, which is told how many are left.
fn cuts(objects: &[Object<'_>], room: impl FnMut(usize) -> usize) -> impl Iterator<Item = Range<usize>> {
    cuts_of(objects.iter().map(|(_, memory)| memory.len()).collect(), room)
}

fn cuts_of(
    object_bytes: Vec<usize>,
    mut room: impl FnMut(usize) -> usize,
) -> impl Iterator<Item = Range<usize>> {
    let mut left = object_bytes.iter().copied().fold(0, usize::saturating_add);
    let mut first = 0;
    std::iter::from_fn(move || {
        let room = room(left);
        let (start, mut end, mut bytes) = (first, first, 0_usize);
        while end < object_bytes.len() && end - start < ITEMS_PER_CALL {
            let more = bytes.saturating_add(object_bytes[end]);
            if end > start && more > room {
                break;
            }
            (bytes, end) = (more, end + 1);
        }
        first = end;
        left = left.saturating_sub(bytes);
        (end > start).then_some(start..end)
    })
}

#[cfg(test)]
mod tests {
    use super::super::NAME_PREFIX;
    use super::*;
    use crate::backend::region::Region;
    use crate::backend::store::batch::Span;
    use crate::backend::store::regions::Regions;

    fn calls(object_bytes: Vec<usize>, room: impl FnMut(usize) -> usize) -> Vec<usize> {
        let mut next = 0;
        let lens = cuts_of(object_bytes, room).map(|call| {
            assert_eq!(call.start, std::mem::replace(&mut next, call.end));
            call.len()
        });
        lens.collect()
    }

    /// Objects of another layout would be read as damaged ones, so this and the prefix of the names change together.
    #[test]
    fn an_object_begins_with_its_payload() {
        let region = std::sync::Arc::new(Region::anonymous(3 * 4096).unwrap());
        let regions = Regions::default();
        let token = regions.register(&region);
        let held = |spans: &[(usize, usize)]| {
            let spans: Vec<_> =
                spans.iter().map(|&(offset, len)| Span { region: token, offset, len }).collect();
            regions.resolve(&spans).unwrap()
        };
        let base = region.base().as_ptr() as u64;
        let header = held(&[(8192, HEADER_BYTES)]);
        let at = |memory| pieces(&held(memory), &header);
        let end = (base + 8192, HEADER_BYTES as u64);
        assert_eq!(at(&[(0, 4096)]), [(base, 4096), end]);
        assert_eq!(at(&[(4096, 100), (0, 0), (0, 7)]), [(base + 4096, 100), (base, 7), end]);
        assert_eq!(at(&[]), [end]);
        assert_eq!(NAME_PREFIX, "sapwood2-");
    }

    #[test]
    fn calls_of_a_put_grow_those_of_a_get_shrink_and_nothing_is_left_out() {
        let put = |bytes| calls(bytes, room_of_put());
        let get = |bytes| calls(bytes, room_of_get());
        assert_eq!(put(vec![1 << 20; 64]), [6, 9, 13, 16, 16, 4]);
        assert_eq!(get(vec![1 << 20; 64]), [4, 16, 16, 14, 7, 4, 3]);
        assert_eq!(put(vec![128 << 10; 200]), [48, 64, 64, 24]);
        assert_eq!(get(vec![64 << 10; 200]), [64, 64, 64, 8]);
        let odd = vec![0, 32 << 20, 0, usize::MAX, usize::MAX, 1];
        for cut in [put, get] {
            assert_eq!(cut(vec![4096; 130]), [64, 64, 2]);
            assert_eq!(cut(odd.clone()), [1, 1, 1, 1, 1, 1]);
            assert!(cut(vec![]).is_empty());
        }
    }
}
