//! Values of arrow arrays as cells.
//!
//! A number has the digits that JSON would have, NaN is null as in pandas, and a list of texts is one text with line
//! breaks between them.

use std::borrow::Cow;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Decimal128Type, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, TimeUnit};

use crate::chat::{MAX_TURNS, Turn, role, too_many};
use crate::classes::{Class, class};
use crate::column::Column;
use crate::error::{LIST, NUMBERS, OBJECT, RowFault};
use crate::row::{Cell, LIST_LEVELS, one_text};

/// The value of a row.
pub(crate) fn cell(array: &dyn Array, row: usize, column: &Column) -> Result<Cell, RowFault> {
    if array.is_null(row) {
        return Ok(Cell::Null);
    }
    if let Some(bytes) = bytes(array, row) {
        return text(bytes).map(|text| Cell::Text(text.to_owned()));
    }
    if column.is_chat
        && let Some(turns) = turns(array, row, &column.name)
    {
        return turns.map(Cell::Turns);
    }
    Ok(match array.data_type() {
        _ if is_list(array) && column.is_list => Cell::Text(json_list(array, row, column)?),
        _ if is_list(array) => {
            let turns = || turns(array, row, &column.name)?.ok().map(Cell::Turns);
            let elements = elements(array, row);
            let other = || Cell::Other(if elements.data_type().is_numeric() { NUMBERS } else { LIST });
            text_of_list(&elements, column, LIST_LEVELS)?.or_else(turns).unwrap_or_else(other)
        }
        DataType::Struct(_) | DataType::Map(..) => Cell::Other(OBJECT),
        _ => scalar(array, row),
    })
}

/// The names of the class or classes of a row; `None` if the column has no numbers.
pub(crate) fn class_cell(array: &dyn Array, row: usize, names: &[String]) -> Option<Cell> {
    const NO_CLASS: Cell = Cell::Other("a number of no class");
    if array.is_null(row) {
        return Some(Cell::Null);
    }
    if is_list(array) {
        let elements = elements(array, row);
        let mut found = Vec::with_capacity(elements.len());
        for element in 0..elements.len() {
            match class(names, number(&elements, element)?) {
                Class::Named(name) => found.push(name),
                Class::None => {}
                Class::Unknown => return Some(NO_CLASS),
            }
        }
        return Some(if found.is_empty() { Cell::Null } else { Cell::Text(found.join("\n")) });
    }
    Some(match class(names, number(array, row)?) {
        Class::Named(name) => Cell::Text(name.to_owned()),
        Class::None => Cell::Null,
        Class::Unknown => NO_CLASS,
    })
}

/// A whole number of 64 bits or fewer.
fn number(array: &dyn Array, row: usize) -> Option<i64> {
    Some(match array.data_type() {
        _ if array.is_null(row) => -1,
        DataType::Int8 => array.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(row),
        _ => return None,
    })
}

fn text(bytes: &[u8]) -> Result<&str, RowFault> {
    std::str::from_utf8(bytes).map_err(|_| RowFault::NotUtf8(None))
}

/// The bytes of a text.
fn bytes(array: &dyn Array, row: usize) -> Option<&[u8]> {
    match array.data_type() {
        DataType::Utf8View => Some(array.as_string_view().value(row).as_bytes()),
        DataType::BinaryView => Some(array.as_binary_view().value(row)),
        _ => None,
    }
}

fn is_list(array: &dyn Array) -> bool {
    matches!(array.data_type(), DataType::List(_) | DataType::LargeList(_))
}

/// The elements of a row's list.
fn elements(array: &dyn Array, row: usize) -> ArrayRef {
    match array.data_type() {
        DataType::LargeList(_) => array.as_list::<i64>().value(row),
        _ => array.as_list::<i32>().value(row),
    }
}

/// A list as JSON. Elements that are no text, number or boolean are null.
fn json_list(array: &dyn Array, row: usize, column: &Column) -> Result<String, RowFault> {
    let elements = elements(array, row);
    let texts = (0..elements.len()).map(|element| Ok(cell(&elements, element, column)?.text().map(str::to_owned)));
    Ok(serde_json::json!(texts.collect::<Result<Vec<_>, RowFault>>()?).to_string())
}

