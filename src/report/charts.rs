//! Charts as inline SVG.
//!
//! The plotting area is the `svg` element itself: places along it are percentages and text has one size at any width,
//! so a chart fits a telephone and a wall. Labels stand outside, in margins that the style sheet leaves. Colours are
//! variables of the style sheet, so that they follow light and dark. No library: one that is small writes fixed sizes
//! and colours, the others draw in the browser by JavaScript.

use std::fmt::Write;

use super::number::significant;

/// Steps of the colours of a heat map: relative errors, the same in all reports.
pub const HEAT: [f64; 6] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2];

/// A chart for an HTML page.
pub struct Chart {
    pub caption: String,
    /// A word more, below the caption.
    pub note: String,
    /// What shapes and colours stand for: class and words.
    pub legend: Vec<(String, String)>,
    pub svg: String,
    /// Class of the margins.
    pub frame: &'static str,
}

/// Text for SVG and HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// An `svg` element with a text alternative. Parts of it come from `body`.
fn svg(id: &str, height: usize, title: &str, description: &str, body: &str) -> String {
    format!(
        "<svg role=\"img\" aria-labelledby=\"{id}-t {id}-d\" height=\"{height}\" width=\"100%\"><title id=\"{id}-t\">{}\
         </title><desc id=\"{id}-d\">{}</desc>{body}</svg>",
        escape(title),
        escape(description)
    )
}

/// A part in percent, with as many digits as a screen has.
fn part(share: f64) -> String {
    let text = format!("{:.2}", 100.0 * share);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

fn pixels(value: f64) -> String {
    let text = format!("{value:.1}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// A way from values to 0..1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    log: bool,
}

impl Axis {
    /// From `low` to `high`, with a little room.
    pub fn linear(low: f64, high: f64) -> Self {
        let span = if high > low { high - low } else { low.abs().max(1e-6) };
        Self { low, high: low + span, log: false }
    }

    /// Whole steps of 1, 2 and 5 around the positive values.
    pub fn log(low: f64, high: f64) -> Self {
        let (low, high) = if low > 0.0 && high >= low && high.is_finite() { (low, high) } else { (0.1, 1.0) };
        // Beyond what any error is; powers of ten stay numbers.
        let (low, high) = (low.clamp(1e-12, 1e12), high.clamp(1e-12, 1e12));
        let steps = log_steps(low, high);
        let below = steps.iter().rfind(|step| **step <= low).copied().unwrap_or(low);
        let above = steps.iter().find(|step| **step >= high).copied().unwrap_or(high);
        Self { low: below, high: if above > below { above } else { 10.0 * below }, log: true }
    }

    /// Where a value lies, 0 to 1; outside it stops at the end.
    pub fn at(&self, value: f64) -> f64 {
        let share = match self.log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }

    /// Some round values.
    pub fn ticks(&self) -> Vec<f64> {
        if self.log {
            let all = log_steps(self.low, self.high);
            let inside: Vec<f64> =
                all.into_iter().filter(|x| *x >= self.low * 0.999 && *x <= self.high * 1.001).collect();
            if inside.len() <= 7 {
                return inside;
            }
            return inside.into_iter().filter(|x| (x.log10() - x.log10().round()).abs() < 1e-6).collect();
        }
        let rough = (self.high - self.low) / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough * 0.999);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        (first..=last.min(first.saturating_add(20))).map(|i| i as f64 * step).collect()
    }
}

fn log_steps(low: f64, high: f64) -> Vec<f64> {
    let first = low.log10().floor() as i32 - 1;
    let last = (high.log10().ceil() as i32 + 1).min(first + 40);
    (first..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(power))).collect()
}

