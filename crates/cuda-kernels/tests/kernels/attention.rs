//! Attention and its backward, with tensor cores and without.

use candle_core::{DType, Device, Tensor};
use cuda_kernels::emulation::Argument;
use t5_ops::{Attended, Attention, Dropout, Mask as Seen};

use crate::card::{Buffer, assert_close, in_every_schedule, launch, null, numbers};
use crate::dropout::Mask;

/// The struct as the kernels define it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shape {
    pub batches: [i64; 3],
    pub rows: [i32; 3],
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub head_size: i32,
    pub is_causal: i32,
}

/// The kernels of a case.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// For f32, and heads of up to 64.
    Narrow,
    Plain(DType),
    /// A block's own rows are not copied.
    Lean,
    TensorCores,
}

impl Kind {
    fn dtype(self) -> DType {
        match self {
            Kind::Plain(dtype) => dtype,
            Kind::Narrow | Kind::Lean => DType::F32,
            Kind::TensorCores => DType::BF16,
        }
    }

    fn suffix(self, head_size: usize) -> String {
        match self {
            Kind::Plain(dtype) => crate::card::suffix(dtype).to_owned(),
            Kind::Narrow => "narrow_f32".to_owned(),
            Kind::Lean => "lean_f32".to_owned(),
            Kind::TensorCores => head_size.to_string(),
        }
    }

    /// Rows of a block: of the forward, and of the backward.
    fn tiles(self) -> (usize, usize) {
        match self {
            Kind::TensorCores | Kind::Narrow => (64, 64),
            Kind::Plain(_) | Kind::Lean => (32, 32),
        }
    }

    /// Bytes of shared memory: of the forward, of the backward by keys, and of the backward by queries.
    fn shared(self, head_size: usize) -> [usize; 3] {
        match self {
            Kind::Narrow | Kind::Plain(_) | Kind::Lean => {
                let (rows, _) = self.tiles();
                let row = if self == Kind::Narrow { 68 } else { (head_size.div_ceil(4) | 1) * 4 };
                let own = if self == Kind::Lean { 0 } else { rows * row };
                let backward = 4 * (128 + 64 * row + rows * 40 + rows + 32 + 2 * own);
                [4 * (64 * row + rows * 40 + 2 * rows + 32 + own), backward, backward]
            }
            Kind::TensorCores => {
                let row = 2 * head_size;
                let backward = (128 + 128) * row;
                [(64 + 256) * row + 1024, backward + 4 * (512 + 2 * 192 + 8 * 128), backward + 4 * 2 * 96]
            }
        }
    }
}

struct Case<'a> {
    kind: Kind,
    queries: usize,
    keys: usize,
    heads: usize,
    head_size: usize,
    lengths: &'a [usize],
    has_bias: bool,
    is_causal: bool,
    probability: f32,
    /// Queries, keys and values are columns of one tensor (B, T, 3*H*K), as one product gives them.
    in_one: bool,
}

impl Default for Case<'_> {
    fn default() -> Self {
        Case {
            kind: Kind::TensorCores,
            queries: 5,
            keys: 5,
            heads: 1,
            head_size: 32,
            lengths: &[5],
            has_bias: false,
            is_causal: false,
            probability: 0.0,
            in_one: false,
        }
    }
}

const SAMPLES: [u32; 3] = [5, 40, 6];

