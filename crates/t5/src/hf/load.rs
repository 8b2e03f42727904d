//! Reading a model directory, as tolerant as transformers and no more. Duplicates of a tied table may be there or
//! not, under any of their names. Anything else that is missing, left over or mis-shaped is an error.

mod stored_files;
mod table_names;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};
use serde_json::Value;

use super::carried::{Carried, is_carried};
use super::model_directory::{Loaded, ModelDirectory};
use super::peft::AdapterDirectory;
use super::pytorch;
use super::safetensors::{Reader, StoredIn, are_equal, part_name};
use crate::config::{Config, read_object};
use crate::error::{Error, Result};
use crate::head::{WRAPPED, is_of_classifier};
use crate::init::initial_tensor;
use crate::levers::LayerMajor;
use crate::parameters::{Parameter, ParameterSpec, Part};
use crate::stored_dtypes::StoredDtypes;
use crate::weight_file::WeightFile;
pub(super) use stored_files::StoredFiles;
use table_names::{GEMMA_HEAD, TableNames};

/// An index has about 100 bytes a tensor, and the deepest model that is accepted has 3,000 tensors.
const LARGEST_INDEX_BYTES: u64 = 1 << 20;

/// A table in T5's first published checkpoints, which is not used: cross attention has no position bias.
const IGNORED: &str = "EncDecAttention.relative_attention_bias.weight";
/// Weights in the order in which transformers looks for them, in one file or as an index of several.
const WEIGHTS: [(&str, &str, Format); 2] = [
    ("model.safetensors", "model.safetensors.index.json", Format::Safetensors),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", Format::Pytorch),
];

/// A format of weights.
#[derive(Clone, Copy, Debug)]
enum Format {
    Safetensors,
    Pytorch,
}

impl Format {
    fn open(self, path: &Path) -> Result<Reader> {
        match self {
            Format::Safetensors => Reader::open(path),
            Format::Pytorch => pytorch::open(path),
        }
    }
}

/// Where the large weights of a loaded model lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WeightStorage<'a> {
    Memory,
    /// All in one new file.
    File(&'a crate::Files),
    /// In the files where they are stored, as far as they can be used there. The others lie in a new file.
    Stored(&'a crate::Files),
}

impl WeightStorage<'_> {
    /// Whether the weights of this part stay in memory although others lie in files.
    fn keeps(self, part: Part, config: &Config) -> bool {
        match self {
            WeightStorage::Stored(files) => LayerMajor::keeps_weights(files.weight_blocks_in_memory, part, config),
            WeightStorage::Memory | WeightStorage::File(_) => false,
        }
    }
}

/// Whether the values of a parameter stay in this process.
pub(crate) type Keeps<'a> = &'a dyn Fn(&ParameterSpec) -> bool;

/// Loads configuration and parameters. Values are converted to [`ParameterSpec::dtype`] of `dtype`, and each parameter is at its place
/// before the next is read. The values of those for which `keeps` returns false are released after they were checked.
pub(crate) fn load(
    ModelDirectory { path: directory, head, seed }: ModelDirectory,
    dtype: DType,
    device: &Device,
    (place, keeps): (WeightStorage, Keeps),
    is_frozen: bool,
) -> Result<Loaded> {
    let mut config = Config::from_file(&directory.join("config.json"))?;
    let stored = Files::open(directory, &config)?;
    let own = config.head.clone();
    if let Some(head) = head {
        config = config.with_head(head.clone())?;
    }
    // A classifier of the same kind with the same outputs is the wanted one.
    let has_classifier = config.head == own;
    config.stored = is_frozen.then(|| stored.dtypes(&config));
    config.tie_word_embeddings = stored.is_tied(&config, dtype)?;
    let file = match place {
        WeightStorage::Memory => None,
        WeightStorage::File(files) => Some(WeightFile::create(files, &config, dtype)?),
        WeightStorage::Stored(files) => Some(stored.weight_file(files, &config, dtype)?),
    };
    let mut parameters = Vec::new();
    for spec in ParameterSpec::all(&config) {
        let (place, file) = match place.keeps(spec.part, &config) || !spec.may_be_offloaded(dtype) {
            true => (WeightStorage::Memory, None),
            false => (place, file.as_ref()),
        };
        let tensor = if spec.quantisation.is_some() {
            stored.quantised(directory, &spec, place, file)?.to_device(device)?
        } else if !has_classifier && is_of_classifier(&spec.name) {
            initial_tensor(&spec, seed, spec.dtype(dtype), device)?
        } else {
            let tensor = stored.plain(directory, &spec, (place, file), spec.dtype(dtype), device)?;
            if !keeps(&spec) && !spec.part.is_table() {
                tensor_storage::unallocated::release(&tensor)?;
            }
            tensor
        };
        parameters.push(Parameter { name: spec.name, tensor, part: spec.part, quantisation: spec.quantisation });
    }
    // Duplicates of a table are compared with it.
    stored.check_the_rest(&config, &parameters)?;
    let specs = ParameterSpec::all(&config).into_iter();
    let mut tables = parameters.iter().zip(specs).filter(|(_, spec)| !keeps(spec) && spec.part.is_table());
    tables.try_for_each(|(table, _)| tensor_storage::unallocated::release(&table.tensor))?;
    let carried = Carried::read(stored.readers, &config)?.map(Rc::new);
    Ok(Loaded { config, parameters, file, carried })
}

