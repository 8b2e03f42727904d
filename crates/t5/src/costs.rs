//! Bytes of parameters, of their gradients, and of loading and saving them, before anything is allocated: pure functions of
//! the configuration. Passes and steps are counted by [`crate::step::count`].
//!
//! ```
//! use candle_core::DType;
//! use t5::{Config, costs};
//! let config = Config::preset("t5-small").unwrap();
//! assert_eq!(costs::parameters(&config, DType::F32), 60_506_624 * 4);
//! ```

use std::collections::HashSet;
use std::ops::Range;

use candle_core::DType;
use heap::LARGE_BYTES;

use crate::adapter::{Lora, is_of_adapter};
use crate::config::Config;
use crate::hf::safetensors::{PIECE_BYTES, StoredIn};
use crate::hf::{StoredWeights, copying_bytes};
use crate::init::making_bytes;
use crate::levers::LayerMajor;
use crate::parameters::{PagingGranularity, ParameterSpec, Part};
use crate::reach::Reach;

/// One line of the bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostRow {
    /// The row's name.
    pub name: &'static str,
    /// The row's bytes.
    pub bytes: u64,
}

/// The parameters that are trained, and how far backward reaches for them. Computed once for many passes.
#[derive(Clone, Debug)]
pub struct Trained {
    specs: Vec<ParameterSpec>,
    /// The index of each trained parameter among all parameters.
    indices: Vec<usize>,
    /// For each parameter, whether another process holds its gradient.
    elsewhere: Vec<bool>,
    /// The trained parameters of each part, by the part's index: they follow each other.
    parts: Vec<Range<usize>>,
    reach: Reach,
}

impl Trained {
    /// The parameters for which `is_trained` returns true.
    pub fn new(config: &Config, is_trained: &dyn Fn(&ParameterSpec) -> bool) -> Trained {
        let all = ParameterSpec::all(config);
        let elsewhere = vec![false; all.len()];
        let (indices, specs): (Vec<_>, Vec<_>) =
            all.into_iter().enumerate().filter(|(_, spec)| is_trained(spec)).unzip();
        let reach = Reach::to(config, specs.iter().map(|spec| spec.part));
        let most = specs.iter().map(|spec| spec.part.index() + 1).max().unwrap_or(0);
        let mut parts = vec![0..0; most];
        for (index, spec) in specs.iter().enumerate() {
            let part = spec.part.index();
            let first = if parts[part].is_empty() { index } else { parts[part].start };
            parts[part] = first..index + 1;
        }
        Trained { elsewhere, indices, specs, parts, reach }
    }

    /// The same parameters, trained by several processes. A gradient is dropped as soon as it is summed if `is_held` returns false.
    pub fn among(mut self, is_held: &dyn Fn(&ParameterSpec) -> bool) -> Trained {
        for (index, spec) in self.indices.iter().zip(&self.specs) {
            self.elsewhere[*index] = !is_held(spec);
        }
        self
    }

    /// Every parameter.
    pub fn all(config: &Config) -> Trained {
        Trained::new(config, &|_| true)
    }

    /// The trained parameters, in the order of [`ParameterSpec::all`].
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// How far backward reaches for these parameters.
    pub(crate) fn reach(&self) -> Reach {
        self.reach
    }

    /// The trained parameters of a part.
    pub(crate) fn part(&self, part: Part) -> &[ParameterSpec] {
        self.parts.get(part.index()).map_or(&[], |range| &self.specs[range.clone()])
    }

    /// The indices of a part's trained parameters among all parameters.
    pub(crate) fn indices(&self, part: Part) -> &[usize] {
        self.parts.get(part.index()).map_or(&[], |range| &self.indices[range.clone()])
    }

    /// Whether this process holds the gradient of a parameter, by its index among all parameters.
    pub(crate) fn is_held(&self, index: usize) -> bool {
        !self.elsewhere[index]
    }

    /// The most blocks that can be recomputed: the blocks that backward enters.
    pub fn blocks(&self) -> usize {
        self.reach.blocks_entered()
    }

    /// Bytes of the gradient accumulators; `products` as for [`crate::Gradients::new`].
    pub fn gradient_bytes(&self, products: DType) -> u64 {
        self.specs.iter().map(|spec| spec.gradient_bytes(products)).sum()
    }
}

/// Bytes of all parameters of a model of `dtype`.
pub fn parameters(config: &Config, dtype: DType) -> u64 {
    ParameterSpec::all(config).iter().map(|spec| spec.bytes(dtype)).sum()
}

