//! A model that stays in the files that it is loaded from gives the same answers as one in memory, bit for bit.

#[path = "../../cuda-device/tests/support/device.rs"]
mod device;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use t5::{
    Config, EvalContext, Files, GenerateOptions, Gradients, LayerMajor, Lora, MicroBatch, Observer, Part, StepContext,
    StoredWeights, T5, Targets,
};

use self::device::{device, every};

#[global_allocator]
static ALLOCATOR: heap::Allocator = heap::Allocator;

fn config(tied: bool) -> Config {
    Config {
        vocab_size: 150,
        d_model: 96,
        d_ff: 128,
        d_kv: 16,
        num_heads: 6,
        num_layers: 2,
        num_decoder_layers: 3,
        tie_word_embeddings: tied,
        scale_decoder_outputs: tied,
        ..Config::default()
    }
}

/// The loss and the answers of a model, and the sum of the bits of the encoder's output.
fn all_of_it(model: &T5, activations: DType) -> (u64, Vec<Vec<u32>>, u64) {
    let (one, two) = ([7u32, 8, 9, 120, 1], [33u32, 34, 1]);
    let batch = MicroBatch::new(&[&one, &two], &[&two, &one], &[0, 1], model.config(), model.device()).unwrap();
    let loss = model.loss(&batch, &EvalContext { activations, loss_chunk_rows: 4 }).unwrap();
    let answers = model
        .generate(&[&one, &two], &GenerateOptions { max_new_tokens: 9, activations, ..Default::default() })
        .unwrap();
    let encoded = model.encode(&batch, activations).unwrap().to_dtype(DType::F32).unwrap();
    let encoded = encoded.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let bits = encoded.iter().fold(0u64, |sum, x| sum.wrapping_mul(31).wrapping_add(u64::from(x.to_bits())));
    (loss.to_bits(), answers, bits)
}

fn saved(directory: &Path, tied: bool, dtype: DType) -> StoredWeights {
    let config = config(tied);
    T5::init(&config, 5, dtype, &device()).unwrap().save(directory).unwrap();
    StoredWeights::read(directory, &config).unwrap()
}

#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn loss_and_answers_are_those_of_a_model_in_memory_whatever_is_stored_and_kept() {
    let stored = [(true, DType::F32), (false, DType::F32), (true, DType::BF16), (false, DType::BF16)];
    for (number, (tied, stored)) in stored.into_iter().enumerate() {
        let directory = tempfile::tempdir().unwrap();
        let weights = saved(directory.path(), tied, stored);
        assert_eq!(weights.is_bf16, stored == DType::BF16);
        let kept = [
            (DType::F32, DType::F32),
            (DType::F32, DType::BF16),
            (DType::BF16, DType::F32),
            (DType::BF16, DType::BF16),
        ];
        // On a card, one setting for each stored model, so that each is tried once.
        for (kept, activations) in kept.into_iter().skip(number % every(kept.len())).step_by(every(kept.len())) {
            let case = format!("stored {stored:?}, kept {kept:?}, activations {activations:?}, tied {tied}");
            let files = Files::in_directory(directory.path());
            let in_memory = T5::load(directory.path(), kept, &device()).unwrap();
            let in_place = T5::load_in_place(directory.path(), kept, &device(), &files).unwrap();
            assert!(in_place.is_in_file() && !in_memory.is_in_file());
            let large = |model: &T5| {
                let tensors = model.parameters().iter().map(|parameter| &parameter.tensor);
                tensors
                    .filter(|x| tensor_storage::is_in_file(x))
                    .map(|x| x.elem_count() * x.dtype().size_in_bytes())
                    .sum()
            };
            let in_file: usize = large(&in_place);
            // On a card no tensor of the model is on the host, so only the CPU is checked.
            let on_host = device().is_cpu();
            assert!(in_file > 0 && large(&in_memory) == 0 || !on_host, "{case}");
            assert!(!on_host || weights.copied(kept) == if kept == stored { 0 } else { in_file as u64 }, "{case}");
            assert_eq!(all_of_it(&in_place, activations), all_of_it(&in_memory, activations), "{case}");
            let by_matrix = Files { weights_by_matrix: true, ..files.clone() };
            let by_matrix = T5::load_in_place(directory.path(), kept, &device(), &by_matrix).unwrap();
            assert_eq!(all_of_it(&by_matrix, activations), all_of_it(&in_memory, activations), "{case}");
            // Four of five blocks: the first of the encoder stays in its file.
            let files = Files { weight_blocks_in_memory: 4, ..Files::in_directory(directory.path()) };
            let in_part = T5::load_in_place(directory.path(), kept, &device(), &files).unwrap();
            let is_in_file = |parameter: &&t5::Parameter| tensor_storage::is_in_file(&parameter.tensor);
            for parameter in in_place.parameters().iter().filter(is_in_file) {
                let other = in_part.parameters().iter().find(|other| other.name == parameter.name).unwrap();
                let stays = matches!(other.part, Part::Decoder { .. } | Part::Encoder { block: 1 });
                assert_eq!(is_in_file(&other), !stays, "{case}: {}", other.name);
            }
            assert_eq!(all_of_it(&in_part, activations), all_of_it(&in_memory, activations), "{case}");
        }
        if stored == DType::BF16 {
            // Kept as it is stored, or widened: the same numbers.
            let [half, whole] =
                [DType::BF16, DType::F32].map(|kept| T5::load(directory.path(), kept, &device()).unwrap());
            for activations in [DType::F32, DType::BF16] {
                assert_eq!(all_of_it(&half, activations), all_of_it(&whole, activations), "{activations:?}");
            }
        }
    }
}

