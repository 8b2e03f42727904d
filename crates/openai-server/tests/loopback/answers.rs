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
    assert!(lines[0]["first_token_ms"].is_number());
    assert_eq!((&lines[1]["status"], &lines[1]["error"]), (&json!(400), &json!("invalid_value")));
    assert!(!format!("{lines:?}").contains("secret"));
}
