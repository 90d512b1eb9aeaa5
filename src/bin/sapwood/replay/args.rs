//! Options of `sapwood replay`. What a single value may be is checked here, when the line is parsed; what the
//! values mean together is checked in [`Args::check`].

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use super::store_url::{BadUrl, StoreUrl};

/// Replays a workload against the cache, with real bytes in every page, and reports what hit.
#[derive(Parser, Clone, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Exit code: 0 all bytes right and all pages accounted for, 1 not so, 2 bad input.")]
pub(crate) struct Args {
    /// Trace in Mooncake JSONL format; without it a built-in workload runs
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Count malformed lines of the trace and skip them instead of stopping
    #[arg(long, requires = "trace")]
    pub(crate) lenient: bool,
    /// Replay only the first N requests
    #[arg(long, value_name = "N", value_parser = at_least_one_usize)]
    pub(crate) requests: Option<usize>,
    /// Seed of the built-in workload and of aborts
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,

    /// Tokens of one page
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = page_size)]
    pub(crate) page_size: u32,
    /// Layers of the model
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = layers)]
    pub(crate) layers: u32,
    /// Bytes of KV of one token in one layer
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = row_bytes)]
    pub(crate) bytes_per_token_layer: u32,
    /// Pages of the device, or `unlimited`
    #[arg(long, value_name = "N", default_value = "1500", value_parser = device_pages)]
    pub(crate) device_pages: DevicePages,
    /// Pages of the host; 0 for none
    #[arg(long, value_name = "N", default_value_t = 3_000, value_parser = host_pages)]
    pub(crate) host_pages: u32,
    /// Directory of the store, `mem` for one in memory, a service (`mooncake://IP:PORT`, `redis://HOST:PORT`,
    /// `redis:///SOCKET`, `s3://BUCKET?endpoint=URL&region=R&prefix=P` with credentials in the environment), or `none`
    /// [default: mem; none without host pages]
    #[arg(long, value_name = "DIR|mem|URL|none", value_parser = store)]
    pub(crate) store: Option<StoreChoice>,
    /// Give the model a draft: in layers of its own behind the target's in each page, or in a plane of its own
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) draft: Draft,
    /// What the model has: `full` attention, and beside it sliding `window` layers, a recurrent `state`, or both
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',', default_value = "full")]
    pub(crate) components: Vec<Part>,
    /// Tokens that a sliding window reaches back
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one_u32)]
    pub(crate) window_tokens: u32,
    /// Slots for states on the device; the host has four times as many
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = state_slots)]
    pub(crate) state_slots: u32,
    /// Cap on the bytes of the store [default: 1 GiB in memory, 64 GiB in a directory]
    #[arg(long, value_name = "BYTES", value_parser = store_bytes)]
    pub(crate) store_bytes: Option<u64>,
    /// Uses after which a page is written to the store
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one_u32)]
    pub(crate) store_uses: u32,
    /// Prompts shorter than this are not written to the store on their own
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) store_tokens: u32,
    /// When KV is copied from the device to the host
    #[arg(long, value_enum, default_value = "write-through")]
    pub(crate) write_policy: Policy,
    /// Who leaves the device and the host first
    #[arg(long, value_enum, default_value = "adaptive")]
    pub(crate) policy: Order,
    /// Tell the cache what up to N waiting requests will use; with `--sequential`, where nobody waits, what the next N will
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) queue: usize,
    /// Ranks of a tensor-parallel group, driven together: each has a device, a host tier and a store of its own, they are
    /// not equally fast, and all must decide alike
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = ranks)]
    pub(crate) ranks: u32,
    /// When host pages are short, give up copies whose node is on the device first (write-through kinds)
    #[arg(long)]
    pub(crate) exclusive: bool,
    /// How deep the victims next in line are copied to the host ahead of need, in percent of the device's pages
    #[arg(long, value_name = "PERCENT", default_value_t = 2, value_parser = percent)]
    pub(crate) write_ahead_percent: u32,
    /// Leave the bytes of freed pages as they are: for timing runs, since poisoning them is most of what a call costs then
    #[arg(long)]
    pub(crate) no_poison: bool,
    /// How long a request waits for a prefetch from the store
    #[arg(long, value_enum, default_value = "timeout")]
    pub(crate) prefetch: Prefetch,

    /// Divide arrival times by this
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive)]
    pub(crate) speedup: f64,
    /// Most requests in the batch
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one_usize)]
    pub(crate) max_running: usize,
    /// Prompt tokens computed in one step
    #[arg(long, value_name = "TOKENS", default_value_t = 2_048, value_parser = at_least_one_u32)]
    pub(crate) chunk_tokens: u32,
    /// Share of requests that the client aborts at a random moment
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub(crate) abort_rate: f64,
    /// One request at a time in file order, timestamps ignored
    #[arg(long)]
    pub(crate) sequential: bool,
    /// Neither compute nor cache answers
    #[arg(long)]
    pub(crate) no_decode: bool,
    /// Count over the workload alone what an unlimited cache would hit, and print it beside the result
    #[arg(long)]
    pub(crate) oracle: bool,

    /// Modelled time of one prompt token
    #[arg(long, value_name = "US", default_value_t = 20.0, value_parser = positive)]
    pub(crate) prefill_us_per_token: f64,
    /// Position in a prompt at which attention makes a token cost twice; counted in the seconds saved only
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768.0, value_parser = positive)]
    pub(crate) knee_tokens: f64,
    /// Modelled time of one decode step
    #[arg(long, value_name = "US", default_value_t = 8_000.0, value_parser = positive)]
    pub(crate) decode_us_per_step: f64,
    /// Modelled time that each request adds to a decode step
    #[arg(long, value_name = "US", default_value_t = 100.0, value_parser = positive)]
    pub(crate) decode_us_per_request: f64,
    /// KV bytes of one token in the modelled machine; modelled copies take as long as this many bytes would
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, value_parser = at_least_one_u32)]
    pub(crate) modelled_bytes_per_token: u32,
    /// Modelled bandwidth device to host
    #[arg(long, value_name = "GB/S", default_value_t = 25.0, value_parser = positive)]
    pub(crate) d2h_gb_per_s: f64,
    /// Modelled bandwidth host to device
    #[arg(long, value_name = "GB/S", default_value_t = 25.0, value_parser = positive)]
    pub(crate) h2d_gb_per_s: f64,
    /// Modelled bandwidth store to host
    #[arg(long, value_name = "GB/S", default_value_t = 4.0, value_parser = positive)]
    pub(crate) get_gb_per_s: f64,
    /// Modelled bandwidth host to store
    #[arg(long, value_name = "GB/S", default_value_t = 2.0, value_parser = positive)]
    pub(crate) put_gb_per_s: f64,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write a chart of hits and occupancy over time as SVG
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) chart: Option<PathBuf>,
}

