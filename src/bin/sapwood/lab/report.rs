//! Figures: what a run prints, writes and compares.

use std::collections::BTreeMap;

use serde::Serialize;

use super::chart::{Line, tokens_name};
use super::sim::{Outcome, cost};
use super::tiers;
use super::work::Work;

/// What computing and loading cost. The defaults are an 8 B model with grouped heads on one large device.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Model {
    /// FLOP per prompt token, attention over earlier tokens aside.
    #[arg(long, default_value_t = 1.6e10)]
    flop_per_token: f64,
    /// FLOP per second that prefill reaches.
    #[arg(long, default_value_t = 4e14)]
    flop_per_second: f64,
    /// Position at which attention makes a token cost twice as much as at the start.
    #[arg(long, default_value_t = 32_768.0)]
    knee_tokens: f64,
    /// Bytes of KV per token.
    #[arg(long, default_value_t = 131_072.0)]
    bytes_per_token: f64,
    /// Bytes per second from host to device.
    #[arg(long, default_value_t = 4e10)]
    load_bytes_per_second: f64,
}

impl Model {
    pub(crate) fn knee_pages(&self, page_tokens: u32) -> f64 {
        (self.knee_tokens / f64::from(page_tokens)).max(1.0)
    }

    /// Seconds for work in pages at depth 0.
    fn prefill_seconds(&self, pages: f64, page_tokens: u32) -> f64 {
        pages * f64::from(page_tokens) * self.flop_per_token / self.flop_per_second
    }

    fn load_seconds(&self, pages: u64, page_tokens: u32) -> f64 {
        (pages * u64::from(page_tokens)) as f64 * self.bytes_per_token / self.load_bytes_per_second
    }
}

/// One policy at one capacity on one workload.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    workload: String,
    seed: u64,
    capacity_tokens: u64,
    policy: String,
    /// Percent of prompt tokens hit; of all requests, and of those after the first third.
    hit_percent: f64,
    hit_percent_after_third: f64,
    /// Percent of the seconds of prefill saved, and the seconds.
    saved_percent: f64,
    saved_seconds: f64,
}

impl Row {
    pub(crate) fn new(
        work: &Work,
        seed: u64,
        capacity_tokens: u64,
        policy: String,
        outcome: &Outcome,
        model: &Model,
    ) -> Row {
        let knee = model.knee_pages(work.page_tokens);
        let all: f64 = work.jobs.iter().map(|j| cost(j.pages, knee)).sum();
        Row {
            workload: work.name.clone(),
            seed,
            capacity_tokens,
            policy,
            hit_percent: work.percent(outcome.pages()),
            hit_percent_after_third: outcome.percent_after(work, work.jobs.len() / 3),
            saved_percent: 100.0 * outcome.saved / all.max(1.0),
            saved_seconds: model.prefill_seconds(outcome.saved, work.page_tokens),
        }
    }
}

/// All rows, in order of making.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
}

impl Table {
    /// Prints and keeps a row; `say` is what the policy has to say.
    pub(crate) fn add(&mut self, row: Row, say: Option<String>) {
        println!(
            "  {:>6} {:<24} {:6.2} % hit, {:6.2} % after the first third, {:6.2} % of prefill ({:.0} s) saved",
            tokens_name(row.capacity_tokens as f64),
            row.policy,
            row.hit_percent,
            row.hit_percent_after_third,
            row.saved_percent,
            row.saved_seconds
        );
        if let Some(say) = say {
            println!("         {say}");
        }
        self.rows.push(row);
    }

    /// (workload, capacity, policy) to the hit shares of all seeds.
    fn by_policy(&self) -> BTreeMap<(&str, u64, &str), Vec<f64>> {
        let mut groups: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for row in &self.rows {
            let key = (row.workload.as_str(), row.capacity_tokens, row.policy.as_str());
            groups.entry(key).or_default().push(row.hit_percent);
        }
        groups
    }

    pub(crate) fn print_means(&self) {
        println!("means over seeds, percent hit (least to most)");
        for ((workload, tokens, policy), hits) in self.by_policy() {
            let (low, high) = hits.iter().fold((f64::INFINITY, 0.0f64), |(l, h), &x| (l.min(x), h.max(x)));
            let tokens = tokens_name(tokens as f64);
            println!("  {workload:<20} {tokens:>6} {policy:<24} {:6.2} ({low:.2} to {high:.2})", mean(&hits));
        }
    }

