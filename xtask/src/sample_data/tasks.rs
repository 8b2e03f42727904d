//! The tasks of the sample data: small, exact text transductions in English and Chinese.
//!
//! A task is a pure function from a random stream to one (prompt, response) pair. A T5 of about a million parameters learns
//! every task from scratch in a thousand steps, though the number after or before another with errors. Learning must
//! *generalise*: a held-out prompt has to be computed, not remembered. Tasks at which tiny models fail (sums of two numbers,
//! multiplication) are deliberately absent.

use super::random::Random;

/// One kind of question.
pub struct Task {
    /// Names the random stream of this task; changing it changes the task's rows.
    pub name: &'static str,
    /// Distinct prompts to generate, or all if the task has fewer.
    pub rows: usize,
    /// Draws one (prompt, response).
    pub draw: fn(&mut Random) -> (String, String),
}

/// Every task, in the order in which rows are generated.
pub const TASKS: &[Task] = &[
    Task { name: "number to words", rows: 2600, draw: number_to_words },
    Task { name: "words to number", rows: 2600, draw: words_to_number },
    Task { name: "number to hanzi", rows: 2600, draw: number_to_hanzi },
    Task { name: "hanzi to number", rows: 2600, draw: hanzi_to_number },
    Task { name: "date to english", rows: 2400, draw: date_to_english },
    Task { name: "english to date", rows: 2400, draw: english_to_date },
    Task { name: "date to chinese", rows: 2400, draw: date_to_chinese },
    Task { name: "chinese to date", rows: 2400, draw: chinese_to_date },
    Task { name: "clock to 12 hours", rows: 1300, draw: clock_to_12_hours },
    Task { name: "clock to 24 hours", rows: 1300, draw: clock_to_24_hours },
    Task { name: "clock to chinese", rows: 1300, draw: clock_to_chinese },
    Task { name: "units", rows: 2400, draw: units },
    Task { name: "units in chinese", rows: 2400, draw: units_in_chinese },
    Task { name: "number after", rows: 2600, draw: number_after },
    Task { name: "number before", rows: 2600, draw: number_before },
    Task { name: "number after in chinese", rows: 2000, draw: number_after_in_chinese },
    Task { name: "reverse words", rows: 3000, draw: reverse_words },
    Task { name: "reverse hanzi", rows: 3000, draw: reverse_hanzi },
    Task { name: "upper case", rows: 2000, draw: upper_case },
    Task { name: "last word", rows: 1500, draw: last_word },
    Task { name: "animals to chinese", rows: 900, draw: animals_to_chinese },
    Task { name: "animals to english", rows: 900, draw: animals_to_english },
];

/// Words for the word tasks: short, common, lower case.
const WORDS: [&str; 40] = [
    "red", "cat", "sun", "dog", "sea", "tree", "book", "fish", "moon", "star", "rain", "snow", "wind", "fire", "bird",
    "hand", "door", "road", "ship", "king", "milk", "salt", "gold", "song", "ball", "cake", "farm", "hill", "lake",
    "leaf", "lion", "nest", "rice", "rock", "rose", "seed", "tea", "town", "wolf", "wood",
];

/// Characters for the Chinese reversal task: common and concrete.
const HANZI: [&str; 40] = [
    "天", "地", "人", "山", "水", "火", "木", "金", "土", "日", "月", "星", "云", "雨", "风", "花", "草", "鸟", "鱼",
    "马", "牛", "羊", "门", "车", "书", "手", "口", "心", "米", "茶", "东", "西", "南", "北", "春", "夏", "秋", "冬",
    "大", "小",
];

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const UNITS: [(&str, &str, &str); 8] = [
    ("km", "m", "000"),
    ("kg", "g", "000"),
    ("litres", "ml", "000"),
    ("seconds", "ms", "000"),
    ("m", "cm", "00"),
    ("euros", "cents", "00"),
    ("cm", "mm", "0"),
    ("dm", "cm", "0"),
];

const UNITS_IN_CHINESE: [(&str, &str, &str); 8] = [
    ("千米", "米", "000"),
    ("千克", "克", "000"),
    ("升", "毫升", "000"),
    ("吨", "千克", "000"),
    ("米", "厘米", "00"),
    ("元", "分", "00"),
    ("厘米", "毫米", "0"),
    ("元", "角", "0"),
];

