//! Panels of a quantised weight: the parts that are converted to numbers at a time, on a card, where a product takes no codes.

use std::ops::Range;

/// The most bytes of a panel. It is read right after it is written, and this much stays in the cache of a large card: 40 MB on an A100, 50
/// MB on an H100. Only T5-3B and flan-t5-xl in f32, and larger models, have weights that are larger.
const PANEL_BYTES: usize = 32 << 20;

/// The lines of a panel are a multiple of this, except in the last one: codes are read eight at a time.
const UNIT: usize = 8;

/// The number of lines of this length in a panel: all of them, if that is not too much.
fn at_a_time(lines: usize, length: usize, element_bytes: usize) -> usize {
    let line_bytes = length.saturating_mul(element_bytes).max(1);
    let lines_at_once = PANEL_BYTES / line_bytes;
    if lines <= lines_at_once { lines } else { (lines_at_once / UNIT * UNIT).max(UNIT).min(lines) }
}

/// The panels of a weight's rows or columns.
pub(crate) fn in_panels(lines: usize, length: usize, element_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let each = at_a_time(lines, length, element_bytes).max(1);
    (0..lines).step_by(each).map(move |first| first..lines.min(first + each))
}

/// Bytes of the largest panel.
pub(crate) fn panel_bytes(lines: usize, length: usize, element_bytes: usize) -> u64 {
    (at_a_time(lines, length, element_bytes) * length * element_bytes) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(lines: usize, length: usize, element_bytes: usize) {
        let panels: Vec<Range<usize>> = in_panels(lines, length, element_bytes).collect();
        let largest = panels.iter().map(|panel| (panel.len() * length * element_bytes) as u64).max().unwrap_or(0);
        assert_eq!(largest, panel_bytes(lines, length, element_bytes));
        assert!(largest <= PANEL_BYTES as u64, "{largest}");
        assert!(panels.iter().all(|panel| panel.start % UNIT == 0), "{panels:?}");
        assert_eq!(panels.iter().map(Range::len).sum::<usize>(), lines);
        assert!(panels.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(panels.len() > 1, lines * length * element_bytes > PANEL_BYTES, "{panels:?}");
    }

    #[test]
    fn small_weights_are_whole_and_large_ones_in_bounded_parts() {
        for element_bytes in [2, 4] {
            for (lines, length) in
                [(0, 64), (1, 1), (768, 3072), (5120, 2048), (65_536, 1024), (1024, 65_536), (4_999, 7_001)]
            {
                check(lines, length, element_bytes);
            }
        }
    }
}
