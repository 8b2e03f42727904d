//! The values that codes stand for.

use std::sync::LazyLock;

/// NF4: quantiles of a normal distribution in [-1, 1], among them 0 (Dettmers et al. 2023, QLoRA, appendix E).
pub(crate) const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The dynamic map of 8 bits, in ascending order (Dettmers 2015, "8-bit approximations for parallelism in deep learning"; bitsandbytes'
/// `create_dynamic_map`). For each power of ten from 1e-6 to 1, [0.1, 1] is cut into 2^i equal parts, and their middles times the power are
/// values, with both signs. 0 and 1 are values, too.
static ABSMAX: LazyLock<[f32; 256]> = LazyLock::new(|| {
    let mut values = vec![0.0, 1.0];
    for i in 0..7u32 {
        let parts = 1usize << i;
        // Like torch's `linspace`: from both ends, in f32, rounded once.
        let step = (1.0f32 - 0.1) / parts as f32;
        let boundary = |j: usize| {
            let from_below = j < parts.div_ceil(2);
            if from_below { step.mul_add(j as f32, 0.1) } else { (-step).mul_add((parts - j) as f32, 1.0) }
        };
        for j in 0..parts {
            let middle = (boundary(j) + boundary(j + 1)) / 2.0;
            let value = 10f64.powi(i as i32 - 6) as f32 * middle;
            values.extend([value, -value]);
        }
    }
    values.sort_by(f32::total_cmp);
    values.try_into().expect("256 values")
});

/// The value of each code of a block's scale, before its group's scale and the offset.
pub(crate) fn absmax_map() -> &'static [f32; 256] {
    &ABSMAX
}

/// The code of the nearest of 256 values in ascending order; of two equally near values, the lower.
pub(crate) fn nearest(values: &[f32; 256], x: f32) -> u8 {
    let (mut first, mut end) = (0, 255);
    while first < end {
        let middle = (first + end) / 2;
        if (values[middle] + values[middle + 1]) / 2.0 < x { first = middle + 1 } else { end = middle }
    }
    first as u8
}

/// The code of the nearest value of [`NF4`], without a branch.
#[inline(always)]
pub(crate) fn nearest_of_nf4(x: f32) -> u8 {
    let mut code = 0;
    for i in 0..15 {
        code += u8::from((NF4[i] + NF4[i + 1]) / 2.0 < x);
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_its_own_nearest() {
        let check = |values: &[f32], nearest: &dyn Fn(f32) -> u8| {
            assert!(values.is_sorted_by(|a, b| a < b));
            for (code, &x) in values.iter().enumerate() {
                assert_eq!(usize::from(nearest(x)), code);
            }
            for (code, pair) in values.windows(2).enumerate() {
                let middle = (pair[0] + pair[1]) / 2.0;
                assert_eq!(usize::from(nearest(middle)), code);
                assert_eq!(usize::from(nearest(middle.next_up())), code + 1);
            }
            assert_eq!((nearest(-2.0), usize::from(nearest(2.0))), (0, values.len() - 1));
        };
        check(&NF4, &nearest_of_nf4);
        check(absmax_map(), &|x| nearest(absmax_map(), x));
    }
}