/// (English singular, English plural, Chinese with its measure word before the colour).
const ANIMALS: [(&str, &str, &str); 12] = [
    ("cat", "cats", "猫"),
    ("dog", "dogs", "狗"),
    ("bird", "birds", "鸟"),
    ("sheep", "sheep", "羊"),
    ("rabbit", "rabbits", "兔子"),
    ("monkey", "monkeys", "猴子"),
    ("tiger", "tigers", "老虎"),
    ("chicken", "chickens", "鸡"),
    ("duck", "ducks", "鸭子"),
    ("mouse", "mice", "老鼠"),
    ("bear", "bears", "熊"),
    ("wolf", "wolves", "狼"),
];

const COLOURS: [(&str, &str); 9] = [
    ("red", "红"),
    ("white", "白"),
    ("black", "黑"),
    ("yellow", "黄"),
    ("green", "绿"),
    ("blue", "蓝"),
    ("grey", "灰"),
    ("brown", "棕"),
    ("purple", "紫"),
];

/// Chinese counts before a measure word: two is 两, not 二.
const COUNTS_IN_CHINESE: [&str; 10] = ["一", "两", "三", "四", "五", "六", "七", "八", "九", "十"];

fn number_to_words(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random);
    (format!("{number} in words"), english_number(number))
}

fn words_to_number(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random);
    (format!("{} in digits", english_number(number)), number.to_string())
}

fn number_to_hanzi(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random);
    (format!("{number}写成汉字"), chinese_number(number))
}

fn hanzi_to_number(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random);
    (format!("{}写成数字", chinese_number(number)), number.to_string())
}

/// 1 to 9,999, with all lengths about equally likely, except the two shortest, which have few numbers.
fn short_or_long_number(random: &mut Random) -> u32 {
    match random.below(10) {
        0 => 1 + random.below(99),
        1..=4 => 100 + random.below(900),
        _ => 1000 + random.below(9000),
    }
}

/// `4,027` is "four thousand twenty seven": no "and", no hyphens, no commas.
pub fn english_number(number: u32) -> String {
    const ONES: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 10] = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    assert!(number < 10_000, "the sample tasks stop at 9,999");
    let mut words = Vec::new();
    let mut rest = number;
    for (scale, name) in [(1000, "thousand"), (100, "hundred")] {
        if rest >= scale {
            words.push(ONES[(rest / scale) as usize]);
            words.push(name);
            rest %= scale;
        }
    }
    if rest >= 20 {
        words.push(TENS[(rest / 10) as usize]);
        rest %= 10;
    }
    if rest > 0 || words.is_empty() {
        words.push(ONES[rest as usize]);
    }
    words.join(" ")
}

/// `4,027` is 四千零二十七; a run of inner zeros is read once, and 10 to 19 begin with 十.
pub fn chinese_number(number: u32) -> String {
    const DIGITS: [&str; 10] = ["零", "一", "二", "三", "四", "五", "六", "七", "八", "九"];
    assert!(number < 10_000, "the sample tasks stop at 9,999");
    if number < 10 {
        return DIGITS[number as usize].to_owned();
    }
    let mut text = String::new();
    let mut skipped_zero = false;
    for (scale, name) in [(1000, "千"), (100, "百"), (10, "十"), (1, "")] {
        let digit = number / scale % 10;
        if digit == 0 {
            skipped_zero = !text.is_empty();
            continue;
        }
        if skipped_zero {
            text.push('零');
            skipped_zero = false;
        }
        if !(digit == 1 && scale == 10 && text.is_empty()) {
            text.push_str(DIGITS[digit as usize]);
        }
        text.push_str(name);
    }
    text
}

/// A day that every month has, so that no calendar is needed.
fn date(random: &mut Random) -> (u32, u32, u32) {
    (1950 + random.below(100), 1 + random.below(12), 1 + random.below(28))
}

fn date_to_english(random: &mut Random) -> (String, String) {
    let (year, month, day) = date(random);
    (format!("date {year}-{month:02}-{day:02}"), format!("{} {day} {year}", MONTHS[month as usize - 1]))
}

fn english_to_date(random: &mut Random) -> (String, String) {
    let (year, month, day) = date(random);
    (format!("date {} {day} {year}", MONTHS[month as usize - 1]), format!("{year}-{month:02}-{day:02}"))
}

fn date_to_chinese(random: &mut Random) -> (String, String) {
    let (year, month, day) = date(random);
    (format!("日期{year}-{month:02}-{day:02}"), format!("{year}年{month}月{day}日"))
}

