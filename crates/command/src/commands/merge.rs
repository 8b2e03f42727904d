//! `train_low_mem merge`: merges a LoRA adapter into the weights of its model.

use std::path::{Path, PathBuf};
use std::time::Instant;

use memory_policy::{Bytes, Probe, SystemProbe};
use serde_json::json;
use t5::peft::AdapterDirectory;
use trainer::checkpoint::export_merged;

use crate::cli::export_flags::MergeArgs;
use crate::failure::{Failure, Outcome};
use crate::files::outputs;
use crate::files::sentence_transformers::Modules;
use crate::model::{base_digests, model_directory};
use crate::screen::report;

/// Merges an adapter.
pub fn merge(flags: &MergeArgs) -> Outcome<()> {
    let began = Instant::now();
    let adapter = AdapterDirectory::find(&flags.adapter)?;
    let base = base(flags, &adapter)?;
    check_output(&flags.output, flags.result.force, &[&base, &adapter])?;
    outputs::make_directory_of(&flags.output)?;
    let merged = export_merged(&base, &adapter, flags.dtype.map(Into::into), &flags.output)?;
    if let Some(modules) = Modules::of_run([flags.adapter.as_path(), &adapter].into_iter()) {
        let config = t5::Config::from_file(&flags.output.join("config.json"))?;
        modules.write(&flags.output, config.vector_width())?;
    }
    let peak = SystemProbe::new().snapshot()?.peak_rss;
    if merged.parts_head {
        report::warn(
            "the head was tied to the embedding and has weights of its own now; transformers 4 would not scale its logits",
        );
    }
    let (output, seconds) = (flags.output.display().to_string(), began.elapsed().as_secs_f64());
    if flags.result.json {
        let json = json!({
            "output": output,
            "model": base.display().to_string(),
            "linears": merged.linears,
            "replaced": merged.replaced,
            "bytes": merged.bytes,
            "seconds": seconds,
            "peak_rss_bytes": peak.0,
        });
        return report::result(&format!("{json}\n"));
    }
    let (linears, bytes) = (merged.linears, Bytes(merged.bytes));
    let replaced = match merged.replaced {
        0 => String::new(),
        count => format!(" and {count} parameters replaced"),
    };
    report::result(&format!("{output}: {bytes}, {linears} linear layers merged{replaced}\n"))?;
    report::note(&format!("{seconds:.1} s, peak {peak}"));
    Ok(())
}

/// The model below the adapter.
fn base(flags: &MergeArgs, adapter: &Path) -> Outcome<PathBuf> {
    if let Some(model) = &flags.model {
        return model_directory::find(model);
    }
    let base = model_directory::base_of(adapter)?;
    base_digests::warn_if_changed(&base, adapter);
    Ok(base)
}

/// Allows an existing output to be replaced only on request, and only if it is a model and none of the inputs.
pub(super) fn check_output(output: &Path, force: bool, inputs: &[&Path]) -> Outcome<()> {
    if !is_to_be_replaced(output, force, inputs)? {
        return Ok(());
    }
    let is_model = output.join("config.json").is_file() && output.join("model.safetensors").is_file();
    let has_more = ["checkpoints", "model", "trainer_state.json"].iter().any(|name| output.join(name).exists());
    if !is_model || has_more {
        let shown = output.display();
        return Err(Failure::usage(format!(
            "{shown} is not a directory of only a model; `--force` replaces only those"
        ))
        .hint("remove it, or name another directory"));
    }
    Ok(())
}

/// Whether the output exists. It is an error if the output contains an input, or if replacing it was not requested.
pub(super) fn is_to_be_replaced(output: &Path, force: bool, inputs: &[&Path]) -> Outcome<bool> {
    if !output.exists() {
        return Ok(false);
    }
    let shown = output.display();
    let is_same = |input: &&Path| {
        regular_file::real_path(output)
            .is_ok_and(|output| regular_file::real_path(input).is_ok_and(|input| input.starts_with(output)))
    };
    if inputs.iter().any(is_same) {
        return Err(Failure::usage(format!("--output {shown} has the model or the adapter in it"))
            .hint("name another directory"));
    }
    if !force {
        return Err(Failure::usage(format!("{shown} already exists")).hint("`--force` replaces it"));
    }
    Ok(true)
}
