//! Lower bounds of a kernel's time: the bytes that it has to move and its operations, at a card's published rates.
//!
//! Shapes are those of t5-base in bf16: 32 samples of 512 tokens, attention of the encoder. Bytes are counted once, as if caches
//! held all data that is read again. Integer operations (hashes of dropout) are not counted, and neither are attention's
//! exponentials.

/// B samples of T tokens.
const BATCH: u64 = 32;
const LENGTH: u64 = 512;
const TOKENS: u64 = BATCH * LENGTH;
const HEADS: u64 = 12;
const HEAD_SIZE: u64 = 64;
const MODEL: u64 = 768;
const FEED_FORWARD: u64 = 3072;
const VOCABULARY: u64 = 32_128;
const LAYERS: u64 = 12;
const BUCKETS: u64 = 32;

const BF16: u64 = 2;
const F32: u64 = 4;
const F64: u64 = 8;

/// From NVIDIA's data sheet of the H100 SXM: bytes per second, and operations per second without sparsity.
const MEMORY: f64 = 3.35e12;
const TENSOR_CORES: f64 = 989e12;
const F32_UNITS: f64 = 67e12;

/// One call of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    pub name: &'static str,
    pub read: u64,
    pub written: u64,
    /// Floating-point operations, and whether tensor cores perform them.
    pub operations: u64,
    pub is_on_tensor_cores: bool,
}

impl Work {
    /// Microseconds for the bytes, and for the operations.
    pub fn microseconds(&self) -> [f64; 2] {
        let rate = if self.is_on_tensor_cores { TENSOR_CORES } else { F32_UNITS };
        [(self.read + self.written) as f64 / MEMORY * 1e6, self.operations as f64 / rate * 1e6]
    }
}

/// Number of t5-base's parameters: the embedding; for each encoder layer, two norms, attention and feed-forward; for each decoder
/// layer, one attention and one norm more; the last norms and the relative-position biases.
const fn parameters() -> u64 {
    let attention = 4 * MODEL * HEADS * HEAD_SIZE;
    let feed_forward = 2 * MODEL * FEED_FORWARD;
    let encoder = LAYERS * (attention + feed_forward + 2 * MODEL);
    let decoder = LAYERS * (2 * attention + feed_forward + 3 * MODEL);
    VOCABULARY * MODEL + encoder + decoder + 2 * MODEL + 2 * BUCKETS * HEADS
}

/// The kernels that dominate a step's time.
pub fn works() -> Vec<Work> {
    let [attention, codes, others] = [of_attention(), of_codes(), of_rows()];
    attention.into_iter().chain(codes).chain(others).chain(of_updates()).collect()
}

fn of_attention() -> Vec<Work> {
    // Q, K, V, the result and their gradients: (B, T, H*K) each. Each query of a head has one statistic: (B, H, T).
    let (matrix, statistic) = (TOKENS * HEADS * HEAD_SIZE * BF16, TOKENS * HEADS * F32);
    let bias = HEADS * (2 * LENGTH - 1) * F32;
    // A product (T, K) by (K, T), or (T, T) by (T, K), for each head of each sample.
    let product = 2 * BATCH * HEADS * LENGTH * LENGTH * HEAD_SIZE;
    // Sums of the bias's gradient, a row for each block of 64 keys.
    let partial = BATCH * HEADS * LENGTH.div_ceil(64) * (LENGTH + 63) * F32;
    let work = |name, read, written, products| Work {
        name,
        read: read + bias,
        written,
        operations: products * product,
        is_on_tensor_cores: true,
    };
    vec![
        work("attention_forward_64", 3 * matrix, matrix + statistic, 2),
        work("attention_backward_keys_64", 4 * matrix + 2 * statistic, 2 * matrix + partial, 4),
        work("attention_backward_queries_64", 4 * matrix + 2 * statistic, matrix, 3),
    ]
}

/// The first weight of a feed-forward layer in codes: a product for each element, and for each block of NF4 a product and a sum.
fn of_codes() -> Vec<Work> {
    let n = MODEL * FEED_FORWARD;
    let blocks = n / 64;
    let work = |name, read, operations| Work { name, read, written: n * BF16, operations, is_on_tensor_cores: false };
    vec![
        work("dequantise_int8_bf16", n + FEED_FORWARD * F32, n),
        work("dequantise_nf4_bf16", n / 2 + blocks + (blocks.div_ceil(256) + 1) * F32, n + 2 * blocks),
    ]
}

/// Rows of activations: a square and its sum, two products; a product and a sum; a comparison and a product; the maximum, two
/// differences, two exponentials, their sum, a division and a product.
fn of_rows() -> Vec<Work> {
    let (model, feed_forward, logits) = (TOKENS * MODEL, TOKENS * FEED_FORWARD, TOKENS * VOCABULARY);
    let work = |name, read, written, operations| Work { name, read, written, operations, is_on_tensor_cores: false };
    vec![
        work("rms_norm_bf16_bf16", (model + MODEL) * BF16, model * BF16 + TOKENS * F32, 4 * model),
        work("dropout_bf16, with a residual", 2 * model * BF16, model * BF16, 2 * model),
        work("activation_bf16, ReLU without a gate", feed_forward * BF16, feed_forward * BF16, 2 * feed_forward),
        work("cross_entropy_bf16_bf16", (logits * BF16) + TOKENS * F32, logits * BF16 + TOKENS * F64, 8 * logits),
    ]
}

/// Updates of all parameters. The matrices count as one: the factors of rows and columns are negligible.
fn of_updates() -> Vec<Work> {
    let n = parameters();
    let work = |name, read, written, operations| Work {
        name,
        read: n * read,
        written: n * written,
        operations: n * operations,
        is_on_tensor_cores: false,
    };
    vec![
        work("square_sums, bf16", BF16, 0, 3),
        work("adafactor_squares, bf16", 2 * BF16, 0, 6),
        work("adafactor_apply, bf16", 2 * BF16, BF16, 5),
        work("adamw, bf16", 2 * BF16 + 2 * F32, BF16 + 2 * F32, 15),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(name: &str) -> Work {
        works().into_iter().find(|work| work.name.starts_with(name)).expect("it has a row")
    }

    #[test]
    fn the_parameters_are_those_of_t5_base() {
        assert_eq!(parameters(), 222_903_552);
    }

    #[test]
    fn bytes_and_operations_are_those_of_the_shapes() {
        let forward = work("attention_forward_64");
        // 3 and 1 matrices of 16,384 x 768 bf16, 49,104 bytes of bias, 196,608 statistics.
        assert_eq!(forward.read, 3 * 25_165_824 + 49_104);
        assert_eq!(forward.written, 25_165_824 + 786_432);
        // Two products of 2 * 512 * 512 * 64 operations for each of 384 heads.
        assert_eq!(forward.operations, 25_769_803_776);
        assert_eq!(work("attention_backward_keys_64").operations, 2 * forward.operations);
        assert_eq!(2 * work("attention_backward_queries_64").operations, 3 * forward.operations);
        assert_eq!(work("adamw").read + work("adamw").written, 22 * 222_903_552);
        assert_eq!(work("cross_entropy_").operations, 8 * 16_384 * 32_128);
    }

    #[test]
    fn a_bound_is_work_over_a_rate() {
        let [of_bytes, of_operations] = work("attention_forward_64").microseconds();
        assert!((of_bytes - 30.30).abs() < 0.01, "{of_bytes}");
        assert!((of_operations - 26.06).abs() < 0.01, "{of_operations}");
    }
}
