//! The server: a thread that accepts connections, and its orderly shutdown.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

use super::body::Answer;
use super::routes;
use super::shared::{Hooks, Settings, Shared};
use super::socket::{Clock, Socket};
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
        let shared = Arc::new(Shared {
            bodies: Semaphore::new(settings.limits.bodies),
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

    /// Accepts no more connections, lets requests finish within the drain timeout, and then closes the queue.
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

/// Returns the result of the future that finishes first.
async fn first<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> Result<A, B> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    std::future::poll_fn(|cx| match (a.as_mut().poll(cx), b.as_mut().poll(cx)) {
        (Poll::Ready(a), _) => Poll::Ready(Ok(a)),
        (_, Poll::Ready(b)) => Poll::Ready(Err(b)),
        _ => Poll::Pending,
    })
    .await
}

/// Accepts connections until shutdown, then waits for open connections.
async fn serve(listener: TcpListener, shared: Arc<Shared>, wanted: &Notify) {
    let limits = shared.settings.limits;
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let permits = Arc::new(Semaphore::new(limits.connections));
    let (drains, draining) = watch::channel(false);
    let accept = async {
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, client)) => {
                    let connection = Connection { shared: Arc::clone(&shared), client, draining: draining.clone() };
                    tokio::spawn(connection.serve(stream, permit));
                }
                // Out of file descriptors, or the connection closed at once: other connections may work.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let _ = first(accept, wanted.notified()).await;
    drop(listener);
    shared.is_draining.store(true, Ordering::Relaxed);
    let _ = drains.send(true);
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX);
    // Connections that are still open are then dropped with the runtime.
    let _ = tokio::time::timeout(limits.drain_timeout, permits.acquire_many(all)).await;
}

/// An accepted connection.
struct Connection {
    shared: Arc<Shared>,
    client: SocketAddr,
    draining: watch::Receiver<bool>,
}

/// Counts a connection as open.
struct ConnectionGuard(Arc<Shared>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.metrics.disconnected();
    }
}

impl Connection {
    async fn serve(mut self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        let limits = self.shared.settings.limits;
        self.shared.metrics.connected();
        let _open = ConnectionGuard(Arc::clone(&self.shared));
        let _ = stream.set_nodelay(true);
        let routes = Routes { shared: Arc::clone(&self.shared), client: self.client };
        let mut connection = http1::Builder::new()
            .timer(Clock)
            .header_read_timeout(limits.head_timeout)
            .max_buf_size(limits.head_bytes)
            .max_headers(64)
            .serve_connection(Socket::new(stream, limits.write_timeout), routes);
        let is_over = first(std::future::poll_fn(|cx| Pin::new(&mut connection).poll_without_shutdown(cx)), async {
            self.draining.wait_for(|is_draining| *is_draining).await.is_ok()
        })
        .await;
        let ended = match is_over {
            Ok(ended) => ended,
            Err(_) => {
                Pin::new(&mut connection).graceful_shutdown();
                std::future::poll_fn(|cx| Pin::new(&mut connection).poll_without_shutdown(cx)).await
            }
        };
        let refusal = ended.err().and_then(|error| routes::refusal_of_head(&error));
        let socket = connection.into_parts().io;
        routes::reject_and_close(socket, refusal).await;
        drop(permit);
    }
}

/// The routes, for one connection.
struct Routes {
    shared: Arc<Shared>,
    client: SocketAddr,
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<Answer>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let answer = routes::answer(Arc::clone(&self.shared), self.client, request);
        Box::pin(async move { Ok(answer.await) })
    }
}
