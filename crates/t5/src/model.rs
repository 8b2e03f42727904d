//! The whole model: its parameters, and the passes over a micro-batch that train nothing.

mod losses;
mod outputs;
mod training;
mod weight_copies;

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use t5_ops::Quantised;

use crate::adapter::{Lora, is_of_adapter};
use crate::config::Config;
use crate::context::{EvalContext, StepContext};
use crate::error::{Error, Result};
use crate::hf::{self, Carried, Keeps, Loaded, ModelDirectory, WeightStorage};
use crate::host_copies::HostCopies;
use crate::init::initial_tensor;
use crate::levers::LayerMajor;
use crate::micro_batch::MicroBatch;
use crate::network::Network;
use crate::ops::{Files, Matrix, Ops};
use crate::pager::Pager;
use crate::parameters::{Parameter, ParameterSpec};
use crate::step::inference::infer;
use crate::step::run::rounds::MicroBatches;
use crate::step::schedule::Outline;
use crate::weight_file::WeightFile;

/// The end of the name of DoRA's magnitudes.
const MAGNITUDE: &str = ".lora_magnitude_vector";

/// A T5 with its parameters in memory.
///
/// Passes borrow it; an optimizer changes the parameters' storage in place between them.
pub struct T5 {
    config: Config,
    /// The dtype of its parameters, except where [`ParameterSpec::dtype`] says another.
    dtype: DType,
    parameters: Vec<Parameter>,
    /// Copies of products' weights in bf16, by parameter index, where there is one. Empty without copies.
    copies: Vec<Option<Tensor>>,
    pub(crate) network: Network<Tensor>,
    /// The file of the large parameters, if they are not in memory.
    file: Option<Arc<WeightFile>>,
    /// The host copies of weights that are on a device only while they are in use.
    host_copies: Option<Rc<HostCopies>>,
    /// Tensors of the model's files that no text uses.
    carried: Option<Rc<Carried>>,
    /// The directory that the base was loaded from.
    directory: Option<PathBuf>,
    /// The name of the base that a saved adapter records.
    base_name: Option<String>,
    /// The recorded micro-batches of steps on a card.
    micro_batches: MicroBatches,
    /// [`T5::repeat_micro_batches`].
    repeats: bool,
}

impl std::fmt::Debug for T5 {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let values: usize = self.parameters.iter().map(|p| p.tensor.elem_count()).sum();
        f.debug_struct("T5").field("config", &self.config).field("values", &values).finish_non_exhaustive()
    }
}

impl T5 {
    /// A model from scratch, initialised as transformers does it. The same seed gives the same bits. Each
    /// parameter is kept in [`ParameterSpec::dtype`] of `dtype`.
    pub fn init(config: &Config, seed: u64, dtype: DType, device: &Device) -> Result<T5> {
        T5::init_in(config, seed, dtype, device, None)
    }

    /// [`T5::init`] whose large weights lie in a file, if `files` is given. Each moves there as soon as it is made, so memory
    /// holds only the weights in use. Without [`heap::Allocator`] in the program they stay in memory.
    ///
    /// # Errors
    /// [`Error::Io`], for example where the disk has no room for the weights.
    pub fn init_in(config: &Config, seed: u64, dtype: DType, device: &Device, files: Option<&Files>) -> Result<T5> {
        T5::init_at(config, seed, dtype, device, (files, &|_| true))
    }

    /// [`T5::init`] that keeps the values of the parameters for which `keeps` returns true; others are released as soon as they are made.
    /// Passes need a [`Pager`] for the others ([`T5::page_with`]).
    ///
    /// # Errors
    /// As [`T5::init`].
    pub fn init_share(
        config: &Config,
        seed: u64,
        dtype: DType,
        device: &Device,
        keeps: &dyn Fn(&ParameterSpec) -> bool,
    ) -> Result<T5> {
        T5::init_at(config, seed, dtype, device, (None, keeps))
    }

