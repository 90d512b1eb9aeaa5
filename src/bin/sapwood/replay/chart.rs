//! What a replay looked like over time, drawn as SVG by hand: hit share by tier above, occupancy of the pools
//! below. Colours are told apart by readers who do not see red and green (Okabe and Ito's set).

use std::fmt::Write;

use super::report::Hits;

/// Samples of occupancy kept at most; beyond that every second one is let go.
const SAMPLES_MAX: usize = 1_024;
/// Points along the time axis of the hit chart.
const BINS: usize = 72;

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 640.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 890.0;
const HITS_TOP: f64 = 96.0;
const HITS_BOTTOM: f64 = 336.0;
const POOLS_TOP: f64 = 420.0;
const POOLS_BOTTOM: f64 = 580.0;

const DEVICE: &str = "#0072B2";
const HOST: &str = "#E69F00";
const STORE: &str = "#009E73";
const INK: &str = "#222222";
const FAINT: &str = "#666666";
const GRID: &str = "#E4E4E4";

/// One admitted request.
struct Admitted {
    at_us: u64,
    input_tokens: u64,
    hits: Hits,
}

/// Pages in use at one moment.
struct Sample {
    at_us: u64,
    device_pages: u64,
    host_pages: u64,
}

/// What was seen over virtual time.
#[derive(Default)]
pub(crate) struct Timeline {
    admitted: Vec<Admitted>,
    samples: Vec<Sample>,
    skip: u32,
    skipped: u32,
}

impl Timeline {
    /// Notes a request and what it hit.
    pub(crate) fn admit(&mut self, at_us: u64, input_tokens: u64, hits: Hits) {
        self.admitted.push(Admitted { at_us, input_tokens, hits });
    }

    /// Notes the pages in use. Amortised O(1); keeps at most [`SAMPLES_MAX`].
    pub(crate) fn sample(&mut self, at_us: u64, device_pages: u64, host_pages: u64) {
        if self.skipped < self.skip {
            self.skipped += 1;
            return;
        }
        self.skipped = 0;
        if self.samples.len() == SAMPLES_MAX {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
            self.skip = self.skip * 2 + 1;
        }
        self.samples.push(Sample { at_us, device_pages, host_pages });
    }

    fn end_us(&self) -> u64 {
        let last = self.admitted.iter().map(|a| a.at_us).chain(self.samples.iter().map(|s| s.at_us)).max();
        last.unwrap_or(0).max(1)
    }

    /// Cumulative hit shares (device, device + host, all) for each bin that saw a request, at its middle.
    fn shares(&self) -> Vec<(f64, [f64; 3])> {
        let end = self.end_us() as f64;
        let mut bins = [(0u64, Hits::default()); BINS];
        for a in &self.admitted {
            let bin = ((a.at_us as f64 / end * BINS as f64) as usize).min(BINS - 1);
            let (input, hits) = &mut bins[bin];
            *input += a.input_tokens;
            hits.device += a.hits.device;
            hits.host += a.hits.host;
            hits.store += a.hits.store;
        }
        let share = |(i, (input, h)): (usize, &(u64, Hits))| {
            let of = |tokens: u64| tokens as f64 / *input as f64;
            let stacked = [of(h.device), of(h.device + h.host), of(h.total())];
            (end * (i as f64 + 0.5) / BINS as f64, stacked)
        };
        bins.iter().enumerate().filter(|(_, (input, _))| *input > 0).map(share).collect()
    }
}

/// Capacity of a pool for the legend; `None` is unlimited.
pub(crate) struct Capacities {
    pub(crate) device_pages: Option<u64>,
    pub(crate) host_pages: u64,
}

/// Draws the chart. `title` is one line of plain text.
pub(crate) fn draw(timeline: &Timeline, title: &str, capacities: &Capacities) -> String {
    let mut svg = Svg { out: String::with_capacity(64 << 10), end_us: timeline.end_us() as f64 };
    svg.open(title);
    svg.frame("Prompt tokens by where they were found", HITS_TOP, HITS_BOTTOM);
    svg.hits(&timeline.shares());
    svg.legend(HITS_TOP - 14.0, &[("device", DEVICE), ("host", HOST), ("store", STORE)]);
    svg.frame("Pages in use", POOLS_TOP, POOLS_BOTTOM);
    svg.pools(timeline, capacities);
    svg.time_axis();
    svg.out.push_str("</svg>\n");
    svg.out
}

