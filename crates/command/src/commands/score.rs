//! `train_low_mem score`: how well each text answers its query, by a reranker.
//!
//! A model of text answers with one of two words, and the score is the logarithm of the first one's share of both probabilities (monoT5,
//! Nogueira et al., 2020). Of a model of numbers, the number is the score. Rows are read as a stream, a window of them is sorted by length, and
//! the scores are written in the order of the rows.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use dataloader::{Side, Tokenizer};
use durable_files::AtomicFile;
use memory_policy::{counted, plural};
use row_files::Template;
use serde_json::{Value, json};
use t5::peft::AdapterDirectory;
use t5::{AnswerShape, Config, EvalContext, Head, MicroBatch, T5};
use text_metrics::ranking::Ranking;

use crate::answers::inference::{Asked, Shape};
use crate::answers::prompts::{self, Inputs, Source};
use crate::cli::score_flags::ScoreArgs;
use crate::config::PricesFrom;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::machine::device;
use crate::machine::stages::{self, Stages};
use crate::model::model_directory::{self, Adapted};
use crate::screen::report;
use crate::screen::stop::{self, Stop};

/// The rows that are sorted together, in batches of rows of full length.
const BATCHES_SORTED_TOGETHER: usize = 16;

/// Writes the scores.
pub fn score(flags: &ScoreArgs) -> Outcome<()> {
    if flags.max_source_tokens < 2 {
        return Err(Failure::usage("`--max-source-tokens`: expected at least 2, for one token and EOS"));
    }
    let template = Template::parse(&flags.template)
        .map_err(|problem| Failure::usage(format!("`--template`: {problem}")).hint("such as `{query} [SEP] {text}`"))?;
    let stop = Stop::on_signals()?;
    stop.ends_with(stop::without_result);
    let mut stages = Stages::begin()?;
    let device = device::named(flags.device.as_deref())?;
    let Adapted { directory, adapter } = model_directory::find_as_trained(&flags.model, flags.adapter.as_deref())?;
    let mut config = Config::from_file(&directory.join("config.json"))?;
    if let Some(adapter) = &adapter {
        config = AdapterDirectory::model_below(adapter, &config)?;
        config = AdapterDirectory::open(adapter, &config)?.beside(&config)?;
    }
    let tokenizer = model_directory::tokenizer(&directory)?;
    model_directory::check_size(&config, &tokenizer)?;
    let way = Way::of(&config, &tokenizer, &flags.answers)?;
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
    let window = flags.batch_samples.max(1) * BATCHES_SORTED_TOGETHER;
    let (planned, limits) = asked.plan_to_read(inputs, flags.weights.budgets()?, |within| {
        let held = (window * (4 * flags.max_source_tokens + 256)) as u64;
        let text = 2 * prompts::MAX_PROMPT_BYTES as u64 + within.bytes;
        Shape {
            prompts: planner::Reading { rows: held + text, batch: held },
            ..Shape::of_answers(flags.batch_samples.max(1), flags.max_source_tokens, AnswerShape::greedy(1))
        }
    })?;
    if flags.weights.dry_run {
        return report::result(&planned.bill());
    }
    let model = planned.load()?;
    let begin = |path: &Path| {
        outputs::remove_leftovers_beside(path);
        stop.remove_at_end(|| Ok::<_, Failure>(AtomicFile::create(path)?), AtomicFile::leftover)
    };
    let samples = planned.plan.step.evaluation_samples.max(1);
    let activations = trainer::Precision::from(flags.precision).activations();
    let scorer = Scorer { model: &model, way, samples, context: EvalContext { activations, loss_chunk_rows: samples } };
    let mut scored = Scored { file: flags.output.as_deref().map(begin).transpose()?, ..Scored::default() };
    let (began, mut waiting, mut tokens, mut cut) = (Instant::now(), Vec::with_capacity(window), 0_u64, 0_u64);
    for row in prompts::cells(inputs, &columns, limits)? {
        let cells = row?;
        let value = |name: &str| columns.iter().position(|column| *column == name).map_or("", |at| cells[at].as_str());
        let room = flags.max_source_tokens - 1;
        let side = tokenizer.truncation_side().unwrap_or(Side::Right);
        let (mut source, is_cut) = tokenizer.encode_prompt(config.prefix(), &template.fill(value), room, side)?;
        source.extend(config.eos_token_ids.first().copied());
        tokens += source.len() as u64;
        cut += u64::from(is_cut);
        let gain = match &flags.label_column {
            None => None,
            Some(column) => Some((value(flags.query_column.as_deref().unwrap_or_default()).to_owned(), {
                let text = value(column);
                text.parse::<f64>().ok().filter(|gain| gain.is_finite()).ok_or_else(|| {
                    let row = scored.rows + waiting.len() as u64 + 1;
                    let problem = format!("{}: row {row}: `{column}` is `{text}`", flags.pairs.display());
                    Failure::unusable(problem).hint("expected a number: 0 for a text that is not relevant")
                })?
            })),
        };
        waiting.push((source, gain));
        if waiting.len() == window {
            scored.add(&scorer, &std::mem::take(&mut waiting))?;
        }
    }
    scored.add(&scorer, &waiting)?;
    scored.end_query();
    let seconds = began.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
    if let Some(file) = scored.file.take() {
        file.commit()?;
    }
    if cut > 0 {
        report::note(&format!(
            "{} of {} had more than {} tokens and were cut; `--max-source-tokens N` reads more",
            counted(cut),
            plural(scored.rows, "row"),
            flags.max_source_tokens
        ));
    }
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

/// How a model gives a score.
enum Way {
    /// The token of the answer, and that of the other one.
    Answers([u32; 2]),
    /// The number that it gives.
    Number,
}

impl Way {
    fn of(config: &Config, tokenizer: &Tokenizer, answers: &[String]) -> Outcome<Way> {
        match &config.head {
            Head::Sequence(labels) if labels.is_number => return Ok(Way::Number),
            Head::Language => {}
            head => {
                let class = head.architecture(config.family);
                return Err(Failure::unusable(format!("a {class} gives a pair of texts no score"))
                    .hint("expected a model that answers, such as monoT5, or one of `task.name = \"regression\"`")
                    .hint("an encoder has vectors: `train_low_mem embed`"));
            }
        }
        let [yes, no] = answers else {
            return Err(Failure::usage(format!("`--answers`: expected two, got {}", answers.len()))
                .hint("`--answers true,false`"));
        };
        let token = |word: &String| match tokenizer.encode(word)?.as_slice() {
            [token] => Ok(*token),
            tokens => Err(Failure::usage(format!(
                "`--answers`: `{word}` is {} for this model",
                plural(tokens.len() as u64, "token")
            ))
            .hint("name words that are one token each, as they were trained")),
        };
        Ok(Way::Answers([token(yes)?, token(no)?]))
    }
}

struct Scorer<'a> {
    model: &'a T5,
    way: Way,
    /// The most samples at a time.
    samples: usize,
    context: EvalContext,
}

