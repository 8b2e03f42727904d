//! Greedy generation with a key/value cache.
//!
//! The cache holds, for each decoder block, the keys and values of the tokens generated so far (room for a
//! power of two of them, doubled when full) and of the source. Samples that are done leave the batch when
//! half of it is done. [`crate::costs::generation`] says what all this takes.

use candle_core::{DType, Tensor};

use crate::context::LayerContext;
use crate::error::Result;
use crate::layers::attention::Attention;
use crate::micro_batch::pad;
use crate::model::T5;

/// Positions that a new cache has room for.
pub(crate) const FIRST_CAPACITY: usize = 32;

/// How to generate.
#[derive(Clone, Copy, Debug)]
pub struct GenerateOptions {
    /// Most tokens generated for a source, EOS included.
    pub max_new_tokens: usize,
    /// Dtype in which activations are computed and cached.
    pub activations: DType,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions { max_new_tokens: 128, activations: DType::F32 }
    }
}

impl T5 {
    /// The likeliest next token, again and again, for each source (token ids, EOS included): what was
    /// generated after the decoder's start token, up to and including EOS.
    ///
    /// All sources run as one batch, padded to the longest; a source's answer does not depend on the
    /// others up to rounding.
    ///
    /// # Errors
    /// [`crate::Error::Batch`] for an empty source or an id outside the vocabulary.
    pub fn generate(&self, sources: &[&[u32]], options: &GenerateOptions) -> Result<Vec<Vec<u32>>> {
        Ok(self.generate_unless(sources, options, &|| false)?.expect("nobody interrupts"))
    }