fn text_of_list(elements: &ArrayRef, column: &Column, levels: usize) -> Result<Option<Cell>, RowFault> {
    let mut texts: Vec<Cow<'_, str>> = Vec::with_capacity(elements.len());
    for row in 0..elements.len() {
        match (bytes(elements, row), number(elements, row)) {
            _ if elements.is_null(row) => return Ok(None),
            (Some(bytes), _) => texts.push(text(bytes)?.into()),
            (None, Some(number)) if column.has_numbers => texts.push(number.to_string().into()),
            _ if levels > 1 && is_list(elements) => {
                match text_of_list(&self::elements(elements, row), column, levels - 1)? {
                    Some(Cell::Text(text)) => texts.push(text.into()),
                    _ => return Ok(None),
                }
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(if texts.is_empty() { Cell::Null } else { Cell::Text(one_text(&texts, &column.name)) }))
}

/// Numbers, booleans and dates. Other types have no usual text.
fn scalar(array: &dyn Array, row: usize) -> Cell {
    macro_rules! number {
        ($type:ty) => {
            Cell::Text(array.as_primitive::<$type>().value(row).to_string())
        };
    }
    macro_rules! float {
        ($type:ty) => {
            match array.as_primitive::<$type>().value(row) {
                value if value.is_nan() => Cell::Null,
                // Rust's debug form keeps the point of 1.0, as JSON does.
                value => Cell::Text(format!("{value:?}")),
            }
        };
    }
    match array.data_type() {
        DataType::Boolean => Cell::Text(array.as_boolean().value(row).to_string()),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float16 => float!(Float16Type),
        DataType::Float32 => float!(Float32Type),
        DataType::Float64 => float!(Float64Type),
        DataType::Decimal128(..) => Cell::Text(array.as_primitive::<Decimal128Type>().value_as_string(row)),
        DataType::Date32 => Cell::Text(date(i64::from(array.as_primitive::<Date32Type>().value(row)))),
        DataType::Timestamp(unit, _) => {
            let (value, per_second) = match unit {
                TimeUnit::Second => (array.as_primitive::<TimestampSecondType>().value(row), 1),
                TimeUnit::Millisecond => (array.as_primitive::<TimestampMillisecondType>().value(row), 1000),
                TimeUnit::Microsecond => (array.as_primitive::<TimestampMicrosecondType>().value(row), 1_000_000),
                TimeUnit::Nanosecond => (array.as_primitive::<TimestampNanosecondType>().value(row), 1_000_000_000),
            };
            Cell::Text(time(value, per_second))
        }
        _ => Cell::Other("a value without a usual text"),
    }
}

/// A day as `2026-01-31`, from the days since 1970. The algorithm is Howard Hinnant's `civil_from_days`.
fn date(days: i64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let (day, month) = (day_of_year - (153 * shifted_month + 2) / 5 + 1, (shifted_month + 2) % 12 + 1);
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// A time as pandas prints it: `2026-01-31 12:00:00`, with a fraction if there is one.
fn time(value: i64, per_second: i64) -> String {
    let (seconds, fraction) = (value.div_euclid(per_second), value.rem_euclid(per_second));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let whole = format!("{} {:02}:{:02}:{:02}", date(days), second / 3600, second / 60 % 60, second % 60);
    match fraction {
        0 => whole,
        fraction => format!("{whole}.{fraction:0width$}", width = per_second.ilog10() as usize),
    }
}

/// Messages: a list of structs, or a struct of lists, as Hugging Face datasets write a `Sequence`.
fn turns(array: &dyn Array, row: usize, column: &str) -> Option<Result<Vec<Turn>, RowFault>> {
    let member = |of: &dyn Array, names: [&str; 2]| {
        let of = of.as_struct_opt()?;
        names.iter().find_map(|name| of.column_by_name(name)).cloned()
    };
    let (mut calls, mut weights) = (Vec::new(), None);
    let (roles, contents) = match array.data_type() {
        DataType::List(_) | DataType::LargeList(_) => {
            let messages = elements(array, row);
            if let DataType::List(_) = messages.data_type() {
                return exchanges(&messages);
            }
            calls.extend(["tool_calls", "function_call"].iter().filter_map(|name| member(&messages, [name, name])));
            weights = member(&messages, ["weight", "weight"]);
            (member(&messages, ["role", "from"])?, member(&messages, ["content", "value"])?)
        }
        DataType::Struct(_) => {
            let lists = (member(array, ["role", "from"])?, member(array, ["content", "value"])?);
            (lists.0.as_list_opt::<i32>()?.value(row), lists.1.as_list_opt::<i32>()?.value(row))
        }
        _ => return None,
    };
    if roles.len() != contents.len() {
        return Some(Err(RowFault::Messages(column.to_owned(), "its roles and its texts differ in number".to_owned())));
    }
    if roles.len() > MAX_TURNS {
        return Some(Err(RowFault::Messages(column.to_owned(), too_many())));
    }
    let turn = |message| {
        let name = match bytes(&roles, message) {
            Some(bytes) if roles.is_valid(message) => text(bytes)?,
            _ => "",
        };
        let text = content(&contents, message)?
            .ok_or_else(|| RowFault::Messages(column.to_owned(), "expected a text in each message".to_owned()))?;
        let has_more = has_other_parts(&contents, message) || calls.iter().any(|calls| is_given(calls, message));
        let weight =
            weights.as_ref().filter(|weights| weights.is_valid(message)).map(|weights| scalar(weights, message));
        let has_no_weight = weight.as_ref().and_then(Cell::text).is_some_and(|weight| weight.parse() == Ok(0.0));
        Ok(Turn { role: role(name), content: text.into_owned(), has_more, has_no_weight })
    };
    Some((0..roles.len()).map(turn).collect())
}

/// Whether a value is neither null nor an empty list or text.
fn is_given(array: &ArrayRef, row: usize) -> bool {
    let is_empty = match array.data_type() {
        DataType::List(_) | DataType::LargeList(_) => elements(array, row).is_empty(),
        _ => bytes(array, row).is_some_and(<[u8]>::is_empty),
    };
    array.is_valid(row) && !is_empty
}

/// Whether a list of parts has one without a text.
fn has_other_parts(contents: &ArrayRef, message: usize) -> bool {
    if !matches!(contents.data_type(), DataType::List(_) | DataType::LargeList(_)) || contents.is_null(message) {
        return false;
    }
    let parts = elements(contents, message);
    let texts = match parts.as_struct_opt() {
        Some(parts) => parts.column_by_name("text").cloned(),
        None => return false,
    };
    texts.is_none_or(|texts| (0..texts.len()).any(|part| !is_given(&texts, part)))
}

/// Questions with their answers, each a list of two texts.
fn exchanges(exchanges: &ArrayRef) -> Option<Result<Vec<Turn>, RowFault>> {
    let mut turns = Vec::new();
    for row in 0..exchanges.len().min(MAX_TURNS / 2) {
        let pair = elements(exchanges, row);
        let (2, Some(question), Some(answer)) = (pair.len(), bytes(&pair, 0), bytes(&pair, 1)) else { return None };
        for (name, content) in [("user", question), ("assistant", answer)] {
            match text(content) {
                Ok(content) => turns.push(Turn::new(name, content)),
                Err(fault) => return Some(Err(fault)),
            }
        }
    }
    Some(Ok(turns))
}

/// The text of a message: a string, the text parts of a list, or nothing for null.
fn content(contents: &ArrayRef, message: usize) -> Result<Option<Cow<'_, str>>, RowFault> {
    if contents.is_null(message) {
        return Ok(Some(Cow::Borrowed("")));
    }
    if let Some(bytes) = bytes(contents, message) {
        return text(bytes).map(|text| Some(Cow::Borrowed(text)));
    }
    if !matches!(contents.data_type(), DataType::List(_) | DataType::LargeList(_)) {
        return Ok(None);
    }
    let parts = elements(contents, message);
    let texts = match parts.as_struct_opt() {
        Some(parts) => parts.column_by_name("text").cloned(),
        None => Some(parts),
    };
    let Some(texts) = texts else { return Ok(None) };
    let mut joined = String::new();
    for part in (0..texts.len()).filter(|part| texts.is_valid(*part)) {
        let Some(bytes) = bytes(&texts, part) else { return Ok(None) };
        let part = text(bytes)?;
        if !joined.is_empty() && !part.is_empty() {
            joined.push('\n');
        }
        joined.push_str(part);
    }
    Ok(Some(Cow::Owned(joined)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_times_have_the_form_of_pandas() {
        for (days, expected) in [(0, "1970-01-01"), (-1, "1969-12-31"), (11_016, "2000-02-29"), (20_000, "2024-10-04")]
        {
            assert_eq!(date(days), expected);
        }
        assert_eq!(time(1_700_000_000, 1), "2023-11-14 22:13:20");
        assert_eq!(time(-1, 1000), "1969-12-31 23:59:59.999");
        assert_eq!(time(1_700_000_000_000_001, 1_000_000), "2023-11-14 22:13:20.000001");
    }

    #[test]
    fn a_list_of_lists_of_texts_is_one_text() {
        use arrow_array::builder::{ListBuilder, StringViewBuilder};
        let mut lists = ListBuilder::new(ListBuilder::new(StringViewBuilder::new()));
        for sentences in [&["a", "b"][..], &["c"]] {
            sentences.iter().for_each(|sentence| lists.values().values().append_value(sentence));
            lists.values().append(true);
        }
        lists.append(true);
        let text = cell(&lists.finish(), 0, &Column::text("sentences"));
        assert_eq!(text, Ok(Cell::Text("a\nb\nc".to_owned())));
    }
}
