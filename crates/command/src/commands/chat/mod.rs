//! `train_low_mem chat`: answers line by line, printed as they are made, by one model or by several side by side.
//!
//! The bill includes everything that `/set` can ask for: beams and tokens up to the limits of the flags.

mod line;

use std::cell::RefCell;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::DType;
use dataloader::Tokenizer;
use memory_policy::CostRow;
use openai_server::StreamedText;
use planner::{Pins, names};
use row_files::Turn;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config as EditorConfig, Editor};
use signal_hook::consts::SIGINT;
use t5::{AnswerShape, GenerateOptions, Search, Told};
use toml::Value;

use self::line::{HELP, Line};
use super::serve::models::{Loaded, Named, Served};
use crate::answers::inference::Shape;
use crate::cli::chat_flags::ChatArgs;
use crate::config::generation::Generation;
use crate::config::{Origin, Values, keys};
use crate::failure::{Failure, Outcome};
use crate::machine::device;
use crate::screen::lines::Lines;
use crate::screen::report;

/// Turns that are remembered.
const MAX_TURNS: usize = 64;

/// Lines that the editor remembers.
const MAX_LINES: usize = 1000;

/// The most bytes of a line that is not typed on a terminal, and of the turns that are remembered.
const MAX_LINE_BYTES: usize = 256 << 10;

/// The bytes of a line, its prompt with the turns before it, and the remembered turns.
const PROMPT_BYTES: planner::Reading =
    planner::Reading { rows: 5 * MAX_LINE_BYTES as u64, batch: 4 * MAX_LINE_BYTES as u64 };

/// Talks until the end of input.
pub fn chat(flags: &ChatArgs) -> Outcome<()> {
    let device = device::named(flags.models.device.as_deref())?;
    let named = Named::find(&flags.models, None)?;
    named.base.clone().with_head(t5::Head::Language)?;
    flags.models.decoding.unused(&named.values).iter().for_each(|warning| report::warn(warning));
    let max_new_tokens = named.max_new_tokens(flags.max_new_tokens);
    let longest = AnswerShape {
        max_new_tokens,
        rows: flags.max_beams.max(1),
        looks_at_scores: true,
        likeliest_are_enough: false,
        sorts: true,
    };
    let mut sizes: Vec<u64> = named.served.iter().map(|served| served.bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let others: u64 = sizes.iter().skip(1).sum();
    let beside = if others > 0 { vec![CostRow::new(names::ADAPTERS, others, "all in memory")] } else { Vec::new() };
    let source_tokens = flags.models.max_source_tokens;
    let shape =
        Shape { is_served: true, prompts: PROMPT_BYTES, beside, ..Shape::of_answers(1, source_tokens, longest) };
    let asked = named.asked(&flags.models, device.as_ref());
    let planned = asked.plan(&shape, None, (flags.models.weights.budgets()?, &Pins::default()))?;
    if flags.models.weights.dry_run {
        return report::result(&planned.bill());
    }
    let Named { tokenizer, activations, served, .. } = &named;
    let mut session = ChatSession {
        loaded: Loaded::new(planned.load()?, *activations, served.len()),
        asked: (0..served.len()).collect(),
        served,
        tokenizer,
        values: named.values.clone(),
        limits: (source_tokens, longest),
        max_new_tokens,
        activations: *activations,
        turns: Vec::new(),
        has_turns: false,
        number: 0,
        is_interrupted: Arc::default(),
    };
    session.read_loop(flags)?;
    if flags.models.weights.memory_budget.is_some() {
        report::note(&planned.peaks_in_words()?);
    }
    Ok(())
}

/// A conversation.
struct ChatSession<'a> {
    loaded: Loaded,
    served: &'a [Served],
    /// The numbers of the models that answer.
    asked: Vec<usize>,
    tokenizer: &'a Tokenizer,
    values: Values,
    /// The longest source, and the answers that memory is planned for.
    limits: (usize, AnswerShape),
    max_new_tokens: usize,
    activations: DType,
    turns: Vec<Turn>,
    has_turns: bool,
    number: u64,
    is_interrupted: Arc<AtomicBool>,
}

