//! The protocol of the real client, as bytes: frames, functions, values. Pure.
//!
//! ```text
//! request  magic 21 | version 0 | serializer 0 | kind 0 | sequence u32 | function u32 | body u32 | attachment u32
//! reply    magic 21 | version   | error        | kind   | sequence u32 | body u32 | attachment u32
//! body     type hash u32 | meta u8 | type literal, NUL | fields in order, no padding
//! ```
//! Little endian. A function is named by the first four bytes of the MD5 of its qualified name, a type by those
//! of its literal with the lowest bit set. Bits 3 and 4 of the meta byte say how wide the lengths of strings and
//! vectors are. The server refuses a literal that is not its own, which is how another release is found out.

use super::md5;

/// Release whose types these are. Its predecessors and successors differ in the fields of the put options.
pub const RELEASE: &str = "0.3.13";

pub(super) const REQUEST_HEADER_BYTES: usize = 20;
pub(super) const REPLY_HEADER_BYTES: usize = 16;
/// No answer to a batch of ours comes near it.
const REPLY_BYTES_MAX: usize = 1 << 26;
const MAGIC: u8 = 21;
const META_LITERAL: u8 = 0x04;

/// A function of the service with the types it takes and answers.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: &'static str,
    id: u32,
    args: &'static [u8],
    reply: &'static [u8],
}

impl Function {
    const fn new(name: &'static str, args: &'static [u8], reply: &'static [u8]) -> Function {
        Function { name, id: md5::prefix(name.as_bytes()), args, reply }
    }
}

const fn type_hash(literal: &[u8]) -> u32 {
    md5::prefix(literal) | 1
}

// Literals: 80 0c string, 0b bool, 01 i32, 03 i64, 04 u64, 06 u8, 84 vector of, 85 optional, 87 A B: A or an error
// B, fa nothing, fd .. ff several, fd 04 04 89 89 ff the id of a client.
const OK_OR_CODE: &[u8] = &[0x87, 0xfa, 0x01];
const OK_OR_CODE_EACH: &[u8] = &[0x84, 0x87, 0xfa, 0x01];
const NUMBER_OR_CODE: &[u8] = &[0x87, 0x03, 0x01];
const NUMBER_OR_CODE_EACH: &[u8] = &[0x84, 0x87, 0x03, 0x01];

pub(super) const READY: Function =
    Function::new("mooncake::RealClient::service_ready_internal", &[], OK_OR_CODE);
pub(super) const PING: Function = Function::new(
    "mooncake::RealClient::ping",
    &[0xfd, 0x04, 0x04, 0x89, 0x89, 0xff],
    &[0x87, 0xfd, 0x03, 0x01, 0xff, 0x01],
);
/// Keys, addresses of each, lengths of each, options of 13 fields, a number that is 0, client.
pub(super) const PUT: Function = Function::new(
    "mooncake::RealClient::batch_put_from_multi_buffers_dummy_helper",
    &[
        0xfd, 0x84, 0x80, 0x0c, 0x84, 0x84, 0x04, 0x84, 0x84, 0x04, 0xfd, 0x04, 0x04, 0x04, 0x06, 0x85, 0x04,
        0x0b, 0x84, 0x80, 0x0c, 0x80, 0x0c, 0x84, 0x80, 0x0c, 0x0b, 0x06, 0x80, 0x0c, 0x85, 0x84, 0x80, 0x0c,
        0xff, 0x01, 0xfd, 0x04, 0x04, 0x89, 0x89, 0xff, 0xff,
    ],
    OK_OR_CODE_EACH,
);
/// Keys, addresses of each, lengths of each, whether to prefer this node, a number that is 0, client.
pub(super) const GET: Function = Function::new(
    "mooncake::RealClient::batch_get_into_multi_buffers_dummy_helper",
    &[
        0xfd, 0x84, 0x80, 0x0c, 0x84, 0x84, 0x04, 0x84, 0x84, 0x04, 0x0b, 0x01, 0xfd, 0x04, 0x04, 0x89, 0x89,
        0xff, 0xff,
    ],
    NUMBER_OR_CODE_EACH,
);
pub(super) const EXIST: Function = Function::new(
    "mooncake::RealClient::batchIsExist_internal",
    &[0x84, 0x80, 0x0c],
    &[0x84, 0x87, 0x0b, 0x01],
);
pub(super) const SIZE: Function =
    Function::new("mooncake::RealClient::getSize_internal", &[0x80, 0x0c], NUMBER_OR_CODE);
