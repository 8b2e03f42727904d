//! `eval --corpus FILE --queries FILE --qrels FILE`: how well an encoder's vectors find the texts of a corpus that were judged relevant for each query.
//!
//! The files are those of BEIR: rows with `_id`, `text` and perhaps `title`, and lines of a query's name, a text's name and a number, perhaps
//! below a header. The corpus is read as a stream: memory has the vectors of the queries, and the nearest texts of each.

use std::collections::{HashMap, HashSet};
use std::io::BufReader;
use std::path::Path;
use std::time::Instant;

use candle_core::{Device, Tensor};
use memory_policy::plural;
use row_files::{Kind, Template};
use run_report::visible;
use serde_json::json;
use t5::T5;
use text_metrics::searches::{self, KEPT, Searches};

use crate::answers::batches::Room;
use crate::answers::encoder::{Encoder, EncoderFlags};
use crate::answers::prompts::{self, Inputs, Limits, Source};
use crate::answers::vectors::normalize;
use crate::cli::answer_flags::{EvalArgs, SearchFlags};
use crate::cli::flag_values::Precision;
use crate::cli::row_flags::TextFlags;
use crate::config::Values;
use crate::failure::{Failure, Outcome};
use crate::scores::figures::search_scores;
use crate::screen::lines::Lines;
use crate::screen::report;

/// The length of the longest line of judgements.
const MAX_LINE_BYTES: usize = 1 << 16;
/// The bytes that a text among the nearest takes, with a name of usual length.
const NEAR_BYTES: usize = 64;
/// The key that `--set` takes.
const LENGTH: &str = "data.max_source_tokens";

/// The gain of each judged text of each query, by their names.
type Judged = HashMap<String, HashMap<String, f64>>;

/// Scores the searches.
pub fn eval(flags: &EvalArgs, search: &SearchFlags) -> Outcome<()> {
    let (Some(corpus), Some(queries), Some(qrels)) = (&search.corpus, &search.queries, &search.qrels) else {
        return Err(Failure::internal("a search without its files"));
    };
    let judged = read_judged(qrels)?;
    let (of_corpus, of_queries) = (Rows::open(corpus, &flags.text)?, Rows::open(queries, &flags.text)?);
    let encoder = Encoder::open(EncoderFlags {
        model: &flags.model,
        adapter: flags.adapter.as_deref(),
        pooling: None,
        normalize: false,
        max_source_tokens: max_source_tokens(&flags.set)?,
        batch_samples: flags.batch_samples,
        precision: flags.precision.unwrap_or(Precision::F32).into(),
        weights: &flags.weights,
        device: flags.device.as_deref(),
    })?;
    let (planned, limits) = encoder.plan(of_corpus.inputs(), held(&judged, qrels, &encoder))?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let model = planned.load()?;
    let began = Instant::now();
    let making = Making { encoder: &encoder, model: &model, room: &encoder.room(&planned)?, limits };
    let (searching, of_query_texts) = Searching::read(&making, (&of_queries, &search.query_prefix), judged)?;
    let (found, of_texts) = searching.search(&making, (&of_corpus, &search.passage_prefix))?;
    let seconds = began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    let means = found.scores.means().ok_or_else(|| Failure::internal("a search without a query"))?;
    let scores = search_scores(means.recall, means.mrr, means.ndcg);
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    let rate = (of_query_texts + of_texts) as f64 / seconds;
    if flags.json {
        let mut line = json!({
            "queries": found.scores.queries(), "texts": found.texts, "missing_texts": found.missing,
            "tokens": of_query_texts + of_texts, "seconds": seconds, "tokens_per_second": rate,
        });
        scores.for_each(|(name, value)| line[name] = json!(value));
        planned.add_peaks(&mut line)?;
        return report::result(&format!("{line}\n"));
    }
    let scores: String = scores.map(|(name, value)| format!("{name} {value:.4}  ")).collect();
    let counts = (plural(found.scores.queries(), "query"), plural(found.texts, "text"));
    report::result(&format!("{scores}({}, {}, {rate:.0} tokens/s)\n", counts.0, counts.1))
}

/// The length that `--set` gives.
fn max_source_tokens(set: &[String]) -> Outcome<Option<usize>> {
    let mut values = Values::defaults();
    for assignment in set {
        values.apply_assignment(assignment)?;
        let key = assignment.split('=').next().unwrap_or_default().trim();
        if key != LENGTH {
            return Err(Failure::usage(format!("`--set {key}` has no effect on the search of a corpus"))
                .hint(format!("`--set {LENGTH}=N` cuts texts")));
        }
    }
    let given = values.integer(LENGTH).filter(|_| !set.is_empty());
    Ok(given.and_then(|tokens| usize::try_from(tokens).ok()))
}

