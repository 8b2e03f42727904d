//! `train_low_mem train`: the loop, its setup and its end.
//!
//! Start reading at [`run_steps`]: it is the whole of training, in order. Between two steps the control plane decides (plan, limits,
//! evaluation, checkpoint, stop); within a step there is only data. The verbs are implemented in [`crate::run::session`].

use std::time::Instant;

use trainer::Batch;
use trainer::checkpoint::{export_checkpoint, export_model};

use crate::cli::TrainArgs;
use crate::data::row_data;
use crate::data::splits::Purpose;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::disk::FileUse;
use crate::files::run_dir::RunDir;
use crate::files::sentence_transformers::Modules;
use crate::machine::ledger::Ledger;
use crate::machine::processes::{OptionalGroup, Processes};
use crate::run::resume::{checkpoint_to_resume, is_finished};
use crate::run::session::{Parts, Session, StepTimes, copies_so_far};
use crate::run::{faster_device, options, setup, summary, target_machine};
use crate::screen::output;
use crate::screen::stop::{self, Stop};

/// Runs `train` with its flags.
pub fn train(flags: &TrainArgs) -> Outcome<()> {
    output::start();
    let processes = Processes::join()?;
    let ended = train_together(flags, OptionalGroup(processes.group()));
    processes.leave(ended)
}

fn train_together(flags: &TrainArgs, together: OptionalGroup<'_>) -> Outcome<()> {
    let stop = Stop::on_signals()?;
    let config = setup::read_config(flags)?;
    if flags.dry_run && together.0.is_none() {
        return crate::run::dry_run::dry_run(flags, config, stop);
    }
    if flags.dry_run {
        return Err(Failure::usage("`--dry-run` tries a run of one process").hint("start it without the launcher"));
    }
    // This failure is the same in all processes, so it is reported before any of them makes a file.
    together.parallel(&config)?;
    if flags.wait && together.0.is_some() {
        return Err(Failure::usage("`--wait` is for runs of one process").hint("start it without the launcher"));
    }
    let keep_training = flags.keep_training == Some(true);
    if flags.resume_from.is_some() && !keep_training {
        return Err(Failure::usage("`--resume-from` names a checkpoint of a run that goes on")
            .hint("add `--keep-training`, and `--output` with the run's directory"));
    }
    let (config, mut run, mut opened) = together.main_process_first(|| {
        let there = RunDir::open_read_only(&config.run.output_dir);
        match (together.is_first(), keep_training) {
            (true, true) => there.refuse_to_resume_nothing()?,
            (true, false) => there.refuse_to_overwrite()?,
            (false, _) => {}
        }
        let mut run = match together.is_first() {
            true => RunDir::lock(&config.run.output_dir)?,
            false => RunDir::open_read_only(&config.run.output_dir),
        };
        if !keep_training && together.is_first() {
            // Checked again, because from here on no other run can interfere.
            run.refuse_to_overwrite()?;
        }
        let config = setup::place_embedded_files(config.clone(), &mut run)?;
        let (resumes, say) = (keep_training, row_data::print_line);
        let wanted = row_data::Wanted { purpose: Purpose::Training, resumes, to_plan: false, stop: &stop, say };
        let opened = setup::open(&config, &mut run, wanted)?;
        Ok((config, run, opened))
    })?;
    let resumed = match keep_training {
        true => checkpoint_to_resume(&config, &opened, &run, flags.resume_from)?,
        false => None,
    };
    let (found, sources) = resumed.unzip();
    if is_finished(&config, &opened, &run, found.as_ref())? {
        // Removes leftovers of the finished run. A failure does not matter.
        let _ = run.own();
        return Ok(());
    }
    let processes = together.0.map_or(1, collective::Group::size);
    let config = faster_device::choose(config, &mut opened, flags, found.as_ref(), processes)?;
    let machine = target_machine::machine(flags, &config, Some(&opened))?;
    let group = together.0.cloned();
    let ledger = flags.wait.then(Ledger::of_this_user).transpose()?;
    let goes_back = flags.resume_from.is_some();
    let mut session =
        Session::start(Parts { config, opened, run, stop, found, sources, goes_back, machine, group, ledger })?;
    let ended = run_steps(&mut session).and_then(|ended| match ended {
        Ended::Done => finish(&mut session),
        Ended::Interrupted => interrupted(&mut session),
    });
    let ended = ended.map_err(|failure| match failure.exit {
        Exit::Diverged => session.with_way_back(failure),
        _ => failure,
    });
    session.report.finish();
    if let Err(failure) = &ended
        && failure.exit != Exit::Interrupted
    {
        let reason = if failure.exit == Exit::Diverged { "diverged" } else { "failed" };
        // The failure is reported; an error in recording it adds nothing.
        let _ = session.record_end(reason);
    }
    let Session { loader, .. } = session;
    if ended.is_err() {
        // The loader's threads may be reading a row or waiting for a disk. The process does not wait for them.
        std::mem::forget(loader);
    }
    ended
}

