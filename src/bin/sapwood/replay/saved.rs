//! Seconds of prefill that hits save: the objective beside the share of tokens. A token deep in a prompt is worth more than
//! one at its start, because attention looks at all before it; a hit that has to be loaded is worth less than one on the
//! device.

use serde::Serialize;

use super::args::Args;
use super::report::Hits;

/// Sums over requests, in seconds of the modelled machine.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Saved {
    /// To compute every prompt whole.
    pub(crate) prefill_s: f64,
    /// To compute what was hit.
    pub(crate) hit_s: f64,
    /// To bring what was hit below the device.
    pub(crate) load_s: f64,
}

impl Saved {
    /// A request with so many prompt tokens was admitted with these hits.
    pub(crate) fn admit(&mut self, args: &Args, input_tokens: u64, hits: Hits) {
        let seconds = |tokens: u64| {
            let n = tokens as f64;
            (n + n * n / (2.0 * args.knee_tokens)) * args.prefill_us_per_token / 1e6
        };
        let over = |tokens: u64, gb_per_s: f64| {
            tokens as f64 * f64::from(args.modelled_bytes_per_token) / (gb_per_s * 1e9)
        };
        self.prefill_s += seconds(input_tokens);
        self.hit_s += seconds(hits.total());
        self.load_s += over(hits.host + hits.store, args.h2d_gb_per_s) + over(hits.store, args.get_gb_per_s);
    }

    /// What is left of the seconds hit after the loads.
    pub(crate) fn net_s(self) -> f64 {
        self.hit_s - self.load_s
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn depth_is_worth_more_and_loads_cost() {
        let line = "x --prefill-us-per-token 1000 --knee-tokens 1000 --modelled-bytes-per-token 1000000 \
                    --h2d-gb-per-s 10 --get-gb-per-s 5";
        let args = Line::parse_from(line.split_ascii_whitespace()).args;
        let mut saved = Saved::default();
        saved.admit(&args, 2_000, Hits { device: 1_000, host: 0, store: 0 });
        // The second thousand costs 2.5 times one without attention, the first 1.5 times.
        assert_eq!((saved.prefill_s, saved.hit_s, saved.load_s), (4.0, 1.5, 0.0));
        saved.admit(&args, 1_000, Hits { device: 0, host: 500, store: 500 });
        assert_eq!((saved.prefill_s, saved.hit_s), (5.5, 3.0));
        assert!((saved.load_s - 0.2).abs() < 1e-9, "a gigabyte over 10, half of it over 5 before");
        assert!((saved.net_s() - 2.8).abs() < 1e-9);
    }
}
