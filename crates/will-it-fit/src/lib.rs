//! The page "Will it fit?": [`run_plan::answer()`] behind an interface of bytes, for WebAssembly.
//!
//! A page writes a question as JSON into the memory that [`question`] returns, calls [`answer`], and reads the answer as JSON from
//! [`answer_at`]. A trap ends the instance, and the page starts a new one.
//!
//! ```
//! let asked = br#"{"set": ["model.config=t5-small", "memory.budget=2GiB"], "machine": {"available": 8589934592, "rss": 33554432}}"#;
//! let answer: serde_json::Value = serde_json::from_slice(&will_it_fit::answered(asked)).unwrap();
//! assert_eq!(answer["exit"], 0, "{answer}");
//! ```

// JavaScript calls these functions by name.
#![allow(unsafe_code)]

use std::cell::RefCell;

use run_plan::{PlanOutput, Question};

/// The most bytes of a question.
const MAX_QUESTION_BYTES: usize = 16 << 20;

thread_local! {
    static QUESTION: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static ANSWER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns memory for a question of `bytes` bytes, or null if that is too long. The memory is valid until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn question(bytes: usize) -> *mut u8 {
    if bytes > MAX_QUESTION_BYTES {
        return std::ptr::null_mut();
    }
    QUESTION.with_borrow_mut(|question| {
        *question = vec![0; bytes];
        question.as_mut_ptr()
    })
}

/// Answers the question in that memory. Returns the number of bytes of the answer.
#[unsafe(no_mangle)]
pub extern "C" fn answer() -> usize {
    let question = QUESTION.take();
    ANSWER.with_borrow_mut(|answer| {
        *answer = answered(&question);
        answer.len()
    })
}

/// Returns the address of the answer, which is valid until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn answer_at() -> *const u8 {
    ANSWER.with_borrow(|answer| answer.as_ptr())
}

/// The answer to a question, both as JSON.
pub fn answered(question: &[u8]) -> Vec<u8> {
    let answer = match serde_json::from_slice::<Question>(question) {
        Ok(question) => run_plan::answer(&question),
        Err(error) => PlanOutput { exit: 2, error: format!("error: the question: {error}\n"), ..PlanOutput::default() },
    };
    serde_json::to_vec(&answer).unwrap_or_default()
}
