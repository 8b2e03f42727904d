//! `serve`: answers over HTTP equal those of `generate`, adapters are models with their own names, and the server ends in order.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::run::{Running, Scene, short};

/// A server with its address.
pub struct Server {
    pub running: Running,
    address: String,
}

pub fn start(scene: &Scene, more: &[&str]) -> Server {
    start_with(scene, "run", more)
}

/// A server of another model.
pub fn start_with(scene: &Scene, model: &str, more: &[&str]) -> Server {
    let usual = ["serve", model, "--listen", "127.0.0.1:0", "--max-new-tokens", "8"];
    started(scene.start(&[&usual[..], more].concat()))
}

/// The server that was started, once it listens.
fn started(mut running: Running) -> Server {
    let line = running.error_line("http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next()).expect("an address").to_owned();
    Server { running, address }
}

impl Server {
    pub fn exchange(&self, text: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.write_all(text.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, answer.split_once("\r\n\r\n").expect("a body").1.to_owned())
    }

    fn get(&self, path: &str) -> String {
        self.exchange(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).1
    }

    pub fn ask(&self, body: &Value) -> (u16, Value) {
        self.post("/v1/completions", body)
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let (status, answer) = self.exchange(&format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        (status, serde_json::from_str(&answer).unwrap_or(Value::String(answer)))
    }

    pub fn end(self) -> crate::run::Ran {
        self.running.signal("TERM");
        self.running.end()
    }
}

fn texts(answer: &Value) -> Vec<&str> {
    answer["choices"].as_array().expect("choices").iter().map(|choice| choice["text"].as_str().expect("text")).collect()
}

#[test]
fn answers_over_http_are_those_of_generate_and_the_server_ends_in_order() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let prompts = ["after 75", "before 12", "3 + 4"];
    let generate = ["generate", "--model", "run", "--max-new-tokens", "8"];
    let greedy = scene.run(&[&generate[..], &prompts].concat()).expect_code(0).out;
    let beams = scene.run(&[&generate[..], &["--num-beams", "3"], &prompts].concat()).expect_code(0).out;
    let server = start(&scene, &["--access-log", "access.jsonl"]);
    let (status, answer) = server.ask(&json!({"prompt": prompts}));
    assert_eq!((status, texts(&answer)), (200, greedy.lines().collect()), "{answer}");
    assert_eq!(answer["model"], "run");
    let (_, answer) = server.ask(&json!({"prompt": prompts, "num_beams": 3}));
    assert_eq!(texts(&answer), beams.lines().collect::<Vec<_>>());
    let (_, streamed) = server.ask(&json!({"prompt": prompts[0], "stream": true}));
    let streamed = streamed.as_str().expect("events").to_owned();
    let parts = streamed.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    let text: String = parts.flat_map(|part| texts(&part).concat().chars().collect::<Vec<_>>()).collect();
    assert_eq!(text, greedy.lines().next().expect("a line"));
    let (status, refused) = server.ask(&json!({"prompt": "word ".repeat(1000)}));
    assert_eq!((status, refused["error"]["code"].as_str()), (400, Some("context_length_exceeded")));
    assert!(server.get("/metrics").contains("serve_predicted_peak_bytes"));
    let ran = server.end().expect_code(0);
    assert!(ran.err.contains("stopped; peak ") && ran.err.contains("MiB planned"), "{}", ran.err);
    let log = String::from_utf8(scene.read("access.jsonl")).expect("text");
    let statuses: Vec<Value> =
        log.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["status"].clone()).collect();
    assert_eq!(statuses, [200, 200, 200, 400, 200]);
}

