//! Opens what a config names: files, tokenizer, model config, datasets, device.
//!
//! All of these are small: footers, a tokenizer, a config. [`crate::run::session`] loads the weights after the bill was printed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use dataloader::{BadRows, BatchShare, LoaderOptions, Mixture, OrderOptions, Side, Tokenizer};
use memory_policy::Bytes;
use parquet_dataset::{Dataset, DatasetOptions, Residency};
use run_plan::model::{check_trainable, fitted};
use t5::peft::AdapterDirectory;
use trainer::contrastive::Contrastive;

use crate::config::{self, Config, Origin, keys, paths};
use crate::data::reading::{self, Reading, RowData};
use crate::data::tasks;
use crate::data::unpacked::Unpacked;
use crate::failure::{Failure, Outcome};
use crate::files::sentence_transformers::Modules;
use crate::machine::device;
use crate::machine::device::DeviceBaseline;
use crate::machine::stages::{self, Stages};
use crate::model::frozen::Frozen;
use crate::model::model_directory;
use crate::scores::evaluation;
use crate::screen::report;

/// Everything that a run reads from, opened.
pub struct Opened {
    /// The device of the tensors.
    pub device: Device,
    /// The memory of a card when it was opened, before any computation there.
    pub device_baseline: Option<DeviceBaseline>,
    /// The reason for this device, if it was chosen among several.
    pub why_device: Option<String>,
    /// The tokenizer, which loaders and evaluation share.
    pub tokenizer: Arc<Tokenizer>,
    /// The config of the model.
    pub model: t5::Config,
    /// The directory of `model.init_from`.
    pub init_from: Option<PathBuf>,
    /// The weights in that directory, if they stay there: an adapter is trained beside them.
    pub stored: Option<t5::StoredWeights>,
    /// The directory of `lora.init_from`.
    pub adapter: Option<PathBuf>,
    /// The model beside the trained one that is only read.
    pub frozen: Option<Frozen>,
    /// Training rows.
    pub train: Arc<Dataset>,
    /// Validation rows, if any.
    pub validation: Option<Arc<Dataset>>,
    /// The checksum at the end of the page map of an earlier run.
    pub kept_page_map: Option<[u8; 32]>,
    /// How the files of the rows are read.
    pub reading: Reading,
    /// The tasks whose rows are mixed.
    pub mixture: Option<Arc<Mixture>>,
    /// The validation rows of each of them; none: the rows have no tasks.
    pub validation_of_tasks: Vec<u64>,
    /// Estimated rows of the training files, if planning has sampled only some of them.
    pub estimated_rows: Option<u64>,
    /// An event for each set of files that was converted to parquet.
    pub converted: Vec<serde_json::Value>,
    /// The unpacked files, if rows are to be found in them again.
    #[expect(dead_code, reason = "it is kept, because dropping it removes the files")]
    pub unpacked: Option<Unpacked>,
    /// The memory of opening all this.
    pub stages: Stages,
}

/// Facts about the training files from an earlier run.
pub struct KeptPageMap {
    /// The result of [`Dataset::page_map`].
    pub bytes: Vec<u8>,
    /// Whether the pages must still have the recorded digests.
    pub keeps_digests: bool,
}

