//! The places of a queue, and the memory that requests take in them.
//!
//! A place is the memory of one longest prompt. Its jobs take parts of places: as many as their bytes fill, and a whole place for each request.
//! Of a request that fills more than half of the queue, half is counted. The bytes beyond it are in [`bytes`].

use std::sync::Arc;

use crate::request::{LABEL_BYTES, LABELS_A_ROW, Options, Prompt, RequestLimits, STOPS};

/// The parts of a place.
pub const PARTS: usize = 1 << 12;

/// Bytes of a waiting job beside its texts: itself, its settings, and its place in a list that has grown.
const JOB_BYTES: usize = 1 << 10;

/// Bytes of the settings of a prompt with their stop texts.
const SETTINGS_BYTES: usize = 4 << 10;

/// Bytes of a text beside its letters: itself and its allocation.
const TEXT_BYTES: usize = 32;

/// The parts that each job of a request takes, where a place has so many bytes.
pub fn parts(jobs: &[(&Arc<Prompt>, &Options)], place_bytes: usize) -> Vec<usize> {
    let each = PARTS / jobs.len().max(1);
    let of_job = |(at, &(prompt, options)): (usize, &(&Arc<Prompt>, &Options))| {
        // What jobs share is held until the last of them has left.
        let next = jobs.get(at + 1).map(|(next, _)| *next);
        let of_prompt = match (next, next.and_then(|next| next.query()), prompt.query()) {
            (Some(next), ..) if Arc::ptr_eq(next, prompt) => 0,
            (_, Some(next), Some(query)) if Arc::ptr_eq(next, query) => prompt.bytes() - query.len(),
            _ => prompt.bytes(),
        };
        let texts = options.stop.iter().chain(&options.labels).map(|text| text.len() + TEXT_BYTES);
        let bytes = JOB_BYTES + of_prompt + texts.sum::<usize>();
        (bytes * PARTS).div_ceil(place_bytes.max(1)).max(each)
    };
    jobs.iter().enumerate().map(of_job).collect()
}

/// Of a request's `all` parts, those that are counted for `parts` of them in a queue of so many places.
pub fn counted(parts: usize, all: usize, places: usize) -> usize {
    let most = most(places);
    if all > most { parts * most / all } else { parts }
}

/// The most parts that are counted for a request.
fn most(places: usize) -> usize {
    (places * PARTS / 2).max(PARTS)
}

/// The most bytes that wait in a queue of so many places of so many bytes, if no request has more bytes than `largest`.
pub fn bytes(places: usize, place_bytes: usize, largest: usize) -> usize {
    // At most two requests fit of which half of the queue is counted.
    places * place_bytes + places.min(2) * largest.saturating_sub(most(places) * place_bytes / PARTS)
}

/// The bytes of a place: one longest prompt with its settings and stop texts.
pub fn place_bytes(limits: &RequestLimits) -> usize {
    limits.prompt_bytes + SETTINGS_BYTES
}

/// The most bytes of a request that waits, from a body of so many bytes.
pub fn largest(limits: &RequestLimits, body_bytes: usize) -> usize {
    // A token id has at least two bytes in JSON, and four in memory.
    let of_request = |jobs: usize, texts: usize| body_bytes * 2 + jobs * JOB_BYTES + texts * (LABEL_BYTES + TEXT_BYTES);
    let scored = of_request(limits.prompts * LABELS_A_ROW, limits.prompts * LABELS_A_ROW * limits.rows);
    scored.max(of_request(limits.prompts, limits.prompts * STOPS)).max(of_request(limits.texts, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_about_labels_of_one_prompt_hold_it_once_and_the_last_one_holds_it() {
        let (prompt, options) = (Arc::new(Prompt::Text("x".repeat(16 << 10))), Options::default());
        let taken = parts(&vec![(&prompt, &options); 16], 20 << 10);
        assert!(taken.iter().sum::<usize>() < 2 * PARTS && taken[15] > 2 * taken[0], "{taken:?} of {PARTS}");
        let query: Arc<str> = "q".repeat(4 << 10).into();
        let pairs = ["a", "b"].map(|text| Arc::new(Prompt::Pair(Arc::clone(&query), text.to_owned())));
        let taken = parts(&[(&pairs[0], &options), (&pairs[1], &options)], 4 << 10);
        assert!(taken[0] == PARTS / 2 && taken[1] > PARTS, "{taken:?}");
    }

    #[test]
    fn a_request_of_more_than_half_of_the_queue_counts_as_half_and_the_bill_has_the_rest() {
        assert_eq!(
            [(1, 900), (2, 900), (8, 8 * PARTS)].map(|(places, all)| counted(all, all, places)),
            [900, 900, 4 * PARTS]
        );
        let limits = RequestLimits { texts: 4, prompts: 1, rows: 1, ..RequestLimits::default() };
        let largest = largest(&limits, 64 << 10);
        assert_eq!((place_bytes(&limits), largest), (20 << 10, (128 << 10) + 16 * (1 << 10) + 16 * 288));
        assert_eq!(bytes(64, 20 << 10, largest), 64 * (20 << 10));
        assert_eq!(bytes(4, 20 << 10, largest), 4 * (20 << 10) + 2 * (largest - (40 << 10)));
        assert_eq!(bytes(1, 20 << 10, largest), largest);
    }
}
