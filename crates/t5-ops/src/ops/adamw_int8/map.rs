//! bitsandbytes' dynamic maps: 256 numbers from -1 or 0 to 1, dense in proportion around zero, and the number that is nearest to a value.
//!
//! Seven decades from 1e-6 to 1 have twice as many numbers each as the decade before it. Values that are as near to one number as to the
//! next get the smaller one.

use std::sync::OnceLock;

/// The number of values of a block.
pub(super) const BLOCK: usize = 256;

/// Numbers of a map.
const NUMBERS: usize = 256;
/// Values of a smaller exponent are zero to a map: its least number above zero is 3e-7.
const LEAST: u32 = 0x3300;
/// Cells of one sign, up to the cell of 1. A cell is all values with the same upper half.
const CELLS: usize = (0x3F80 - LEAST + 1) as usize;

/// A map. `codes` are positions in it.
pub(super) struct Map {
    /// The numbers, in order.
    pub numbers: [f32; NUMBERS],
    /// The middle between a number and the next one. Nothing follows the last one.
    pub bounds: [f32; NUMBERS],
    /// The number of bounds below all values of each cell: those from 0 up, then those below 0.
    below: Vec<u8>,
}

/// The map of first moments, which have signs.
pub(super) fn signed() -> &'static Map {
    static MAP: OnceLock<Map> = OnceLock::new();
    MAP.get_or_init(|| Map::new(true))
}

/// The map of second moments, which have none.
pub(super) fn unsigned() -> &'static Map {
    static MAP: OnceLock<Map> = OnceLock::new();
    MAP.get_or_init(|| Map::new(false))
}

impl Map {
    fn new(is_signed: bool) -> Self {
        let decades = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
        let mut numbers = vec![0.0, 1.0];
        for (i, decade) in decades.into_iter().enumerate() {
            let count = if is_signed { 1 << i } else { 2 << i };
            let middles = middles(count);
            numbers.extend(middles.iter().map(|&middle| (decade * f64::from(middle)) as f32));
            if is_signed {
                numbers.extend(middles.iter().map(|&middle| (-decade * f64::from(middle)) as f32));
            }
        }
        numbers.sort_by(f32::total_cmp);
        let numbers: [f32; NUMBERS] = std::array::from_fn(|code| numbers[code]);
        let bounds = std::array::from_fn(|code| {
            numbers.get(code + 1).map_or(f32::INFINITY, |next| (numbers[code] + next) / 2.0)
        });
        let below = |cell: usize| {
            let upper = (LEAST + (cell % CELLS) as u32) << 16;
            // The least value of the cell. Cells of the smallest values reach to zero.
            let least = match (cell < CELLS, cell % CELLS) {
                (true, 0) => 0.0,
                (true, _) => f32::from_bits(upper),
                (false, _) => -f32::from_bits(upper | 0xFFFF),
            };
            bounds.iter().filter(|&&bound| bound < least).count() as u8
        };
        Map { numbers, bounds, below: (0..2 * CELLS).map(below).collect() }
    }

    /// The code of the number that is nearest to a value from -1 to 1.
    #[inline(always)]
    pub fn nearest(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let cell = (((bits & 0x7FFF_FFFF) >> 16).max(LEAST) - LEAST) as usize;
        let sign = (bits >> 31) as usize;
        // No cell has more than one bound.
        let below = self.below[sign * CELLS + cell.min(CELLS - 1)];
        below + u8::from(self.bounds[usize::from(below)] < value)
    }
}

/// The middles of `count` equal parts of 0.1 to 1, rounded as torch rounds `linspace`.
fn middles(count: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / count as f32;
    let bound = |i: usize| match i < count.div_ceil(2) {
        true => 0.1 + step * i as f32,
        false => 1.0 - step * (count - i) as f32,
    };
    (0..count).map(|i| (bound(i) + bound(i + 1)) / 2.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_finds_what_a_search_finds() {
        for map in [signed(), unsigned()] {
            assert!(map.numbers.is_sorted() && map.numbers[255] == 1.0);
            let mut bits = 1u32;
            let random = (0..200_000).map(|_| {
                bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f32::from_bits(bits)
            });
            let near = map.bounds.iter().flat_map(|bound| [bound.next_down(), *bound, bound.next_up()]);
            let small = [0.0, -0.0, f32::MIN_POSITIVE, -1e-45, 2e-7, -2e-7, 1.0, -1.0];
            for value in random.chain(near).chain(map.numbers).chain(small).filter(|value| value.abs() <= 1.0) {
                let expected = map.bounds.iter().filter(|&&bound| bound < value).count();
                assert_eq!(usize::from(map.nearest(value)), expected, "{value:e}");
            }
        }
    }
}
