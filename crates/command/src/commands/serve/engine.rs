//! The engine: takes jobs out of the queue while they fit, and generates one token at a time for all running jobs.

mod pauses;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataloader::Tokenizer;
use openai_server::{
    Admission, ApiError, Event, Finish, Job, Overflow, Prompt, Queue, Share, StreamedText, TokenLogprob, Wanted,
};
use planner::AnswerBytes;
use t5::{Answer, AnswerShape, ContinuousBatch, GenerateOptions, TokenScore, Told};

use self::pauses::Pass;
use super::fair::{Fair, Sides};
use super::models::{Loaded, Served};
use super::request_options::{self, Defaults};
use super::texts::{self, Text};
use super::turns::{InProgress, Turns};
use crate::answers::vectors::Vectors;
use crate::failure::{Failure, Outcome};
use crate::screen::report;

/// Everything that the engine needs to make answers.
pub struct Engine<'a> {
    /// The queue of jobs.
    pub queue: Arc<Queue>,
    /// The models by name.
    pub served: &'a [Served],
    /// The models in memory.
    pub loaded: Loaded,
    /// The tokenizer of all models.
    pub tokenizer: &'a Tokenizer,
    /// Settings that requests cannot change.
    pub defaults: Defaults,
    /// The longest prompt in tokens.
    pub max_source_tokens: usize,
    /// Counts the bytes of answers.
    pub bytes: AnswerBytes,
    /// The bytes that all running answers may hold together.
    pub budget: u64,
    /// What happens to longer prompts.
    pub overflow: Overflow,
    /// Running jobs, by key.
    pub running: BTreeMap<u64, Running>,
    /// The number of prompts that were tokenized.
    pub tokenized: Arc<AtomicU64>,
    /// The turns of long and short answers.
    pub turns: Turns,
    /// Waiting jobs that were prepared and did not fit yet, by their number.
    pub prepared: BTreeMap<u64, Prepared>,
    /// How vectors are made, if the model is an encoder.
    pub vectors: Option<&'a Vectors>,
    /// Texts that were taken up and have no result yet, by the number of their job.
    pub texts: BTreeMap<u64, Text>,
    /// The turns of texts.
    pub fair: Fair,
    /// The turns of texts and of running answers.
    pub sides: Sides,
    /// The pass that stands still while others have a turn.
    pub paused: Option<Pass>,
    /// The time that passes stood still.
    pub stood_still: Duration,
}

/// A running job.
pub struct Running {
    job: Job,
    bytes: u64,
    /// Answers that grow at the same time.
    rows: usize,
    /// What was sent of each answer.
    sent: Vec<Sent>,
}

/// The sent part of an answer.
#[derive(Clone)]
struct Sent {
    text: StreamedText,
    tokens: usize,
    /// Log-probabilities that were not sent yet.
    logprobs: Vec<TokenLogprob>,
}

impl Sent {
    fn new(stops: &[String]) -> Self {
        Sent { text: StreamedText::new(stops), tokens: 0, logprobs: Vec::new() }
    }
}

/// The time that was spent on both sides.
#[derive(Default)]
struct Took {
    texts: Duration,
    answers: Duration,
}

/// A job whose request was checked.
#[derive(Clone)]
pub struct Prepared {
    source: Vec<u32>,
    is_cut: bool,
    options: GenerateOptions,
    /// The tokens of the texts to score, if no answer is wanted.
    given: Vec<Vec<u32>>,
    bytes: u64,
}

/// Whether there is room for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Is,
    /// Jobs of its own share hold what they may. Others can begin.
    ShareIsFull,
    /// Nothing can begin before something ends.
    Full,
}

/// The most tokens of a prompt that is encoded while another pass stands still.
const SHORT_PROMPT_TOKENS: usize = 64;

/// The most prepared jobs that are kept while they wait. Beyond it a job is prepared again.
const MOST_PREPARED: usize = 256;