#[test]
fn nothing_is_written_where_every_weight_is_used_where_it_is_stored() {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path(), true, DType::F32);
    let nowhere = Files::in_directory(&directory.path().join("no such directory"));
    let before = std::fs::read(directory.path().join("model.safetensors")).unwrap();
    let model = T5::load_in_place(directory.path(), DType::F32, &device(), &nowhere).unwrap();
    all_of_it(&model, DType::F32);
    drop(model);
    assert_eq!(std::fs::read(directory.path().join("model.safetensors")).unwrap(), before);
    // Rounded weights need a file, and that directory is not there.
    assert!(matches!(
        T5::load_in_place(directory.path(), DType::BF16, &device(), &nowhere).unwrap_err(),
        t5::Error::Offload { .. }
    ));
}

// The host alone: a frozen model is loaded on the host, and copied to a card later.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_frozen_model_stays_as_it_is_stored_and_gives_the_bits_of_one_in_f32() {
    for (tied, stored) in [(true, DType::F16), (false, DType::F16), (false, DType::BF16), (true, DType::F32)] {
        let directory = tempfile::tempdir().unwrap();
        saved(directory.path(), tied, DType::F32);
        let path = directory.path().join("model.safetensors");
        let wide = T5::load(directory.path(), DType::F32, &Device::Cpu).unwrap();
        // One matrix is f32, as in files of several dtypes.
        let is_wide = |name: &str| name.ends_with("layer.1.DenseReluDense.wo.weight");
        let dtype = |name: &str| if is_wide(name) { DType::F32 } else { stored };
        let tensors: Vec<(String, Tensor)> =
            wide.parameters().iter().map(|p| (p.name.clone(), p.tensor.to_dtype(dtype(&p.name)).unwrap())).collect();
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, x)| (name.as_str(), x)).collect();
        t5::safetensors::write(&path, &tensors, &[("format", "pt")]).unwrap();
        let mut config = config(tied);
        config.stored = Some(t5::StoredDtypes::read(directory.path(), &config).unwrap());
        assert_eq!(StoredWeights::read(directory.path(), &config).unwrap().copied(DType::F32), 0, "{stored:?}");
        let nowhere = Files::in_directory(&directory.path().join("no such directory"));
        let wide = T5::load(directory.path(), DType::F32, &Device::Cpu).unwrap();
        for files in [None, Some(&nowhere)] {
            let frozen = T5::load_frozen(directory.path(), DType::F32, files).unwrap();
            for (spec, parameter) in t5::ParameterSpec::all(&config).iter().zip(frozen.parameters()) {
                assert_eq!(parameter.tensor.dtype(), spec.dtype(DType::F32), "{}", spec.name);
                let is_kept = spec.shape.len() > 1 && !spec.name.contains("relative_attention_bias");
                assert_eq!(
                    parameter.tensor.dtype(),
                    if is_kept { dtype(&spec.name) } else { DType::F32 },
                    "{}",
                    spec.name
                );
                if files.is_some() && spec.bytes(DType::F32) >= heap::LARGE_BYTES as u64 {
                    assert!(tensor_storage::is_in_file(&parameter.tensor), "{}", spec.name);
                }
            }
            for activations in [DType::F32, DType::BF16] {
                assert_eq!(
                    all_of_it(&frozen, activations),
                    all_of_it(&wide, activations),
                    "{stored:?} {activations:?}"
                );
            }
        }
        // Parameters that are trained beside it are f32.
        let lora = Lora { modules_to_save: vec!["wi".into()], ..Lora::default() };
        let adapted = |model: T5| model.with_adapter(lora.clone(), 3).unwrap();
        let frozen = adapted(T5::load_frozen(directory.path(), DType::F32, Some(&nowhere)).unwrap());
        let trained = |p: &&t5::Parameter| lora.trains(&p.name);
        assert!(frozen.parameters().iter().filter(trained).all(|p| p.tensor.dtype() == DType::F32));
        let wide = adapted(wide);
        assert_eq!(all_of_it(&frozen, DType::F32), all_of_it(&wide, DType::F32), "{stored:?}");
    }
}

