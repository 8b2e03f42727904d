//! `train_low_mem generate`: answers of a model, by greedy decoding, beam search or sampling.

mod answer_file;
mod stream;

use std::cell::{Cell, RefCell};
use std::path::Path;

use candle_core::DType;
use dataloader::{Side, Tokenizer};
use memory_policy::{counted, plural};
use row_files::Template;
use serde_json::{Value, json};
use t5::peft::AdapterDirectory;
use t5::{Answer, GenerateOptions, T5, Watch};

use crate::answers::inference::{Asked, Shape};
use crate::answers::prompts::{self, Inputs, Limits, Source};
use crate::cli::answer_flags::GenerateArgs;
use crate::config::generation::Generation;
use crate::config::{PricesFrom, Values};
use crate::failure::{Failure, Outcome};
use crate::files::run_dir;
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory;
use crate::model::model_directory::Adapted;
use crate::screen::report;
use answer_file::{AnswerFile, Answered, Best};
use stream::Streamed;

/// The longest answer, unless a flag or the model gives a limit.
pub const MAX_NEW_TOKENS: usize = 256;

/// Prompts are answered together until their texts have this many bytes.
const MAX_WAITING_BYTES: usize = 256 << 10;

/// The bytes of a printed line of JSON with a long prompt, which has up to six bytes for each of the prompt's.
const MAX_JSON_BYTES: u64 = 8 << 20;

/// Answers prompts.
pub fn generate(flags: &GenerateArgs) -> Outcome<()> {
    let Some(model) = &flags.model else { return Err(Failure::usage("`generate` needs `--model`")) };
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Adapted { directory, adapter } = model_directory::find_as_trained(model, flags.adapter.as_deref())?;
    let mut config = t5::Config::from_file(&directory.join("config.json"))?.with_head(t5::Head::Language)?;
    if let Some(adapter) = &adapter {
        config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
    }
    let (values, most) = flags.decoding.over(&config)?;
    flags.decoding.unused(&values).iter().for_each(|warning| report::warn(warning));
    let tokenizer = flags.decoding.tokenizer(&directory, &config, &values)?;
    stages.ends(stages::TOKENIZER)?;
    let decoding = decoding(flags, &values, most);
    decoding.check(config.vocab_size).map_err(|error| {
        Failure::usage(error.to_string()).hint("`train_low_mem generate --help` lists the flags of decoding")
    })?;
    let budgets = flags.weights.budgets()?;
    let asked = Asked {
        directory: &directory,
        adapter: adapter.as_deref(),
        config: &config,
        device: device.as_ref(),
        prices: PricesFrom::of_environment(),
        activations: decoding.activations,
        parameters: None,
        flags: &flags.weights,
        stages: &stages,
    };
    // The number of prompts in an input is unknown.
    let prompts = flags.input.is_none().then_some(flags.prompts.len() + flags.prompt.len());
    let most = if flags.stream { 1 } else { flags.batch_samples };
    let samples = prompts.map_or(most, |prompts| most.min(prompts.max(1)));
    let typed: Vec<String> = flags.prompts.iter().chain(&flags.prompt).cloned().collect();
    let (given, of_run) = (flags.source()?, flags.input.as_ref().and_then(|_| source_of_run(flags, model)));
    let response = response_column(flags, model);
    let source = Source {
        flags: "--prompt-column` or `--source-template",
        given: given.as_ref(),
        of_run: of_run.as_ref(),
        usual: "prompt",
    };
    let inputs = Inputs { typed: &typed, file: flags.input.as_deref(), source, text: &flags.text };
    let (planned, limits) = asked.plan_to_read(inputs, budgets, |within| Shape {
        prompts: prompt_bytes(flags, within),
        ..Shape::of_answers(samples, flags.max_source_tokens, decoding.shape())
    })?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let (model, plan) = (planned.load()?, &planned.plan);
    let file = flags.output.as_deref().map(|path| {
        let (mut files, model) = model_directory::depends_on((&directory, adapter.as_deref()), &config, &tokenizer)?;
        files.extend(flags.input.clone());
        let best = flags.best_of.as_deref().map(Best::of_name);
        let answers = (decoding, plan.step.evaluation_samples, &flags.stop, flags.precision);
        let prompts = (&typed, &given, &of_run, &response, &flags.text, flags.max_source_tokens);
        let keeps_special = Generation::from_values(&values).keeps_special_tokens;
        // Nobody reads this debug form: it has every setting of the answers, and all that makes prompts and texts.
        let depends_on = format!("{:?}", (answers, prompts, keeps_special, model));
        AnswerFile::open(path, (&depends_on, &files), (best, flags.num_return_sequences))
    });
    let file = file.transpose()?;
    if let Some(file) = file.as_ref().filter(|file| file.done() > 0) {
        report::note(&format!("{}: goes on behind {}", file.path().display(), plural(file.done(), "prompt")));
    }
    let mut answering = Answering {
        model: &model,
        tokenizer: &tokenizer,
        flags,
        options: decoding,
        answered: 0,
        cut: Vec::new(),
        file,
    };
    answering.all(plan.step.evaluation_samples, (inputs, &response), limits)?;
    if let Some(first) = answering.cut.first() {
        let (cut, all) = (counted(answering.cut.len() as u64), plural(answering.answered, "prompt"));
        report::note(&format!(
            "{cut} of {all} had more than {} tokens and lost {}; the first is prompt {}; `--max-source-tokens N` reads more",
            flags.max_source_tokens,
            if answering.side() == Side::Left { "the beginning" } else { "the end" },
            counted(first + 1)
        ));
    }
    if flags.weights.memory_budget.is_some() {
        report::note(&planned.peaks_in_words()?);
    }
    Ok(())
}

