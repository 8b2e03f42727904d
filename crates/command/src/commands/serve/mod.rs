//! `train_low_mem serve`: a model, and adapters beside it, behind OpenAI's HTTP interface.
//!
//! The server's thread reads requests ([`openai_server`]), and this thread makes the answers ([`engine`]). A request is accepted when the
//! bytes of its answers, as counted by the planner, fit beside the running ones.

mod access_log;
mod engine;
mod fair;
pub mod models;
mod request_options;
mod texts;
mod turns;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use dataloader::{Side, Tokenizer};
use memory_policy::{Bytes, CostRow, Probe, SystemProbe};
use openai_server::{
    Access, BYTES_OF_A_NUMBER, Drainer, Gauge, Hooks, Keys, Limits, Overflow, Queue, RequestLimits, Server, Settings,
};
use planner::{Pins, Plan, names};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use t5::AnswerShape;

use self::access_log::AccessLog;
use self::engine::Engine;
use self::fair::{Fair, Sides};
use self::models::{Loaded, Named};
use self::request_options::Defaults;
use self::turns::Turns;
use crate::answers::inference::{Asked, Planned, Shape};
use crate::answers::vectors::Vectors;
use crate::cli::serve_flags::{PromptOverflow, ServeArgs};
use crate::failure::{Exit, Failure, Outcome};
use crate::machine::device;
use crate::screen::output::{self, Kind, Shown, Stream};
use crate::screen::report;

/// The most bytes of a key file.
const LARGEST_KEY_FILE_BYTES: u64 = 64 << 10;

/// The most bytes of a prompt for each of its tokens. Few texts have more than eight; blanks, of which many are one token, have.
const PROMPT_BYTES_OF_A_TOKEN: usize = 32;

/// The least limit of answers that no client has taken yet.
const LEAST_ANSWER_BYTES: usize = 1 << 20;

/// The least limit of a prompt in bytes.
const LEAST_PROMPT_BYTES: usize = 4 << 10;

/// The most bytes of text that a token produces in the events of a stream.
const BYTES_OF_A_TOKEN: usize = 256;

/// Serves a model until SIGTERM or SIGINT.
pub fn serve(flags: &ServeArgs) -> Outcome<()> {
    let keys = keys(flags)?;
    let device = device::named(flags.models.device.as_deref())?;
    let named = Named::find(&flags.models, flags.model_name.clone())?;
    let Named { tokenizer, activations, served, .. } = &named;
    let defaults = defaults(flags, &named);
    let limits = limits(flags, &named, defaults.max_new_tokens);
    let overflow = limits.request.overflow;
    let asked = || named.asked(&flags.models, device.as_ref());
    let (planned, adapters) = planned(flags, asked, &named, &limits, defaults.max_new_tokens)?;
    if flags.models.weights.dry_run {
        return report::result(&planned.bill());
    }
    let shape = longest(flags, &named, defaults.max_new_tokens);
    let bytes = planned.answer_bytes()?;
    let budget = bytes.count(planned.plan.step.evaluation_samples, flags.models.max_source_tokens, shape);
    // While the model is loaded, a signal ends the process in the default way.
    let model = planned.load()?;
    let queue = Queue::new(flags.queue);
    let settings = Settings {
        listen: flags.listen,
        models: served.iter().map(|served| served.name.clone()).collect(),
        keys,
        hosts: flags.allow_host.clone(),
        limits,
    };
    let tokenized = Arc::new(AtomicU64::new(0));
    if !has_http_date(SystemTime::now()) {
        return Err(Failure::unusable("the system's clock is before 1970 or after 9999, and each answer has a date")
            .hint("set the clock, as with `date --set`"));
    }
    let server = Server::start(settings, &queue, hooks(flags, &planned.plan, &tokenized)?).map_err(|error| {
        Failure::usage(format!("--listen {}: {error}", flags.listen))
            .hint("name another port: `--listen 127.0.0.1:0` takes any")
    })?;
    end_on_signals(server.drainer())?;
    report::note(&format!(
        "serving {} on http://{} ({} within {}); SIGTERM stops it after the requests in progress{}",
        served.iter().map(|served| served.name.as_str()).collect::<Vec<_>>().join(", "),
        server.address(),
        planned.plan.predicted_peak,
        planned.plan.budget,
        match overflow {
            Overflow::Refuse => String::new(),
            Overflow::CutEnd => format!("; longer prompts lose their end at {} tokens", flags.models.max_source_tokens),
            Overflow::CutBeginning => {
                format!("; longer prompts lose their beginning at {} tokens", flags.models.max_source_tokens)
            }
        },
    ));
    let loaded = Loaded::new(model, *activations, adapters);
    let mut engine = Engine {
        queue,
        served,
        loaded,
        tokenizer,
        defaults,
        max_source_tokens: flags.models.max_source_tokens,
        overflow,
        bytes,
        budget,
        running: BTreeMap::new(),
        tokenized,
        turns: Turns::default(),
        prepared: BTreeMap::new(),
        vectors: named.vectors.as_ref(),
        texts: BTreeMap::new(),
        fair: Fair::default(),
        sides: Sides::default(),
        paused: None,
        stood_still: Duration::ZERO,
    };
    engine.run();
    if !server.join() {
        return Err(Failure::internal("the server's thread failed"));
    }
    report::note(&format!("stopped; {}", planned.peaks_in_words()?));
    Ok(())
}

