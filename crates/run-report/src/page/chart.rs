//! A chart: an SVG that stretches to its place, with HTML on top that does not. So lines keep their width and letters their
//! size on a phone and on paper. The chart works without a script; a script shows the values under the mouse.

use std::fmt::Write;

use super::escape;
use super::scale::Scale;
use crate::series::Series;

/// Units of the SVG, across and down.
const WIDTH: f64 = 2000.0;
const HEIGHT: f64 = 10000.0;

/// A chart while it is drawn.
pub struct Chart {
    title: String,
    unit: String,
    x: Scale,
    x_name: &'static str,
    y: Scale,
    svg: String,
    labels: String,
    legend: String,
    class: &'static str,
    is_bytes: bool,
}

impl Chart {
    /// Makes a chart without curves. The unit is beside the title.
    pub fn new(title: &str, unit: &str, (x, x_name): (Scale, &'static str), y: Scale) -> Self {
        let (title, unit) = (escape::text(title), escape::text(unit));
        Self {
            title,
            unit,
            x,
            x_name,
            y,
            svg: String::new(),
            labels: String::new(),
            legend: String::new(),
            class: "",
            is_bytes: false,
        }
    }

    /// Uses the whole width of the page.
    pub fn wide(mut self) -> Self {
        self.class = " wide";
        self
    }

    /// Marks the values as bytes.
    pub fn bytes(mut self) -> Self {
        self.is_bytes = true;
        self
    }

    fn point(&self, (x, y): (f64, f64)) -> String {
        format!("{:.0},{:.0}", WIDTH * self.x.place(x), HEIGHT * (1.0 - self.y.place(y)))
    }

    /// Draws each bucket's range from the least to the largest value, and a line through the means. Adds an entry to
    /// the legend.
    pub fn curve(mut self, class: &str, name: &str, series: &Series, legend: (&str, &str)) -> Self {
        if series.is_joined() {
            let mut lower: Vec<String> = Vec::new();
            let mut upper = String::new();
            for (x, bucket) in series.points() {
                let _ = write!(upper, "{} ", self.point((x, bucket.most)));
                lower.push(self.point((x, bucket.least)));
            }
            lower.reverse();
            let _ = write!(self.svg, r#"<path class="band {class}" d="M{upper}{}z"/>"#, lower.join(" "));
        }
        let points = series.points().map(|(x, bucket)| (x, bucket.mean()));
        self.line(class, name, points, legend)
    }

    /// Draws a line through points. Adds an entry to the legend: a label and a value.
    pub fn line(
        mut self,
        class: &str,
        name: &str,
        points: impl Iterator<Item = (f64, f64)>,
        legend: (&str, &str),
    ) -> Self {
        let points: Vec<String> = points.map(|point| self.point(point)).collect();
        let points = if points.len() == 1 { format!("{}h0", points[0]) } else { points.join(" ") };
        if !points.is_empty() {
            let name = escape::text(name);
            let _ = write!(self.svg, r#"<path class="line {class}" data-n="{name}" d="M{points}"/>"#);
        }
        self.legend(class, legend.0, legend.1)
    }

    /// Draws points, and a thin line through them.
    pub fn dots(mut self, class: &str, name: &str, points: &[(f64, f64)], legend: (&str, &str)) -> Self {
        self = self.line(class, name, points.iter().copied(), legend);
        // A line of zero length with round ends is a circle, even when the chart is stretched.
        let dots: String = points.iter().map(|point| format!("M{}h0", self.point(*point))).collect();
        if points.len() <= 120 {
            let _ = write!(self.svg, r#"<path class="dots {class}" d="{dots}"/>"#);
        }
        self
    }

    /// Draws an area between two lines over the same x. Its colour is a `style` attribute.
    pub fn area(mut self, style: &str, name: &str, between: &[(f64, f64, f64)]) -> Self {
        let upper: Vec<String> = between.iter().map(|&(x, _, top)| self.point((x, top))).collect();
        let lower: Vec<String> = between.iter().rev().map(|&(x, bottom, _)| self.point((x, bottom))).collect();
        let _ = write!(
            self.svg,
            r#"<path class="area" {style} d="M{} {}z"><title>{}</title></path>"#,
            upper.join(" "),
            lower.join(" "),
            escape::text(name)
        );
        self
    }

    /// Draws a horizontal line with a text above it. If it is beyond the scale, only a text at the top is shown.
    pub fn rule(mut self, class: &str, y: f64, words: &str) -> Self {
        let words = escape::text(words);
        if !self.y.holds(y) {
            let _ = write!(self.labels, r#"<i class="beyond {class}">{words} ↑</i>"#);
            return self;
        }
        let place = self.y.place(y);
        let _ = write!(self.svg, r#"<path class="rule {class}" d="M0,{:.0}h{WIDTH:.0}"/>"#, HEIGHT * (1.0 - place));
        let _ = write!(self.labels, r#"<i class="on {class}" style="bottom:{:.1}%">{words}</i>"#, 100.0 * place);
        self
    }

    /// Draws a vertical line at an event.
    pub fn mark(mut self, class: &str, x: f64, words: &str) -> Self {
        let place = self.x.place(x);
        let _ = write!(
            self.svg,
            r#"<path class="mark {class}" d="M{:.0},0v{HEIGHT:.0}"><title>{}</title></path>"#,
            WIDTH * place,
            escape::text(words)
        );
        self
    }

    /// Writes a text below the axis, from one place to another.
    pub fn bracket(mut self, from: f64, to: f64, words: &str) -> Self {
        let [from, to] = [from, to].map(|x| 100.0 * self.x.place(x));
        let _ = write!(
            self.labels,
            r#"<i class="bracket" style="left:{from:.2}%;width:{:.2}%"><span>{}</span></i>"#,
            to - from,
            escape::text(words)
        );
        self
    }

    /// Adds an entry to the legend.
    pub fn legend(self, class: &str, name: &str, value: &str) -> Self {
        self.key(&format!(r#"class="key {class}""#), name, value)
    }

    /// Adds the legend's entry for an area.
    pub fn legend_of_area(self, style: &str, name: &str, value: &str) -> Self {
        self.key(&format!(r#"class="key" {style}"#), name, value)
    }

    fn key(mut self, attributes: &str, name: &str, value: &str) -> Self {
        let (name, value) = (escape::text(name), escape::text(value));
        let _ = write!(self.legend, "<span {attributes}>{name} <b>{value}</b></span> ");
        self
    }

    /// Returns the chart as HTML.
    pub fn html(self) -> String {
        let Self { title, unit, x, x_name, y, svg, mut labels, legend, class, is_bytes } = self;
        let of = if is_bytes { "B" } else { "" };
        let mut grid = String::new();
        for (value, shown) in &y.ticks {
            let place = y.place(*value);
            let _ = write!(grid, "M0,{:.0}h{WIDTH:.0}", HEIGHT * (1.0 - place));
            let _ = write!(labels, r#"<i class="y" style="bottom:{:.1}%">{shown}</i>"#, 100.0 * place);
        }
        let last = x.ticks.len().saturating_sub(1);
        for (at, (value, shown)) in x.ticks.iter().enumerate() {
            let place = x.place(*value);
            let end = if at == last && place > 0.9 { " end" } else { "" };
            let _ = write!(labels, r#"<i class="x{end}" style="left:{:.1}%">{shown}</i>"#, 100.0 * place);
        }
        format!(
            r#"<figure class="chart{class}" data-x="{}" data-y="{}" data-xn="{x_name}" data-u="{of}"><figcaption><strong>{title}</strong> <small>{unit}</small><span class="keys">{legend}</span></figcaption><div class="plot"><svg viewBox="0 0 {WIDTH:.0} {HEIGHT:.0}" preserveAspectRatio="none" role="img" aria-label="{title}"><path class="grid" d="{grid}"/>{svg}</svg>{labels}<i class="xname">{x_name}</i></div></figure>
"#,
            x.numbers(),
            y.numbers()
        )
    }
}
