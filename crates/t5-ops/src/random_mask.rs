//! Masks and noise that are functions of an element's identity: a hash of the key of a row and the channel.
//!
//! A strong 64-bit mix makes the key of a row. A cheap 32-bit mix of that key and the channel, sixteen lanes wide in the kernels, gives the
//! element. In a mask two elements share a hash, as 16 bits are enough for each.

use crate::keys::mix;

/// The key of one row of a mask.
#[derive(Clone, Copy)]
pub(crate) struct RowKey {
    low: u32,
    high: u32,
}

impl RowKey {
    /// The key of row `row` of the tensor that `key` stands for.
    pub(crate) fn new(key: u64, row: u64) -> Self {
        RowKey::from_bits(mix(key ^ mix(row)))
    }

    /// The key with these bits.
    pub(crate) fn from_bits(key: u64) -> Self {
        RowKey { low: key as u32, high: (key >> 32) as u32 }
    }
}

/// The mask of one row, ready to be applied.
#[derive(Clone, Copy)]
pub(crate) struct RowMask {
    key: RowKey,
    threshold: u32,
    scale: f32,
}

impl RowMask {
    /// Elements whose 16 bits are at least the upper half of `threshold` are kept, and multiplied by `scale`. The lower half is zero.
    pub(crate) fn new(key: RowKey, threshold: u32, scale: f32) -> Self {
        RowMask { key, threshold, scale }
    }

    /// The two halves of the key, and the value that a hash is compared with.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    pub(crate) fn parts(&self) -> (u32, u32, u32) {
        (self.key.low, self.key.high, self.threshold)
    }

    /// Factor of kept elements.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether element `channel` is kept.
    #[inline(always)]
    pub(crate) fn keeps(&self, channel: usize) -> bool {
        let (first, is_second) = (channel as u32 & !PAIR, channel as u32 & PAIR != 0);
        let hash = hash(self.key, first);
        (if is_second { hash << 16 } else { hash }) >= self.threshold
    }

    /// Factor of element `channel`: the scale, or zero.
    #[inline(always)]
    pub(crate) fn factor(&self, channel: usize) -> f32 {
        if self.keeps(channel) { self.scale } else { 0.0 }
    }
}

/// Channels that differ by this alone are a pair: the first has the upper half of their hash, the other the lower one. Vectors of 16
/// channels have 8 hashes, and a thread of a card's tensor cores has both elements of a pair.
pub(crate) const PAIR: u32 = 8;

/// The constants of [`hash`].
pub(crate) const CHANNEL_FACTOR: u32 = 0x9E37_79B9;
pub(crate) const FIRST_FACTOR: u32 = 0x7FEB_352D;
pub(crate) const SECOND_FACTOR: u32 = 0x846C_A68B;

/// The hash of one element of a row: 32-bit operations only, so that it vectorises.
#[inline(always)]
pub(crate) fn hash(key: RowKey, channel: u32) -> u32 {
    // The finalizer "lowbias32" (Wellons 2018), with the second half of the key added between its rounds.
    let x = channel.wrapping_mul(CHANNEL_FACTOR).wrapping_add(key.low);
    let x = (x ^ (x >> 16)).wrapping_mul(FIRST_FACTOR);
    let x = (x ^ (x >> 15)).wrapping_add(key.high).wrapping_mul(SECOND_FACTOR);
    x ^ (x >> 16)
}