impl Scorer<'_> {
    /// The scores of some sources, in their order.
    fn scores(&self, sources: &[&[u32]]) -> Outcome<Vec<f64>> {
        let numbers: Vec<u32> = (0..sources.len() as u32).collect();
        let batch = |target: u32| -> Outcome<MicroBatch> {
            let (target, config) = ([target], self.model.config());
            let targets = vec![&target[..]; sources.len()];
            Ok(MicroBatch::new(sources, &targets, &numbers, config, self.model.device())?)
        };
        let [yes, no] = match self.way {
            Way::Answers(tokens) => tokens,
            Way::Number => {
                let numbers = self.model.class_logits(&batch(0)?, self.context.activations)?;
                return Ok(numbers.into_iter().map(f64::from).collect());
            }
        };
        let losses = |token: u32| -> Outcome<Vec<f64>> {
            let losses = self.model.losses_of_samples(&[batch(token)?], &self.context, &|| false)?;
            Ok(losses.unwrap_or_default().concat())
        };
        // The log-softmax over both: -log(1 + e^(yes - no)) of the losses.
        let both = losses(yes)?.into_iter().zip(losses(no)?).map(|(yes, no)| yes - no);
        Ok(both.map(|more| -(more.max(0.0) + (-more.abs()).exp().ln_1p())).collect())
    }
}

/// The query of a row, and how relevant its text is.
type Gain = Option<(String, f64)>;

/// What was scored so far.
#[derive(Default)]
struct Scored {
    file: Option<AtomicFile>,
    rows: u64,
    ranking: Ranking,
    /// The query that is being read, with the score and the gain of each of its texts.
    query: Option<(String, Vec<(f64, f64)>)>,
}

impl Scored {
    /// Scores a window of rows and writes the scores.
    fn add(&mut self, scorer: &Scorer, window: &[(Vec<u32>, Gain)]) -> Outcome<()> {
        let mut order: Vec<usize> = (0..window.len()).collect();
        order.sort_by_key(|&row| std::cmp::Reverse(window[row].0.len()));
        let mut scores = vec![0.0; window.len()];
        for batch in order.chunks(scorer.samples) {
            let sources: Vec<&[u32]> = batch.iter().map(|&row| window[row].0.as_slice()).collect();
            batch.iter().zip(scorer.scores(&sources)?).for_each(|(&row, score)| scores[row] = score);
        }
        let mut lines = String::new();
        for (score, (_, gain)) in scores.iter().zip(window) {
            let line: Value = json!({"row": self.rows, "score": score});
            lines += &format!("{line}\n");
            self.rows += 1;
            if let Some((query, gain)) = gain {
                if self.query.as_ref().is_some_and(|(of, _)| of != query) {
                    self.end_query();
                }
                self.query.get_or_insert_with(|| (query.clone(), Vec::new())).1.push((*score, *gain));
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
        self.query.take().into_iter().for_each(|(_, texts)| self.ranking.add(&texts));
    }
}