/// How the run that made a model, or its adapter, was told to make prompts of rows.
fn source_of_run(flags: &GenerateArgs, model: &Path) -> Option<Template> {
    let (_, values) = run_dir::values_of(flags.adapter.as_deref().into_iter().chain([model]))?.ok()?;
    let template = values.text("data.source_template").and_then(|text| Template::parse(&text).ok());
    template.or_else(|| values.text("data.prompt_column").map(|column| Template::of_column(&column)))
}

/// The column of the rows' own responses.
fn response_column(flags: &GenerateArgs, model: &Path) -> String {
    let of_run = || {
        let (_, values) = run_dir::values_of(flags.adapter.as_deref().into_iter().chain([model]))?.ok()?;
        values.text("data.response_column")
    };
    flags.response_column.clone().or_else(of_run).unwrap_or_else(|| "response".to_owned())
}

/// The options of answers: the flags override the model's own defaults.
fn decoding(flags: &GenerateArgs, values: &Values, most: Option<usize>) -> GenerateOptions {
    let activations: DType = trainer::Precision::from(flags.precision).activations();
    GenerateOptions {
        max_new_tokens: flags.max_new_tokens.or(most).unwrap_or(MAX_NEW_TOKENS),
        activations,
        sequences: flags.num_return_sequences,
        scores: flags.scores || flags.output.is_some(),
        ..Generation::from_values(values).options()
    }
}

/// The bytes of prompts: of their text while they are read, and of texts that wait to be printed with their answers.
fn prompt_bytes(flags: &GenerateArgs, limits: Limits) -> planner::Reading {
    let longest = prompts::MAX_PROMPT_BYTES as u64;
    // The line, and its text with the model's prefix.
    let reading = 2 * longest + limits.bytes;
    match flags.json || flags.output.is_some() {
        true => planner::Reading { rows: MAX_JSON_BYTES + reading, batch: MAX_WAITING_BYTES as u64 + longest },
        false => planner::Reading { rows: reading, batch: 0 },
    }
}

/// A prompt that waits for its answer.
struct Prompt {
    /// Its text, where it is printed.
    text: String,
    /// The row's own response, where answers are compared with it.
    reference: Option<String>,
    /// Its tokens.
    source: Vec<u32>,
    /// Whether it has more of them.
    is_cut: bool,
}

/// A model that answers.
struct Answering<'a> {
    model: &'a T5,
    tokenizer: &'a Tokenizer,
    flags: &'a GenerateArgs,
    options: GenerateOptions,
    /// The number of prompts so far. The sampling of a prompt follows from its number.
    answered: u64,
    /// The numbers of prompts that were cut.
    cut: Vec<u64>,
    /// The file of the answers.
    file: Option<AnswerFile>,
}