/// The keys, if the address needs any.
fn keys(flags: &ServeArgs) -> Outcome<Keys> {
    let keys = match &flags.api_key_file {
        None => Keys::default(),
        Some(path) => {
            let text = regular_file::read_to_string(path, LARGEST_KEY_FILE_BYTES)
                .map_err(|error| Failure::usage(format!("--api-key-file {}: {error}", path.display())))?;
            warn_of_readers(path);
            Keys::of_file(&text)
                .map_err(|error| Failure::usage(format!("--api-key-file {}: {error}", path.display())))?
        }
    };
    if keys.is_empty() && !flags.listen.ip().is_loopback() && !flags.without_key {
        return Err(Failure::usage(format!("--listen {}: an address of a network needs a key", flags.listen))
            .hint("write a key into a file of your own and name it: `--api-key-file FILE`")
            .hint("or accept requests from everyone who can reach it: `--without-key`"));
    }
    Ok(keys)
}

/// Warns if other users of this machine can read the keys.
fn warn_of_readers(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        if regular_file::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o077 != 0) {
            report::warn(&format!("{}: others can read the keys; `chmod 600` it", path.display()));
        }
    }
}

/// The settings of answers: the model's own, and the flags.
fn defaults(flags: &ServeArgs, named: &Named) -> Defaults {
    Defaults {
        values: named.values.clone(),
        max_new_tokens: named.max_new_tokens(flags.max_new_tokens),
        activations: named.activations,
        vocab_size: named.base.vocab_size,
    }
}

fn limits(flags: &ServeArgs, named: &Named, max_new_tokens: usize) -> Limits {
    let request = RequestLimits {
        rows: flags.max_rows.max(1),
        texts: flags.queue,
        answer_tokens: max_new_tokens,
        prompt_bytes: flags.models.max_source_tokens.saturating_mul(PROMPT_BYTES_OF_A_TOKEN).max(LEAST_PROMPT_BYTES),
        overflow: overflow(flags, &named.tokenizer),
        ..RequestLimits::default()
    };
    let body_bytes = usize::try_from(flags.max_body.0).unwrap_or(usize::MAX).clamp(1 << 10, 1 << 30);
    // One request alone never holds too much: the documents of a body and their text, or all its vectors, fit into half of the limit.
    let documents = if named.served.iter().any(|served| served.ranking.is_ok()) { 2 * body_bytes } else { 0 };
    let width = named.vectors.as_ref().map_or(0, |vectors| vectors.width(&named.base));
    let vectors = flags.queue * (width * BYTES_OF_A_NUMBER + BYTES_OF_A_TOKEN);
    Limits {
        connections: flags.connections.clamp(1, 1 << 16),
        body_bytes,
        request_timeout: Duration::from_secs(flags.request_timeout.max(1)),
        drain_timeout: Duration::from_secs(flags.drain_timeout),
        answer_bytes: (flags.queue * max_new_tokens * BYTES_OF_A_TOKEN)
            .max(LEAST_ANSWER_BYTES)
            .max(2 * documents.max(vectors)),
        request,
        ..Limits::default()
    }
}

/// What happens to longer prompts. They are cut on the side on which the model's tokenizer cuts.
fn overflow(flags: &ServeArgs, tokenizer: &Tokenizer) -> Overflow {
    match (flags.prompt_overflow, tokenizer.truncation_side()) {
        (PromptOverflow::Error, _) => Overflow::Refuse,
        (PromptOverflow::Truncate, Some(Side::Left)) => Overflow::CutBeginning,
        (PromptOverflow::Truncate, _) => Overflow::CutEnd,
    }
}

/// The answers that need most memory.
fn longest(flags: &ServeArgs, named: &Named, max_new_tokens: usize) -> AnswerShape {
    if !named.base.head.is_language() {
        return AnswerShape::greedy(1);
    }
    AnswerShape {
        max_new_tokens,
        rows: flags.max_rows.max(1),
        looks_at_scores: true,
        likeliest_are_enough: false,
        sorts: true,
    }
}

