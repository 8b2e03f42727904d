//! A connection's socket and clock for hyper, with a time limit for writes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::rt::{Read, ReadBufCursor, Timer, Write};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::connections::ConnectionSlot;

/// Bytes per read.
const READ_BYTES: usize = 8 << 10;

/// The most bytes that are read and dropped after the end of a connection, and the time for them.
const LINGER_BYTES: usize = 1 << 20;
const LINGER: Duration = Duration::from_secs(1);

/// A socket whose writes fail if the client accepts nothing for too long.
pub(super) struct Socket {
    stream: TcpStream,
    write_timeout: Duration,
    /// The timer of a write that waits.
    waits: Option<Pin<Box<Sleep>>>,
    place: Arc<ConnectionSlot>,
}

impl Socket {
    pub fn new(stream: TcpStream, write_timeout: Duration, place: Arc<ConnectionSlot>) -> Self {
        Socket { stream, write_timeout, waits: None, place }
    }

    /// Returns `written`, or an error if the write has waited for too long.
    fn in_time<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.waits.take().is_some() {
                self.place.stalls(false);
            }
            return written;
        }
        if self.waits.is_none() {
            self.place.stalls(true);
        }
        let timeout = self.write_timeout;
        let waits = self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl Read for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; READ_BYTES];
        let most = buffer.remaining().min(READ_BYTES);
        let mut read = ReadBuf::new(&mut bytes[..most]);
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut read))?;
        buffer.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let bytes = match empty_refusal(bytes) {
            Some(0) => return Poll::Ready(Ok(bytes.len())),
            Some(before) => &bytes[..before],
            None => bytes,
        };
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.in_time(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The start of hyper's own refusal of a head, which ends the connection. It has no body, while all our errors have one. It is
/// not sent; the connection ends with an error in OpenAI's form instead.
fn empty_refusal(bytes: &[u8]) -> Option<usize> {
    const BEGINS: &[u8] = b"HTTP/1.1 4";
    const EMPTY: &[u8] = b"\r\ncontent-length: 0\r\n";
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    let begins = bytes.windows(BEGINS.len()).rposition(|window| window == BEGINS)?;
    bytes[begins..].windows(EMPTY.len()).any(|window| window == EMPTY).then_some(begins)
}

/// Writes all bytes, and closes the connection. Until the client closes it, too, what it still sends is read for a moment: a close with
/// unread bytes would be a reset, which may overtake the answer.
pub(super) async fn write_and_close(mut socket: Socket, mut bytes: &[u8]) -> io::Result<()> {
    socket.place.waits();
    while !bytes.is_empty() {
        let written = std::future::poll_fn(|cx| Write::poll_write(Pin::new(&mut socket), cx, bytes)).await?;
        bytes = &bytes[written..];
    }
    std::future::poll_fn(|cx| Write::poll_shutdown(Pin::new(&mut socket), cx)).await?;
    let mut unread = [0; READ_BYTES];
    let rest = async {
        let mut left = LINGER_BYTES;
        while left > 0 {
            let mut read = ReadBuf::new(&mut unread);
            std::future::poll_fn(|cx| Pin::new(&mut socket.stream).poll_read(cx, &mut read)).await?;
            if read.filled().is_empty() {
                break;
            }
            left = left.saturating_sub(read.filled().len());
        }
        Ok(())
    };
    tokio::time::timeout(LINGER, rest).await.unwrap_or(Ok(()))
}

/// tokio's clock, for hyper.
pub(super) struct Clock;

struct Alarm(Pin<Box<Sleep>>);

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

impl hyper::rt::Sleep for Alarm {}

impl Timer for Clock {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(Alarm(Box::pin(tokio::time::sleep(duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(Alarm(Box::pin(tokio::time::sleep_until(deadline.into()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_refusal_is_found_behind_an_answer_and_no_other_text_is_one() {
        let refusal = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        let check = |text: String, expected| assert_eq!(empty_refusal(text.as_bytes()), expected, "{text}");
        check(refusal.to_owned(), Some(0));
        check(format!("{answer}{refusal}"), Some(answer.len()));
        check(answer.to_owned(), None);
        check("HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}".to_owned(), None);
        check("HTTP/1.1 100 Continue\r\n\r\n".to_owned(), None);
    }
}
