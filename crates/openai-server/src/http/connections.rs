//! The open connections, and the memory of the bodies that are being read.
//!
//! When every place is taken, a connection gives way that keeps the server waiting: idle between two requests, with an incomplete head or
//! body, or with an answer that it does not read. Clients with most connections give way first, and then who has been waited for the
//! longest. A connection whose request is being answered stays. The memory of bodies is shared in the same way.
//!
//! One thread parses all bodies. So a client's bodies of about one size take at most its part of that thread's time ([`Turns`]); beyond it they
//! are not read yet, and the connection keeps the server waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// A body that takes no longer than this does not give way.
const PROMPT_BODY: Duration = Duration::from_secs(1);

/// A delay below this is none: a timer has no finer steps.
const LEAST_DELAY: Duration = Duration::from_millis(2);

/// The most time that others have before the next body of a client.
const MOST_TURN: Duration = Duration::from_secs(1);

/// Bytes of a body whose time says what a byte takes.
const LARGE_BODY: f64 = 65_536.0;

/// The time between two looks for a place.
const RECHECK: Duration = Duration::from_millis(20);

/// All open connections.
#[derive(Debug)]
pub(super) struct Connections {
    most: usize,
    most_body_bytes: usize,
    state: Mutex<State>,
    /// Told when a place, or memory of a body, is free again.
    freed: Notify,
}

/// When the next body of each client and size may be read, so that parsing them takes no more than a client's part of the time.
#[derive(Debug, Default)]
struct Turns {
    next: BTreeMap<(IpAddr, u32), Instant>,
    /// The recent time of parsing a byte, in seconds.
    byte_seconds: f64,
}

impl Turns {
    /// When a body of so many bytes may be read, while so many clients are connected.
    fn at(&mut self, (client, bytes): (IpAddr, usize), clients: usize, now: Instant) -> Instant {
        self.next.retain(|_, next| *next > now);
        let next = self.next.entry((client, bytes.max(1).ilog2() / 2)).or_insert(now);
        // Its own time passes while it is parsed, and that of the others before its next one.
        let others = (clients.max(2) - 1) as f64;
        let at = *next;
        *next += Duration::from_secs_f64((self.byte_seconds * bytes as f64 * others).min(MOST_TURN.as_secs_f64()));
        at
    }

    fn parsed(&mut self, bytes: usize, took: Duration) {
        let now = took.as_secs_f64() / bytes.max(1) as f64;
        // A short body says little about a byte.
        let part = (bytes as f64 / LARGE_BODY).min(1.0) / 8.0;
        self.byte_seconds += (now - self.byte_seconds) * part;
    }
}

#[derive(Debug, Default)]
struct State {
    number: u64,
    open: BTreeMap<u64, Entry>,
    body_bytes: usize,
    gave_way: u64,
    turns: Turns,
}

#[derive(Debug)]
struct Entry {
    client: IpAddr,
    /// Since when the server waits for the client to send. `None`: the client waits for the server.
    waits_since: Option<Instant>,
    /// Since when the client takes nothing of an answer.
    stalls_since: Option<Instant>,
    /// Bytes of the body so far, and the time of its first byte.
    body: (usize, Option<Instant>),
    is_ending: bool,
    ends: Arc<Notify>,
    body_ends: Arc<Notify>,
}

impl Entry {
    fn waited_for_since(&self) -> Option<Instant> {
        self.waits_since.or(self.stalls_since).filter(|_| !self.is_ending)
    }
}

