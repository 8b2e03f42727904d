//! The key/value cache, and a decoding step of all its rows.
//!
//! A source has one row for each of its answers that are being made. Its own keys and values exist once for all these rows:
//! in attention to them, the rows are queries of one sample.
//!
//! Where a window limits what a token sees of the tokens before it, a block's cache has space for the window alone: the token at position p is
//! at p modulo the window's size.

use super::GenerateOptions;
use crate::config::Config;
use crate::context::{Noise, StepContext};
use crate::error::Result;
use crate::layers::attention::{Attention, Heads, KeysValues};
use crate::layers::stack::Stack;
use crate::micro_batch::MicroBatch;
use crate::network::Network;
use crate::ops::{Ops, Position};
use crate::step::inference::infer;
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
    /// Encodes the sources and projects them to every block's keys and values. `None` when `interrupted` returned true.
    pub fn begin(
        &self,
        batch: MicroBatch<T>,
        config: &Config,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Cache<T>>> {
        let GenerateOptions { max_new_tokens, activations, .. } = self.options;
        let rows_of_source = self.options.shape().rows;
        let events = Outline::inference(config, self.has_paged_weights).forward_only(false);
        let encoder = infer(
            self.network,
            &events,
            &StepContext::without_dropout(activations, 1),
            std::slice::from_ref(&batch),
            interrupted,
        )?;
        let Some(encoded) = encoder.and_then(|mut step| step.take_output()) else { return Ok(None) };
        let capacity = FIRST_CAPACITY.min(max_new_tokens);
        let samples = batch.ids(false).dims()[0];
        let mut blocks = Vec::new();
        for (number, block) in self.network.decoder.blocks.iter().enumerate() {
            let sees_source = block.cross.as_ref().unwrap_or(&block.attention);
            [&sees_source.k, &sees_source.v].into_iter().try_for_each(|linear| self.network.page_in(&linear.weight))?;
            let width = config.block(true, number).own.key_width();
            let most = block.attention.most_cached().min(max_new_tokens);
            let empty = || encoded.zeros(&[samples * rows_of_source, capacity.min(most), width], activations);
            let own = KeysValues { k: empty()?, v: empty()? };
            blocks.push(CachedBlock { own, most, source: sees_source.cached_source(&encoded)? });
            block.linears().try_for_each(|linear| self.network.page_out(&linear.weight))?;
        }
        let source_lengths = batch.lengths(false).to_vec();
        Ok(Some(Cache {
            blocks,
            biases: Vec::new(),
            has_biases: false,
            source_lengths,
            sources: samples,
            rows_of_source,
            capacity,
            most: max_new_tokens,
            position: 0,
        }))
    }

    /// Whether any weights are in memory only while they are in use.
    pub fn has_weights_elsewhere(&self) -> bool {
        self.has_paged_weights || self.network.pager.is_some()
    }

    /// Makes space for one more token in these caches.
    pub fn make_space(&self, caches: &mut [&mut Cache<T>]) -> Result<()> {
        caches.iter_mut().try_for_each(|cache| cache.make_space(&self.network.decoder))
    }

    /// The logits (R, V) after a token `ids` (R, 1) of each row of these caches, in the order of the caches. The caches have space for it.
    /// `positions` holds the caches' positions on a card.
    ///
    /// Each product with weights is one product for all rows. Attention is computed for each cache, which has its own position.
    pub fn logits(&self, ids: &T, positions: Option<&T>, caches: &[&Cache<T>]) -> Result<T> {
        let Network { decoder_table: table, decoder, head, .. } = self.network;
        let positions = (0..caches.len()).map(|number| positions.map(|all| all.part(number, 1)).transpose());
        let positions: Vec<Option<T>> = positions.collect::<Result<_>>()?;
        self.network.fetch_remote(table)?;
        let mut x = decoder.embed(ids, table, self.options.activations, &Noise::NONE)?; // (R, 1, D)
        self.network.page_out(table)?;
        for (number, block) in decoder.blocks.iter().enumerate() {
            let after = decoder.blocks.get(number + 1);
            let soon = after.into_iter().flat_map(|after| after.linears());
            soon.for_each(|linear| self.network.read_ahead_of(&linear.weight));
            block.linears().try_for_each(|linear| self.network.page_in(&linear.weight))?;
            let own = &block.attention;
            let (n, _) = own.norm.forward(&x)?;
            let (k, v) = (own.k.forward(&n, &Noise::NONE)?, own.v.forward(&n, &Noise::NONE)?);
            let q = own.q.forward(&n, &Noise::NONE)?;
            let heads = in_parts(caches, |rows, cache| {
                let cached = &cache.blocks[number];
                let k = own.keys_at(rows.select(&k)?, cache.position)?;
                let place = Position { number: cache.position % cached.most, on_card: positions[rows.cache].as_ref() };
                T::append([&cached.own.k, &cached.own.v], [&k, &rows.select(&v)?], place)?;
                let q = own.queries_at(rows.select(&q)?, cache.position)?;
                let last = Position { number: cache.position.min(cached.most - 1), ..place };
                let heads = own.attend_at(&q, &cached.own, cache.bias(number), last)?;
                match own.is_merged() {
                    true => own.merged(heads, &attend_to_source(own, &q, rows, cache, number)?),
                    false => Ok(heads.out),
                }
            })?;
            x = own.add_to(&x, &heads)?;
            drop((n, k, v, q, heads));
            if let Some(cross) = &block.cross {
                let (n, _) = cross.norm.forward(&x)?;
                let q = cross.q.forward(&n, &Noise::NONE)?;
                let heads = in_parts(caches, |rows, cache| {
                    Ok(attend_to_source(cross, &rows.select(&q)?, rows, cache, number)?.out)
                })?;
                x = cross.add_to(&x, &heads)?;
            }
            x = block.feed_forward.infer(&x)?;
            block.linears().try_for_each(|linear| self.network.page_out(&linear.weight))?;
        }
        let z = decoder.finish(&x, &Noise::NONE)?.as_rows()?; // (R, D)
        self.network.page_in(&head.weight)?;
        let logits = self.network.logits(&z)?;
        self.network.page_out(&head.weight)?;
        Ok(logits)
    }
}