impl Opened {
    /// Opens the files that the config names: tokenizer and model first, because these are quick to open. Then `rows` finds the files with
    /// the rows, which may take long.
    pub fn new(
        config: &Config,
        rows: impl FnOnce((&t5::Config, &Tokenizer)) -> Outcome<RowData>,
        page_map: Option<KeptPageMap>,
    ) -> Outcome<Self> {
        let mut stages = Stages::begin()?;
        let kept_page_map = page_map.as_ref().and_then(|kept| kept.bytes.last_chunk().copied());
        let device = device::open(&config.run.device)?;
        let init_from = config.model.init_from.as_deref().map(model_directory::find).transpose()?;
        // A model that is not a T5 is reported before its tokenizer is opened.
        init_from.as_deref().map(|directory| t5::Config::from_file(&directory.join("config.json"))).transpose()?;
        let mut tokenizer = Tokenizer::load(&tokenizer_path(config, init_from.as_deref())?)?;
        let mut model = model_config(config, init_from.as_deref(), &tokenizer)?;
        check_lengths(config, &model)?;
        if let Some(directory) = &init_from {
            model_directory::check_end(directory, &model, &tokenizer)?;
            model_directory::warn_of_ends(directory, &model, &tokenizer);
        }
        let side = config.data.truncation_side.as_deref().and_then(Side::of_name);
        side.into_iter().for_each(|side| tokenizer.set_truncation_side(side));
        if config.generation.keeps_special_tokens {
            tokenizer.keep_special_tokens(model.frame());
        }
        let tokenizer = Arc::new(tokenizer);
        if let (Some(directory), true) = (&init_from, config.data.tokenizer.is_some()) {
            warn_of_another_tokenizer(directory, &tokenizer);
        }
        stages.ends(stages::TOKENIZER)?;
        let RowData { reading, train, validation, estimated_rows, bytes_to_convert, events, unpacked, rows_of_tasks } =
            rows((&model, &tokenizer))?;
        stages.ends_within(stages::FILES, bytes_to_convert.map(Bytes))?;
        model = model.with_head(reading.head())?.saving_classifier();
        config::class_weights::check(config, &model.head)?;
        if let (Some(of), Some(directory)) = (&config.embedding, &init_from) {
            warn_of_other_vectors(of, directory)?;
        }
        let stored = match (&init_from, &model.lora) {
            (Some(directory), Some(_)) => {
                model.stored = stored_dtypes(&device, directory, &model)?;
                let stored = t5::StoredWeights::read(directory, &model)?;
                let adapter = config.lora.as_ref().and_then(|adapter| adapter.init_from.as_ref());
                let adapter = adapter.map(|adapter| AdapterDirectory::open(adapter, &model)).transpose()?;
                Some(adapter.iter().fold(stored, t5::StoredWeights::with_adapter))
            }
            _ => None,
        };
        let of_frozen = config.frozen.as_ref();
        let frozen = of_frozen.map(|of| Frozen::open(of, (&model, &tokenizer), &device)).transpose()?;
        if let Some(count) = config.distillation.and_then(|of| of.top_k).filter(|count| *count > model.vocab_size) {
            let given = config.values.origin("distill.top_k");
            return Err(Failure::usage(format!(
                "`distill.top_k` ({given}) is {count}, and the vocabulary has {} entries",
                model.vocab_size
            ))
            .hint("leave it out to learn from all logits"));
        }
        let columns = reading.objective.columns();
        let open = |files: &[PathBuf], page_map: Option<KeptPageMap>| -> Outcome<Arc<Dataset>> {
            let options = DatasetOptions {
                columns: columns.clone(),
                residency: Residency::UltraLowMem,
                block_rows: u32::try_from(config.data.block_rows).unwrap_or(u32::MAX),
                forget_digests: page_map.as_ref().is_some_and(|kept| !kept.keeps_digests),
                page_map: page_map.map(|kept| kept.bytes),
                ..DatasetOptions::default()
            };
            Ok(Arc::new(Dataset::open(files, &options)?))
        };
        let train = open(&train, page_map)?;
        let validation = match validation.as_slice() {
            [] => None,
            files => Some(open(files, None)?),
        };
        if validation.is_some() {
            evaluation::warn_of_departures(config, &model)?;
        }
        let [of_train, validation_of_tasks] = rows_of_tasks.unwrap_or_default();
        let mixture = (!of_train.is_empty()).then(|| tasks::mixture(config, &model, &of_train)).transpose()?;
        let adapter = config.lora.as_ref().and_then(|adapter| adapter.init_from.clone());
        let device_baseline = device::device_baseline(&device);
        Ok(Self {
            device,
            device_baseline,
            why_device: None,
            tokenizer,
            model,
            init_from,
            stored,
            adapter,
            frozen,
            train,
            validation,
            kept_page_map,
            reading,
            mixture,
            validation_of_tasks,
            estimated_rows,
            converted: events,
            unpacked,
            stages,
        })
    }

