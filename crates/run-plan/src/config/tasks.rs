//! `[[data.tasks]]`: tasks whose rows are mixed, and how many samples each gives.

use toml::Value;

use super::{Columns, Data, DataTask, Mixing, Tasks, Values, keys};
use crate::failure::{Failure, Outcome};

const KEY: &str = "data.tasks";

/// The settings of rows with the tasks in these values.
pub fn with_tasks(data: Data, values: &Values) -> Outcome<Data> {
    let tables = values.tables(KEY);
    if tables.is_empty() {
        return Ok(data);
    }
    let at = |key: &str| format!("{}: `{key}`", values.origin(key));
    let is_set = |key: &str| {
        values.list(key).is_some_and(|list| !list.is_empty())
            || values.number(key).is_some_and(|number| number > 0.0)
            || values.text(key).is_some_and(|text| !text.is_empty())
    };
    for key in ["data.train", "data.validation", "data.validation_split", "data.text_column"] {
        if is_set(key) {
            return Err(Failure::usage(format!("{} is set beside `{KEY}` ({})", at(key), values.origin(KEY)))
                .hint("each task names its own files and columns; leave the other key out"));
        }
    }
    if data.chosen.is_text || data.chosen.preference.is_some() {
        return Err(Failure::usage(format!("{}: tasks have pairs of a source and a target", at(KEY)))
            .hint("leave out `preference.loss`, `data.objective` and `data.denoisers`, or train one list of files"));
    }
    let mut tasks: Vec<DataTask> = Vec::new();
    for (index, table) in tables.iter().enumerate() {
        let task = from_table(table, &data.chosen)
            .and_then(|task| match tasks.iter().any(|other| other.name == task.name) {
                true => Err(format!("`name`: another task is called `{}`, too", task.name)),
                false => Ok(task),
            })
            .map_err(|problem| {
                Failure::usage(format!("{}: task {}: {problem}", at(KEY), index + 1)).hint(
                    "for example `{ name = \"en-de\", train = \"en-de.jsonl\", source_prefix = \"translate: \" }`",
                )
            })?;
        tasks.push(task);
    }
    if tasks.iter().all(|task| task.weight == 0.0) {
        return Err(Failure::usage(format!("{}: the weights of all tasks are 0: no row would be trained on", at(KEY)))
            .hint("leave `weight` out, or give one task a number above 0"));
    }
    let temperature = values.required_number("data.mixing_temperature");
    let mixing = match values.text("data.mixing").as_deref() {
        Some("equal") => Mixing::Equal,
        Some("temperature") => Mixing::Temperature(temperature),
        _ => Mixing::Proportional,
    };
    let limit = values.integer("data.mixing_limit");
    let all = |of: fn(&DataTask) -> &Vec<String>| tasks.iter().flat_map(of).cloned().collect();
    let (train, validation) = (all(|task| &task.train), all(|task| &task.validation));
    Ok(Data { train, validation, tasks: Tasks { tasks, mixing: Some(mixing), limit }, ..data })
}

