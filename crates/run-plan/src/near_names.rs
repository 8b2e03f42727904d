//! Parameters' names that a mistyped item may have meant.

/// The most similar components of parameters' names to those of an item that names nothing: at most three.
pub fn near_names(item: &str, known: &[String]) -> Vec<String> {
    let plain = |text: &str| text.replace(['_', '-', '*', '?'], "").to_lowercase();
    let typed: Vec<String> = item.split('.').map(plain).filter(|part| !part.is_empty()).collect();
    let words = ["norms", "biases"].map(str::to_owned);
    let mut scored: Vec<(f64, &String)> = Vec::new();
    for name in known.iter().chain(&words) {
        let of = |part: &String| strsim::jaro_winkler(&plain(name), part);
        let score = typed.iter().map(of).filter(|score| *score < 1.0 || typed.len() == 1).fold(0.0, f64::max);
        scored.push((score, name));
    }
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.into_iter().filter(|(score, _)| *score > 0.8).take(3).map(|(_, name)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_what_was_meant() {
        let known = ["shared", "encoder", "block", "layer", "SelfAttention", "q", "layer_norm", "lora_A", "decoder"];
        let known = known.map(str::to_owned);
        for (item, meant) in [("encodr", "encoder"), ("*LayrNorm*", "layer_norm"), ("*.self_attn.*", "SelfAttention")] {
            assert_eq!(near_names(item, &known).first().map(String::as_str), Some(meant), "{item}");
        }
        assert!(near_names("*.xyz.*", &known).is_empty());
    }
}
