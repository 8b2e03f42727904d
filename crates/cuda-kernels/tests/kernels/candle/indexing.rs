//! Elements by index.

use candle_core::{DType, Device, Tensor};

use super::{Given, INTEGERS, View, assert_same, dtypes, elements, numbers, run, size, threads_for};
use crate::card::Buffer;

const SHAPE: [usize; 3] = [3, 5, 7];

/// Ids below `count` in this shape, some of them candle's index for no element.
fn ids(seed: u64, shape: &[usize], count: usize, dtype: DType) -> Tensor {
    let none = match dtype {
        DType::U8 => i64::from(u8::MAX),
        DType::U32 => i64::from(u32::MAX),
        _ => i64::MAX,
    };
    let random = numbers(seed, shape, DType::F64).flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let id = |(i, x): (usize, f64)| if i % 6 == 4 { none } else { ((x + 1.0) / 2.0 * count as f64) as i64 };
    let values: Vec<i64> = random.into_iter().enumerate().map(id).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Elements before a dimension, and after it.
fn sides(shape: &[usize], dim: usize) -> [usize; 2] {
    [shape[..dim].iter().product(), shape[dim + 1..].iter().product()]
}

fn with_size(shape: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[dim] = size;
    shape
}

/// Launches `INDEX_SELECT` of these ids as candle does.
fn index_select(from: &View, ids: &View, dim: usize) -> Tensor {
    let (shape, dtype) = (from.view.dims(), from.view.dtype());
    let ([left, right], count) = (sides(shape, dim), ids.view.elem_count());
    let elements = left * count * right;
    let head = [size(elements), size(1), View::layout_at_all(&[ids])];
    let tensors = [Given::View(ids), Given::View(from), Given::Result(0)];
    let sizes = [left, shape[dim], count, right].map(size);
    let given: Vec<Given> = head.into_iter().chain(tensors).chain(sizes).collect();
    let name = format!("is_{}_{}", ids.view.dtype().as_str(), dtype.as_str());
    run(&name, threads_for(elements), &given, || Buffer::new(&with_size(shape, dim, count), dtype))
}

/// Launches `GATHER` as candle does.
fn gather(from: &View, ids: &View, dim: usize) -> Tensor {
    let (shape, dtype) = (from.view.dims(), from.view.dtype());
    let ([left, right], count) = (sides(shape, dim), ids.view.elem_count());
    let tensors = [Given::View(ids), Given::View(from), Given::Result(0)];
    let sizes = [left, shape[dim], ids.view.dims()[dim], right].map(size);
    let given: Vec<Given> = [size(count)].into_iter().chain(tensors).chain(sizes).collect();
    let name = format!("gather_{}_{}", ids.view.dtype().as_str(), dtype.as_str());
    run(&name, threads_for(count), &given, || Buffer::new(ids.view.dims(), dtype))
}

/// Launches a kernel that changes `to` in place as candle does.
fn update(kernel: &str, to: &Tensor, ids: &Tensor, from: &Tensor, dim: usize) -> Tensor {
    let [left, right] = sides(to.dims(), dim);
    let [ids, from] = [ids, from].map(View::contiguous);
    let mut given = vec![Given::View(&ids)];
    if kernel == "ia" {
        given.push(size(ids.view.elem_count()));
    }
    given.extend([Given::View(&from), Given::Result(0)]);
    given.extend([left, from.view.dims()[dim], to.dims()[dim], right].map(size));
    let name = format!("{kernel}_{}_{}", ids.view.dtype().as_str(), to.dtype().as_str());
    run(&name, threads_for(left * right), &given, || Buffer::copy_of(to))
}

#[test]
fn elements_are_taken_by_number_as_on_the_cpu() {
    for dtype in dtypes() {
        let from = elements(1, &SHAPE, dtype);
        let wide = Tensor::cat(&[&elements(2, &SHAPE, dtype), &from], 0).unwrap();
        // The second half of a storage.
        for from in [View::contiguous(&from), View { view: wide.narrow(0, 3, 3).unwrap(), storage: wide }] {
            for id in INTEGERS {
                for (dim, size) in SHAPE.into_iter().enumerate() {
                    let of_one_dimension = ids(3, &[11], size, id);
                    // Ids that are not contiguous: a column of two.
                    let columns = ids(4, &[11, 2], size, id);
                    let column = View { view: columns.narrow(1, 1, 1).unwrap().squeeze(1).unwrap(), storage: columns };
                    for ids in [View::contiguous(&of_one_dimension), column] {
                        let expected = from.view.index_select(&ids.view, dim).unwrap();
                        assert_same("index_select", &index_select(&from, &ids, dim), &expected, 0.0);
                    }
                    let of_each = View::contiguous(&ids(5, &with_size(&SHAPE, dim, 4), size, id));
                    let expected = from.view.gather(&of_each.view, dim).unwrap();
                    assert_same("gather", &gather(&from, &of_each, dim), &expected, 0.0);
                }
            }
        }
    }
}

#[test]
fn elements_are_put_and_added_by_number_as_on_the_cpu() {
    for dtype in dtypes() {
        let to = elements(6, &SHAPE, dtype);
        for id in INTEGERS {
            for (dim, size) in SHAPE.into_iter().enumerate() {
                // More elements than the dimension has: some are added to one element.
                let shape = with_size(&SHAPE, dim, 9);
                let from = elements(7, &shape, dtype);
                let one = ids(8, &[9], size, id);
                let expected = to.index_add(&one, &from, dim).unwrap();
                assert_same("index_add", &update("ia", &to, &one, &from, dim), &expected, 0.0);
                let of_each = ids(9, &shape, size, id);
                let expected = to.scatter_add(&of_each, &from, dim).unwrap();
                assert_same("scatter_add", &update("sa", &to, &of_each, &from, dim), &expected, 0.0);
                let expected = to.scatter(&of_each, &from, dim).unwrap();
                assert_same("scatter", &update("s", &to, &of_each, &from, dim), &expected, 0.0);
            }
        }
    }
}

#[test]
fn a_number_that_no_element_has_gives_zero_and_changes_nothing() {
    for dtype in dtypes() {
        let behind = SHAPE[1] as i64;
        let near = [(DType::U8, behind), (DType::U32, behind), (DType::I64, behind), (DType::I64, -3)];
        let far = [(DType::U8, 100), (DType::U32, 1 << 30), (DType::I64, 1 << 60)];
        for (id, outside) in near.into_iter().chain(far) {
            let ids = |shape: &[usize]| {
                let values = vec![outside; shape.iter().product()];
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(id).unwrap()
            };
            let (t, zeros) = (elements(10, &SHAPE, dtype), Tensor::zeros(&SHAPE, dtype, &Device::Cpu).unwrap());
            let [from, one, of_each] = [&t, &ids(&[5]), &ids(&SHAPE)].map(View::contiguous);
            assert_same("index_select", &index_select(&from, &one, 1), &zeros, 0.0);
            assert_same("gather", &gather(&from, &of_each, 1), &zeros, 0.0);
            for (kernel, ids) in [("ia", &one), ("sa", &of_each), ("s", &of_each)] {
                assert_same(kernel, &update(kernel, &t, &ids.view, &t, 1), &t, 0.0);
            }
        }
    }
}

#[test]
fn a_number_of_a_table_of_256_rows_is_none_only_if_it_is_the_last_u8() {
    let table = Tensor::arange(0u32, 256, &Device::Cpu).unwrap();
    let all = Tensor::arange(0u32, 256, &Device::Cpu).unwrap();
    for id in INTEGERS {
        let [from, ids] = [&table, &all.to_dtype(id).unwrap()].map(View::contiguous);
        let expected = table.index_select(&ids.view, 0).unwrap();
        let last: u32 = expected.get(255).unwrap().to_scalar().unwrap();
        assert_eq!(last, if id == DType::U8 { 0 } else { 255 });
        assert_same("index_select", &index_select(&from, &ids, 0), &expected, 0.0);
    }
}
