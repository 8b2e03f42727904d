//! Finds the directory of a model from the user's name for it: the directory itself, the run that made it, or the id of a model in the
//! local cache of the Hugging Face hub.
//!
//! Nothing is downloaded. The cache has the layout of `huggingface_hub`: `models--ORG--NAME/refs/REVISION` names a directory of
//! `models--ORG--NAME/snapshots`, whose files are links into `blobs`.

use std::path::{Path, PathBuf};

use dataloader::Tokenizer;
use t5::peft::{AdapterConfig, AdapterDirectory, CONFIG_FILE};

use crate::config::Values;
use crate::failure::{Failure, Outcome};
use crate::files::run_dir;
use crate::model::{base, base_digests};
use crate::screen::report;

/// The most bytes of a file that names a revision.
const LARGEST_REF_BYTES: u64 = 1 << 10;

/// The directory of a model that a user named.
pub fn find(named: &Path) -> Outcome<PathBuf> {
    if named.is_dir() {
        return of_directory(named);
    }
    if named.exists() {
        let parent = named.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return Err(Failure::unusable(format!("{}: expected a model directory, found a file", named.display()))
            .hint(format!("name the directory: `{}`", parent.display()))
            .with_hint(
                is_config(named).then(|| format!("a new model of this shape is `--preset {}`", named.display())),
            ));
    }
    match HubId::parse(named) {
        Some(id) => id.find(named),
        None => Err(without_directory(named)),
    }
}

/// Whether the name is that of a `config.json`.
fn is_config(named: &Path) -> bool {
    named.extension().is_some_and(|extension| extension == "json")
}

/// The name under which an adapter's settings record its model. A directory is the absolute path of the model's own directory, also if a
/// run was named: from there PEFT loads it, too. The id of a model is recorded unchanged.
pub fn lasting_name(named: &Path) -> Outcome<PathBuf> {
    if !named.is_dir() {
        return Ok(named.to_owned());
    }
    let directory = find(named)?;
    Ok(regular_file::real_path(&directory).unwrap_or(directory))
}

/// A model, and the adapter beside it, if any.
#[derive(Debug)]
pub struct Adapted {
    /// The directory of the model.
    pub directory: PathBuf,
    /// The directory of the adapter.
    pub adapter: Option<PathBuf>,
}

/// The files of an adapter on which results depend.
const ADAPTER_FILES: [&str; 2] = ["adapter_model.safetensors", "adapter_config.json"];

/// What answers and vectors follow from beside their own settings, for [`crate::files::outputs::key`]: the files of a model and of its
/// adapter, and as text the config, the tokenizer and the kernels.
pub fn depends_on(
    (directory, adapter): (&Path, Option<&Path>),
    config: &t5::Config,
    tokenizer: &Tokenizer,
) -> Outcome<(Vec<PathBuf>, String)> {
    let of_adapter = adapter.into_iter().flat_map(|adapter| ADAPTER_FILES.map(|name| adapter.join(name)));
    let files = t5::weight_files(directory)?.into_iter().chain(of_adapter).collect();
    let of_tokenizer = (tokenizer.fingerprint(), tokenizer.config_fingerprint());
    // The debug form is compared with an earlier one, and never shown.
    Ok((files, format!("{of_tokenizer:?} {} {}", config.to_json(), t5_ops::instruction_set())))
}

impl Adapted {
    fn warn_if_changed(&self) {
        self.adapter.iter().for_each(|adapter| base_digests::warn_if_changed(&self.directory, adapter));
    }
}

/// The named model and the adapter. If the name is that of an adapter, or of the run that made it, the adapter's settings name the model.
pub fn find_adapted(named: &Path, adapter: Option<&Path>) -> Outcome<Adapted> {
    let found = adapted(named, adapter)?;
    found.warn_if_changed();
    Ok(found)
}