impl Case<'_> {
    fn what(&self) -> String {
        let kind = match self.kind {
            Kind::Narrow => "narrow".to_owned(),
            Kind::Plain(dtype) => format!("plain {dtype:?}"),
            Kind::Lean => "lean".to_owned(),
            Kind::TensorCores => "tensor cores".to_owned(),
        };
        format!(
            "{kind}, T {} S {} H {} K {}, lengths {:?}, bias {}, causal {}, dropout {}, in one {}",
            self.queries,
            self.keys,
            self.heads,
            self.head_size,
            self.lengths,
            self.has_bias,
            self.is_causal,
            self.probability,
            self.in_one
        )
    }

    /// Runs the forward and the backward, and compares both with the CPU's.
    #[track_caller]
    fn check(&self) {
        let (what, dtype, batch) = (self.what(), self.kind.dtype(), self.lengths.len());
        let (t, s, heads, size) = (self.queries, self.keys, self.heads, self.head_size);
        let width = heads * size;
        // Scores with a standard deviation of 2.
        let factor = (6.0 / (size as f64).sqrt()).sqrt();
        let wide =
            |seed, shape: &[usize]| (numbers(seed, shape, DType::F32) * factor).unwrap().to_dtype(dtype).unwrap();
        let q = wide(1, &[batch, t, width]);
        let k = wide(2, &[batch, s, width]);
        let v = numbers(3, &[batch, s, width], dtype);
        let dout = numbers(4, &[batch, t, width], dtype);
        let bias = numbers(5, &[heads, t + s - 1], DType::F32);
        let dbias = numbers(6, &[heads, t + s - 1], DType::F32);
        let dropout = Dropout { probability: self.probability, seed: 9, step: 4, site: 2, samples: &SAMPLES[..batch] };
        let dropout = (self.probability > 0.0).then_some(dropout);
        let mask = Seen::causal_if(self.is_causal);
        let a =
            Attention { bias: self.has_bias.then_some(&bias), mask, dropout, ..Attention::new(heads, self.lengths) };
        let (out, lse) = t5_ops::attention(&q, &k, &v, &a).unwrap();
        let expected_dbias = dbias.copy().unwrap();
        let of = Attended { q: &q, k: &k, v: &v, out: &out, lse: &lse };
        let to = self.has_bias.then_some(&expected_dbias);
        let (dq, dk, dv) = t5_ops::attention_backward(&of, &dout, &a, to).unwrap();

        let one = self.in_one.then(|| Tensor::cat(&[&q, &k, &v], 2).unwrap());
        let row = if self.in_one { 3 * width } else { width };
        let shape = Shape {
            batches: [t * row, s * row, s * row].map(|n| n as i64),
            rows: [row as i32; 3],
            queries: t as i32,
            keys: s as i32,
            heads: heads as i32,
            head_size: size as i32,
            is_causal: i32::from(self.is_causal),
        };
        let step = width * dtype.size_in_bytes();
        let (suffix, shared) = (self.kind.suffix(size), self.kind.shared(size));
        let (rows_forward, rows_backward) = self.kind.tiles();
        let got = in_every_schedule(&what, |schedule| {
            let lengths: Vec<u32> = self.lengths.iter().map(|&n| n as u32).collect();
            let mut lengths = Buffer::copy_of(&Tensor::new(lengths.as_slice(), &Device::Cpu).unwrap());
            let mut samples = Buffer::copy_of(&Tensor::new(&SAMPLES, &Device::Cpu).unwrap());
            let mut bias = self.has_bias.then(|| Buffer::copy_of(&bias));
            let mut dbias = Buffer::copy_of(&dbias);
            let mut inputs = match &one {
                Some(one) => vec![Buffer::copy_of(one)],
                None => vec![Buffer::copy_of(&q), Buffer::copy_of(&k), Buffer::copy_of(&v)],
            };
            let mut results = match &one {
                Some(one) => vec![Buffer::new(one.dims(), dtype)],
                None => vec![Buffer::new(q.dims(), dtype), Buffer::new(k.dims(), dtype), Buffer::new(v.dims(), dtype)],
            };
            let pointers = |buffers: &mut Vec<Buffer>| match buffers.as_mut_slice() {
                [one] => [0, 1, 2].map(|i| one.pointer_at(i * step)),
                [q, k, v] => [q.pointer(), k.pointer(), v.pointer()],
                _ => unreachable!("one buffer or three"),
            };
            let [q, k, v] = pointers(&mut inputs);
            let [dq, dk, dv] = pointers(&mut results);
            let mut new_out = Buffer::new(out.dims(), dtype);
            let mut new_lse = Buffer::new(lse.dims(), DType::F32);
            let common = [
                bias.as_mut().map_or_else(null, Buffer::pointer),
                lengths.pointer(),
                Argument::from_value(Mask::new(dropout.as_ref())),
                samples.pointer(),
                Argument::from_value(shape),
            ];
            let [bias, lengths, mask, samples, shape] = &common;
            let grid = |rows: usize, tile: usize| {
                let tiles = rows.div_ceil(tile);
                if self.is_causal { [batch * heads, tiles, 1] } else { [tiles * batch, heads, 1] }
            };
            let arguments = [&q, &k, &v, bias, lengths, mask, samples].map(Clone::clone).into_iter();
            let arguments: Vec<Argument> =
                arguments.chain([new_out.pointer(), new_lse.pointer(), shape.clone()]).collect();
            launch(&format!("attention_forward_{suffix}"), grid(t, rows_forward), 128, shared[0], &arguments, schedule);

            // The CPU's, so that both backward passes belong to one forward.
            let (mut out, mut lse, mut dout) = (Buffer::copy_of(&out), Buffer::copy_of(&lse), Buffer::copy_of(&dout));
            let mut delta = Buffer::new(&[batch, heads, t], DType::F32);
            let sizes = [batch, t, heads, size].map(|n| Argument::from_value(n as i32));
            let arguments: Vec<Argument> =
                [out.pointer(), dout.pointer(), delta.pointer()].into_iter().chain(sizes).collect();
            let name = format!("attention_delta_{}", crate::card::suffix(dtype));
            launch(&name, [(batch * t * heads).div_ceil(32), 1, 1], 128, 0, &arguments, schedule);

            let parts = s.div_ceil(rows_backward);
            let mut partial = Buffer::new(&[batch, heads, parts, t + rows_backward - 1], DType::F32);
            let of = [q, k, v, dout.pointer(), bias.clone(), lse.pointer(), delta.pointer()];
            let of: Vec<Argument> = of.into_iter().chain([lengths, mask, samples].map(Clone::clone)).collect();
            let partial_sums = if self.has_bias { partial.pointer() } else { null() };
            let arguments: Vec<Argument> = of.iter().cloned().chain([dk, dv, partial_sums, shape.clone()]).collect();
            let name = format!("attention_backward_keys_{suffix}");
            launch(&name, grid(s, rows_backward), 128, shared[1], &arguments, schedule);
            let arguments: Vec<Argument> = of.iter().cloned().chain([dq, shape.clone()]).collect();
            let name = format!("attention_backward_queries_{suffix}");
            launch(&name, grid(t, rows_backward), 128, shared[2], &arguments, schedule);
            if self.has_bias {
                let sizes = [batch, heads, t, s, rows_backward].map(|n| Argument::from_value(n as i32));
                let arguments: Vec<Argument> = [partial.pointer(), dbias.pointer()].into_iter().chain(sizes).collect();
                let blocks = heads * (t + s - 1).div_ceil(32);
                let shared = 64 * 16 * size_of::<f32>();
                launch("attention_add_bias_gradient", [blocks, 1, 1], 64, shared, &arguments, schedule);
            }
            let mut buffers = vec![new_out, new_lse, dbias];
            buffers.append(&mut results);
            buffers
        });
        let (within, within_sums) = if dtype == DType::BF16 { (1.2e-2, 1.2e-2) } else { (4e-6, 1e-5) };
        assert_close(&format!("{what}: out"), &got[0], &out, within);
        assert_close(&format!("{what}: lse"), &got[1], &lse, if dtype == DType::BF16 { 1e-5 } else { 1e-6 });
        if self.has_bias {
            assert_close(&format!("{what}: dbias"), &got[2], &expected_dbias, within_sums);
        }
        let gradients = match &got[3..] {
            [one] => [0, 1, 2].map(|i| one.narrow(2, i * width, width).unwrap()),
            [q, k, v] => [q.clone(), k.clone(), v.clone()],
            _ => unreachable!("one buffer or three"),
        };
        for (name, got, expected) in
            [("dq", &gradients[0], &dq), ("dk", &gradients[1], &dk), ("dv", &gradients[2], &dv)]
        {
            assert_close(&format!("{what}: {name}"), got, expected, within_sums);
        }
    }
}