/// The heads of queries (R, 1, HK) of a cache's rows over the keys and values of their sources.
fn attend_to_source<T: Ops>(
    attention: &Attention<T>,
    q: &T,
    rows: &PartRows,
    cache: &Cache<T>,
    block: usize,
) -> Result<Heads<T>> {
    // The rows of a source are queries of one sample: (B, R / B, HK).
    let (sources, width) = (rows.count / cache.rows_of_source, q.dims()[2]);
    let q = q.shaped(&[sources, cache.rows_of_source, width])?;
    let Heads { out, lse } = attention.attend(&q, &cache.blocks[block].source, &cache.source_lengths)?;
    let out = out.shaped(&[rows.count, 1, width])?;
    // The log-sum-exp (B, H, R / B) is that of single rows, (R, H, 1), where each source has one row.
    let heads = lse.dims()[1];
    let lse = match attention.is_merged() {
        true => lse.transposed()?.shaped(&[rows.count, heads, 1])?,
        false => lse,
    };
    Ok(Heads { out, lse })
}

/// The rows of one cache among the rows of all caches.
struct PartRows {
    /// The number of the cache.
    cache: usize,
    from: usize,
    count: usize,
    is_all: bool,
}

impl PartRows {
    fn select<T: Ops>(&self, x: &T) -> Result<T> {
        if self.is_all { Ok(x.clone()) } else { x.part(self.from, self.count) }
    }
}

