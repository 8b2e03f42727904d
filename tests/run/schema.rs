//! `docs/metrics.schema.json`, and a check of events against it: JSON Schema 2020-12, as far as that file uses it.

use std::path::Path;
use std::sync::LazyLock;

use serde_json::Value;

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let path = super::repository().join("docs/metrics.schema.json");
    serde_json::from_slice(&std::fs::read(path).expect("the schema")).expect("JSON")
});

/// Checks every event of every run below a directory. Lines that a test damaged are no events.
pub fn check_runs_below(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() && !path.is_symlink() {
            check_runs_below(&path);
        } else if path.file_name().is_some_and(|name| name == "metrics.jsonl") && path.is_file() {
            let text = String::from_utf8_lossy(&std::fs::read(&path).expect("a file")).into_owned();
            let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            for event in events.filter(|event| event["time"].is_string()) {
                let wrong = wrong_with(&event);
                assert!(wrong.is_empty(), "{}: docs/metrics.schema.json: {wrong:#?}\n{event}", path.display());
            }
        }
    }
}

/// The differences between an event and its description, one a line.
pub fn wrong_with(event: &Value) -> Vec<String> {
    let name = event["event"].as_str().unwrap_or_default();
    let described = SCHEMA["oneOf"].as_array().expect("a list").iter().find(|one| {
        let definition = definition(&one["$ref"]);
        definition["properties"]["event"]["const"] == name
    });
    described.map_or_else(|| vec![format!("no event `{name}`")], |described| compare(described, event, name))
}

/// The names of the events, in the order of the file.
pub fn names() -> Vec<&'static str> {
    let events = SCHEMA["oneOf"].as_array().expect("a list").iter();
    events.filter_map(|one| definition(&one["$ref"])["properties"]["event"]["const"].as_str()).collect()
}

fn definition(reference: &Value) -> &'static Value {
    let pointer = reference.as_str().and_then(|text| text.strip_prefix('#')).expect("a reference within the file");
    SCHEMA.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}"))
}

fn compare(schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (keyword, expected) in schema.as_object().expect("a schema is an object") {
        match keyword.as_str() {
            "description" | "format" => {}
            "$ref" => wrong.extend(compare(definition(expected), value, at)),
            "anyOf" => {
                let ways = expected.as_array().expect("a list").iter().map(|way| compare(way, value, at));
                // The nearest one says best what is wrong.
                wrong.extend(ways.min_by_key(Vec::len).unwrap_or_default());
            }
            "const" if value != expected => wrong.push(format!("{at}: expected {expected}, got {value}")),
            "enum" if !expected.as_array().expect("a list").contains(value) => {
                wrong.push(format!("{at}: expected one of {expected}, got {value}"));
            }
            "type" if !has_type(expected, value) => wrong.push(format!("{at}: expected {expected}, got {value}")),
            "minimum" if value.is_number() && value.as_f64() < expected.as_f64() => {
                wrong.push(format!("{at}: expected at least {expected}, got {value}"));
            }
            "const" | "enum" | "type" | "minimum" => {}
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                wrong.extend(items.flat_map(|(number, item)| compare(expected, item, &format!("{at}[{number}]"))));
            }
            "required" => {
                let names = expected.as_array().expect("a list").iter().filter_map(Value::as_str);
                let is_missing = |name: &&str| value.is_object() && value.get(*name).is_none();
                wrong.extend(names.filter(is_missing).map(|name| format!("{at}: no `{name}`")));
            }
            "properties" => {
                let described = expected.as_object().expect("an object").iter();
                let found = described.filter_map(|(name, schema)| Some((name, schema, value.get(name)?)));
                wrong.extend(found.flat_map(|(name, schema, value)| compare(schema, value, &format!("{at}.{name}"))));
            }
            "additionalProperties" => {
                let others = value.as_object().into_iter().flatten();
                let others = others.filter(|(name, _)| schema["properties"].get(name).is_none());
                wrong.extend(others.flat_map(|(name, value)| match expected {
                    Value::Bool(false) => vec![format!("{at}: `{name}` is not described")],
                    schema => compare(schema, value, &format!("{at}.{name}")),
                }));
            }
            other => panic!("docs/metrics.schema.json: the check does not know `{other}`"),
        }
    }
    wrong
}

fn has_type(expected: &Value, value: &Value) -> bool {
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        other => panic!("no type `{other}`"),
    };
    match expected {
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is),
        name => name.as_str().is_some_and(is),
    }
}