fn adapted(named: &Path, adapter: Option<&Path>) -> Outcome<Adapted> {
    let adapter = adapter.map(AdapterDirectory::find).transpose()?;
    let has = |file: &str| named.join(file).exists();
    let is_adapter = [CONFIG_FILE, "adapter/adapter_config.json"].into_iter().any(has)
        && !["config.json", "model/config.json"].into_iter().any(has);
    if !is_adapter || adapter.is_some() {
        let directory = find(named)?;
        adapter.iter().for_each(|adapter| warn_of_another_base(&directory, adapter));
        return Ok(Adapted { directory, adapter });
    }
    let adapter = AdapterDirectory::find(named)?;
    Ok(Adapted { directory: base_of(&adapter)?, adapter: Some(adapter) })
}

/// Says if an adapter names another model than this one, and that one is there. A run's quantised copies are its own base.
fn warn_of_another_base(directory: &Path, adapter: &Path) {
    let is_copy = directory.file_name().is_some_and(|name| name.to_string_lossy().starts_with("base-"));
    let Some(base) = base_of(adapter).ok().filter(|_| !is_copy) else { return };
    if regular_file::real_path(&base).ok() != regular_file::real_path(directory).ok() {
        let (adapter, base, directory) = (adapter.display(), base.display(), directory.display());
        report::warn(&format!("{adapter} was trained beside {base}, and is used beside {directory}"));
    }
}

/// The same directories for computing with the model. If a run quantised the base of its adapter, the base is that copy, because the
/// adapter was trained beside those weights.
pub fn find_as_trained(named: &Path, adapter: Option<&Path>) -> Outcome<Adapted> {
    let mut found = adapted(named, adapter)?;
    if adapter.is_none()
        && found.adapter.is_some()
        && let Some(base) = quantised_base(named)?
    {
        if base.join("config.json").is_file() {
            found.directory = base;
        } else {
            let (base, model) = (base.display(), found.directory.display());
            report::note(&format!("{base}: no such model; the weights of {model} are used, which are not quantised"));
        }
    }
    found.warn_if_changed();
    Ok(found)
}

/// The quantised base of a run's adapter, according to the run's config.
fn quantised_base(run: &Path) -> Outcome<Option<PathBuf>> {
    let mut values = Values::defaults();
    if !run_dir::apply_resolved(&mut values, run)? {
        return Ok(None);
    }
    let precision = values.text("model.base_precision").and_then(|name| t5::Precision::of_name(&name));
    Ok(precision.map(|precision| run.join(base::name(precision))))
}

/// The model that an adapter's settings name.
pub fn base_of(adapter: &Path) -> Outcome<PathBuf> {
    let config = AdapterConfig::read(adapter)?;
    let hint = "name the model below the adapter: `--model DIR --adapter DIR`";
    let Some(named) = config.base_model.as_deref().filter(|name| !name.is_empty()) else {
        let problem = format!("{}: `base_model_name_or_path` names no model", config.path().display());
        return Err(Failure::unusable(problem).hint(hint));
    };
    find(Path::new(named)).map_err(|failure| {
        let problem = format!("the adapter's model cannot be found: {}", failure.message);
        Failure::unusable(problem).hint(hint)
    })
}

/// The directory of a model whose config a user named, if the name is a directory or an id of the hub. A name without `/` may be a preset,
/// and a file has no directory.
pub fn beside_config(named: &Path) -> Outcome<Option<PathBuf>> {
    let is_file = named.is_file() || named.extension().is_some_and(|extension| extension == "json");
    let is_model = named.is_dir() || (named.components().count() == 2 && !is_file);
    if is_model { find(named).map(Some) } else { Ok(None) }
}

/// The named tokenizer: a file, or the tokenizer of a model.
pub fn find_tokenizer(named: &Path) -> Outcome<PathBuf> {
    // The code that opens the file refuses anything except regular files.
    if named.exists() && !named.is_dir() {
        return Ok(named.to_owned());
    }
    let has_file_name = named.extension().is_some_and(|extension| extension == "json" || extension == "model");
    if has_file_name && !named.exists() {
        return Err(Failure::unusable(format!("{}: no such file, expected a tokenizer", named.display()))
            .hint("paths are relative to the directory where the command runs"));
    }
    // A directory with only a tokenizer has no config.json.
    let own = Some(named).filter(|named| named.is_dir()).and_then(Tokenizer::in_directory);
    if let Some(tokenizer) = own {
        return Ok(tokenizer);
    }
    tokenizer_path(&find(named)?)
}

