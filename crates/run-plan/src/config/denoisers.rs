//! `[[data.denoisers]]`, and the objectives that name some: ways to pretrain on one text, of which each row draws one.

use toml::Value;

use super::{Data, Denoiser, Noise, Values, keys};
use crate::failure::{Failure, Outcome};

const KEY: &str = "data.denoisers";

/// The denoisers of UL2 (arXiv 2205.05131, table 1), drawn as FAT5 drew its own: regular, sequential and extreme ones a third each.
fn ul2() -> Vec<Denoiser> {
    let spans = |mean_span_tokens, noise_density| Noise::SpanCorruption { noise_density, mean_span_tokens };
    let denoiser = |noise, prefix: &str, weight| Denoiser { noise, prefix: prefix.to_owned(), weight };
    vec![
        denoiser(spans(3.0, 0.15), "[R] ", 0.165),
        denoiser(spans(8.0, 0.15), "[R] ", 0.165),
        denoiser(Noise::PrefixLm { noise_density: Some(0.25) }, "[S] ", 0.34),
        denoiser(spans(3.0, 0.5), "[X] ", 0.0825),
        denoiser(spans(8.0, 0.5), "[X] ", 0.0825),
        denoiser(spans(64.0, 0.15), "[X] ", 0.0825),
        denoiser(spans(64.0, 0.5), "[X] ", 0.0825),
    ]
}

/// The settings of rows with the denoisers in these values.
pub fn with_denoisers(data: Data, values: &Values) -> Outcome<Data> {
    let (tables, objective) = (values.tables(KEY), values.text("data.objective"));
    let at = |key: &str| format!("{}: `{key}`", values.origin(key));
    if tables.is_empty() {
        let denoisers = match objective.as_deref() {
            Some("ul2") => ul2(),
            Some("prefix-lm") => {
                vec![Denoiser { noise: Noise::PrefixLm { noise_density: None }, prefix: String::new(), weight: 1.0 }]
            }
            _ => Vec::new(),
        };
        return Ok(Data { denoisers, ..data });
    }
    if let Some(objective) = objective {
        return Err(Failure::usage(format!(
            "{} is \"{objective}\" beside `{KEY}` ({})",
            at("data.objective"),
            values.origin(KEY)
        ))
        .hint("leave `data.objective` out: the denoisers are the objective"));
    }
    let denoiser = |(index, table)| {
        from_table(table).map_err(|problem| {
            Failure::usage(format!("{}: denoiser {}: {problem}", at(KEY), index + 1))
                .hint("for example `{ mean_span_tokens = 3, noise_density = 0.15, prefix = \"[R] \", weight = 1 }`")
        })
    };
    let denoisers = tables.iter().enumerate().map(denoiser).collect::<Outcome<Vec<_>>>()?;
    if denoisers.iter().all(|denoiser| denoiser.weight == 0.0) {
        return Err(Failure::usage(format!("{}: the weights of all denoisers are 0: none would be drawn", at(KEY)))
            .hint("leave `weight` out, or give one denoiser a number above 0"));
    }
    Ok(Data { denoisers, ..data })
}