fn chinese_to_date(random: &mut Random) -> (String, String) {
    let (year, month, day) = date(random);
    (format!("日期{year}年{month}月{day}日"), format!("{year}-{month:02}-{day:02}"))
}

fn clock(random: &mut Random) -> (u32, u32) {
    (random.below(24), random.below(60))
}

/// (hour on a 12 hour clock, is it after noon).
fn twelve_hours(hour: u32) -> (u32, bool) {
    ((hour + 11) % 12 + 1, hour >= 12)
}

fn clock_to_12_hours(random: &mut Random) -> (String, String) {
    let (hour, minute) = clock(random);
    let (short, after_noon) = twelve_hours(hour);
    (format!("time {hour:02}:{minute:02}"), format!("{short}:{minute:02} {}", if after_noon { "pm" } else { "am" }))
}

fn clock_to_24_hours(random: &mut Random) -> (String, String) {
    let (prompt, response) = clock_to_12_hours(random);
    (format!("time {response}"), prompt.replace("time ", ""))
}

fn clock_to_chinese(random: &mut Random) -> (String, String) {
    let (hour, minute) = clock(random);
    let (short, after_noon) = twelve_hours(hour);
    (format!("时间{hour:02}:{minute:02}"), format!("{}{short}点{minute}分", if after_noon { "下午" } else { "上午" }))
}

fn units(random: &mut Random) -> (String, String) {
    let (from, to, zeros) = *random.pick(&UNITS);
    let number = short_or_long_number(random) % 1000 + 1;
    (format!("{number} {from} in {to}"), format!("{number}{zeros} {to}"))
}

fn units_in_chinese(random: &mut Random) -> (String, String) {
    let (from, to, zeros) = *random.pick(&UNITS_IN_CHINESE);
    let number = short_or_long_number(random) % 1000 + 1;
    (format!("{number}{from}等于多少{to}"), format!("{number}{zeros}{to}"))
}

fn number_after(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random).min(9_998);
    (format!("after {number}"), (number + 1).to_string())
}

fn number_before(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random).min(9_998);
    (format!("before {}", number + 1), number.to_string())
}

fn number_after_in_chinese(random: &mut Random) -> (String, String) {
    let number = short_or_long_number(random).min(9_998);
    (format!("{}的下一个数", chinese_number(number)), chinese_number(number + 1))
}

/// Distinct words, so that a word determines its position.
fn different(random: &mut Random, from: &[&'static str], at_least: u32, at_most: u32) -> Vec<&'static str> {
    let count = (at_least + random.below(at_most - at_least + 1)) as usize;
    let mut chosen: Vec<&str> = Vec::with_capacity(count);
    while chosen.len() < count {
        let word = *random.pick(from);
        if !chosen.contains(&word) {
            chosen.push(word);
        }
    }
    chosen
}

fn reverse_words(random: &mut Random) -> (String, String) {
    let mut words = different(random, &WORDS, 2, 4);
    let prompt = format!("reverse: {}", words.join(" "));
    words.reverse();
    (prompt, words.join(" "))
}

fn reverse_hanzi(random: &mut Random) -> (String, String) {
    let mut hanzi = different(random, &HANZI, 2, 4);
    let prompt = format!("倒过来：{}", hanzi.concat());
    hanzi.reverse();
    (prompt, hanzi.concat())
}

fn upper_case(random: &mut Random) -> (String, String) {
    let words = different(random, &WORDS, 2, 3).join(" ");
    (format!("upper case: {words}"), words.to_uppercase())
}

fn last_word(random: &mut Random) -> (String, String) {
    let words = different(random, &WORDS, 2, 4);
    (format!("last word: {}", words.join(" ")), words[words.len() - 1].to_owned())
}

fn animals(random: &mut Random) -> (String, String) {
    let count = random.below(10) as usize;
    let (colour, colour_in_chinese) = *random.pick(&COLOURS);
    let (one, many, animal_in_chinese) = *random.pick(&ANIMALS);
    let animal = if count == 0 { one } else { many };
    let english = format!("{} {colour} {animal}", english_number(count as u32 + 1));
    (english, format!("{}只{colour_in_chinese}{animal_in_chinese}", COUNTS_IN_CHINESE[count]))
}

fn animals_to_chinese(random: &mut Random) -> (String, String) {
    let (english, chinese) = animals(random);
    (format!("in Chinese: {english}"), chinese)
}

fn animals_to_english(random: &mut Random) -> (String, String) {
    let (english, chinese) = animals(random);
    (format!("用英文说：{chinese}"), english)
}