/// The weights of a model directory as they are stored: the contents of its headers, without values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredWeights {
    /// Whether every matrix is stored in bf16. A model that keeps them in bf16 then has the same values as one of f32.
    pub is_bf16: bool,
    /// Whether a table is stored twice. The two are compared when the model is loaded.
    pub has_duplicates: bool,
    /// The dtypes of the matrices that are read.
    pub read_from: StoredIn,
    /// Bytes of a file that [`crate::T5::load_in_place`] writes, in a model of f32 and of bf16.
    pub copied_bytes: [u64; 2],
    /// Bytes in memory while the largest such parameter is copied, in a model of f32 and of bf16.
    pub copying_bytes: [u64; 2],
}

impl StoredWeights {
    /// The stored weights of the model in a directory with this configuration.
    ///
    /// # Errors
    /// As [`crate::T5::load`], for files and headers.
    pub fn read(directory: &Path, config: &Config) -> Result<StoredWeights> {
        let stored = Files::open(directory, config)?;
        let specs = specs_with_head(config);
        let stored_as = |spec: &ParameterSpec| {
            let name = stored.name_of(&spec.name);
            stored.reader(name).and_then(|reader| reader.stored_as(name))
        };
        let mut matrices = specs.iter().filter(|spec| spec.shape.len() > 1);
        let of = |dtype| stored.copied(&specs, dtype).map(|spec| spec.bytes(dtype)).sum();
        // A resumed run reads its own adapter, which is f32.
        let of_adapter = config.lora.as_ref().map(|_| DType::F32);
        let read_from = StoredIn::from_dtypes(stored.readers.iter().flat_map(Reader::dtypes).chain(of_adapter));
        let copying =
            |dtype| stored.copied(&specs, dtype).map(|spec| copying_bytes(spec, dtype, read_from)).max().unwrap_or(0);
        let tables = stored.holder.keys().filter(|name| stored.tables.has(name));
        Ok(StoredWeights {
            is_bf16: matrices.all(|spec| stored_as(spec).is_none_or(|dtype| dtype == DType::BF16)),
            has_duplicates: tables.count() > 1,
            read_from,
            copied_bytes: [of(DType::F32), of(DType::BF16)],
            copying_bytes: [copying(DType::F32), copying(DType::BF16)],
        })
    }

    /// These weights, with an adapter that is read after the model.
    #[must_use]
    pub fn with_adapter(self, adapter: &AdapterDirectory) -> Self {
        Self { read_from: self.read_from.and(adapter.stored_in()), ..self }
    }

    /// Bytes of a file that [`crate::T5::load_in_place`] writes for a model of `dtype`.
    pub fn copied(&self, dtype: DType) -> u64 {
        self.copied_bytes[usize::from(dtype == DType::BF16)]
    }

    /// Bytes in memory while the largest such parameter is copied.
    pub fn copying(&self, dtype: DType) -> u64 {
        self.copying_bytes[usize::from(dtype == DType::BF16)]
    }
}

/// Bytes in memory while one parameter is read and copied into a file. Pages of the copy are written without being touched, except
/// those of a dtype that has no kernels.
pub(crate) fn copying_bytes(spec: &ParameterSpec, dtype: DType, read_from: StoredIn) -> u64 {
    let (bytes, kept) = (spec.bytes(dtype), spec.dtype(dtype));
    let touched = if t5_ops::Path::on_cpu(kept) == t5_ops::Path::Cpu { 0 } else { bytes };
    bytes + touched.max(read_from.reading_bytes(spec.elements(), kept))
}