impl Connections {
    pub fn new(most: usize, most_body_bytes: usize) -> Arc<Self> {
        Arc::new(Connections { most, most_body_bytes, state: Mutex::default(), freed: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place, and takes it.
    pub async fn enter(self: &Arc<Self>, client: IpAddr) -> ConnectionSlot {
        loop {
            {
                let mut state = self.state();
                if state.open.len() < self.most {
                    return self.place(&mut state, client);
                }
                state.give_way(self.most);
            }
            let _ = tokio::time::timeout(RECHECK, self.freed.notified()).await;
        }
    }

    fn place(self: &Arc<Self>, state: &mut State, client: IpAddr) -> ConnectionSlot {
        let (number, ends, body_ends) = (state.number, Arc::new(Notify::new()), Arc::new(Notify::new()));
        state.number += 1;
        let entry = Entry {
            client,
            waits_since: Some(Instant::now()),
            stalls_since: None,
            body: (0, None),
            is_ending: false,
            ends: Arc::clone(&ends),
            body_ends: Arc::clone(&body_ends),
        };
        state.open.insert(number, entry);
        ConnectionSlot { all: Arc::clone(self), number, client, ends, body_ends }
    }

    /// Closes a connection that keeps the server waiting, for instance because there is no file for another one.
    pub fn make_room(&self) {
        self.state().give_way(0);
    }

    /// Waits until no request is in progress, and every answer is written.
    pub async fn idle(&self) {
        let is_busy = |entry: &Entry| entry.waits_since.is_none() || entry.stalls_since.is_some();
        while self.state().open.values().any(is_busy) {
            let _ = tokio::time::timeout(RECHECK, self.freed.notified()).await;
        }
    }

    /// The number of connections that are open, and of those that gave way so far.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.state();
        (state.open.len(), state.gave_way)
    }
}

impl State {
    /// Ends a connection, unless so many are ending that fewer than `most` will be left.
    fn give_way(&mut self, most: usize) {
        if self.open.values().filter(|entry| !entry.is_ending).count() < most {
            return;
        }
        let mut of_client: BTreeMap<IpAddr, usize> = BTreeMap::new();
        self.open.values().for_each(|entry| *of_client.entry(entry.client).or_default() += 1);
        let candidates = self.open.values_mut().filter_map(|entry| Some((entry.waited_for_since()?, entry)));
        let rank = |(since, entry): &(Instant, &mut Entry)| (usize::MAX - of_client[&entry.client], *since);
        if let Some((_, entry)) = candidates.min_by_key(rank) {
            entry.is_ending = true;
            entry.ends.notify_one();
            self.gave_way += 1;
        }
    }
}

/// The place of a connection, until it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    all: Arc<Connections>,
    number: u64,
    pub client: IpAddr,
    ends: Arc<Notify>,
    body_ends: Arc<Notify>,
}

impl ConnectionSlot {
    fn change<T>(&self, change: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        self.all.state().open.get_mut(&self.number).map(change)
    }

    /// From here on the server waits for the client to send.
    pub fn waits(&self) {
        self.change(|entry| entry.waits_since = Some(Instant::now()));
        self.all.freed.notify_waiters();
    }

    /// From here on the client waits for the server.
    pub fn works(&self) {
        self.change(|entry| entry.waits_since = None);
    }

    /// Whether the client takes nothing of what is written.
    pub fn stalls(&self, stalls: bool) {
        self.change(|entry| {
            entry.stalls_since = if stalls { entry.stalls_since.or_else(|| Some(Instant::now())) } else { None };
        });
    }

    /// Waits until the connection has to give way.
    pub async fn ended(&self) {
        self.ends.notified().await;
    }

    /// Waits until the body has to give way.
    pub async fn body_ended(&self) {
        self.body_ends.notified().await;
    }

    /// Waits until a body of so many bytes may be read and parsed.
    pub async fn turn_to_send(&self, bytes: usize) {
        let now = Instant::now();
        let at = {
            let mut state = self.all.state();
            let clients: BTreeSet<IpAddr> = state.open.values().map(|entry| entry.client).collect();
            state.turns.at((self.client, bytes), clients.len(), now)
        };
        if at > now + LEAST_DELAY {
            tokio::time::sleep_until(at.into()).await;
        }
    }

    /// Notes the time that parsing a body took.
    pub fn parsed(&self, bytes: usize, took: Duration) {
        self.all.state().turns.parsed(bytes, took);
    }

