//! `train_low_mem score`: how well each text answers its query, by a reranker.
//!
//! Rows are read as a stream, and the scores of a [`Ranker`] are written in the order of the rows.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use durable_files::AtomicFile;
use memory_policy::plural;
use row_files::Template;
use serde_json::{Value, json};
use t5::peft::AdapterDirectory;
use t5::{Config, EvalContext};
use text_metrics::ranking::{self, Ranking};

use crate::answers::batches::{self, Room, Sources};
use crate::answers::inference::Asked;
use crate::answers::prompts::{self, Inputs, Source};
use crate::answers::ranker::{self, OfRun, Ranker};
use crate::cli::score_flags::ScoreArgs;
use crate::config::PricesFrom;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};
use crate::screen::report;
use crate::screen::stop::{self, Stop};

/// Writes the scores.
pub fn score(flags: &ScoreArgs) -> Outcome<()> {
    batches::check_length(flags.max_source_tokens)?;
    let parse = |text: &str| {
        let problem =
            |problem| Failure::usage(format!("`--template`: {problem}")).hint("such as `{query} [SEP] {text}`");
        Template::parse(text).map_err(problem)
    };
    let given = flags.template.as_deref().map(parse).transpose()?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Adapted { directory, adapter } = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
    let of_run = OfRun::find(flags.adapter.as_deref().into_iter().chain([flags.model.as_path()]));
    let template = match given {
        Some(template) => template,
        None => parse(of_run.template.as_deref().unwrap_or(ranker::USUAL_TEMPLATE))?,
    };
    let answers = if flags.answers.is_empty() { of_run.answers() } else { flags.answers.clone() };
    let mut config = Config::from_file(&directory.join("config.json"))?;
    if let Some(adapter) = &adapter {
        config = AdapterDirectory::model_below(adapter, &config)?;
        config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
    }
    let tokenizer = model_directory::tokenizer(&directory)?;
    model_directory::check_size(&config, &tokenizer)?;
    let ranker = Ranker::open(&config, &tokenizer, &answers, "--answers")?;
    stages.ends(stages::TOKENIZER)?;
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
    let named = [&flags.query_column, &flags.label_column].map(|column| column.iter().map(String::as_str));
    let columns: Vec<&str> = template.columns().chain(named.into_iter().flatten()).collect();
    if columns.is_empty() {
        return Err(Failure::usage("`--template` names no column").hint("such as `{query} [SEP] {text}`"));
    }
    let source = Source { flags: "--template", given: None, of_run: None, usual: "text" };
    let inputs = Inputs { typed: &[], file: Some(&flags.pairs), source, text: &flags.text };
    let window = batches::window(flags.batch_samples);
    let held = (window * (4 * flags.max_source_tokens + 256)) as u64;
    let (planned, limits) = asked.plan_to_read(inputs, flags.weights.budgets()?, |within| {
        batches::shape(flags.batch_samples, flags.max_source_tokens, held, within)
    })?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let model = planned.load()?;
    let begin = |path: &Path| {
        outputs::remove_leftovers_beside(path);
        stop.remove_at_end(|| Ok::<_, Failure>(AtomicFile::create(path)?), AtomicFile::leftover)
    };
    let activations = trainer::Precision::from(flags.precision).activations();
    let context = EvalContext { activations, loss_chunk_rows: planned.plan.step.evaluation_samples.max(1) };
    let room = Room::left_by(&planned, flags.max_source_tokens)?;
    let score = |window: &[(Vec<u32>, Gain)]| {
        let sources: Vec<&[u32]> = window.iter().map(|(source, _)| source.as_slice()).collect();
        room.compute(&sources, 1, &mut |batch| ranker.scores(&model, batch, context))
    };
    let mut sources = Sources::new(&tokenizer, config.prefix(), &config, flags.max_source_tokens);
    let mut scored = Scored { file: flags.output.as_deref().map(begin).transpose()?, ..Scored::default() };
    let (began, mut waiting) = (Instant::now(), Vec::with_capacity(window));
    // Of the rows that wait only this says which query they are of: a query can be as long as a row.
    let mut query: Option<String> = None;
    for row in prompts::cells(inputs, &columns, limits)? {
        let cells = row?;
        let value = |name: &str| columns.iter().position(|column| *column == name).map_or("", |at| cells[at].as_str());
        let source = sources.source(&template.fill(value))?;
        let gain = match &flags.label_column {
            None => None,
            Some(column) => {
                let text = value(column);
                let gain = text.parse::<f64>().ok().filter(|gain| gain.is_finite()).ok_or_else(|| {
                    let row = scored.rows + waiting.len() as u64 + 1;
                    let problem = format!("{}: row {row}: `{column}` is `{text}`", flags.pairs.display());
                    Failure::unusable(problem).hint("expected a number: 0 for a text that is not relevant")
                })?;
                let of_row = value(flags.query_column.as_deref().unwrap_or_default());
                let is_next_query = query.as_deref() != Some(of_row);
                if is_next_query {
                    query = Some(of_row.to_owned());
                }
                Some((is_next_query, gain))
            }
        };
        waiting.push((source, gain));
        if waiting.len() == window {
            scored.add(&score(&waiting)?, &waiting)?;
            waiting.clear();
        }
    }
    scored.add(&score(&waiting)?, &waiting)?;
    scored.end_query();
    let seconds = began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    if let Some(file) = scored.file.take() {
        file.commit()?;
    }
    sources.note_cut();
    let (tokens, cut) = (sources.tokens, sources.cut.0);
    #[expect(clippy::cast_precision_loss, reason = "counts of tokens")]
    let rate = tokens as f64 / seconds;
    let means = scored.ranking.means();
    if flags.json {
        let mut line = json!({"rows": scored.rows, "tokens": tokens, "cut_rows": cut, "seconds": seconds, "tokens_per_second": rate});
        if let Some([mrr, ndcg]) = means {
            (line["mrr@10"], line["ndcg@10"], line["queries"]) =
                (json!(mrr), json!(ndcg), json!(scored.ranking.queries()));
        }
        planned.add_peaks(&mut line)?;
        return report::result(&format!("{line}\n"));
    }
    report::note(&format!("{}, {rate:.0} tokens/s", plural(scored.rows, "row")));
    if let Some([mrr, ndcg]) = means {
        report::note(&format!("MRR@10 {mrr:.4}  NDCG@10 {ndcg:.4}  ({})", plural(scored.ranking.queries(), "query")));
    }
    Ok(())
}