/// Keys, whether leases are ignored.
pub(super) const REMOVE: Function = Function::new(
    "mooncake::RealClient::batchRemove_internal",
    &[0xfd, 0x84, 0x80, 0x0c, 0x0b, 0xff],
    OK_OR_CODE_EACH,
);
/// Pattern, whether leases are ignored.
pub(super) const REMOVE_MATCHING: Function = Function::new(
    "mooncake::RealClient::removeByRegex_internal",
    &[0xfd, 0x80, 0x0c, 0x0b, 0xff],
    NUMBER_OR_CODE,
);
/// First byte of a segment, client.
pub(super) const UNREGISTER: Function = Function::new(
    "mooncake::RealClient::unregister_shm_buffer_internal",
    &[0xfd, 0x04, 0xfd, 0x04, 0x04, 0x89, 0x89, 0xff, 0xff],
    OK_OR_CODE,
);
/// First byte of a segment, client.
pub(super) const IS_MAPPED: Function = Function::new(
    "mooncake::RealClient::is_shm_mapped_internal",
    &[0xfd, 0x04, 0xfd, 0x04, 0x04, 0x89, 0x89, 0xff, 0xff],
    &[0x87, 0x0b, 0x01],
);
pub(super) const UNMAP: Function = Function::new(
    "mooncake::RealClient::unmap_shm_internal",
    &[0xfd, 0x04, 0x04, 0x89, 0x89, 0xff],
    OK_OR_CODE,
);

/// Codes of the service.
pub(super) mod code {
    pub(in super::super) const NO_SPACE: i32 = -200;
    pub(in super::super) const INVALID: i32 = -600;
    /// Somebody is writing the object.
    pub(in super::super) const NOT_READY: i32 = -703;
    pub(in super::super) const MISSING: i32 = -704;
    pub(in super::super) const EXISTS: i32 = -705;
    pub(in super::super) const LEASED: i32 = -706;
    pub(in super::super) const TRANSFER: i32 = -800;
    pub(in super::super) const RPC: i32 = -900;
}

/// The id by which the service tells clients, and their segments, apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ClientId(pub(super) [u8; 16]);

/// Bytes of the record that goes with a descriptor.
pub(super) const SEGMENT_BYTES: usize = 40;
/// Kind of request on the local socket: map a segment.
pub(super) const MAP_SEGMENT: [u8; 4] = [0; 4];

/// The record that goes with a descriptor: client, first byte here, bytes, device -1, not a staging buffer.
pub(super) fn segment(client: ClientId, base: u64, bytes: u64) -> [u8; SEGMENT_BYTES] {
    let mut out = [0; SEGMENT_BYTES];
    out[..16].copy_from_slice(&client.0);
    out[16..24].copy_from_slice(&base.to_le_bytes());
    out[24..32].copy_from_slice(&bytes.to_le_bytes());
    out[32..36].copy_from_slice(&(-1_i32).to_le_bytes());
    out
}

/// A request being written.
#[derive(Debug)]
pub(super) struct Request {
    bytes: Vec<u8>,
    wide: bool,
}

impl Request {
    /// Begins a call. `lengths_max` is the largest number of elements or bytes of any vector or string in it.
    pub(super) fn new(function: &Function, lengths_max: usize) -> Request {
        let wide = lengths_max >= 256;
        let mut bytes = vec![0; REQUEST_HEADER_BYTES];
        bytes[0] = MAGIC;
        bytes[8..12].copy_from_slice(&function.id.to_le_bytes());
        if !function.args.is_empty() {
            bytes.extend_from_slice(&type_hash(function.args).to_le_bytes());
            bytes.push(META_LITERAL | if wide { 2 << 3 } else { 0 });
            bytes.extend_from_slice(function.args);
            bytes.push(0);
        }
        Request { bytes, wide }
    }

    pub(super) fn len(mut self, n: usize) -> Request {
        match self.wide {
            true => self.bytes.extend_from_slice(&(n as u32).to_le_bytes()),
            false => self.bytes.push(n as u8),
        }
        self
    }

    pub(super) fn text(self, s: &str) -> Request {
        self.len(s.len()).raw(s.as_bytes())
    }