impl StoredDtypes {
    /// The stored dtypes of the model in a directory with this configuration.
    ///
    /// # Errors
    /// As [`crate::T5::load`], for files and headers.
    pub fn read(directory: &Path, config: &Config) -> Result<StoredDtypes> {
        Ok(Files::open(directory, config)?.dtypes(config))
    }
}

/// The files that hold the weights of the model in a directory.
///
/// # Errors
/// As [`crate::T5::load`], for files and headers.
pub fn weight_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let (readers, _) = Files::open_as_named(directory)?;
    Ok(readers.iter().map(|reader| reader.path().to_owned()).collect())
}

/// Every parameter that the files may have, whether the head is tied or not.
fn specs_with_head(config: &Config) -> Vec<ParameterSpec> {
    ParameterSpec::all(&Config { tie_word_embeddings: false, ..config.clone() })
}

/// The weight files of a directory, and which file holds which tensor.
#[derive(Debug)]
struct Files {
    readers: Vec<Reader>,
    holder: BTreeMap<String, usize>,
    tables: TableNames,
}

/// Open files, and which of them holds which tensor.
type Named = (Vec<Reader>, BTreeMap<String, usize>);

impl Files {
    /// The files of the model with this configuration.
    fn open(directory: &Path, config: &Config) -> Result<Files> {
        let (readers, holder) = Self::open_as_named(directory)?;
        let tables = TableNames::from_config(config);
        let renamed = |readers: Vec<Reader>, holder: BTreeMap<String, usize>, bare: &dyn Fn(&str) -> String| {
            let readers = readers.into_iter().map(|reader| reader.renamed(bare)).collect::<Result<_>>()?;
            let holder = holder.into_iter().map(|(name, shard)| (bare(&name), shard)).collect();
            Ok(Files { readers, holder, tables })
        };
        if config.gemma.is_some() {
            return renamed(readers, holder, &|name| config.own_name(name).into_owned());
        }
        let prefix = wrapper(holder.keys().map(String::as_str)).to_owned();
        if prefix.is_empty() {
            return Ok(Files { readers, holder, tables });
        }
        if prefix != WRAPPED {
            let shown = directory.display();
            tracing::warn!(
                "{shown}: the names of all tensors begin with `{prefix}`, as a wrapper names them; it is left out"
            );
        }
        renamed(readers, holder, &|name| name.strip_prefix(&prefix).unwrap_or(name).to_owned())
    }

    /// The files, with the names of tensors as they are stored.
    fn open_as_named(directory: &Path) -> Result<Named> {
        for (single, index, format) in WEIGHTS {
            let (single, index) = (directory.join(single), directory.join(index));
            if single.is_file() {
                let reader = format.open(&single)?;
                let holder = reader.names().into_iter().map(|name| (name, 0)).collect();
                return Ok((vec![reader], holder));
            }
            if index.is_file() {
                return Self::open_shards(directory, &index, format);
            }
        }
        Err(without_weights(directory))
    }

    fn open_shards(directory: &Path, index: &Path, format: Format) -> Result<Named> {
        let bad = |problem: String| Error::Json { path: index.into(), problem };
        let object = read_object(index, LARGEST_INDEX_BYTES)?;
        let Some(Value::Object(weight_map)) = object.get("weight_map") else {
            return Err(bad("expected an object `weight_map`".into()));
        };
        let (mut readers, mut by_file, mut holder) = (Vec::new(), HashMap::new(), BTreeMap::new());
        for (tensor, file) in weight_map {
            let file = file.as_str().filter(|file| is_plain_name(file));
            let file =
                file.ok_or_else(|| bad(format!("`{tensor}`: expected the name of a file in the same directory")))?;
            let shard = match by_file.get(file) {
                Some(&shard) => shard,
                None => {
                    readers.push(open_part(format, directory.join(file), index)?);
                    by_file.insert(file.to_owned(), readers.len() - 1);
                    readers.len() - 1
                }
            };
            if readers[shard].shape(tensor).is_none() {
                let path: PathBuf = readers[shard].path().into();
                return Err(Error::Safetensors {
                    path,
                    problem: format!("it has no tensor `{tensor}`, though the index says so"),
                });
            }
            holder.insert(tensor.clone(), shard);
        }
        // A tensor that the index leaves out is treated like one that it lists.
        for (shard, reader) in readers.iter().enumerate() {
            for name in reader.names() {
                holder.entry(name).or_insert(shard);
            }
        }
        Ok((readers, holder))
    }