#[test]
fn labels_and_tokens_have_their_log_probabilities() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let server = start(&scene, &[]);
    let (status, answer) = server.ask(&json!({"prompt": "after 75", "logprobs": 2}));
    let logprobs = &answer["choices"][0]["logprobs"];
    let numbers: Vec<f64> =
        logprobs["token_logprobs"].as_array().expect("a list").iter().flat_map(Value::as_f64).collect();
    assert_eq!((status, numbers.len() as u64), (200, answer["usage"]["completion_tokens"].as_u64().expect("a count")));
    assert!(numbers.iter().all(|number| *number <= 0.0), "{answer}");
    assert!(
        logprobs["top_logprobs"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|top| top.as_object().expect("tokens").len() <= 2)
    );
    let labels = ["6", "cat", "12", "xyz", "be"];
    let (status, scored) = server.post("/v1/score", &json!({"prompt": ["after 75", "3 + 4"], "labels": labels}));
    assert_eq!(status, 200, "{scored}");
    for prompt in scored["data"].as_array().expect("prompts") {
        let scores = prompt["scores"].as_array().expect("scores");
        let sum: f64 = scores.iter().map(|score| score["probability"].as_f64().expect("a number")).sum();
        assert!((sum - 1.0).abs() < 1e-9 && scores.len() == labels.len(), "{prompt}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "after 75"}], "logprobs": true, "top_logprobs": 1});
    let (_, answer) = server.post("/v1/chat/completions", &chat);
    assert!(answer["choices"][0]["logprobs"]["content"][0]["logprob"].as_f64() <= Some(0.0), "{answer}");
    let (_, streamed) = server.ask(&json!({"prompt": "after 75", "logprobs": 0, "stream": true}));
    assert!(streamed.as_str().expect("events").contains("\"token_logprobs\":[-"), "{streamed}");
    server.end().expect_code(0);
}

#[test]
fn a_long_prompt_is_cut_if_the_server_is_told_to_and_the_log_says_so() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let more = ["--prompt-overflow", "truncate", "--max-source-tokens", "16", "--access-log", "access.jsonl"];
    let server = start(&scene, &more);
    // Of the text, and of the tokens: both are cut on the right.
    for long in ["after 75 ".repeat(20), "after 75 ".repeat(2000)] {
        let (status, answer) = server.ask(&json!({"prompt": long}));
        assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(16)), "{answer}");
        assert_eq!(answer["prompt_cut"], true);
    }
    let (_, answer) = server.ask(&json!({"prompt": "after 75"}));
    assert!(answer.get("prompt_cut").is_none(), "{answer}");
    server.end().expect_code(0);
    let log = String::from_utf8(scene.read("access.jsonl")).expect("text");
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let cut: Vec<Value> = lines.map(|line| line["prompt_cut"].clone()).collect();
    assert_eq!(cut, [true, true, false]);
}

#[test]
fn a_prompt_that_waits_is_tokenized_once() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    // The memory of one long answer, so that all others wait while it grows.
    let server = start(&scene, &["--batch-samples", "1", "--max-source-tokens", "16"]);
    let ask = |words: usize| {
        server.ask(&json!({"prompt": "after 75 ".repeat(words), "n": 4, "temperature": 1, "min_tokens": 8})).0
    };
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..12).map(|number| scope.spawn(move || ask(1 + number % 3))).collect();
        asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
    });
    assert_eq!(statuses, [200; 12]);
    let tokenized = |line: &str| line.starts_with("serve_tokenized_prompts ").then(|| line.to_owned());
    let lines: Vec<String> = server.get("/metrics").lines().filter_map(tokenized).collect();
    assert_eq!(lines, ["serve_tokenized_prompts 12"], "one that waits is not tokenized again");
    server.end().expect_code(0);
}

#[test]
fn an_access_log_is_a_file_of_this_name_and_of_nobody_else() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    scene.write("theirs", "theirs");
    std::os::unix::fs::symlink("theirs", scene.path("link")).expect("a link");
    std::os::unix::fs::symlink("nowhere", scene.path("dangling")).expect("a link");
    std::fs::hard_link(scene.path("theirs"), scene.path("hard")).expect("a link");
    scene.shell("mkfifo fifo && mkdir directory").expect_code(0);
    for log in ["link", "dangling", "hard", "fifo", "directory"] {
        let refused = scene.run(&["serve", "run", "--listen", "127.0.0.1:0", "--access-log", log]);
        assert!(refused.code == Some(2), "{log}: {:?}\n{}", refused.code, refused.err);
        refused.expect_words(&[log]);
    }
    assert_eq!(scene.read("theirs"), b"theirs");
    assert!(!scene.path("nowhere").exists());
}

