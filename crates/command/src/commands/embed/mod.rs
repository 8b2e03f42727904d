//! `train_low_mem embed`: a vector of each text, with a model's encoder.
//!
//! Texts are read as a stream. A window of them is sorted by length and computed in batches of about the same number of tokens, so that
//! little is padded. The vectors are written in the order of the texts.

mod vector_file;

use std::time::Instant;

use dataloader::Side;
use memory_policy::{counted, plural};
use planner::AnswerBytes;
use row_files::Template;
use serde_json::json;
use t5::peft::AdapterDirectory;
use t5::{AnswerShape, Head, T5};

use crate::answers::inference::{Asked, Shape};
use crate::answers::prompts::{self, Inputs, Source};
use crate::cli::embed_flags::EmbedArgs;
use crate::config::PricesFrom;
use crate::failure::{Failure, Outcome};
use crate::files::sentence_transformers::{Dense, Modules};
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};
use crate::screen::report;
use crate::screen::stop::{self, Stop};
use vector_file::VectorFile;

/// The texts that are sorted together, in batches of texts of full length.
const BATCHES_SORTED_TOGETHER: usize = 16;

/// Writes the vectors.
pub fn embed(flags: &EmbedArgs) -> Outcome<()> {
    if flags.max_source_tokens < 2 {
        return Err(Failure::usage("`--max-source-tokens`: expected at least 2, for one token and EOS"));
    }
    let form = vector_file::Form::of(&flags.output)?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Adapted { directory, adapter } = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
    let mut config = t5::Config::from_file(&directory.join("config.json"))?.with_head(Head::Encoder)?;
    if let Some(adapter) = &adapter {
        config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
    }
    let modules = match flags.pooling {
        Some(pooling) => Modules { pooling: pooling.into(), ..Modules::default() },
        None => Modules::read(&directory)?.unwrap_or_default(),
    };
    let modules = Modules { normalizes: modules.normalizes || flags.normalize, ..modules };
    let dense = modules.dense.as_ref().map(|dense| Dense::load(dense, config.d_model)).transpose()?;
    let width = dense.as_ref().map_or(config.d_model, Dense::width);
    let tokenizer = model_directory::tokenizer(&directory)?;
    model_directory::check_size(&config, &tokenizer)?;
    stages.ends(stages::TOKENIZER)?;
    let budgets = flags.weights.budgets()?;
    let asked = Asked {
        directory: &directory,
        adapter: adapter.as_deref(),
        config: &config,
        device: device.as_ref(),
        prices: PricesFrom::of_environment(),
        activations: trainer::Precision::from(flags.precision).activations(),
        parameters: None,
        flags: &flags.weights,
        stages: &stages,
    };
    let column = Template::of_column(&flags.text_column);
    let source = Source { flags: "--text-column", given: Some(&column), of_run: None, usual: "text" };
    let inputs = Inputs { typed: &[], file: Some(&flags.input), source, text: &flags.text };
    let window = flags.batch_samples.max(1) * BATCHES_SORTED_TOGETHER;
    let (planned, limits) = asked.plan_to_read(inputs, budgets, |within| {
        let layer = dense.as_ref().map_or(0, Dense::bytes);
        let wide = config.d_model.max(width);
        let held = window_bytes(window, flags.max_source_tokens, wide) + form.bytes(width) + layer;
        let text = 2 * prompts::MAX_PROMPT_BYTES as u64 + within.bytes;
        Shape {
            prompts: planner::Reading { rows: held + text, batch: held },
            ..Shape::of_answers(flags.batch_samples.max(1), flags.max_source_tokens, AnswerShape::greedy(1))
        }
    })?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, bytes) = (planned.load()?, planned.answer_bytes()?);
    let begin = || VectorFile::begin(form, &flags.output, width);
    let file = stop.remove_at_end(begin, VectorFile::leftover)?;
    let most = (planned.plan.step.evaluation_samples, flags.max_source_tokens);
    let mut embedding = Embedding {
        model: &model,
        flags,
        modules,
        dense,
        width,
        bytes,
        most,
        file,
        texts: 0,
        tokens: 0,
        cut: (0, None),
    };
    let began = Instant::now();
    let mut waiting = Vec::with_capacity(window);
    for text in prompts::prompts(inputs, limits)? {
        waiting.push(embedding.source(&text?, &tokenizer)?);
        if waiting.len() == window {
            embedding.add(&std::mem::take(&mut waiting))?;
        }
    }
    embedding.add(&waiting)?;
    let seconds = began.elapsed().as_secs_f64();
    let Embedding { file, tokens, cut, .. } = embedding;
    let rows = file.finish()?;
    if let (cut, Some(first)) = cut {
        report::note(&format!(
            "{} of {} had more than {} tokens and were cut; the first is text {}; `--max-source-tokens N` reads more",
            counted(cut),
            plural(rows, "text"),
            flags.max_source_tokens,
            counted(first)
        ));
    }
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    let rate = tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    if flags.json {
        let mut line = json!({
            "rows": rows, "dimensions": width, "tokens": tokens, "cut_rows": cut.0, "seconds": seconds,
            "tokens_per_second": rate, "output": flags.output.display().to_string(),
        });
        planned.add_peaks(&mut line)?;
        return report::result(&format!("{line}\n"));
    }
    report::note(&format!(
        "{}: {} of {} numbers, {rate:.0} tokens/s",
        flags.output.display(),
        plural(rows, "vector"),
        counted(width as u64)
    ));
    if flags.weights.memory_budget.is_some() {
        report::note(&planned.peaks_in_words()?);
    }
    Ok(())
}

