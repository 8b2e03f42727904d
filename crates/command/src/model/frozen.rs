//! A model beside the trained one that is only read, such as the reference of a loss of preferences. Its weights stay in its files.

use std::path::PathBuf;

use candle_core::{DType, Device};
use dataloader::Tokenizer;
use t5::{Files, StoredDtypes, StoredWeights, T5};

use crate::config;
use crate::failure::{Failure, Outcome};
use crate::model::model_directory;

/// An opened frozen model, without its weights.
pub struct Frozen {
    /// What it is, in the bill.
    pub called: &'static str,
    /// Its directory.
    pub directory: PathBuf,
    /// Its config.
    pub config: t5::Config,
    /// Its weights as they are stored.
    pub stored: StoredWeights,
}

impl Frozen {
    /// Opens the model that the config names beside `model`, and refuses one that could not read the same tokens.
    pub fn open(of: &config::Frozen, (model, tokenizer): (&t5::Config, &Tokenizer), device: &Device) -> Outcome<Self> {
        let config::Frozen { key, called, named } = of;
        if !device.is_cpu() {
            return Err(Failure::usage(format!(
                "`{key}` needs a second model on the device, for which there is no kernel that reads weights from files"
            ))
            .hint("`--device cpu` computes both models"));
        }
        let directory = model_directory::find(named)?;
        let mut config = t5::Config::from_file(&directory.join("config.json"))?;
        config.refuse_quantised("weights that are not quantised")?;
        let fits = [
            ("vocab_size", model.vocab_size, config.vocab_size),
            ("decoder_start_token_id", model.decoder_start_token_id as usize, config.decoder_start_token_id as usize),
            ("pad_token_id", model.pad_token_id as usize, config.pad_token_id as usize),
        ];
        if !model.head.is_language() {
            let got = model.head.architecture(model.family);
            return Err(Failure::usage(format!("`{key}` is for models that write texts, and the run trains a {got}"))
                .hint(format!("leave out `{key}`")));
        }
        let other = |what: String| {
            let problem = format!("{}: `{key}`: {what}", directory.display());
            Err(Failure::unusable(problem).hint(format!(
                "a {called} reads the same tokens as the trained model: name one with the same tokenizer and vocabulary"
            )))
        };
        if let Some((name, own, others)) = fits.into_iter().find(|(_, own, others)| own != others) {
            return other(format!("expected `{name}` {own}, as the trained model has, got {others}"));
        }
        if !config.head.is_language() {
            return other(format!(
                "expected a model that writes texts, got a {}",
                config.head.architecture(config.family)
            ));
        }
        if let Some(path) = Tokenizer::in_directory(&directory).filter(|path| path != tokenizer.path())
            && !tokenizer.agrees_with(&Tokenizer::load(&path)?)
        {
            let own = tokenizer.path().display();
            return other(format!("its tokenizer, {}, differs from that of the run, {own}", path.display()));
        }
        config.stored = Some(StoredDtypes::read(&directory, &config)?);
        let stored = StoredWeights::read(&directory, &config)?;
        Ok(Self { called, directory, config, stored })
    }

    /// The model, whose weights stay where they are stored. Those that are not stored in the dtype are copied to `files`.
    pub fn load(&self, dtype: DType, files: &Files) -> Outcome<T5> {
        let files =
            Files { weight_blocks_in_memory: 0, weights_by_matrix: true, in_host_memory: false, ..files.clone() };
        Ok(T5::load_frozen(&self.directory, dtype, Some(&files))?)
    }
}
