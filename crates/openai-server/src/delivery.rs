//! The way of a request's events from the engine to its connection: what the jobs of the request share with it.
//!
//! Text that no client has taken yet is counted over all requests. When it reaches the server's limit, requests that hold more than their
//! share of it end. So clients that do not read cannot fill the memory.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::event::{Event, TokenLogprob};

/// Bytes of an event beside its texts.
const EVENT_BYTES: usize = 160;

/// Bytes of a number of a vector: itself, and its text in the answer.
pub const BYTES_OF_A_NUMBER: usize = size_of::<f32>() + NUMBER_TEXT_BYTES;
/// The longest text of an f32, such as `-1.1754944e-38`, and a comma, rounded up.
pub(crate) const NUMBER_TEXT_BYTES: usize = 16;

/// The text of all requests that no client has taken yet.
#[derive(Debug)]
pub(crate) struct Untaken {
    bytes: AtomicUsize,
    /// Half of the limit. Beyond it, requests with more than `share` end, so all others together take the other half at most.
    most: usize,
    share: usize,
}

impl Untaken {
    /// At most `most` bytes, for this many requests.
    pub fn new(most: usize, requests: usize) -> Arc<Self> {
        let most = most / 2;
        Arc::new(Untaken { bytes: AtomicUsize::new(0), most, share: most / requests.max(1) })
    }
}

/// The state of one request's answers.
#[derive(Debug)]
pub(crate) struct Delivery {
    untaken: Arc<Untaken>,
    bytes: AtomicUsize,
    is_cut: AtomicBool,
    first_token: OnceLock<Instant>,
}

impl Delivery {
    pub fn new(untaken: &Arc<Untaken>) -> Arc<Self> {
        Arc::new(Delivery {
            untaken: Arc::clone(untaken),
            bytes: AtomicUsize::new(0),
            is_cut: AtomicBool::new(false),
            first_token: OnceLock::new(),
        })
    }

    /// Counts an event that is not sent yet. False if the request holds too much, and ends.
    pub fn sent(&self, event: &Event) -> bool {
        self.hold(bytes_of(event))
    }

    /// Counts bytes that the request holds until its answer is sent. False if they are too many, and the request ends.
    pub fn hold(&self, bytes: usize) -> bool {
        let all = self.untaken.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let own = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if all > self.untaken.most && own > self.untaken.share {
            self.is_cut.store(true, Ordering::Relaxed);
        }
        !self.is_cut()
    }

    /// An event whose text was handed on to the client.
    pub fn taken(&self, event: &Event) {
        let bytes = bytes_of(event);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.untaken.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether the request ended because its client takes nothing.
    pub fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }

    /// Notes the time of the first token.
    pub fn token_made(&self) {
        self.first_token.get_or_init(Instant::now);
    }

    /// The time of the first token.
    pub fn first_token(&self) -> Option<Instant> {
        self.first_token.get().copied()
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.untaken.bytes.fetch_sub(self.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

fn bytes_of(event: &Event) -> usize {
    if let Event::Vector { values, .. } = event {
        return EVENT_BYTES + values.len() * BYTES_OF_A_NUMBER;
    }
    let Event::Text { text, logprobs, .. } = event else { return EVENT_BYTES };
    let token = |token: &TokenLogprob| {
        2 * EVENT_BYTES + token.token.len() + token.likeliest.iter().map(|(text, _)| text.len() + 64).sum::<usize>()
    };
    EVENT_BYTES + text.len() + logprobs.iter().map(token).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(bytes: usize) -> Event {
        Event::Text { choice: 0, text: "x".repeat(bytes), tokens: 1, logprobs: Vec::new() }
    }

    #[test]
    fn the_text_of_any_number_is_counted() {
        for number in [f32::MIN, f32::MIN_POSITIVE, -1.175_494_4e-38, 1.0, -0.0, f32::from_bits(1), 12_345_679.0] {
            let text = serde_json::to_string(&[number, number]).unwrap();
            assert!(text.len() <= 2 * NUMBER_TEXT_BYTES, "{text}");
        }
        let vector = Event::Vector { choice: 0, values: vec![0.5; 100] };
        assert_eq!(bytes_of(&vector), EVENT_BYTES + 100 * BYTES_OF_A_NUMBER);
    }

    #[test]
    fn who_takes_nothing_ends_once_all_hold_too_much_and_no_one_else_does() {
        let untaken = Untaken::new(200_000, 10);
        let (hog, small) = (Delivery::new(&untaken), Delivery::new(&untaken));
        let sent = (0..1000).take_while(|_| hog.sent(&text(1000))).count();
        assert!((70..90).contains(&sent), "{sent} of 1160 bytes each fit into half of the limit");
        assert!(hog.is_cut() && small.sent(&text(1000)), "a small request goes on");
        drop(hog);
        assert!((0..50).all(|_| small.sent(&text(1000))), "what was held is free again");
        (0..51).for_each(|_| small.taken(&text(1000)));
        drop(small);
        assert_eq!(untaken.bytes.load(Ordering::Relaxed), 0);
    }
}