#[test]
fn an_access_log_that_was_rotated_goes_on_in_a_new_file_and_loses_no_line() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let server = start(&scene, &["--access-log", "access.jsonl"]);
    let ask = |path: &str| server.get(path);
    ask("/first");
    std::fs::rename(scene.path("access.jsonl"), scene.path("access.jsonl.1")).expect("a rotation");
    ask("/second");
    std::fs::remove_file(scene.path("access.jsonl")).expect("a removal");
    // A name that cannot be used: lines go into the file that is open.
    std::fs::create_dir(scene.path("access.jsonl")).expect("a directory");
    ask("/third");
    std::fs::remove_dir(scene.path("access.jsonl")).expect("a removal");
    ask("/fourth");
    server.end().expect_code(0);
    let paths = |name: &str| -> Vec<String> {
        let lines = scene.text(name);
        let path = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["path"].as_str().map(str::to_owned);
        lines.lines().filter_map(path).collect()
    };
    assert_eq!(
        (paths("access.jsonl.1"), paths("access.jsonl")),
        (vec!["/first".to_owned()], vec!["/fourth".to_owned()])
    );
}

#[test]
fn a_failure_of_the_server_is_explained_to_its_owner_and_not_to_the_client() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let tune = ["--lora", "--set", "model.init_from=run/model", "--output", "one", "--set", "train.eval_samples=1"];
    scene.run(&short(&tune)).expect_code(0);
    let file = "one/adapter/adapter_model.safetensors";
    let usual = ["serve", "run", "--listen", "127.0.0.1:0", "--max-new-tokens", "8", "--adapter", "one=one"];
    // A backtrace would be in the reason, too.
    let server = started(scene.start_under("env RUST_BACKTRACE=1 RUST_LIB_BACKTRACE=1", &usual));
    let half = scene.read(file);
    let half = &half[..half.len() / 2];
    for (kind, bytes) in [("other bytes", Some(&b"damaged"[..])), ("half of the file", Some(half)), ("no file", None)] {
        match bytes {
            Some(bytes) => drop(scene.write(file, bytes)),
            None => std::fs::remove_file(scene.path(file)).expect("a removal"),
        }
        let (status, answer) = server.ask(&json!({"prompt": "after 75", "model": "one", "stream": kind == "no file"}));
        let message = answer["error"]["message"].as_str().expect("a message");
        let of_server = ["safetensors", "/", "backtrace", "::", ".rs"];
        assert!(status == 500 && message.contains("req-"), "{kind}: {answer}");
        assert!(of_server.iter().all(|word| !answer.to_string().contains(word)), "{kind}: {answer}");
    }
    let (status, answer) = server.ask(&json!({"prompt": "after 75"}));
    assert_eq!(status, 200, "the base goes on: {answer}");
    let ran = server.end().expect_code(0);
    assert!(ran.err.contains("adapter_model.safetensors") && ran.err.contains("request req-"), "{}", ran.err);
}

/// A directory of a model that ranks.
fn ranker(scene: &Scene) {
    let row = |at: usize| json!({"qid": at / 2, "query": "find a", "text": format!("a {at}"), "label": at % 2});
    scene.write("ranked.jsonl", (0..8).map(|at| format!("{}\n", row(at))).collect::<String>());
    let rows = ["--set", "data.train=[\"ranked.jsonl\"]", "--max-steps", "1", "--set", "train.epochs=9"];
    let ranking = ["--set", "task.name=ranking", "--set", "ranking.answers=7,8", "--output", "rank"];
    scene.run(&short(&[&rows[..], &ranking].concat())).expect_code(0);
}

#[test]
fn answers_begin_and_grow_beside_texts_without_end_and_within_the_bill() {
    let scene = Scene::new();
    ranker(&scene);
    let server = start_with(&scene, "rank", &["--request-timeout", "60"]);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let documents = |text: String| json!({"query": "find a", "documents": vec![text; 32]});
    let floods = [documents("a b ".repeat(100)), documents("a b".to_owned())];
    std::thread::scope(|scope| {
        for flood in floods.iter().cycle().take(6) {
            let (server, is_over) = (&server, &is_over);
            scope.spawn(move || {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(server.post("/v1/rerank", flood).0, 200);
                }
            });
        }
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for number in 0..12 {
                let (status, answer) = server.ask(&json!({"prompt": "after 75", "min_tokens": 8}));
                assert_eq!(status, 200, "answer {number}: {answer}");
            }
        }));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        ended.unwrap_or_else(|reason| std::panic::resume_unwind(reason));
    });
    let metrics = server.get("/metrics");
    let gauge = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(&format!("{name} "))).expect("a gauge");
        line.rsplit(' ').next().expect("a number").parse::<f64>().expect("a number")
    };
    let (peak, predicted) = (gauge("serve_peak_memory_bytes"), gauge("serve_predicted_peak_bytes"));
    assert!(peak <= predicted + f64::max(predicted / 50.0, 4_194_304.0), "{peak} of {predicted}");
    server.end().expect_code(0);
}