/// Bytes that [`crate::T5::load`] or [`crate::T5::init`] needs beside the parameters: pieces of the parameter that is being read, or the
/// values that are rounded to one. They count as far as they exceed the parameters still to come. Tables that are stored twice are
/// compared, in pieces, at the end. `stored` describes the files; without it, parameters are made, or read from any files.
pub fn load(config: &Config, dtype: DType, stored: Option<&StoredWeights>) -> CostRow {
    let bytes = Loading::new(config, dtype, stored).beyond_all(StoredIn::reading_bytes);
    CostRow { name: LOAD, bytes: bytes.max(comparing(config, dtype, stored)) }
}

/// [`load`] to a device: the bytes on the host, and on the device. No parameter stays on the host, where tables are compared.
/// Parameters that are made or quantised are there as a whole.
pub fn load_to_device(config: &Config, dtype: DType, stored: Option<&StoredWeights>) -> [CostRow; 2] {
    let loading = Loading::new(config, dtype, stored);
    let on_host = loading.on_host().max(comparing(config, dtype, stored));
    [on_host, loading.beyond_all(StoredIn::reading_bytes_on_device)].map(|bytes| CostRow { name: LOAD, bytes })
}

const LOAD: &str = "load";

/// Bytes for comparing tables that are stored twice. An adapter may have a copy of the head.
fn comparing(config: &Config, dtype: DType, stored: Option<&StoredWeights>) -> u64 {
    let compares = config.lora.is_some() || stored.is_none_or(|stored| stored.has_duplicates);
    if compares { comparing_table(config, dtype, read_from(stored)) } else { 0 }
}

fn read_from(stored: Option<&StoredWeights>) -> StoredIn {
    stored.map_or(StoredIn::ANY, |stored| stored.read_from)
}

/// Parameters that are read or made one after the other.
struct Loading {
    specs: Vec<ParameterSpec>,
    dtype: DType,
    read_from: StoredIn,
    are_known: bool,
}

impl Loading {
    fn new(config: &Config, dtype: DType, stored: Option<&StoredWeights>) -> Self {
        let (specs, are_known) = (ParameterSpec::all(config), stored.is_some());
        Self { specs, dtype, read_from: read_from(stored), are_known }
    }

    /// Whether a parameter may be made rather than read.
    fn makes(&self, spec: &ParameterSpec) -> bool {
        spec.quantisation.is_none() && (!self.are_known || spec.is_of_adapter())
    }

    /// The most bytes that a parameter takes beside the existing ones, beyond the bytes of those still to come. `reading` gives the bytes
    /// for reading a parameter. Only a large parameter makes room: small ones have no pages of their own.
    fn beyond_all(&self, reading: impl Fn(StoredIn, u64, DType) -> u64) -> u64 {
        let (mut held, mut most) = (0, 0);
        for spec in &self.specs {
            held += Some(spec.bytes(self.dtype)).filter(|bytes| *bytes >= LARGE_BYTES as u64).unwrap_or(0);
            let made = if self.makes(spec) { making_bytes(spec, self.dtype) - spec.bytes(self.dtype) } else { 0 };
            most = most.max(held + made.max(reading(self.read_from, spec.elements(), spec.dtype(self.dtype))));
        }
        most - held
    }

    /// The most bytes of the host's memory that one parameter takes while it is moved to a device.
    fn on_host(&self) -> u64 {
        let of_one = |spec: &ParameterSpec| {
            let pieces = self.read_from.reading_bytes(spec.elements(), spec.dtype(self.dtype));
            let whole = match spec.quantisation {
                Some(_) => spec.bytes(self.dtype) + PIECE_BYTES as u64,
                None if self.makes(spec) => spec.elements() * size_of::<f32>() as u64,
                None => 0,
            };
            pieces.max(whole)
        };
        self.specs.iter().map(of_one).max().unwrap_or(0)
    }
}

fn comparing_table(config: &Config, dtype: DType, stored: StoredIn) -> u64 {
    stored.comparing_bytes(config.vocab_size as u64 * config.d_model as u64, dtype)
}

/// Bytes that [`crate::T5::save`] needs beside the parameters.
pub fn save() -> Vec<CostRow> {
    vec![CostRow { name: "save", bytes: 4 * PIECE_BYTES as u64 }]
}

/// The bytes of weights in memory, for a model whose weights lie in a file ([`crate::T5::init_in`]).
#[derive(Clone, Debug)]
pub struct WeightsOnDisk {
    specs: Vec<ParameterSpec>,
    dtype: DType,
    lora: Option<Lora>,
    /// The names of weights that other processes hold, where no weight lies in a file.
    elsewhere: Option<HashSet<String>>,
    /// Parts that have weights in the file, or elsewhere.
    parts: Vec<Part>,
    /// The bytes of each part, by the part's index.
    in_file: Vec<InFile>,
    always: u64,
    /// The adapter's share of `always`.
    adapter: u64,
    /// [`LayerMajor::weights_by_matrix`].
    by_matrix: bool,
    /// Bytes that loading holds beside `always`: while the largest parameter is made or read, and copied, and while tables are compared.
    copying: u64,
    comparing: u64,
}

