use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kvferry_engine::endpoint;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::connection::Connection;
use crate::socket::PATIENCE;

/// Connections to one peer: at most so many at once, kept for a while when their operation ended.
#[derive(Debug)]
pub(super) struct Pool {
    host: String,
    port: u16,
    progress: Duration,
    /// One for each connection in use.
    pub(super) lanes: Semaphore,
    /// The one that was used last at the end.
    idle: Mutex<Vec<(Connection, Instant)>>,
    /// Whether a task closes what is idle for too long.
    retiring: AtomicBool,
}

/// How long a connection is kept without use, which is far less than a kvferry node does: it is not
/// given up by the other side just when it is used again.
const KEEP: Duration = Duration::from_secs(30);

/// A connection and whether it carried an operation before.
pub(super) struct Lent {
    pub(super) connection: Connection,
    pub(super) used: bool,
}

impl Pool {
    pub(super) fn new(host: String, port: u16, lanes: usize, progress: Duration) -> Self {
        let (lanes, retiring) = (Semaphore::new(lanes), AtomicBool::new(false));
        Self { host, port, progress, lanes, idle: Mutex::default(), retiring }
    }

    /// One that is idle and that the peer has not given up, else a new one.
    pub(super) async fn connect(&self) -> io::Result<Lent> {
        loop {
            let Some((connection, since)) = self.idle().pop() else { break };
            // Between operations there is nothing to read, not even an end. Asked of the system, not
            // of the runtime, which may not know yet.
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let peeked = rustix::net::recv(&connection.stream, &mut [0][..], flags);
            if peeked == Err(Errno::AGAIN) && since.elapsed() < KEEP {
                return Ok(Lent { connection, used: true });
            }
        }
        self.connect_new().await
    }

    /// A new one.
    pub(super) async fn connect_new(&self) -> io::Result<Lent> {
        let stream = endpoint::connect((self.host.as_str(), self.port), PATIENCE).await?;
        Ok(Lent { connection: Connection::new(stream, self.progress), used: false })
    }

    /// Takes back one whose operation ended well.
    pub(super) fn keep(self: &Arc<Self>, connection: Connection) {
        let mut idle = self.idle();
        idle.push((connection, Instant::now()));
        if !self.retiring.swap(true, Ordering::Relaxed) {
            tokio::spawn(retire(Arc::downgrade(self)));
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Connection, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Closes connections that nobody used for a while, until there is none.
async fn retire(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(KEEP).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.idle();
        idle.retain(|(_, since)| since.elapsed() < KEEP);
        if idle.is_empty() {
            // Under the lock, under which the next task is started.
            pool.retiring.store(false, Ordering::Relaxed);
            return;
        }
    }
}
