//! `train_low_mem plan`: the memory and the levers of a run, without allocating any of it.

use run_plan::answer;
use serde_json::{Value, json};

use crate::cli::PlanArgs;
use crate::commands::report::write_page;
use crate::config::Config;
use crate::config::unused::Circumstances;
use crate::data::splits::Purpose;
use crate::data::{row_data, unpacked};
use crate::failure::Outcome;
use crate::files::assets;
use crate::files::run_dir::RunDir;
use crate::run::faster_device;
use crate::run::planned_run::PlannedRun;
use crate::run::{setup, target_machine};
use crate::screen::report;
use crate::screen::stop::Stop;

/// Prints the bill and the plan.
pub fn plan(flags: &PlanArgs) -> Outcome<()> {
    let config = setup::read_config_to_plan(&flags.train)?;
    let title = title(&config);
    let here = Circumstances {
        is_on_card: config.run.device != "cpu",
        processes: flags.processes.into(),
        objective: config.data.objective,
        has_validation: config.data.may_have_validation(),
    };
    let unused = config.unused(here, assets::EMBEDDED);
    let (run, why_device) = planned(config, flags)?;
    if let Some(why) = &why_device {
        report::note(why);
    }
    unused.iter().for_each(|warning| report::warn(warning));
    let PlannedRun { planned, pace, total_steps } = &run;
    let json = || -> Value {
        let mut json = answer::json_of(&planned.plan, pace, *total_steps);
        if let Some(why) = &why_device {
            json["device_reason"] = json!(why);
        }
        json
    };
    if let Some(path) = &flags.html {
        write_page(path, &run_report::page::of_plan(&json(), &title))?;
    }
    report::result(&match flags.json {
        true => format!("{:#}\n", json()),
        false => answer::text_of(planned, pace, flags.explain),
    })
}

/// The model and its device, for the title of a page.
fn title(config: &Config) -> String {
    let model = config.model.init_from.as_ref().map(|directory| directory.display().to_string());
    let model = model.or_else(|| config.values.text("model.config")).unwrap_or_else(|| "a model".to_owned());
    format!("{model}, {} samples a step", config.train.batch_size)
}

/// The plan of the config's run. If no device was named, also the reason for its device.
fn planned(config: Config, flags: &PlanArgs) -> Outcome<(PlannedRun, Option<String>)> {
    let (wanted, processes) = (answer::wanted(flags.explain), flags.processes.into());
    if config.data.train.is_empty() {
        let machine = target_machine::machine(&flags.train, &config, None)?;
        let run = PlannedRun::new(&config, None, machine.as_ref(), wanted, processes)?;
        return Ok((run, faster_device::assumed(&config)));
    }
    let scratch = unpacked::scratch()?;
    let mut run = RunDir::open_read_only(scratch.path());
    let config = setup::place_embedded_files(config, &mut run)?;
    let to_open = row_data::Wanted {
        purpose: Purpose::Training,
        resumes: false,
        to_plan: true,
        stop: &Stop::default(),
        say: report::note,
    };
    let mut opened = setup::open(&config, &mut run, to_open)?;
    opened.reading.texts_in_words().inspect(|words| report::note(words));
    let config = faster_device::choose(config, &mut opened, &flags.train, None, processes)?;
    let machine = target_machine::machine(&flags.train, &config, Some(&opened))?;
    let run = PlannedRun::new(&config, Some(&opened), machine.as_ref(), wanted, processes)?;
    Ok((run, opened.why_device))
}
