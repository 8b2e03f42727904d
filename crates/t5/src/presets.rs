//! Published shapes by name, for `model.config = "t5-small"`.

use crate::config::Config;
use crate::config::gemma::{Gemma, StackConfig};
use crate::family::Family;

/// One preset: name, (d_model, d_ff, d_kv, heads, encoder layers, decoder layers), vocabulary, projection.
type Preset = (&'static str, [usize; 6], usize, &'static str);

const PRESETS: &[Preset] = &[
    // This project's own: learns small tasks on two cores in minutes.
    ("tiny", [128, 512, 32, 4, 3, 3], 4096, "relu"),
    // Raffel et al. 2020, section 2.1 and 3.7.
    ("t5-small", [512, 2048, 64, 8, 6, 6], 32128, "relu"),
    ("t5-base", [768, 3072, 64, 12, 12, 12], 32128, "relu"),
    ("t5-large", [1024, 4096, 64, 16, 24, 24], 32128, "relu"),
    ("t5-3b", [1024, 16384, 128, 32, 24, 24], 32128, "relu"),
    // T5 v1.1: gated-gelu, separate head, no dropout in pretraining.
    ("t5-v1.1-small", [512, 1024, 64, 6, 8, 8], 32128, "gated-gelu"),
    ("t5-v1.1-base", [768, 2048, 64, 12, 12, 12], 32128, "gated-gelu"),
    ("t5-v1.1-large", [1024, 2816, 64, 16, 24, 24], 32128, "gated-gelu"),
    ("t5-v1.1-xl", [2048, 5120, 64, 32, 24, 24], 32128, "gated-gelu"),
    // charent/ChatLM-mini-Chinese.
    ("chatlm-0.2b", [768, 3072, 64, 12, 10, 10], 29298, "relu"),
];

/// One preset of T5Gemma 2: name, (width, inner width, heads, heads of keys, head size, layers of each stack, window), vocabulary, and the
/// factor of the rotary positions of full layers.
type GemmaPreset = (&'static str, [usize; 7], usize, f64);

const GEMMAS: &[GemmaPreset] = &[
    // This project's own.
    ("tiny-gemma", [128, 512, 4, 1, 32, 3, 64], 4096, 1.0),
    // Text only: the published ones have a vision tower beside.
    ("t5gemma-2-270m", [640, 2048, 4, 1, 256, 18, 512], 262_144, 1.0),
    ("t5gemma-2-1b", [1152, 6912, 4, 1, 256, 26, 512], 262_144, 1.0),
    ("t5gemma-2-4b", [2560, 10240, 8, 4, 256, 34, 1024], 262_144, 8.0),
];

impl Config {
    /// The names that [`Config::preset`] knows, smallest family first.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.iter().map(|preset| preset.0).chain(GEMMAS.iter().map(|preset| preset.0))
    }

    fn gemma_preset(
        &(_, [width, inner, heads, key_heads, head_size, layers, window], vocab_size, factor): &GemmaPreset,
    ) -> Config {
        let stack = StackConfig {
            width,
            inner,
            heads,
            key_heads,
            head_size,
            scale: (head_size as f64).powf(-0.5),
            score_cap: None,
            window,
            is_sliding: (1..=layers).map(|layer| layer % 6 != 0).collect(),
            rotary: [(1_000_000.0, factor), (10_000.0, 1.0)],
            epsilon: 1e-6,
            positions: 131_072,
        };
        let (encoder, decoder) = (stack.clone(), stack);
        let gemma = Gemma { encoder, decoder, logit_cap: None, initializer_range: 0.02, image_tokens: Vec::new() };
        Config::of_gemma(Family::T5Gemma2, vocab_size, gemma)
    }

    /// The architecture with this name, or `None`. The vocabulary size is the published one; set
    /// `vocab_size` to train with another tokenizer.
    pub fn preset(name: &str) -> Option<Config> {
        if let Some(preset) = GEMMAS.iter().find(|preset| preset.0 == name) {
            return Some(Config::gemma_preset(preset));
        }
        let &(_, [d_model, d_ff, d_kv, num_heads, num_layers, num_decoder_layers], vocab_size, projection) =
            PRESETS.iter().find(|preset| preset.0 == name)?;
        let tied = projection == "relu";
        let mut config = Config {
            d_model,
            d_ff,
            d_kv,
            num_heads,
            num_layers,
            num_decoder_layers,
            vocab_size,
            tie_word_embeddings: tied,
            scale_decoder_outputs: tied,
            ..Config::default()
        };
        config.set_feed_forward_proj(projection).ok()?;
        Some(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParameterSpec;

    #[test]
    fn every_preset_is_a_valid_model_from_a_million_to_seven_billion_parameters() {
        for name in Config::preset_names() {
            let config = Config::preset(name).unwrap();
            config.validate().unwrap();
            let parameters: u64 = ParameterSpec::all(&config).iter().map(|p| p.elements()).sum();
            assert!((1_000_000..7_100_000_000).contains(&parameters), "{name} has {parameters}");
        }
        assert!(Config::preset("t5-medium").is_none());
    }

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let check = |name: &str, expected: u64| {
            let config = Config::preset(name).unwrap();
            let parameters: u64 = ParameterSpec::all(&config).iter().map(|p| p.elements()).sum();
            assert_eq!(parameters, expected, "{name}");
        };
        check("t5-small", 60_506_624);
        check("t5-base", 222_903_552);
        check("t5-large", 737_668_096);
        check("t5-3b", 2_851_598_336);
        check("t5-v1.1-small", 76_961_152);
        check("t5-v1.1-base", 247_577_856);
        check("chatlm-0.2b", 187_692_288);
        check("t5gemma-2-270m", 368_424_192);
        check("t5gemma-2-4b", 7_089_110_016);
    }
}
