//! A chart in braille: each character has two by four dots.

use super::{Row, Style};
use crate::figures::{count, decimal};
use crate::run::Run;

/// Columns of the labels on the left.
const LABELS: usize = 9;
/// The dots of a character, by row and column: bits of U+2800.
const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

/// The losses of training and validation over the steps, in the given columns and rows.
#[expect(clippy::cast_precision_loss, reason = "for drawing")]
pub fn loss(run: &Run, width: usize, height: usize) -> Vec<Row> {
    let training: Vec<(f64, f64)> = run.loss().points().map(|(x, bucket)| (x, bucket.mean())).collect();
    let evaluations = run.evaluations().iter().filter(|evaluation| evaluation.loss.is_finite());
    let validation: Vec<(f64, f64)> = evaluations.map(|evaluation| (evaluation.step as f64, evaluation.loss)).collect();
    let losses = training.iter().chain(&validation).map(|(_, loss)| *loss);
    let nothing = (f64::INFINITY, f64::NEG_INFINITY);
    let (least, most) = losses.fold(nothing, |(least, most), loss| (least.min(loss), most.max(loss)));
    if least > most {
        return vec![Row::new(width).with(Style::Dim, "no step yet")];
    }
    let rows = height.saturating_sub(1).max(1);
    let mut dots = Dots::new(width.saturating_sub(LABELS), rows, run.step().max(1) as f64, (least, most));
    dots.line(&training, Style::Blue);
    dots.line(&validation, Style::Yellow);
    let label = |row: usize| match row {
        0 => decimal(most),
        row if row + 1 == rows => decimal(least),
        _ => String::new(),
    };
    let mut chart: Vec<Row> = (0..rows)
        .map(|row| {
            let start = Row::new(width).with(Style::Dim, &format!("{:>7} ", label(row))).up_to(LABELS);
            dots.row(row).into_iter().fold(start, |row, (style, letter)| row.with(style, &letter.to_string()))
        })
        .collect();
    let axis = Row::new(width).up_to(LABELS).with(Style::Blue, "training").with(Style::Yellow, "  validation");
    let end = format!("step {}", count(run.step()));
    chart.push(axis.up_to(width.saturating_sub(end.len())).with(Style::Dim, &end));
    chart
}

struct Dots {
    columns: usize,
    rows: usize,
    letters: Vec<(u8, Style)>,
    to: f64,
    range: (f64, f64),
}

impl Dots {
    fn new(columns: usize, rows: usize, to: f64, range: (f64, f64)) -> Self {
        Self { columns, rows, letters: vec![(0, Style::Plain); columns * rows], to, range }
    }

    /// The place of a point, in dots from the left and from the top.
    #[expect(clippy::cast_precision_loss, reason = "dots")]
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (least, most) = self.range;
        let across = (x / self.to).clamp(0.0, 1.0) * (2 * self.columns).saturating_sub(1) as f64;
        let down = (most - y) / (most - least).max(1e-12);
        (across, down.clamp(0.0, 1.0) * (4 * self.rows - 1) as f64)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "dots")]
    fn line(&mut self, points: &[(f64, f64)], style: Style) {
        let mut before = None;
        for point in points {
            let to = self.place(*point);
            let from = before.replace(to).unwrap_or(to);
            let steps = (to.0 - from.0).abs().max((to.1 - from.1).abs()).ceil().max(1.0);
            for step in 0..=steps as usize {
                let part = step as f64 / steps;
                let (x, y) = (from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part);
                self.dot(x.round() as usize, y.round() as usize, style);
            }
        }
    }

    fn dot(&mut self, x: usize, y: usize, style: Style) {
        if let Some(letter) = self.letters.get_mut(y / 4 * self.columns + x / 2).filter(|_| x / 2 < self.columns) {
            *letter = (letter.0 | DOTS[y % 4][x % 2], style);
        }
    }

    fn row(&self, row: usize) -> Vec<(Style, char)> {
        let letters = &self.letters[row * self.columns..(row + 1) * self.columns];
        let shown = |(dots, style): &(u8, Style)| match dots {
            0 => (Style::Plain, ' '),
            dots => (*style, char::from_u32(0x2800 + u32::from(*dots)).unwrap_or(' ')),
        };
        letters.iter().map(shown).collect()
    }
}