/// Blocks move between the base's files and memory, as plans ask for it, and the bits do not change.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn blocks_of_a_base_move_between_its_files_and_memory() {
    for kept in [DType::F32, DType::BF16] {
        let directory = tempfile::tempdir().unwrap();
        saved(directory.path(), false, DType::F32);
        let before = std::fs::read(directory.path().join("model.safetensors")).unwrap();
        let files =
            |weight_blocks_in_memory| Files { weight_blocks_in_memory, ..Files::in_directory(directory.path()) };
        let of = |files: Option<&Files>| T5::load_frozen(directory.path(), kept, files).unwrap();
        let mut model = of(None).with_adapter(Lora::default(), 7).unwrap();
        let bits = all_of_it(&model, DType::F32);
        let of_files = of(Some(&files(0)));
        let in_files = |model: &T5| -> Vec<String> {
            let lies_there =
                model.parameters().iter().filter(|parameter| tensor_storage::is_in_file(&parameter.tensor));
            lies_there.map(|parameter| parameter.name.clone()).collect()
        };
        for (blocks, weights_by_matrix) in [
            (Some(0), false),
            (Some(3), false),
            (Some(5), false),
            (Some(2), true),
            (Some(0), true),
            (Some(0), false),
            (None, false),
            (Some(4), false),
            (None, false),
        ] {
            let files = blocks.map(|blocks| Files { weights_by_matrix, ..files(blocks) });
            model.move_weights(files.as_ref()).unwrap();
            let mut expected = if blocks.is_some() { in_files(&of_files) } else { Vec::new() };
            let order = ["decoder.block.2", "decoder.block.1", "decoder.block.0", "encoder.block.1", "encoder.block.0"];
            let in_memory = &order[..blocks.unwrap_or(0)];
            expected.retain(|name| !in_memory.iter().any(|block| name.starts_with(block)));
            let case = format!("{kept:?}, {blocks:?}, by matrix: {weights_by_matrix}");
            assert_eq!(in_files(&model), expected, "{case}");
            assert_eq!(all_of_it(&model, DType::F32), bits, "{case}");
        }
        drop(model);
        assert_eq!(std::fs::read(directory.path().join("model.safetensors")).unwrap(), before);
    }
}