    /// The parameters that cannot be used where they are stored and are large enough for a file.
    fn copied<'a>(&self, specs: &'a [ParameterSpec], dtype: DType) -> impl Iterator<Item = &'a ParameterSpec> {
        specs.iter().filter(move |spec| {
            let name = self.name_of(&spec.name);
            let place = self.reader(name).map(|reader| reader.place_of(name, spec.dtype(dtype)));
            // Codes and scales are used where they lie.
            let has_values = spec.quantisation.is_none();
            has_values && spec.may_be_offloaded(dtype) && place.is_some_and(|place| place.is_none())
        })
    }

    /// The mapped files, and room for the weights that must be copied.
    fn weight_file(&self, files: &crate::Files, config: &Config, dtype: DType) -> Result<WeightFile> {
        let specs = ParameterSpec::all(config);
        let stored = self.readers.iter().map(Reader::mapped).collect::<Result<_>>()?;
        let copied = self.copied(&specs, dtype).filter(|spec| !WeightStorage::Stored(files).keeps(spec.part, config));
        WeightFile::beside(stored, files, copied.map(|spec| spec.bytes(dtype)))
    }

    /// The values of a parameter in `dtype`, at its place. They stay where they are stored, if they can be used there.
    fn plain(
        &self,
        directory: &Path,
        spec: &ParameterSpec,
        (place, file): (WeightStorage, Option<&WeightFile>),
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let name = self.name_of(&spec.name);
        let reader = self.reader(name).ok_or_else(|| self.missing(directory, spec))?;
        check_shape(reader, name, spec)?;
        if let (WeightStorage::Stored(_), Some(file), Some(offset)) = (place, file, reader.place_of(name, dtype))
            && let Some(tensor) = file.stored(self.holder[name], offset, &spec.shape, dtype)?
        {
            reader.check_finite(name)?;
            return Ok(tensor);
        }
        WeightFile::place(file, reader.read(name, dtype, device)?)
    }

    /// The codes and scales of a quantised weight, at its place.
    fn quantised(
        &self,
        directory: &Path,
        spec: &ParameterSpec,
        place: WeightStorage,
        file: Option<&WeightFile>,
    ) -> Result<Tensor> {
        let quantisation = spec.quantisation.expect("a quantised weight");
        let parts = quantisation.parts();
        let first = part_name(&spec.name, &parts[0]);
        let (Some(&shard), Some(reader)) = (self.holder.get(&first), self.reader(&first)) else {
            let (path, expected) = (directory.into(), vec![parts[0].count]);
            return Err(Error::MissingTensor { path, tensor: first, expected });
        };
        let start = reader.place_of_parts(&spec.name, &parts)?;
        parts.iter().try_for_each(|part| match part.dtype.is_float() {
            true => reader.check_finite(&part_name(&spec.name, part)),
            false => Ok(()),
        })?;
        if let (WeightStorage::Stored(_), Some(file), Ok(offset)) = (place, file, usize::try_from(start))
            && let Some(tensor) = file.stored(shard, offset, &[quantisation.bytes()], DType::U8)?
        {
            return Ok(tensor);
        }
        WeightFile::place(file, reader.read_bytes(start, quantisation.bytes())?)
    }

    /// The dtypes of the matrices.
    fn dtypes(&self, config: &Config) -> StoredDtypes {
        StoredDtypes::new(specs_with_head(config).into_iter().filter_map(|spec| {
            let name = self.name_of(&spec.name);
            let dtype = self.reader(name)?.stored_as(name)?;
            (spec.shape.len() > 1).then_some((spec.name, dtype))
        }))
    }

    /// The error for a tensor that no file has.
    fn missing(&self, directory: &Path, spec: &ParameterSpec) -> Error {
        let is_there = |stack: &str| self.holder.keys().any(|name| name.starts_with(stack));
        let [decoder, encoder] = match self.tables.head {
            GEMMA_HEAD => ["model.decoder.layers.", "model.encoder.layers."],
            _ => ["decoder.block.", "encoder.block."],
        };
        if spec.part.is_decoder() && !is_there(decoder) && is_there(encoder) {
            return Error::Directory {
                path: directory.into(),
                problem: "its weights are those of an encoder, without a decoder".into(),
                hint: "text is made by a decoder: use the whole model; `train_low_mem embed` needs only an encoder"
                    .into(),
            };
        }
        let (tensor, expected) = (spec.name.clone(), spec.shape.clone());
        let is_inside = |name: &&String| name.strip_suffix(&tensor).is_some_and(|prefix| prefix.ends_with('.'));
        if let Some(name) = self.holder.keys().find(is_inside) {
            let prefix = name.strip_suffix(&tensor).unwrap_or_default();
            return Error::Directory {
                path: directory.into(),
                problem: format!("tensor `{tensor}` is missing, but there is `{name}`"),
                hint: format!(
                    "if the T5 is a part of a larger model, save it alone, as in Python: `model.{prefix}save_pretrained(DIR)`"
                ),
            };
        }
        Error::MissingTensor { path: directory.into(), tensor, expected }
    }

    fn reader(&self, name: &str) -> Option<&Reader> {
        self.holder.get(name).map(|&shard| &self.readers[shard])
    }

    /// The name under which a parameter is stored: its own, or, for the shared table, one of its others.
    fn name_of<'a>(&self, name: &'a str) -> &'a str {
        let TableNames { shared, others, head, of_head } = self.tables;
        if self.holder.contains_key(name) {
            return name;
        }
        let others = others.iter().copied().filter(|_| name == shared);
        let mut others = others.chain([head].into_iter().filter(|_| name == of_head));
        others.find(|other| self.holder.contains_key(*other)).unwrap_or(name)
    }

    /// transformers 5's rule: a separate head in the file is a separate head, unless it equals
    /// the shared table. A config that says otherwise is named.
    fn is_tied(&self, config: &Config, dtype: DType) -> Result<bool> {
        if !config.head.is_language() {
            return Ok(false);
        }
        let TableNames { head: head_name, of_head, .. } = self.tables;
        let embedding = self.name_of(of_head);
        let beside =
            || self.readers.first().map(|reader| reader.path().with_file_name("config.json")).unwrap_or_default();
        let own_head = self.reader(head_name).filter(|_| embedding != head_name);
        let (Some(head), Some(shared)) = (own_head, self.reader(embedding)) else {
            if !config.tie_word_embeddings {
                tracing::warn!(
                    "{}: `tie_word_embeddings` is false, but the weights have no head of their own: the shared table is \
                     the head, as in transformers 5 (version 4 draws a new one)",
                    beside().display()
                );
            }
            return Ok(true);
        };
        // A T5Gemma's head is its table: another one is named with the duplicates.
        if self.are_one(head_name, embedding) || config.gemma.is_some() {
            return Ok(true);
        }
        let table = [config.vocab_size, config.d_model];
        if head.shape(head_name) != Some(&table) || shared.shape(embedding) != Some(&table) {
            return Ok(false); // loading names the mis-shaped one
        }
        let is_equal = are_equal([(head, head_name), (shared, embedding)], dtype)?;
        if !is_equal && config.tie_word_embeddings {
            tracing::warn!(
                "{}: the head is tied to the shared table (`tie_word_embeddings`), but `{head_name}` has other values: they \
                 are the head, as in transformers 5 (version 4 passes over them)",
                beside().display()
            );
        }
        Ok(is_equal)
    }

    /// Whether two names are names of the same bytes of the same file.
    fn are_one(&self, one: &str, other: &str) -> bool {
        let [one_holder, other_holder] = [one, other].map(|name| self.holder.get(name));
        one_holder == other_holder && self.reader(one).is_some_and(|reader| reader.are_one(one, other))
    }

    /// Refuses tensors that have no place in the model, and duplicates of the shared table that differ from it.
    fn check_the_rest(&self, config: &Config, parameters: &[Parameter]) -> Result<()> {
        let known: HashMap<&str, &Tensor> = parameters.iter().map(|p| (p.name.as_str(), &p.tensor)).collect();
        let parts_of = |p: &Parameter| {
            let parts = p.quantisation.map(|quantisation| quantisation.parts()).unwrap_or_default();
            parts.into_iter().map(|part| part_name(&p.name, &part)).collect::<Vec<String>>()
        };
        let parts: BTreeSet<String> = parameters.iter().flat_map(parts_of).collect();
        for (name, &shard) in &self.holder {
            let reader = &self.readers[shard];
            let TableNames { shared: first, others, head, of_head } = self.tables;
            let is_head = name == head && config.tie_word_embeddings;
            if others.contains(&name.as_str()) || is_head {
                let table = if is_head { of_head } else { first };
                let shared = self.name_of(table);
                let both = |holder| [(reader, name.as_str()), (holder, shared)];
                let is_other = |holder| Ok::<_, Error>(!are_equal(both(holder), known[table].dtype())?);
                if !self.are_one(name, shared) && self.reader(shared).map_or(Ok(true), is_other)? {
                    return Err(Error::TensorMismatch {
                        path: reader.path().into(),
                        tensor: name.clone(),
                        expected: format!("the same values as `{table}`"),
                        got: match config.gemma {
                            Some(_) => "others (the model has one table for both)".into(),
                            None => "others (T5 has one embedding table)".into(),
                        },
                    });
                }
            } else if !known.contains_key(name.as_str())
                && !parts.contains(name)
                && !name.ends_with(IGNORED)
                && !is_of_another_head(name, config)
                && !is_carried(name, config)
            {
                return Err(Error::UnexpectedTensor { path: reader.path().into(), tensor: name.clone() });
            }
        }
        Ok(())
    }
}