/// Horizontal lines with their values at the left.
fn rulings(axis: Axis, height: f64, show: &dyn Fn(f64) -> String) -> String {
    let mut out = String::new();
    for tick in axis.ticks() {
        let y = pixels(height * (1.0 - axis.at(tick)));
        let _ = write!(out, "<line class=\"rule\" x1=\"0\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\"/>");
        let _ = write!(out, "<text class=\"tick end\" x=\"-8\" y=\"{y}\" dy=\".32em\">{}</text>", escape(&show(tick)));
    }
    out
}

/// A bar of [`bars`].
pub struct Bar {
    pub name: String,
    pub value: f64,
    pub stderr: f64,
    pub text: String,
    pub class: &'static str,
}

/// Horizontal bars from zero, each under its name.
pub fn bars(id: &str, title: &str, all: &[Bar]) -> String {
    const ROW: usize = 46;
    let ends = all.iter().flat_map(|bar| [bar.value - bar.stderr, bar.value + bar.stderr]).filter(|x| x.is_finite());
    let (low, high) = ends.fold((0.0f64, 0.0f64), |(low, high), x| (low.min(x), high.max(x)));
    let axis = Axis::linear(low, if high > low { high } else { low + 1.0 });
    let zero = axis.at(0.0);
    let mut body = String::new();
    for (i, bar) in all.iter().enumerate() {
        let y = ROW * i;
        let (from, to) = (axis.at(bar.value).min(zero), axis.at(bar.value).max(zero));
        let _ = write!(
            body,
            "<text class=\"label\" x=\"0\" y=\"{}\">{}</text><text class=\"value end\" x=\"100%\" y=\"{}\">{}</text>\
             <rect class=\"track\" x=\"0\" y=\"{}\" width=\"100%\" height=\"12\" rx=\"2\"/>",
            y + 13,
            escape(&bar.name),
            y + 13,
            escape(&bar.text),
            y + 21
        );
        if to > from {
            let (x, width) = (part(from), part(to - from));
            let _ = write!(
                body,
                "<rect class=\"{}\" x=\"{x}\" y=\"{}\" width=\"{width}\" height=\"12\" rx=\"2\"/>",
                bar.class,
                y + 21
            );
        }
        let (at, top, bottom) = (part(zero), y + 18, y + 36);
        let _ = write!(body, "<line class=\"axis\" x1=\"{at}\" x2=\"{at}\" y1=\"{top}\" y2=\"{bottom}\"/>");
        if bar.stderr > 0.0 && bar.value.is_finite() {
            let (a, b) = (part(axis.at(bar.value - bar.stderr)), part(axis.at(bar.value + bar.stderr)));
            let y = y + 27;
            let _ = write!(body, "<line class=\"whisker\" x1=\"{a}\" x2=\"{b}\" y1=\"{y}\" y2=\"{y}\"/>");
        }
    }
    let height = (ROW * all.len()).saturating_sub(8);
    let said: Vec<String> = all.iter().map(|bar| format!("{}: {}", bar.name, bar.text)).collect();
    svg(id, height, title, &format!("{}.", said.join("; ")), &body)
}

/// A column of [`columns`].
pub struct Place {
    /// Below the column; may be empty.
    pub name: String,
    /// Above it; may be empty.
    pub text: String,
    pub value: f64,
    pub class: &'static str,
}