#[test]
fn tensor_cores_agree_with_the_cpu_for_each_head_size() {
    for head_size in [32, 64, 128] {
        let (queries, keys) = if head_size == 64 { (70, 131) } else { (37, 66) };
        Case { queries, keys, head_size, lengths: &[keys, 65], has_bias: true, probability: 0.1, ..Case::default() }
            .check();
    }
}

#[test]
fn masks_and_biases_of_tensor_cores_are_those_of_the_cpu() {
    let cases = [
        Case { queries: 67, keys: 67, lengths: &[67], has_bias: true, is_causal: true, ..Case::default() },
        // Fewer queries than keys, and more: some queries then see no key.
        Case {
            queries: 9,
            keys: 75,
            lengths: &[75, 0, 70],
            has_bias: true,
            is_causal: true,
            heads: 2,
            ..Case::default()
        },
        Case { queries: 75, keys: 34, lengths: &[34, 7], is_causal: true, probability: 0.1, ..Case::default() },
        Case { queries: 1, keys: 129, lengths: &[129, 100], has_bias: true, ..Case::default() },
        // More queries than the backward by keys reads the data of at once; it may begin at any tile of them.
        Case {
            queries: 200,
            keys: 200,
            lengths: &[200],
            has_bias: true,
            is_causal: true,
            probability: 0.1,
            ..Case::default()
        },
        Case { queries: 270, keys: 40, lengths: &[40], has_bias: true, probability: 0.1, ..Case::default() },
        Case {
            queries: 65,
            keys: 65,
            lengths: &[64, 65],
            has_bias: true,
            probability: 0.1,
            heads: 2,
            in_one: true,
            ..Case::default()
        },
    ];
    for case in cases {
        case.check();
    }
}