    /// Samples of an epoch.
    pub fn epoch_samples(&self) -> u64 {
        self.mixture.as_ref().map_or(self.train.rows(), |mixture| mixture.samples())
    }

    /// Moves tensors to another device from now on.
    pub fn compute_on(&mut self, device: Device) -> Outcome<()> {
        self.device_baseline = device::device_baseline(&device);
        if let (Some(directory), Some(_)) = (&self.init_from, &self.stored) {
            self.model.stored = stored_dtypes(&device, directory, &self.model)?;
        }
        self.device = device;
        Ok(())
    }
}

/// The dtypes that a frozen base keeps. A card does not have kernels for every possible dtype.
fn stored_dtypes(device: &Device, directory: &Path, model: &t5::Config) -> Outcome<Option<t5::StoredDtypes>> {
    let dtypes = || t5::StoredDtypes::read(directory, model);
    Ok(device.is_cpu().then(dtypes).transpose()?)
}

/// The tokenizer's file: as configured, or beside the model.
fn tokenizer_path(config: &Config, init_from: Option<&Path>) -> Outcome<PathBuf> {
    if let Some(named) = &config.data.tokenizer {
        return model_directory::find_tokenizer(named);
    }
    if let Some(directory) = init_from {
        return model_directory::tokenizer_path(directory)
            .map_err(|failure| failure.hint("or name its file: `--tokenizer FILE`"));
    }
    let name = config.model.config.as_ref().map(|name| paths::from_text(name));
    let named = name.as_deref().map(model_directory::beside_config).transpose()?.flatten();
    let beside = || name.as_deref().and_then(Path::parent).map(Path::to_path_buf);
    let directory = named.or_else(beside).unwrap_or_default();
    if let Some(path) = Tokenizer::in_directory(&directory) {
        return Ok(path);
    }
    // A model that does not exist has no tokenizer, either.
    config.model.config.as_deref().map(named_config).transpose()?;
    let expected = directory.join("tokenizer.json");
    let problem =
        format!("`data.tokenizer` is not set and {} does not exist, nor a `spiece.model`", expected.display());
    Err(Failure::unusable(problem)
        .hint(
            "create one with `train_low_mem train-tokenizer --input rows.parquet --vocab-size 32000 --output tokenizer.json`",
        )
        .hint("or use an existing one: `--tokenizer tokenizer.json`"))
}

/// Warns if pretrained weights are combined with another tokenizer than their own.
fn warn_of_another_tokenizer(directory: &Path, tokenizer: &Tokenizer) {
    let own = Tokenizer::in_directory(directory).filter(|own| own != tokenizer.path());
    let Some(Ok(own)) = own.map(|own| Tokenizer::load(&own)) else { return };
    if !tokenizer.agrees_with(&own) {
        report::warn(&format!(
            "{} differs from the model's own tokenizer, {}: the weights know only their own tokens",
            tokenizer.path().display(),
            own.path().display()
        ));
    }
}

/// The model's config: that of `model.init_from`, or a preset or file, fitted to the tokenizer.
fn model_config(config: &Config, init_from: Option<&Path>, tokenizer: &Tokenizer) -> Outcome<t5::Config> {
    let mut model = match (init_from, &config.model.config) {
        (Some(directory), _) => t5::Config::from_file(&directory.join("config.json"))?,
        (None, Some(name)) => scratch_config(config, name, tokenizer)?,
        (None, None) => return Err(Failure::internal("the config was resolved without a model")),
    };
    model = adapted(config, model, init_from)?;
    model_directory::check_size(&model, tokenizer).map_err(|failure| {
        failure.hint(match init_from {
            Some(_) if config.data.tokenizer.is_some() => "leave out `data.tokenizer`: the model has its own",
            Some(_) => "or use the tokenizer that the weights were trained with: `--tokenizer FILE`",
            None => "use the tokenizer's size: `--set model.vocab_size=auto`",
        })
    })?;
    Ok(model)
}