/// `--device-pages`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DevicePages {
    Pages(u32),
    Unlimited,
}

/// `--store`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StoreChoice {
    None,
    Mem,
    Dir(PathBuf),
    Service(StoreUrl),
}

/// `--draft`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Draft {
    None,
    Packed,
    Sidecar,
}

/// `--components`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Part {
    Full,
    Window,
    State,
}

/// `--write-policy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Policy {
    WriteThrough,
    WriteThroughSelective,
    WriteBack,
    None,
}

/// `--policy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Order {
    Lru,
    Adaptive,
}

/// `--prefetch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Prefetch {
    BestEffort,
    WaitComplete,
    Timeout,
    /// Waits for what the modelled machine reads faster than it computes it, and reads nothing else.
    Adaptive,
}

/// Options that do not go together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Conflict {
    #[error("--store needs --host-pages above 0: pages pass through the host on their way to the store")]
    StoreWithoutHost,
    #[error("--write-policy other than none needs --host-pages above 0")]
    PolicyWithoutHost,
    #[error("--components needs `full`: windows and states lie beside it")]
    NoFull,
}

impl Args {
    /// What the values mean together.
    pub(crate) fn check(&self) -> Result<(), Conflict> {
        if self.host_pages == 0 && !matches!(self.store, None | Some(StoreChoice::None)) {
            return Err(Conflict::StoreWithoutHost);
        }
        if self.host_pages == 0 && self.write_policy != Policy::None {
            return Err(Conflict::PolicyWithoutHost);
        }
        if !self.components.contains(&Part::Full) {
            return Err(Conflict::NoFull);
        }
        Ok(())
    }

    /// The store to use: one in memory where nothing was said and there is something that would reach it.
    pub(crate) fn store_choice(&self) -> StoreChoice {
        match &self.store {
            Some(choice) => choice.clone(),
            None if self.host_pages == 0 || self.write_policy == Policy::None => StoreChoice::None,
            None => StoreChoice::Mem,
        }
    }

    /// Whether the model has such a component.
    pub(crate) fn has(&self, part: Part) -> bool {
        self.components.contains(&part)
    }

    /// True when the oracle's assumptions hold, so that the result must equal its count.
    pub(crate) fn oracle_is_exact(&self) -> bool {
        self.sequential
            && self.device_pages == DevicePages::Unlimited
            && self.abort_rate == 0.0
            && self.components == [Part::Full]
    }
}