/// The parameters of a part that lie in the file, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct InFile {
    all: u64,
    /// The bytes of the largest parameter.
    largest: u64,
    /// The most in memory at a time, where weights are read matrix by matrix and tables by rows.
    apart: u64,
    /// Whether the part is a table that is read by rows there.
    by_rows: bool,
}

impl InFile {
    fn add(&mut self, spec: &ParameterSpec, dtype: DType, config: &Config) {
        let bytes = spec.bytes(dtype);
        let paging = PagingGranularity::apart(spec.part, config);
        let at_a_time = match (paging, &*spec.shape) {
            (PagingGranularity::ByRows, &[rows, width]) => t5_ops::window_bytes((rows, width), spec.dtype(dtype)),
            _ => bytes,
        };
        self.all += bytes;
        self.largest = self.largest.max(bytes);
        self.apart = self.apart.max(at_a_time);
        self.by_rows = paging == PagingGranularity::ByRows;
    }
}

impl WeightsOnDisk {
    /// The weights of a model of `dtype`.
    pub fn new(config: &Config, dtype: DType) -> WeightsOnDisk {
        WeightsOnDisk::counted(config, dtype, None)
    }

    /// The weights of a model of `dtype`. Other processes hold the parameters of these names, and no parameter lies in a file
    /// ([`crate::T5::load_share`]).
    pub fn elsewhere(config: &Config, dtype: DType, names: HashSet<String>) -> WeightsOnDisk {
        WeightsOnDisk::counted(config, dtype, Some(names))
    }

    fn counted(config: &Config, dtype: DType, elsewhere: Option<HashSet<String>>) -> WeightsOnDisk {
        let specs = ParameterSpec::all(config);
        let most = specs.iter().map(|spec| spec.part.index() + 1).max().unwrap_or(0);
        let (parts, in_file) = (Vec::new(), vec![InFile::default(); most]);
        let lora = config.lora.clone();
        let adapter = specs.iter().filter(|spec| is_of_adapter(&spec.name)).map(|spec| spec.bytes(dtype)).sum();
        let (always, by_matrix, copying, comparing) = (0, false, 0, 0);
        let mut weights = WeightsOnDisk {
            specs,
            dtype,
            lora,
            elsewhere,
            parts,
            in_file,
            always,
            adapter,
            by_matrix,
            copying,
            comparing,
        };
        for spec in &weights.specs {
            if !weights.is_in_file(spec) {
                weights.always += spec.bytes(dtype);
                continue;
            }
            let of_part = &mut weights.in_file[spec.part.index()];
            if of_part.all == 0 {
                weights.parts.push(spec.part);
            }
            of_part.add(spec, dtype, config);
        }
        let copying = |spec: &ParameterSpec| copying_bytes(spec, dtype, StoredIn::ANY).max(making_bytes(spec, dtype));
        weights.copying = weights.specs.iter().map(copying).max().unwrap_or(0);
        weights.comparing = comparing_table(config, dtype, StoredIn::ANY);
        if weights.elsewhere.is_some() {
            // A table is released after the comparison, at the end.
            weights.copying += weights.part(Part::Shared) + weights.part(Part::LmHead);
        }
        weights
    }

    /// This count, with the weights of `blocks` blocks in memory ([`LayerMajor::weight_blocks_in_memory`]).
    #[must_use]
    pub fn keeping(mut self, blocks: usize, config: &Config) -> WeightsOnDisk {
        let is_kept = |part: &Part| LayerMajor::keeps_weights(blocks, *part, config);
        for part in self.parts.extract_if(.., |part| is_kept(part)) {
            self.always += std::mem::take(&mut self.in_file[part.index()]).all;
        }
        self
    }

    /// This count, where weights of a block are read matrix by matrix and tables by rows, or where the weights of a part are read together
    /// ([`LayerMajor::weights_by_matrix`]).
    #[must_use]
    pub fn coming(self, by_matrix: bool) -> WeightsOnDisk {
        WeightsOnDisk { by_matrix, ..self }
    }

    fn is_in_file(&self, spec: &ParameterSpec) -> bool {
        if let Some(elsewhere) = &self.elsewhere {
            return elsewhere.contains(&spec.name);
        }
        // Parameters that train beside a frozen base are in memory wherever the base lies.
        let trains = self.lora.as_ref().is_some_and(|lora| lora.trains(&spec.name));
        spec.may_be_offloaded(self.dtype) && !trains
    }