/// One task, or the problem in words.
fn from_table(table: &toml::Table, shared: &Columns) -> Result<DataTask, String> {
    keys::check_fields(KEY, table)?;
    let text = |field: &str| match table.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(format!("`{field}`: expected a string, got {other}")),
    };
    let files = |field: &str| match table.get(field) {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(Value::Array(items)) => {
            let items: Option<Vec<String>> = items.iter().map(|item| item.as_str().map(str::to_owned)).collect();
            items.ok_or(format!("`{field}`: expected paths or globs"))
        }
        Some(other) => Err(format!("`{field}`: expected paths or globs, got {other}")),
    };
    let weight = match table.get("weight") {
        None => 1.0,
        Some(Value::Float(number)) if number.is_finite() && *number >= 0.0 => *number,
        #[expect(clippy::cast_precision_loss, reason = "a setting, not a count")]
        Some(Value::Integer(number)) if *number >= 0 => *number as f64,
        Some(other) => return Err(format!("`weight`: expected a number of at least 0, got {other}")),
    };
    let name = text("name")?.filter(|name| !name.trim().is_empty()).ok_or("`name`: expected a name for the task")?;
    let train = files("train")?;
    if train.is_empty() {
        return Err(format!("`train`: task `{name}` names no files"));
    }
    let column = |field: &str, shared: &Option<String>| Ok::<_, String>(text(field)?.or_else(|| shared.clone()));
    let columns = Columns {
        prompt: column("prompt_column", &shared.prompt)?,
        response: column("response_column", &shared.response)?,
        source: column("source_template", &shared.source)?,
        target: column("target_template", &shared.target)?,
        source_lang: column("source_lang", &shared.source_lang)?,
        target_lang: column("target_lang", &shared.target_lang)?,
        ..Columns::default()
    };
    let (validation, source_prefix) = (files("validation")?, text("source_prefix")?);
    Ok(DataTask { name, train, validation, source_prefix, weight, columns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn tasks(text: &str) -> Outcome<Data> {
        let mut values = Values::defaults();
        values.apply_file("my.toml", &format!("[model]\nconfig = \"t5-small\"\n{text}")).unwrap();
        Ok(Config::resolve(values)?.data)
    }

    #[test]
    fn a_task_has_its_own_files_columns_prefix_and_weight() {
        let data = tasks(
            "[data]\nprompt_column = \"q\"\nmixing = \"temperature\"\nmixing_temperature = 3.0\nmixing_limit = 100\n\
             [[data.tasks]]\nname = \"a\"\ntrain = [\"a.csv\", \"b.csv\"]\nvalidation = \"v.csv\"\nresponse_column = \"r\"\n\
             [[data.tasks]]\nname = \"b\"\ntrain = \"c.csv\"\nsource_prefix = \"b: \"\nweight = 2\nprompt_column = \"p\"\n",
        )
        .unwrap();
        assert_eq!(
            (data.train, data.validation),
            (["a.csv", "b.csv", "c.csv"].map(str::to_owned).to_vec(), vec!["v.csv".to_owned()])
        );
        let Tasks { tasks, mixing, limit } = data.tasks;
        assert_eq!((mixing, limit), (Some(Mixing::Temperature(3.0)), Some(100)));
        let columns = |task: &DataTask| (task.columns.prompt.clone(), task.columns.response.clone());
        assert_eq!(columns(&tasks[0]), (Some("q".into()), Some("r".into())));
        assert_eq!(columns(&tasks[1]), (Some("p".into()), None));
        assert_eq!((tasks[1].source_prefix.as_deref(), tasks[1].weight), (Some("b: "), 2.0));
    }

    #[test]
    fn a_wrong_task_is_an_error_that_names_it() {
        for (fields, expected) in [
            ("train = \"a\"\n", "task 1: `name`"),
            ("name = \"a\"\n", "task 1: `train`: task `a` names no files"),
            ("name = \"a\"\ntrain = 3\n", "`train`: expected paths"),
            ("name = \"a\"\ntrain = \"a\"\nwieght = 1\n", "unknown field `wieght`, expected `weight`"),
            ("name = \"a\"\ntrain = \"a\"\nweight = -1\n", "`weight`: expected a number of at least 0"),
            ("name = \"a\"\ntrain = \"a\"\nweight = 0\n", "the weights of all tasks are 0"),
            (
                "name = \"a\"\ntrain = \"a\"\n[[data.tasks]]\nname = \"a\"\ntrain = \"b\"\n",
                "another task is called `a`",
            ),
            ("name = \"a\"\ntrain = \"a\"\n[data]\ntrain = \"b\"\n", "`data.train` is set beside `data.tasks`"),
        ] {
            let (table, rest) = fields.split_once("[data]").unwrap_or((fields, ""));
            let failure = tasks(&format!("[data]\n{rest}\n[[data.tasks]]\n{table}")).expect_err(fields);
            assert!(failure.message.contains(expected), "{failure}");
        }
    }
}