struct Svg {
    out: String,
    end_us: f64,
}

impl Svg {
    /// Appends one line; writing to a `String` cannot fail.
    fn line(&mut self, args: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(args);
        self.out.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, style: &str, text: &str) {
        let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        self.line(format_args!(r#"<text x="{x:.1}" y="{y:.1}" {style}>{escaped}</text>"#));
    }

    fn open(&mut self, title: &str) {
        self.line(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img">"#
        ));
        self.line(format_args!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#FFFFFF"/>"##));
        self.text(LEFT, 34.0, r#"font-size="17" font-weight="600""#, "sapwood replay");
        self.text(LEFT, 54.0, &format!(r#"fill="{FAINT}""#), title);
    }

    /// Grid, percent axis and title of one panel.
    fn frame(&mut self, title: &str, top: f64, bottom: f64) {
        self.text(LEFT, top - 14.0, r#"font-weight="600""#, title);
        for percent in [0, 25, 50, 75, 100] {
            let y = height(f64::from(percent) / 100.0, top, bottom);
            self.line(format_args!(
                r#"<line x1="{LEFT}" y1="{y:.1}" x2="{RIGHT}" y2="{y:.1}" stroke="{GRID}"/>"#
            ));
            let style = format!(r#"text-anchor="end" fill="{FAINT}""#);
            self.text(LEFT - 8.0, y + 4.0, &style, &format!("{percent} %"));
        }
    }

    fn legend(&mut self, y: f64, entries: &[(&str, &str)]) {
        let widths: Vec<f64> = entries.iter().map(|(name, _)| 30.0 + 6.6 * name.len() as f64).collect();
        let mut x = RIGHT - widths.iter().sum::<f64>();
        for ((name, colour), width) in entries.iter().zip(widths) {
            self.line(format_args!(
                r#"<rect x="{x:.1}" y="{:.1}" width="12" height="12" rx="2" fill="{colour}"/>"#,
                y - 10.0
            ));
            self.text(x + 17.0, y, "", name);
            x += width;
        }
    }

    fn x(&self, at_us: f64) -> f64 {
        LEFT + (RIGHT - LEFT) * at_us / self.end_us
    }

    /// Stacked areas, the sum first so that each lower layer covers its part.
    fn hits(&mut self, shares: &[(f64, [f64; 3])]) {
        let (Some(first), Some(last)) = (shares.first(), shares.last()) else { return };
        let (start, end) = (self.x(first.0), self.x(last.0));
        for (layer, colour) in [(2, STORE), (1, HOST), (0, DEVICE)] {
            let points: Vec<(f64, f64)> = shares
                .iter()
                .map(|(at, stacked)| (self.x(*at), height(stacked[layer], HITS_TOP, HITS_BOTTOM)))
                .collect();
            let path = polyline(&points);
            self.line(format_args!(
                r#"<path d="M{start:.1},{HITS_BOTTOM} L{path} L{end:.1},{HITS_BOTTOM} Z" fill="{colour}"/>"#
            ));
        }
        self.baseline(HITS_BOTTOM);
    }

    fn pools(&mut self, timeline: &Timeline, capacities: &Capacities) {
        let peak = timeline.samples.iter().map(|s| s.device_pages).max().unwrap_or(0);
        let (device_full, device_name) = match capacities.device_pages {
            Some(pages) => (pages, format!("device, of {pages}")),
            None => (peak, format!("device, of a peak of {peak}")),
        };
        let host_name = format!("host, of {}", capacities.host_pages);
        let mut entries = vec![(device_name.as_str(), DEVICE)];
        self.pool(timeline, device_full, |s| s.device_pages, DEVICE);
        if capacities.host_pages > 0 {
            self.pool(timeline, capacities.host_pages, |s| s.host_pages, HOST);
            entries.push((host_name.as_str(), HOST));
        }
        self.legend(POOLS_TOP - 14.0, &entries);
        self.baseline(POOLS_BOTTOM);
    }

    fn pool(&mut self, timeline: &Timeline, full: u64, pages: impl Fn(&Sample) -> u64, colour: &str) {
        if full == 0 || timeline.samples.is_empty() {
            return;
        }
        let points: Vec<(f64, f64)> = timeline
            .samples
            .iter()
            .map(|s| (self.x(s.at_us as f64), height(pages(s) as f64 / full as f64, POOLS_TOP, POOLS_BOTTOM)))
            .collect();
        let path = polyline(&points);
        self.line(format_args!(
            r#"<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>"#
        ));
    }

    fn baseline(&mut self, y: f64) {
        self.line(format_args!(r#"<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="{FAINT}"/>"#));
    }

    /// Ticks in seconds under both panels.
    fn time_axis(&mut self) {
        let end_s = self.end_us / 1e6;
        let step = tick_step(end_s);
        let style = format!(r#"text-anchor="middle" fill="{FAINT}""#);
        for tick in 0..=((end_s / step) as u32) {
            let seconds = f64::from(tick) * step;
            let x = self.x(seconds * 1e6);
            for bottom in [HITS_BOTTOM, POOLS_BOTTOM] {
                self.line(format_args!(
                    r#"<line x1="{x:.1}" y1="{bottom}" x2="{x:.1}" y2="{:.1}" stroke="{FAINT}"/>"#,
                    bottom + 5.0
                ));
                self.text(x, bottom + 19.0, &style, &trimmed(seconds));
            }
        }
        let style = format!(r#"text-anchor="middle" fill="{FAINT}""#);
        self.text((LEFT + RIGHT) / 2.0, POOLS_BOTTOM + 40.0, &style, "virtual time in seconds");
    }
}

/// Y of a share; shares above 1 are drawn at the top.
fn height(share: f64, top: f64, bottom: f64) -> f64 {
    bottom - (bottom - top) * share.clamp(0.0, 1.0)
}

fn polyline(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" L")
}

/// A round step that gives four to ten ticks.
fn tick_step(end: f64) -> f64 {
    let raw = (end / 8.0).max(1e-6);
    let power = 10f64.powf(raw.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= raw).unwrap_or(10.0);
    factor * power
}

fn trimmed(seconds: f64) -> String {
    let text = format!("{seconds:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline() -> Timeline {
        let mut timeline = Timeline::default();
        for i in 0..100u64 {
            timeline.admit(i * 100_000, 1000, Hits { device: 300, host: 200, store: i });
            timeline.sample(i * 100_000, i, 2 * i);
        }
        timeline
    }

    /// Reads the document as XML would be read: every tag closed, in order.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        for part in svg.split('<').skip(1) {
            let (tag, text) = part.split_once('>').expect("a tag ends");
            assert!(!text.contains('>'));
            let name = tag.split([' ', '/']).find(|s| !s.is_empty()).expect("a tag has a name");
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        }
        assert!(open.is_empty());
    }

    #[test]
    fn the_chart_is_well_formed_and_labelled() {
        let capacities = Capacities { device_pages: Some(100), host_pages: 200 };
        let svg = draw(&timeline(), "a <trace> & more", &capacities);
        assert_well_formed(&svg);
        for part in [
            "a &lt;trace&gt; &amp; more",
            ">store<",
            ">device, of 100<",
            ">100 %<",
            "virtual time in seconds",
        ] {
            assert!(svg.contains(part), "{part} is missing");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        assert_well_formed(&draw(
            &Timeline::default(),
            "",
            &Capacities { device_pages: None, host_pages: 0 },
        ));
    }

    #[test]
    fn shares_stack_and_stay_within_one() {
        let shares = timeline().shares();
        assert_eq!(shares.len(), BINS);
        for (_, [device, host, all]) in shares {
            assert!((device - 0.3).abs() < 1e-9 && (host - 0.5).abs() < 1e-9);
            assert!(host <= all && all <= 1.0);
        }
    }

    #[test]
    fn samples_stay_few_and_spread() {
        let mut timeline = Timeline::default();
        (0..100_000).for_each(|i| timeline.sample(i, i, 0));
        assert!((SAMPLES_MAX / 4..=SAMPLES_MAX).contains(&timeline.samples.len()));
        assert!(timeline.samples.windows(2).all(|w| w[0].at_us < w[1].at_us));
        assert!(timeline.end_us() > 90_000);
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(tick_step(80.0), 10.0);
        assert_eq!(tick_step(3537.0), 500.0);
        assert_eq!(trimmed(0.5), "0.5");
        assert_eq!(trimmed(1500.0), "1500");
    }
}