impl ChatSession<'_> {
    fn read_loop(&mut self, flags: &ChatArgs) -> Outcome<()> {
        let failed = |error: &dyn std::fmt::Display| Failure::internal(format!("cannot read lines: {error}"));
        signal_hook::flag::register(SIGINT, Arc::clone(&self.is_interrupted)).map_err(|error| failed(&error))?;
        report::note("a line is a prompt; `/help` lists commands, Ctrl-D ends");
        if !std::io::stdin().is_terminal() {
            for text in Lines::new(std::io::stdin().lock(), "standard input".to_owned(), MAX_LINE_BYTES) {
                if self.take(Line::parse(&text?))? {
                    break;
                }
            }
            return Ok(());
        }
        let config = EditorConfig::builder().max_history_size(MAX_LINES).map_err(|error| failed(&error))?.build();
        let mut editor: Editor<(), FileHistory> = Editor::with_config(config).map_err(|error| failed(&error))?;
        if let Some(history) = flags.history.as_ref().filter(|history| history.exists()) {
            editor.load_history(history).map_err(|error| failed(&error))?;
        }
        loop {
            match editor.readline("> ") {
                Ok(text) => {
                    let _ = editor.add_history_entry(&text);
                    if self.take(Line::parse(&text))? {
                        break;
                    }
                }
                Err(ReadlineError::Interrupted) => report::note("Ctrl-D or `/quit` ends"),
                Err(ReadlineError::Eof) => break,
                Err(error) => return Err(failed(&error)),
            }
        }
        match &flags.history {
            Some(history) => editor.save_history(history).map_err(|error| failed(&error)),
            None => Ok(()),
        }
    }

    /// Carries out a line. Returns true at the end.
    fn take(&mut self, line: Line) -> Outcome<bool> {
        match line {
            Line::Empty => {}
            Line::Quit => return Ok(true),
            Line::Help => report::result(HELP)?,
            Line::Wrong(why) => report::note(&why),
            Line::Models => {
                for (number, served) in self.served.iter().enumerate() {
                    let mark = if self.asked.contains(&number) { '*' } else { ' ' };
                    report::result(&format!("{mark} {}\n", served.name))?;
                }
            }
            Line::Use(names) => self.ask_only(&names),
            Line::Turns(has_turns) => self.has_turns = has_turns,
            Line::Forget => self.turns.clear(),
            Line::Settings => report::result(&self.settings())?,
            Line::Set(name, value) => {
                if let Err(failure) = self.set(&name, &value) {
                    report::note(&failure.to_string());
                }
            }
            Line::Prompt(prompt) => {
                if let Err(failure) = self.answer(&prompt) {
                    report::error(&failure);
                }
            }
        }
        Ok(false)
    }

    fn ask_only(&mut self, names: &[String]) {
        let all = || (0..self.served.len()).collect();
        let find = |name: &String| {
            let found = self.served.iter().position(|served| served.name == *name);
            found.ok_or_else(|| format!("no model `{name}`; `/models` lists them"))
        };
        match names.iter().map(find).collect::<Result<Vec<_>, _>>() {
            Ok(asked) if asked.is_empty() => self.asked = all(),
            Ok(asked) => self.asked = asked,
            Err(why) => report::note(&why),
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Outcome<()> {
        if name == "max_new_tokens" {
            let most = self.limits.1.max_new_tokens;
            self.max_new_tokens = value.parse().ok().filter(|tokens| (1..=most).contains(tokens)).ok_or_else(|| {
                Failure::usage(format!("max_new_tokens: expected from 1 to {most}, got {value}"))
                    .hint("`--max-new-tokens` sets the limit, which the memory bill counts")
            })?;
            return Ok(());
        }
        let key = format!("generation.{name}");
        if keys::find(&key).is_none() {
            let meant = keys::nearest(&key).and_then(|key| key.strip_prefix("generation."));
            return Err(Failure::usage(format!("no setting `{name}`"))
                .hint(meant.map_or("`/settings` lists them".to_owned(), |meant| format!("did you mean `{meant}`?"))));
        }
        let before = self.values.clone();
        let parsed = value.parse().unwrap_or_else(|_| Value::String(value.to_owned()));
        self.values.set(&key, parsed, Origin::Flag("/set".to_owned()))?;
        let checked = self.options().and_then(|options| match options.shape().rows > self.limits.1.rows {
            true => Err(Failure::usage(format!("num_beams: expected at most {}, got {value}", self.limits.1.rows))
                .hint("`--max-beams` sets the limit, which the memory bill counts")),
            false => Ok(()),
        });
        if checked.is_err() {
            self.values = before;
        }
        checked
    }

    /// The options of generation for the current settings.
    fn options(&self) -> Outcome<GenerateOptions> {
        let options = Generation::from_values(&self.values).options();
        let mut options =
            GenerateOptions { max_new_tokens: self.max_new_tokens, activations: self.activations, ..options };
        // A repeated prompt gets other samples.
        if let Search::Sample(sampling) = &mut options.search {
            sampling.seed = sampling.seed.wrapping_add(self.number);
        }
        options.check(self.served[0].config.vocab_size).map_err(|error| Failure::usage(error.to_string()))?;
        Ok(options)
    }

    fn settings(&self) -> String {
        let names = ["temperature", "top_k", "top_p", "seed", "num_beams", "length_penalty", "repetition_penalty"];
        let names = names.into_iter().chain(["no_repeat_ngram", "min_new_tokens"]);
        let lines =
            names.map(|name| format!("{name} = {}\n", self.values.setting(&format!("generation.{name}")).value));
        let how = match self.options().map(|options| options.search) {
            Ok(Search::Greedy) => "greedy",
            Ok(Search::Sample(_)) => "drawn",
            _ => "beams",
        };
        lines.collect::<String>() + &format!("max_new_tokens = {}\nanswers are {how}\n", self.max_new_tokens)
    }

    /// Answers a prompt with each selected model.
    fn answer(&mut self, prompt: &str) -> Outcome<()> {
        let options = self.options()?;
        self.number += 1;
        let turn = Turn::new;
        let text = match self.has_turns {
            false => prompt.to_owned(),
            true => {
                let turns: Vec<Turn> = self.turns.iter().cloned().chain([turn("user", prompt)]).collect();
                row_files::chat_prompt(&turns).map_err(Failure::usage)?
            }
        };
        let asked = self.asked.clone();
        let mut said = None;
        for &number in &asked {
            if asked.len() > 1 {
                report::result(&format!("[{}] ", self.served[number].name))?;
            }
            self.is_interrupted.store(false, Ordering::Relaxed);
            let answer = self.answer_by(number, &text, &options)?;
            if self.is_interrupted.load(Ordering::Relaxed) {
                report::note("stopped");
                return Ok(());
            }
            said.get_or_insert(answer);
        }
        // With several models, the turns include the first model's answer.
        self.turns.extend([turn("user", prompt), turn("assistant", &said.unwrap_or_default())]);
        let mut bytes = 0;
        let fits = |turn: &&Turn| {
            bytes += turn.content.len();
            bytes <= MAX_LINE_BYTES
        };
        let kept = self.turns.iter().rev().take(MAX_TURNS).take_while(fits).count();
        self.turns.drain(..self.turns.len() - kept);
        Ok(())
    }

    /// The answer of a model, printed as it is made.
    fn answer_by(&mut self, number: usize, text: &str, options: &GenerateOptions) -> Outcome<String> {
        let (served, tokenizer, most) = (&self.served[number], self.tokenizer, self.limits.0.saturating_sub(1).max(1));
        let mut source = tokenizer.start_ids().to_vec();
        source.extend(tokenizer.encode_start(&format!("{}{text}", served.config.prefix()), most + 1)?);
        if source.len() > most {
            return Err(Failure::usage(format!("the prompt has more than {most} tokens"))
                .hint("`--max-source-tokens` sets the limit; `/forget` leaves earlier turns out"));
        }
        source.extend(served.config.eos_token_ids.first().copied());
        let is_interrupted = || self.is_interrupted.load(Ordering::Relaxed);
        let together = self.loaded.get(number, served)?;
        // Removes what a failed answer has left.
        together.retain(|_| false);
        let shown = RefCell::new((StreamedText::new(&[]), String::new(), Ok(())));
        let show = |ids: &[u32], ends: bool| -> Outcome<()> {
            let whole = tokenizer.decode(ids)?;
            let mut shown = shown.borrow_mut();
            report::answer(shown.0.more(&whole, ends))?;
            shown.1 = whole;
            Ok(())
        };
        let is_search = matches!(options.search, Search::Beams(_));
        if together.join(0, &source, options, &is_interrupted)? {
            while !together.is_empty() && !is_interrupted() {
                let mut told = |told: Told| {
                    if !is_search && let Err(failure) = show(told.ids, false) {
                        shown.borrow_mut().2 = Err(failure);
                    }
                    false
                };
                for grown in together.step(&mut told)? {
                    if let Some(best) = grown.answers.unwrap_or_default().first() {
                        show(&best.ids, true)?;
                    }
                }
            }
            together.retain(|_| false);
        }
        report::result("\n")?;
        let (_, whole, failed) = shown.into_inner();
        failed.map(|()| whole)
    }
}