/// The tokenizer of a model's directory.
///
/// # Errors
/// There is none, or it cannot be read.
pub fn tokenizer(directory: &Path) -> Outcome<Tokenizer> {
    Ok(Tokenizer::load(&tokenizer_path(directory)?)?)
}

/// The path of the tokenizer in a model's directory.
///
/// # Errors
/// There is none.
pub fn tokenizer_path(directory: &Path) -> Outcome<PathBuf> {
    Tokenizer::in_directory(directory).ok_or_else(|| without_tokenizer(directory))
}

/// Whether the model's embedding has a row for each of the tokenizer's entries.
///
/// # Errors
/// It has too few.
pub fn check_size(model: &t5::Config, tokenizer: &Tokenizer) -> Outcome<()> {
    if tokenizer.vocab_size() <= model.vocab_size {
        return Ok(());
    }
    let entries = tokenizer.vocab_size();
    Err(Failure::unusable(format!(
        "{}: the tokenizer has {entries} entries, expected at most the {} rows of the model's embedding",
        tokenizer.path().display(),
        model.vocab_size
    ))
    .hint(format!(
        "if tokens were added to it, the model grows by `model.resize_token_embeddings({entries})` in transformers"
    )))
}

/// Checks that a model's config and its tokenizer agree about the token that ends a text. Otherwise a model learns to end with a token that
/// no other program takes for an end.
///
/// # Errors
/// The tokens that contradict each other.
pub fn check_end(directory: &Path, model: &t5::Config, tokenizer: &Tokenizer) -> Outcome<()> {
    let Some(&of_config) = model.eos_token_ids.first() else { return Ok(()) };
    let named = |id: u32| named(tokenizer, id);
    let config = directory.join("config.json");
    match tokenizer.eos_id() {
        Ok(id) if model.eos_token_ids.contains(&id) => Ok(()),
        // A model may end with another of the usual tokens.
        Ok(id) if tokenizer.is_usual_end(of_config) && tokenizer.is_usual_end(id) => Ok(()),
        Ok(id) => {
            let name = tokenizer.token_name(of_config).unwrap_or_default();
            Err(Failure::unusable(format!(
                "{}: texts end with {}, but those of its tokenizer with {}",
                config.display(),
                named(of_config),
                named(id)
            ))
            .hint(format!("correct the config: `\"eos_token_id\": {id}`"))
            .hint(format!(
                "or, if the weights end texts with `{name}`, tokenizer_config.json (and special_tokens_map.json, if there is one): \
                 `\"eos_token\": \"{name}\"`"
            )))
        }
        Err(_) if tokenizer.token_name(of_config).is_some() && !tokenizer.is_special(of_config) => {
            Err(Failure::unusable(format!(
                "{}: texts end with {}, which is a piece of a word",
                config.display(),
                named(of_config)
            ))
            .hint("name the token that ends texts: `eos_token_id` in the config, `eos_token` in tokenizer_config.json"))
        }
        Err(_) => Ok(()),
    }
}

/// Warns where training and answers start or end texts differently, or where transformers does: if `generation_config.json` names other ends of answers than the texts have that a model
/// learns, or if the tokenizer's file ends no texts.
pub fn warn_of_ends(directory: &Path, model: &t5::Config, tokenizer: &Tokenizer) {
    let (ends, of_texts) = (model.answer_ends(), &model.eos_token_ids);
    let (Some(&end), Some(&of_text)) = (ends.first(), of_texts.first()) else { return };
    if !ends.iter().any(|end| of_texts.contains(end)) {
        report::warn(&format!(
            "{}: answers end with {}, but texts with {}: answers of a model that learned those go on to their limit; if the config \
             is right, write `\"eos_token_id\": {of_text}`",
            directory.join("generation_config.json").display(),
            named(tokenizer, end),
            named(tokenizer, of_text)
        ));
    }
    let (of_training, of_answers) = (model.decoder_start_token_id, model.answer_start());
    if of_training != of_answers {
        report::warn(&format!(
            "{}: answers start with {}, but training with {}, as config.json says; if the config is right, write \
             `\"decoder_start_token_id\": {of_training}`",
            directory.join("generation_config.json").display(),
            named(tokenizer, of_answers),
            named(tokenizer, of_training)
        ));
    }
    if !tokenizer.ends_texts_with(of_text) {
        report::warn(&format!(
            "{}: its template does not end texts with {}; here sources and targets end with it, in transformers they do not",
            tokenizer.path().display(),
            named(tokenizer, of_text)
        ));
    }
}