    /// Waits until a body may hold so many bytes more. Meanwhile the oldest of the bodies that come slowly gives way.
    pub async fn room_in_body(&self, bytes: usize) {
        loop {
            {
                let mut state = self.all.state();
                let fits = state.body_bytes + bytes <= self.all.most_body_bytes;
                let others = state.open.iter_mut().filter(|(number, _)| **number != self.number);
                let slow = others.filter_map(|(_, entry)| Some((entry.body.1?, entry)));
                let slow = slow.filter(|(since, _)| !fits && since.elapsed() > PROMPT_BODY);
                if let Some((_, entry)) = slow.min_by_key(|(since, _)| *since) {
                    entry.body_ends.notify_one();
                }
                if fits {
                    state.body_bytes += bytes;
                    if let Some(entry) = state.open.get_mut(&self.number) {
                        entry.body = (entry.body.0 + bytes, entry.body.1.or_else(|| Some(Instant::now())));
                    }
                    return;
                }
            }
            let _ = tokio::time::timeout(RECHECK, self.all.freed.notified()).await;
        }
    }

    /// The body's memory is free.
    pub fn body_is_over(&self) {
        let held = self.change(|entry| std::mem::take(&mut entry.body));
        self.all.state().body_bytes -= held.unwrap_or_default().0;
        self.all.freed.notify_waiters();
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.all.state();
        if let Some(entry) = state.open.remove(&self.number) {
            state.body_bytes -= entry.body.0;
        }
        drop(state);
        self.all.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work)
    }

    fn client(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    /// Whether a notice came.
    async fn is_told(told: impl Future<Output = ()>) -> bool {
        tokio::time::timeout(Duration::from_millis(1), told).await.is_ok()
    }

    #[test]
    fn who_has_most_connections_and_is_waited_for_longest_gives_way() {
        block_on(async {
            let all = Connections::new(4, 100);
            let busy = all.enter(client(1)).await;
            busy.works();
            let (old, young) = (all.enter(client(1)).await, all.enter(client(1)).await);
            let other = all.enter(client(2)).await;
            old.waits();
            young.waits();
            all.state().give_way(4);
            assert!(is_told(old.ended()).await, "client 1 has three, and this one waits longest");
            for place in [&busy, &young, &other] {
                assert!(!is_told(place.ended()).await);
            }
            drop(old);
            let new = all.enter(client(3)).await;
            assert_eq!((all.counts(), new.client), ((4, 1), client(3)));
            // While every client waits for the server, nobody gives way.
            [&young, &other, &new].iter().for_each(|place| place.works());
            assert!(tokio::time::timeout(Duration::from_millis(50), all.enter(client(4))).await.is_err());
            other.stalls(true);
            all.state().give_way(4);
            assert!(is_told(other.ended()).await, "it does not read");
        });
    }

    #[test]
    fn a_client_parses_no_more_than_its_part_of_the_time_and_small_bodies_do_not_wait_for_large_ones() {
        let (mut turns, begun) = (Turns::default(), Instant::now());
        (0..200).for_each(|_| turns.parsed(1 << 17, Duration::from_millis(1)));
        let ms = |at: Instant| at.saturating_duration_since(begun).as_millis();
        let large: Vec<u128> = (0..4).map(|_| ms(turns.at((client(1), 1 << 17), 10, begun))).collect();
        assert!(large.windows(2).all(|pair| (8..=9).contains(&(pair[1] - pair[0]))) && large[0] == 0, "{large:?}");
        let (own_small, other) = (turns.at((client(1), 100), 10, begun), turns.at((client(2), 1 << 17), 10, begun));
        assert_eq!((own_small, other), (begun, begun));
        // What has passed is forgotten, and one client alone has half of the time.
        let later = begun + Duration::from_secs(1);
        let alone = [0; 2].map(|_| turns.at((client(1), 1 << 17), 1, later));
        assert!(alone[0] == later && (900..=1000).contains(&(alone[1] - later).as_micros()), "{alone:?}");
        assert_eq!(turns.next.len(), 1);
    }

    #[test]
    fn a_body_waits_for_memory_and_gives_it_back() {
        block_on(async {
            let all = Connections::new(4, 100);
            let (first, second) = (all.enter(client(1)).await, all.enter(client(2)).await);
            first.room_in_body(60).await;
            assert!(!is_told(second.room_in_body(60)).await, "the first body is young, so the second waits");
            first.body_is_over();
            second.room_in_body(60).await;
            drop(second);
            first.room_in_body(100).await;
            assert!(!is_told(first.body_ended()).await);
        });
    }
}
