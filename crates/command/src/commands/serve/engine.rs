//! The engine: takes jobs out of the queue while they fit, and generates one token at a time for all running jobs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use dataloader::Tokenizer;
use openai_server::{ApiError, Event, Finish, Job, Prompt, Queue, StreamedText};
use planner::AnswerBytes;
use t5::{Answer, GenerateOptions};

use super::models::{Loaded, Served};
use super::request_options::{self, Defaults};
use crate::failure::Outcome;

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
    /// Running jobs, by key.
    pub running: BTreeMap<u64, Running>,
}

/// A running job.
pub struct Running {
    job: Job,
    bytes: u64,
    /// For each answer, the output that was sent, and its number of tokens.
    sent: Vec<(StreamedText, usize)>,
}

/// A job whose request was checked.
struct Prepared {
    source: Vec<u32>,
    options: GenerateOptions,
    bytes: u64,
}

impl Engine<'_> {
    /// Answers until the queue is closed and everything is answered.
    pub fn run(&mut self) {
        loop {
            if self.running.is_empty() {
                // Between two bursts of requests, memory goes back to the system.
                heap::release_unused();
                let Some(job) = self.queue.next() else { return };
                let prepared = self.prepare(&job);
                self.begin(job, prepared);
            }
            self.admit();
            self.step();
        }
    }

    /// Starts the next jobs of the queue, in order, while they fit beside the running jobs.
    fn admit(&mut self) {
        loop {
            let held: u64 = self.running.values().map(|running| running.bytes).sum();
            let prepared = Cell::new(None);
            let job = self.queue.clone().next_if(|job| {
                let looked_at = self.prepare(job);
                let fits = match &looked_at {
                    // An invalid request gets its error at once.
                    Err(_) => true,
                    Ok(prepared) => {
                        held + prepared.bytes <= self.budget
                            && self.loaded.has_space(job.model, &self.served[job.model])
                    }
                };
                prepared.set(Some(looked_at));
                fits
            });
            let (Some(job), Some(prepared)) = (job, prepared.take()) else { return };
            self.begin(job, prepared);
        }
    }

    fn prepare(&self, job: &Job) -> Result<Prepared, ApiError> {
        let config = &self.served[job.model].config;
        let most = self.max_source_tokens.saturating_sub(1).max(1);
        let mut source = match request_options::text(&job.prompt)? {
            Some(text) => {
                let mut ids = self.tokenizer.start_ids().to_vec();
                let text = format!("{}{text}", config.prefix());
                let encoded = self.tokenizer.encode_start(&text, most + 1);
                ids.extend(encoded.map_err(|error| ApiError::parameter("prompt", error))?);
                ids
            }
            None => match &job.prompt {
                Prompt::Tokens(ids) => ids.clone(),
                _ => Vec::new(),
            },
        };
        if source.len() > most {
            let message = format!("the prompt has more than {most} tokens; `--max-source-tokens` sets the limit");
            let error = ApiError::new(400, "context_length_exceeded", message);
            return Err(ApiError { parameter: Some("prompt".to_owned()), ..error });
        }
        if let Some(id) = source.iter().find(|&&id| id as usize >= config.vocab_size) {
            return Err(ApiError::parameter("prompt", format!("token {id} is not among the {}", config.vocab_size)));
        }
        source.extend(config.eos_token_ids.first().copied());
        let options = self.defaults.with(&job.options, job.number)?;
        let bytes = self.bytes.of(1, source.len(), options.shape());
        if bytes > self.budget {
            let message = format!(
                "the answers need {bytes} bytes, and {} are planned for all; ask for fewer beams or tokens",
                self.budget
            );
            return Err(ApiError::new(400, "does_not_fit", message));
        }
        Ok(Prepared { source, options, bytes })
    }

    /// Starts a job: runs the encoder over its prompt.
    fn begin(&mut self, job: Job, prepared: Result<Prepared, ApiError>) {
        let Prepared { source, options, bytes } = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return job.send(Event::Failed(error)),
        };
        let joined = self
            .loaded
            .get(job.model, &self.served[job.model])
            .and_then(|together| Ok(together.join(job.number, &source, &options, &|| job.is_cancelled())?));
        match joined {
            Ok(true) => {
                job.send(Event::Started { prompt_tokens: source.len() });
                let sent = vec![(StreamedText::new(&job.options.stop), 0); options.sequences];
                self.running.insert(job.number, Running { job, bytes, sent });
            }
            // The client has disconnected.
            Ok(false) => {}
            Err(failure) => job.send(Event::Failed(ApiError::internal(failure.message))),
        }
    }

    /// Generates one more token for every client that is still connected.
    fn step(&mut self) {
        self.running.retain(|_, running| !running.job.is_cancelled());
        for number in self.loaded.busy() {
            let Some(together) = self.loaded.together(number) else { continue };
            together.retain(|key| self.running.contains_key(&key));
            let (running, tokenizer) = (RefCell::new(&mut self.running), self.tokenizer);
            let mut told = |key: u64, choice: usize, ids: &[u32]| {
                running.borrow_mut().get_mut(&key).is_none_or(|running| running.grow(tokenizer, choice, ids))
            };
            match together.step(&mut told) {
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
                    let error = ApiError::internal(error.to_string());
                    self.running.retain(|_, running| {
                        let is_other = running.job.model != number;
                        if !is_other {
                            running.job.send(Event::Failed(error.clone()));
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
    fn grow(&mut self, tokenizer: &Tokenizer, choice: usize, ids: &[u32]) -> bool {
        let options = &self.job.options;
        if !options.is_streamed && options.stop.is_empty() {
            return false;
        }
        let Ok(text) = tokenizer.decode(ids) else { return false };
        if options.num_beams.is_some_and(|beams| beams > 1) {
            // A beam may still change. The best one is sent at the end.
            return options.stop.iter().any(|stop| text.contains(stop.as_str()));
        }
        let (outgoing, tokens) = &mut self.sent[choice];
        let text = outgoing.more(&text, false).to_owned();
        let is_stopped = outgoing.is_stopped();
        if options.is_streamed {
            self.job.send(Event::Text { choice, text, tokens: ids.len() - *tokens });
            *tokens = ids.len();
        }
        is_stopped
    }

    /// Sends the rest of every answer, and the reason why it ended.
    fn finish(self, tokenizer: &Tokenizer, config: &t5::Config, answers: Vec<Answer>) {
        for (choice, (answer, (mut outgoing, tokens))) in answers.iter().zip(self.sent).enumerate() {
            let whole: Outcome<String> = tokenizer.decode(&answer.ids).map_err(Into::into);
            let text = match whole {
                Ok(text) => text,
                Err(failure) => return self.job.send(Event::Failed(ApiError::internal(failure.message))),
            };
            // Without streaming, the text that was held back has not been sent, either.
            if !self.job.options.is_streamed {
                outgoing = StreamedText::new(&self.job.options.stop);
            }
            let text = outgoing.more(&text, true).to_owned();
            self.job.send(Event::Text { choice, text, tokens: answer.ids.len() - tokens });
            let ends = answer.ids.last().is_some_and(|id| config.answer_ends().contains(id));
            let reason = if ends || outgoing.is_stopped() { Finish::Stop } else { Finish::Length };
            self.job.send(Event::Finished { choice, reason });
        }
    }
}