    pub(super) fn texts<'a>(self, all: impl ExactSizeIterator<Item = &'a str>) -> Request {
        let n = all.len();
        all.fold(self.len(n), Request::text)
    }

    pub(super) fn flag(self, b: bool) -> Request {
        self.raw(&[u8::from(b)])
    }

    pub(super) fn number(self, n: u64) -> Request {
        self.raw(&n.to_le_bytes())
    }

    pub(super) fn int(self, n: i32) -> Request {
        self.raw(&n.to_le_bytes())
    }

    /// A vector of vectors of numbers.
    pub(super) fn numbers<R>(self, rows: impl ExactSizeIterator<Item = R>) -> Request
    where
        R: ExactSizeIterator<Item = u64>,
    {
        let n = rows.len();
        rows.fold(self.len(n), |out, row| {
            let n = row.len();
            row.fold(out.len(n), Request::number)
        })
    }

    pub(super) fn client(self, id: ClientId) -> Request {
        self.raw(&id.0)
    }

    /// Options of a put: one replica in memory, evictable, ungrouped, anywhere or on this node.
    pub(super) fn put_options(self, prefer_same_node: bool) -> Request {
        let out = self.number(1).number(0).number(0).raw(&[0, 0]).flag(false);
        let out = out.len(0).len(0).len(0).flag(prefer_same_node);
        out.raw(&[0]).len(0).raw(&[0])
    }

    fn raw(mut self, bytes: &[u8]) -> Request {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// The whole frame.
    pub(super) fn frame(mut self, sequence: u32) -> Vec<u8> {
        let body = (self.bytes.len() - REQUEST_HEADER_BYTES) as u32;
        self.bytes[4..8].copy_from_slice(&sequence.to_le_bytes());
        self.bytes[12..16].copy_from_slice(&body.to_le_bytes());
        self.bytes
    }
}

/// An answer outside the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Malformed;

/// The head of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReplyHeader {
    pub(super) error: u8,
    pub(super) sequence: u32,
    pub(super) body_bytes: usize,
}

impl ReplyHeader {
    pub(super) fn decode(bytes: &[u8; REPLY_HEADER_BYTES]) -> Result<ReplyHeader, Malformed> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let body_bytes = word(8) as usize;
        if bytes[0] != MAGIC || body_bytes > REPLY_BYTES_MAX || word(12) != 0 {
            return Err(Malformed);
        }
        Ok(ReplyHeader { error: bytes[2], sequence: word(4), body_bytes })
    }
}

/// A value, or the code of an error.
pub(super) type Answer<T> = Result<T, i32>;

/// A reply being read.
#[derive(Debug)]
pub(super) struct Reply<'a> {
    rest: &'a [u8],
    width: usize,
}

