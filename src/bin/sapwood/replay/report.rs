//! The result of a replay: one structure, printed as a table and written as JSON. Field names are an interface:
//! later versions add fields, none is renamed.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::hist::Quantiles;
use super::saved::Saved;

/// Prompt tokens by the tier that had them.
#[derive(Clone, Copy, Default, Debug, Serialize, PartialEq, Eq)]
pub(crate) struct Hits {
    pub(crate) device: u64,
    pub(crate) host: u64,
    pub(crate) store: u64,
}

impl Hits {
    pub(crate) fn total(self) -> u64 {
        self.device + self.host + self.store
    }
}

/// Something counted for device and host.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct PerTier<T> {
    pub(crate) device: T,
    pub(crate) host: T,
}

/// Bytes moved.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Bytes {
    pub(crate) d2h: u64,
    pub(crate) h2d: u64,
    pub(crate) store_put: u64,
    pub(crate) store_get: u64,
}

/// Where the pages of a tier are after all requests have finished and all transfers have ended.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Pages {
    /// Pages of the pool; of an unlimited pool, as many as it grew to.
    pub(crate) capacity: u64,
    pub(crate) free: u64,
    pub(crate) cached: u64,
    /// What is neither free nor cached: must be zero.
    pub(crate) leaked: u64,
}

/// The whole result.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) requests: u64,
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
    /// Requests that can never run: longer than the device pool.
    pub(crate) rejected: u64,
    /// Times that a running request gave its pages back and was queued again.
    pub(crate) retracted: u64,
    pub(crate) input_tokens: u64,
    /// Hits at a request's first admission.
    pub(crate) hit_tokens: Hits,
    /// What they were worth.
    pub(crate) saved: Saved,
    /// Prompt tokens computed, recomputed ones included.
    pub(crate) computed_tokens: u64,
    /// Answer tokens computed.
    pub(crate) decoded_tokens: u64,
    pub(crate) evicted_pages: PerTier<u64>,
    pub(crate) dropped_tokens: BTreeMap<String, u64>,
    /// Calls that the cache refused, by call and reason.
    pub(crate) refusals: BTreeMap<String, u64>,
    pub(crate) bytes: Bytes,
    /// The cache's own counters.
    pub(crate) counters: BTreeMap<&'static str, u64>,
    pub(crate) pages_verified: u64,
    pub(crate) mismatches: u64,
    /// The first few, in words.
    pub(crate) mismatch_details: Vec<String>,
    pub(crate) violations: Vec<String>,
    pub(crate) pages: PerTier<Pages>,
    pub(crate) call_us: BTreeMap<&'static str, Quantiles>,
    pub(crate) digest: String,
    /// Of each rank; they must be equal.
    pub(crate) rank_digests: Vec<String>,
    /// What the order that learns says of itself.
    pub(crate) order: Option<Order>,
    /// What an unlimited cache would hit (`--oracle`).
    pub(crate) oracle_hit_tokens: Option<u64>,
    /// The oracle's assumptions held: its count and `hit_tokens` must be equal.
    pub(crate) oracle_is_exact: bool,
    pub(crate) skipped_lines: u64,
    pub(crate) steps: u64,
    pub(crate) virtual_s: f64,
    pub(crate) wall_s: f64,
    pub(crate) peak_rss_bytes: u64,
}

/// The order of eviction that learns.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Order {
    /// Share of the memory that it rules, 0 to 1.
    pub(crate) stake: f64,
    /// Pages that it hit, on any tier.
    pub(crate) hit_pages: u64,
    /// Pages that LRU would have hit in the same memory.
    pub(crate) lru_hit_pages: u64,
}