/// One denoiser, or the problem in words.
fn from_table(table: &toml::Table) -> Result<Denoiser, String> {
    keys::check_fields(KEY, table)?;
    let number = |field: &str, least: f64, most: f64| {
        let number = match table.get(field) {
            None => return Ok(None),
            Some(Value::Float(number)) => *number,
            #[expect(clippy::cast_precision_loss, reason = "a setting, not a count")]
            Some(Value::Integer(number)) => *number as f64,
            Some(other) => return Err(format!("`{field}`: expected a number, got {other}")),
        };
        match (least..=most).contains(&number) {
            true => Ok(Some(number)),
            false => Err(format!("`{field}`: expected a number from {least} to {most}, got {number}")),
        }
    };
    let text = |field: &str| match table.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(other) => Err(format!("`{field}`: expected a string, got {other}")),
    };
    let noise_density = number("noise_density", 0.001, 0.999)?;
    let mean_span_tokens = number("mean_span_tokens", 1.0, 1000.0)?;
    let noise = match (text("objective")?, mean_span_tokens) {
        (None | Some("span-corruption"), mean) => Noise::SpanCorruption {
            noise_density: noise_density.unwrap_or(0.15),
            mean_span_tokens: mean.unwrap_or(3.0),
        },
        (Some("prefix-lm"), None) => Noise::PrefixLm { noise_density },
        (Some("prefix-lm"), Some(_)) => return Err("`mean_span_tokens`: a prefix-lm has no spans".to_owned()),
        (Some(other), _) => {
            return Err(format!("`objective`: expected \"span-corruption\" or \"prefix-lm\", got \"{other}\""));
        }
    };
    let weight = number("weight", 0.0, 1e9)?.unwrap_or(1.0);
    Ok(Denoiser { noise, prefix: text("prefix")?.unwrap_or_default().to_owned(), weight })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denoisers(text: &str) -> Outcome<Vec<Denoiser>> {
        let mut values = Values::defaults();
        values.apply_file("my.toml", text)?;
        Ok(with_denoisers(Data::from_values(&values), &values)?.denoisers)
    }

    #[test]
    fn a_list_in_a_file_names_the_denoisers_of_ul2() {
        let list: String = ul2()
            .iter()
            .map(|denoiser| {
                let of = match denoiser.noise {
                    Noise::SpanCorruption { noise_density, mean_span_tokens } => {
                        format!("noise_density = {noise_density}\nmean_span_tokens = {mean_span_tokens}")
                    }
                    Noise::PrefixLm { noise_density } => {
                        format!("objective = \"prefix-lm\"\nnoise_density = {}", noise_density.unwrap())
                    }
                };
                format!("[[data.denoisers]]\n{of}\nprefix = \"{}\"\nweight = {}\n", denoiser.prefix, denoiser.weight)
            })
            .collect();
        assert_eq!(denoisers(&list).unwrap(), ul2());
        assert_eq!(denoisers("[data]\nobjective = \"ul2\"\n").unwrap(), ul2());
        assert!((ul2().iter().map(|denoiser| denoiser.weight).sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(denoisers("").unwrap().is_empty());
    }

    #[test]
    fn a_wrong_denoiser_says_which_one_and_what_was_expected() {
        for (fields, expected) in [
            ("mean_spans = 3", "unknown field `mean_spans`, expected `mean_span_tokens`"),
            ("noise_density = 1.5", "`noise_density`: expected a number from 0.001 to 0.999, got 1.5"),
            ("mean_span_tokens = \"x\"", "`mean_span_tokens`: expected a number, got"),
            ("objective = \"ul2\"", "`objective`: expected \"span-corruption\" or \"prefix-lm\", got \"ul2\""),
            ("objective = \"prefix-lm\"\nmean_span_tokens = 3", "has no spans"),
            ("weight = -1", "`weight`: expected a number from 0"),
            ("prefix = 3", "`prefix`: expected a string, got 3"),
        ] {
            let failure = denoisers(&format!("[[data.denoisers]]\n{fields}\n")).expect_err("a wrong denoiser");
            assert!(failure.message.contains("my.toml:1: `data.denoisers`: denoiser 1: "), "{failure}");
            assert!(failure.message.contains(expected), "{fields}: {failure}");
        }
        let failure = denoisers("[[data.denoisers]]\nweight = 0\n").expect_err("none");
        assert!(failure.message.contains("none would be drawn"), "{failure}");
        let both = "[data]\nobjective = \"ul2\"\n[[data.denoisers]]\nprefix = \"x\"\n";
        assert!(denoisers(both).expect_err("both").message.contains("beside `data.denoisers`"));
    }
}
