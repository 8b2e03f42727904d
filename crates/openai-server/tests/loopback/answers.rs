//! Requests that are answered.

use std::io::{Read, Write};

use serde_json::{Value, json};

use crate::support::*;

#[test]
fn a_completion_has_text_reason_and_counts() {
    let running = start();
    let answer = json(&running.complete(r#"{"prompt":"say this"}"#));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "base");
    assert_eq!(
        answer["choices"][0],
        json!({"index": 0, "text": "0 say this", "logprobs": null, "finish_reason": "stop"})
    );
    assert_eq!(answer["usage"], json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}));
    let cut = json(&running.complete(r#"{"prompt":"say this","max_tokens":2,"model":"tuned"}"#));
    assert_eq!((&cut["choices"][0]["finish_reason"], &cut["choices"][0]["text"]), (&json!("length"), &json!("1 say ")));
    let stopped = json(&running.complete(r#"{"prompt":"say this","stop":["y t"]}"#));
    assert_eq!(
        (&stopped["choices"][0]["finish_reason"], &stopped["choices"][0]["text"]),
        (&json!("stop"), &json!("0 sa"))
    );
}

#[test]
fn several_prompts_and_answers_have_their_places() {
    let running = start();
    let answer = json(&running.complete(r#"{"prompt":["a","b"],"n":2}"#));
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["0 a", "0 a", "0 b", "0 b"]);
}

#[test]
fn a_chat_is_answered_whole_and_as_a_stream() {
    let running = start();
    let body = r#"{"model":"tuned","messages":[{"role":"user","content":"hello there"}]}"#;
    let answer = json(&running.post("/v1/chat/completions", body));
    assert_eq!(answer["choices"][0]["message"]["content"], "1 hello there");
    let body = body.replace("\"model\"", "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"model\"");
    let stream = running.post("/v1/chat/completions", &body);
    assert!(stream.contains("text/event-stream"), "{stream}");
    let events: Vec<Value> =
        stream.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
    let text: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "1 hello there");
    assert_eq!(events.last().unwrap()["usage"]["total_tokens"], 5);
    assert!(stream.contains("data: [DONE]"));
}

#[test]
fn models_health_metrics_and_the_page_are_there() {
    let running = start();
    let models = json(&running.get("/v1/models"));
    let names: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["base", "tuned"]);
    assert_eq!(json(&running.get("/v1/models/tuned"))["id"], "tuned");
    assert_eq!(json(&running.get("/health"))["status"], "ok");
    assert_eq!(status(&running.get("/ready")), 200);
    running.complete(r#"{"prompt":"a"}"#);
    let metrics = running.get("/metrics");
    assert!(metrics.contains("serve_requests_total{route=\"/v1/completions\",status=\"200\"} 1"), "{metrics}");
    assert!(metrics.contains("serve_generated_tokens_total 2"), "{metrics}");
    let page = running.get("/");
    let nonce = page.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert!(page.contains(&format!("<script nonce=\"{nonce}\">")) && !page.contains("NONCE"));
    assert!(!page.contains("http://") && !page.contains("https://"), "it needs no network");
    assert_ne!(page, running.get("/"));
}

#[test]
fn a_connection_serves_one_request_after_the_other() {
    let running = start();
    let mut stream = running.connect();
    for _ in 0..3 {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).unwrap();
        assert_eq!(status(std::str::from_utf8(&bytes[..read]).unwrap()), 200);
    }
}

#[test]
fn the_log_has_a_line_for_each_request_and_no_text_of_it() {
    let running = start();
    running.complete(r#"{"prompt":"a secret"}"#);
    running.complete(r#"{"prompt":3}"#);
    let log = running.log.clone();
    assert!(running.end());
    let log = log.lock().unwrap();
    let lines: Vec<Value> = log.iter().map(openai_server::Access::line).collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        (&lines[0]["status"], &lines[0]["generated_tokens"], &lines[0]["model"]),
        (&json!(200), &json!(3), &json!("base"))
    );
    assert!(lines[0]["id"].as_str().unwrap().starts_with("cmpl-") && lines[1]["id"].is_null());
    assert!(lines.iter().all(|line| line["request_id"].as_str().unwrap().starts_with("req-")));
    assert!(lines[0]["first_token_ms"].is_number());
    assert_eq!((&lines[1]["status"], &lines[1]["error"]), (&json!(400), &json!("invalid_value")));
    assert!(!format!("{lines:?}").contains("secret"));
}

#[test]
fn labels_are_scored_in_their_order_for_each_prompt() {
    let running = start();
    let labels = ["a", "bb", "ccc", "dddd", "eeeee", "f"];
    let body = json!({"prompt": ["one", "two"], "labels": labels, "model": "tuned"}).to_string();
    let answer = json(&running.post("/v1/score", &body));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("tuned")));
    for prompt in answer["data"].as_array().unwrap() {
        let scores = prompt["scores"].as_array().unwrap();
        let seen: Vec<(&str, f64)> =
            scores.iter().map(|score| (score["label"].as_str().unwrap(), score["logprob"].as_f64().unwrap())).collect();
        assert_eq!(seen, labels.map(|label| (label, -(label.len() as f64))));
        assert_eq!(prompt["label"], "a");
    }
    assert!(answer["id"].as_str().unwrap().starts_with("score-"));
}

#[test]
fn the_id_of_a_request_is_the_client_s_and_is_in_answer_and_log() {
    let running = start();
    let ask = |header: &str| running.exchange(request("/v1/completions", header, r#"{"prompt":"a"}"#));
    let given = ask("X-Request-Id: mine-7\r\n");
    assert!(given.contains("\r\nx-request-id: mine-7\r\n"), "{given}");
    for header in ["", "X-Request-Id: two words\r\n", &format!("X-Request-Id: {}\r\n", "x".repeat(200))] {
        let made = ask(header);
        assert!(made.contains("\r\nx-request-id: req-"), "{made}");
    }
    let refused = running.exchange("GET\r\n\r\n");
    assert!(refused.contains("\r\nx-request-id: req-"), "{refused}");
    let log = running.log.clone();
    assert!(running.end());
    assert_eq!(log.lock().unwrap().iter().filter(|access| access.request_id == "mine-7").count(), 1);
}

#[test]
fn the_time_to_the_first_token_is_that_of_the_token_and_not_of_the_answer() {
    let running = start();
    let begun = std::time::Instant::now();
    let made = std::thread::scope(|scope| {
        let slow = scope.spawn(|| running.complete(r#"{"prompt":"token, then wait"}"#));
        assert_eq!(running.done(), "token was made");
        let made = begun.elapsed();
        (0..20).for_each(|_| drop(running.get("/health")));
        running.go.send(()).unwrap();
        assert_eq!(status(&slow.join().unwrap()), 200);
        made
    });
    let log = running.log.clone();
    assert!(running.end());
    let log = log.lock().unwrap();
    let answered = log.iter().find(|access| access.model.is_some()).unwrap();
    let first_token_ms = answered.first_token_ms.unwrap();
    assert!(first_token_ms <= made.as_secs_f64() * 1e3 && first_token_ms < answered.ms, "{made:?}, {answered:?}");
}