/// A token, with its name if the tokenizer has it.
fn named(tokenizer: &Tokenizer, id: u32) -> String {
    tokenizer.token_name(id).map_or_else(|| format!("token {id}"), |name| format!("token {id}, `{name}`"))
}

/// The error for a model without a tokenizer.
fn without_tokenizer(directory: &Path) -> Failure {
    // With a new tokenizer, weights that were trained with another would produce noise.
    let failure = Failure::unusable(format!(
        "{}: no tokenizer in it: expected tokenizer.json, spiece.model, tokenizer.model, or vocab.json with merges.txt",
        directory.display()
    ));
    let paths = regular_file::list(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = paths.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
    names.sort();
    let shown = directory.display();
    if let Some(name) = names.iter().find(|name| name.ends_with(".model")) {
        return failure.hint(format!("if {name} is a SentencePiece model, name it: `--tokenizer {shown}/{name}`"));
    }
    if names.iter().any(|name| name == "vocab.txt") {
        return failure.hint(format!(
            "vocab.txt is read by transformers, which makes a tokenizer.json of it: \
             python3 -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{shown}').save_pretrained('{shown}')\""
        ));
    }
    failure.hint("fetch the tokenizer that the model was published with, into the same directory")
}

fn of_directory(directory: &Path) -> Outcome<PathBuf> {
    // The code that opens the config refuses anything except regular files.
    let has_config = |directory: &Path| directory.join("config.json").exists();
    if has_config(directory) {
        return Ok(directory.to_owned());
    }
    let of_run = directory.join("model");
    if has_config(&of_run) {
        return Ok(of_run);
    }
    // The cache's directory of a model.
    if let Some(snapshot) = snapshot(directory, None) {
        return Ok(snapshot);
    }
    let shown = directory.display();
    let failure =
        Failure::unusable(format!("{shown}: expected a Hugging Face model directory, found no config.json in it"));
    Err(match newest_checkpoint(directory) {
        Some(newest) => failure.hint(format!("use its newest checkpoint: `{}`", newest.display())),
        None if directory.join(CONFIG_FILE).is_file() => failure.hint(format!(
            "it is an adapter: `--model BASE --set lora.init_from={shown}` trains it further, `--model BASE --adapter {shown}` answers with it"
        )),
        None => failure
            .with_hint(models_below(directory))
            .hint("a model directory has config.json, the weights and the tokenizer"),
    })
}

/// Names the models below a directory, such as those in a hub's cache, or the transformer of a model of sentence-transformers.
fn models_below(directory: &Path) -> Option<String> {
    const SHOWN: usize = 3;
    const MOST_DIRECTORIES: usize = 1000;
    // A hub's cache has three levels above its snapshots.
    let (mut models, mut level) = (Vec::new(), vec![directory.to_owned()]);
    for _ in 0..4 {
        let listed = level.iter().filter_map(|path| regular_file::list(path).ok()).flatten().filter_map(Result::ok);
        level = listed.filter(|path| path.is_dir()).take(MOST_DIRECTORIES).collect();
        level.sort();
        models.extend(level.iter().filter(|path| path.join("config.json").is_file()).cloned());
    }
    let names: Vec<String> = models.iter().take(SHOWN).map(|model| format!("`{}`", model.display())).collect();
    (!names.is_empty()).then(|| format!("name the model below it: {}", names.join(", ")))
}

fn newest_checkpoint(run: &Path) -> Option<PathBuf> {
    let inside = run.join(trainer::checkpoint::CHECKPOINTS_DIRECTORY);
    let paths = regular_file::list(&inside).or_else(|_| regular_file::list(run)).ok()?.filter_map(Result::ok);
    // `checkpoint-500` is what transformers' `Trainer` writes.
    let step = |path: &PathBuf| -> Option<u64> {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix("step-").or_else(|| name.strip_prefix("checkpoint-"))?.parse().ok()
    };
    paths.filter(|path| path.join("config.json").is_file()).filter(|path| step(path).is_some()).max_by_key(step)
}

/// The id of a model on the hub, such as `google/flan-t5-small` or `t5-small@main`.
#[derive(Debug)]
struct HubId {
    id: String,
    revision: Option<String>,
}

impl HubId {
    fn parse(named: &Path) -> Option<HubId> {
        let text = named.to_str()?;
        let (id, revision) = text.split_once('@').map_or((text, None), |(id, revision)| (id, Some(revision)));
        let is_name = |name: &str| {
            let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            !name.is_empty() && name.len() <= 96 && !name.starts_with(['.', '-']) && name.chars().all(is_letter)
        };
        let is_id = id.split('/').count() <= 2 && id.split('/').all(is_name) && revision.is_none_or(is_name);
        is_id.then(|| HubId { id: id.to_owned(), revision: revision.map(str::to_owned) })
    }

    fn find(&self, named: &Path) -> Outcome<PathBuf> {
        let cache = cache();
        let directory = |id: &str| cache.join(format!("models--{}", id.replace('/', "--")));
        // The hub moved the first models, such as t5-small, below the name of their publisher. Both names are in use.
        let moved = directory(&format!("google-t5/{}", self.id));
        let repository = Some(directory(&self.id)).filter(|path| path.is_dir()).unwrap_or(moved);
        let found = snapshot(&repository, self.revision.as_deref());
        if let Some(directory) = &found
            && directory.join("config.json").is_file()
        {
            return Ok(directory.clone());
        }
        let download = match &self.revision {
            None => format!("hf download {}", self.id),
            Some(revision) => format!("hf download {} --revision {revision}", self.id),
        };
        if found.is_some() || repository.is_dir() {
            let problem = format!("`{}` is not complete in the Hugging Face cache ({})", self.id, cache.display());
            return Err(Failure::unusable(problem).hint(format!("fetch the missing files: `{download}`")));
        }
        // `runs/nosuch` looks like an id.
        let failure = without_directory(named);
        let parent = named.parent().filter(|parent| !parent.as_os_str().is_empty());
        let is_preset = t5::Config::preset(&self.id).is_some();
        if !is_preset && (parent.is_some_and(Path::is_dir) || !failure.hints.is_empty()) {
            return Err(failure);
        }
        let problem = format!(
            "{}: no such directory, and no such model in the Hugging Face cache ({})",
            self.id,
            cache.display()
        );
        let failure = Failure::unusable(problem)
            .hint(format!("if it is a model of the hub, fetch it into the cache: `{download}`"));
        let shape = format!("a new model of this shape, with random weights, is `--preset {}`", self.id);
        Err(failure.with_hint(is_preset.then_some(shape)))
    }
}

/// The directory where `huggingface_hub` stores downloads.
fn cache() -> PathBuf {
    let home = std::env::home_dir().unwrap_or_default();
    let of = |variable: &str| {
        let path = PathBuf::from(std::env::var_os(variable).filter(|path| !path.is_empty())?);
        Some(path.strip_prefix("~").map(|rest| home.join(rest)).unwrap_or(path))
    };
    let in_home = || of("HF_HOME").map(|home| home.join("hub"));
    let user = || of("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache")).join("huggingface/hub");
    of("HF_HUB_CACHE").or_else(|| of("HUGGINGFACE_HUB_CACHE")).or_else(in_home).unwrap_or_else(user)
}

