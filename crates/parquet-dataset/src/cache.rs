//! Decoded blocks of rows, up to a number of bytes.
//!
//! A block is the rows `[k * block_rows, (k + 1) * block_rows)` of the dataset, all columns, decoded and compact.
//! Unlike pages, blocks have a size that the caller chose, and hold nothing but rows. The least recently used block is
//! dropped first. Several threads may ask for one block: the first decodes it, the others wait.
//!
//! Invariant: the blocks in the cache and the blocks being decoded stay within the capacity. A block that is being
//! decoded reserves room, at first for a block's average bytes; if that is not enough, it reserves more before it uses
//! more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::rows::Rows;

/// A byte-capped cache of decoded blocks.
#[derive(Default)]
pub(crate) struct BlockCache {
    state: Mutex<State>,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    capacity: u64,
    /// Bytes of blocks in the cache, and bytes reserved for blocks being decoded.
    taken: u64,
    blocks: HashMap<u64, Slot>,
    /// Blocks in the cache, by their last use.
    by_use: BTreeMap<u64, u64>,
    uses: u64,
    /// Blocks that alone exceed the capacity.
    too_large: HashSet<u64>,
}

enum Slot {
    Loading,
    Held { rows: Arc<Rows>, bytes: u64, used: u64 },
}

impl State {
    fn touch(&mut self, block: u64) -> Option<Arc<Rows>> {
        self.uses += 1;
        let now = self.uses;
        let Some(Slot::Held { rows, used, .. }) = self.blocks.get_mut(&block) else { return None };
        self.by_use.remove(used);
        self.by_use.insert(now, block);
        *used = now;
        Some(Arc::clone(rows))
    }

    /// Drops the least recently used blocks until `more` bytes fit.
    fn make_room(&mut self, more: u64) {
        while self.taken.saturating_add(more) > self.capacity {
            let Some((_, block)) = self.by_use.pop_first() else { return };
            if let Some(Slot::Held { bytes, .. }) = self.blocks.remove(&block) {
                self.taken -= bytes;
            }
        }
    }
}

/// Room for a block that is being decoded. Dropping it returns the room, whether decoding succeeded or failed.
pub(crate) struct Loading<'a> {
    cache: &'a BlockCache,
    block: u64,
    reserved: u64,
}

impl Loading<'_> {
    /// The bytes that the block may take.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Raises the reservation to `bytes` in all; older blocks are dropped to make room. False if there is not enough
    /// room.
    pub(crate) fn reserve(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.reserved);
        let mut state = self.cache.lock();
        if bytes > state.capacity {
            return false;
        }
        state.make_room(more);
        let fits = state.taken.saturating_add(more) <= state.capacity;
        if fits {
            state.taken += more;
            self.reserved += more;
        }
        fits
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        state.taken -= self.reserved;
        if matches!(state.blocks.get(&self.block), Some(Slot::Loading)) {
            state.blocks.remove(&self.block);
        }
        self.cache.finished.notify_all();
    }
}

impl BlockCache {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most bytes of blocks that the cache may hold.
    pub(crate) fn capacity(&self) -> u64 {
        self.lock().capacity
    }

