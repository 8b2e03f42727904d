//! The launches of kernels by `t5-ops`, and the most registers that each kernel may have.
//!
//! Widths are t5-base's: D 768, F 3072.

/// A launch of a kernel's blocks.
pub struct Launch {
    /// The head size, for attention's kernels.
    pub head_size: Option<u32>,
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
}

/// Sources of candle's kernels, which have hundreds of names: they have one row each, and candle launches them.
pub const CANDLES: [&str; 3] = ["elementwise", "indexing", "reduce"];

const HEAD_SIZES: [u32; 3] = [32, 64, 128];
/// The suffix of attention kernels for cards with less shared memory. These cards use them for the largest heads.
const LEAN: &str = "lean_f32";
/// The suffix of attention kernels in f32 for heads of up to 64.
const NARROW: &str = "narrow_f32";
const MODEL: u32 = 768;

/// Shared memory in bytes by the formulas of `crates/t5-ops/src/ops/attention/cuda.rs`: forward, backward by keys, backward by
/// queries.
fn shared_on_tensor_cores(head_size: u32) -> [u32; 3] {
    let tiles = (2 * 64 + 4 * 32) * 2 * head_size;
    [(64 + 4 * 64) * 2 * head_size + 2 * 128 * 4, tiles + 4 * (512 + 2 * 192 + 8 * 128), tiles + 4 * 2 * 96]
}

/// Shared memory of the kernels without tensor cores: for blocks of `rows` rows, a row stride of `row` numbers, and `own` numbers of
/// each operand.
fn shared_of_rows(rows: u32, row: u32, own: u32) -> [u32; 3] {
    let backward = 4 * (4 * 32 + 2 * 32 * row + 40 * rows + rows + 32 + 2 * own);
    [4 * (2 * 32 * row + 40 * rows + 2 * rows + 32 + own), backward, backward]
}

/// Shared memory for heads of up to 64.
fn shared_narrow() -> [u32; 3] {
    shared_of_rows(64, 64 + 4, 64 * (64 + 4))
}

/// Shared memory for any other heads.
fn shared_plain(head_size: u32) -> [u32; 3] {
    let row = (head_size.div_ceil(4) | 1) * 4;
    shared_of_rows(32, row, 32 * row)
}

/// Shared memory of the kernels that do not copy a block's own rows into it.
fn shared_lean(head_size: u32) -> [u32; 3] {
    shared_of_rows(32, (head_size.div_ceil(4) | 1) * 4, 0)
}

/// The attention kernels, in the order of the formulas.
const ATTENTION: [&str; 3] = ["attention_forward_", "attention_backward_keys_", "attention_backward_queries_"];

/// Kernels by the start of their names: threads per block, dynamic shared bytes, most registers. The first match counts.
///
/// With 40 registers a thread, 48 warps are resident on every card; with 48, 40 warps; with 80, 24. The kernels of the
/// updates have four loads of 16 bytes in flight.
const OTHERS: [(&str, u32, u32, u32); 37] = [
    ("attention_few_", 256, 8 * (64 + 2) * 4, 40),
    ("largest_", 1024, 32 * 8, 40),
    ("log_probabilities_", 1024, 32 * 8, 40),
    ("candidates_", 1024, 32 * 8, 40),
    ("append_", 256, 0, 40),
    ("copy_rows_", 256, 0, 40),
    ("attention_delta_", 256, 0, 80),
    ("attention_add_bias_gradient", 256, 256 * 16 * 4, 64),
    ("rms_norm_backward_", 192, (MODEL + 64) * 4, 80),
    ("rms_norm_", 256, 0, 40),
    ("add_partial_sums", 512, 512 * 16 * 4, 64),
    ("row_lengths", 256, 0, 40),
    ("dequantise_int8_", 256, 0, 40),
    ("dequantise_nf4_", 256, (16 + 256) * 4, 40),
    ("small_m_4_", 256, (16 + 256 + 4 * 512) * 4, 48),
    ("small_m_8_", 256, (16 + 256 + 8 * 512) * 4, 64),
    ("dropout_", 96, 4 * 8, 64),
    ("activation_backward_", 192, 4 * 8, 80),
    ("activation_", 192, 4 * 8, 64),
    ("cross_entropy_", 512, 32 * 4, 64),
    ("add_total", 512, 32 * 8, 40),
    ("square_sums", 256, 1024 * 8 + 8 * 32 * 4, 48),
    ("finish_square_sums", 256, 0, 40),
    ("total_square_sums", 256, 32 * 8, 40),
    ("adafactor_factors", 256, 32 * 8, 48),
    ("adafactor_squares", 256, 32 * 8, 48),
    ("adafactor_apply", 256, 128 * 8, 80),
    ("adamw", 256, 128 * 8, 80),
    ("narrow_each", 256, 0, 40),
    ("add_", 256, 0, 40),
    ("scaled_", 256, 0, 40),
    ("gather_", 192, 0, 40),
    ("order_by_id", 256, 8 * (128 + 32) * 4, 40),
    ("scatter_add_", 64, 0, 128),
    ("scatter_", 192, 0, 40),
    ("relative_bias_backward", 32, 0, 40),
    ("relative_bias_", 256, 0, 40),
];

/// Most registers of other kernels: candle's backend launches up to 1024 threads, which cannot have more.
const OF_CANDLE: u32 = 64;