/// Whether a tensor belongs to a part of a T5 that a model with this head does not have.
fn is_of_another_head(name: &str, config: &Config) -> bool {
    let head = &config.head;
    let is_of_decoder = name.trim_start_matches("model.").starts_with("decoder.") && !head.has_decoder();
    is_of_decoder || !head.is_language() && (name == TableNames::from_config(config).head || is_of_classifier(name))
}

/// Opens a file that an index names.
fn open_part(format: Format, path: PathBuf, index: &Path) -> Result<Reader> {
    if path.exists() {
        return format.open(&path);
    }
    let index = index.file_name().unwrap_or_default().display();
    let hint = format!("the weights are in all of the files that {index} names: fetch them again, into one directory");
    Err(Error::Directory { path, problem: format!("no such file, though {index} names it"), hint })
}

/// What a wrapper, such as `torch.compile`, data parallelism, Lightning or a class around the model, put before every name of a model;
/// empty if there is nothing. Names that do not all have it belong to a larger model, which is another one.
fn wrapper<'a>(mut names: impl Iterator<Item = &'a str> + Clone) -> &'a str {
    const EVERY_T5_HAS: &str = "encoder.final_layer_norm.weight";
    let prefix = names.clone().find_map(|name| name.strip_suffix(EVERY_T5_HAS)).unwrap_or_default();
    if prefix.ends_with('.') && names.all(|name| name.starts_with(prefix) || is_of_classifier(name)) {
        prefix
    } else {
        ""
    }
}