    /// Bytes that stay in memory: parameters that have no pages of their own.
    pub fn always(&self) -> u64 {
        self.always
    }

    /// The bytes of the head's table that are in memory at a time while only the head is in use.
    pub fn of_head(&self, config: &Config) -> u64 {
        self.at_once(Part::of_head(config))
    }

    /// The bytes of a part of the model that are in memory at a time while the part is in use.
    pub(crate) fn at_once(&self, part: Part) -> u64 {
        let InFile { all, apart, .. } = self.of_index(part);
        if self.by_matrix { apart } else { all }
    }

    /// Whether each operation on a part reads the weights or rows that it needs from the file, every time.
    pub(crate) fn is_paged_by_matrix(&self, part: Part) -> bool {
        let InFile { all, by_rows, .. } = self.of_index(part);
        self.by_matrix && all > 0 && (part.is_block() || by_rows)
    }

    /// Whether each operation reads the weights or rows that it needs from the file, every time, for every part in the file.
    pub fn all_come_apart(&self) -> bool {
        self.parts().all(|part| self.is_paged_by_matrix(part))
    }

    fn of_index(&self, part: Part) -> InFile {
        self.in_file.get(part.index()).copied().unwrap_or_default()
    }

    /// All bytes of a part of the model in the file.
    pub(crate) fn part(&self, part: Part) -> u64 {
        self.of_index(part).all
    }

    /// Parts that have parameters in the file.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Part> {
        self.parts.iter().copied()
    }

    /// The bytes of the largest parameter of some parts.
    pub(crate) fn largest_of(&self, parts: impl Iterator<Item = Part>) -> u64 {
        parts.map(|part| self.of_index(part).largest).max().unwrap_or(0)
    }

    /// Bytes in memory during an evaluation or a generation: those of one part at a time.
    pub fn at_a_time(&self) -> u64 {
        self.always + self.parts().map(|part| self.at_once(part)).max().unwrap_or(0)
    }

    /// Bytes in memory while a checkpoint is saved: those of one parameter at a time.
    pub fn saving(&self) -> u64 {
        self.always + self.largest()
    }

    /// Bytes in memory while a model is loaded or made: a parameter, with its values in f32 where it is made and rounded. It is copied to
    /// the file without touching the file's pages. `later` are the bytes of tensors that are made afterwards and counted elsewhere.
    pub fn loading(&self, later: u64) -> u64 {
        self.always + self.beyond_what_follows(self.in_transit(), later)
    }

    /// [`WeightsOnDisk::loading`] for a model that stays where it is stored ([`crate::T5::load_in_place`]).
    pub fn loading_in_place(&self, stored: &StoredWeights, later: u64) -> u64 {
        self.always + self.beyond_what_follows(self.in_transit_in_place(stored), later)
    }

    /// Bytes in transit beyond those made afterwards. An adapter, and the tensors of `later`, are made once the model is loaded, in the
    /// memory of the parameters that were in transit.
    fn beyond_what_follows(&self, in_transit: u64, later: u64) -> u64 {
        in_transit.saturating_sub(self.adapter + later)
    }

    /// Bytes beside [`WeightsOnDisk::always`] while a model is loaded that stays where it is stored.
    pub fn in_transit_in_place(&self, stored: &StoredWeights) -> u64 {
        let comparing = if stored.has_duplicates { self.comparing } else { 0 };
        stored.copying(self.dtype).max(comparing)
    }

    /// Bytes of all weights in the file.
    pub fn in_files(&self) -> u64 {
        self.in_file.iter().map(|of_part| of_part.all).sum()
    }

    /// The bytes of the largest parameter in the file.
    pub fn largest(&self) -> u64 {
        self.largest_of(self.parts())
    }

    /// Bytes beside [`WeightsOnDisk::always`] while a model is loaded or made.
    pub fn in_transit(&self) -> u64 {
        self.copying.max(self.comparing)
    }

    /// Bytes of weights in the file that a step reads and does not change.
    pub fn frozen(&self, trained: &Trained) -> u64 {
        self.in_files() - self.written(trained)
    }

    /// Bytes of weights in the file that a step changes.
    pub fn written(&self, trained: &Trained) -> u64 {
        self.bytes_in_file(trained.specs())
    }

    /// Bytes of a part's weights in the file that a step changes.
    pub(crate) fn written_of(&self, part: Part, trained: &Trained) -> u64 {
        self.bytes_in_file(trained.part(part))
    }

    fn bytes_in_file(&self, specs: &[ParameterSpec]) -> u64 {
        specs.iter().filter(|spec| self.is_in_file(spec)).map(|spec| spec.bytes(self.dtype)).sum()
    }
}
