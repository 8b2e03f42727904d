//! A server of this program: whether it takes requests. A container or a supervisor asks this where no HTTP client is at hand.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::finding::Finding;

/// The time to connect, and for the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The findings about the server at this address.
pub fn findings(address: SocketAddr) -> Vec<Finding> {
    let finding = match status(address) {
        Ok(status) if status.split(' ').nth(1) == Some("200") => {
            Finding::ok("server", format!("{address} takes requests"))
        }
        Ok(status) => Finding::failure("server", format!("{address} takes no requests: {}", status.escape_debug()))
            .remedy("it is loading, ending, or no server of this program: see its standard error"),
        Err(error) => Finding::failure("server", format!("{address} does not answer: {error}"))
            .remedy(format!("train_low_mem serve MODEL --listen {address}")),
    };
    vec![finding.fact("address", address.to_string())]
}

/// Asks whether the server is ready. Returns the first line of its answer.
fn status(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // A server on loopback takes requests for its own address. The request goes in one write: a server that answers after its first
    // line and closes would otherwise reset the connection before the answer is read.
    let request = format!("GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    // More than the first line of a stranger's answer is not wanted.
    let (mut answer, started) = (Vec::new(), Instant::now());
    let mut part = [0; 128];
    while answer.len() < part.len() && !answer.contains(&b'\n') {
        let left = PATIENCE.checked_sub(started.elapsed()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        match stream.read(&mut part)? {
            0 => break,
            length => answer.extend_from_slice(&part[..length]),
        }
    }
    let text = String::from_utf8_lossy(&answer);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
