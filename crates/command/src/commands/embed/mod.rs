//! `train_low_mem embed`: a vector of each text, with a model's encoder.
//!
//! Texts are read as a stream, and the vectors are written in the order of the texts.

mod vector_file;

use std::time::Instant;

use memory_policy::{counted, plural};
use row_files::Template;
use serde_json::json;
use t5::Head;
use t5::peft::AdapterDirectory;

use crate::answers::batches::{self, Room, Sources};
use crate::answers::inference::Asked;
use crate::answers::prompts::{self, Inputs, Source};
use crate::answers::vectors::Vectors;
use crate::cli::embed_flags::EmbedArgs;
use crate::config::PricesFrom;
use crate::failure::Outcome;
use crate::files::sentence_transformers::{Dense, Modules};
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};
use crate::screen::report;
use crate::screen::stop::{self, Stop};
use vector_file::VectorFile;

/// Writes the vectors.
pub fn embed(flags: &EmbedArgs) -> Outcome<()> {
    batches::check_length(flags.max_source_tokens)?;
    let form = vector_file::Form::from_path(&flags.output)?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Adapted { directory, adapter } = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
    let mut config = t5::Config::from_file(&directory.join("config.json"))?.with_head(Head::Encoder)?;
    if let Some(adapter) = &adapter {
        config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
    }
    let given = flags.pooling.map(|pooling| Modules { pooling: pooling.into(), ..Modules::default() });
    let modules = match given {
        Some(modules) => modules,
        None => Modules::resolve(&directory, flags.adapter.as_deref().into_iter().chain([flags.model.as_path()]))?,
    };
    let modules = Modules { normalizes: modules.normalizes || flags.normalize, ..modules };
    let dense = modules.dense.as_ref().map(|dense| Dense::load(dense, config.vector_width())).transpose()?;
    let width = dense.as_ref().map_or(config.vector_width(), Dense::width);
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
    let window = batches::window(flags.batch_samples);
    let layer = dense.as_ref().map_or(0, Dense::bytes);
    let held =
        window_bytes(window, flags.max_source_tokens, config.vector_width().max(width)) + form.bytes(width) + layer;
    let (planned, limits) = asked.plan_to_read(inputs, budgets, |within| {
        batches::shape(flags.batch_samples, flags.max_source_tokens, held, within)
    })?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, room) = (planned.load()?, Room::left_by(&planned, flags.max_source_tokens)?);
    let begin = || VectorFile::begin(form, &flags.output, width);
    let mut file = stop.remove_at_end(begin, VectorFile::leftover)?;
    let vectors = Vectors { modules, dense, activations: trainer::Precision::from(flags.precision).activations() };
    let mut sources = Sources::new(&tokenizer, &flags.source_prefix, &config, flags.max_source_tokens);
    let began = Instant::now();
    let mut waiting: Vec<Vec<u32>> = Vec::with_capacity(window);
    let mut add = |waiting: &[Vec<u32>]| {
        let sources: Vec<&[u32]> = waiting.iter().map(Vec::as_slice).collect();
        file.add(&room.compute(&sources, width, &mut |batch| vectors.compute(&model, batch, &|| ()))?)
    };
    for text in prompts::prompts(inputs, limits)? {
        waiting.push(sources.source(&text?)?);
        if waiting.len() == window {
            add(&std::mem::take(&mut waiting))?;
        }
    }
    add(&waiting)?;
    let seconds = began.elapsed().as_secs_f64();
    let rows = file.finish()?;
    sources.note_cut();
    let (tokens, cut) = (sources.tokens, sources.cut.0);
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    let rate = tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    if flags.json {
        let mut line = json!({
            "rows": rows, "dimensions": width, "tokens": tokens, "cut_rows": cut, "seconds": seconds,
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