#[test]
fn an_adapter_is_a_model_by_its_name_and_is_loaded_beside_the_base() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let tune = ["--lora", "--set", "model.init_from=run/model", "--learn-rate", "0.5"];
    for (name, seed) in [("one", "run.seed=3"), ("two", "run.seed=4")] {
        let rest = [&tune[..], &["--output", name, "--set", seed, "--set", "train.eval_samples=1"]].concat();
        scene.run(&short(&rest)).expect_code(0);
    }
    let generated = |model: &str| {
        let ran = scene.run(&["generate", "--model", model, "--max-new-tokens", "8", "after 75"]);
        ran.expect_code(0).out.trim_end_matches('\n').to_owned()
    };
    let expected = ["run", "one", "two"].map(generated);
    let server = start(&scene, &["--adapter", "one=one", "--adapter", "two"]);
    // Switches to an adapter and back: the base must not keep any of the adapter's values.
    for turn in [0, 1, 2, 1, 0] {
        let model = ["run", "one", "two"][turn];
        let (status, answer) = server.ask(&json!({"prompt": "after 75", "model": model}));
        assert_eq!((status, texts(&answer)), (200, vec![expected[turn].as_str()]), "{model}");
    }
    server.end().expect_code(0);
}

#[test]
fn a_server_that_cannot_be_safe_or_does_not_fit_is_refused_before_it_listens() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let refused = scene.run(&["serve", "run", "--listen", "0.0.0.0:0"]).expect_code(2);
    assert!(refused.err.contains("--api-key-file"), "{}", refused.err);
    let refused = scene.run(&["serve", "run", "--memory-budget", "10MiB"]).expect_code(3);
    assert!(refused.err.contains("hint: "), "{}", refused.err);
    let bill = scene.run(&["serve", "run", "--dry-run"]).expect_code(0);
    assert!(bill.out.contains("server") && bill.out.contains("key/value cache"), "{}", bill.out);
    scene.run(&["serve", "run", "--adapter", "nosuch"]).expect_code(4);
}