/// Most registers of the attention kernels, by suffix: with 128, four blocks are resident; with 168, three; with 255, two.
const OF_ATTENTION: [(&str, u32); 9] = [
    ("forward_32", 128),
    ("forward_64", 168),
    ("forward_128", 255),
    ("keys_32", 168),
    ("keys_64", 168),
    ("keys_128", 255),
    ("queries_32", 128),
    (LEAN, 255),
    // Heads of 64 and 128, and the plain kernels.
    ("", 168),
];

/// Kernels that may have more registers at compute capability 12.0. With 48 registers, 40 of the 48 warps are resident. The third
/// kernel's shared memory allows one block there, whatever its number of registers.
pub const MORE_REGISTERS_AT: u32 = 120;
pub const MORE_REGISTERS: [(&str, u32); 3] =
    [("attention_few_bf16", 48), ("attention_few_f32", 48), ("attention_backward_queries_128", 176)];

/// Most registers of a kernel on a card of this compute capability.
pub fn most_registers_at(name: &str, capability: u32) -> u32 {
    let more = MORE_REGISTERS.iter().find(|(of, _)| capability == MORE_REGISTERS_AT && *of == name);
    more.map_or_else(|| most_registers(name), |more| more.1)
}

/// Most registers of a kernel, without [`MORE_REGISTERS`].
pub fn most_registers(name: &str) -> u32 {
    let of_attention = || OF_ATTENTION.iter().find(|(end, _)| name.ends_with(end)).map(|row| row.1);
    let of_others = || OTHERS.iter().find(|(start, ..)| name.starts_with(start)).map(|row| row.3);
    let most = if ATTENTION.iter().any(|start| name.starts_with(start)) { of_attention() } else { of_others() };
    most.unwrap_or(OF_CANDLE)
}

/// The launches of a kernel; empty if the table does not have it.
pub fn find(name: &str) -> Vec<Launch> {
    let Some((kind, suffix)) = ATTENTION.iter().enumerate().find_map(|(i, start)| Some((i, name.strip_prefix(start)?)))
    else {
        let row = OTHERS.iter().find(|(start, ..)| name.starts_with(start));
        return row.map(|&(_, threads, shared, _)| Launch { head_size: None, threads, shared }).into_iter().collect();
    };
    let launch =
        |head_size, shared: [u32; 3]| Launch { head_size: Some(head_size), threads: 128, shared: shared[kind] };
    match suffix.parse() {
        Ok(head_size) => vec![launch(head_size, shared_on_tensor_cores(head_size))],
        Err(_) if suffix == NARROW => vec![launch(64, shared_narrow())],
        Err(_) if suffix == LEAN => vec![launch(128, shared_lean(128))],
        Err(_) => HEAD_SIZES.iter().map(|&head_size| launch(head_size, shared_plain(head_size))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_has_the_shared_memory_that_its_launches_ask_for() {
        let path = crate::root().join("crates/t5-ops/src/ops/attention/cuda.rs");
        let launches = std::fs::read_to_string(path).expect("the launches are in the repository");
        for formula in [
            "const THREADS: u32 = 128;",
            "(64 + 4 * 64) * 2 * head_size + 2 * 128 * 4",
            "if self == Kind::Narrow { 64 + 4 } else { (head_size.div_ceil(4) | 1) * 4 }",
            "if self == Kind::Lean { 0 } else { self.rows() * row }",
            "4 * (2 * 32 * row + 40 * self.rows() + 2 * self.rows() + 32 + own)",
            "4 * (4 * 32 + 2 * 32 * row + 40 * self.rows() + self.rows() + 32 + 2 * own)",
            "(2 * 64 + 4 * 32) * 2 * head_size",
            "tiles + 4 * (512 + 2 * 192 + 8 * 128), tiles + 4 * 2 * 96",
        ] {
            assert!(launches.contains(formula), "the launches no longer say `{formula}`: change this table with them");
        }
        assert_eq!(shared_on_tensor_cores(64), [41_984, 40_448, 33_536]);
        assert_eq!(shared_narrow(), [45_696, 63_360, 63_360]);
        assert_eq!(shared_plain(64), [31_616, 40_704, 40_704]);
        assert_eq!(shared_lean(128), [39_296, 39_680, 39_680]);
    }

    #[test]
    fn a_kernel_has_the_first_row_that_fits_its_name() {
        let shape = |name| find(name).iter().map(|l| (l.head_size, l.threads, l.shared)).collect::<Vec<_>>();
        assert_eq!(shape("attention_backward_queries_64"), [(Some(64), 128, 33_536)]);
        assert_eq!(shape("attention_forward_f32").len(), 3);
        assert_eq!(shape("attention_forward_lean_f32"), [(Some(128), 128, 39_296)]);
        assert_eq!(shape("total_square_sums"), [(None, 256, 256)]);
        assert_eq!(shape("rms_norm_backward_f32_f32"), [(None, 192, 3_328)]);
        assert!(find("unknown").is_empty());
        assert_eq!(
            ["attention_backward_keys_128", "attention_forward_bf16", "badd_f32"].map(most_registers),
            [255, 168, 64]
        );
        assert_eq!([90, 120].map(|capability| most_registers_at("attention_few_f32", capability)), [40, 48]);
    }
}