    /// [`T5::generate`] that ends early, with `None`, when `interrupted` says so. It is asked before every block of the
    /// encoder and before every token.
    ///
    /// # Errors
    /// As [`T5::generate`].
    pub fn generate_unless(
        &self,
        sources: &[&[u32]],
        options: &GenerateOptions,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Vec<u32>>>> {
        let mut answers = vec![Vec::new(); sources.len()];
        if sources.is_empty() || options.max_new_tokens == 0 {
            return Ok(Some(answers));
        }
        let Some(mut cache) = Cache::new(self, sources, options, interrupted)? else { return Ok(None) };
        let mut active: Vec<usize> = (0..sources.len()).collect(); // the sample of each row of the cache
        let mut tokens = vec![self.config().decoder_start_token_id; sources.len()];
        for position in 0..options.max_new_tokens {
            if interrupted() {
                return Ok(None);
            }
            tokens = self.next_tokens(&tokens, position, &mut cache)?;
            let is_done = |answer: &[u32]| answer.last().is_some_and(|id| self.config().eos_token_ids.contains(id));
            for (&sample, &token) in active.iter().zip(&tokens) {
                if !is_done(&answers[sample]) {
                    answers[sample].push(token);
                }
            }
            let rows: Vec<usize> = (0..active.len()).filter(|&row| !is_done(&answers[active[row]])).collect();
            if rows.is_empty() {
                break;
            }
            if rows.len() * 2 <= active.len() {
                cache.keep_rows(&rows)?;
                active = rows.iter().map(|&row| active[row]).collect();
                tokens = rows.iter().map(|&row| tokens[row]).collect();
            }
        }
        Ok(Some(answers))
    }

    /// One step of all rows: the token after `tokens`, which are at `position`.
    fn next_tokens(&self, tokens: &[u32], position: usize, cache: &mut Cache) -> Result<Vec<u32>> {
        cache.make_room(position)?;
        let ids = Tensor::from_slice(tokens, (tokens.len(), 1), self.device())?;
        let mut x = t5_ops::embedding(&ids, &self.shared.tensor, cache.dtype)?; // (B, 1, D)
        t5_ops::page_out(&self.shared.tensor);
        let bias = self.decoder.position_bias(1, cache.capacity, position)?; // (H, capacity)
        let lengths = vec![position + 1; tokens.len()];
        for (block, cached) in self.decoder.blocks.iter().zip(&cache.blocks) {
            block.page_in();
            let own = &block.attention;
            let (n, _) = own.norm.forward(&x)?;
            let (k, v) = (t5_ops::linear(&n, &own.k.tensor)?, t5_ops::linear(&n, &own.v.tensor)?);
            cached.own.k.slice_set(&k, 1, position)?;
            cached.own.v.slice_set(&v, 1, position)?;
            let q = t5_ops::linear(&n, &own.q.tensor)?;
            x = own.attend(&x, &q, &cached.own.k, &cached.own.v, Some(&bias), &lengths)?;
            if let Some(cross) = &block.cross {
                let (n, _) = cross.norm.forward(&x)?;
                let q = t5_ops::linear(&n, &cross.q.tensor)?;
                x = cross.attend(&x, &q, &cached.source.k, &cached.source.v, None, &cache.source_lengths)?;
            }
            x = block.feed_forward.infer(&x)?;
            block.page_out();
        }
        let cx = cache.context(&bias, &[]);
        let z = self.decoder.finish(&x, &cx)?.flatten_to(1)?; // (B, D)
        let next = largest(&self.head_logits(&z)?)?;
        t5_ops::page_out(&self.head.tensor);
        Ok(next)
    }
}

/// The index of the largest value of each row; of equal ones the first.
fn largest(logits: &Tensor) -> Result<Vec<u32>> {
    let rows = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let argmax = |row: &Vec<f32>| {
        let first = (0, f32::NEG_INFINITY);
        row.iter().enumerate().fold(first, |best, (i, &v)| if v > best.1 { (i, v) } else { best }).0 as u32
    };
    Ok(rows.iter().map(argmax).collect())
}

/// Keys and values, (B, length, HK) each.
struct KeysValues {
    k: Tensor,
    v: Tensor,
}

struct CachedBlock {
    own: KeysValues,
    source: KeysValues,
}

struct Cache {
    blocks: Vec<CachedBlock>,
    source_lengths: Vec<usize>,
    /// Positions that `own` has room for.
    capacity: usize,
    most: usize,
    dtype: DType,
}

impl Cache {
    /// Encodes the sources and projects them to every block's keys and values. `None` when `interrupted` said so.
    fn new(
        model: &T5,
        sources: &[&[u32]],
        options: &GenerateOptions,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Cache>> {
        let samples: Vec<u32> = (0..sources.len() as u32).collect();
        let (ids, source_lengths) = pad(sources, "source", &samples, model.config(), model.device())?;
        let capacity = FIRST_CAPACITY.min(options.max_new_tokens);
        let mut cache = Cache {
            blocks: Vec::new(),
            source_lengths,
            capacity,
            most: options.max_new_tokens,
            dtype: options.activations,
        };
        let (batch, length) = ids.dims2()?;
        let bias = model.encoder.position_bias(length, length, 0)?;
        let cx = cache.context(&bias, &samples);
        let Some(encoded) = model.encoder.output(&ids, &model.shared, options.activations, &cx, interrupted)? else {
            return Ok(None);
        };
        let room = || Tensor::zeros((batch, capacity, model.config().inner_dim()), options.activations, model.device());
        let keys_values = |cross: &Attention| {
            let (k, v) = (t5_ops::linear(&encoded, &cross.k.tensor)?, t5_ops::linear(&encoded, &cross.v.tensor)?);
            Ok::<_, candle_core::Error>(KeysValues { k, v })
        };
        for block in &model.decoder.blocks {
            let Some(cross) = &block.cross else { continue };
            let own = KeysValues { k: room()?, v: room()? };
            cache.blocks.push(CachedBlock { own, source: keys_values(cross)? });
            block.page_out();
        }
        Ok(Some(cache))
    }

    fn context<'a>(&'a self, bias: &'a Tensor, samples: &'a [u32]) -> LayerContext<'a> {
        LayerContext { seed: 0, step: 0, dropout: 0.0, samples, lengths: &self.source_lengths, bias, source: None }
    }

    /// Doubles the room when `position` is outside of it.
    fn make_room(&mut self, position: usize) -> Result<()> {
        if position < self.capacity {
            return Ok(());
        }
        self.capacity = (self.capacity * 2).min(self.most);
        for block in &mut self.blocks {
            for old in [&mut block.own.k, &mut block.own.v] {
                let (batch, _, inner) = old.dims3()?;
                let new = Tensor::zeros((batch, self.capacity, inner), old.dtype(), old.device())?;
                new.slice_set(old, 1, 0)?;
                *old = new;
            }
        }
        Ok(())
    }

    /// Drops the rows of samples that are done.
    fn keep_rows(&mut self, rows: &[usize]) -> Result<()> {
        let device = match self.blocks.first() {
            Some(block) => block.own.k.device().clone(),
            None => return Ok(()),
        };
        let indices: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let indices = Tensor::from_slice(&indices, rows.len(), &device)?;
        for block in &mut self.blocks {
            for cached in [&mut block.own.k, &mut block.own.v, &mut block.source.k, &mut block.source.v] {
                *cached = cached.index_select(&indices, 0)?;
            }
        }
        self.source_lengths = rows.iter().map(|&row| self.source_lengths[row]).collect();
        Ok(())
    }
}
