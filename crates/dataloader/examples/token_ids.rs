//! Prints token ids of texts, for `scripts/compare_tokenizers.py`. Each input line is a JSON string; each output line has its ids.
//!
//! ```text
//! token_ids MODEL_DIRECTORY < texts.jsonl > ids.jsonl
//! ```

use std::io::{BufRead, Write};
use std::path::Path;

use dataloader::Tokenizer;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("expected a tokenizer or a model directory")?;
    let tokenizer = Tokenizer::load(Path::new(&path))?;
    let mut output = std::io::BufWriter::new(std::io::stdout().lock());
    for line in std::io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let ids = tokenizer.encode(&text)?;
        let (start, back) = (tokenizer.start_ids(), tokenizer.decode(&ids)?);
        writeln!(output, "{}", serde_json::json!({ "start": start, "ids": ids, "text": back }))?;
    }
    output.flush()?;
    Ok(())
}