    fn init_at(
        config: &Config,
        seed: u64,
        dtype: DType,
        device: &Device,
        (files, keeps): (Option<&Files>, Keeps),
    ) -> Result<T5> {
        config.validate()?;
        config.refuse_quantised("no quantised weights: those are made of weights that were trained")?;
        let file = files.map(|files| WeightFile::create(files, config, dtype)).transpose()?;
        let first = if file.is_some() { &Device::Cpu } else { device };
        let parameter = |spec: ParameterSpec| {
            let tensor = initial_tensor(&spec, seed, spec.dtype(dtype), first)?;
            let tensor = WeightFile::place(file.as_ref().filter(|_| spec.may_be_offloaded(dtype)), tensor)?;
            if !keeps(&spec) {
                tensor_storage::unallocated::release(&tensor)?;
            }
            Ok(Parameter { name: spec.name, tensor, part: spec.part, quantisation: None })
        };
        let parameters = ParameterSpec::all(config).into_iter().map(parameter).collect::<Result<_>>()?;
        T5::on(device, config.clone(), dtype, parameters, file)
    }

    /// Loads a Hugging Face directory. Values are converted to [`ParameterSpec::dtype`] of `dtype`, without a second
    /// copy of any tensor.
    ///
    /// # Errors
    /// An [`Error`] that names file and tensor.
    pub fn load<'a>(directory: impl Into<ModelDirectory<'a>>, dtype: DType, device: &Device) -> Result<T5> {
        T5::load_at(directory.into(), dtype, device, (WeightStorage::Memory, &|_| true), false)
    }

    /// [`T5::load`] that keeps the values of the parameters for which `keeps` returns true, as [`T5::init_share`].
    ///
    /// # Errors
    /// As [`T5::load`].
    pub fn load_share<'a>(
        directory: impl Into<ModelDirectory<'a>>,
        dtype: DType,
        device: &Device,
        keeps: &dyn Fn(&ParameterSpec) -> bool,
    ) -> Result<T5> {
        T5::load_at(directory.into(), dtype, device, (WeightStorage::Memory, keeps), false)
    }

    /// [`T5::load`] whose large weights lie in a file, as for [`T5::init_in`]. Each moves there as soon as it is read.
    ///
    /// # Errors
    /// As [`T5::load`] and [`T5::init_in`].
    pub fn load_in<'a>(
        directory: impl Into<ModelDirectory<'a>>,
        dtype: DType,
        device: &Device,
        files: Option<&Files>,
    ) -> Result<T5> {
        T5::load_at(
            directory.into(),
            dtype,
            device,
            (files.map_or(WeightStorage::Memory, WeightStorage::File), &|_| true),
            false,
        )
    }

    /// [`T5::load`] for passes that train nothing. Large weights that the directory's files have in the model's dtype are read where they
    /// lie. Weights that are stored in another dtype lie in a file, as for [`T5::load_in`]. [`crate::StoredWeights`] says which are which.
    /// The directory's files, and the parameters, must not change while the model is used.
    ///
    /// # Errors
    /// As [`T5::load_in`].
    pub fn load_in_place<'a>(
        directory: impl Into<ModelDirectory<'a>>,
        dtype: DType,
        device: &Device,
        files: &Files,
    ) -> Result<T5> {
        T5::load_at(directory.into(), dtype, device, (WeightStorage::Stored(files), &|_| true), false)
    }

    /// A model of `dtype` whose weights never change; an adapter may train beside them. Matrices that are stored in f16 or bf16 keep that
    /// dtype, which gives the same bits as f32. They are in memory or, with `files`, lie as for [`T5::load_in_place`].
    ///
    /// # Errors
    /// As [`T5::load_in`].
    pub fn load_frozen<'a>(
        directory: impl Into<ModelDirectory<'a>>,
        dtype: DType,
        files: Option<&Files>,
    ) -> Result<T5> {
        T5::load_at(
            directory.into(),
            dtype,
            &Device::Cpu,
            (files.map_or(WeightStorage::Memory, WeightStorage::Stored), &|_| true),
            true,
        )
    }

    fn load_at(
        directory: ModelDirectory,
        dtype: DType,
        device: &Device,
        place: (WeightStorage, Keeps),
        is_frozen: bool,
    ) -> Result<T5> {
        let first = if matches!(place.0, WeightStorage::Memory) { device } else { &Device::Cpu };
        let Loaded { config, parameters, file, carried } = hf::load(directory, dtype, first, place, is_frozen)?;
        Ok(T5 { directory: Some(directory.path.into()), carried, ..T5::on(device, config, dtype, parameters, file)? })
    }

    /// The model with a new adapter beside its weights. It computes as before: B is zero, and DoRA's magnitudes are the
    /// lengths of the weights' rows. The same seed gives the same bits. The adapter's tensors are in memory, in F32, wherever the
    /// weights are.
    ///
    /// # Errors
    /// [`Error::Config`] if this model cannot have such an adapter.
    pub fn with_adapter(self, lora: Lora, seed: u64) -> Result<T5> {
        self.adapted(lora, seed, false)
    }

    /// A second model that is this one with an adapter. Both share the same weights; weights for which the adapter has its own
    /// values are copied. Neither model may be trained.
    ///
    /// # Errors
    /// As [`T5::with_adapter`].
    pub fn beside_adapter(&self, lora: Lora) -> Result<T5> {
        let (parameters, lies) = (self.parameters.clone(), (self.file.clone(), self.host_copies.clone()));
        let shared = T5::assemble(self.config.clone(), self.dtype, parameters, lies)?;
        let (directory, base_name, carried) = (self.directory.clone(), self.base_name.clone(), self.carried.clone());
        let shared = T5 { directory, base_name, carried, ..shared };
        shared.adapted(lora, 0, true)
    }

    fn adapted(self, lora: Lora, seed: u64, is_shared: bool) -> Result<T5> {
        let adapted = self.config.with_adapter(lora)?;
        let T5 {
            config, dtype, parameters, network, file, host_copies, carried, directory, base_name, copies: _, ..
        } = self;
        let device = network.shared.tensor.device().clone();
        drop(network);
        // Weights are converted, copied or measured in memory. Each is then paged out, or all weights of a base in files would stay.
        let here = |tensor: &Tensor, f: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<Tensor> {
            let values = host_copies
                .as_ref()
                .map_or_else(|| Ok(tensor.clone()), |host_copies| host_copies.with_values(tensor))?;
            let result = f(&values)?;
            tensor_storage::page_out(&values);
            Ok(result)
        };
        let cast = |to: DType| move |values: &Tensor| Ok(values.to_dtype(to)?);
        let copied = |values: &Tensor| Ok(values.copy()?);
        // A head that is saved with the adapter starts as a copy of the table that it was tied to.
        let head = config.tie_word_embeddings.then(|| parameters[0].tensor.clone());
        let config = adapted;
        let mut base = parameters.into_iter().filter(|parameter| !is_of_adapter(&parameter.name));
        let mut parameters: Vec<Parameter> = Vec::new();
        for spec in ParameterSpec::all(&config) {
            let tensor = if !spec.is_of_adapter() {
                let is_trained = config.lora.as_ref().is_some_and(|lora| lora.trains(&spec.name));
                match (base.next(), &head) {
                    (Some(Parameter { tensor, quantisation: Some(codes), .. }), _) if spec.quantisation.is_none() => {
                        let all = 0..codes.shape().0;
                        let rows = |values: &Tensor| Quantised::new(codes, values.clone())?.rows(all.clone());
                        here(&tensor, &|values| Ok(rows(values)?.to_dtype(spec.dtype(dtype))?.to_device(&device)?))?
                    }
                    (Some(parameter), _) if parameter.tensor.dtype() != spec.dtype(dtype) => {
                        here(&parameter.tensor, &cast(spec.dtype(dtype)))?
                    }
                    (Some(parameter), _) if is_trained && (is_shared || file.is_some()) => {
                        here(&parameter.tensor, &copied)?
                    }
                    (Some(parameter), _) => parameter.tensor,
                    (None, Some(head)) if head.dtype() != spec.dtype(dtype) => here(head, &cast(spec.dtype(dtype)))?,
                    (None, Some(head)) => here(head, &copied)?,
                    (None, None) => unreachable!("an adapter takes no parameter away"),
                }
            } else if spec.name.ends_with(MAGNITUDE) {
                // W, A and B come before the magnitude. The weight of a tied head is the first table.
                let name = format!("{}.weight", spec.name.trim_end_matches(MAGNITUDE));
                let weight = parameters.iter().rev().find(|parameter| parameter.name == name).unwrap_or(&parameters[0]);
                let [.., a, b] = parameters.as_slice() else { unreachable!("a magnitude follows its adapter") };
                here(&weight.tensor, &|tensor| {
                    let weight = Matrix { tensor, quantisation: weight.quantisation, is_paged_by_rows: false };
                    Tensor::adapted_row_norms(weight, &a.tensor, &b.tensor, 1.0)
                })?
            } else {
                initial_tensor(&spec, seed, spec.dtype(dtype), &device)?
            };
            let ParameterSpec { name, part, quantisation, .. } = spec;
            parameters.push(Parameter { name, tensor, part, quantisation });
        }
        Ok(T5 { carried, directory, base_name, ..T5::assemble(config, dtype, parameters, (file, host_copies))? })
    }

    /// Moves the weights into a file, or into memory, one by one. Does nothing where they lie there already. Parameters that train beside
    /// an adapter's base stay in memory. The base, which never changes, is read where it is stored.
    ///
    /// # Errors
    /// The disk has no room: then the model is unchanged. A copy fails, or a file cannot be written: then the model is
    /// unusable.
    pub fn move_weights(&mut self, files: Option<&Files>) -> Result<()> {
        let blocks_in_memory = files.map_or(0, |files| files.weight_blocks_in_memory);
        let lies_there = |file: &WeightFile| files.is_some_and(|files| file.is_as_in(files));
        if self.file.as_deref().map_or(files.is_none(), lies_there) {
            return Ok(());
        }
        let (dtype, directory, base_name) = (self.dtype, self.directory.take(), self.base_name.take());
        let carried = self.carried.take();
        let is_frozen = self.config.stored.is_some();
        let (mut stored, file) = match (files, &directory, &self.config.lora) {
            (Some(files), Some(directory), Some(_)) => {
                // Blocks that are in memory already are not read again.
                let all = Files { weight_blocks_in_memory: 0, ..files.clone() };
                let place: (WeightStorage, Keeps) = (WeightStorage::Stored(&all), &|_| true);
                let stored = ModelDirectory { head: Some(&self.config.head), ..directory.into() };
                let Loaded { parameters, file, .. } = hf::load(stored, dtype, &Device::Cpu, place, is_frozen)?;
                let parameters = parameters.into_iter().map(|stored| (stored.name, stored.tensor)).collect();
                (parameters, file.map(|file| file.beside_blocks_in_memory(blocks_in_memory)))
            }
            (Some(files), ..) => (HashMap::new(), Some(WeightFile::create(files, &self.config, dtype)?)),
            (None, ..) => (HashMap::new(), None),
        };
        let device = self.device().clone();
        let nothing = Tensor::zeros(1, DType::F32, &device)?;
        self.network.let_go(&nothing);
        let mut parameters = std::mem::take(&mut self.parameters);
        let file = file.map(Arc::new);
        let from = self.host_copies.take();
        let host_copies = (!device.is_cpu()).then(|| file.clone().map(HostCopies::new)).flatten();
        let lora = self.config.lora.as_ref();
        for parameter in parameters.iter_mut().filter(|parameter| lora.is_none_or(|lora| !lora.trains(&parameter.name)))
        {
            let is_asked_for = parameter.is_asked_for();
            let tensor = std::mem::replace(&mut parameter.tensor, nothing.clone());
            if !device.is_cpu() {
                let there = (stored.remove(&parameter.name), tensor);
                let to = host_copies.as_ref().filter(|_| is_asked_for);
                parameter.tensor = HostCopies::moved(from.as_deref(), to, parameter, there, &self.config)?;
                continue;
            }
            let is_kept = LayerMajor::keeps_weights(blocks_in_memory, parameter.part, &self.config);
            parameter.tensor = match (stored.remove(&parameter.name), &file) {
                (Some(stored), _) if is_kept && tensor_storage::is_in_file(&tensor) => {
                    tensor_storage::copy_from_file(&stored)?.unwrap_or(stored)
                }
                (Some(_), _) if is_kept => tensor,
                (Some(stored), _) => stored,
                (None, Some(file)) if is_asked_for => WeightFile::place(Some(file), tensor)?,
                (None, _) => tensor.copy()?,
            };
        }
        let lie = (file, host_copies.map(Rc::new));
        *self = T5 { carried, directory, base_name, ..T5::assemble(self.config.clone(), dtype, parameters, lie)? };
        // The old places of the weights are free now.
        heap::release_unused();
        Ok(())
    }

    /// Whether the weights lie in a file.
    pub fn is_in_file(&self) -> bool {
        self.file.is_some()
    }

    /// Whether passes ask a [`Pager`] for weights.
    pub fn has_remote_weights(&self) -> bool {
        self.network.pager.is_some()
    }

    /// Whether passes must announce the weights that they use.
    pub(crate) fn has_paged_weights(&self) -> bool {
        self.is_in_file() || self.has_remote_weights()
    }

    /// Writes `config.json`, `generation_config.json` and `model.safetensors` into `directory`, tensor by
    /// tensor, and syncs each file. The bytes are a function of configuration and parameters. Writing is not atomic:
    /// the caller writes into a new directory and renames it.
    pub fn save(&self, directory: &Path) -> Result<()> {
        std::fs::create_dir_all(directory).map_err(Error::io(directory))?;
        hf::save(directory, &self.config, self.to_save())
    }

    /// Writes the files of [`T5::save`] through the caller's sinks, which may take checksums on the way. `file` is
    /// called with each file's name and the function that writes it. `directory` is for messages.
    pub fn save_with<E: From<Error>>(
        &self,
        directory: &Path,
        file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
    ) -> Result<(), E> {
        hf::save_with(directory, &self.config, self.to_save(), file)
    }

    /// What a saved directory has: the parameters, the pager that fetches them, and tensors of the model's files.
    fn to_save(&self) -> (&[Parameter], Option<&dyn Pager<Tensor>>, Option<&Carried>) {
        (&self.parameters, self.network.pager.as_deref(), self.carried.as_deref())
    }

    /// Fetches the weights that this process does not hold, while another process saves the same model.
    ///
    /// # Errors
    /// As [`Pager::page_in`].
    pub fn serve_weights(&self) -> Result<()> {
        let Some(pager) = &self.network.pager else { return Ok(()) };
        hf::serve_weights(&self.config, &self.parameters, &**pager)
    }

    /// Sets the pager, which passes ask for weights before they use them.
    pub fn page_with(&mut self, pager: Rc<dyn Pager<Tensor>>) {
        self.network.pager = Some(pager);
    }

    /// As [`T5::save_with`], for the model's adapter alone: writes a directory that PEFT loads.
    ///
    /// # Errors
    /// An error of `file`, or of writing.
    ///
    /// # Panics
    /// Without an adapter.
    pub fn save_adapter_with<E: From<Error>>(
        &self,
        directory: &Path,
        file: impl FnMut(&str, &dyn Fn(&mut dyn Write) -> Result<()>) -> Result<(), E>,
    ) -> Result<(), E> {
        let lora = self.config.lora.as_ref().expect("a model with an adapter");
        hf::peft::save_with(directory, &self.config, lora, self.base_name.as_deref(), &self.parameters, file)
    }

    /// Sets the name of the base that a saved adapter records: a directory or the id of a model.
    pub fn set_base_name(&mut self, name: &str) {
        self.base_name = Some(name.to_owned());
    }

    fn assemble(
        config: Config,
        dtype: DType,
        parameters: Vec<Parameter>,
        (file, host_copies): (Option<Arc<WeightFile>>, Option<Rc<HostCopies>>),
    ) -> Result<T5> {
        let copies = Vec::new();
        let by_matrix = file.as_ref().is_some_and(|file| file.is_by_matrix());
        let mut network = Network::new(&config, &parameters, &copies, by_matrix)?;
        network.read_ahead_bytes = file.as_ref().map_or(u64::MAX, |file| file.read_ahead_bytes());
        network.file.clone_from(&file);
        network.pager = host_copies.clone().map(|host_copies| host_copies as Rc<dyn Pager<Tensor>>);
        let (carried, directory, base_name) = (None, None, None);
        let (micro_batches, repeats) = (MicroBatches::default(), false);
        Ok(T5 {
            config,
            dtype,
            parameters,
            copies,
            network,
            file,
            host_copies,
            carried,
            directory,
            base_name,
            micro_batches,
            repeats,
        })
    }

    /// A model on a device. Its parameters are on that device, or on the CPU if they lie in a file.
    fn on(
        device: &Device,
        config: Config,
        dtype: DType,
        parameters: Vec<Parameter>,
        file: Option<WeightFile>,
    ) -> Result<T5> {
        let file = file.map(Arc::new);
        if file.is_some() {
            // Gives back the memory that weights had before they went to the file. Touching the file's pages does not free it.
            heap::release_unused();
        }
        let host_copies = file.clone().filter(|_| !device.is_cpu()).map(HostCopies::new);
        let parameters = match &host_copies {
            Some(host_copies) => host_copies.leave(parameters, &config, device)?,
            None => parameters,
        };
        T5::assemble(config, dtype, parameters, (file, host_copies.map(Rc::new)))
    }

    /// Has `f` change the values of parameter `index`, wherever they lie. Returns the result of `f`.
    ///
    /// # Errors
    /// An error of `f`, or of a file that cannot be read or written.
    pub fn change<R, E: From<Error>>(&self, index: usize, f: impl FnOnce(&Tensor) -> Result<R, E>) -> Result<R, E> {
        let tensor = &self.parameters[index].tensor;
        match (&self.host_copies, &self.file) {
            (Some(host_copies), _) => host_copies.change(tensor, f),
            (None, Some(file)) => file.change(tensor, f),
            (None, None) => f(tensor),
        }
    }

    /// Whether the values of parameter `index` are on the device only while they are in use.
    pub fn has_host_copy(&self, index: usize) -> bool {
        self.host_copies.as_ref().is_some_and(|host_copies| host_copies.has(&self.parameters[index].tensor))
    }

    /// The architecture.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Sets the text before every source, which is saved with the model; see [`Config::prefix`].
    pub fn set_prefix(&mut self, prefix: &str) {
        self.config.set_prefix(prefix);
    }

    /// Every parameter, in the order of [`ParameterSpec::all`].
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Its layers.
    #[cfg(test)]
    pub(crate) fn network(&self) -> &Network<Tensor> {
        &self.network
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        self.network.shared.tensor.device()
    }

    /// The sum of a micro-batch's token losses, without dropout and without saved activations.
    pub fn loss(&self, batch: &MicroBatch, cx: &EvalContext) -> Result<f64> {
        Ok(self.loss_unless(batch, cx, &|| false)?.expect("nobody interrupts"))
    }

    /// [`T5::loss`] that ends early, with `None`. `interrupted` is asked before every block; true ends the pass.
    ///
    /// # Errors
    /// As [`T5::loss`].
    pub fn loss_unless(
        &self,
        batch: &MicroBatch,
        cx: &EvalContext,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<f64>> {
        let cx = StepContext::without_dropout(cx.activations, cx.loss_chunk_rows);
        let events = Outline::inference(&self.config, self.has_paged_weights()).evaluation();
        let step = infer(&self.network, &events, &cx, std::slice::from_ref(batch), interrupted)?;
        Ok(step.map(|step| step.loss_sum()))
    }

    /// All logits (B, T, V), without dropout, in the parameters' dtype. Large: for tests and small batches.
    pub fn logits(&self, batch: &MicroBatch) -> Result<Tensor> {
        let z = self.output(batch, self.dtype, true, &|| ())?;
        self.network.logits(&z)
    }

    /// The encoder's output (B, S, D), without dropout.
    pub fn encode(&self, batch: &MicroBatch, activations: DType) -> Result<Tensor> {
        self.output(batch, activations, false, &|| ())
    }

    /// The output of the encoder, or of the decoder. `between` is called before every block.
    fn output(&self, batch: &MicroBatch, activations: DType, decoder: bool, between: &dyn Fn()) -> Result<Tensor> {
        let events = Outline::inference(&self.config, self.has_paged_weights()).forward_only(decoder);
        let step = infer(
            &self.network,
            &events,
            &StepContext::without_dropout(activations, 1),
            std::slice::from_ref(batch),
            &|| {
                between();
                false
            },
        )?;
        Ok(step.and_then(|mut step| step.take_output()).expect("nobody interrupts a pass that has an output"))
    }
}
