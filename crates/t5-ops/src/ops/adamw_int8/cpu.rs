//! One pass over the blocks of parameter, gradient and both moments.

use candle_core::{Result, bail};
use tensor_storage::{change_bytes, share_storage};

use super::AdamwInt8Update;
use super::map::{BLOCK, Map, signed, unsigned};
use crate::ops::adamw::cpu::{Step, moved};
use crate::parallel::{Shared, for_each_part, rows_per_part};
use crate::random_mask::hash;
use crate::storage::{Element, View, update, with_element};
use crate::vector::vectorized;

pub(super) fn adamw_int8(of: &AdamwInt8Update) -> Result<()> {
    let grad = of.grad.contiguous()?;
    // Several tensors are locked for writing at once, so they are compared before the first lock.
    let [first, second] = of.moments;
    let all = [of.param, first.codes, first.largest, second.codes, second.largest, &grad];
    for (i, a) in all.iter().enumerate() {
        if all[i + 1..].iter().any(|b| share_storage(a, b)) {
            bail!("adamw_int8: expected parameter, gradient and moments in separate storage")
        }
    }
    // Noise is keyed by row and column, as everywhere; a vector is one row.
    let width = of.param.dims().last().copied().unwrap_or(1).max(1);
    let step = Step::new(&of.hyper);
    with_element!(grad.dtype(), G, {
        let view = View::new(&grad)?;
        let g = view.slice::<G>()?;
        with_element!(of.param.dtype(), T, {
            update::<T, _>("adamw_int8", of.param, &[&grad], |p| {
                update::<f32, _>("adamw_int8", first.largest, &[], |m_largest| {
                    update::<f32, _>("adamw_int8", second.largest, &[], |v_largest| {
                        change_bytes(first.codes, |m_codes| {
                            change_bytes(second.codes, |v_codes| {
                                let [m, v] = [(m_codes, m_largest), (v_codes, v_largest)];
                                apply(p, g, [m, v].map(|(codes, largest)| Blocks { codes, largest }), width, step);
                            })
                        })?
                    })
                })
            })
        })
    })
}

/// Some blocks of a moment.
struct Blocks<'a> {
    codes: &'a mut [u8],
    largest: &'a mut [f32],
}

fn apply<T: Element, G: Element>(p: &mut [T], g: &[G], [m, v]: [Blocks; 2], width: usize, step: Step) {
    let (elements, blocks) = (p.len(), p.len().div_ceil(BLOCK));
    let part = rows_per_part(blocks, BLOCK);
    let p = Shared::new(p);
    let [m, v] = [m, v].map(|of| (Shared::new(of.codes), Shared::new(of.largest)));
    for_each_part(blocks.div_ceil(part), |i| {
        let (first, count) = (i * part, part.min(blocks - i * part));
        let (start, end) = (first * BLOCK, ((first + count) * BLOCK).min(elements));
        // SAFETY: parts are disjoint ranges of blocks.
        let p = unsafe { p.slice(start, end - start) };
        // SAFETY: as above.
        let [m, v] = [&m, &v].map(|(codes, largest)| unsafe {
            Blocks { codes: codes.slice(start, end - start), largest: largest.slice(first, count) }
        });
        apply_blocks(p, &g[start..end], m, v, start, width, step);
    });
}

impl Blocks<'_> {
    /// The values of block `number`.
    #[inline(always)]
    fn values(&self, number: usize, map: &Map) -> [f32; BLOCK] {
        let mut values = [0.0; BLOCK];
        let codes = self.codes.chunks(BLOCK).nth(number).unwrap_or_default();
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = map.numbers[usize::from(code)] * self.largest[number];
        }
        values
    }

    /// Replaces the values of block `number`.
    #[inline(always)]
    fn set(&mut self, number: usize, values: &[f32; BLOCK], map: &Map) {
        let Some(codes) = self.codes.chunks_mut(BLOCK).nth(number) else { return };
        let values = &values[..codes.len()];
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        self.largest[number] = largest;
        let factor = 1.0 / largest.max(1e-38);
        for (code, value) in codes.iter_mut().zip(values) {
            *code = map.nearest((value * factor).clamp(-1.0, 1.0));
        }
    }
}

vectorized! {
    /// Blocks from element `start` of the parameter on.
    fn apply_blocks<T: Element, G: Element>(
        p: &mut [T],
        g: &[G],
        m: Blocks,
        v: Blocks,
        start: usize,
        width: usize,
        step: Step,
    ) {
        let (mut m, mut v) = (m, v);
        let is_rounded = size_of::<T>() < size_of::<f32>();
        let (m_map, v_map) = (signed(), unsigned());
        for (number, (p, g)) in p.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
            let (mut m_values, mut v_values) = (m.values(number, m_map), v.values(number, v_map));
            let mut values = [0.0; BLOCK];
            let items = values.iter_mut().zip(p.iter().zip(g)).zip(m_values.iter_mut().zip(&mut v_values));
            for ((value, (p, g)), (m, v)) in items {
                *value = moved(p.to_f32(), g.to_f32(), m, v, &step);
            }
            let first = start + number * BLOCK;
            for (i, (p, value)) in p.iter_mut().zip(values).enumerate() {
                let (row, channel) = ((first + i) / width, (first + i) % width);
                let noise = if is_rounded { step.rounding.row(step.first_row + row) } else { None };
                *p = match noise {
                    None => T::from_f32(value),
                    Some(key) => T::from_f32_stochastic(value, hash(key, channel as u32)),
                };
            }
            m.set(number, &m_values, m_map);
            v.set(number, &v_values, v_map);
        }
    }
}