/// The most bytes of a window: tokens, vectors, and their order.
fn window_bytes(rows: usize, tokens: usize, width: usize) -> u64 {
    // A vector is computed, and copied to its place.
    (rows * (4 * tokens + 8 * width + 64)) as u64
}

/// Scales a vector to length 1.
fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt().max(1e-12);
    vector.iter_mut().for_each(|value| *value /= length);
}

struct Embedding<'a> {
    model: &'a T5,
    flags: &'a EmbedArgs,
    modules: Modules,
    dense: Option<Dense>,
    /// The numbers of a vector.
    width: usize,
    bytes: AnswerBytes,
    /// The planned batch: its samples, and their tokens.
    most: (usize, usize),
    file: VectorFile,
    texts: u64,
    tokens: u64,
    /// The number of texts that were cut, and the first of them, counted from 1.
    cut: (u64, Option<u64>),
}

impl Embedding<'_> {
    /// The tokens of a text, with EOS.
    fn source(&mut self, text: &str, tokenizer: &dataloader::Tokenizer) -> Outcome<Vec<u32>> {
        let room = self.flags.max_source_tokens - 1;
        let side = tokenizer.truncation_side().unwrap_or(Side::Right);
        let (mut ids, is_cut) = tokenizer.encode_prompt(&self.flags.source_prefix, text, room, side)?;
        self.tokens += ids.len() as u64 + 1;
        ids.extend(self.model.config().eos_token_ids.first().copied());
        self.texts += 1;
        if is_cut {
            self.cut = (self.cut.0 + 1, self.cut.1.or(Some(self.texts)));
        }
        Ok(ids)
    }

    /// Computes and writes the vectors of a window of texts.
    fn add(&mut self, sources: &[Vec<u32>]) -> Outcome<()> {
        let width = self.width;
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&row| std::cmp::Reverse(sources[row].len()));
        let mut vectors = vec![0.0; sources.len() * width];
        let mut rest = order.as_slice();
        let activations = trainer::Precision::from(self.flags.precision).activations();
        while let Some(&longest) = rest.first() {
            let (batch, later) = rest.split_at(self.samples(sources[longest].len()).min(rest.len()));
            let of_batch: Vec<&[u32]> = batch.iter().map(|&row| sources[row].as_slice()).collect();
            let Modules { pooling, normalizes, .. } = self.modules;
            let made = match &self.dense {
                None => self.model.vectors(&of_batch, pooling, normalizes, activations)?,
                Some(dense) => {
                    let mut made = dense.forward(&self.model.vectors(&of_batch, pooling, false, activations)?)?;
                    made.chunks_mut(width).filter(|_| normalizes).for_each(normalize);
                    made
                }
            };
            for (&row, vector) in batch.iter().zip(made.chunks(width)) {
                vectors[row * width..][..width].copy_from_slice(vector);
            }
            rest = later;
        }
        self.file.add(&vectors)
    }

    /// How many texts of this many tokens take at most the bytes of the planned batch.
    fn samples(&self, tokens: usize) -> usize {
        let (samples, longest) = self.most;
        let bytes = |samples, tokens| self.bytes.count(samples, tokens, AnswerShape::greedy(1));
        let most = bytes(samples, longest);
        let mut many = samples * longest / tokens.max(1);
        while many > samples && bytes(many, tokens) > most {
            many = (many * 7 / 8).max(samples);
        }
        many
    }
}