/// Whether a row begins a query, and how relevant its text is.
type Gain = Option<(bool, f64)>;

/// The texts of a query of which all are held.
const TEXTS_OF_A_QUERY: usize = 1 << 12;

/// What was scored so far.
#[derive(Default)]
struct Scored {
    file: Option<AtomicFile>,
    rows: u64,
    ranking: Ranking,
    /// The score and the gain of the texts of the query that is being read.
    query: Vec<(f64, f64)>,
}

impl Scored {
    /// Writes the scores of a window of rows.
    fn add(&mut self, scores: &[f64], window: &[(Vec<u32>, Gain)]) -> Outcome<()> {
        let mut lines = String::new();
        for (score, (_, gain)) in scores.iter().zip(window) {
            let line: Value = json!({"row": self.rows, "score": score});
            lines += &format!("{line}\n");
            self.rows += 1;
            if let Some((is_next_query, gain)) = *gain {
                if is_next_query {
                    self.end_query();
                }
                self.query.push((*score, gain));
                if self.query.len() == TEXTS_OF_A_QUERY {
                    ranking::keep_leaders(&mut self.query);
                }
            }
        }
        match &mut self.file {
            Some(file) => file
                .file()
                .write_all(lines.as_bytes())
                .map_err(|error| Failure::unusable(format!("the scores cannot be written: {error}"))),
            None => report::result(&lines),
        }
    }

    fn end_query(&mut self) {
        if !self.query.is_empty() {
            self.ranking.add(&self.query);
            self.query.clear();
        }
    }
}