#[test]
fn bench_serve_measures_each_batch_within_its_budget() {
    let scene = Scene::new();
    scene.run(&short(&["--set", "train.eval_samples=1"])).expect_code(0);
    let usual = ["bench", "serve", "run", "--source-tokens", "8", "--new-tokens", "6", "--rounds", "1"];
    for beams in ["1", "3"] {
        let more = ["--batch", "1,4", "--num-beams", beams, "--memory-budget", "200MiB", "--json"];
        let measured = scene.run(&[&usual[..], &more].concat()).expect_code(0).json();
        let batches = measured["batches"].as_array().expect("a list");
        assert_eq!(batches.iter().map(|batch| batch["batch"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(4)]);
        assert!(batches.iter().all(|batch| batch["tokens_per_second"].as_f64() > Some(0.0)));
        assert!(batches.iter().all(|batch| batch["first_token_ms"].as_f64() < batch["answer_ms"].as_f64()));
        // The bill has the pages of the program that were read before the plan. Those of the answers come with the first one, and are more in a
        // build that is not optimised: the bound is that of every run.
        let [peak, predicted] = ["peak_rss_bytes", "predicted_peak_bytes"].map(|name| measured[name].as_u64());
        let (peak, predicted) = (peak.expect("bytes"), predicted.expect("bytes"));
        assert!(peak <= predicted + (predicted / 50).max(4 << 20) && peak <= 200 << 20, "{measured}");
    }
    let refused = scene.run(&[&usual[..], &["--batch", "0"]].concat()).expect_code(2);
    assert!(refused.err.contains("at least 1 source"), "{}", refused.err);
    let refused = scene.run(&["bench"]).expect_code(2);
    assert!(refused.err.contains("--model"), "{}", refused.err);
}

/// Checks that a text of too many tokens is refused by the name that the request has for it.
#[track_caller]
fn names_its_parameter(server: &Server, path: &str, body: &Value, expected: &str) {
    let (status, answer) = server.post(path, body);
    let error = &answer["error"];
    assert_eq!((status, error["param"].as_str()), (400, Some(expected)), "{path}: {answer}");
    let message = error["message"].as_str().expect("a message");
    assert!(message.contains(&format!("`{expected}`")), "{message}");
    assert!(expected == "prompt" || !message.contains("prompt "), "{message}");
}

#[test]
fn documents_are_ranked_as_score_does_and_texts_have_the_vectors_of_embed() {
    let scene = Scene::new();
    let row =
        |at: usize, label: u8| json!({"qid": at / 2, "query": "find a", "text": format!("a {at}"), "label": label});
    let rows = (0..8).map(|at| format!("{}\n", row(at, u8::from(at % 2 == 0)))).collect::<String>();
    scene.write("rows.jsonl", &rows);
    let train = ["--set", "data.train=[\"rows.jsonl\"]", "--max-steps", "1", "--set", "train.epochs=9"];
    let ranking = ["--set", "task.name=ranking", "--set", "ranking.answers=7,8", "--output", "rank"];
    scene.run(&short(&[&train[..], &ranking].concat())).expect_code(0);
    let scored = scene.run(&["score", "--model", "rank", "--pairs", "rows.jsonl"]).expect_code(0).out;
    let scores = scored.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["score"].as_f64());
    let scores: Vec<f64> = scores.flatten().collect();
    let server = start_with(&scene, "rank", &[]);
    let documents: Vec<String> = (0..8).map(|at| format!("a {at}")).collect();
    let long = "a b ".repeat(600);
    let (status, ranked) = server.post("/v1/rerank", &json!({"query": "find a", "documents": documents, "top_n": 3}));
    let results = ranked["results"].as_array().expect("results");
    assert_eq!((status, results.len()), (200, 3), "{ranked}");
    for (place, result) in results.iter().enumerate() {
        let (index, score) = (result["index"].as_u64().expect("a place") as usize, result["relevance_score"].as_f64());
        assert!((score.expect("a number") - scores[index].exp()).abs() < 1e-5, "{ranked}, {scores:?}");
        let better = scores.iter().filter(|other| **other > scores[index] + 1e-5).count();
        assert!(better <= place, "{ranked}, {scores:?}");
    }
    assert_eq!(server.post("/v1/embeddings", &json!({"input": "a"})).1["error"]["code"], "not_supported");
    names_its_parameter(&server, "/v1/rerank", &json!({"query": "find a", "documents": [long]}), "documents");
    names_its_parameter(&server, "/v1/completions", &json!({"prompt": long}), "prompt");
    let chat = json!({"messages": [{"role": "user", "content": long}]});
    names_its_parameter(&server, "/v1/chat/completions", &chat, "messages");
    server.end().expect_code(0);
    let vectors = ["--set", "task.name=embedding", "--set", "embedding.normalize=true", "--output", "vectors"];
    let columns = ["--set", "data.prompt_column=query", "--set", "data.response_column=text"];
    scene.run(&short(&[&train[..], &vectors, &columns].concat())).expect_code(0);
    let embed = ["embed", "--model", "vectors", "--input", "rows.jsonl", "--output", "v.jsonl"];
    scene.run(&embed).expect_code(0);
    let written = String::from_utf8(scene.read("v.jsonl")).expect("UTF-8");
    let server = start_with(&scene, "vectors", &[]);
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": documents}));
    assert_eq!((status, answer["data"].as_array().map(Vec::len)), (200, Some(8)), "{answer}");
    for (line, given) in written.lines().zip(answer["data"].as_array().expect("a list")) {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let both =
            line["embedding"].as_array().expect("numbers").iter().zip(given["embedding"].as_array().expect("numbers"));
        for (one, other) in both {
            assert!(
                (one.as_f64().expect("a number") - other.as_f64().expect("a number")).abs() < 1e-6,
                "{line}, {given}"
            );
        }
    }
    let (status, refused) = server.ask(&json!({"prompt": "a"}));
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(status == 400 && message.contains("ask /v1/embeddings"), "{refused}");
    names_its_parameter(&server, "/v1/embeddings", &json!({"input": ["a", long]}), "input");
    names_its_parameter(&server, "/v1/embeddings", &json!({"input": [[1 << 20]]}), "input");
    let (_, short) = server.post("/v1/embeddings", &json!({"input": "a", "dimensions": 4}));
    let numbers: Vec<f64> =
        short["data"][0]["embedding"].as_array().expect("numbers").iter().flat_map(Value::as_f64).collect();
    assert!(numbers.len() == 4 && (numbers.iter().map(|number| number * number).sum::<f64>() - 1.0).abs() < 1e-5);
    let ran = server.end().expect_code(0);
    assert!(ran.err.contains("MiB planned"), "{}", ran.err);
}
