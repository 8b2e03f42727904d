//! The page "Will it fit?": [`run_plan::answer()`] behind an interface of bytes, for WebAssembly.
//!
//! A page writes a question as JSON into the memory that [`question`] gives, calls [`answer`], and reads the answer as JSON
//! from where [`answer_at`] says. A trap ends the instance, and the page starts another.
//!
//! ```
//! let asked = br#"{"set": ["model.config=t5-small", "memory.budget=2GiB"], "machine": {"available": 8589934592, "rss": 33554432}}"#;
//! let answer: serde_json::Value = serde_json::from_slice(&will_it_fit::answered(asked)).unwrap();
//! assert_eq!(answer["exit"], 0, "{answer}");
//! ```

// Names that JavaScript calls.
#![allow(unsafe_code)]

use std::cell::RefCell;

use run_plan::{Answer, Question};

/// A longer question is none.
const MOST_QUESTION_BYTES: usize = 16 << 20;

thread_local! {
    static QUESTION: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static ANSWER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Memory for a question of so many bytes; null where that is too long. It is good until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn question(bytes: usize) -> *mut u8 {
    if bytes > MOST_QUESTION_BYTES {
        return std::ptr::null_mut();
    }
    QUESTION.with_borrow_mut(|question| {
        *question = vec![0; bytes];
        question.as_mut_ptr()
    })
}

/// Answers the question that was written there. Returns the bytes of the answer.
#[unsafe(no_mangle)]
pub extern "C" fn answer() -> usize {
    let question = QUESTION.take();
    ANSWER.with_borrow_mut(|answer| {
        *answer = answered(&question);
        answer.len()
    })
}

/// Where the answer lies. It is good until the next call.
#[unsafe(no_mangle)]
pub extern "C" fn answer_at() -> *const u8 {
    ANSWER.with_borrow(|answer| answer.as_ptr())
}

/// The answer to a question, both as JSON.
pub fn answered(question: &[u8]) -> Vec<u8> {
    let answer = match serde_json::from_slice::<Question>(question) {
        Ok(question) => run_plan::answer(&question),
        Err(error) => Answer { exit: 2, error: format!("error: the question: {error}\n"), ..Answer::default() },
    };
    serde_json::to_vec(&answer).unwrap_or_default()
}