impl<'a> Reply<'a> {
    /// Checks that the body is of the type that the function answers.
    pub(super) fn of(function: &Function, body: &'a [u8]) -> Result<Reply<'a>, Malformed> {
        let mut reply = Reply { rest: body, width: 1 };
        if u32::from_le_bytes(reply.array()?) != type_hash(function.reply) {
            return Err(Malformed);
        }
        let [meta] = reply.array()?;
        reply.width = 1 << (meta >> 3 & 3);
        if meta & META_LITERAL != 0 {
            let literal = reply.take(function.reply.len() + 1)?;
            if literal.split_last() != Some((&0, function.reply)) {
                return Err(Malformed);
            }
        }
        Ok(reply)
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or(Malformed)?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.take(N)?.try_into().map_err(|_| Malformed)
    }

    fn len(&mut self) -> Result<usize, Malformed> {
        let mut bytes = [0; 8];
        let width = self.width;
        bytes[..width].copy_from_slice(self.take(width)?);
        usize::try_from(u64::from_le_bytes(bytes)).map_err(|_| Malformed)
    }

    fn answer<T>(
        &mut self,
        value: impl FnOnce(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Answer<T>, Malformed> {
        match self.array()? {
            [1] => value(self).map(Ok),
            [0] => Ok(Err(i32::from_le_bytes(self.array()?))),
            _ => Err(Malformed),
        }
    }

    fn end<T>(&self, value: T) -> Result<T, Malformed> {
        if self.rest.is_empty() { Ok(value) } else { Err(Malformed) }
    }

    /// The one answer of [`READY`], [`UNMAP`] and their like.
    pub(super) fn done(mut self) -> Result<Answer<()>, Malformed> {
        let answer = self.answer(|_| Ok(()))?;
        self.end(answer)
    }

    /// The one answer of [`SIZE`] and [`REMOVE_MATCHING`].
    pub(super) fn number(mut self) -> Result<Answer<i64>, Malformed> {
        let answer = self.answer(|r| r.array().map(i64::from_le_bytes))?;
        self.end(answer)
    }

    /// The one answer of [`IS_MAPPED`].
    pub(super) fn yes(mut self) -> Result<Answer<bool>, Malformed> {
        let answer = self.answer(Reply::flag)?;
        self.end(answer)
    }

    /// The state that [`PING`] answers: 1 is well.
    pub(super) fn ping(mut self) -> Result<Answer<i32>, Malformed> {
        let answer = self.answer(|r| {
            r.take(8)?;
            r.array().map(i32::from_le_bytes)
        })?;
        self.end(answer)
    }

    /// One answer for each of `n` keys.
    pub(super) fn each<T>(
        mut self,
        n: usize,
        mut value: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<Answer<T>>, Malformed> {
        if self.len()? != n {
            return Err(Malformed);
        }
        let answers = (0..n).map(|_| self.answer(&mut value)).collect::<Result<_, _>>()?;
        self.end(answers)
    }

    /// A value that is not there.
    pub(super) fn nothing(&mut self) -> Result<(), Malformed> {
        Ok(())
    }

    /// A signed number.
    pub(super) fn int64(&mut self) -> Result<i64, Malformed> {
        self.array().map(i64::from_le_bytes)
    }

    /// A flag.
    pub(super) fn flag(&mut self) -> Result<bool, Malformed> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
    }

    const CLIENT: &str = "5cA1FF5DFAB442E797E29AE3CD92F873";

    fn client() -> ClientId {
        ClientId(bytes(CLIENT).try_into().unwrap())
    }

    /// Frames that a client of the release sent, recorded from its socket.
    #[test]
    fn requests_are_those_of_the_release() {
        let addresses = || [[0x7fc1_227f_f000_u64, 0x7fc1_2280_0000].into_iter()].into_iter();
        let lengths = || [[128_u64, 1000].into_iter()].into_iter();
        let (a, b) = ("00f07f22c17f0000", "00008022c17f0000");
        let sizes = "8000000000000000 e803000000000000";
        let cases = [
            (
                Request::new(&READY, 0).frame(0),
                "15000000 00000000 c8f933e8 00000000 00000000".to_owned(),
            ),
            (
                Request::new(&PING, 0).client(client()).frame(1),
                format!("15000000 01000000 aa686387 1c000000 00000000 e1836d3c 04 fd04048989ff00 {CLIENT}"),
            ),
            (
                Request::new(&PUT, 2)
                    .texts(["m1"].into_iter())
                    .numbers(addresses())
                    .numbers(lengths())
                    .put_options(false)
                    .int(0)
                    .client(client())
                    .frame(4),
                format!(
                    "15000000 04000000 46a56a1d 8f000000 00000000 7b51f170 04 fd84800c84840484 8404fd0404040685
                     040b84800c800c84 800c0b06800c8584 800cff01fd040489 89ffff 00 01 026d31 01 02 {a}{b} 01 02
                     {sizes} 0100000000000000 0000000000000000 0000000000000000 00000000000000000000 00000000
                     {CLIENT}"
                ),
            ),
            (
                Request::new(&GET, 2)
                    .texts(["m1"].into_iter())
                    .numbers(addresses())
                    .numbers(lengths())
                    .flag(false)
                    .int(0)
                    .client(client())
                    .frame(5),
                format!(
                    "15000000 05000000 9c101806 56000000 00000000 31a35a44 04 fd84800c84840484 84040b01fd040489
                     89ffff 00 01 026d31 01 02 {a}{b} 01 02 {sizes} 00 00000000 {CLIENT}"
                ),
            ),
            (
                Request::new(&EXIST, 2).texts(["kA", "zz"].into_iter()).frame(6),
                "15000000 06000000 87a2355b 10000000 00000000 1be1868a 04 84800c00 02 026b41 027a7a".to_owned(),
            ),
            (
                Request::new(&SIZE, 2).text("kA").frame(7),
                "15000000 07000000 7de727b3 0b000000 00000000 77facf9d 04 800c00 026b41".to_owned(),
            ),
            (
                Request::new(&REMOVE, 4).texts(["w1", "nope"].into_iter()).flag(true).frame(6),
                "15000000 06000000 2d5ec1f1 16000000 00000000 d9d489a3 04 fd84800c0bff00 02 027731 046e6f7065 01"
                    .to_owned(),
            ),
            (
                Request::new(&REMOVE_MATCHING, 6).text("^ab-.*").flag(true).frame(8),
                "15000000 08000000 cfd05492 13000000 00000000 0189cfdb 04 fd800c0bff00 065e61622d2e2a 01"
                    .to_owned(),
            ),
            (
                Request::new(&UNREGISTER, 0).number(0x7fb9_143f_9000).client(client()).frame(13),
                format!(
                    "15000000 0d000000 aa162f48 27000000 00000000 e3d1728e 04 fd04fd04048989ffff00
                     00903f14b97f0000 {CLIENT}"
                ),
            ),
            (
                Request::new(&UNMAP, 0).client(client()).frame(15),
                format!("15000000 0f000000 91b1bf7c 1c000000 00000000 e1836d3c 04 fd04048989ff00 {CLIENT}"),
            ),
        ];
        for (i, (frame, want)) in cases.into_iter().enumerate() {
            assert_eq!(frame, bytes(&want), "case {i}");
        }
        let record = bytes(&format!("{CLIENT} 00903f14b97f0000 0000400000000000 ffffffff 00000000"));
        assert_eq!(segment(client(), 0x7fb9_143f_9000, 4 << 20).to_vec(), record);
    }

    #[test]
    fn answers_are_read() {
        let ok = bytes("cd6828af 04 87fa0100 01");
        assert_eq!(Reply::of(&READY, &ok).unwrap().done(), Ok(Ok(())));
        let missing = bytes("ff8133b8 04 87030100 00 40fdffff");
        assert_eq!(Reply::of(&SIZE, &missing).unwrap().number(), Ok(Err(code::MISSING)));
        let size = bytes("ff8133b8 04 87030100 01 0010000000000000");
        assert_eq!(Reply::of(&SIZE, &size).unwrap().number(), Ok(Ok(4096)));
        let well = bytes("538f2a74 04 87fd0301ff0100 01 0000000000000000 01000000");
        assert_eq!(Reply::of(&PING, &well).unwrap().ping(), Ok(Ok(1)));
        let got = bytes("e9bd59d6 04 8487030100 03 01 0010000000000000 00 40fdffff 01 8813000000000000");
        let each = Reply::of(&GET, &got).unwrap().each(3, Reply::int64);
        assert_eq!(each, Ok(vec![Ok(4096), Err(code::MISSING), Ok(5000)]));
        let put = bytes("cf52fc39 04 8487fa0100 02 01 01");
        assert_eq!(Reply::of(&PUT, &put).unwrap().each(2, Reply::nothing), Ok(vec![Ok(()); 2]));
        let unmapped = bytes("d300e890 04 870b0100 01 00");
        assert_eq!(Reply::of(&IS_MAPPED, &unmapped).unwrap().yes(), Ok(Ok(false)));
        let there = bytes("5d8c5f2a 04 84870b0100 02 0101 0100");
        assert_eq!(Reply::of(&EXIST, &there).unwrap().each(2, Reply::flag), Ok(vec![Ok(true), Ok(false)]));
    }

    /// No answer may do more than fail.
    #[test]
    fn every_cut_and_every_flipped_bit_is_an_error_or_a_value() {
        let good = bytes("e9bd59d6 04 8487030100 03 01 0010000000000000 00 40fdffff 01 8813000000000000");
        let read = |b: &[u8]| Reply::of(&GET, b).and_then(|r| r.each(3, Reply::int64));
        assert!(read(&good).is_ok());
        for cut in 0..good.len() {
            assert_eq!(read(&good[..cut]), Err(Malformed), "cut at {cut}");
        }
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let _ = read(&bad);
        }
        assert_eq!(Reply::of(&PUT, &good).err(), Some(Malformed), "another type");
        let mut header = [0; REPLY_HEADER_BYTES];
        assert!(ReplyHeader::decode(&header).is_err());
        header[0] = MAGIC;
        assert!(ReplyHeader::decode(&header).is_ok());
        header[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(ReplyHeader::decode(&header).is_err());
    }

    #[test]
    fn long_vectors_have_wide_lengths() {
        let keys = vec!["k"; 300];
        let frame = Request::new(&EXIST, 300).texts(keys.iter().copied()).frame(0);
        let body = &frame[REQUEST_HEADER_BYTES..];
        assert_eq!(body[4], 0x14);
        assert_eq!(body[9..13], 300_u32.to_le_bytes());
        assert_eq!(body[13..18], [1, 0, 0, 0, b'k']);
        let reply = [&bytes("5d8c5f2a 0c 84870b0100")[..], &[0x2c, 1], &[1, 1].repeat(300)].concat();
        let each = Reply::of(&EXIST, &reply).unwrap().each(300, Reply::flag).unwrap();
        assert!(each.len() == 300 && each.iter().all(|a| *a == Ok(true)));
    }
}
