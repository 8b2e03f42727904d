//! `embed`: a vector of each text, with the encoder of a whole T5 or of an encoder alone.

use serde_json::Value;

use crate::run::{Ran, Scene, short};

const TEXTS: [&str; 6] =
    ["after 75", "before 12", "a much longer text of many more words than that", "7", "x", "after 75"];

/// A scene with a run of a tiny model, and texts.
fn scene() -> Scene {
    let scene = Scene::new();
    scene.run(&short(&["--max-steps", "1"])).expect_code(0);
    scene.write("texts.txt", TEXTS.join("\n") + "\n");
    let rows: String = TEXTS.iter().map(|text| format!("{}\n", serde_json::json!({"id": 1, "text": text}))).collect();
    scene.write("rows.jsonl", rows);
    scene
}

fn embed(scene: &Scene, more: &[&str]) -> Ran {
    scene.run(&[&["embed", "--input", "texts.txt", "--max-source-tokens", "32"][..], more].concat())
}

fn text(scene: &Scene, name: &str) -> String {
    String::from_utf8(scene.read(name)).expect("UTF-8")
}

/// The vectors of a `.npy` file of rows of 4-byte floats.
fn vectors(scene: &Scene, name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(scene.path(name)).expect("a file of vectors");
    let header = String::from_utf8_lossy(&bytes[..128]).into_owned();
    let shape = header.split_once("'shape': (").expect("a shape").1.split_once(')').expect("its end").0.to_owned();
    let sizes: Vec<usize> = shape.split(", ").map(|size| size.parse().expect("a size")).collect();
    let values = bytes[128..].chunks(4).map(|value| f32::from_le_bytes(value.try_into().expect("four bytes")));
    let values: Vec<f32> = values.collect();
    assert_eq!(values.len(), sizes[0] * sizes[1], "{header}");
    values.chunks(sizes[1]).map(<[f32]>::to_vec).collect()
}

#[track_caller]
fn expect_near(one: &[Vec<f32>], other: &[Vec<f32>]) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().flatten().zip(other.iter().flatten()) {
        assert!((one - other).abs() < 1e-5, "{one}, {other}");
    }
}

#[test]
fn vectors_have_the_order_of_the_texts_whatever_the_batch_the_budget_and_the_form_of_the_files() {
    let scene = scene();
    let whole = embed(&scene, &["--model", "run", "--output", "a.npy", "--json"]).expect_code(0).json();
    assert_eq!((whole["rows"].as_u64(), whole["cut_rows"].as_u64()), (Some(6), Some(0)));
    let peaks = ["peak_rss_bytes", "predicted_peak_bytes"].map(|peak| whole[peak].as_u64().expect("bytes"));
    assert!(peaks[0] <= peaks[1], "{peaks:?}");
    let all = vectors(&scene, "a.npy");
    assert_eq!(all[0], all[5]);
    assert_ne!(all[0], all[1]);
    embed(&scene, &["--model", "run", "--output", "b.npy", "--batch-samples", "1"]).expect_code(0);
    expect_near(&all, &vectors(&scene, "b.npy"));
    let rows = ["embed", "--input", "rows.jsonl", "--model", "run/model", "--max-source-tokens", "32"];
    scene.run(&[&rows[..], &["--output", "c.jsonl"]].concat()).expect_code(0);
    let lines: Vec<Value> =
        text(&scene, "c.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of_line = |line: &Value| -> Vec<f32> {
        let values = line["embedding"].as_array().expect("a list").iter();
        #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
        values.map(|value| value.as_f64().expect("a number") as f32).collect()
    };
    expect_near(&all, &lines.iter().map(of_line).collect::<Vec<_>>());
    assert_eq!(lines.iter().map(|line| line["row"].as_u64()).collect::<Vec<_>>(), (0..6).map(Some).collect::<Vec<_>>());
    embed(&scene, &["--model", "run", "--output", "d.npy", "--normalize", "--pooling", "last"]).expect_code(0);
    for vector in vectors(&scene, "d.npy") {
        assert!((vector.iter().map(|value| value * value).sum::<f32>() - 1.0).abs() < 1e-5);
    }
    embed(&scene, &["--model", "run", "--output", "e.parquet"]).expect_code(0);
    assert!(scene.path("e.parquet").is_file());
}

#[test]
fn an_encoder_alone_has_the_vectors_of_the_whole_model_and_makes_no_text() {
    let scene = scene();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let bytes = std::fs::read(scene.path(&format!("run/model/{file}"))).expect("a file of the model");
        scene.write(&format!("encoder/{file}"), bytes);
    }
    let config = text(&scene, "encoder/config.json").replace("T5ForConditionalGeneration", "T5EncoderModel");
    scene.write("encoder/config.json", config);
    embed(&scene, &["--model", "run", "--output", "a.npy"]).expect_code(0);
    embed(&scene, &["--model", "encoder", "--output", "b.npy"]).expect_code(0);
    assert_eq!(vectors(&scene, "a.npy"), vectors(&scene, "b.npy"));
    let words = ["T5EncoderModel", "a model with a decoder"];
    scene.run(&["generate", "--model", "encoder", "--prompt", "a"]).expect_code(4).expect_words(&words);
}