/// Why a value is refused.
#[derive(Debug, thiserror::Error)]
enum BadValue {
    #[error("not a number: {0}")]
    Number(String),
    #[error("must be between {low} and {high}")]
    Range { low: u64, high: u64 },
    #[error("must be a finite number above 0")]
    NotPositive,
    #[error("must be between 0 and 1")]
    NotShare,
    #[error("a directory is needed, or `mem` or `none`")]
    EmptyPath,
    #[error(transparent)]
    Url(#[from] BadUrl),
}

fn bounded(text: &str, low: u64, high: u64) -> Result<u64, BadValue> {
    let value: i128 = text.parse().map_err(|_| BadValue::Number(text.to_owned()))?;
    let value = u64::try_from(value).map_err(|_| BadValue::Range { low, high })?;
    if (low..=high).contains(&value) { Ok(value) } else { Err(BadValue::Range { low, high }) }
}

fn page_size(text: &str) -> Result<u32, BadValue> {
    bounded(text, 1, sapwood::base::limits::PAGE_SIZE_MAX.into()).map(|v| v as u32)
}

fn layers(text: &str) -> Result<u32, BadValue> {
    bounded(text, 1, sapwood::base::limits::LAYERS_MAX.into()).map(|v| v as u32)
}

fn percent(text: &str) -> Result<u32, BadValue> {
    bounded(text, 0, 100).map(|v| v as u32)
}

fn ranks(text: &str) -> Result<u32, BadValue> {
    bounded(text, 1, 64).map(|v| v as u32)
}

fn row_bytes(text: &str) -> Result<u32, BadValue> {
    bounded(text, 1, 1 << 20).map(|v| v as u32)
}

fn host_pages(text: &str) -> Result<u32, BadValue> {
    bounded(text, 0, sapwood::base::limits::POOL_PAGES_MAX.into()).map(|v| v as u32)
}

fn device_pages(text: &str) -> Result<DevicePages, BadValue> {
    if text == "unlimited" {
        return Ok(DevicePages::Unlimited);
    }
    bounded(text, 1, sapwood::base::limits::POOL_PAGES_MAX.into()).map(|v| DevicePages::Pages(v as u32))
}

fn state_slots(text: &str) -> Result<u32, BadValue> {
    bounded(text, 2, 1 << 24).map(|v| v as u32)
}

fn at_least_one_u32(text: &str) -> Result<u32, BadValue> {
    bounded(text, 1, u32::MAX.into()).map(|v| v as u32)
}

fn at_least_one_usize(text: &str) -> Result<usize, BadValue> {
    bounded(text, 1, u32::MAX.into()).map(|v| v as usize)
}

fn store_bytes(text: &str) -> Result<u64, BadValue> {
    bounded(text, 4 << 20, 1 << 50)
}

fn float(text: &str) -> Result<f64, BadValue> {
    text.parse().map_err(|_| BadValue::Number(text.to_owned()))
}

fn positive(text: &str) -> Result<f64, BadValue> {
    float(text).and_then(|v| if v.is_finite() && v > 0.0 { Ok(v) } else { Err(BadValue::NotPositive) })
}

fn share(text: &str) -> Result<f64, BadValue> {
    float(text).and_then(|v| if (0.0..=1.0).contains(&v) { Ok(v) } else { Err(BadValue::NotShare) })
}

fn store(text: &str) -> Result<StoreChoice, BadValue> {
    match text {
        "" => Err(BadValue::EmptyPath),
        "none" => Ok(StoreChoice::None),
        "mem" => Ok(StoreChoice::Mem),
        text => match StoreUrl::parse(text) {
            Some(url) => Ok(StoreChoice::Service(url?)),
            None => Ok(StoreChoice::Dir(text.into())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("replay").chain(line.split_whitespace()))
    }

    #[test]
    fn defaults_are_consistent() {
        let args = parse("").unwrap();
        args.check().unwrap();
        assert_eq!(args.store_choice(), StoreChoice::Mem);
        assert_eq!(parse("--host-pages 0 --write-policy none").unwrap().store_choice(), StoreChoice::None);
        assert_eq!(parse("--device-pages unlimited").unwrap().device_pages, DevicePages::Unlimited);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for line in [
            "--page-size 0",
            "--page-size 513",
            "--page-size -1",
            "--page-size x",
            "--device-pages 0",
            "--device-pages many",
            "--host-pages -1",
            "--layers 0",
            "--bytes-per-token-layer 0",
            "--requests 0",
            "--ranks 0",
            "--ranks 65",
            "--max-running 0",
            "--chunk-tokens 0",
            "--speedup 0",
            "--speedup nan",
            "--speedup inf",
            "--abort-rate 1.5",
            "--abort-rate -0.1",
            "--write-policy sometimes",
            "--prefetch never",
            "--policy fifo",
            "--store-bytes 0",
            "--store mooncake://nowhere",
            "--store redis://nowhere",
            "--store s3://",
            "--draft sometimes",
            "--components linear",
            "--window-tokens 0",
            "--state-slots 1",
            "--lenient",
            "--bogus",
        ] {
            assert!(parse(line).is_err(), "{line} was accepted");
        }
    }

    #[test]
    fn options_that_do_not_go_together() {
        for line in [
            "--store /tmp/x --host-pages 0",
            "--host-pages 0 --write-policy write-back",
            "--components window",
        ] {
            assert!(parse(line).unwrap().check().is_err(), "{line} was accepted");
        }
    }
}
