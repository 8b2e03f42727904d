//! The model that a run starts with: new, from a directory, or from a checkpoint; whole, or one process' share.

use std::collections::HashSet;

use candle_core::DType;
use dataloader::BatchShare;
use planner::Plan;
use t5::{Files, ModelDirectory, ParameterSpec, T5};
use trainer::checkpoint::Found;
use trainer::{Sharding, Trainer, TrainerOptions};

use crate::config::Config;
use crate::failure::{Failure, Outcome};
use crate::model::model_directory;
use crate::run::open::Opened;

/// The source of a run's model.
#[derive(Clone, Copy)]
pub struct FirstModel<'a> {
    /// The resolved config.
    pub config: &'a Config,
    /// Its model and data.
    pub opened: &'a Opened,
    /// Dtype of the parameters.
    pub dtype: DType,
}

impl<'a> FirstModel<'a> {
    /// The trainer of a run that starts or resumes from a checkpoint. Tensors that do not stay in memory lie in `files`.
    pub(super) fn trainer(
        self,
        found: Option<&Found>,
        options: TrainerOptions,
        (plan, files): (&Plan, &Files),
        share: BatchShare,
    ) -> Outcome<Trainer> {
        let Self { config, opened, dtype } = self;
        let elsewhere = match config.parallel.sharding {
            Sharding::Weights => {
                trainer::costs::weights_elsewhere(&opened.model, &options, share.rank, share.shards.processes)?
            }
            _ => HashSet::new(),
        };
        if !elsewhere.is_empty() {
            let keeps = |spec: &ParameterSpec| !elsewhere.contains(&spec.name);
            return Ok(match found {
                Some(found) => Trainer::resume_share(found, options, dtype, &opened.device, &keeps)?,
                None => Trainer::new(self.share(&keeps)?, options)?,
            });
        }
        let levers = &plan.step.levers;
        let weights = levers.has_weights_on_disk().then_some(files);
        let moments = levers.has_optimizer_on_disk().then_some(files);
        Ok(match found {
            Some(found) if opened.model.lora.is_some() => {
                Trainer::resume_adapter(found, self.adapted(weights)?, options, moments)?
            }
            Some(found) => Trainer::resume_from_files(found, options, dtype, &opened.device, [weights, moments])?,
            None => Trainer::new(self.whole(weights)?, options)?,
        })
    }

    /// The directory of `model.init_from`, with the head that the run trains.
    fn directory(&self) -> Option<ModelDirectory<'a>> {
        let of = |path| ModelDirectory { path, head: Some(&self.opened.model.head), seed: self.config.run.seed };
        self.opened.init_from.as_deref().map(of)
    }

    /// Weights from `model.init_from`, or new ones.
    fn whole(self, files: Option<&Files>) -> Outcome<T5> {
        let Self { config, opened, dtype } = self;
        if opened.model.lora.is_some() {
            return self.adapted(files);
        }
        let mut model = match self.directory() {
            Some(directory) => T5::load_in(directory, dtype, &opened.device, files)?,
            None => T5::init_in(&opened.model, config.run.seed, dtype, &opened.device, files)?,
        };
        model.set_prefix(opened.model.prefix());
        Ok(model)
    }

    /// The same weights, but only those parameters that this process keeps.
    fn share(self, keeps: &dyn Fn(&ParameterSpec) -> bool) -> Outcome<T5> {
        let Self { config, opened, dtype } = self;
        let mut model = match self.directory() {
            Some(directory) => T5::load_share(directory, dtype, &opened.device, keeps)?,
            None => T5::init_share(&opened.model, config.run.seed, dtype, &opened.device, keeps)?,
        };
        model.set_prefix(opened.model.prefix());
        Ok(model)
    }

    /// The base of `model.init_from` with an adapter: that of `lora.init_from`, or a new one.
    pub fn adapted(self, files: Option<&Files>) -> Outcome<T5> {
        let Self { config, opened, dtype } = self;
        let (Some(directory), Some(path), Some(lora)) = (self.directory(), &opened.init_from, &opened.model.lora)
        else {
            return Err(Failure::internal("an adapter has a base"));
        };
        let base = match files {
            files if opened.model.stored.is_some() => T5::load_frozen(directory, dtype, files)?,
            Some(files) => T5::load_in_place(directory, dtype, &opened.device, files)?,
            None => T5::load(directory, dtype, &opened.device)?,
        };
        let mut model = base.with_adapter(lora.clone(), config.run.seed)?;
        if let Some(adapter) = &opened.adapter {
            t5::peft::AdapterDirectory::open(adapter, model.config())?.fill(model.parameters())?;
        }
        let named = config.model.init_from.as_deref().unwrap_or(path);
        model.set_base_name(&model_directory::lasting_name(named)?.to_string_lossy());
        model.set_prefix(opened.model.prefix());
        Ok(model)
    }
}