#[test]
fn cut_texts_are_counted_and_what_cannot_be_written_is_refused_before_any_work() {
    let scene = scene();
    let cut = scene.run(&[
        "embed",
        "--model",
        "run",
        "--input",
        "texts.txt",
        "--max-source-tokens",
        "4",
        "--output",
        "a.npy",
    ]);
    let cut = cut.expect_code(0).expect_words(&["had more than 4 tokens", "the first is text"]);
    assert!(cut.out.is_empty(), "{}", cut.out);
    embed(&scene, &["--model", "run", "--output", "a.txt"]).expect_code(2).expect_words(&[".npy, .parquet or .jsonl"]);
    let rows = ["embed", "--model", "run", "--input", "rows.jsonl", "--text-column", "body", "--output", "b.npy"];
    scene.run(&rows).expect_code(4).expect_words(&["no column `body`", "--text-column", "text"]);
    assert!(!scene.path("b.npy").exists());
}

#[test]
fn sequences_of_fasta_are_read_with_their_letters_apart() {
    let scene = scene();
    scene.write("a.fasta", ">one of two lines\nMKU\nzV*\n>two\nHHE\n");
    scene.write("apart.txt", "M K X X V\nH H E\n");
    let run = |input: &str, output: &str| {
        scene.run(&["embed", "--model", "run", "--input", input, "--output", output]).expect_code(0);
        vectors(&scene, output)
    };
    expect_near(&run("a.fasta", "a.npy"), &run("apart.txt", "b.npy"));
    scene.write("bad.fasta", "MKV\n");
    let bad = ["embed", "--model", "run", "--input", "bad.fasta", "--output", "c.npy"];
    scene.run(&bad).expect_code(4).expect_words(&["bad.fasta:1: a sequence without a name", ">P12345"]);
}

#[test]
fn a_weight_that_is_too_large_gives_no_vectors_and_no_scores() {
    let scene = scene();
    let path = scene.path("run/model/model.safetensors");
    let mut bytes = std::fs::read(&path).expect("weights");
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).expect("a header");
    let tensor = &tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]["data_offsets"];
    let [start, end] = [0, 1].map(|at| header + tensor[at].as_u64().expect("an offset") as usize);
    bytes[start..end].chunks_mut(4).for_each(|value| value.copy_from_slice(&3e38f32.to_le_bytes()));
    std::fs::write(&path, bytes).expect("a file");
    embed(&scene, &["--model", "run", "--output", "x.npy"]).expect_code(4).expect_words(&["not finite", "hint: "]);
    assert!(!scene.path("x.npy").exists());
    let pairs = ["score", "--model", "run", "--pairs", "rows.jsonl", "--template", "{id} {text}", "--answers", "7,8"];
    scene.run(&pairs).expect_code(4).expect_words(&["not finite", "hint: "]);
}

#[test]
fn a_killed_command_goes_on_where_it_ended_and_the_bytes_are_those_of_one_that_was_not() {
    let scene = scene();
    let texts =
        |count: usize| -> String { (0..count).map(|at| format!("text {at} of several {}\n", at * at)).collect() };
    scene.write("texts.txt", texts(300));
    let partial = |output: &str| {
        let is_of = |name: &String| name.starts_with(&format!("{output}.")) && name.ends_with(".partial");
        scene.names(".").into_iter().find(is_of)
    };
    let flags = |output| ["--model", "run", "--batch-samples", "1", "--output", output];
    let kill = |output: &'static str| {
        let usual = ["embed", "--input", "texts.txt", "--max-source-tokens", "32"].into_iter().chain(flags(output));
        let running = scene.start(&usual.map(str::to_owned).collect::<Vec<_>>());
        let length = |name: &str| std::fs::metadata(scene.path(name)).map_or(0, |file| file.len());
        // The whole file is in place when the command was faster than this look at it.
        let has_rows = || length(output) > 0 || partial(output).is_some_and(|name| length(&name) > 0);
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !has_rows() && std::time::Instant::now() < end {
            std::thread::yield_now();
        }
        running.kill();
        partial(output)
    };
    for output in ["v.npy", "v.parquet", "v.jsonl"] {
        embed(&scene, &flags(output)).expect_code(0);
        assert_eq!(partial(output), None, "nothing is left");
        let whole = scene.read(output);
        std::fs::remove_file(scene.path(output)).expect("the vectors");
        if let Some(name) = kill(output) {
            // A part of a vector more, as a torn write leaves it.
            let torn = [scene.read(&name), vec![7; 5]].concat();
            scene.write(&name, &torn);
            embed(&scene, &flags(output)).expect_code(0).expect_words(&["goes on behind"]);
        }
        assert!(scene.read(output) == whole && partial(output).is_none(), "{output}");
    }
    // Vectors of another tokenizer are begun anew.
    std::fs::remove_file(scene.path("v.npy")).expect("the vectors");
    kill("v.npy");
    scene.write("run/model/tokenizer.json", [scene.read("run/model/tokenizer.json"), b"\n".to_vec()].concat());
    let again = embed(&scene, &flags("v.npy")).expect_code(0);
    assert!(!again.err.contains("goes on behind"), "{}", again.err);
    // Other settings have a file of their own.
    embed(&scene, &["--model", "run", "--batch-samples", "1", "--normalize", "--output", "v.npy"]).expect_code(0);
}
