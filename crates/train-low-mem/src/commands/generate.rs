//! `train_low_mem generate`: text from a model, greedily.

use std::io::{BufRead, BufReader};
use std::path::Path;

use candle_core::DType;
use dataloader::Tokenizer;
use memory_policy::{Probe, SystemProbe};
use planner::Pins;
use serde_json::json;
use t5::{GenerateOptions, T5};

use crate::cli::GenerateArgs;
use crate::failure::{Failure, Outcome};
use crate::inference::{Asked, Shape};
use crate::{model_directory, open, report};

/// Answers prompts.
pub fn generate(flags: &GenerateArgs) -> Outcome<()> {
    let device = open::device(flags.device.as_deref().unwrap_or("auto"))?;
    let directory = model_directory::find(&flags.model)?;
    let path = Tokenizer::in_directory(&directory).ok_or_else(|| model_directory::without_tokenizer(&directory))?;
    let tokenizer = Tokenizer::load(&path)?;
    let config = t5::Config::from_file(&directory.join("config.json"))?;
    let budget = crate::options::budget(flags.weights.memory_budget.as_deref())?;
    let asked = Asked {
        directory: &directory,
        config: &config,
        device: &device,
        activations: activations(flags),
        parameters: None,
        flags: &flags.weights,
    };
    let shape =
        Shape { samples: flags.batch_samples, longest: (flags.max_source_tokens, 1), answer: options(flags).shape() };
    let planned = asked.plan(&shape, None, (budget, &Pins::default()))?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, plan) = (planned.load()?, &planned.plan);
    answer_all(&model, &tokenizer, flags, plan.step.evaluation_samples)?;
    if flags.weights.memory_budget.is_some() {
        let peak = SystemProbe::new().snapshot()?.peak_rss;
        report::note(&format!("peak {} bytes, {} predicted", peak.0, plan.predicted_peak.0));
    }
    Ok(())
}

fn options(flags: &GenerateArgs) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: flags.max_new_tokens,
        activations: activations(flags),
        ..GenerateOptions::default()
    }
}

fn activations(flags: &GenerateArgs) -> DType {
    trainer::Precision::from(flags.precision).activations()
}

/// Prompts of the command line first, then those of the file, so many at a time.
fn answer_all(model: &T5, tokenizer: &Tokenizer, flags: &GenerateArgs, at_a_time: usize) -> Outcome<()> {
    for prompts in flags.prompt.chunks(at_a_time) {
        answer(model, tokenizer, prompts, flags)?;
    }
    let Some(input) = &flags.input else { return Ok(()) };
    let mut prompts = Vec::new();
    for line in lines(input)? {
        prompts.push(line.map_err(|error| {
            Failure::unusable(format!("{}: {error}", input.display())).hint("prompts must be UTF-8, one per line")
        })?);
        if prompts.len() == at_a_time {
            answer(model, tokenizer, &prompts, flags)?;
            prompts.clear();
        }
    }
    answer(model, tokenizer, &prompts, flags)
}

fn lines(input: &Path) -> Outcome<Box<dyn Iterator<Item = std::io::Result<String>>>> {
    if input == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock().lines()));
    }
    let file = regular_file::open(input).map_err(|error| {
        Failure::unusable(format!("{}: {error}", input.display()))
            .hint("expected a text file with one prompt per line; `-` reads standard input")
    })?;
    Ok(Box::new(BufReader::new(file).lines()))
}

fn answer(model: &T5, tokenizer: &Tokenizer, prompts: &[String], flags: &GenerateArgs) -> Outcome<()> {
    let eos = model.config().eos_token_ids.first().copied();
    let mut sources = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let most = flags.max_source_tokens.saturating_sub(1).max(1);
        let mut ids = tokenizer.start_ids().to_vec();
        ids.extend(tokenizer.encode_start(&format!("{}{prompt}", model.config().prefix()), most)?);
        ids.truncate(most);
        ids.extend(eos);
        sources.push(ids);
    }
    let sources: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
    for (prompt, ids) in prompts.iter().zip(model.generate(&sources, &options(flags))?) {
        let response = tokenizer.decode(&ids)?;
        let line = if flags.json { json!({"prompt": prompt, "response": response}).to_string() } else { response };
        report::result(&format!("{line}\n"))?;
    }
    Ok(())
}