impl Report {
    /// What is wrong with this run, in one line each; empty when all is well.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> =
            self.mismatch_details.iter().map(|d| format!("wrong bytes: {d}")).collect();
        let told = faults.len() as u64;
        if self.mismatches > told {
            faults.push(format!("wrong bytes: {} more pages", self.mismatches - told));
        }
        for (tier, pages) in [("device", self.pages.device), ("host", self.pages.host)] {
            if pages.leaked != 0 {
                faults.push(format!("{tier}: {} pages are neither free nor cached", pages.leaked));
            }
        }
        if self.rank_digests.iter().any(|digest| *digest != self.digest) {
            faults.push(format!("the ranks decided differently: {}", self.rank_digests.join(", ")));
        }
        faults.extend(self.violations.iter().map(|v| format!("violation: {v}")));
        if let Some(oracle) = self.oracle_hit_tokens
            && self.oracle_is_exact
            && oracle != self.hit_tokens.total()
        {
            faults.push(format!("{} tokens hit, the oracle counts {oracle}", self.hit_tokens.total()));
        }
        faults
    }

    /// Prints the table.
    pub(crate) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let share = |part: u64| 100.0 * part as f64 / (self.input_tokens.max(1)) as f64;
        let hits = self.hit_tokens;
        writeln!(
            out,
            "requests       {} ({} finished, {} aborted, {} rejected, {} retractions)",
            grouped(self.requests),
            grouped(self.finished),
            grouped(self.aborted),
            grouped(self.rejected),
            grouped(self.retracted)
        )?;
        writeln!(
            out,
            "tokens in      {}, computed {}, decoded {}",
            grouped(self.input_tokens),
            grouped(self.computed_tokens),
            grouped(self.decoded_tokens)
        )?;
        writeln!(out, "tokens hit     {} ({:.2} %)", grouped(hits.total()), share(hits.total()))?;
        for (name, tokens) in [("device", hits.device), ("host", hits.host), ("store", hits.store)] {
            writeln!(out, "  {name:<12} {:>16} ({:.2} %)", grouped(tokens), share(tokens))?;
        }
        let saved = self.saved;
        writeln!(
            out,
            "prefill saved  {:.0} s of {:.0} s ({:.2} %), {:.0} s when loads are paid for",
            saved.hit_s,
            saved.prefill_s,
            100.0 * saved.hit_s / saved.prefill_s.max(f64::MIN_POSITIVE),
            saved.net_s()
        )?;
        if let Some(oracle) = self.oracle_hit_tokens {
            let verdict = match (self.oracle_is_exact, oracle == hits.total()) {
                (true, true) => "equal",
                (true, false) => "NOT EQUAL",
                (false, _) => "unlimited cache, one request at a time",
            };
            writeln!(out, "  {:<12} {:>16} ({:.2} %) {verdict}", "oracle", grouped(oracle), share(oracle))?;
        }
        writeln!(
            out,
            "pages evicted  device {}, host {}",
            grouped(self.evicted_pages.device),
            grouped(self.evicted_pages.host)
        )?;
        if let Some(order) = self.order {
            writeln!(
                out,
                "order          rules {:.0} % of the memory, pages hit {}, LRU would have {}",
                100.0 * order.stake,
                grouped(order.hit_pages),
                grouped(order.lru_hit_pages)
            )?;
        }
        self.print_counts(out, "tokens dropped", &self.dropped_tokens)?;
        self.print_counts(out, "refusals", &self.refusals)?;
        writeln!(
            out,
            "bytes moved    d2h {}, h2d {}, store put {}, store get {}",
            grouped(self.bytes.d2h),
            grouped(self.bytes.h2d),
            grouped(self.bytes.store_put),
            grouped(self.bytes.store_get)
        )?;
        for (tier, p) in [("device", self.pages.device), ("host", self.pages.host)] {
            writeln!(
                out,
                "pages {tier:<8} {} = {} free + {} cached + {} leaked",
                grouped(p.capacity),
                grouped(p.free),
                grouped(p.cached),
                grouped(p.leaked)
            )?;
        }
        writeln!(
            out,
            "verified       {} pages, {} wrong",
            grouped(self.pages_verified),
            grouped(self.mismatches)
        )?;
        self.print_calls(out)?;
        writeln!(
            out,
            "time           {:.1} s wall, {:.1} s virtual, {} steps, peak memory {} MiB",
            self.wall_s,
            self.virtual_s,
            grouped(self.steps),
            grouped(self.peak_rss_bytes >> 20)
        )?;
        let ranks = self.rank_digests.len();
        let alike = self.rank_digests.iter().all(|digest| *digest == self.digest);
        let verdict = match (ranks, alike) {
            (1, _) => String::new(),
            (_, true) => format!(" on all {ranks} ranks"),
            (_, false) => " NOT EQUAL on all ranks".to_owned(),
        };
        writeln!(out, "digest         {}{verdict}", self.digest)
    }

    fn print_counts(
        &self,
        out: &mut impl Write,
        title: &str,
        counts: &BTreeMap<String, u64>,
    ) -> io::Result<()> {
        let list: Vec<String> =
            counts.iter().map(|(reason, n)| format!("{reason} {}", grouped(*n))).collect();
        writeln!(out, "{title:<14} {}", if list.is_empty() { "none".to_owned() } else { list.join(", ") })
    }

    fn print_calls(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "call             {:>12} {:>10} {:>10} {:>10} {:>10}  (us)",
            "count", "mean", "p50", "p99", "max"
        )?;
        for (name, q) in &self.call_us {
            let count = grouped(q.count);
            writeln!(
                out,
                "  {name:<14} {count:>12} {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
                q.mean, q.p50, q.p99, q.max
            )?;
        }
        Ok(())
    }
}