/// The bytes of queries, of their nearest texts, and of what was judged.
fn held(judged: &Judged, qrels: &Path, encoder: &Encoder<'_>) -> u64 {
    let near = 2 * KEPT * NEAR_BYTES;
    let of_query = size_of::<f32>() * (2 * encoder.width() + encoder.window()) + near;
    let bytes = regular_file::metadata(qrels).map_or(0, |file| file.len());
    // A judgement is two names in a map, whose tables are at most half empty.
    (judged.len() * of_query) as u64 + 6 * bytes
}

/// The gains in a file of judgements: `QUERY TEXT GAIN`, or `QUERY 0 TEXT GAIN`, between tabs or blanks.
fn read_judged(qrels: &Path) -> Outcome<Judged> {
    let file = regular_file::open(qrels).map_err(|error| Failure::io("read", qrels, &error))?;
    let mut judged = Judged::new();
    for (number, line) in (1..).zip(Lines::new(BufReader::new(file), qrels.display().to_string(), MAX_LINE_BYTES)) {
        let line = line?;
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (query, text, gain) = match fields.as_slice() {
            [] => continue,
            [query, text, gain] | [query, _, text, gain] => (*query, *text, gain.parse::<f64>().ok()),
            _ => ("", "", None),
        };
        match gain.filter(|gain| gain.is_finite()) {
            Some(gain) => {
                judged.entry(query.to_owned()).or_default().insert(text.to_owned(), gain);
            }
            // A header.
            None if number == 1 && !query.is_empty() => {}
            None => {
                let (file, line) = (qrels.display(), visible::line(&line).into_owned());
                return Err(Failure::unusable(format!(
                    "{file}: line {number}: expected the names of a query and a text, and a number, got `{line}`"
                ))
                .hint("such as `q1<TAB>d7<TAB>1`: BEIR's qrels, or trec_eval's with a column more"));
            }
        }
    }
    if judged.is_empty() {
        return Err(Failure::unusable(format!("{}: no text is judged", qrels.display())));
    }
    Ok(judged)
}

/// A file of texts with their names.
struct Rows<'a> {
    file: &'a Path,
    flags: &'a TextFlags,
    name: String,
    text: Template,
}

impl<'a> Rows<'a> {
    fn open(file: &'a Path, flags: &'a TextFlags) -> Outcome<Self> {
        let columns = Kind::detect(file, &flags.options())?.columns;
        let has = |name: &str| columns.iter().any(|column| column == name);
        let Some(name) = ["_id", "id"].into_iter().find(|name| has(name)).filter(|_| has("text")) else {
            let [file, columns] = [file.display().to_string(), columns.join(", ")];
            return Err(Failure::unusable(format!("{file}: expected the columns `_id` and `text`, got {columns}"))
                .hint("such as BEIR's: {\"_id\": \"d7\", \"title\": \"\", \"text\": \"cows eat grass\"}"));
        };
        let text = if has("title") { "{title} {text}" } else { "{text}" };
        let text = Template::parse(text).map_err(Failure::internal)?;
        Ok(Self { file, flags, name: name.to_owned(), text })
    }

    fn inputs(&self) -> Inputs<'_> {
        let source = Source { flags: "a column", given: Some(&self.text), of_run: None, usual: "text" };
        Inputs { typed: &[], file: Some(self.file), source, text: self.flags }
    }
}

/// Takes the names and the vectors of a window.
type Take<'a> = &'a mut dyn FnMut(&[String], Vec<f32>) -> Outcome<()>;

/// All that makes vectors.
struct Making<'a> {
    encoder: &'a Encoder<'a>,
    model: &'a T5,
    room: &'a Room,
    limits: Limits,
}

impl Making<'_> {
    /// The vectors of texts with their names, of length 1, a window at a time. Returns the tokens of all.
    fn each_window(
        &self,
        (rows, prefix): (&Rows<'_>, &str),
        wants: &dyn Fn(&str) -> bool,
        take: Take<'_>,
    ) -> Outcome<u64> {
        let mut sources = self.encoder.sources(prefix);
        let (mut names, mut waiting) = (Vec::new(), Vec::new());
        let mut done = |names: &mut Vec<String>, waiting: &mut Vec<Vec<u32>>| {
            let mut vectors = self.encoder.compute(self.model, self.room, waiting)?;
            vectors.chunks_mut(self.encoder.width()).for_each(normalize);
            take(names, vectors)?;
            names.clear();
            waiting.clear();
            Ok::<_, Failure>(())
        };
        for (number, row) in (1_u64..).zip(prompts::with_references(rows.inputs(), &rows.name, self.limits)?) {
            let (text, name) = row?;
            let Some(name) = name else {
                let file = rows.file.display();
                return Err(Failure::unusable(format!("{file}: row {number} has no `{}`", rows.name)));
            };
            if !wants(&name) {
                continue;
            }
            waiting.push(sources.source(text.trim())?);
            names.push(name);
            if names.len() == self.encoder.window() {
                done(&mut names, &mut waiting)?;
            }
        }
        if !names.is_empty() {
            done(&mut names, &mut waiting)?;
        }
        sources.note_cut();
        Ok(sources.tokens)
    }
}

