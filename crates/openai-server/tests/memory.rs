//! Whatever clients send, the server holds no more than its limits state. Runs in its own process, because it measures the process's peak.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use openai_server::{Hooks, Limits, Queue, Server, Settings};

const BODY_BYTES: usize = 512 << 10;
const WAITING: usize = 64;

/// The most bytes that were ever resident.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn send(address: SocketAddr, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n";
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    stream
}

#[test]
fn requests_of_any_form_hold_no_more_than_the_limits_state() {
    let queue = Queue::new(WAITING);
    let limits = Limits { body_bytes: BODY_BYTES, drain_timeout: Duration::ZERO, ..Limits::default() };
    let settings = Settings { limits, ..Settings::new("127.0.0.1:0".parse().unwrap(), &["m"]) };
    let server = Server::start(settings, &queue, Hooks::default()).unwrap();
    let address = server.address();
    let nested = format!("{}0{}", "[".repeat(120), "]".repeat(120));
    let objects = format!("{}0{}", "{\"\":".repeat(120), "}".repeat(120));
    let before = peak();
    let prompt = format!("{{\"prompt\":\"{}\"}}", "x".repeat(limits.request.prompt_bytes));
    let waiting: Vec<TcpStream> = (0..WAITING).map(|_| send(address, &prompt)).collect();
    while queue.load().waiting < WAITING {
        std::thread::yield_now();
    }
    for name in ["metadata", "prompt", "messages", "tools", "stop", "colour"] {
        for part in ["0", "[0]", &nested, "{\"\":0}", &objects, "\"\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\\n\""] {
            let parts = vec![part; (BODY_BYTES - 64) / (part.len() + 1)].join(",");
            let mut answer = String::new();
            send(address, &format!("{{\"{name}\":[{parts}]}}")).read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 400 "), "{name}, {part}: {answer}");
        }
        let long = format!("{{\"{name}\":\"{}\"}}", "\\n".repeat(BODY_BYTES / 2 - 64));
        assert!(send(address, &long).read(&mut [0; 64]).unwrap() > 0);
    }
    let grown = peak() - before;
    // The test's own texts take twice a body.
    let most = limits.bytes(WAITING) + 2 * BODY_BYTES as u64;
    assert!(grown <= most, "{grown} bytes, at most {most} expected");
    drop(waiting);
    server.drain();
    assert!(server.join());
}
