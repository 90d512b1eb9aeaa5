//! Hit share over capacity, as SVG drawn by hand.

use std::fmt::Write;

/// One line of the chart.
pub(crate) struct Line {
    pub(crate) name: String,
    /// (tokens, percent), by rising capacity.
    pub(crate) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 390.0;
/// Okabe and Ito's colours, told apart by readers who do not see red and green.
const COLOURS: [&str; 7] = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];

/// Draws the lines; `title` is one line of plain text. At least one point is expected, otherwise the frame is empty.
pub(crate) fn draw(title: &str, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|l| &l.points);
    let (low, high) = points().fold((f64::INFINITY, 0.0f64), |(l, h), p| (l.min(p.0), h.max(p.0)));
    let top = points().fold(10.0f64, |t, p| t.max(p.1));
    let top = (top / 10.0).ceil() * 10.0;
    let span = (high / low).log2().max(1e-9);
    let x = |tokens: f64| LEFT + (RIGHT - LEFT) * (tokens / low).log2() / span;
    let y = |percent: f64| BOTTOM - (BOTTOM - TOP) * percent / top;
    let mut svg = Svg(String::new());
    svg.line(format_args!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12" role="img"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>"##
    ));
    svg.text(LEFT, 28.0, r#"font-size="16" font-weight="600""#, title);
    svg.text(LEFT, 46.0, r##"fill="#666""##, "percent of prompt tokens hit, over capacity in tokens");
    for tick in 0..=5 {
        let percent = top * f64::from(tick) / 5.0;
        let at = y(percent);
        svg.line(format_args!(r##"<path d="M{LEFT} {at:.1}H{RIGHT}" stroke="#ddd" fill="none"/>"##));
        svg.text(LEFT - 8.0, at + 4.0, r#"text-anchor="end""#, &format!("{percent:.0}"));
    }
    let mut ticks: Vec<f64> = points().map(|p| p.0).collect();
    ticks.sort_unstable_by(f64::total_cmp);
    ticks.dedup();
    for tokens in ticks {
        svg.text(x(tokens), BOTTOM + 18.0, r#"text-anchor="middle""#, &tokens_name(tokens));
    }
    for (at, line) in lines.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let path: Vec<String> = line.points.iter().map(|p| format!("{:.1} {:.1}", x(p.0), y(p.1))).collect();
        let dash = if at >= COLOURS.len() { r#" stroke-dasharray="5 3""# } else { "" };
        svg.line(format_args!(
            r#"<path d="M{}" stroke="{colour}" stroke-width="2" fill="none"{dash}/>"#,
            path.join("L")
        ));
        let row = TOP + 18.0 * at as f64;
        svg.line(format_args!(r#"<path d="M576 {row:.1}h18" stroke="{colour}" stroke-width="2"{dash}/>"#));
        svg.text(600.0, row + 4.0, "", &line.name);
    }
    svg.0.push_str("</svg>\n");
    svg.0
}

/// 1048576 is "1M".
pub(crate) fn tokens_name(tokens: f64) -> String {
    let millions = tokens / f64::from(1 << 20);
    if millions >= 1.0 { format!("{millions:.3}") } else { format!("{:.0}K", tokens / 1024.0) }
        .trim_end_matches('0')
        .trim_end_matches('.')
        .to_owned()
        + if millions >= 1.0 { "M" } else { "" }
}

struct Svg(String);

impl Svg {
    /// Appends one line; writing to a `String` cannot fail.
    fn line(&mut self, args: std::fmt::Arguments<'_>) {
        let _ = self.0.write_fmt(args);
        self.0.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, style: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        self.line(format_args!(r#"<text x="{x:.1}" y="{y:.1}" {style}>{text}</text>"#));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_every_line_and_no_markup_of_names() {
        let line = |name: &str| Line { name: name.to_owned(), points: vec![(1e6, 10.0), (4e6, 55.0)] };
        let svg = draw("a < b", &[line("lru"), line("x&y")]);
        assert!(svg.contains("a &lt; b") && svg.contains("x&amp;y"));
        assert_eq!(svg.matches("stroke-width=\"2\" fill=\"none\"").count(), 2);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn capacities_have_short_names() {
        let name = |tokens: u32| tokens_name(tokens.into());
        assert_eq!(
            [name(1 << 18), name(1 << 20), name(5 << 20), name(5 << 18)],
            ["256K", "1M", "5M", "1.25M"]
        );
    }
}