/// The bits of each gradient that a step hands over, with the number of its parameter.
#[derive(Default)]
struct Bits(Vec<(usize, Vec<u32>)>);

impl Observer<Tensor, t5::Error> for Bits {
    fn apply(&mut self, index: usize, gradient: &Tensor) -> t5::Result<()> {
        let values = gradient.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        self.0.push((index, values.into_iter().map(f32::to_bits).collect()));
        Ok(())
    }
}

/// The gradients of a step of two micro-batches, and the loss of an evaluation, all as bits.
fn step(model: &T5, lora: &Lora, files: &Files, activations: DType) -> (Vec<(usize, Vec<u32>)>, u64) {
    let (one, two) = ([7u32, 8, 9, 3120, 1], [2033u32, 34, 1]);
    let batch = |number, source: &[u32], target: &[u32]| {
        MicroBatch::new(&[source], &[target], &[number], model.config(), model.device()).unwrap()
    };
    let batches = [batch(0, &one, &two), batch(1, &two, &one)];
    let cx = StepContext {
        seed: 1,
        step: 1,
        dropout: 0.1,
        adapter_dropout: 0.0,
        activations,
        recompute_blocks: 5,
        loss_chunk_rows: 2,
        target_tokens: 8,
        token_loss: t5_ops::TokenLoss::default(),
    };
    let layers = LayerMajor { kept_gradient_blocks: 5, weights_on_disk: model.is_in_file(), ..LayerMajor::PLAIN };
    let mut gradients = Gradients::new(model.parameters(), DType::F32, &|parameter| lora.trains(&parameter.name));
    let mut bits = Bits::default();
    model.step(&batches, &cx, Some(&layers), files, &mut gradients, &mut bits).unwrap();
    let evaluated = EvalContext { activations, loss_chunk_rows: 2 };
    (bits.0, model.loss(&batches[0], &evaluated).unwrap().to_bits())
}

// The host alone: on a card, weights come as a whole.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
fn a_table_that_comes_by_rows_trains_and_answers_with_the_bits_of_one_in_memory() {
    let head_too = Lora { targets: Targets::Names(vec!["q".into(), "lm_head".into()]), ..Lora::default() };
    let head_saved = Lora { modules_to_save: vec!["lm_head".into()], ..Lora::default() };
    let cases = [
        (true, DType::F32, DType::F32, Lora::default()),
        (false, DType::F32, DType::BF16, Lora::default()),
        (true, DType::BF16, DType::F32, Lora::default()),
        (false, DType::BF16, DType::BF16, Lora::default()),
        // Tables that come as a whole: those of a head with an adapter, and one that is trained.
        (true, DType::F32, DType::F32, head_too.clone()),
        (false, DType::F32, DType::F32, head_too),
        (true, DType::F32, DType::F32, head_saved),
    ];
    for (tied, kept, activations, lora) in cases {
        let directory = tempfile::tempdir().unwrap();
        // Two windows of rows and a remainder.
        let config = Config { vocab_size: 4011, ..config(tied) };
        T5::init(&config, 5, kept, &Device::Cpu).unwrap().save(directory.path()).unwrap();
        let files = Files { weights_by_matrix: true, ..Files::in_directory(directory.path()) };
        let of = |files: Option<&Files>| {
            T5::load_frozen(directory.path(), kept, files).unwrap().with_adapter(lora.clone(), 7).unwrap()
        };
        let (in_memory, by_rows) = (of(None), of(Some(&files)));
        let case = format!("tied {tied}, {kept:?}, {activations:?}, {:?}", lora.targets);
        let expected = step(&in_memory, &lora, &files, activations);
        assert!(expected.0.len() > 10, "{case}: {} gradients", expected.0.len());
        assert!(step(&by_rows, &lora, &files, activations) == expected, "{case}");
        assert_eq!(all_of_it(&by_rows, activations), all_of_it(&in_memory, activations), "{case}");
    }
}
