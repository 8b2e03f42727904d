//! Greedy generation with a key/value cache.
//!
//! The cache holds, for each decoder block, the keys and values of the tokens generated so far (space for a
//! power of two of them, doubled when full) and of the source. Samples that are done leave the batch when
//! half of it is done. [`crate::step::count`] rehearses it for the bill.

use candle_core::{DType, Tensor};

use crate::config::Config;
use crate::context::Noise;
use crate::error::Result;
use crate::layers::attention::Attention;
use crate::micro_batch::{MicroBatch, pad};
use crate::model::T5;
use crate::network::Network;
use crate::ops::Ops;
use crate::step::run::{infer, without_dropout};
use crate::step::schedule::Outline;

/// Positions that a new cache has space for.
const FIRST_CAPACITY: usize = 32;

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
    /// The likeliest next token, again and again, for each source (token ids, EOS included): the tokens
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
        let samples: Vec<u32> = (0..sources.len() as u32).collect();
        let (ids, lengths) = pad(sources, "source", &samples, self.config(), self.device())?;
        let decoding = Decoding { network: &self.network, options: *options, has_paged_weights: self.is_in_file() };
        let batch = MicroBatch::of_sources(ids, lengths);
        let Some(mut cache) = decoding.begin(batch, self.config(), interrupted)? else { return Ok(None) };
        let mut active: Vec<usize> = (0..sources.len()).collect(); // the sample of each row of the cache
        let mut tokens = vec![self.config().decoder_start_token_id; sources.len()];
        for position in 0..options.max_new_tokens {
            if interrupted() {
                return Ok(None);
            }
            let ids = Tensor::from_slice(&tokens, (tokens.len(), 1), self.device())?;
            tokens = decoding.next_tokens(&ids, position, &mut cache)?;
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
}

/// Generation by a network, over tensors or counted tensors.
pub(crate) struct Decoding<'a, T> {
    pub network: &'a Network<T>,
    pub options: GenerateOptions,
    pub has_paged_weights: bool,
}

impl<T: Ops> Decoding<'_, T> {
    /// Encodes the sources and projects them to every block's keys and values. `None` when `interrupted` said so.
    pub fn begin(
        &self,
        batch: MicroBatch<T>,
        config: &Config,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Cache<T>>> {
        let GenerateOptions { max_new_tokens, activations } = self.options;
        let events = Outline::inference(config, self.has_paged_weights).forward_only(false);
        let encoder = infer(self.network, &events, &without_dropout(activations, 1), &batch, interrupted)?;
        let Some(encoded) = encoder.and_then(|mut step| step.take_output()) else { return Ok(None) };
        let capacity = FIRST_CAPACITY.min(max_new_tokens);
        let samples = batch.ids(false).dims()[0];
        let keys_values = |cross: &Attention<T>| -> Result<KeysValues<T>> {
            Ok(KeysValues { k: cross.k.forward(&encoded)?, v: cross.v.forward(&encoded)? })
        };
        let mut blocks = Vec::new();
        for block in &self.network.decoder.blocks {
            let Some(cross) = &block.cross else { continue };
            [&cross.k, &cross.v].into_iter().for_each(|linear| linear.weight.tensor.page_in());
            let empty = || encoded.zeros(&[samples, capacity, config.inner_dim()], activations);
            let own = KeysValues { k: empty()?, v: empty()? };
            blocks.push(CachedBlock { own, source: keys_values(cross)? });
            block.linears().for_each(|linear| linear.weight.tensor.page_out());
        }
        let source_lengths = batch.lengths(false).to_vec();
        Ok(Some(Cache { blocks, source_lengths, capacity, most: max_new_tokens }))
    }

    /// One step of all rows: the token after `ids` (B, 1), which are at `position`.
    pub fn next_tokens(&self, ids: &T, position: usize, cache: &mut Cache<T>) -> Result<Vec<u32>> {
        cache.make_space(position)?;
        let Network { shared, decoder, head, .. } = self.network;
        let mut x = decoder.embed(ids, shared, self.options.activations, &Noise::NONE)?; // (B, 1, D)
        shared.tensor.page_out();
        let mut bias = decoder.position_bias(0, 1, cache.capacity, position)?; // (H, capacity)
        let lengths = vec![position + 1; ids.dims()[0]];
        for (number, (block, cached)) in decoder.blocks.iter().zip(&cache.blocks).enumerate() {
            let after = decoder.blocks.get(number + 1);
            after.into_iter().flat_map(|after| after.linears()).for_each(|linear| linear.weight.tensor.read_ahead());
            block.linears().for_each(|linear| linear.weight.tensor.page_in());
            if decoder.has_own_biases() {
                bias = decoder.position_bias(number, 1, cache.capacity, position)?;
            }
            let own = &block.attention;
            let (n, _) = own.norm.forward(&x)?;
            let (k, v) = (own.k.forward(&n)?, own.v.forward(&n)?);
            cached.own.k.set_positions(&k, position)?;
            cached.own.v.set_positions(&v, position)?;
            let q = own.q.forward(&n)?;
            x = own.attend(&x, &q, &cached.own.k, &cached.own.v, Some(&bias), &lengths)?;
            if let Some(cross) = &block.cross {
                let (n, _) = cross.norm.forward(&x)?;
                let q = cross.q.forward(&n)?;
                x = cross.attend(&x, &q, &cached.source.k, &cached.source.v, None, &cache.source_lengths)?;
            }
            x = block.feed_forward.infer(&x)?;
            block.linears().for_each(|linear| linear.weight.tensor.page_out());
        }
        let z = decoder.finish(&x, &Noise::NONE)?.as_rows()?; // (B, D)
        head.tensor.page_in();
        let next = self.network.logits(&z)?.largest()?;
        head.tensor.page_out();
        Ok(next)
    }
}

/// Keys and values, (B, length, HK) each.
struct KeysValues<T> {
    k: T,
    v: T,
}

struct CachedBlock<T> {
    own: KeysValues<T>,
    source: KeysValues<T>,
}

/// The keys and values of every decoder block.
pub(crate) struct Cache<T> {
    blocks: Vec<CachedBlock<T>>,
    source_lengths: Vec<usize>,
    /// Positions that `own` has space for.
    capacity: usize,
    most: usize,
}

impl<T: Ops> Cache<T> {
    /// Positions before the cache has to grow.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> u64 {
        let tensors = |block: &CachedBlock<T>| {
            [&block.own.k, &block.own.v, &block.source.k, &block.source.v].map(T::bytes).iter().sum::<u64>()
        };
        self.blocks.iter().map(tensors).sum()
    }

    /// Doubles the space when `position` is outside of it.
    fn make_space(&mut self, position: usize) -> Result<()> {
        if position < self.capacity {
            return Ok(());
        }
        self.capacity = (self.capacity * 2).min(self.most);
        for block in &mut self.blocks {
            for old in [&mut block.own.k, &mut block.own.v] {
                let &[batch, _, inner] = old.dims() else { unreachable!("keys and values have three dimensions") };
                let new = old.zeros(&[batch, self.capacity, inner], old.dtype())?;
                new.set_positions(old, 0)?;
                *old = new;
            }
        }
        Ok(())
    }

    /// Drops the rows of samples that are done.
    fn keep_rows(&mut self, rows: &[usize]) -> Result<()> {
        let indices: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        for block in &mut self.blocks {
            for cached in [&mut block.own.k, &mut block.own.v, &mut block.source.k, &mut block.source.v] {
                *cached = cached.select(&indices)?;
            }
        }
        self.source_lengths = rows.iter().map(|&row| self.source_lengths[row]).collect();
        Ok(())
    }
}