/// Warns of vectors that are made in another way than the model's own files say.
fn warn_of_other_vectors(of: &Contrastive, directory: &Path) -> Outcome<()> {
    let Some(modules) = Modules::read(directory)? else { return Ok(()) };
    if modules.dense.is_some() {
        let problem = format!("{}: its vectors go through a module `Dense`, which is not trained", directory.display());
        return Err(Failure::unusable(problem)
            .hint("remove `modules.json` from a copy of the directory, to train the encoder alone"));
    }
    let [own, now] = [(modules.pooling, modules.normalizes), (of.pooling, of.normalizes)];
    if own != now {
        let settings = |(pooling, normalizes): (t5::Pooling, bool)| {
            format!("embedding.pooling={} and embedding.normalize={normalizes}", pooling.name())
        };
        report::warn(&format!(
            "{} was trained with `{}`; this run has `{}`",
            directory.display(),
            settings(own),
            settings(now)
        ));
    }
    Ok(())
}

/// The model's config as far as it is known without data: a preset keeps its own vocabulary if there is no tokenizer.
pub fn model_without_data(config: &Config) -> Outcome<t5::Config> {
    let init_from = config.model.init_from.as_deref().map(model_directory::find).transpose()?;
    if let Ok(path) = tokenizer_path(config, init_from.as_deref()) {
        return model_config(config, init_from.as_deref(), &Tokenizer::load(&path)?);
    }
    let model = match (&init_from, &config.model.config) {
        (Some(directory), _) => t5::Config::from_file(&directory.join("config.json"))?,
        (None, Some(name)) => fitted(config, named_config(name)?)?,
        (None, None) => {
            return Err(Failure::usage("no model: `model.config` and `data.tokenizer` are not set")
                .hint("use a preset, such as `--preset t5-small`"));
        }
    };
    let head = reading::task(config, &model).head_like(&model.head);
    let model = adapted(config, model, init_from.as_deref())?.with_head(head)?.saving_classifier();
    check_trainable(&model, init_from.as_deref())?;
    Ok(model)
}

/// A config for new weights. A preset is fitted to the tokenizer (size, end, padding). A file is used unchanged, except for
/// `model.vocab_size` and `model.overrides`.
fn scratch_config(config: &Config, name: &str, tokenizer: &Tokenizer) -> Outcome<t5::Config> {
    let mut model = named_config(name)?;
    if is_preset(name) {
        model.vocab_size = tokenizer.vocab_size();
        model.eos_token_ids = vec![tokenizer.eos_id()?];
        model.pad_token_id = tokenizer.pad_id()?;
        // T5 begins with the padding, T5Gemma with the token that begins texts.
        let begin = tokenizer.token_id("<bos>").filter(|_| model.gemma.is_some());
        model.decoder_start_token_id = begin.unwrap_or(model.pad_token_id);
    }
    fitted(config, model)
}

/// The model with the prefix, the precision of the base and the adapter of the config.
fn adapted(config: &Config, model: t5::Config, init_from: Option<&Path>) -> Outcome<t5::Config> {
    let mut prefix = None;
    let mut adapted = run_plan::model::adapted(config, model, init_from, |model| {
        let Some(directory) = config.lora.as_ref().and_then(|adapter| adapter.init_from.as_ref()) else {
            return Ok(None);
        };
        *model = AdapterDirectory::model_below(directory, model)?;
        let opened = AdapterDirectory::open(directory, model)?;
        prefix = opened.source_prefix().map(str::to_owned).filter(|_| config.data.source_prefix.is_none());
        let dropout = config.values.number("lora.dropout").filter(|_| config.values.is_given("lora.dropout"));
        let lora = opened.lora(model);
        let origin = config.values.origin("lora.rank");
        let typed = config.values.integer("lora.rank").and_then(|rank| usize::try_from(rank).ok());
        // `--lora` alone asks for an adapter and not for a rank, and a resumed run's file has the rank of that flag.
        if let (Origin::Flag(flag), Some(rank)) = (origin, typed)
            && flag != "--lora"
            && rank != lora.rank
        {
            return Err(Failure::usage(format!(
                "`lora.rank` is {rank} ({flag}), and the adapter in {} has rank {}",
                directory.display(),
                lora.rank
            ))
            .hint("leave it out, or leave out `lora.init_from`"));
        }
        Ok(Some(t5::Lora { dropout: dropout.unwrap_or(lora.dropout), ..lora }))
    })?;
    prefix.iter().for_each(|prefix| adapted.set_prefix(prefix));
    Ok(adapted)
}

