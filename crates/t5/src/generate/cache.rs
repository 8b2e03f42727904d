//! The key/value cache, and a step of every row of it.
//!
//! A source has as many rows as answers are made of it at a time. Keys and values of the source are there once for all of them:
//! to its cross attention the rows are queries of one sample.

use super::GenerateOptions;
use crate::config::Config;
use crate::context::Noise;
use crate::error::Result;
use crate::layers::attention::Attention;
use crate::micro_batch::MicroBatch;
use crate::network::Network;
use crate::ops::Ops;
use crate::step::run::{infer, without_dropout};
use crate::step::schedule::Outline;

/// Positions that a new cache has space for.
const FIRST_CAPACITY: usize = 32;

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
        let GenerateOptions { max_new_tokens, activations, .. } = self.options;
        let rows_of_source = self.options.shape().rows;
        let events = Outline::inference(config, self.has_paged_weights).forward_only(false);
        let encoder = infer(self.network, &events, &without_dropout(activations, 1), &batch, interrupted)?;
        let Some(encoded) = encoder.and_then(|mut step| step.take_output()) else { return Ok(None) };
        let capacity = FIRST_CAPACITY.min(max_new_tokens);
        let samples = batch.ids(false).dims()[0];
        let keys_values = |cross: &Attention<T>| -> Result<KeysValues<T>> {
            Ok(KeysValues { k: cross.k.forward(&encoded, &Noise::NONE)?, v: cross.v.forward(&encoded, &Noise::NONE)? })
        };
        let mut blocks = Vec::new();
        for block in &self.network.decoder.blocks {
            let Some(cross) = &block.cross else { continue };
            [&cross.k, &cross.v].into_iter().for_each(|linear| linear.weight.tensor.page_in());
            let empty = || encoded.zeros(&[samples * rows_of_source, capacity, config.inner_dim()], activations);
            let own = KeysValues { k: empty()?, v: empty()? };
            blocks.push(CachedBlock { own, source: keys_values(cross)? });
            block.linears().for_each(|linear| linear.weight.tensor.page_out());
        }
        let source_lengths = batch.lengths(false).to_vec();
        Ok(Some(Cache { blocks, source_lengths, rows_of_source, capacity, most: max_new_tokens }))
    }

    /// One step of all rows: the logits (R, V) after `ids` (R, 1), which are at `position`.
    pub fn step(&self, ids: &T, position: usize, cache: &mut Cache<T>) -> Result<T> {
        cache.make_space(position)?;
        let Network { shared, decoder, head, .. } = self.network;
        let mut x = decoder.embed(ids, shared, self.options.activations, &Noise::NONE)?; // (R, 1, D)
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
            let (k, v) = (own.k.forward(&n, &Noise::NONE)?, own.v.forward(&n, &Noise::NONE)?);
            cached.own.k.set_positions(&k, position)?;
            cached.own.v.set_positions(&v, position)?;
            let q = own.q.forward(&n, &Noise::NONE)?;
            x = own.attend(&x, &q, &cached.own.k, &cached.own.v, Some(&bias), &lengths)?;
            if let Some(cross) = &block.cross {
                let (n, _) = cross.norm.forward(&x)?;
                let q = cross.q.forward(&n, &Noise::NONE)?;
                // The rows of a source are queries of one sample: (B, R / B, D).
                let beside = |x: &T| x.shaped(&[x.dims()[0] / cache.rows_of_source, cache.rows_of_source, x.dims()[2]]);
                let (k, v) = (&cached.source.k, &cached.source.v);
                x = cross.attend(&beside(&x)?, &beside(&q)?, k, v, None, &cache.source_lengths)?;
                x = x.shaped(&[ids.dims()[0], 1, x.dims()[2]])?;
            }
            x = block.feed_forward.infer(&x)?;
            block.linears().for_each(|linear| linear.weight.tensor.page_out());
        }
        let z = decoder.finish(&x, &Noise::NONE)?.as_rows()?; // (R, D)
        head.weight.tensor.page_in();
        let logits = self.network.logits(&z)?;
        head.weight.tensor.page_out();
        Ok(logits)
    }
}

/// Keys and values, (R, length, HK) each; of a source (B, length, HK).
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
    rows_of_source: usize,
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

    /// Copies rows over others, up to `positions`: of each pair the first over the second.
    pub fn copy_rows(&self, pairs: &[(usize, usize)], positions: usize) -> Result<()> {
        for block in self.blocks.iter().filter(|_| !pairs.is_empty()) {
            block.own.k.copy_rows(pairs, positions)?;
            block.own.v.copy_rows(pairs, positions)?;
        }
        Ok(())
    }

    /// Drops all sources but these.
    pub fn keep_sources(&mut self, sources: &[usize]) -> Result<()> {
        let of_source = |source: usize| source * self.rows_of_source..(source + 1) * self.rows_of_source;
        let rows: Vec<u32> = sources.iter().flat_map(|&source| of_source(source)).map(|row| row as u32).collect();
        let parts: Vec<u32> = sources.iter().map(|&source| source as u32).collect();
        for block in &mut self.blocks {
            for (cached, indices) in [(&mut block.own, &rows), (&mut block.source, &parts)] {
                cached.k = cached.k.select(indices)?;
                cached.v = cached.v.select(indices)?;
            }
        }
        self.source_lengths = sources.iter().map(|&source| self.source_lengths[source]).collect();
        Ok(())
    }
}