/// Applies `f` to the rows of each cache, and joins the results.
fn in_parts<T: Ops>(caches: &[&Cache<T>], f: impl Fn(&PartRows, &Cache<T>) -> Result<T>) -> Result<T> {
    let (mut from, is_all) = (0, caches.len() == 1);
    let parts = caches.iter().enumerate().map(|(number, cache)| {
        let count = cache.rows();
        let rows = PartRows { cache: number, from, count, is_all };
        from += count;
        f(&rows, cache)
    });
    T::joined(parts.collect::<Result<_>>()?)
}

/// Keys and values of tokens (R, length, KH K), and of sources (B, length, KH K).
struct CachedBlock<T> {
    own: KeysValues<T>,
    /// The most tokens that `own` ever has.
    most: usize,
    source: KeysValues<T>,
}

/// The keys and values of every decoder block.
pub(crate) struct Cache<T> {
    blocks: Vec<CachedBlock<T>>,
    /// The bias of `capacity` queries and as many keys, (H, 2 capacity - 1): one for all blocks, one for each, or none. Empty before the
    /// first step.
    biases: Vec<T>,
    /// Whether `biases` are those of this capacity.
    has_biases: bool,
    source_lengths: Vec<usize>,
    sources: usize,
    rows_of_source: usize,
    /// Positions that `own` has space for.
    capacity: usize,
    most: usize,
    /// The position of the next token.
    position: usize,
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
        self.blocks.iter().map(tensors).chain(self.biases.iter().map(T::bytes)).sum()
    }

    /// The bias of a block, of all positions.
    fn bias(&self, block: usize) -> Option<&T> {
        self.biases.get(block.min(self.biases.len().saturating_sub(1)))
    }

    /// The number of rows of all sources.
    pub fn rows(&self) -> usize {
        self.sources * self.rows_of_source
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Whether the next token makes the cache replace its tensors.
    pub fn is_full(&self) -> bool {
        self.position >= self.capacity || !self.has_biases
    }

    /// Moves on by one token.
    pub fn advance(&mut self) {
        self.position += 1;
    }

    /// The cache's own keys, the keys of its sources, and the bias. If any tensor of the cache is replaced, so is at least one of these.
    pub fn landmarks(&self) -> impl Iterator<Item = &T> {
        let of_block = self.blocks.first().into_iter().flat_map(|block| [&block.own.k, &block.source.k]);
        of_block.chain(self.biases.first())
    }

    /// Moves on to a later position, for a count of a step there. The tokens before it are undefined.
    pub fn skip_to(&mut self, position: usize) {
        self.position = position;
    }

    /// Doubles the space when there is none for the next token.
    fn make_space(&mut self, decoder: &Stack<T>) -> Result<()> {
        if !self.is_full() {
            return Ok(());
        }
        if self.position >= self.capacity {
            self.grow()?;
        }
        self.biases.clear();
        let tables = if decoder.has_own_biases() { self.blocks.len() } else { 1 };
        for block in 0..tables {
            self.biases.extend(decoder.position_bias(block, self.capacity, self.capacity, 0)?);
        }
        self.has_biases = true;
        Ok(())
    }

    fn grow(&mut self) -> Result<()> {
        self.capacity = (self.capacity * 2).min(self.most);
        for block in &mut self.blocks {
            let capacity = self.capacity.min(block.most);
            for old in [&mut block.own.k, &mut block.own.v] {
                let &[batch, before, inner] = old.dims() else { unreachable!("keys and values have three dimensions") };
                if before == capacity {
                    continue;
                }
                let new = old.zeros(&[batch, capacity, inner], old.dtype())?;
                new.set_positions(old, 0)?;
                *old = new;
            }
        }
        Ok(())
    }

    /// Copies rows: in each pair, from the first to the second.
    pub fn copy_rows(&self, pairs: &[(usize, usize)]) -> Result<()> {
        for block in self.blocks.iter().filter(|_| !pairs.is_empty()) {
            let positions = self.position.min(block.most);
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
        self.sources = sources.len();
        self.source_lengths = sources.iter().map(|&source| self.source_lengths[source]).collect();
        Ok(())
    }
}