impl Answering<'_> {
    /// Answers every prompt, `at_a_time` prompts together. A batch whose answers are in the file is left out.
    fn all(&mut self, at_a_time: usize, (inputs, column): (Inputs<'_>, &str), limits: Limits) -> Outcome<()> {
        let (mut waiting, mut text_bytes) = (Vec::new(), 0);
        let compares = self.flags.best_of.as_deref().is_some_and(|name| Best::of_name(name) != Best::Likeliest);
        let prompts: Box<dyn Iterator<Item = Outcome<(String, Option<String>)>> + '_> = match compares {
            true => prompts::with_references(inputs, column, limits)?,
            false => Box::new(prompts::prompts(inputs, limits)?.map(|prompt| Ok((prompt?, None)))),
        };
        let done = self.file.as_ref().map_or(0, AnswerFile::done);
        for prompt in prompts {
            let (prompt, reference) = prompt?;
            let (source, is_cut) = self.source(&prompt)?;
            let is_kept = self.flags.json || self.file.is_some();
            let text = if is_kept { prompt } else { String::new() };
            text_bytes += text.len() + reference.as_ref().map_or(0, String::len);
            waiting.push(Prompt { text, reference, source, is_cut });
            if waiting.len() == at_a_time || text_bytes > MAX_WAITING_BYTES {
                self.answer_unless_done(&waiting, done)?;
                (waiting, text_bytes) = (Vec::new(), 0);
            }
        }
        self.answer_unless_done(&waiting, done)?;
        self.file.take().map_or(Ok(()), AnswerFile::finish)
    }

    /// Answers prompts, unless those of the whole batch are among the first `done`.
    fn answer_unless_done(&mut self, prompts: &[Prompt], done: u64) -> Outcome<()> {
        let end = self.answered + prompts.len() as u64;
        if end <= done {
            self.answered = end;
            return Ok(());
        }
        if let Some(file) = self.file.as_mut().filter(|_| self.answered <= done) {
            file.keep(self.answered)?;
        }
        self.answer(prompts)
    }

    fn answer(&mut self, prompts: &[Prompt]) -> Outcome<()> {
        self.cut.extend((self.answered..).zip(prompts).filter(|(_, prompt)| prompt.is_cut).map(|(number, _)| number));
        let sources: Vec<&[u32]> = prompts.iter().map(|prompt| prompt.source.as_slice()).collect();
        let (failed, first) = (Cell::new(None), self.answered);
        let streamed = RefCell::new(Streamed::default());
        let is_end = |ids: &[u32]| self.is_stopped(ids).map_err(|failure| failed.set(Some(failure))).unwrap_or(true);
        let number = |source: usize| first + source as u64;
        let progress = |_: usize, ids: &[u32]| {
            if self.flags.stream {
                Streamed::show(&streamed, self.tokenizer, ids);
            }
        };
        let watch = Watch { is_end: &is_end, progress: &progress, number: &number, ..Watch::default() };
        let answers = self.model.answers(&sources, &self.options, &watch)?;
        if let Some(failure) = failed.take() {
            return Err(failure);
        }
        let answers = answers.ok_or_else(|| Failure::internal("nobody interrupts the answers"))?;
        self.answered += prompts.len() as u64;
        let texts = |answers: &Vec<Answer>| {
            let responses = answers.iter().map(|answer| Ok(self.tokenizer.decode(&answer.ids)?));
            responses.collect::<Outcome<Vec<String>>>()
        };
        let responses = answers.iter().map(texts).collect::<Outcome<Vec<_>>>()?;
        if let Some(file) = &mut self.file {
            let answered = prompts.iter().zip(&answers).zip(&responses);
            return file.add(answered.map(|((prompt, answers), responses)| Answered {
                prompt: &prompt.text,
                reference: prompt.reference.as_deref(),
                answers,
                responses,
            }));
        }
        for ((prompt, answers), responses) in prompts.iter().zip(&answers).zip(&responses) {
            if self.flags.stream {
                return streamed.into_inner().finish(&responses[0]);
            }
            match self.flags.json {
                true => report::result(&format!("{}\n", json_line((&prompt.text, prompt.is_cut), answers, responses)))?,
                false => report::answer(&responses.iter().map(|response| format!("{response}\n")).collect::<String>())?,
            }
        }
        Ok(())
    }

    /// The side on which prompts are cut.
    fn side(&self) -> Side {
        self.tokenizer.truncation_side().unwrap_or_default()
    }

    /// The tokens of a prompt, with the tokens that begin and end every source, and whether it was cut.
    fn source(&self, prompt: &str) -> Outcome<(Vec<u32>, bool)> {
        let room = self.flags.max_source_tokens.saturating_sub(1).max(1);
        let config = self.model.config();
        let (mut ids, is_cut) = self.tokenizer.encode_prompt(config.prefix(), prompt, room, self.side())?;
        ids.extend(config.eos_token_ids.first().copied());
        Ok((ids, is_cut))
    }

    /// Whether the last token completed a stop string.
    fn is_stopped(&self, ids: &[u32]) -> Outcome<bool> {
        let Some(longest) = self.flags.stop.iter().map(String::len).max() else { return Ok(false) };
        // A token has at least one byte of text. A few more tokens are needed, because the first ones of a part may decode differently.
        let part = ids.len().saturating_sub(longest + 8);
        let text = self.tokenizer.decode(&ids[part..])?;
        Ok(self.flags.stop.iter().any(|stop| !stop.is_empty() && text.contains(stop.as_str())))
    }
}

/// `{"prompt", "response", "prompt_was_cut"}`, with `score` if there is one, and `sequences` if there are several.
fn json_line((prompt, is_cut): (&str, bool), answers: &[Answer], responses: &[String]) -> Value {
    let one = |answer: &Answer, response: &str, mut json: Value| {
        json["response"] = json!(response);
        if let Some(score) = answer.score {
            json["score"] = json!(score);
        }
        json
    };
    let mut line = one(&answers[0], &responses[0], json!({ "prompt": prompt }));
    line["prompt_was_cut"] = json!(is_cut);
    if answers.len() > 1 {
        let all = answers.iter().zip(responses).map(|(answer, response)| one(answer, response, json!({})));
        line["sequences"] = all.collect();
    }
    line
}