impl Engine<'_> {
    /// Answers until the queue is closed and everything is answered.
    pub fn run(&mut self) {
        loop {
            if self.running.is_empty() && self.texts.is_empty() {
                // Between two bursts of requests, memory goes back to the system.
                heap::release_unused();
                self.fair.clear();
                self.sides.clear();
                let Some(job) = self.queue.next() else { return };
                self.turns.clear();
                let prepared = self.prepared(&job);
                self.begin(job, prepared);
            }
            if self.running.is_empty() {
                // Texts may go on for ever, and no answer waits for another one.
                self.turns.clear();
            }
            self.turn();
        }
    }

    /// Starts what can be started, and computes the next texts or the next token of running answers. False if there is nothing to do.
    pub(super) fn turn(&mut self) -> bool {
        let begun = self.admit();
        self.forget_cancelled();
        let (texts, answers) = (self.shares_of_texts(), self.shares_of_answers());
        self.sides.texts_took(begun.texts, texts.len());
        self.sides.answers_took(begun.answers, answers.len());
        if self.sides.is_turn_of_texts(&texts, &answers) {
            let took = self.timed(Self::step_texts);
            self.sides.texts_took(took, texts.len());
        } else if !answers.is_empty() {
            let took = self.timed(Self::step);
            self.sides.answers_took(took, answers.len());
        }
        !texts.is_empty() || !answers.is_empty()
    }

    /// The time that work takes, without that in which it stands still.
    fn timed(&mut self, work: impl FnOnce(&mut Self)) -> Duration {
        let (begun, before) = (Instant::now(), self.stood_still);
        work(self);
        begun.elapsed().saturating_sub(self.stood_still - before)
    }

    /// The shares with texts that can be computed now.
    pub(super) fn shares_of_texts(&self) -> BTreeSet<Share> {
        let texts = self.texts.values().filter(|text| self.may_compute(text.source.len()));
        texts.map(|text| text.job.share).collect()
    }

    pub(super) fn shares_of_answers(&self) -> BTreeSet<Share> {
        self.running.values().map(|running| running.job.share).collect()
    }

    /// Starts the next jobs of the queue while they fit beside the running jobs. Returns the time for it: tokenizing a prompt takes some, and so
    /// does the encoder's pass before an answer.
    fn admit(&mut self) -> Took {
        let (queue, mut took) = (Arc::clone(&self.queue), Took::default());
        queue.admit(|job| {
            let (is_text, mut admission) = (is_text(&job), None);
            let time = self.timed(|engine| admission = Some(engine.offered(job, took.answers)));
            *(if is_text { &mut took.texts } else { &mut took.answers }) += time;
            admission.expect("it was offered")
        });
        took
    }

    /// Starts a job if it fits. `took`: the time in which answers were begun since the last step.
    fn offered(&mut self, job: Job, took: Duration) -> Admission {
        let prepared = self.prepared(&job);
        let room = prepared.as_ref().map_or(Room::Is, |prepared| self.room(&job, prepared, took));
        if room == Room::Is {
            let is_refused = prepared.is_err();
            self.begin(job, prepared);
            return if is_refused { Admission::Refused } else { Admission::Begun };
        }
        if self.prepared.len() >= MOST_PREPARED {
            self.prepared.clear();
        }
        self.prepared.extend(prepared.ok().map(|prepared| (job.number, prepared)));
        if room == Room::Full { Admission::Full(job) } else { Admission::ShareIsFull(job) }
    }

    /// Whether a job fits beside the running ones. While several clients ask, or one for answers of different sizes, none of them has more than
    /// its share of the memory, except for one job, or of the time.
    fn room(&self, job: &Job, prepared: &Prepared, took: Duration) -> Room {
        let held = |counts: &dyn Fn(&Job) -> bool| -> u64 {
            let running = self.running.values().map(|running| (&running.job, running.bytes));
            let texts = self.texts.values().map(|text| (&text.job, text.bytes));
            running.chain(texts).filter(|(job, _)| counts(job)).map(|(_, bytes)| bytes).sum()
        };
        let bytes = prepared.bytes;
        let own = held(&|running| running.share == job.share);
        let share = self.budget / self.queue.parts(job.share) as u64;
        let is_within_share = own == 0 || own + bytes <= share;
        if !is_within_share || !self.has_turn(job, prepared.source.len(), took) {
            return Room::ShareIsFull;
        }
        let is_loadable = self.loaded.has_space(job.model, &self.served[job.model]);
        let paused = self.paused.as_ref().map_or(0, |pass| pass.bytes);
        if held(&|_| true) + paused + bytes <= self.budget && is_loadable { Room::Is } else { Room::Full }
    }

    /// Whether the share of a job has not had more than its part of the time. Of texts it has no more in progress than a batch can take: the
    /// others wait in the queue, and cost nothing.
    fn has_turn(&self, job: &Job, tokens: usize, took: Duration) -> bool {
        if !is_text(job) {
            if self.paused.is_some() && tokens > SHORT_PROMPT_TOKENS {
                return false;
            }
            let are_ahead = || self.sides.answers_are_ahead(took, self.shares_of_answers().len());
            return self.turns.may_begin(job.share.size) && (self.texts.is_empty() || !are_ahead());
        }
        let of_share = self.texts.values().filter(|text| text.job.share == job.share);
        let taken: usize = of_share.map(|text| text.source.len()).sum();
        taken == 0 || taken + tokens <= self.loaded.batch_tokens()
    }

    /// What a job needs. It is tokenized once, however long it waits.
    fn prepared(&mut self, job: &Job) -> Result<Prepared, ApiError> {
        self.prepared.remove(&job.number).map_or_else(|| self.prepare(job), Ok)
    }

    fn prepare(&self, job: &Job) -> Result<Prepared, ApiError> {
        let served = &self.served[job.model];
        texts::check(served, job.options.wanted)?;
        let config = &served.config;
        self.check_dimensions(job)?;
        let (mut source, is_cut) = self.source(job)?;
        if let Some(id) = source.iter().find(|&&id| id as usize >= config.vocab_size) {
            let message = format!("token {id} is not among the {}", config.vocab_size);
            return Err(ApiError::parameter(job.parameter(), message));
        }
        source.extend(config.eos_token_ids.first().copied());
        let given = self.given(job)?;
        let options = match given.is_empty() {
            _ if is_text(job) => GenerateOptions { max_new_tokens: 1, ..GenerateOptions::default() },
            true => self.defaults.with(&job.options, job.number)?,
            false => GenerateOptions::of_given(&given),
        };
        let shape = if is_text(job) { AnswerShape::greedy(1) } else { options.shape() };
        let bytes = self.bytes.count(1, source.len(), shape);
        if bytes > self.budget {
            let message = format!(
                "the answers need {bytes} bytes, and {} are planned for all; ask for fewer beams or tokens",
                self.budget
            );
            return Err(ApiError::new(400, "does_not_fit", message));
        }
        Ok(Prepared { source, is_cut, options, given, bytes })
    }

    /// Refuses vectors of more numbers than there are.
    fn check_dimensions(&self, job: &Job) -> Result<(), ApiError> {
        let (Wanted::Vector(Some(wanted)), Some(vectors)) = (job.options.wanted, self.vectors) else { return Ok(()) };
        let width = vectors.width(&self.served[job.model].config);
        let message = || ApiError::parameter("dimensions", format!("expected at most {width}, got {wanted}"));
        if wanted > width { Err(message()) } else { Ok(()) }
    }

    /// The tokens of a prompt, and whether it was cut.
    fn source(&self, job: &Job) -> Result<(Vec<u32>, bool), ApiError> {
        let config = &self.served[job.model].config;
        let most = self.max_source_tokens.saturating_sub(1).max(1);
        let (mut source, overflow) = match &*job.prompt {
            Prompt::Tokens(ids) => (ids.clone(), self.overflow),
            prompt => {
                let of_pair = || self.served[job.model].ranking.as_ref().ok().map(|(_, template)| template);
                let text = format!("{}{}", config.prefix(), request_options::text(prompt, of_pair())?);
                // To keep the end, all of it is needed. A prompt has a limit in bytes, too.
                let is_chat = matches!(prompt, Prompt::Chat(_)) && self.overflow != Overflow::Refuse;
                let overflow = if is_chat { Overflow::CutBeginning } else { self.overflow };
                let read = if overflow == Overflow::CutBeginning { usize::MAX } else { most + 1 };
                self.tokenized.fetch_add(1, Ordering::Relaxed);
                let encoded = self.tokenizer.encode_start(&text, read);
                let mut ids = self.tokenizer.start_ids().to_vec();
                ids.extend(encoded.map_err(|error| refused(job.parameter(), error))?);
                (ids, overflow)
            }
        };
        let is_longer = source.len() > most;
        match overflow {
            _ if !is_longer => {}
            Overflow::CutEnd => source.truncate(most),
            Overflow::CutBeginning => drop(source.drain(..source.len() - most)),
            Overflow::Refuse => {
                let error = ApiError::new(400, "context_length_exceeded", too_long(job, most));
                return Err(ApiError { parameter: Some(job.parameter().to_owned()), ..error });
            }
        }
        Ok((source, is_longer || job.options.is_cut))
    }

    /// The tokens of the labels to score, each with the end of an answer.
    fn given(&self, job: &Job) -> Result<Vec<Vec<u32>>, ApiError> {
        let most = self.defaults.max_new_tokens;
        let config = &self.served[job.model].config;
        let tokens = |label: &String| {
            let mut ids = self.tokenizer.encode_start(label, most).map_err(|error| refused("labels", error))?;
            ids.extend(config.answer_ends().first().copied());
            let is_known = ids.iter().all(|&id| (id as usize) < config.vocab_size);
            if ids.is_empty() || ids.len() > most || !is_known {
                let message =
                    format!("expected texts of 1 to {most} tokens of the model; `--max-new-tokens` sets the limit");
                return Err(ApiError::parameter("labels", message));
            }
            Ok(ids)
        };
        job.options.labels.iter().map(tokens).collect()
    }

    /// Starts a job: runs the encoder over its prompt.
    fn begin(&mut self, mut job: Job, prepared: Result<Prepared, ApiError>) {
        let Prepared { source, is_cut, options, given, bytes } = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return job.send(Event::Failed(error)),
        };
        job.weigh(bytes);
        if is_text(&job) {
            job.send(Event::Started { prompt_tokens: source.len(), is_cut });
            self.texts.insert(job.number, Text { job, source, bytes });
            return;
        }
        self.turns.begins(job.share.size, source.len());
        let (number, served) = (job.model, &self.served[job.model]);
        let model = self.loaded.get(number, served).map(|together| Rc::clone(together.model()));
        let encoded = model.and_then(|model| {
            let of = (&*model, self.defaults.activations);
            let pass = Pass::new(number, bytes, source.len());
            self.pausing(pass, |between| {
                let is_cancelled = || {
                    between();
                    job.is_cancelled()
                };
                Ok(match given.is_empty() {
                    true => ContinuousBatch::encode(of, (job.number, &source), &options, &is_cancelled)?,
                    false => ContinuousBatch::encode_given(of, (job.number, &source), given, &is_cancelled)?,
                })
            })
        });
        let joined = encoded.and_then(|encoded| {
            let Some(encoded) = encoded else { return Ok(false) };
            self.loaded.get(number, served)?.add(encoded);
            Ok(true)
        });
        match joined {
            Ok(true) => {
                job.send(Event::Started { prompt_tokens: source.len(), is_cut });
                let sent = vec![Sent::new(&job.options.stop); options.sequences];
                let rows = options.shape().rows;
                self.running.insert(job.number, Running { job, bytes, rows, sent });
            }
            // The client has disconnected.
            Ok(false) => {}
            Err(failure) => job.send(Event::Failed(internal(&job, &failure.message))),
        }
    }

    /// Drops the jobs whose clients have left.
    fn forget_cancelled(&mut self) {
        self.texts.retain(|_, text| !text.job.is_cancelled());
        self.running.retain(|_, running| !running.job.is_cancelled());
        for number in self.loaded.busy() {
            if let Some(together) = self.loaded.together(number) {
                together.retain(|key| self.running.contains_key(&key));
            }
        }
    }

    /// Computes the next texts that get no answer, and tells their jobs.
    fn step_texts(&mut self) {
        let texts = self.texts.iter().filter(|(_, text)| self.may_compute(text.source.len()));
        let waiting: Vec<_> = texts.map(|(key, text)| text.waiting(*key)).collect();
        let held: u64 = self.texts.values().map(|text| text.bytes).sum();
        let fits = |count: usize, tokens: usize| self.bytes.count(count, tokens, AnswerShape::greedy(1)) <= held;
        let next = self.fair.next(&waiting, self.loaded.batch_tokens(), fits);
        let batch: Vec<Text> = next.iter().filter_map(|key| self.texts.remove(key)).collect();
        let Some(number) = batch.first().map(|text| text.job.model) else { return };
        let (served, vectors, activations) = (&self.served[number], self.vectors, self.defaults.activations);
        let model = self.loaded.get(number, served).map(|together| Rc::clone(together.model()));
        let longest = batch.iter().map(|text| text.source.len()).max().unwrap_or(0);
        let pass = Pass::new(number, batch.iter().map(|text| text.bytes).sum(), longest);
        let compute = |between: &dyn Fn()| texts::events(served, &*model?, vectors, (&batch, activations), between);
        let events = self.pausing(pass, compute);
        match events {
            Ok(events) => batch.iter().zip(events).for_each(|(text, event)| text.job.send(event)),
            Err(failure) => {
                batch.iter().for_each(|text| text.job.send(Event::Failed(internal(&text.job, &failure.message))))
            }
        }
    }

    /// The answers in progress of each size.
    fn in_progress(&self) -> BTreeMap<u32, InProgress> {
        let mut sizes: BTreeMap<u32, InProgress> = BTreeMap::new();
        for running in self.running.values() {
            sizes.entry(running.job.share.size).or_default().rows += running.rows;
        }
        let shares = self.shares_of_answers();
        shares.iter().for_each(|share| sizes.entry(share.size).or_default().clients += 1);
        sizes
    }

    /// Generates one more token for every client that is still connected.
    fn step(&mut self) {
        let turns = self.turns.next(&self.in_progress());
        let has_turn: BTreeSet<u64> =
            self.running.iter().filter(|(_, running)| turns[&running.job.share.size]).map(|(key, _)| *key).collect();
        for number in self.loaded.busy() {
            let Some(together) = self.loaded.together(number) else { continue };
            // A card takes about as long for a few rows more.
            let is_card = !together.model().device().is_cpu();
            let takes_part = |key: u64| is_card || has_turn.contains(&key);
            let (running, tokenizer) = (RefCell::new(&mut self.running), self.tokenizer);
            let mut told = |told: Told| {
                running.borrow_mut().get_mut(&told.key).is_none_or(|running| running.grow(tokenizer, told))
            };
            match together.step_of(takes_part, &mut told) {
                Ok(grown) => {
                    for grown in grown {
                        if let Some(running) = self.running.remove(&grown.key) {
                            running.finish(
                                self.tokenizer,
                                &self.served[number].config,
                                grown.answers.unwrap_or_default(),
                            );
                        }
                    }
                }
                Err(error) => {
                    let reason = Failure::from(error).message;
                    self.running.retain(|_, running| {
                        let is_other = running.job.model != number;
                        if !is_other {
                            running.job.send(Event::Failed(internal(&running.job, &reason)));
                        }
                        is_other
                    });
                    together.retain(|_| false);
                }
            }
        }
    }
}