/// Vertical columns from zero, and marks `(place from 0 to 1, name)` across them.
pub fn columns(
    id: &str,
    (title, description): (&str, &str),
    all: &[Place],
    (highest, show): (f64, &dyn Fn(f64) -> String),
    marks: &[(f64, &str)],
) -> String {
    const HEIGHT: f64 = 180.0;
    let axis = Axis::linear(0.0, if highest > 0.0 { highest } else { 1.0 });
    let mut body = rulings(axis, HEIGHT, show);
    let width = 1.0 / all.len().max(1) as f64;
    for (i, place) in all.iter().enumerate() {
        let (x, tall) = (i as f64 * width, HEIGHT * axis.at(place.value));
        if tall > 0.0 {
            let _ = write!(
                body,
                "<rect class=\"column {}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                place.class,
                part(x),
                pixels(HEIGHT - tall),
                part(width),
                pixels(tall)
            );
        }
        let middle = part(x + width / 2.0);
        if !place.name.is_empty() {
            let _ = write!(body, "<text class=\"tick middle\" x=\"{middle}\" y=\"198\">{}</text>", escape(&place.name));
        }
        if !place.text.is_empty() {
            let y = pixels(HEIGHT - tall - 6.0);
            let _ =
                write!(body, "<text class=\"value middle\" x=\"{middle}\" y=\"{y}\">{}</text>", escape(&place.text));
        }
    }
    for (at, name) in marks {
        let at = part(*at);
        let _ = write!(body, "<line class=\"mark\" x1=\"{at}\" x2=\"{at}\" y1=\"0\" y2=\"180\"/>");
        let _ = write!(body, "<text class=\"tick middle\" x=\"{at}\" y=\"-8\">{}</text>", escape(name));
    }
    body.push_str("<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"180\" y2=\"180\"/>");
    svg(id, HEIGHT as usize, title, description, &body)
}

/// The places of names below a chart of `count` places: all, or every so many.
pub fn named(count: usize) -> impl Iterator<Item = usize> {
    let step = [1, 2, 5, 10, 20, 50, 100].into_iter().find(|step| count <= 9 * step).unwrap_or(200);
    (0..count).step_by(step)
}