    /// True if `adaptive` is nowhere more than 1 % below `lru`; says where it is.
    pub(crate) fn guard_holds(&self) -> bool {
        let groups = self.by_policy();
        let mut holds = true;
        for (&(workload, tokens, _), ours) in groups.iter().filter(|(key, _)| key.2 == "adaptive") {
            let Some(lru) = groups.get(&(workload, tokens, "lru")) else { continue };
            let (ours, lru) = (mean(ours), mean(lru));
            if ours < 0.99 * lru {
                println!("guard: {workload} at {}: {ours:.2} against {lru:.2}", tokens_name(tokens as f64));
                holds = false;
            }
        }
        println!("guard: {}", if holds { "holds" } else { "broken" });
        holds
    }

    pub(crate) fn json(&self) -> String {
        let line = |row| serde_json::to_string(row).map(|s| s + "\n").unwrap_or_default();
        self.rows.iter().map(line).collect()
    }

    /// Lines by workload, in order of making.
    pub(crate) fn charts(&self) -> BTreeMap<String, Vec<Line>> {
        let mut charts: BTreeMap<String, Vec<Line>> = BTreeMap::new();
        let groups = self.by_policy();
        for row in &self.rows {
            let lines = charts.entry(row.workload.clone()).or_default();
            if lines.iter().any(|l| l.name == row.policy) {
                continue;
            }
            let same = groups.iter().filter(|(key, _)| key.0 == row.workload && key.2 == row.policy);
            let points = same.map(|(key, hits)| (key.1 as f64, mean(hits))).collect();
            lines.push(Line { name: row.policy.clone(), points });
        }
        charts
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// One line about a two-tier run.
pub(crate) fn print_tiers(work: &Work, policy: &str, rule: &str, outcome: tiers::Outcome, model: &Model) {
    println!(
        "  two tiers, {rule}: {policy:<18} device {:.2} + host {:.2} = {:.2} % hit, {:.3} tokens loaded per token hit, \
         {:.0} s of loading",
        work.percent(outcome.device),
        work.percent(outcome.loaded),
        work.percent(outcome.total()),
        outcome.loaded as f64 / outcome.total().max(1) as f64,
        model.load_seconds(outcome.loaded, work.page_tokens)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &str, seed: u64, hit_percent: f64) -> Row {
        Row {
            workload: "w".to_owned(),
            seed,
            capacity_tokens: 1 << 20,
            policy: policy.to_owned(),
            hit_percent,
            hit_percent_after_third: hit_percent,
            saved_percent: 0.0,
            saved_seconds: 0.0,
        }
    }

    fn table(ours: [f64; 2]) -> Table {
        let rows = [
            row("lru", 1, 10.0),
            row("lru", 2, 20.0),
            row("adaptive", 1, ours[0]),
            row("adaptive", 2, ours[1]),
        ];
        Table { rows: rows.into() }
    }

    #[test]
    fn the_guard_looks_at_means() {
        assert!(table([9.0, 21.0]).guard_holds());
        assert!(table([9.9, 19.9]).guard_holds());
        assert!(!table([9.8, 19.8]).guard_holds());
    }

    #[test]
    fn charts_and_json_have_every_policy() {
        let table = table([11.0, 22.0]);
        let charts = table.charts();
        assert_eq!(charts["w"].iter().map(|l| l.points[0].1).collect::<Vec<_>>(), [15.0, 16.5]);
        assert_eq!(table.json().lines().count(), 4);
    }

    #[test]
    fn seconds_follow_the_model() {
        let model = Model {
            flop_per_token: 2.0,
            flop_per_second: 4.0,
            knee_tokens: 64.0,
            bytes_per_token: 8.0,
            load_bytes_per_second: 16.0,
        };
        assert_eq!(model.prefill_seconds(3.0, 64), 96.0);
        assert_eq!(model.load_seconds(2, 64), 64.0);
        assert_eq!(model.knee_pages(64), 1.0);
    }
}