/// The plan with as many adapters in memory as fit, and their number.
fn planned<'a>(
    flags: &ServeArgs,
    asked: impl Fn() -> Asked<'a>,
    named: &Named,
    limits: &Limits,
    max_new_tokens: usize,
) -> Outcome<(Planned<'a>, usize)> {
    let budgets = flags.models.weights.budgets()?;
    let served = &named.served;
    let mut sizes: Vec<u64> =
        served.iter().filter(|served| served.adapter.is_some()).map(|served| served.bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    // The scores of a token before its processors, for `logprobs`.
    let scores = (named.base.vocab_size * size_of::<f32>()) as u64;
    let server = CostRow::new(
        names::SERVER,
        limits.bytes(flags.queue) + scores + named.vectors.as_ref().map_or(0, Vectors::bytes),
        format!("{} connections, {} prompts that wait", limits.connections, flags.queue),
    );
    let mut adapters = sizes.len();
    loop {
        // The first adapter is among the parameters.
        let others: u64 = sizes.iter().take(adapters).skip(1).sum();
        let mut beside = vec![server.clone()];
        if others > 0 {
            beside.push(CostRow::new(names::ADAPTERS, others, format!("{} of {} in memory", adapters, sizes.len())));
        }
        let answer = longest(flags, named, max_new_tokens);
        let shape = Shape::of_answers(flags.batch_samples.max(1), flags.models.max_source_tokens, answer);
        let shape = Shape { is_served: named.base.head.is_language(), beside, ..shape };
        match asked().plan(&shape, None, (budgets, &Pins::default())) {
            Err(failure) if failure.exit == Exit::DoesNotFit && adapters > 1 => adapters -= 1,
            Err(failure) if failure.exit == Exit::DoesNotFit => {
                return Err(failure
                    .hint("shorter requests need less: `--max-source-tokens`, `--max-new-tokens`, `--max-rows 1`")
                    .hint("a smaller server needs less: `--connections 16 --queue 16 --max-body 16KiB`"));
            }
            planned => return Ok((planned?, adapters)),
        }
    }
}

/// The access log, and metrics of the process.
fn hooks(flags: &ServeArgs, plan: &Plan, tokenized: &Arc<AtomicU64>) -> Outcome<Hooks> {
    let file: Option<Mutex<AccessLog>> = match &flags.access_log {
        None => None,
        Some(path) => {
            let file = AccessLog::open(path);
            let named = |error: std::io::Error| Failure::usage(format!("--access-log {}: {error}", path.display()));
            Some(Mutex::new(file.map_err(named)?))
        }
    };
    if file.is_none() {
        output::start();
    }
    let log = move |access: &Access| {
        let line = Shown::text(&format!("{}\n", access.line()));
        match &file {
            None => {
                output::show(Stream::Out, Kind::Message, &line);
                true
            }
            Some(file) => file.lock().unwrap_or_else(PoisonError::into_inner).write(line.as_str()),
        }
    };
    let (budget, predicted, tokenized) = (plan.budget, plan.predicted_peak, Arc::clone(tokenized));
    #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
    let gauges = move || {
        let now = SystemProbe::new().snapshot().ok();
        let of = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.0 as f64);
        let files = std::fs::read_dir("/proc/self/fd").ok().map(|all| all.count() as f64);
        let all = [
            ("process_resident_memory_bytes", "Memory of the process.", of(now.as_ref().map(|now| now.rss))),
            (
                "serve_peak_memory_bytes",
                "Most memory that the process ever had.",
                of(now.as_ref().map(|now| now.peak_rss)),
            ),
            ("serve_memory_budget_bytes", "The budget of the process.", of(Some(budget))),
            ("serve_predicted_peak_bytes", "Most memory that the plan predicts.", of(Some(predicted))),
            ("process_open_fds", "Open files.", files),
            (
                "serve_tokenized_prompts",
                "Prompts that were tokenized. One that waits is not tokenized again.",
                Some(tokenized.load(Ordering::Relaxed) as f64),
            ),
        ];
        all.into_iter().filter_map(|(name, help, value)| Some(Gauge { name, help, value: value? })).collect()
    };
    Ok(Hooks { log: Box::new(log), gauges: Box::new(gauges) })
}

/// Whether HTTP can write this time: its dates begin in 1970 and have years of four digits.
fn has_http_date(time: SystemTime) -> bool {
    const YEAR_10000: u64 = 253_402_300_800;
    time.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since.as_secs() < YEAR_10000)
}

/// The first SIGTERM or SIGINT lets accepted requests finish; a second one ends the process at once.
fn end_on_signals(server: Drainer) -> Outcome<()> {
    let failed = |error: std::io::Error| Failure::internal(format!("cannot install handlers for signals: {error}"));
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
    let wait = move || {
        let mut is_draining = false;
        for signal in signals.forever() {
            if is_draining {
                low_level::exit(128 + signal);
            }
            is_draining = true;
            report::note("stopping: accepted requests are answered first; a second signal stops at once");
            server.drain();
        }
    };
    std::thread::Builder::new().name("signals".into()).stack_size(256 << 10).spawn(wait).map_err(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_http_are_those_from_1970_to_9999() {
        let second = Duration::from_secs(1);
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
        assert!(has_http_date(SystemTime::UNIX_EPOCH) && has_http_date(end));
        assert!(!has_http_date(SystemTime::UNIX_EPOCH - second) && !has_http_date(end + second));
    }
}
