//! The bytes that an operation states for threads to keep are the bytes that they keep: counted by the allocator after calls with more and
//! more rows.
//!
//! The host alone: threads of a card keep nothing.

use candle_core::{DType, Device, Result, Tensor};
use heap::Allocator;
use t5_ops::{
    CrossEntropy, Kept, Needs, Path, linear, linear_backward_input, linear_backward_input_needs,
    linear_backward_weight, linear_backward_weight_needs, linear_cross_entropy_backward,
    linear_cross_entropy_backward_needs, linear_needs,
};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Widths of the model and of its feed-forward, and the vocabulary: of the preset tiny.
const TINY: (usize, usize, usize) = (128, 512, 4096);
/// The same for t5-small, except the vocabulary: operands of the gradient of a weight are packed in groups of panels.
const SMALL: (usize, usize, usize) = (512, 2048, 4096);

fn tensor(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Bytes that stay allocated after a call, and its needs.
fn calls((d, f, vocabulary): (usize, usize, usize), dtype: DType, rows: usize) -> Vec<(&'static str, u64, Needs)> {
    let (x, dy) = (tensor(&[rows, d], dtype), tensor(&[rows, f], dtype));
    let [w, dw, back] = [[f, d], [f, d], [d, f]].map(|shape| tensor(&shape, DType::F32));
    let [table, dtable] = [0, 1].map(|_| tensor(&[vocabulary, d], DType::F32));
    let (labels, chunk_rows) = (vec![3; rows], rows.min(256));
    let loss = CrossEntropy { logit_scale: 1.0, gradient_scale: 1.0, chunk_rows, ..CrossEntropy::default() };
    let (path, dtypes) = (Path::on_cpu(dtype), [dtype, DType::F32]);
    let stays = |call: &dyn Fn() -> Result<()>| {
        let before = heap::held().live;
        call().unwrap();
        (heap::held().live - before) as u64
    };
    vec![
        ("linear", stays(&|| linear(&x, &w).map(drop)), linear_needs(path, rows, (f, d), dtypes, 0)),
        (
            "linear_backward_input",
            stays(&|| linear_backward_input(&dy, &w, None).map(drop)),
            linear_backward_input_needs(path, rows, (f, d), dtypes, 0, false),
        ),
        (
            "linear_backward_weight",
            stays(&|| linear_backward_weight(&dy, &x, &dw, true)),
            linear_backward_weight_needs(path, rows, (f, d), dtypes),
        ),
        // The layer back to the first width: the larger operand is now the smaller one.
        (
            "linear_backward_weight, back",
            stays(&|| linear_backward_weight(&x, &dy, &back, true)),
            linear_backward_weight_needs(path, rows, (d, f), dtypes),
        ),
        (
            "linear_cross_entropy_backward",
            stays(&|| linear_cross_entropy_backward(&x, &table, &labels, &loss, Some((&dtable, true))).map(drop)),
            linear_cross_entropy_backward_needs(path, rows, (vocabulary, d), dtypes, &loss, true),
        ),
    ]
}

/// Buffers are whole pages, and several products leave several of them.
const OF_A_THREAD: u64 = 64 << 10;

#[test]
fn threads_keep_no_more_than_operations_state_and_at_least_half() {
    let (mut kept, mut stated) = (0, Kept::default());
    for (sizes, dtypes) in [(TINY, &[DType::F32, DType::BF16][..]), (SMALL, &[DType::F32])] {
        for &dtype in dtypes {
            for rows in [64, 256, 1024, 2048, 3000] {
                for (name, more, needs) in calls(sizes, dtype, rows) {
                    kept += more;
                    stated = stated.max(needs.kept);
                    let most = stated.total() + OF_A_THREAD * t5_ops::threads() as u64;
                    assert!(kept <= most, "{dtype:?}, {rows} rows, {name}: {kept} bytes are kept, {stated:?} stated");
                }
            }
            assert!(stated.total() <= 2 * kept, "{sizes:?} {dtype:?}: {kept} bytes are kept, {stated:?} stated");
        }
    }
    let before = heap::held().live as u64;
    t5_ops::release_kept();
    assert_eq!(before - heap::held().live as u64, kept, "all of it can be given back");
}
