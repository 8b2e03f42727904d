//! `train_low_mem score`: how well each text answers its query, by a reranker.
//!
//! Rows are read as a stream, and the scores of a [`Ranker`] are written in the order of the rows.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use dataloader::Tokenizer;
use durable_files::AtomicFile;
use memory_policy::plural;
use row_files::Template;
use serde_json::{Value, json};
use t5::peft::AdapterDirectory;
use t5::{Config, EvalContext};
use text_metrics::ranking::{self, Ranking};

use crate::answers::batches::{self, Room, Sources};
use crate::answers::inference::{Asked, Planned};
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
    let given = flags.template.as_deref().map(read_template).transpose()?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Opened { directory, adapter, config, tokenizer, template, answers } = Opened::open(flags, given)?;
    let ranker = Ranker::open(&config, &tokenizer, &answers, "--answers")?;
    stages.ends(stages::TOKENIZER)?;
    let activations = trainer::Precision::from(flags.precision).activations();
    let asked = Asked {
        directory: &directory,
        adapter: adapter.as_deref(),
        config: &config,
        device: device.as_ref(),
        prices: PricesFrom::of_environment(),
        activations,
        parameters: None,
        flags: &flags.weights,
        stages: &stages,
    };
    let columns = columns(flags, &template)?;
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
    let context = EvalContext { activations, loss_chunk_rows: planned.plan.step.evaluation_samples.max(1) };
    let room = Room::left_by(&planned, flags.max_source_tokens)?;
    let score = |window: &[(Vec<u32>, Gain)]| {
        let sources: Vec<&[u32]> = window.iter().map(|(source, _)| source.as_slice()).collect();
        room.compute(&sources, 1, &mut |batch| ranker.scores(&model, batch, context, &|| ()))
    };
    let mut sources = Sources::new(&tokenizer, config.prefix(), &config, flags.max_source_tokens);
    let mut scored = Scored::begin(flags.output.as_deref(), &stop)?;
    let mut gains = Gains { flags, query: None };
    let (began, mut waiting) = (Instant::now(), Vec::with_capacity(window));
    for row in prompts::cells(inputs, &columns, limits)? {
        let cells = row?;
        let value = |name: &str| columns.iter().position(|column| *column == name).map_or("", |at| cells[at].as_str());
        let source = sources.source(&template.fill(value))?;
        waiting.push((source, gains.of_row(value, scored.rows + waiting.len() as u64 + 1)?));
        if waiting.len() == window {
            scored.add(&score(&waiting)?, &waiting)?;
            waiting.clear();
        }
    }
    scored.add(&score(&waiting)?, &waiting)?;
    scored.end()?;
    show(flags, &scored, &sources, began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE), &planned)
}

/// A model, and how its run wrote texts and answers.
struct Opened {
    directory: PathBuf,
    adapter: Option<PathBuf>,
    config: Config,
    tokenizer: Tokenizer,
    template: Template,
    answers: Vec<String>,
}

impl Opened {
    fn open(flags: &ScoreArgs, given: Option<Template>) -> Outcome<Self> {
        let Adapted { directory, adapter } = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
        let of_run = OfRun::find(flags.adapter.as_deref().into_iter().chain([flags.model.as_path()]));
        let template = match given {
            Some(template) => template,
            None => read_template(of_run.template.as_deref().unwrap_or(ranker::USUAL_TEMPLATE))?,
        };
        let answers = if flags.answers.is_empty() { of_run.answers() } else { flags.answers.clone() };
        let mut config = Config::from_file(&directory.join("config.json"))?;
        if let Some(adapter) = &adapter {
            config = AdapterDirectory::model_below(adapter, &config)?;
            config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
        }
        let tokenizer = model_directory::tokenizer(&directory)?;
        model_directory::check_size(&config, &tokenizer)?;
        Ok(Self { directory, adapter, config, tokenizer, template, answers })
    }
}

/// A template of `--template` or of a run.
fn read_template(text: &str) -> Outcome<Template> {
    let problem = |problem| Failure::usage(format!("`--template`: {problem}")).hint("such as `{query} [SEP] {text}`");
    Template::parse(text).map_err(problem)
}

/// The columns that are read.
fn columns<'a>(flags: &'a ScoreArgs, template: &'a Template) -> Outcome<Vec<&'a str>> {
    let named = [&flags.query_column, &flags.label_column].map(|column| column.iter().map(String::as_str));
    let columns: Vec<&str> = template.columns().chain(named.into_iter().flatten()).collect();
    if columns.is_empty() {
        return Err(Failure::usage("`--template` names no column").hint("such as `{query} [SEP] {text}`"));
    }
    Ok(columns)
}

/// Shows what was scored, and how well the scores rank.
fn show(flags: &ScoreArgs, scored: &Scored, sources: &Sources<'_>, seconds: f64, planned: &Planned<'_>) -> Outcome<()> {
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

/// The gains of rows, as `--label-column` has them.
struct Gains<'a> {
    flags: &'a ScoreArgs,
    /// The query of the last row. Rows that wait only say whether they begin one: a query can be as long as a row.
    query: Option<String>,
}

impl Gains<'_> {
    /// The gain of the next row.
    fn of_row<'v>(&mut self, value: impl Fn(&str) -> &'v str, row: u64) -> Outcome<Gain> {
        let Some(column) = &self.flags.label_column else { return Ok(None) };
        let text = value(column);
        let gain = text.parse::<f64>().ok().filter(|gain| gain.is_finite()).ok_or_else(|| {
            let problem = format!("{}: row {row}: `{column}` is `{text}`", self.flags.pairs.display());
            Failure::unusable(problem).hint("expected a number: 0 for a text that is not relevant")
        })?;
        let query = value(self.flags.query_column.as_deref().unwrap_or_default());
        let is_next_query = self.query.as_deref() != Some(query);
        if is_next_query {
            self.query = Some(query.to_owned());
        }
        Ok(Some((is_next_query, gain)))
    }
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
    fn begin(output: Option<&Path>, stop: &Stop) -> Outcome<Self> {
        let begin = |path: &Path| {
            outputs::remove_leftovers_beside(path);
            stop.remove_at_end(|| Ok::<_, Failure>(AtomicFile::create(path)?), AtomicFile::leftover)
        };
        Ok(Self { file: output.map(begin).transpose()?, ..Self::default() })
    }

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

    /// Completes the file.
    fn end(&mut self) -> Outcome<()> {
        self.end_query();
        match self.file.take() {
            Some(file) => Ok(file.commit()?),
            None => Ok(()),
        }
    }

    fn end_query(&mut self) {
        if !self.query.is_empty() {
            self.ranking.add(&self.query);
            self.query.clear();
        }
    }
}
