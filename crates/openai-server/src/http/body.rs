//! Bodies: of requests, read whole within limits; and of answers, whole or as a stream of events.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Sleep;

use super::connections::ConnectionSlot;
use super::record::Record;
use crate::error::ApiError;
use crate::event::Event;
use crate::response::ResponseMetadata;

/// Reads the body of a request. Its memory counts as taken until [`ConnectionSlot::body_is_over`].
pub(super) async fn read(
    mut body: Incoming,
    place: &ConnectionSlot,
    most: usize,
    timeout: Duration,
) -> Result<Vec<u8>, ApiError> {
    let too_large = || ApiError::new(413, "body_too_large", format!("the body is larger than {most} bytes"));
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let read = async {
        let mut bytes = Vec::new();
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let frame = frame
                .map_err(|error| ApiError::new(400, "incomplete_body", format!("the body ended early: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let whole = bytes.len() + data.len();
            if whole > most {
                return Err(too_large());
            }
            if whole > bytes.capacity() {
                let more = whole.max(bytes.capacity() * 2).min(most) - bytes.capacity();
                place.room_in_body(more).await;
                bytes.reserve_exact(bytes.capacity() + more - bytes.len());
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    let late = |message: String| ApiError::new(408, "body_timeout", message);
    let in_time = first(first(read, place.body_ended()), tokio::time::sleep(timeout));
    match in_time.await {
        Ok(Ok(read)) => read,
        Ok(Err(())) => Err(late("the body came slowly, while others needed its memory".to_owned())),
        Err(()) => Err(late(format!("the body was not whole within {} s", timeout.as_secs_f64()))),
    }
}

/// Returns the result of the future that finishes first.
pub(super) async fn first<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> Result<A, B> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    std::future::poll_fn(|cx| match (a.as_mut().poll(cx), b.as_mut().poll(cx)) {
        (Poll::Ready(a), _) => Poll::Ready(Ok(a)),
        (_, Poll::Ready(b)) => Poll::Ready(Err(b)),
        _ => Poll::Pending,
    })
    .await
}

/// The body of an answer.
pub(super) enum ResponseBody {
    /// A whole answer, and the record of its request.
    Whole(Option<Bytes>, #[expect(dead_code, reason = "it is handed in when the answer was sent")] Box<Record>),
    /// Events as they arrive.
    Events(Box<Events>),
}

impl ResponseBody {
    /// An answer of this text.
    pub fn whole(text: String, record: Record) -> Self {
        ResponseBody::Whole(Some(Bytes::from(text)), Box::new(record))
    }
}

/// Answers that are streamed.
pub(super) struct Events {
    pub form: ResponseMetadata,
    pub events: UnboundedReceiver<(usize, Event)>,
    /// Number of incomplete answers.
    pub left: usize,
    pub record: Record,
    /// The text at the beginning.
    pub first: Option<String>,
    pub deadline: Pin<Box<Sleep>>,
    pub timeout: Duration,
}

impl Events {
    /// The last text of the stream.
    fn last(&mut self, failed: Option<ApiError>) -> String {
        self.left = 0;
        self.events.close();
        let error = failed.map(|error| {
            self.record.access.error = Some(error.code);
            self.form.event(0, &Event::Failed(error)).unwrap_or_default()
        });
        self.record.access.cancelled = false;
        error.unwrap_or_default() + &self.form.end(self.record.usage)
    }

    fn next(&mut self, cx: &mut Context<'_>) -> Poll<Option<String>> {
        if let Some(text) = self.first.take().filter(|text| !text.is_empty()) {
            return Poll::Ready(Some(text));
        }
        if self.left == 0 {
            return Poll::Ready(None);
        }
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(self.last(Some(too_late(self.timeout)))));
        }
        loop {
            let news = match self.events.poll_recv(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(news) => news,
            };
            let Some((first_choice, event)) = news else {
                return Poll::Ready(Some(self.last(Some(gone()))));
            };
            if let Event::Failed(error) = event {
                return Poll::Ready(Some(self.last(Some(error))));
            }
            self.record.count(&event);
            self.record.delivery.taken(&event);
            let text = self.form.event(first_choice, &event);
            if matches!(event, Event::Finished { .. }) {
                self.left -= 1;
                if self.left == 0 {
                    return Poll::Ready(Some(text.unwrap_or_default() + &self.last(None)));
                }
            }
            if text.is_some() {
                return Poll::Ready(text);
            }
        }
    }
}

/// The error of an answer that missed its deadline.
pub(super) fn too_late(timeout: Duration) -> ApiError {
    ApiError::new(504, "deadline", format!("the answer was not whole within {} s", timeout.as_secs_f64()))
}

/// The error of an answer that the engine dropped.
pub(super) fn gone() -> ApiError {
    ApiError::internal("the answer was given up")
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match &mut *self {
            ResponseBody::Whole(bytes, _) => Poll::Ready(bytes.take()),
            ResponseBody::Events(events) => events.next(cx).map(|text| text.map(Bytes::from)),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, ResponseBody::Whole(None, _))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(bytes, _) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            ResponseBody::Events(_) => SizeHint::default(),
        }
    }
}