    /// Changes the capacity; blocks that no longer fit are dropped at once.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        let mut state = self.lock();
        if capacity > state.capacity {
            state.too_large.clear();
        }
        state.capacity = capacity;
        state.make_room(0);
    }

    /// Drops every block.
    pub(crate) fn clear(&self) {
        let mut state = self.lock();
        let capacity = std::mem::replace(&mut state.capacity, 0);
        state.make_room(0);
        state.capacity = capacity;
    }

    /// Bytes of blocks in the cache.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.lock().taken
    }

    /// Whether a block is in the cache or being decoded.
    pub(crate) fn contains(&self, block: u64) -> bool {
        self.lock().blocks.contains_key(&block)
    }

    /// Returns the block, decoded by `load` if it is not in the cache. `load` decodes within its reservation and
    /// returns `None` if that is not enough; this function then returns `None`, too. The block is not tried again
    /// unless other blocks were in the way.
    pub(crate) fn get_or_load(
        &self,
        block: u64,
        estimated_bytes: u64,
        load: impl FnOnce(&mut Loading<'_>) -> Result<Option<Rows>, Error>,
    ) -> Result<Option<Arc<Rows>>, Error> {
        let mut state = self.lock();
        loop {
            if let Some(rows) = state.touch(block) {
                return Ok(Some(rows));
            }
            if state.too_large.contains(&block) || state.capacity == 0 {
                return Ok(None);
            }
            if !state.blocks.contains_key(&block) {
                break;
            }
            state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let reserved = estimated_bytes.min(state.capacity);
        state.make_room(reserved);
        if state.taken.saturating_add(reserved) > state.capacity {
            // Other readers' blocks take all of the capacity.
            return Ok(None);
        }
        state.taken += reserved;
        state.blocks.insert(block, Slot::Loading);
        drop(state);
        let mut loading = Loading { cache: self, block, reserved };
        let loaded = load(&mut loading)?;
        let rows = loaded.map(|mut rows| {
            rows.shrink_to_fit();
            Arc::new(rows)
        });
        let mut state = self.lock();
        match &rows {
            Some(rows) if state.taken - loading.reserved + rows.memory_bytes() <= state.capacity => {
                let bytes = rows.memory_bytes();
                state.taken += bytes;
                state.uses += 1;
                let used = state.uses;
                state.by_use.insert(used, block);
                state.blocks.insert(block, Slot::Held { rows: Arc::clone(rows), bytes, used });
            }
            _ if state.taken == loading.reserved => {
                state.too_large.insert(block);
            }
            _ => {}
        }
        drop(state);
        drop(loading);
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_of(bytes: usize) -> Rows {
        let mut rows = Rows::new(1);
        rows.column_mut(0).push(&vec![0; bytes]);
        rows.complete(1);
        rows
    }

    fn load(cache: &BlockCache, block: u64, bytes: usize) -> bool {
        let mut loaded = false;
        cache
            .get_or_load(block, bytes as u64, |_| {
                loaded = true;
                Ok(Some(block_of(bytes)))
            })
            .unwrap();
        loaded
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let cache = BlockCache::default();
        cache.set_capacity(350);
        assert!(load(&cache, 1, 100) && load(&cache, 2, 100) && load(&cache, 3, 100));
        assert!(!load(&cache, 1, 100));
        assert!(load(&cache, 4, 100));
        assert!(!load(&cache, 1, 100) && load(&cache, 2, 100));
        assert!(cache.held_bytes() <= 350);
    }

    #[test]
    fn a_block_beyond_the_capacity_is_given_but_never_held() {
        let cache = BlockCache::default();
        cache.set_capacity(50);
        assert!(cache.get_or_load(1, 10, |_| Ok(Some(block_of(100)))).unwrap().is_some());
        assert_eq!(cache.held_bytes(), 0);
        assert!(cache.get_or_load(1, 10, |_| unreachable!()).unwrap().is_none());
    }

    #[test]
    fn a_block_that_is_larger_than_estimated_makes_older_ones_leave_before_it_grows() {
        let cache = BlockCache::default();
        cache.set_capacity(350);
        assert!(load(&cache, 1, 100) && load(&cache, 2, 100));
        let loaded = cache.get_or_load(3, 100, |loading| {
            assert!(!loading.reserve(351), "more than may be held at all");
            assert!(loading.reserve(250));
            assert!(loading.reserved() >= 250 && cache.held_bytes() <= 350);
            Ok(Some(block_of(240)))
        });
        assert!(loaded.unwrap().is_some() && cache.held_bytes() <= 350);
        assert!(cache.contains(3) && !cache.contains(1));
    }

    #[test]
    fn shrinking_drops_blocks_at_once() {
        let cache = BlockCache::default();
        cache.set_capacity(1000);
        assert!(load(&cache, 1, 100) && load(&cache, 2, 100));
        cache.set_capacity(110);
        assert!(cache.held_bytes() <= 110);
        cache.clear();
        assert_eq!((cache.held_bytes(), cache.capacity()), (0, 110));
    }

    #[test]
    fn a_failed_load_leaves_nothing_behind() {
        let cache = BlockCache::default();
        cache.set_capacity(1000);
        assert!(cache.get_or_load(1, 500, |_| Err(Error::NoFiles)).is_err());
        assert_eq!(cache.held_bytes(), 0);
        assert!(load(&cache, 1, 100));
    }
}