fn is_preset(name: &str) -> bool {
    t5::Config::preset(name).is_some()
}

/// A preset, a `config.json`, or the config of a model.
pub fn named_config(name: &str) -> Outcome<t5::Config> {
    if let Some(preset) = t5::Config::preset(name) {
        return Ok(preset);
    }
    let path = paths::from_text(name);
    if let Some(directory) = model_directory::beside_config(&path)? {
        return Ok(t5::Config::from_file(&directory.join("config.json"))?);
    }
    if path.is_file() || name.ends_with(".json") {
        return Ok(t5::Config::from_file(&path)?);
    }
    let names: Vec<&str> = t5::Config::preset_names().collect();
    let nearest = names.iter().max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    Err(Failure::usage(format!("`model.config`: `{name}` is neither a preset nor a config.json"))
        .hint(format!("did you mean `{}`?", nearest.unwrap_or(&"t5-small")))
        .hint(format!("presets: {}", names.join(", "))))
}

/// Refuses a chosen length for which the model has no positions. The default may be longer: a run that was made with it has it in its files.
fn check_lengths(config: &Config, model: &t5::Config) -> Outcome<()> {
    let Some(most) = model.most_positions() else { return Ok(()) };
    let (source, target) = (config.data.max_source_tokens, config.data.max_target_tokens);
    for (key, got, most) in [("data.max_source_tokens", source, most.0), ("data.max_target_tokens", target, most.1)] {
        if got > most && config.values.setting(key).value != keys::default(key) {
            return Err(Failure::usage(format!(
                "`{key}`: expected at most {most}, `max_position_embeddings` of the model, got {got}"
            ))
            .hint(format!("`--set {key}={most}` cuts longer texts there")));
        }
    }
    Ok(())
}

/// The options of the training batches.
pub fn loader_options(config: &Config, opened: &Opened) -> LoaderOptions {
    let model = &opened.model;
    LoaderOptions {
        objective: opened.reading.objective.clone(),
        batch_size: config.train.batch_size,
        order: OrderOptions {
            seed: config.run.seed,
            shuffle: config.data.shuffle,
            block_rows: config.data.block_rows,
            window_blocks: config.data.window_blocks,
        },
        epochs: config.train.epochs,
        max_source_tokens: config.data.max_source_tokens,
        max_target_tokens: opened.reading.objective.max_target_tokens(opened.reading.longest),
        eos_id: model.eos_token_ids.first().copied().unwrap_or(1),
        decoder_start_id: Some(model.decoder_start_token_id),
        // The bill counts the longest one.
        source_prefix: opened
            .mixture
            .iter()
            .flat_map(|mixture| mixture.tasks())
            .map(|task| task.source_prefix.as_str())
            .max_by_key(|prefix| prefix.len())
            .unwrap_or(model.prefix())
            .to_owned(),
        truncation_side: opened.reading.truncation_side,
        image_ids: model.image_tokens().to_vec(),
        bad_rows: match config.data.bad_rows {
            config::BadRows::Usual => BadRows::Usual,
            config::BadRows::Error => BadRows::Error,
            config::BadRows::Skip => BadRows::Skip,
        },
        keep_texts: false,
        keep_prompts: false,
        share: BatchShare::default(),
        mixture: opened.mixture.clone(),
    }
}
