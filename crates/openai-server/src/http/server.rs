//! The server: a thread that accepts connections, and its orderly shutdown.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

use super::body::{ResponseBody, first};
use super::connections::{ConnectionSlot, Connections};
use super::record::Record;
use super::shared::{Hooks, Settings, Shared};
use super::socket::{Clock, Socket};
use super::{reply, routes};
use crate::delivery::Untaken;
use crate::metrics::Metrics;
use crate::queue::Queue;

/// A running server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    drain: Arc<Drain>,
    thread: Option<JoinHandle<()>>,
}

/// The request to shut down.
#[derive(Debug, Default)]
struct Drain {
    wanted: Notify,
}

/// Shuts a server down, from another thread.
#[derive(Clone, Debug)]
pub struct Drainer(Arc<Drain>);

impl Drainer {
    /// The same as [`Server::drain`].
    pub fn drain(&self) {
        self.0.wanted.notify_one();
    }
}

impl Server {
    /// Binds the address and starts serving.
    ///
    /// # Errors
    /// The address cannot be bound, or the system refuses a thread.
    pub fn start(settings: Settings, queue: &Arc<Queue>, hooks: Hooks) -> io::Result<Server> {
        let listener = TcpListener::bind(settings.listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let begun = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| u64::try_from(time.as_micros()).unwrap_or(0));
        let limits = settings.limits;
        let shared = Arc::new(Shared {
            connections: Connections::new(limits.connections, limits.bodies * limits.body_bytes),
            untaken: Untaken::new(limits.answer_bytes, limits.connections),
            is_loopback: address.ip().is_loopback(),
            settings,
            queue: Arc::clone(queue),
            metrics: Metrics::default(),
            log: hooks.log,
            gauges: hooks.gauges,
            is_draining: AtomicBool::new(false),
            number: AtomicU64::new(0),
            begun,
        });
        let drain = Arc::new(Drain::default());
        let of_thread = Arc::clone(&drain);
        let thread = std::thread::Builder::new().name("http".into()).stack_size(1 << 20).spawn(move || {
            // However this thread ends, the engine must not wait for further jobs.
            let closes = CloseOnDrop(Arc::clone(&shared.queue));
            runtime.block_on(serve(listener, shared, &of_thread.wanted));
            drop(closes);
        })?;
        Ok(Server { address, drain, thread: Some(thread) })
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more requests for a model, lets accepted ones finish within the drain timeout, and then closes the queue.
    pub fn drain(&self) {
        self.drainer().drain();
    }

    /// Returns a handle to drain the server from another thread.
    pub fn drainer(&self) -> Drainer {
        Drainer(Arc::clone(&self.drain))
    }

    /// Waits for the shutdown that [`Server::drain`] begins. False if the thread failed.
    pub fn join(mut self) -> bool {
        self.thread.take().is_none_or(|thread| thread.join().is_ok())
    }
}

struct CloseOnDrop(Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Accepts connections until shutdown, and then until accepted requests are answered: probes see that the server is about to end.
async fn serve(listener: TcpListener, shared: Arc<Shared>, wanted: &Notify) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let (drains, draining) = watch::channel(false);
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((stream, client)) => {
                    let place = Arc::new(shared.connections.enter(client.ip()).await);
                    let connection =
                        Connection { shared: Arc::clone(&shared), client, place, draining: draining.clone() };
                    tokio::spawn(connection.serve(stream));
                }
                // Out of file descriptors, or the connection closed at once: other connections may work.
                Err(_) => {
                    shared.connections.make_room();
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    };
    let answered = async {
        wanted.notified().await;
        shared.is_draining.store(true, Ordering::Relaxed);
        let _ = drains.send(true);
        // Connections that are still open are then dropped with the runtime.
        let _ = tokio::time::timeout(shared.settings.limits.drain_timeout, shared.connections.idle()).await;
    };
    let _ = first(accept, answered).await;
}

/// An accepted connection.
struct Connection {
    shared: Arc<Shared>,
    client: SocketAddr,
    place: Arc<ConnectionSlot>,
    draining: watch::Receiver<bool>,
}

impl Connection {
    /// Serves the connection until it ends, or has to give way.
    async fn serve(self, stream: TcpStream) {
        let place = Arc::clone(&self.place);
        let _ = first(self.run(stream), place.ended()).await;
    }

    async fn run(mut self, stream: TcpStream) {
        let limits = self.shared.settings.limits;
        self.shared.metrics.connected();
        let _ = stream.set_nodelay(true);
        let (shared, client, place) = (Arc::clone(&self.shared), self.client.to_string(), Arc::clone(&self.place));
        let routes = Routes { shared, client: client.clone(), place };
        let is_draining = *self.draining.borrow();
        let mut connection = http1::Builder::new()
            .timer(Clock)
            .header_read_timeout(limits.head_timeout)
            .max_buf_size(limits.head_bytes)
            .max_headers(64)
            .keep_alive(!is_draining)
            .serve_connection(Socket::new(stream, limits.write_timeout, Arc::clone(&self.place)), routes);
        let is_over = first(std::future::poll_fn(|cx| Pin::new(&mut connection).poll_without_shutdown(cx)), async {
            // A connection of the time after the signal is for one request.
            match is_draining {
                true => std::future::pending().await,
                false => self.draining.wait_for(|is_draining| *is_draining).await.is_ok(),
            }
        })
        .await;
        let ended = match is_over {
            Ok(ended) => ended,
            Err(_) => {
                Pin::new(&mut connection).graceful_shutdown();
                std::future::poll_fn(|cx| Pin::new(&mut connection).poll_without_shutdown(cx)).await
            }
        };
        let http1::Parts { io: socket, read_buf, .. } = connection.into_parts();
        // A connection that was only idle is closed without a word.
        let fault = ended.err().filter(|error| !(error.is_timeout() && read_buf.is_empty()));
        let refusal = fault.and_then(|error| reply::refusal_of_head(&error));
        let refusal = refusal.map(|error| (error, Record::new(&self.shared, &self.place, client)));
        reply::reject_and_close(socket, refusal).await;
    }
}

/// The routes, for one connection.
struct Routes {
    shared: Arc<Shared>,
    client: String,
    place: Arc<ConnectionSlot>,
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<ResponseBody>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.place.works();
        let record = Record::new(&self.shared, &self.place, self.client.clone());
        let answer = routes::answer(Arc::clone(&self.shared), record, request);
        Box::pin(async move { Ok(answer.await) })
    }
}