/// 1234567 as "1,234,567".
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Highest resident memory of this process so far; 0 where the system does not say.
pub(crate) fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample() -> Report {
        Report {
            requests: 3,
            finished: 3,
            aborted: 0,
            rejected: 0,
            retracted: 0,
            input_tokens: 1000,
            saved: Saved::default(),
            hit_tokens: Hits { device: 300, host: 200, store: 100 },
            computed_tokens: 400,
            decoded_tokens: 50,
            evicted_pages: PerTier::default(),
            dropped_tokens: BTreeMap::from([("anchor_not_backed_up".to_owned(), 64)]),
            refusals: BTreeMap::new(),
            bytes: Bytes::default(),
            counters: BTreeMap::new(),
            pages_verified: 12,
            mismatches: 0,
            mismatch_details: Vec::new(),
            violations: Vec::new(),
            pages: PerTier::default(),
            call_us: BTreeMap::from([(
                "match",
                Quantiles { count: 3, mean: 1.5, p50: 1.0, p99: 2.0, max: 3.0 },
            )]),
            digest: "00ff".to_owned(),
            rank_digests: vec!["00ff".to_owned()],
            order: Some(Order { stake: 0.25, hit_pages: 30, lru_hit_pages: 20 }),
            oracle_hit_tokens: Some(600),
            oracle_is_exact: true,
            skipped_lines: 0,
            steps: 9,
            virtual_s: 1.5,
            wall_s: 0.5,
            peak_rss_bytes: 1 << 20,
        }
    }

    #[test]
    fn the_table_names_every_figure() {
        let mut text = Vec::new();
        sample().print(&mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for part in ["600 (60.00 %)", "equal", "anchor_not_backed_up 64", "match", "digest         00ff"] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn faults_are_told() {
        assert!(sample().faults().is_empty());
        let mut report = sample();
        report.oracle_hit_tokens = Some(601);
        assert_eq!(report.faults().len(), 1);
        report.oracle_is_exact = false;
        assert!(report.faults().is_empty());
        report.rank_digests.push("00fe".to_owned());
        assert_eq!(report.faults().len(), 1);
        report.rank_digests.pop();
        report.mismatches = 5;
        report.mismatch_details = vec!["page 3".to_owned()];
        report.pages.host.leaked = 1;
        report.violations = vec!["backed-up-parent".to_owned()];
        assert_eq!(report.faults().len(), 4);
    }

    #[test]
    fn the_json_holds_the_promised_names() {
        let json = serde_json::to_value(sample()).unwrap();
        for path in [
            "/requests",
            "/input_tokens",
            "/hit_tokens/device",
            "/hit_tokens/host",
            "/hit_tokens/store",
            "/computed_tokens",
            "/evicted_pages/device",
            "/evicted_pages/host",
            "/dropped_tokens/anchor_not_backed_up",
            "/bytes/d2h",
            "/bytes/h2d",
            "/bytes/store_put",
            "/bytes/store_get",
            "/pages_verified",
            "/mismatches",
            "/pages/device/capacity",
            "/pages/device/free",
            "/pages/device/cached",
            "/pages/device/leaked",
            "/pages/host/leaked",
            "/call_us/match/count",
            "/call_us/match/mean",
            "/call_us/match/p50",
            "/call_us/match/p99",
            "/call_us/match/max",
            "/digest",
            "/rank_digests",
            "/order/stake",
            "/order/lru_hit_pages",
            "/wall_s",
            "/peak_rss_bytes",
        ] {
            assert!(json.pointer(path).is_some(), "{path} is missing");
        }
    }

    #[test]
    fn digits_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (1234567, "1,234,567")];
        cases.iter().for_each(|&(n, text)| assert_eq!(grouped(n), text));
        assert!(peak_rss_bytes() > 0);
    }
}
