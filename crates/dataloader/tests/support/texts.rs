//! Texts that take much memory for each byte, and usual ones.

/// Bytes of each text.
pub const VALUE_BYTES: usize = 40_000;

/// Repeats a text up to `VALUE_BYTES` bytes.
fn cycle(text: &str) -> String {
    let mut cycle = text.repeat(VALUE_BYTES.div_ceil(text.len()));
    cycle.truncate(cycle.floor_char_boundary(VALUE_BYTES));
    cycle
}

/// Random letters from a simple generator.
fn letters(alphabet: &[u8], bytes: usize, seed: u64) -> String {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        alphabet[(state >> 33) as usize % alphabet.len()]
    };
    (0..bytes).map(|_| char::from(next())).collect()
}

/// Texts of [`VALUE_BYTES`] bytes.
pub fn hostile() -> Vec<String> {
    let mut texts: Vec<String> = [
        "seven twelve apple the reverse nine hundred forty ",
        "0123456789",
        "a1b2c3d4",
        "a b c d ",
        " . ,",
        ".,;:!?",
        "a\n\n b\r\n",
        " ",
        "\u{fdfa}",
        "\u{fdfa} ",
        "\u{1f600}\u{1f469}\u{200d}\u{1f467}",
        "\u{4e2d}\u{6587}\u{5b57}",
        "a",
        "e\u{301}\u{302}\u{303}",
        "\u{1}\u{2}",
        "\u{ff21}\u{3000}\u{337f}",
        "<extra_id_0>",
        "\u{1100}\u{1161}\u{11a8}",
    ]
    .map(cycle)
    .into();
    texts
        .extend([&b"0123456789abcdef"[..], b"ACGT", b"abcdefghijklmnopqrstuvwxyz"].map(|a| letters(a, VALUE_BYTES, 3)));
    // Words of about the length that a window repeats, before many short words.
    for bytes in (350..650).step_by(97) {
        texts.push(cycle(&format!("{}{}", letters(b"bcdfghjkl", bytes, 7), "1 ".repeat(400))));
        texts.push(cycle(&format!("{}{}", "\u{1f600}".repeat(bytes / 4), "a1".repeat(400))));
    }
    // A word of nearly the most bytes that are tokenized whole. It ends in a window of many short words.
    for bytes in (3000..4200).step_by(389) {
        texts.push(cycle(&format!("{}{}", letters(b"bcdfghjkl", bytes, 5), "1 ".repeat(3000))));
        texts.push(cycle(&format!("{}{}", "\u{1f600}".repeat(bytes / 4), "a1".repeat(3000))));
    }
    texts
}