/// The end of the loop.
enum Ended {
    Done,
    Interrupted,
}

/// The loop: plan, feed, step, record, evaluate, save, stop.
fn run_steps(run: &mut Session) -> Outcome<Ended> {
    run.evaluate_if_due()?;
    run.report.begin();
    while !run.is_over() && !run.should_stop() {
        run.replan()?; //                                                control plane: between steps
        if run.should_stop() {
            break;
        }
        run.feed();
        let asked = Instant::now();
        let Some(batch) = run.loader.next_batch()? else { break }; //    data plane: one optimizer batch
        run.free_tokenizer_blocks();
        let (began, files, copies) = (Instant::now(), FileUse::so_far(), copies_so_far()?);
        let (sources, targets, shards) = batch.samples();
        let samples = Batch { sources: &sources, targets: &targets };
        let stop = run.stop.clone();
        let outcome = loop {
            let plan = run.step_plan();
            match run
                .trainer
                .step_of_labels((&samples, options::row_labels(&batch)), &shards, &plan, &|| stop.requested())
            {
                Err(error) if run.recover_from_oom(&error)? => {} //               the same batch, with a smaller plan
                outcome => break outcome?,
            }
        };
        let (data_wait, step) = (began - asked, began.elapsed());
        let took = StepTimes { data_wait, step, files: files.until_now(), copies: copies_so_far()?.since(copies) };
        let batch = run.whole(batch)?;
        if !run.record(outcome, &batch, &took)? {
            break;
        }
        run.check_prediction(&memory_policy::TRAINING)?;
        run.clear_cache()?;
        run.evaluate_if_due()?;
        run.save_if_due()?;
        run.note_epoch(&batch)?;
    }
    // Before the first step of this process, its checkpoint, if any, already has everything.
    if run.has_made_steps() || run.is_over() {
        run.save()?;
    }
    Ok(if run.is_over() && run.is_evaluated() { Ended::Done } else { Ended::Interrupted })
}

/// After the last step: puts the model in its place, and reports the results.
fn finish(run: &mut Session) -> Outcome<()> {
    run.stop.note_finishing();
    run.run.check()?;
    if !run.writes() {
        return Ok(());
    }
    let best = run.best_checkpoint()?;
    if best.is_none() {
        run.refuse_diverged_model()?;
    }
    let from = match &best {
        Some(best) => {
            export_checkpoint(&best.path, &run.run.model(&run.opened.model))?;
            best.path.clone()
        }
        // The other processes have shares of the model, and are done.
        None if run.trainer.model().has_remote_weights() => {
            export_checkpoint(&run.checkpoint_path(), &run.run.model(&run.opened.model))?;
            run.checkpoint_path()
        }
        // The model in memory is the last saved one. It is exported even if that checkpoint cannot be read.
        None => {
            export_model(run.trainer.model(), &run.run.model(&run.opened.model), Some(run.tokenizer_files()))?;
            run.checkpoint_path()
        }
    };
    if let (Some(of), None) = (&run.config.embedding, &run.opened.model.lora) {
        let max_tokens = Some(run.config.data.max_source_tokens);
        let modules = Modules { pooling: of.pooling, normalizes: of.normalizes, max_tokens, dense: None };
        modules.write(&run.run.model(&run.opened.model), run.opened.model.vector_width())?;
    }
    run.keep_evaluation(best.as_ref())?;
    run.run.finish(run.trainer.step_count(), run.history())?;
    let early = run.ends_early().filter(|_| !run.trainer.is_done());
    if let Some(why) = &early {
        run.report.line(&format!("stopped early at step {}: {why}", run.trainer.step_count()));
    }
    run.record_end(if early.is_some() { "early_stopping" } else { "done" })?;
    run.note_memory("at the end")?;
    run.report.last_line(&summary::summary(run, &from));
    Ok(())
}

/// After a signal: the steps are saved, and the exit code says that the run can be resumed.
fn interrupted(run: &mut Session) -> Outcome<()> {
    run.record_end("interrupted")?;
    let (step, path) = (run.trainer.step_count(), run.checkpoint_path());
    if !run.has_made_steps() && !run.trainer.is_done() {
        return Err(stop::nothing_to_save(Some(step)));
    }
    Err(Failure::new(Exit::Interrupted, format!("interrupted at step {step}; saved {}", path.display()))
        .hint("to resume, bit for bit, run the same command with `--keep-training`"))
}
