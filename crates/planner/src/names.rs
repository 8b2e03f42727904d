//! The names of the bill's rows and phases. Code finds rows by these constants, never by text.

use memory_policy::Name;
/// The phase in which the model is loaded or made, and the one before the plan.
pub use memory_policy::{LOADING, READING};

/// The program itself: measured.
pub const PROCESS: Name = Name::new("process");
/// Blocks in the allocator that are too small to have pages of their own.
pub const SMALL_BLOCKS: Name = Name::new("small blocks");
/// Tensors of short samples, which are small blocks and are beside the pages of the longest samples' tensors.
pub const SMALL_TENSORS: Name = Name::new("small tensors");
/// The weights.
pub const PARAMETERS: Name = Name::new("parameters");
/// The weights of products in bf16, beside those in f32.
pub const WEIGHT_COPIES: Name = Name::new("weight copies");
/// The memory that recorded micro-batches keep between their launches.
pub const GRAPHS: Name = Name::new("graphs");
/// The weights of a frozen model beside the trained one, which lie in its files.
pub const FROZEN_MODEL: Name = Name::new("frozen model");
/// What a teacher's decoder made of a batch, until the loss.
pub const TEACHER_STATES: Name = Name::new("teacher's states");
/// A teacher's largest logits of a batch, until the end of the step.
pub const TEACHER_LOGITS: Name = Name::new("teacher's logits");
/// The optimizer's moments.
pub const OPTIMIZER_STATE: Name = Name::new("optimizer state");
/// Sums of gradients.
pub const GRADIENTS: Name = Name::new("gradients");
/// Sums of squares of every gradient, for the norm and the update.
pub const SQUARE_SUMS: Name = Name::new("square sums");
/// Saved activations of a micro-batch.
pub const ACTIVATIONS: Name = Name::new("activations");
/// Saved activations of a whole batch, layer by layer.
pub const BOUNDARIES: Name = Name::new("block inputs");
/// Operands that threads keep packed from one product to the next.
pub const PACKED: Name = Name::new("matmul buffers");
/// Keys and values of a generation.
pub const CACHE: Name = Name::new("key/value cache");
/// The vectors of texts, and their gradients.
pub const VECTORS: Name = Name::new("vectors");
/// Logits and their product.
pub const LOSS: Name = Name::new("loss");
/// The largest momentary need beside the tensors that are kept.
pub const WORKSPACE: Name = Name::new("workspace");
/// Operands that the processor makes in the host's memory for a device.
pub const STAGING: Name = Name::new("staging");
/// Tensors that are in the host's memory because the device has no room for them.
pub const OFFLOADED_TO_HOST: Name = Name::new("off the GPU");
/// The device's context, kernels and libraries.
pub const CONTEXT: Name = Name::new("context");
/// Kernels that a device's libraries load into the host's memory when they first need them.
pub const KERNELS: Name = Name::new("kernels");
/// Memory that the device's allocator holds beside tensors.
pub const POOL: Name = Name::new("pool");
/// Batches, and the memory of the loader that makes them.
pub const LOADER: Name = Name::new("loader");
/// The data kept between reads.
pub const DATASET: Name = Name::new("dataset");
/// Buffers of data sent to other processes and received from them at a time.
pub const COMMUNICATION: Name = Name::new("communication");
/// Rows that an evaluation reads.
pub const VALIDATION_ROWS: Name = Name::new("validation rows");
/// Rows that `eval` reads.
pub const ROWS: Name = Name::new("rows");

/// Connections, requests and answers of a server.
pub const SERVER: Name = Name::new("server");
/// Adapters beside the first, which is among the parameters.
pub const ADAPTERS: Name = Name::new("adapters");

/// The phase of a step in which a frozen model beside the trained one computes.
pub const FROZEN_PASS: Name = Name::new("frozen model's pass");
/// The phase in which a checkpoint is written.
pub const SAVING: Name = Name::new("saving");
/// The phase in which the rows of an evaluation are read, before any computation.
pub const READING_ROWS: Name = Name::new("reading rows");
/// The phase in which losses are computed without training.
pub const EVALUATION: Name = Name::new("evaluation");
/// The phase in which text is generated.
pub const GENERATION: Name = Name::new("generation");

/// Rows that are no tensors.
pub const NOT_TENSORS: [Name; 6] = [PROCESS, SMALL_BLOCKS, SMALL_TENSORS, LOADER, DATASET, COMMUNICATION];
/// Rows of tensors whose bytes follow from the model alone.
pub const EXACT: [Name; 4] = [PARAMETERS, WEIGHT_COPIES, GRADIENTS, OPTIMIZER_STATE];