/// A point of [`dots`]: column, value, class, words.
pub type Dot = (usize, f64, &'static str, String);

/// Values over the whole numbers below `count`, on a logarithmic axis.
pub fn dots(id: &str, title: &str, description: &str, count: usize, all: &[Dot]) -> String {
    const HEIGHT: f64 = 240.0;
    let positive = || all.iter().map(|dot| dot.1).filter(|value| *value > 0.0 && value.is_finite());
    let axis = Axis::log(positive().fold(f64::INFINITY, f64::min), positive().fold(0.0, f64::max));
    let mut body = rulings(axis, HEIGHT, &|value| significant(value, 1));
    let x = |column: usize| part((column as f64 + 0.5) / count.max(1) as f64);
    for (column, value, class, words) in all {
        let (x, y) = (x(*column), pixels(HEIGHT * (1.0 - axis.at(*value))));
        let words = escape(words);
        let _ = write!(
            body,
            "<circle class=\"dot {class}\" cx=\"{x}\" cy=\"{y}\" r=\"3.2\"><title>{words}</title></circle>"
        );
    }
    for column in named(count) {
        let _ = write!(body, "<text class=\"tick middle\" x=\"{}\" y=\"258\">{column}</text>", x(column));
    }
    body.push_str("<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"240\" y2=\"240\"/>");
    svg(id, HEIGHT as usize, title, description, &body)
}

/// A heat map of relative errors: layers across, heads down.
pub fn heat(id: &str, title: &str, description: &str, grid: &[Vec<f64>]) -> String {
    let (layers, heads) = (grid.len(), grid.first().map_or(0, Vec::len));
    let row = if heads <= 8 { 16 } else { 96usize.div_ceil(heads).max(5) };
    let height = row * heads.max(1);
    let mut paths: Vec<String> = vec![String::new(); HEAT.len() + 2];
    for (layer, errors) in grid.iter().enumerate() {
        for (head, error) in errors.iter().enumerate() {
            let class = if error.is_finite() { HEAT.partition_point(|edge| edge <= error) } else { HEAT.len() + 1 };
            let _ = write!(paths[class], "M{layer} {head}h1v1h-1z");
        }
    }
    let mut body = format!(
        "<svg viewBox=\"0 0 {layers} {heads}\" preserveAspectRatio=\"none\" width=\"100%\" height=\"{height}\">"
    );
    // Between small cells there is no room for gaps.
    let gaps = if layers <= 48 && heads <= 12 { "cell" } else { "fine" };
    for (class, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = write!(body, "<path class=\"{gaps} h{class}\" d=\"{path}\"/>");
    }
    body.push_str("</svg>");
    for head in named(heads) {
        let y = pixels((head as f64 + 0.5) * row as f64);
        let _ = write!(body, "<text class=\"tick end\" x=\"-8\" y=\"{y}\" dy=\".32em\">{head}</text>");
    }
    for layer in named(layers) {
        let x = part((layer as f64 + 0.5) / layers.max(1) as f64);
        let _ = write!(body, "<text class=\"tick middle\" x=\"{x}\" y=\"{}\">{layer}</text>", height + 16);
    }
    svg(id, height, title, description, &body)
}

/// What the colours of [`heat`] stand for.
pub fn heat_legend() -> Vec<(String, String)> {
    let percent = |edge: f64| format!("{} %", significant(100.0 * edge, 1));
    let mut out = vec![("h0".to_string(), format!("below {}", percent(HEAT[0])))];
    for (i, pair) in HEAT.windows(2).enumerate() {
        out.push((format!("h{}", i + 1), format!("{} to {}", significant(100.0 * pair[0], 1), percent(pair[1]))));
    }
    out.push((format!("h{}", HEAT.len()), format!("{} and more", percent(HEAT[HEAT.len() - 1]))));
    out
}

/// A line of [`lines`]: class, and a value for each place, `None` where it was not measured.
pub struct Line {
    pub class: &'static str,
    pub values: Vec<Option<f64>>,
}

/// Lines over places with names. A line is cut before each place in `cuts`, where what follows is not comparable;
/// `level` is a value to compare with, `least` the least room above and below.
pub fn lines(
    id: &str,
    (title, description): (&str, &str),
    names: &[String],
    all: &[Line],
    (cuts, level, least): (&[usize], Option<f64>, f64),
    show: &dyn Fn(f64) -> String,
) -> String {
    const HEIGHT: f64 = 160.0;
    let finite =
        || all.iter().flat_map(|line| &line.values).flatten().copied().chain(level).filter(|value| value.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    // Room above and below; more where all is equal.
    let room = if high > low { 0.08 * (high - low) } else { 0.05 * high.abs().max(1e-3) }.max(least);
    let axis = Axis::linear(low - room, high + room);
    let mut body = rulings(axis, HEIGHT, show);
    let place = |i: usize| (i as f64 + 0.5) / names.len().max(1) as f64;
    let y = |value: f64| HEIGHT * (1.0 - axis.at(value));
    for line in all {
        let mut path = String::new();
        let mut pen = false;
        for (i, value) in line.values.iter().enumerate() {
            let Some(value) = value.filter(|value| value.is_finite()) else {
                pen = false;
                continue;
            };
            pen &= !cuts.contains(&i);
            let word = if pen { 'L' } else { 'M' };
            let _ = write!(path, "{word}{} {}", pixels(1000.0 * place(i)), pixels(y(value)));
            pen = true;
        }
        let _ = write!(
            body,
            "<svg viewBox=\"0 0 1000 160\" preserveAspectRatio=\"none\" width=\"100%\" height=\"160\"><path class=\"line {}\" \
             d=\"{path}\"/></svg>",
            line.class
        );
        for (i, value) in line.values.iter().enumerate() {
            let Some(value) = value.filter(|value| value.is_finite()) else { continue };
            let words = escape(&format!("{}: {}", names[i], show(value)));
            let (x, y) = (part(place(i)), pixels(y(value)));
            let class = line.class;
            let _ = write!(
                body,
                "<circle class=\"dot {class}\" cx=\"{x}\" cy=\"{y}\" r=\"3.2\"><title>{words}</title></circle>"
            );
        }
    }
    if let Some(level) = level {
        let y = pixels(y(level));
        let _ = write!(body, "<line class=\"level\" x1=\"0\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\"/>");
    }
    for cut in cuts {
        let x = part(*cut as f64 / names.len().max(1) as f64);
        let _ = write!(body, "<line class=\"mark\" x1=\"{x}\" x2=\"{x}\" y1=\"0\" y2=\"160\"/>");
    }
    // Of long names there is room for two.
    let short = names.iter().all(|name| name.chars().count() <= 3);
    let shown: Vec<usize> = if short { named(names.len()).collect() } else { vec![0, names.len().saturating_sub(1)] };
    for (i, name) in shown.iter().filter_map(|i| Some((*i, names.get(*i)?))) {
        let anchor = match i {
            _ if short || names.len() == 1 => "middle",
            0 => "start",
            _ => "end",
        };
        let name: String = name.chars().take(12).collect();
        let (x, name) = (part(place(i)), escape(&name));
        let _ = write!(body, "<text class=\"tick {anchor}\" x=\"{x}\" y=\"178\">{name}</text>");
    }
    svg(id, HEIGHT as usize, title, description, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes() {
        let axis = Axis::linear(0.0, 0.07);
        assert_eq!(
            axis.ticks().iter().map(|x| significant(*x, 2)).collect::<Vec<_>>(),
            ["0", "0.020", "0.040", "0.060"]
        );
        assert_eq!((axis.at(0.035), axis.at(-1.0), axis.at(9.0), axis.at(f64::NAN)), (0.5, 0.0, 1.0, 0.0));
        let axis = Axis::log(0.013, 0.21);
        assert_eq!(
            axis.ticks().iter().map(|x| significant(*x, 1)).collect::<Vec<_>>(),
            ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"]
        );
        assert_eq!(Axis::log(1e-6, 1.0).ticks().len(), 7);
        for axis in [Axis::linear(0.0, 0.0), Axis::log(0.0, 0.0), Axis::log(f64::INFINITY, 0.0), Axis::linear(3.0, 3.0)]
        {
            assert!(axis.ticks().len() < 30 && axis.at(1.0).is_finite(), "{axis:?}");
        }
    }

    #[test]
    fn texts_cannot_leave_their_element() {
        let bar = Bar { name: "<script>".into(), value: 1.0, stderr: 0.1, text: "a & \"b\"".into(), class: "c1" };
        let svg = bars("x", "</title>", &[bar]);
        assert!(!svg.contains("<script") && !svg.contains("& ") && svg.matches("</title>").count() == 1, "{svg}");
    }

    #[test]
    fn heat_maps_have_a_colour_for_every_cell() {
        let svg = heat("x", "t", "d", &[vec![0.001, 0.3], vec![f64::NAN, 0.02]]);
        for (class, path) in [(0, "M0 0"), (6, "M0 1"), (7, "M1 0"), (3, "M1 1")] {
            assert!(svg.contains(&format!("<path class=\"cell h{class}\" d=\"{path}h1v1h-1z\"/>")), "{class}: {svg}");
        }
        assert_eq!(heat_legend().len(), HEAT.len() + 1);
        assert_eq!(heat_legend()[1], ("h1".into(), "0.5 to 1 %".into()));
        heat("x", "t", "d", &[]);
    }

    #[test]
    fn lines_are_cut_where_values_are_missing_or_not_comparable() {
        let line = Line {
            class: "c1",
            values: vec![Some(1.0), Some(2.0), None, Some(1.0), Some(f64::NAN), Some(3.0), Some(2.0)],
        };
        let names: Vec<String> = (0..7).map(|i| i.to_string()).collect();
        let svg = lines("x", ("t", "d"), &names, &[line], (&[6], None, 0.0), &|x| significant(x, 2));
        let path = svg.split("d=\"M").nth(1).unwrap_or_default();
        let path = path.split('"').next().unwrap_or_default();
        assert_eq!((path.matches('M').count() + 1, path.matches('L').count()), (4, 1), "{path}");
        assert_eq!(svg.matches("<circle").count(), 5);
    }
}
