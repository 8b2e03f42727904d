//! The card of an exported model: a README.md for the Hugging Face hub, with the scores that its run measured.

use std::path::{Path, PathBuf};

use serde_json::Value;
use t5::{Config, ParameterSpec};

use super::file_name;
use crate::cli::export_flags::{ExportArgs, Format, GgufNames};
use crate::files::run_dir;

/// Scores of an evaluation that show how good a model is, with their names and significant digits.
const SCORES: [(&str, &str, usize); 14] = [
    ("loss", "loss", 4),
    ("perplexity", "perplexity", 3),
    ("bleu", "BLEU", 2),
    ("chrf", "chrF", 2),
    ("chrf++", "chrF++", 2),
    ("rouge1", "ROUGE-1", 4),
    ("rouge2", "ROUGE-2", 4),
    ("rougeL", "ROUGE-L", 4),
    ("rougeLsum", "ROUGE-Lsum", 4),
    ("exact_match", "exact match", 4),
    ("accuracy", "accuracy", 4),
    ("micro_f1", "micro F1", 4),
    ("macro_f1", "macro F1", 4),
    ("generated_samples", "answers generated", 0),
];

/// The contents of a card.
pub struct Card<'a> {
    /// The flags of the export.
    pub flags: &'a ExportArgs,
    /// The model.
    pub config: &'a Config,
    /// Its name.
    pub name: &'a str,
    /// The directories of the model and the adapter.
    pub directories: &'a [&'a Path],
}

impl Card<'_> {
    /// The text.
    pub fn text(&self) -> String {
        let Card { flags, config, name, .. } = self;
        let (format, dtype) = (flags.format.name(), model_formats::Dtype::from(flags.dtype).name());
        let title = match flags.format {
            Format::Gguf => "GGUF",
            Format::Ctranslate2 => "CTranslate2",
        };
        let parameters: u64 = ParameterSpec::elements_of_all(config);
        let mut text = format!(
            "---\nlibrary_name: {format}\npipeline_tag: text2text-generation\ntags:\n- t5\n- {format}\n---\n\n\
             # {name}\n\n\
             A {} model of {} parameters as {title}, its matrices in {dtype}.\n\n\
             | | |\n| --- | --- |\n\
             | blocks | {} + {} |\n| width | {} |\n| heads | {} of {} |\n| feed-forward | {} of width {} |\n\
             | vocabulary | {} |\n| embedding and head | {} |\n",
            config.family.model_type(),
            grouped(parameters),
            config.num_layers,
            config.num_decoder_layers,
            config.d_model,
            config.num_heads,
            config.d_kv,
            config.feed_forward_proj,
            config.d_ff,
            config.vocab_size,
            if config.tie_word_embeddings { "one table" } else { "two tables" },
        );
        text.push_str(&self.scores().unwrap_or_else(|| {
            "\n## Scores\n\nNone: the run of this model is not beside it, or it measured none.\n".to_owned()
        }));
        text.push_str(&self.how_to_use());
        text.push_str(&format!("\nWritten by train_low_mem {}.\n", env!("CARGO_PKG_VERSION")));
        text
    }

    fn scores(&self) -> Option<String> {
        let evaluation = self.directories.iter().rev().find_map(|directory| last_evaluation(directory))?;
        let number = |key: &str| evaluation.get(key).and_then(Value::as_f64).filter(|number| number.is_finite());
        let samples = number("samples")?;
        let step = number("step").map_or(String::new(), |step| format!(" after step {step}"));
        let mut text = format!(
            "\n## Scores\n\nMeasured by the training run{step} on {samples} validation rows, with the weights as they were trained.\n\n\
             | score | value |\n| --- | --- |\n"
        );
        for (key, name, digits) in SCORES {
            if let Some(value) = number(key) {
                text.push_str(&format!("| {name} | {value:.digits$} |\n"));
            }
        }
        if let Some(signature) = evaluation.get("bleu_signature").and_then(Value::as_str) {
            text.push_str(&format!("\nBLEU: `{signature}`\n"));
        }
        Some(text)
    }

    fn how_to_use(&self) -> String {
        let file = file_name(self.flags);
        let prefix = self.config.prefix();
        let prefix = match prefix {
            "" => String::new(),
            prefix => format!("\nTexts begin with `{prefix}`.\n"),
        };
        match (self.flags.format, self.flags.gguf_names) {
            (Format::Gguf, GgufNames::LlamaCpp) => {
                format!(
                    "\n## Use\n\n```sh\nllama-completion -m {file} --no-conversation --temp 0 -p 'a text' -n 64\n```\n\n\
                     ```python\nfrom transformers import AutoConfig, AutoModelForSeq2SeqLM\n\
                     config = AutoConfig.from_pretrained(\"MODEL\")  # the model that was exported: GGUF does not say what gate there is\n\
                     config.scale_decoder_outputs = False  # the head in the file has the scale in it\n\
                     model = AutoModelForSeq2SeqLM.from_pretrained(\".\", gguf_file=\"{file}\", config=config)\n```\n{prefix}"
                )
            }
            (Format::Gguf, GgufNames::Hf) => format!(
                "\n## Use\n\nTensors have the names of Hugging Face, as candle's `quantized_t5` reads them: `{file}` beside the \
                 model's own config.json and tokenizer.json.\n{prefix}"
            ),
            (Format::Ctranslate2, _) => format!(
                "\n## Use\n\n```python\nimport ctranslate2\n\
                 translator = ctranslate2.Translator(\".\")\n\
                 tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(\"a text\"))  # the model's own tokenizer\n\
                 answer = translator.translate_batch([tokens])[0].hypotheses[0]\n```\n{prefix}"
            ),
        }
    }
}

/// The last evaluation of the run that made a model or an adapter.
fn last_evaluation(directory: &Path) -> Option<Value> {
    let absolute = regular_file::real_path(directory).ok()?;
    let places: [Option<PathBuf>; 2] = [Some(absolute.clone()), absolute.parent().map(Path::to_owned)];
    places.into_iter().flatten().find_map(|place| {
        let finished = run_dir::read_finished(&place)?;
        Some(finished["history"]["last_evaluation"].clone()).filter(Value::is_object)
    })
}

/// `60,506,624`
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        for (number, expected) in [(7, "7"), (999, "999"), (1000, "1,000"), (60_506_624, "60,506,624")] {
            assert_eq!(grouped(number), expected);
        }
    }
}