#[test]
fn attention_without_tensor_cores_is_that_of_the_cpu() {
    for kind in [Kind::Narrow, Kind::Plain(DType::F32), Kind::Plain(DType::BF16), Kind::Lean] {
        let largest = if kind == Kind::Narrow { 64 } else { 128 };
        let cases = [
            Case {
                kind,
                queries: 35,
                keys: 66,
                lengths: &[66, 33],
                heads: 2,
                head_size: 6,
                has_bias: true,
                probability: 0.1,
                ..Case::default()
            },
            Case {
                kind,
                queries: 67,
                keys: 67,
                lengths: &[67],
                head_size: 33,
                has_bias: true,
                is_causal: true,
                ..Case::default()
            },
            Case {
                kind,
                queries: 9,
                keys: 40,
                lengths: &[40, 0, 35],
                head_size: largest,
                is_causal: true,
                probability: 0.1,
                ..Case::default()
            },
            Case {
                kind,
                queries: 40,
                keys: 9,
                lengths: &[9, 4],
                head_size: 64,
                has_bias: true,
                is_causal: true,
                ..Case::default()
            },
            // Several blocks, and tiles that hide no key.
            Case {
                kind,
                queries: 130,
                keys: 101,
                lengths: &[101, 65],
                head_size: 64,
                has_bias: true,
                probability: 0.1,
                ..Case::default()
            },
        ];
        for case in cases {
            case.check();
        }
        Case {
            kind,
            queries: 33,
            keys: 33,
            lengths: &[32, 33],
            heads: 3,
            head_size: 8,
            has_bias: true,
            in_one: true,
            ..Case::default()
        }
        .check();
    }
}
