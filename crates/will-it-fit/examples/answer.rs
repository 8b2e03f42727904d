//! Answers questions as the page does, natively: one question a line of standard input, one answer a line of standard output.

use std::io::{self, BufRead, Write};

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    for question in io::stdin().lock().lines() {
        out.write_all(&will_it_fit::answered(question?.as_bytes()))?;
        out.write_all(b"\n")?;
    }
    Ok(())
}