/// The files of a revision; without a name, of `main`, or of the only revision.
fn snapshot(repository: &Path, revision: Option<&str>) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    let named = |name: &str| {
        let is_plain = Path::new(name).file_name().is_some_and(|plain| plain == name);
        Some(snapshots.join(name)).filter(|path| is_plain && path.is_dir())
    };
    let wanted = revision.unwrap_or("main");
    let commit = regular_file::read_to_string(&repository.join("refs").join(wanted), LARGEST_REF_BYTES);
    if let Some(path) = commit.ok().and_then(|commit| named(commit.trim())).or_else(|| named(wanted)) {
        return Some(path);
    }
    let mut all = regular_file::list(&snapshots).ok()?.filter_map(Result::ok);
    match (all.next(), all.next(), revision) {
        (Some(only), None, None) => Some(only),
        _ => None,
    }
}

fn without_directory(named: &Path) -> Failure {
    let failure = Failure::unusable(format!("{}: no such directory, expected a model", named.display()));
    if let Some(id) = named.to_str().and_then(|address| address.strip_prefix("https://huggingface.co/")) {
        return failure.hint(format!("nothing is downloaded here: `hf download {id}`, then name it: `{id}`"));
    }
    let Some(name) = named.file_name().map(|name| name.to_string_lossy().into_owned()) else { return failure };
    let parent = named.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directories = regular_file::list(parent).into_iter().flatten().filter_map(Result::ok);
    let alike = directories.filter(|path| path.is_dir()).filter_map(|path| {
        let other = path.file_name()?.to_string_lossy().into_owned();
        let likeness = strsim::jaro_winkler(&name, &other);
        (likeness > 0.8).then_some((likeness, path))
    });
    match alike.max_by(|one, other| one.0.total_cmp(&other.0)) {
        Some((_, path)) => {
            let path = path.strip_prefix(".").unwrap_or(&path);
            failure.hint(format!("did you mean `{}`?", path.display()))
        }
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "{}").unwrap();
    }

    #[test]
    fn a_config_and_a_tokenizer_that_end_texts_with_different_tokens_contradict_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenizer.json");
        let special = |id: u32, name: &str| {
            serde_json::json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        };
        let tokenizer = |vocabulary: serde_json::Value, added: &[serde_json::Value]| {
            let json = serde_json::json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}});
            std::fs::write(&path, json.to_string()).unwrap();
            Tokenizer::load(&path).unwrap()
        };
        let check = |ends: &[u32], tokenizer: &Tokenizer| {
            let model = t5::Config { eos_token_ids: ends.to_vec(), ..t5::Config::default() };
            check_end(directory.path(), &model, tokenizer)
        };
        // As sentencepiece numbers them, where T5's config says 1.
        let vocabulary = serde_json::json!({"<unk>": 0, "<s>": 1, "</s>": 2, "word": 3});
        let usual = tokenizer(vocabulary.clone(), &[special(1, "<s>"), special(2, "</s>")]);
        let failure = check(&[1], &usual).unwrap_err();
        assert!(failure.message.contains("token 1, `<s>`") && failure.message.contains("token 2, `</s>`"), "{failure}");
        assert!(failure.hints[0].contains("\"eos_token_id\": 2"), "{failure}");
        assert!(check(&[2], &usual).is_ok() && check(&[3, 2], &usual).is_ok());
        // The second hint: the tokenizer's own file may name the token that the config means.
        std::fs::write(directory.path().join("tokenizer_config.json"), "{\"eos_token\": \"<s>\"}").unwrap();
        assert!(check(&[1], &Tokenizer::load(&path).unwrap()).is_ok());
        // A usual end in the config, and a token in the tokenizer's files that ends no texts.
        std::fs::write(directory.path().join("tokenizer_config.json"), "{\"eos_token\": \"word\"}").unwrap();
        let failure = check(&[2], &Tokenizer::load(&path).unwrap()).unwrap_err();
        assert!(
            failure.message.contains("token 2, `</s>`") && failure.message.contains("token 3, `word`"),
            "{failure}"
        );
        std::fs::remove_file(directory.path().join("tokenizer_config.json")).unwrap();
        let nameless = tokenizer(serde_json::json!({"<unk>": 0, "[SEP]": 1, "word": 2}), &[special(1, "[SEP]")]);
        assert!(check(&[1], &nameless).is_ok());
        assert!(check(&[2], &nameless).unwrap_err().message.contains("token 2, `word`, which is a piece of a word"));
    }

    #[test]
    fn files_of_other_tokenizers_are_named_with_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let hint = || without_tokenizer(directory.path()).hints.remove(0);
        assert!(hint().contains("published with"));
        touch(&directory.path().join("vocab.txt"));
        assert!(hint().contains("save_pretrained"));
        touch(&directory.path().join("ja.model"));
        assert!(hint().contains("--tokenizer") && hint().contains("ja.model"));
    }

    #[test]
    fn a_run_is_its_model_and_a_directory_that_is_not_there_is_said_to_be_missing() {
        let directory = tempfile::tempdir().unwrap();
        let run = directory.path().join("runs/fine");
        touch(&run.join("model/config.json"));
        assert_eq!(find(&run).unwrap(), run.join("model"));
        assert_eq!(find(&run.join("model")).unwrap(), run.join("model"));
        let failure = find(&directory.path().join("runs/fin")).unwrap_err();
        assert!(failure.message.ends_with("runs/fin: no such directory, expected a model"), "{}", failure.message);
        assert!(failure.hints[0].starts_with("did you mean `") && failure.hints[0].ends_with("runs/fine`?"));
        let open = directory.path().join("runs/open");
        touch(&open.join("checkpoints/step-00000002/config.json"));
        let failure = find(&open).unwrap_err();
        assert!(failure.hints[0].contains("checkpoints/step-00000002"), "{:?}", failure.hints);
        touch(&open.join("checkpoints/step-00000010/config.json"));
        touch(&directory.path().join("trainer/checkpoint-500/config.json"));
        touch(&directory.path().join("trainer/checkpoint-1000/config.json"));
        touch(&directory.path().join("hub/models--g--f/snapshots/abc/config.json"));
        for (named, below) in [
            ("runs/open", "checkpoints/step-00000010"),
            ("trainer", "checkpoint-1000"),
            ("hub", "models--g--f/snapshots/abc"),
        ] {
            let failure = find(&directory.path().join(named)).unwrap_err();
            assert!(failure.hints[0].contains(&format!("{named}/{below}`")), "{:?}", failure.hints);
        }
        let failure = find(Path::new("https://huggingface.co/google/flan-t5-small")).unwrap_err();
        assert!(failure.hints[0].contains("`hf download google/flan-t5-small`"), "{:?}", failure.hints);
        let failure = find(&run.join("model/config.json")).unwrap_err();
        assert!(failure.message.contains("found a file"), "{}", failure.message);
    }

    #[test]
    fn ids_of_the_hub_have_their_form() {
        for text in ["google/flan-t5-small", "t5-small", "a/b@v1.0"] {
            assert!(HubId::parse(Path::new(text)).is_some(), "{text}");
        }
        for text in ["/a/b", "./a", "a/b/c", "../a", "a b", "a/", "a@", "模型"] {
            assert!(HubId::parse(Path::new(text)).is_none(), "{text}");
        }
    }

    #[test]
    fn a_revision_is_the_one_that_the_cache_names_or_the_only_one() {
        let directory = tempfile::tempdir().unwrap();
        let repository = directory.path().join("models--a--b");
        for commit in ["111", "222"] {
            touch(&repository.join("snapshots").join(commit).join("config.json"));
        }
        let of = |revision: Option<&str>| {
            snapshot(&repository, revision).map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        };
        assert_eq!(of(None), None);
        touch(&repository.join("refs/main"));
        std::fs::write(repository.join("refs/main"), "222\n").unwrap();
        assert_eq!(of(None).as_deref(), Some("222"));
        assert_eq!(of(Some("111")).as_deref(), Some("111"));
        assert_eq!(of(Some("v2")), None);
        std::fs::write(repository.join("refs/main"), "../../elsewhere").unwrap();
        assert_eq!(of(None), None);
        let failure = find(&repository).unwrap_err();
        assert!(failure.hints[0].contains("snapshots/111`") && failure.hints[0].contains("snapshots/222`"));
        std::fs::remove_dir_all(repository.join("snapshots/111")).unwrap();
        assert_eq!(find(&repository).unwrap(), repository.join("snapshots/222"));
    }
}