/// The error for a directory without readable weights.
fn without_weights(directory: &Path) -> Error {
    const OTHERS: [&str; 4] = ["tf_model.h5", "flax_model.msgpack", "rust_model.ot", "adapter_model.safetensors"];
    let hint = match OTHERS.into_iter().find(|name| directory.join(name).is_file()) {
        Some("adapter_model.safetensors") => {
            "this is an adapter: merge it into its model with `train_low_mem merge --adapter`".into()
        }
        Some(other) => format!("`{other}` is of another framework: save the model with PyTorch's `save_pretrained`"),
        None => "fetch the weights, or save the model with `save_pretrained`".into(),
    };
    let problem = "has no weights: expected model.safetensors or pytorch_model.bin, or the index of their parts";
    Error::Directory { path: directory.into(), problem: problem.into(), hint }
}

/// Refuses a stored tensor with another shape than its parameter.
fn check_shape(reader: &Reader, name: &str, spec: &ParameterSpec) -> Result<()> {
    if reader.shape(name) == Some(&spec.shape) {
        return Ok(());
    }
    Err(Error::TensorMismatch {
        path: reader.path().into(),
        tensor: name.into(),
        expected: format!("shape {:?}", spec.shape),
        got: format!("shape {:?}", reader.shape(name).unwrap_or_default()),
    })
}

/// No path may leave the model's directory.
fn is_plain_name(file: &str) -> bool {
    !file.is_empty() && Path::new(file).file_name().is_some_and(|name| name == file)
}

#[cfg(test)]
mod tests {
    use super::wrapper;

    #[test]
    fn what_all_names_begin_with_is_a_wrapper_whatever_its_name() {
        let of = |names: &[&'static str]| wrapper(names.iter().copied());
        let norm = "module.encoder.final_layer_norm.weight";
        assert_eq!(of(&[norm, "module.lm_head.weight"]), "module.");
        assert_eq!(of(&["base_model.model.encoder.final_layer_norm.weight"]), "base_model.model.");
        assert_eq!(of(&[norm, "shared.weight"]), "");
        assert_eq!(of(&["encoder.final_layer_norm.weight", "shared.weight"]), "");
        assert_eq!(of(&["my_encoder.final_layer_norm.weight"]), "");
        assert_eq!(of(&[]), "");
    }
}