impl Running {
    /// Sends the part of an answer that is new. Returns true after a stop text.
    fn grow(&mut self, tokenizer: &Tokenizer, told: Told) -> bool {
        self.job.token_made();
        let Told { choice, ids, score, .. } = told;
        let options = &self.job.options;
        let Some(sent) = self.sent.get_mut(choice) else { return false };
        sent.logprobs.extend(score.map(|score| logprob(tokenizer, ids.last().copied().unwrap_or_default(), score)));
        if !options.labels.is_empty() || (!options.is_streamed && options.stop.is_empty()) {
            return false;
        }
        let Ok(text) = tokenizer.decode(ids) else { return false };
        if options.num_beams.is_some_and(|beams| beams > 1) {
            // A beam may still change. The best one is sent at the end.
            return options.stop.iter().any(|stop| text.contains(stop.as_str()));
        }
        let text = sent.text.more(&text, false).to_owned();
        let is_stopped = sent.text.is_stopped();
        if options.is_streamed {
            let tokens = ids.len() - std::mem::replace(&mut sent.tokens, ids.len());
            self.job.send(Event::Text { choice, text, tokens, logprobs: std::mem::take(&mut sent.logprobs) });
        }
        is_stopped
    }

    /// Sends the rest of every answer, and the reason why it ended.
    fn finish(self, tokenizer: &Tokenizer, config: &t5::Config, answers: Vec<Answer>) {
        for (choice, (answer, sent)) in answers.iter().zip(self.sent).enumerate() {
            if !self.job.options.labels.is_empty() {
                let tokens = answer.ids.len();
                #[expect(clippy::cast_precision_loss, reason = "tokens of a label")]
                let logprob = answer.score.unwrap_or(f64::NEG_INFINITY) * tokens as f64;
                self.job.send(Event::Scored { choice, logprob, tokens });
                continue;
            }
            let whole: Outcome<String> = tokenizer.decode(&answer.ids).map_err(Into::into);
            let text = match whole {
                Ok(text) => text,
                Err(failure) => return self.job.send(Event::Failed(internal(&self.job, &failure.message))),
            };
            let Sent { text: mut outgoing, tokens, logprobs } = sent;
            // Without streaming, the text that was held back has not been sent, either.
            if !self.job.options.is_streamed {
                outgoing = StreamedText::new(&self.job.options.stop);
            }
            let text = outgoing.more(&text, true).to_owned();
            self.job.send(Event::Text { choice, text, tokens: answer.ids.len() - tokens, logprobs });
            let ends = answer.ids.last().is_some_and(|id| config.answer_ends().contains(id));
            let reason = if ends || outgoing.is_stopped() { Finish::Stop } else { Finish::Length };
            self.job.send(Event::Finished { choice, reason });
        }
    }
}