/// Queries with their vectors, and the texts that are nearest so far.
struct Searching {
    queries: Vec<Query>,
    /// (queries, width)
    vectors: Tensor,
}

/// A query.
struct Query {
    judged: HashMap<String, f64>,
    /// The nearest texts, and perhaps as many others.
    near: Vec<(f32, Box<str>)>,
    /// The score that a text needs.
    least: f32,
}

/// What all queries found.
struct Found {
    scores: Searches,
    texts: u64,
    missing: u64,
}

impl Query {
    fn add(&mut self, score: f32, name: &str) {
        if score >= self.least {
            self.near.push((score, name.into()));
            if self.near.len() == 2 * KEPT {
                self.keep_nearest();
            }
        }
    }

    fn keep_nearest(&mut self) {
        self.near.sort_by(|one, other| searches::order((one.0, &one.1), (other.0, &other.1)));
        self.near.truncate(KEPT);
        if self.near.len() == KEPT {
            self.least = self.near[KEPT - 1].0;
        }
    }
}

impl Searching {
    /// Reads the queries that have a judgement. Also returns the tokens of their texts.
    fn read(making: &Making<'_>, rows: (&Rows<'_>, &str), mut judged: Judged) -> Outcome<(Self, u64)> {
        let (mut queries, mut vectors, all) = (Vec::new(), Vec::new(), judged.len());
        let known: HashSet<String> = judged.keys().cloned().collect();
        let tokens = making.each_window(rows, &|name| known.contains(name), &mut |names, made| {
            for name in names {
                let Some(judged) = judged.remove(name) else {
                    return Err(twice(rows.0, name));
                };
                queries.push(Query { judged, near: Vec::new(), least: f32::NEG_INFINITY });
            }
            vectors.extend(made);
            Ok(())
        })?;
        let file = rows.0.file.display();
        if queries.is_empty() {
            return Err(Failure::unusable(format!("{file}: no query has a judgement in `--qrels`"))
                .hint("the first column of the judgements has the queries' names"));
        }
        if let Some(name) = judged.keys().min() {
            let (missing, all) = (judged.len(), plural(all as u64, "judged query"));
            let name = visible::line(name);
            report::warn(&format!("{missing} of {all} are not in {file}, such as `{name}`, and are left out"));
        }
        let (count, width) = (queries.len(), making.encoder.width());
        let vectors = Tensor::from_vec(vectors, (count, width), &Device::Cpu).map_err(failed)?;
        Ok((Self { queries, vectors }, tokens))
    }

    /// Searches all texts. Also returns their tokens.
    fn search(mut self, making: &Making<'_>, rows: (&Rows<'_>, &str)) -> Outcome<(Found, u64)> {
        let of_queries = self.queries.iter().flat_map(|query| query.judged.keys().cloned());
        let mut unseen: HashSet<String> = of_queries.collect();
        let (judged, mut texts) = (unseen.clone(), 0);
        let width = making.encoder.width();
        let tokens = making.each_window(rows, &|_| true, &mut |names, vectors| {
            for name in names {
                if judged.contains(name) && !unseen.remove(name) {
                    return Err(twice(rows.0, name));
                }
            }
            texts += names.len() as u64;
            let of_texts = Tensor::from_vec(vectors, (names.len(), width), &Device::Cpu).map_err(failed)?;
            let scores = of_texts.t().and_then(|texts| self.vectors.matmul(&texts)); // (queries, texts)
            let scores = scores.and_then(|scores| scores.to_vec2::<f32>()).map_err(failed)?;
            for (query, scores) in self.queries.iter_mut().zip(scores) {
                scores.into_iter().zip(names).for_each(|(score, name)| query.add(score, name));
            }
            Ok(())
        })?;
        let mut scores = Searches::default();
        for query in &mut self.queries {
            query.keep_nearest();
            let gain = |name: &str| query.judged.get(name).copied().unwrap_or(0.0);
            let found: Vec<f64> = query.near.iter().map(|(_, name)| gain(name)).collect();
            scores.add(&found, &query.judged.values().copied().collect::<Vec<_>>());
        }
        if let Some(name) = unseen.iter().min() {
            let (missing, name) = (plural(unseen.len() as u64, "judged text"), visible::line(name));
            report::warn(&format!(
                "{missing} are not in {}, such as `{name}`: nobody can find them, and they count",
                rows.0.file.display()
            ));
        }
        Ok((Found { scores, texts, missing: unseen.len() as u64 }, tokens))
    }
}

fn twice(rows: &Rows<'_>, name: &str) -> Failure {
    let (file, name) = (rows.file.display(), visible::line(name).into_owned());
    Failure::unusable(format!("{file}: two rows have the `{}` `{name}`", rows.name))
        .hint("names belong to one row each")
}

fn failed(error: candle_core::Error) -> Failure {
    Failure::internal(format!("a search: {error}"))
}
