//! The measurement of a token's work: products of few rows, attention of single queries, and the operations of the smallest decoder.

use std::rc::Rc;

use candle_core::{DType, Tensor};
use t5::{ContinuousBatch, GenerateOptions, T5};
use t5_ops::{Attention, attention, linear};

use super::{Measured, OF_A_KIND, TOKENS, shortest};
use crate::answer_speed::{AnswerSpeed, FewRows, MEASURED_ROWS};
use crate::rehearsal::smallest;
use crate::rounding::significant;

/// Bytes of weights that exceed a card's caches.
const UNCACHED_BYTES: usize = 64 << 20;
/// Blocks, or tokens, that are timed together.
const TOGETHER: usize = 2;
/// Rows of the measured attention: each has one query.
const QUERIES: usize = 8;
/// Decoder blocks of the two models whose times give the time of a block.
const BLOCKS: [usize; 2] = [1, 4];
/// Sources that are answered together.
const SOURCES: usize = 8;
/// Tokens of each source.
const SOURCE_TOKENS: usize = 8;
/// The most tokens of an answer. The cache never grows beyond them.
const MAX_TOKENS: usize = 32;

impl Measured<'_> {
    /// The speed of answers.
    pub(super) fn answers(&self) -> candle_core::Result<AnswerSpeed> {
        let [one, more] = [self.token(BLOCKS[0], 1)?, self.token(BLOCKS[1], 1)?];
        let block = ((more - one) / (BLOCKS[1] - BLOCKS[0]) as f64).max(0.0);
        let source = (self.token(BLOCKS[1], SOURCES)? - more) / ((SOURCES - 1) * BLOCKS[1]) as f64;
        let ps = |seconds: f64| significant(seconds * 1e12);
        Ok(AnswerSpeed {
            f32_weights: self.of_few_rows(DType::F32)?,
            bf16_weights: self.of_few_rows(DType::BF16)?,
            query_ps: ps(self.query()?),
            block_ps: ps(block),
            source_ps: ps(source.max(0.0)),
            token_ps: ps((one - block * BLOCKS[0] as f64).max(0.0)),
        })
    }

    /// The products of a block with weights of this dtype.
    fn of_few_rows(&self, dtype: DType) -> candle_core::Result<FewRows> {
        let [one_row_ps, eight_rows_ps, most_rows_ps] =
            [0, 1, 2].map(|which| self.forward(MEASURED_ROWS[which], dtype));
        let ps = |seconds: candle_core::Result<f64>| seconds.map(|seconds| significant(seconds * 1e12));
        // More rows never take less time.
        let one_row_ps = ps(one_row_ps)?;
        let eight_rows_ps = ps(eight_rows_ps)?.max(one_row_ps);
        Ok(FewRows { one_row_ps, eight_rows_ps, most_rows_ps: ps(most_rows_ps)?.max(eight_rows_ps) })
    }

    /// Seconds for each element of a block's weights, in products of `rows` rows.
    fn forward(&self, rows: usize, dtype: DType) -> candle_core::Result<f64> {
        let operands = |n: usize, k: usize| -> candle_core::Result<(Tensor, Tensor)> {
            Ok((self.tensor(&[rows, k])?, self.parameter(&[n, k])?.to_dtype(dtype)?))
        };
        let (mut seconds, mut elements) = (0.0, 0.0);
        if self.sizes.from_memory {
            // Between two uses of a weight, a token reads all the others.
            for ((n, k), times) in self.weights() {
                let (x, weight) = operands(n * self.beside_each_other(n * k * dtype.size_in_bytes()), k)?;
                seconds += times * self.shortest(&[&weight], OF_A_KIND / 12, || linear(&x, &weight).map(drop))?;
                elements += times * weight.elem_count() as f64;
            }
            return Ok(seconds / elements);
        }
        // Products of small models are short. So whole blocks are timed, and threads are woken once, as for a token.
        let mut block = Vec::new();
        for ((n, k), times) in self.weights() {
            block.extend(vec![operands(n, k)?; times as usize]);
            elements += times * (n * k) as f64;
        }
        let products = || block.iter().try_for_each(|(x, weight)| linear(x, weight).map(drop));
        let seconds = self.shortest(&[], OF_A_KIND / 4, || (0..TOGETHER).try_for_each(|_| products()))?;
        Ok(seconds / (TOGETHER as f64 * elements))
    }

    /// The number of weights of `bytes` bytes that exceed a card's caches; one if the caches hold the model's weights.
    fn beside_each_other(&self, bytes: usize) -> usize {
        let is_large = self.sizes.from_memory && !self.device.is_cpu();
        if is_large { UNCACHED_BYTES.div_ceil(bytes) } else { 1 }
    }

    /// Seconds of a multiply-add of attention of one query a row.
    fn query(&self) -> candle_core::Result<f64> {
        let (heads, inner) = (self.sizes.heads, self.sizes.inner());
        let (query, keys) = ([QUERIES, 1, inner], [QUERIES, TOKENS, inner]);
        let [q, k, v] = [self.tensor(&query)?, self.tensor(&keys)?, self.tensor(&keys)?];
        let lengths = [TOKENS; QUERIES];
        let of = Attention::new(heads, &lengths);
        let seconds = self.shortest(&[&k, &v], OF_A_KIND / 4, || attention(&q, &k, &v, &of).map(drop))?;
        Ok(seconds / (2 * QUERIES * TOKENS * inner) as f64)
    }

    /// Seconds of a token of `sources` sources with the smallest model, which has `blocks` decoder blocks. Its products take almost no
    /// time.
    fn token(&self, blocks: usize, sources: usize) -> candle_core::Result<f64> {
        let config = t5::Config {
            num_decoder_layers: blocks,
            // No answer ends early.
            eos_token_ids: Vec::new(),
            ..smallest(&t5::Config::default())
        };
        let failed = |error: t5::Error| candle_core::Error::wrap(error);
        let model = Rc::new(T5::init(&config, 0, DType::F32, self.device).map_err(failed)?);
        let mut together = ContinuousBatch::new(model, self.dtype);
        let source: Vec<u32> = (2..2 + SOURCE_TOKENS as u32).collect();
        let options = GenerateOptions { max_new_tokens: MAX_TOKENS, ..GenerateOptions::default() };
        for key in 0..sources as u64 {
            together.join(key, &source, &options, &|| false).map_err(failed)?;
        }
        // The host waits for each token: it chooses the token, or the card sends it.
        let mut token = || together.step(&mut |_| false).map(drop).map_err(failed);
        let seconds = shortest(OF_A_KIND / 2, || (0..TOGETHER).try_for_each(|_| token()))?;
        Ok(seconds / TOGETHER as f64)
    }
}