/// Whether a job gets a score or a vector instead of an answer.
pub(super) fn is_text(job: &Job) -> bool {
    job.options.wanted != Wanted::Answers
}

/// The error for a prompt with more than `most` tokens.
fn too_long(job: &Job, most: usize) -> String {
    let what = match job.parameter() {
        "documents" => "a document has, with the query,",
        "messages" => "the messages have",
        "input" => "a text has",
        _ => "the prompt has",
    };
    format!(
        "`{}`: {what} more than {most} tokens; `serve --max-source-tokens` sets the limit, and `--prompt-overflow truncate` \
         cuts longer prompts",
        job.parameter()
    )
}

/// The log-probabilities of a token, as text.
fn logprob(tokenizer: &Tokenizer, id: u32, score: &TokenScore) -> TokenLogprob {
    let text = |id: u32| tokenizer.token(id).unwrap_or_else(|| format!("<{id}>"));
    let likeliest = score.likeliest.iter().map(|&(id, logprob)| (text(id), logprob)).collect();
    TokenLogprob { token: text(id), logprob: score.log_probability, likeliest }
}

/// The error of a text that the tokenizer refuses. The answer does not name the tokenizer's file.
fn refused(parameter: &str, error: dataloader::Error) -> ApiError {
    match error {
        dataloader::Error::Encode { reason, .. } => ApiError::parameter(parameter, reason),
        _ => ApiError::parameter(parameter, "the tokenizer cannot represent this text"),
    }
}

/// The error of a request that fails by the server's fault. The reason may name files, so only the server's own messages have it.
fn internal(job: &Job, reason: &str) -> ApiError {
    report::warn(&format!("request {}: {reason}", job.request_id));
    ApiError::internal(format!("the server failed; its messages say why, for request {}", job.request_id))
}
