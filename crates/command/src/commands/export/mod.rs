//! `train_low_mem export`: writes a model as files of llama.cpp or CTranslate2.

mod card;

use std::path::Path;
use std::time::Instant;

use dataloader::TokenizerJson;
use durable_files::{NamedFiles, write_whole};
use memory_policy::{Bytes, Probe, SystemProbe};
use model_formats::{T5, Vocabulary, Weights, ctranslate2, gguf};
use serde_json::json;
use t5::StoredModel;

use crate::cli::export_flags::{ExportArgs, Format, GgufNames};
use crate::commands::merge::is_to_be_replaced;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::model::model_directory::{self, Adapted};
use crate::screen::report;
use crate::screen::shell_words::quoted;
use card::Card;

/// A longer `tokenizer.json` is invalid.
const LARGEST_TOKENIZER_BYTES: u64 = 512 << 20;
const CARD: &str = "README.md";

/// Exports a model.
pub fn export(flags: &ExportArgs) -> Outcome<()> {
    let began = Instant::now();
    let Adapted { directory, adapter } = model_directory::find_adapted(&flags.model, flags.adapter.as_deref())?;
    let inputs: Vec<&Path> = [Some(directory.as_path()), adapter.as_deref()].into_iter().flatten().collect();
    check_output(flags, &inputs)?;
    let stored = StoredModel::open(&directory, adapter.as_deref())?;
    refuse_gemma(flags, stored.config(), &directory)?;
    let name = name_of(adapter.as_deref().unwrap_or(&directory));
    let model = described(stored.config(), &name);
    let vocabulary = vocabulary(&directory, &model)?;
    let written = match flags.format {
        Format::Gguf => {
            let dtype = flags.dtype.into();
            let file = match flags.gguf_names {
                GgufNames::LlamaCpp => gguf::File::for_llama_cpp(&model, &vocabulary, dtype)?,
                GgufNames::Hf => gguf::File::with_hugging_face_names(&model, dtype)?,
            };
            Written::Gguf(file)
        }
        Format::Ctranslate2 => Written::Ctranslate2(ctranslate2::Model::new(&model, &vocabulary, flags.dtype.into())?),
    };
    if flags.format == Format::Gguf && flags.gguf_names == GgufNames::LlamaCpp {
        vocabulary.differences().into_iter().for_each(|difference| report::warn(&format!("llama.cpp {difference}")));
    }
    if let (Format::Ctranslate2, [end, others @ ..]) = (flags.format, model.ends.as_slice())
        && !others.is_empty()
    {
        report::warn(&format!(
            "CTranslate2's config names one end token, {end}; answers of this model also end with {}: pass `end_token` to its translator",
            others.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
        ));
    }
    let card = Card { flags, config: stored.config(), name: &name, directories: &inputs };
    let bytes = write(flags, &written, &FromModel(&stored), &card)?;
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    let (dtype, tensors) = (model_formats::Dtype::from(flags.dtype).name(), written.tensors());
    if flags.json {
        let json = json!({
            "output": output,
            "model": directory.display().to_string(),
            "format": flags.format.name(),
            "dtype": dtype,
            "tensors": tensors,
            "bytes": bytes,
            "seconds": seconds,
            "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    report::result(&format!("{output}: {}, {tensors} tensors, matrices in {dtype}\n", Bytes(bytes)))?;
    report::note(&format!("{seconds:.1} s, peak {peak}"));
    Ok(())
}

/// Refuses a T5Gemma. llama.cpp knows none. CTranslate2's own converter reads the directories that this program writes, but what it makes of
/// them has other probabilities than transformers has: `scripts/check_gemma.py --ctranslate2`.
fn refuse_gemma(flags: &ExportArgs, config: &t5::Config, directory: &Path) -> Outcome<()> {
    if !config.family.is_gemma() {
        return Ok(());
    }
    let (family, model) = (config.family.model_type(), quoted(directory));
    let serves = format!("`train_low_mem serve --model {model}` answers as OpenAI's interface does");
    Err(match flags.format {
        Format::Gguf => Failure::unusable(format!(
            "GGUF cannot hold this model: `model_type` is {family}, expected t5, mt5 or umt5: llama.cpp has no T5Gemma"
        ))
        .hint(format!("{serves}; about CTranslate2 see `--format ctranslate2`")),
        Format::Ctranslate2 => {
            let convert = format!("ct2-transformers-converter --model {model} --output_dir {}", quoted(&flags.output));
            Failure::unusable(format!("this command does not write a {family} for CTranslate2")).hint(serves).hint(format!(
                "CTranslate2 has a converter of its own: `{convert}`; with 4.8.5 the result had other probabilities than transformers 5.24, so \
                 compare answers before use"
            ))
        }
    })
}

/// A model in a format.
enum Written {
    Gguf(gguf::File),
    Ctranslate2(ctranslate2::Model),
}

impl Written {
    fn tensors(&self) -> usize {
        match self {
            Written::Gguf(file) => file.tensors(),
            Written::Ctranslate2(model) => model.tensors(),
        }
    }
}

/// The values of a model in a directory.
struct FromModel<'a>(&'a StoredModel);

impl Weights for FromModel<'_> {
    type Error = Failure;

    fn each_rows(&self, name: &str, shape: &[usize], each: &mut dyn FnMut(&[f32]) -> Outcome<()>) -> Outcome<()> {
        self.0.each_rows(name, shape, each)
    }
}

/// Writes the file or the directory. Returns its bytes.
fn write(flags: &ExportArgs, written: &Written, weights: &FromModel<'_>, card: &Card) -> Outcome<u64> {
    let output = &flags.output;
    outputs::make_directory_of(output)?;
    if let Written::Gguf(file) = written
        && is_file_name(output)
    {
        write_whole(output, |sink| file.write(sink, weights))?;
        return Ok(file.bytes());
    }
    let mut directory = NamedFiles::create(output)?;
    let text = |text: &str| {
        let text = text.to_owned();
        move |sink: &mut dyn std::io::Write| -> Outcome<()> {
            Ok(sink.write_all(text.as_bytes()).map_err(model_formats::Error::Io)?)
        }
    };
    match written {
        Written::Gguf(file) => {
            directory.write(&file_name(flags), |sink| file.write(sink, weights))?;
        }
        Written::Ctranslate2(model) => {
            let [weights_name, config, vocabulary] = ctranslate2::FILES;
            directory.write(weights_name, |sink| model.write(sink, weights))?;
            directory.write(config, text(model.config()))?;
            directory.write(vocabulary, text(model.vocabulary()))?;
        }
    }
    // An existing card may be the user's, or edited by the user. So it is kept unchanged.
    if durable_files::Identity::at(&output.join(CARD)).is_err() {
        directory.write(CARD, text(&card.text()))?;
    } else {
        report::note(&format!("{} stays as it is", output.join(CARD).display()));
    }
    let bytes = directory.bytes()?;
    directory.commit()?;
    Ok(bytes)
}

/// The name of a file in a directory.
fn file_name(flags: &ExportArgs) -> String {
    format!("model-{}.gguf", model_formats::Dtype::from(flags.dtype).name())
}

fn is_file_name(output: &Path) -> bool {
    output.extension().is_some_and(|extension| extension == "gguf")
}

/// Allows an existing output to be replaced only on request, and only if it is an export and none of the inputs.
fn check_output(flags: &ExportArgs, inputs: &[&Path]) -> Outcome<()> {
    let output = &flags.output;
    if !is_to_be_replaced(output, flags.force, inputs)? {
        return Ok(());
    }
    let is_export = match output.is_dir() {
        false => output.is_file() && is_file_name(output) && flags.format == Format::Gguf,
        true => !is_file_name(output) && (output.join(ctranslate2::FILES[0]).is_file() || has_gguf(output)),
    };
    if !is_export {
        let shown = output.display();
        return Err(Failure::usage(format!("{shown} is not an export; `--force` replaces exports only"))
            .hint("remove it, or name another path"));
    }
    Ok(())
}

fn has_gguf(directory: &Path) -> bool {
    let paths = regular_file::list(directory).into_iter().flatten().filter_map(Result::ok);
    paths.into_iter().any(|path| path.is_file() && is_file_name(&path))
}

/// The name of a model: that of its directory, or of its run.
fn name_of(directory: &Path) -> String {
    let absolute = regular_file::real_path(directory).unwrap_or_else(|_| directory.to_owned());
    let is_named = |path: &&Path| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| !["model", "adapter", "snapshots"].contains(&&*name))
    };
    let named = absolute.ancestors().find(is_named).and_then(Path::file_name);
    named.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn described(config: &t5::Config, name: &str) -> T5 {
    T5 {
        name: name.into(),
        vocab_size: config.vocab_size,
        d_model: config.d_model,
        d_kv: config.d_kv,
        d_ff: config.d_ff,
        heads: config.num_heads,
        encoder_blocks: config.num_layers,
        decoder_blocks: config.num_decoder_layers,
        buckets: config.relative_attention_num_buckets,
        max_distance: config.relative_attention_max_distance,
        has_a_table_in_every_block: config.family.has_a_table_in_every_block(),
        epsilon: config.layer_norm_epsilon,
        activation: config.dense_act_fn.clone(),
        is_gated: config.is_gated_act,
        is_tied: config.tie_word_embeddings,
        scales_logits: config.scale_decoder_outputs,
        positions: config.positions(),
        pad: config.pad_token_id,
        start: config.answer_start(),
        ends: config.answer_ends().to_vec(),
    }
}

fn vocabulary(directory: &Path, model: &T5) -> Outcome<Vocabulary> {
    let tokenizer = model_directory::tokenizer(directory)?;
    let read = |path: &Path| {
        regular_file::read_to_string(path, LARGEST_TOKENIZER_BYTES)
            .map_err(|error| Failure::io("read it", path, &error))
    };
    let text = match tokenizer.json() {
        TokenizerJson::None => return Ok(Vocabulary::of_bytes(&tokenizer.sentinels())),
        TokenizerJson::Text(text) => text.to_owned(),
        TokenizerJson::File(path) => read(path)?,
    };
    let end = tokenizer.eos_id().ok().or(model.ends.first().copied()).unwrap_or(1);
    Vocabulary::of_json(&text, tokenizer.start_ids(), end)
        .map_err(|problem| Failure::unusable(format!("{}: {problem}", tokenizer.path().display())))
}
