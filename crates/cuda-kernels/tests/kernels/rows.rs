//! Embeddings, gathered rows, the relative-position bias.

use candle_core::{DType, Device, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::RelativePosition;

use crate::card::{Buffer, assert_close, in_every_schedule, launch, numbers, suffix, tolerance};

fn ids(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

#[test]
fn rows_are_gathered_and_put_back() {
    let ids = ids(&[3, 0, 6, 1]);
    // In one turn of the threads and in two, one by one and by fours.
    for width in [5, 37, 72, 200] {
        for (from, to) in DTYPES.into_iter().flat_map(|from| DTYPES.map(|to| (from, to))) {
            let table = numbers(1, &[7, width], from);
            let what = format!("{width} {from:?} {to:?}");
            let got = in_every_schedule(&what, |schedule| {
                let (mut ids, mut table, mut rows) =
                    (Buffer::copy_of(&ids), Buffer::copy_of(&table), Buffer::new(&[4, width], to));
                let arguments = [ids.pointer(), table.pointer(), rows.pointer(), Argument::from_value(width as i32)];
                launch(&format!("gather_{}_{}", suffix(from), suffix(to)), [4, 1, 1], 32, 0, &arguments, schedule);
                vec![rows]
            });
            let expected = t5_ops::embedding(&ids, &table, to).unwrap();
            assert_close(&what, &got[0], &expected, 0.0);
            if from != to {
                continue;
            }
            let rows = numbers(2, &[4, width], from);
            let got = in_every_schedule(&what, |schedule| {
                let (mut ids, mut table, mut rows) =
                    (Buffer::copy_of(&ids), Buffer::copy_of(&table), Buffer::copy_of(&rows));
                let arguments = [ids.pointer(), rows.pointer(), table.pointer(), Argument::from_value(width as i32)];
                launch(&format!("scatter_{}", suffix(from)), [4, 1, 1], 32, 0, &arguments, schedule);
                vec![table]
            });
            for (i, id) in [3, 0, 6, 1].into_iter().enumerate() {
                assert_close(&what, &got[0].get(id).unwrap(), &rows.get(i).unwrap(), 0.0);
            }
            assert_close(&what, &got[0].get(2).unwrap(), &table.get(2).unwrap(), 0.0);
        }
    }
}

/// Fails unless `scatter_add` adds these rows, whose number is not a multiple of those that a block or a thread works on.
fn assert_rows_are_added(values: &[u32]) {
    let (count, rows) = (values.len(), *values.iter().max().unwrap() as usize + 1);
    let ids = ids(values);
    // Columns in one turn of the threads and in two, one by one and by fours.
    for width in [5, 70, 72, 264] {
        for dtype in DTYPES {
            let (dy, dtable) = (numbers(1, &[count, width], dtype), numbers(2, &[rows, width], DType::F32));
            let what = format!("{count} of {rows}, {width} {dtype:?}");
            let got = in_every_schedule(&what, |schedule| {
                let (mut ids, mut dy, mut dtable) =
                    (Buffer::copy_of(&ids), Buffer::copy_of(&dy), Buffer::copy_of(&dtable));
                let mut order = Buffer::new(&[2, count], DType::U32);
                let blocks = count.div_ceil(32);
                let sizes = [count, width].map(|n| Argument::from_value(n as i32));
                let arguments = [ids.pointer(), order.pointer(), sizes[0].clone()];
                launch("order_by_id", [blocks, 1, 1], 64, 2 * (128 + 32) * 4, &arguments, schedule);
                let arguments = [&[order.pointer(), dy.pointer(), dtable.pointer()], &sizes[..]].concat();
                launch(&format!("scatter_add_{}", suffix(dtype)), [blocks, 2, 1], 32, 0, &arguments, schedule);
                vec![dtable, order]
            });
            let mut order: Vec<u32> = (0..count as u32).collect();
            order.sort_by_key(|&row| values[row as usize]);
            let sorted = order.iter().map(|&row| values[row as usize]).collect();
            assert_eq!(got[1].to_vec2::<u32>().unwrap(), [order, sorted]);
            t5_ops::embedding_backward(&ids, &dy, &dtable).unwrap();
            assert_close(&what, &got[0], &dtable, 0.0);
        }
    }
}

#[test]
fn the_gradient_of_an_embedding_adds_rows_in_their_order() {
    // Ids that repeat nearby, in further blocks and further than one block reads at a time, and once. Staged ids before and after a row's.
    let values: Vec<u32> = (0..597).map(|i| [3, 0, 3, 6, 9 - (i % 4), 10 + i][i as usize % 6]).collect();
    assert_rows_are_added(&values);
    // Each id three times: some begin with the last row of a block.
    let values: Vec<u32> = (0..597).map(|i| i * 200 % 597 / 3).collect();
    assert_rows_are_added(&values);
}

#[test]
fn the_relative_position_bias_and_its_gradient_are_those_of_the_cpu() {
    let position = RelativePosition { buckets: 8, max_distance: 20, bidirectional: true };
    let (queries, keys, heads) = (9, 14, 3);
    let offsets = queries + keys - 1;
    let buckets: Vec<u32> =
        (0..offsets as i64).map(|offset| position.bucket(offset - queries as i64 + 1) as u32).collect();
    let buckets = ids(&buckets);
    for dtype in DTYPES {
        let table = numbers(1, &[8, heads], dtype);
        let got = in_every_schedule("bias", |schedule| {
            let (mut table, mut buckets) = (Buffer::copy_of(&table), Buffer::copy_of(&buckets));
            let mut bias = Buffer::new(&[heads, offsets], DType::F32);
            let sizes = [heads, offsets].map(|n| Argument::from_value(n as i32));
            let arguments = [&[table.pointer(), buckets.pointer(), bias.pointer()], &sizes[..]].concat();
            launch(&format!("relative_bias_{}", suffix(dtype)), [2, 1, 1], 64, 0, &arguments, schedule);
            vec![bias]
        });
        let expected = t5_ops::relative_bias(&table, &position, queries, keys, 0).unwrap();
        assert_close("bias", &got[0], &expected, 0.0);
    }
    let (dbias, dtable) = (numbers(2, &[heads, offsets], DType::F32), numbers(3, &[8, heads], DType::F32));
    let got = in_every_schedule("dtable", |schedule| {
        let (mut dbias, mut buckets, mut dtable) =
            (Buffer::copy_of(&dbias), Buffer::copy_of(&buckets), Buffer::copy_of(&dtable));
        let sizes = [8, heads, offsets].map(|n| Argument::from_value(n as i32));
        let arguments = [&[dbias.pointer(), buckets.pointer(), dtable.pointer()], &sizes[..]].concat();
        launch("relative_bias_backward", [1, 1, 1], 32, 0, &arguments, schedule);
        vec![dtable]
    });
    t5_ops::relative_bias_backward(&dbias, &position, queries, keys, 0, &dtable).unwrap();
    assert_close("dtable", &got[0], &dtable, tolerance(DType::F32));
}
