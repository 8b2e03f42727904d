//! After many bad connections, all memory and files are released. Runs in its own process, because it counts the
//! process's files.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use openai_server::{Event, Finish, Hooks, Queue, Server, Settings};

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Bytes of anonymous memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn bad_connections_leave_neither_files_nor_memory_behind() {
    let files = open_files();
    let queue = Queue::new(8);
    let server =
        Server::start(Settings::new("127.0.0.1:0".parse().unwrap(), &["m"]), &queue, Hooks::default()).unwrap();
    let engine = std::thread::spawn(move || {
        while let Some(job) = queue.next() {
            job.send(Event::Text { choice: 0, text: "x".repeat(1000), tokens: 1, logprobs: Vec::new() });
            job.send(Event::Finished { choice: 0, reason: Finish::Stop });
        }
    });
    let address = server.address();
    let body = format!("{{\"prompt\":\"{}\"}}", "x".repeat(10_000));
    let ask = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let bad = |round: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        let bytes = ask.as_bytes();
        // Malformed, cut off, cut off and half closed, closed without reading, and well-formed.
        let (bytes, half_closes, reads) = match round % 5 {
            0 => (&b"\0\0 nonsense\r\n\r\n"[..], false, true),
            1 => (&bytes[..bytes.len() / 2], false, false),
            2 => (&bytes[..bytes.len() / 2], true, true),
            3 => (bytes, false, false),
            _ => (bytes, true, true),
        };
        let _ = stream.write_all(bytes);
        if half_closes {
            stream.shutdown(Shutdown::Write).unwrap();
        }
        if reads {
            let _ = stream.read_to_end(&mut Vec::new());
        }
    };
    (0..200).for_each(bad);
    let before = resident();
    (0..1000).for_each(bad);
    let after = resident();
    assert!(after < before + (8 << 20), "{before} bytes before, {after} after");
    server.drain();
    assert!(server.join());
    engine.join().unwrap();
    assert_eq!(open_files(), files);
}
