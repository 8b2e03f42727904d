//! Writes T5 models in the formats of other programs: GGUF for llama.cpp, and CTranslate2's directories.
//!
//! A [`T5`] describes the model, a [`Vocabulary`] its tokens, and [`Weights`] gives the values. A format first checks that it
//! can represent all of them ([`Unsupported`]), and then writes them.
//!
//! Invariants:
//! * Values go from the source to the file some rows at a time. Otherwise only the header is in memory.
//! * A property that a format cannot represent is refused before anything is written. Nothing is left out silently.
//! * The output is a function of the model, its tokens and the options alone.
//!
//! ```
//! use model_formats::{Dtype, Error, T5, Weights, gguf};
//!
//! /// A model of zeros.
//! struct Zeros;
//! impl Weights for Zeros {
//!     type Error = Error;
//!     fn each_rows(
//!         &self,
//!         _: &str,
//!         shape: &[usize],
//!         each: &mut dyn FnMut(&[f32]) -> Result<(), Error>,
//!     ) -> Result<(), Error> {
//!         each(&vec![0.0; shape.iter().product()])
//!     }
//! }
//! let model = T5 { d_model: 8, d_kv: 4, d_ff: 16, heads: 2, vocab_size: 10, ..T5::small("zeros") };
//! let file = gguf::File::with_hugging_face_names(&model, Dtype::F32)?;
//! let mut bytes = Vec::new();
//! file.write(&mut bytes, &Zeros)?;
//! assert_eq!(bytes.len() as u64, file.bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod ctranslate2;
mod error;
pub mod gguf;
mod t5;
mod values;
mod vocabulary;

pub use error::{Error, Unsupported};
pub use t5::T5;
pub use values::{Dtype, EachRows, Weights};
pub use vocabulary::{Role, Token, Vocabulary};
